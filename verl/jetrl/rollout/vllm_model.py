"""vLLM's side of the shared decoder: the model class, and the loader that maps the weight arena instead of loading.

The engine is started with ``load_format=jetrl_arena`` and the architecture :data:`ARCHITECTURE`; nothing of the model's
size is allocated in the worker.  What sleep mode discards is the KV cache.

With arena=sharded the worker has FP8 weights of its own, which sleep mode discards too: vLLM allocates what a loader asks for
from the pool of its weights, and wakes it at the same addresses.  verl wakes it, updates the weights, and wakes the KV cache,
before a first request too.
"""

from __future__ import annotations

import os
from functools import partial

import torch
from torch import Tensor, nn
from vllm import envs
from vllm.compilation.decorators import support_torch_compile
from vllm.config import ModelConfig, VllmConfig
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.sequence import IntermediateTensors
from vllm.utils.torch_utils import set_default_torch_dtype

from verl.jetrl.arena import SLOTS, Arena, ArenaError, layout_of, linears_of, read_handle
from verl.jetrl.fp8 import gemm, ops, precompile
from verl.jetrl.model.decoder import Body, Decoder
from verl.jetrl.rollout import exact_attention
from verl.jetrl.window import receive

ARCHITECTURE = "JetRLForCausalLM"
LOAD_FORMAT = "jetrl_arena"


@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": -1, "intermediate_tensors": 0, "inputs_embeds": 0})
class JetRLBody(Body):
    """The decoder's body with vLLM's attention, whose KV cache and scheduling are vLLM's."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "model") -> None:
        super().__init__(vllm_config.model_config.hf_config)
        exact = getattr(vllm_config.quant_config, "exact", False)
        backend = exact_attention.backend(vllm_config.device_config.device.type) if exact else None
        T = get_tensor_model_parallel_world_size()
        for index, layer in enumerate(self.layers):
            attention = layer.self_attn
            attention.attn = Attention(
                attention.heads // T,
                attention.head_dim,
                attention.head_dim**-0.5,
                num_kv_heads=attention.kv_heads // T,
                cache_config=vllm_config.cache_config,
                prefix=f"{prefix}.layers.{index}.self_attn.attn",
                attn_backend=backend,
            )

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        return self.run(input_ids, positions, [partial(_attend, layer.self_attn.attn) for layer in self.layers])


def _attend(attention: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q.flatten(1), k.flatten(1), v.flatten(1))


class JetRLForCausalLM(Decoder):
    """What vLLM runs in the jetrl arm, for Qwen3, Qwen2.5 and Llama."""

    body_class = JetRLBody

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config.model_config.hf_config, vllm_config=vllm_config)
        self.arena: Arena | None = None
        self.own: Arena | None = None  # FP8 weights that are not the trainer's, with arena=sharded

    def take_weights(self, update: int) -> None:
        """Copies what the trainer streams in its weight update number ``update`` (arena=sharded)."""
        receive(self.arena, self.own, update)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return nn.functional.embedding(input_ids, self.model.embed_tokens.weight)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        head = self.head_share()
        if head.shape == self.lm_head.weight.shape:
            return self.head(hidden_states)
        return tensor_model_parallel_all_gather(ops.bf16_gemm_nt(hidden_states, head))

    def head_share(self) -> Tensor:
        """The rows of the head that this GPU multiplies: all, where they do not divide."""
        T, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        vocabulary = self.lm_head.weight.shape[0]
        return self.lm_head.weight if vocabulary % (8 * T) else self.lm_head.weight.view(T, vocabulary // T, -1)[rank]


@register_model_loader(LOAD_FORMAT)
class ArenaLoader(BaseModelLoader):
    """Maps the arena of the trainer process that shares this worker's GPU, before CUDA graphs are captured."""

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing: the trainer has the weights."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        raise ArenaError("the weights of the jetrl arm live in the trainer's arena; they are not loaded")

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        device = torch.device(vllm_config.device_config.device)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
            gemm.require_hopper(device)
        with set_default_torch_dtype(model_config.dtype), device:
            model = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        T, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        trainer, layout = trainer_rank(rank, T), layout_of(model_config.hf_config, T)
        sharded = read_handle(trainer)["slots"] > 0
        model.arena = Arena.attach(layout_of(model_config.hf_config, slots=SLOTS) if sharded else layout, device, trainer)
        if not model.arena.control.version:
            raise ArenaError("the weight arena has not been written: the trainer must round its weights into it first")
        if sharded:
            # Zeros, and no NaN, until the first update: vLLM samples from made-up requests when it starts, and with NaN logits
            # an id past a small vocabulary's end.  No real request is served before.
            model.own = Arena.private(linears_of(layout), device)
            model.arena.control.enter()
        model.bind(model.arena, *([model.own] if sharded else []))
        if T > 1:
            model.slice(rank, T, tensor_model_parallel_all_reduce, model.own or model.arena)
        process_weights_after_loading(model, model_config, device)
        if device.type == "cuda" and envs.VLLM_DEEP_GEMM_WARMUP != "skip":
            scheduler = vllm_config.scheduler_config
            warm_up(model, scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
        return model.eval()


def trainer_rank(rank: int = 0, T: int = 1) -> int:
    """The trainer process whose arena worker ``rank`` of a replica of T GPUs maps."""
    return int(os.environ.get("VERL_REPLICA_RANK", "0")) * T + rank


def warm_up(model: JetRLForCausalLM, tokens: int, sequences: int) -> None:
    """Compiles every GEMM kernel that a step of up to ``tokens`` tokens and ``sequences`` sequences can ask for.

    ``VLLM_DEEP_GEMM_WARMUP=skip`` leaves this out, as it does for vLLM's own FP8 layers: the kernels then compile when used.
    """
    head = model.head_share()
    shapes = [tuple(part.q.shape) for linear in model.linears() for part in linear.parts]
    precompile.precompile(precompile.jobs_of(shapes, tuple(head.shape), tokens, sequences), head.device)
