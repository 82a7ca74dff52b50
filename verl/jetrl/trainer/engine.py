"""verl's FSDP2 engine with FP8 linear layers, selected by ``fsdp_config.precision_flow``.

With ``precision_flow.linear=bf16`` it is verl's engine unchanged, so all arms of a recipe run through one class.  With
``fp8`` the model computes with the shared decoder on the weight arena; the parameters are its FP32 masters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine.utils import detach_tree
from verl.workers.utils.padding import no_padding_2_padding

from verl.jetrl import checkpoints
from verl.jetrl.arena import SLOTS, Arena, layout_of, rows_of, scale_of
from verl.jetrl.model.decoder import Decoder
from verl.jetrl.precision import PrecisionFlow
from verl.jetrl.trainer import attention, flash
from verl.jetrl.trainer.decoder import share_decoder
from verl.jetrl.trainer.log_probs import log_probs
from verl.jetrl.trainer.masters import Masters, shard_parameters
from verl.jetrl.trainer.staging import batch_to_device, response_rows, values_to_device
from verl.jetrl.vocabulary import padding_mass
from verl.jetrl.weights import digests, fused_digests
from verl.jetrl.window import Window


@dataclass(frozen=True)
class WrittenWeights:
    """What the FP8 engine hands to the rollout instead of a stream of tensors: the arena's version, and with arena=sharded the
    window that streams it."""

    version: int
    window: Window | None = None


class JetRLEngine(FSDPEngineWithLMHead):
    """FSDP2 actor or reference policy whose linear layers run in the configured precision."""

    @property
    def flow(self) -> PrecisionFlow:
        return getattr(self.engine_config, "precision_flow", None) or PrecisionFlow()

    def _build_module(self):
        if self.flow.fp8 and (self.model_config.lora_rank > 0 or self.model_config.lora_adapter_path is not None):
            raise ValueError("precision_flow.linear=fp8 does not support LoRA: set actor_rollout_ref.model.lora_rank=0")
        module = super()._build_module()
        if self.flow.fp8:
            if self.flow.exact:
                module.config._attn_implementation = attention.EXACT if get_device_name() == "cpu" else flash.NAME
            self.decoder = Decoder(module.config)
            share_decoder(module, self.decoder, with_head=False)
        return module

    def _build_fsdp_module(self, module):
        if not self.flow.fp8:
            return super()._build_fsdp_module(module)
        config = self.engine_config
        self._autocast_dtype, self.scaler = torch.bfloat16, None
        device = _device()
        shard_parameters(module, self.device_mesh, device)
        # FSDP2 manages nothing here; the wrapper is what verl's clipping and checkpoints look for.
        fully_shard(module, mesh=self.device_mesh, ignored_params=set(module.parameters()))
        if config.forward_only:
            arena = Arena.private(layout_of(module.config), device)
        elif config.arena == "sharded":
            layout = layout_of(module.config, slots=SLOTS)
            home = rows_of(layout, self.device_mesh.size(self.device_mesh.ndim - 1))  # refuses before anything is allocated
            arena = Arena.create(layout, device, self.rank, home.nbytes)
        else:
            arena = Arena.create(layout_of(module.config, config.rollout_tensor_parallel), device, self.rank)
        self.decoder.bind(arena)
        deferred = config.use_no_sync_for_gradient_accumulation
        self.masters = Masters(module, self.decoder, arena, config.resident_transposed, deferred)
        self.masters.write()
        if config.forward_only:
            module.to("cpu")  # the masters of a reference policy are not read again
        return module

    # --- training -------------------------------------------------------------------------------------------------

    def optimizer_zero_grad(self):
        if not self.flow.fp8:
            return super().optimizer_zero_grad()
        # verl calls this after the step too: what is left until the next one must not be there during the rollout.
        self.masters.drop_grads()

    def forward_backward_batch(self, data, loss_function, forward_only=False):
        if self.flow.fp8 and not forward_only:
            self.masters.allocate_grads()
        return super().forward_backward_batch(data, loss_function, forward_only)

    def forward_step(self, micro_batch, loss_function, forward_only):
        step = self.staged_step if self.flow.fp8 else super().forward_step
        return step(micro_batch, loss_function, forward_only)

    def staged_step(self, micro_batch: TensorDict, loss_function, forward_only: bool):
        """What verl's ``forward_step`` does, with the host ahead of the GPU: inputs are prepared on the host, their copies are
        queued, and a pass without a loss reads nothing back."""
        assert loss_function is not None or forward_only, "a backward pass needs a loss"
        device = _device()
        inputs, output_args = self.prepare_model_inputs(micro_batch=micro_batch)
        if self.module.config._attn_implementation == flash.NAME:
            inputs["position_ids"] = flash.stage_positions(inputs["position_ids"], device)
        inputs, output_args = values_to_device(inputs, device), values_to_device(output_args, device)
        micro_batch = batch_to_device(micro_batch, device)
        loss, metrics = None, {}
        with torch.autocast(device.type, self._autocast_dtype):
            model_output = self.prepare_model_outputs(
                output=self.module(**inputs, use_cache=False),
                output_args=output_args,
                micro_batch=micro_batch,
                logits_processor_func=loss_function,
            )
            if loss_function is not None:
                group = self.get_data_parallel_group()
                loss, metrics = loss_function(model_output=model_output, data=micro_batch, dp_group=group)
        value = 1.0 if loss is None else loss.detach().item()  # verl's, where there is none
        return loss, {"model_output": detach_tree(model_output), "loss": value, "metrics": metrics}

    def optimizer_step(self):
        if not self.flow.fp8:
            return super().optimizer_step()
        self.masters.assign_grads()
        grad_norm = super().optimizer_step()
        self.masters.drop_grads()
        self.masters.write()
        return grad_norm

    def load_checkpoint(self, local_path, *args, **kwargs):
        saved, here = checkpoints.world_size_of(Path(local_path)), torch.distributed.get_world_size()
        if saved not in (None, here):
            raise ValueError(
                f"{local_path} was saved by {saved} processes, this run has {here}: python -m verl.jetrl.checkpoints reshard "
                f"{Path(local_path).parent} --world-size {here}"
            )
        super().load_checkpoint(local_path, *args, **kwargs)
        if self.flow.fp8:
            self.masters.write()

    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None, **kwargs):
        manager, folder = self.checkpoint_manager, Path(local_path).parent.parent
        if not manager.previous_saved_paths:
            # verl counts, and prunes, what it saved since the start; a run's earlier starts saved too.  Not done on loading:
            # trainer.resume_from_path may be another run's, and nothing of that is to go.
            earlier = [step / "actor" for number, step in checkpoints.whole(folder).items() if number < global_step]
            manager.previous_saved_paths = [str(path) for path in earlier]
        super().save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep, **kwargs)

    # --- log-probs ------------------------------------------------------------------------------------------------

    def prepare_model_inputs(self, micro_batch: TensorDict):
        inputs, output_args = super().prepare_model_inputs(micro_batch)
        if self.flow.fp8:
            output_args["response_rows"] = response_rows(micro_batch)
        return inputs, output_args

    def prepare_model_outputs(self, output, output_args, micro_batch, logits_processor_func):
        """Log-probs of the micro-batch; in FP8 by the rollout's arithmetic, the vocabulary's padding masked as there, and of
        responses alone where there are any.

        verl masks ids past ``len(tokenizer)`` in the rollout only.  In the stock arms it stays so, and
        :meth:`take_padding_abs_dlogp` reports what that costs.
        """
        vocabulary = len(self.model_config.tokenizer)
        if self.flow.fp8:
            return super().prepare_model_outputs(*self._fused(output, output_args, micro_batch), logits_processor_func)
        logits = output.logits  # None with model.use_fused_kernels
        outputs = super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        if not torch.is_grad_enabled() and logits is not None and logits.shape[-1] > vocabulary:
            self._note_padding(logits, output_args, outputs["log_probs"], micro_batch, vocabulary)
        return outputs

    def _fused(self, output, output_args: dict, micro_batch: TensorDict) -> tuple[SimpleNamespace, dict, TensorDict]:
        """The arguments of verl's ``prepare_model_outputs`` for a model that gives log-probs instead of logits."""
        if not tu.get_non_tensor_data(data=micro_batch, key="use_remove_padding", default=True):
            raise ValueError(
                "precision_flow.linear=fp8 trains on packed sequences: actor_rollout_ref.model.use_remove_padding=true"
            )
        hidden = output.logits.squeeze(0)
        chosen, entropy = log_probs(
            hidden,
            self.decoder.lm_head,
            output_args["input_ids_rmpad_rolled"],
            output_args["temperature_rmpad"].clamp(min=1e-8),
            len(self.model_config.tokenizer),
            tu.get_non_tensor_data(data=micro_batch, key="calculate_entropy", default=False),
            output_args.get("response_rows"),
        )
        fused = micro_batch.copy()
        tu.assign_non_tensor(fused, use_fused_kernels=True)
        return SimpleNamespace(log_probs=chosen[None], entropy=None if entropy is None else entropy[None]), output_args, fused

    def _note_padding(
        self, logits: Tensor, output_args: dict, log_probs: Tensor, micro_batch: TensorDict, vocabulary: int
    ) -> None:
        temperature = micro_batch["temperature"]
        sampled = {"prompts", "responses"} <= set(micro_batch.keys())  # fine-tuning data is not
        if not sampled or isinstance(temperature, Tensor) or logits.shape[0] != 1 or self.use_ulysses_sp:
            return  # not one packed row of whole sampled sequences: nothing is reported
        log_probs_T = log_probs.values()
        T = len(log_probs_T)
        logits_TV, ids_T = logits[0, :T], output_args["input_ids_rmpad_rolled"][:T]
        few = torch.cat((logits_TV.gather(-1, ids_T[:, None]), logits_TV[:, vocabulary:]), -1)
        few /= few.new_full((), temperature)  # as verl divides: the temperature in the logits' dtype
        cost_T = padding_mass(few[:, 1:], few[:, 0], log_probs_T).abs()
        total, tokens = getattr(self, "_padding", (0.0, 0))
        responses = no_padding_2_padding(cost_T, micro_batch)
        self._padding = (total + responses.sum().item(), tokens + micro_batch["responses"].values().shape[0])

    def take_padding_abs_dlogp(self) -> float:
        """Mean |log(1 - probability of the padding ids)| over the response tokens of the log-prob passes since the last call:
        the part of the mismatch that the unmasked vocabulary makes.  0 where it is masked or not padded."""
        total, tokens = getattr(self, "_padding", (0.0, 0))
        self._padding = (0.0, 0)
        return total / max(tokens, 1)

    # --- what the rollout holds -----------------------------------------------------------------------------------

    def get_per_tensor_param(self, **kwargs):
        if not self.flow.fp8:
            return super().get_per_tensor_param(**kwargs)
        return WrittenWeights(self.masters.arena.control.version, self.masters.window), None

    def rollout_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight as the rollout must hold it, from the masters: FP8 bytes and scales under the arena's fused names, or
        BF16 under the model's."""
        if not self.flow.fp8:
            params, _ = super().get_per_tensor_param()
            yield from ((name, weight.to(torch.bfloat16)) for name, weight in params)
            return
        for entry in self.masters.arena.layout.weights:
            values, scales = self.masters.quantized(entry)
            yield entry.name, values
            if scales is not None:
                yield scale_of(entry), scales

    def weight_digests(self) -> dict[str, str]:
        """Hash of every tensor as the rollout must hold it, under the rollout's names."""
        if not self.flow.fp8:
            return fused_digests(self.rollout_weights())
        return digests(self.rollout_weights())

    def describe_precision(self) -> list[dict[str, str]]:
        """One row per weight-bearing operator of the trainer's module tree, see :mod:`verl.jetrl.flow_check`."""
        from verl.jetrl.flow_check import describe_trainer

        return describe_trainer(self.decoder if self.flow.fp8 else self.module)


def _device() -> torch.device:
    """Where this process computes."""
    return torch.device("cpu") if get_device_name() == "cpu" else torch.device(get_device_name(), get_device_id())


def register() -> None:
    """Makes verl pick this engine for ``strategy=fsdp2`` on the CPU and on NVIDIA GPUs."""
    attention.register()
    flash.register()
    registered = EngineRegistry._engines["language_model"]["fsdp2"]
    for key in ("cpu", ("cuda", "nvidia")):
        registered[key] = JetRLEngine
