"""Models pad their vocabulary: ids past the tokenizer are never sampled, and must not take probability from the others."""

from __future__ import annotations

import torch
from torch import Tensor

# Probability 0 in BF16 and FP32 at any temperature.  Finite: the entropy multiplies it with that 0, and -inf gives NaN.
MASKED = -1e30


def mask_padding_(logits: Tensor, vocabulary: int) -> Tensor:
    """Sets logits (..., V) of ids >= ``vocabulary`` to :data:`MASKED`: what the rollout samples from, before temperature."""
    logits[..., vocabulary:] = MASKED
    return logits


def padding_mass(padding_TP: Tensor, chosen_T: Tensor, log_probs_T: Tensor) -> Tensor:
    """log(1 - probability of the padding ids) per position, FP32: the share of the mismatch between rollout and trainer that
    an unmasked vocabulary makes.

    From the logits of the P padding ids, and the logit and log-prob of any id, which tell the sum over all of them: to read
    the whole vocabulary again would cost as much as the log-softmax.
    """
    total_T = chosen_T.float() - log_probs_T.float()
    return torch.log1p(-(padding_TP.float() - total_T[:, None]).exp().sum(-1))
