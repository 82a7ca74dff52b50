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


def register() -> None:
    """Makes the name known to transformers; packed sequences get the masks of its "sdpa"."""
    AttentionInterface.register(NAME, torch.autocast("cpu", enabled=False)(fp32_attention))
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
