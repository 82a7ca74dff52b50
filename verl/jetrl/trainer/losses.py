"""verl's clipped policy loss, with the clip fraction split by the sign of the advantage.

Unified FP8 training has been seen to over-clip tokens of negative advantage (arXiv 2609.22870); the mean over all tokens
hides it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import get_policy_loss_fn, register_policy_loss

from verl.jetrl import metric_names as names

LOSS_MODE = "vanilla_signed"


def clip_fractions(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float
) -> tuple[float, float]:
    """Share of clipped tokens among those with positive and with negative advantage; (B, T) each, ``mask`` boolean.

    A token counts as clipped when the clipped objective differs from the unclipped one: ratio > 1 + high at a positive
    advantage, ratio < 1 - low at a negative one.
    """
    ratio = torch.exp((log_prob - old_log_prob).clamp(-20, 20))
    positive, negative = mask & (advantages > 0), mask & (advantages < 0)
    share = lambda clipped, of: ((clipped & of).sum() / of.sum().clamp(min=1)).item()  # noqa: E731
    return share(ratio > 1 + high, positive), share(ratio < 1 - low, negative)


@register_policy_loss(LOSS_MODE)
def vanilla_signed(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    """verl's "vanilla" loss; adds :data:`names.CLIP_FRAC_POS_ADV` and :data:`names.CLIP_FRAC_NEG_ADV` to its metrics."""
    loss, metrics = get_policy_loss_fn("vanilla")(
        old_log_prob=old_log_prob,
        log_prob=log_prob,
        advantages=advantages,
        response_mask=response_mask,
        loss_agg_mode=loss_agg_mode,
        config=config,
        rollout_is_weights=rollout_is_weights,
    )
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    positive, negative = clip_fractions(old_log_prob.detach(), log_prob.detach(), advantages, response_mask.bool(), low, high)
    return loss, {**metrics, names.CLIP_FRAC_POS_ADV: positive, names.CLIP_FRAC_NEG_ADV: negative}
