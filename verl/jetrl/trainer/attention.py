"""Attention of the trainer without a GPU: softmax and both products in FP32, the result rounded to BF16 once.

vLLM's CPU attention accumulates in FP32; torch's rounds the probabilities to BF16 in between.  With this one both sides
round the same value, in every arm.  Selected with ``model.override_config.attn_implementation=jetrl_fp32``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

NAME = "jetrl_fp32"
EXACT = "jetrl_fp64"


def fp32_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Causal grouped-query attention.

    Args: query (B, heads, T, D), key and value (B, KV heads, T, D); ``attention_mask`` boolean or additive, None is causal.
    Returns: (B, T, heads, D) in the query's dtype.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (x.float().repeat_interleave(groups, 1) for x in (key, value))
    out = nn.functional.scaled_dot_product_attention(
        query.float(),
        key,
        value,
        attn_mask=attention_mask,
        is_causal=attention_mask is None and query.shape[2] > 1,
        scale=scaling,
    )
    # torch's CPU kernel gives zeros to a row whose scores are all NaN, which would hide them from the loss check.
    broken = ~(query.isfinite().all() & key.isfinite().all())
    return out.masked_fill(broken, torch.nan).to(query.dtype).transpose(1, 2).contiguous(), None


def _fp64(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, scale: float) -> Tensor:
    """Softmax attention in FP64, rounded to the query's dtype once.

    Args: query (..., heads, T, D), key and value (..., KV heads, L, D); ``allowed`` boolean, broadcastable to (T, L).
    """
    groups = query.shape[-3] // key.shape[-3]
    key, value = (x.double().repeat_interleave(groups, -3) for x in (key, value))
    scores = (query.double() @ key.transpose(-1, -2) * scale).masked_fill(~allowed, -torch.inf)
    return (scores.softmax(-1) @ value).to(query.dtype)


def fp64_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """The last T of a sequence's L tokens attend to all tokens up to themselves.

    Args: query (T, heads, D), key and value (L, KV heads, D).  Returns: (T, heads, D).
    """
    T, L = len(query), len(key)
    allowed = torch.ones(T, L, dtype=torch.bool).tril(L - T)
    return _fp64(query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), allowed, scale).transpose(0, 1)


def exact_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """As :func:`fp32_attention`, with sums in FP64: what the rollout computes in exact mode without a GPU."""
    T = query.shape[2]
    allowed = torch.ones(T, T, dtype=torch.bool).tril() if attention_mask is None else attention_mask
    if allowed.dtype != torch.bool:
        raise ValueError(f"{EXACT}: want a boolean mask, got {allowed.dtype}")
    return _fp64(query, key, value, allowed, scaling).transpose(1, 2).contiguous(), None


def register() -> None:
    """Makes the names known to transformers; packed sequences get the masks of its "sdpa"."""
    for name, function in ((NAME, fp32_attention), (EXACT, exact_attention)):
        AttentionInterface.register(name, torch.autocast("cpu", enabled=False)(function))
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
