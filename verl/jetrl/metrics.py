"""Metrics that every arm reports (names: :mod:`verl.jetrl.metric_names`)."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.jetrl import metric_names as names


def mismatch(rollout_log_probs: Tensor, trainer_log_probs: Tensor, mask: Tensor) -> dict[str, float]:
    """How far the rollout's log-probs of the sampled tokens are from the trainer's, on the same weights.

    Args: (B, T) FP32 log-probs in nats; ``mask`` (B, T) marks response tokens.
    Returns: mean and maximum of |difference|, k3 estimate of KL(rollout || trainer), Pearson correlation of the probabilities.
    Raises: ValueError for a non-finite log-prob, which would otherwise vanish in a mean, and for an empty mask.
    """
    mask = mask.bool()
    rollout, trainer = rollout_log_probs[mask].double(), trainer_log_probs[mask].double()
    if not rollout.numel():
        raise ValueError("no response token to compare rollout and trainer on")
    if not (torch.isfinite(rollout).all() and torch.isfinite(trainer).all()):
        bad = "rollout" if not torch.isfinite(rollout).all() else "trainer"
        raise ValueError(f"the {bad}'s log-probs of sampled tokens hold NaN or infinity: the policy is broken")
    difference = trainer - rollout
    return {
        names.ABS_DLOGP_MEAN: difference.abs().mean().item(),
        names.ABS_DLOGP_MAX: difference.abs().max().item(),
        names.K3_KL: (torch.expm1(difference) - difference).mean().item(),
        names.PEARSON: _pearson(rollout.exp(), trainer.exp()),
    }


def _pearson(a: Tensor, b: Tensor) -> float:
    """Correlation of two vectors; where one is constant and it is undefined: 1 if they are equal, else 0."""
    if torch.equal(a, b):
        return 1.0
    if a.numel() < 2 or a.std() == 0 or b.std() == 0:
        return 0.0
    return torch.corrcoef(torch.stack([a, b]))[0, 1].item()
