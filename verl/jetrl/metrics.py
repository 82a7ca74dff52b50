"""Metrics that every arm reports (names: :mod:`verl.jetrl.metric_names`)."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.jetrl import metric_names as names


def mismatch(rollout_log_probs: Tensor, trainer_log_probs: Tensor, mask: Tensor) -> dict[str, float]:
    """How far the rollout's log-probs of the sampled tokens are from the trainer's, on the same weights.

    Args: (B, T) FP32 log-probs in nats; ``mask`` (B, T) marks response tokens.
    Returns: mean and maximum of |difference|, k3 estimate of KL(rollout || trainer), Pearson correlation of the probabilities.
    Raises: ValueError for a non-finite log-prob, which would otherwise vanish in a mean.
    """
    mask = mask.bool()
    rollout, trainer = rollout_log_probs[mask].double(), trainer_log_probs[mask].double()
    if not (torch.isfinite(rollout).all() and torch.isfinite(trainer).all()):
        bad = "rollout" if not torch.isfinite(rollout).all() else "trainer"
        raise ValueError(f"the {bad}'s log-probs of sampled tokens hold NaN or infinity: the policy is broken")
    difference = trainer - rollout
    probabilities = torch.stack([rollout.exp(), trainer.exp()])
    pearson = torch.corrcoef(probabilities)[0, 1].item() if rollout.numel() > 1 else 1.0
    return {
        names.ABS_DLOGP_MEAN: difference.abs().mean().item(),
        names.ABS_DLOGP_MAX: difference.abs().max().item(),
        names.K3_KL: (torch.expm1(difference) - difference).mean().item(),
        names.PEARSON: pearson,
    }
