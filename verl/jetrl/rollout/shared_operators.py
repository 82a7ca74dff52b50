"""The trainer's RMSNorm, RoPE and SiLU*mul in vLLM's model.

FP8 rounding amplifies the smallest difference in an activation.  vLLM's own norms, rotary embedding and activation round at
other places than Hugging Face's; here they are replaced by the functions that the trainer's model runs, in place, on a
loaded model.  Only without CUDA graphs and compilation: on the CPU.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from verl.jetrl.fp8 import ops


def share_operators(model: nn.Module, config: PretrainedConfig) -> dict[str, int]:
    """Replaces the operators of vLLM's ``model``; returns how many of each kind.  ``config``: the Hugging Face one."""
    with torch.device("cpu"):
        rotary = LlamaRotaryEmbedding(config)
    replaced = {"rms_norm": 0, "silu_mul": 0, "rope": 0}
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module._forward_method = partial(_rms_norm, module)
            replaced["rms_norm"] += 1
        elif isinstance(module, SiluAndMul):
            module._forward_method = _silu_mul
            replaced["silu_mul"] += 1
        elif isinstance(module, RotaryEmbedding):
            module._forward_method = partial(_rope, rotary, module.head_size)
            replaced["rope"] += 1
    if not all(replaced.values()):
        raise RuntimeError(f"operators to share with the trainer were not found in {type(model).__name__}: {replaced}")
    return replaced


def _rms_norm(module: RMSNorm, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    flat = None if residual is None else residual.reshape(-1, x.shape[-1])
    y, norm = ops.rms_norm(x.reshape(-1, x.shape[-1]), module.weight, module.variance_epsilon, flat)
    return y.view(x.shape) if residual is None else (y.view(x.shape), norm.h.view(x.shape))


def _silu_mul(gate_up: Tensor) -> Tensor:
    return ops.silu_mul(gate_up.reshape(-1, gate_up.shape[-1])).view(*gate_up.shape[:-1], -1)


def _rope(
    rotary: LlamaRotaryEmbedding, head_size: int, positions: Tensor, query: Tensor, key: Tensor | None = None, *_: object
) -> tuple[Tensor, Tensor]:
    cos, sin = rotary(query, positions[None])
    heads = [x.view(1, -1, x.shape[-1] // head_size, head_size).transpose(1, 2) for x in (query, key)]
    query_rotated, key_rotated = apply_rotary_pos_emb(*heads, cos, sin)
    return query_rotated.transpose(1, 2).reshape(query.shape), key_rotated.transpose(1, 2).reshape(key.shape)
