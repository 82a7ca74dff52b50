"""verl's FSDP2 engine with FP8 linear layers, selected by ``fsdp_config.precision_flow``.

With ``precision_flow.linear=bf16`` it is verl's engine unchanged, so all arms of a recipe run through one class.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.padding import no_padding_2_padding

from verl.jetrl.fp8 import ops
from verl.jetrl.fp8.linear import Fp8Linear
from verl.jetrl.precision import SUPPORTED_MODELS, PrecisionFlow
from verl.jetrl.trainer import attention
from verl.jetrl.vocabulary import mask_padding, padding_mass

SCALE_SUFFIX = "_scale_inv"


def install_fp8_linears(module: nn.Module, flow: PrecisionFlow) -> int:
    """Turns the linear layers that ``flow`` covers into :class:`Fp8Linear`, in place; returns how many.

    Parameters, their names and dtypes stay, so FSDP2, optimizer and checkpoints see an ordinary model.
    """
    model_type = getattr(module.config, "model_type", None)
    if model_type not in SUPPORTED_MODELS:
        raise ValueError(
            f"precision_flow.linear=fp8 supports the model types {', '.join(SUPPORTED_MODELS)}; this model is "
            f"{model_type!r}. Use the bf16 arm, or set precision_flow.linear=bf16."
        )
    count = 0
    for name, layer in module.named_modules():
        if type(layer) is nn.Linear and flow.covers(name):
            layer.__class__ = Fp8Linear
            count += 1
    expected = module.config.num_hidden_layers * len(flow.modules)
    if count != expected:
        raise RuntimeError(f"{count} linear layers became FP8 where {expected} were expected: the FP8 path is incomplete")
    return count


def quantized_stream(params: Iterator[tuple[str, Tensor]], flow: PrecisionFlow) -> Iterator[tuple[str, Tensor]]:
    """The weight stream to the rollout: FP8 bytes and scales of covered layers, BF16 of the rest.

    The weight is rounded to BF16 first and quantized by the quantizer that the trainer's own forward uses: the rollout
    receives the very bytes that the trainer multiplies with.
    """
    for name, weight in params:
        layer, _, kind = name.rpartition(".")
        weight = weight.to(torch.bfloat16)
        if kind == "weight" and flow.covers(layer):
            q, s = ops.quantize_blocks(weight)
            yield name, q
            yield name + SCALE_SUFFIX, s
        else:
            yield name, weight


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
            install_fp8_linears(module, self.flow)
        return module

    def prepare_model_outputs(self, output, output_args, micro_batch, logits_processor_func):
        """Log-probs of the micro-batch; the FP8 arm masks the vocabulary's padding as the rollout does.

        verl masks ids past ``len(tokenizer)`` in the rollout only.  In the stock arms it stays so, and
        :meth:`take_padding_abs_dlogp` reports what that costs.
        """
        vocabulary = len(self.model_config.tokenizer)
        if self.flow.fp8:
            output.logits = mask_padding(output.logits, vocabulary)
        elif not torch.is_grad_enabled() and output.logits.shape[-1] > vocabulary:
            self._note_padding(output.logits, micro_batch, vocabulary)
        return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)

    def _note_padding(self, logits: Tensor, micro_batch: TensorDict, vocabulary: int) -> None:
        temperature = micro_batch["temperature"]
        if isinstance(temperature, Tensor) or logits.shape[0] != 1 or self.use_ulysses_sp:
            return  # not one packed row of whole sequences: nothing is reported
        cost_T = padding_mass(logits.squeeze(0), vocabulary, float(temperature)).abs()
        total, tokens = getattr(self, "_padding", (0.0, 0))
        responses = no_padding_2_padding(cost_T[: micro_batch["input_ids"].values().shape[0]], micro_batch)
        self._padding = (total + responses.sum().item(), tokens + micro_batch["responses"].values().shape[0])

    def take_padding_abs_dlogp(self) -> float:
        """Mean |log(1 - probability of the padding ids)| over the response tokens of the log-prob passes since the last call:
        the part of the mismatch that the unmasked vocabulary makes.  0 where it is masked or not padded."""
        total, tokens = getattr(self, "_padding", (0.0, 0))
        self._padding = (0.0, 0)
        return total / max(tokens, 1)

    def get_per_tensor_param(self, **kwargs):
        params, peft_config = super().get_per_tensor_param(**kwargs)
        if not self.flow.fp8:
            return params, peft_config
        return quantized_stream(params, self.flow), peft_config

    def rollout_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight as the rollout must hold it: FP8 bytes and scales, or BF16."""
        params, _ = super().get_per_tensor_param()
        return quantized_stream(params, self.flow)

    def describe_precision(self) -> list[dict[str, str]]:
        """One row per weight-bearing operator of the trainer's module tree, see :mod:`verl.jetrl.flow_check`."""
        from verl.jetrl.flow_check import describe_trainer

        return describe_trainer(self.module)


def register() -> None:
    """Makes verl pick this engine for ``strategy=fsdp2`` on the CPU and on NVIDIA GPUs."""
    attention.register()
    registered = EngineRegistry._engines["language_model"]["fsdp2"]
    for key in ("cpu", ("cuda", "nvidia")):
        registered[key] = JetRLEngine
