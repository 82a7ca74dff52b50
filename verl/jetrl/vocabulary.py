"""Models pad their vocabulary: ids past the tokenizer are never sampled, and must not take probability from the others."""

from __future__ import annotations

import torch
from torch import Tensor

# Probability 0 in BF16 and FP32 at any temperature.  Finite: the entropy multiplies it with that 0, and -inf gives NaN.
MASKED = -1e30


def mask_padding(logits: Tensor, vocabulary: int) -> Tensor:
    """Logits (..., V) with :data:`MASKED` at ids >= ``vocabulary``: what the rollout samples from, before temperature."""
    if logits.shape[-1] <= vocabulary:
        return logits
    padding = torch.arange(logits.shape[-1], device=logits.device) >= vocabulary
    return logits.masked_fill(padding, MASKED)


def padding_mass(logits: Tensor, vocabulary: int, temperature: float = 1.0) -> Tensor:
    """log(1 - probability of the ids >= ``vocabulary``) per position, FP32, shape (...): the share of the mismatch
    between rollout and trainer that an unmasked vocabulary makes."""
    scaled = logits.detach().float() / temperature
    return torch.logsumexp(scaled[..., :vocabulary], -1) - torch.logsumexp(scaled, -1)
