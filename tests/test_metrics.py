"""Mismatch and clip metrics against hand computation, and the seeds of requests."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from verl.jetrl import metric_names as names
from verl.jetrl.metrics import mismatch


def test_values_by_hand():
    rollout = torch.tensor([[-1.0, -2.0, -9.0], [-0.5, -7.0, -7.0]])
    trainer = torch.tensor([[-1.5, -1.0, +9.0], [-0.5, math.nan, math.inf]])  # masked tokens may hold anything
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    values = mismatch(rollout, trainer, mask)
    assert values[names.ABS_DLOGP_MEAN] == pytest.approx((0.5 + 1.0 + 0.0) / 3)
    assert values[names.ABS_DLOGP_MAX] == 1.0
    k3 = [math.exp(d) - d - 1 for d in (-0.5, 1.0, 0.0)]  # d = trainer - rollout
    assert values[names.K3_KL] == pytest.approx(sum(k3) / 3)
    a, b = ([math.exp(x) for x in side] for side in ([-1.0, -2.0, -0.5], [-1.5, -1.0, -0.5]))
    mean_a, mean_b = sum(a) / 3, sum(b) / 3
    covariance = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    spread = math.sqrt(sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b))
    assert values[names.PEARSON] == pytest.approx(covariance / spread)
    assert values.keys() == set(names.MISMATCH)


@pytest.mark.parametrize("log_probs", [[[-0.25, -3.0]], [[-1.0]], [[-2.0, -2.0]]])
def test_no_difference_is_exactly_zero(log_probs):
    x = torch.tensor(log_probs)
    assert list(mismatch(x, x.clone(), torch.ones_like(x)).values()) == [0.0, 0.0, 0.0, 1.0]


def test_differences_below_fp32_rounding_of_exp_are_seen():
    """k3 of a small difference is d²/2: exp(d) - d - 1 computed plainly in FP32 would be 0 or noise."""
    x = torch.full((1, 100), -1.0)
    value = mismatch(x, x + 1e-4, torch.ones_like(x))[names.K3_KL]
    d = (x + 1e-4)[0, 0].double() + 1.0
    assert value == pytest.approx(float(d) ** 2 / 2, rel=1e-3)


def test_a_constant_side_has_a_defined_correlation():
    values = mismatch(torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.0, -2.0]]), torch.ones(1, 2))
    assert values[names.PEARSON] == 0.0
    assert mismatch(torch.tensor([[-1.0]]), torch.tensor([[-2.0]]), torch.ones(1, 1))[names.PEARSON] == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["rollout", "trainer"])
def test_a_broken_policy_raises_and_names_the_side(bad, side):
    good, broken = torch.zeros(2, 3), torch.zeros(2, 3)
    broken[1, 2] = bad
    args = (broken, good) if side == "rollout" else (good, broken)
    with pytest.raises(ValueError, match=f"the {side}'s log-probs"):
        mismatch(*args, torch.ones(2, 3))


def test_an_empty_batch_raises():
    with pytest.raises(ValueError, match="no response token"):
        mismatch(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3))


def test_clip_fractions_against_brute_force():
    from verl.jetrl.trainer.losses import clip_fractions

    torch.manual_seed(0)
    old, new, advantages = torch.randn(3, 8, 40) * 0.3
    advantages[:, ::7] = 0.0
    mask = torch.rand(8, 40) > 0.3
    low, high = 0.2, 0.28
    clipped = {1: 0, -1: 0}
    total = {1: 0, -1: 0}
    for i, j in itertools.product(range(8), range(40)):
        a, ratio = advantages[i, j].item(), math.exp(new[i, j].item() - old[i, j].item())
        if not mask[i, j] or a == 0:
            continue
        sign = 1 if a > 0 else -1
        total[sign] += 1
        # Clipped: the objective min(r A, clip(r) A) is the clipped one, so the token has no gradient.
        clipped[sign] += min(max(ratio, 1 - low), 1 + high) * a < ratio * a
    assert total[1] > 50 and total[-1] > 50 and clipped[1] and clipped[-1]
    expected = (clipped[1] / total[1], clipped[-1] / total[-1])
    assert clip_fractions(old, new, advantages, mask, low, high) == pytest.approx(expected)


def test_clip_fractions_without_tokens_of_a_sign():
    from verl.jetrl.trainer.losses import clip_fractions

    one = torch.ones(1, 2)
    assert clip_fractions(0 * one, 5 * one, one, one.bool(), 0.2, 0.2) == (1.0, 0.0)
    assert clip_fractions(0 * one, -5 * one, -one, one.bool(), 0.2, 0.2) == (0.0, 1.0)
    assert clip_fractions(0 * one, 5 * one, one, (0 * one).bool(), 0.2, 0.2) == (0.0, 0.0)


def test_the_loss_is_verls_and_reports_both_fractions():
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import FSDPActorConfig

    from verl.jetrl.trainer.losses import LOSS_MODE

    config = FSDPActorConfig(
        strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=0.1, clip_ratio_high=0.3
    )
    torch.manual_seed(1)
    old, new, advantages = torch.randn(3, 4, 16) * 0.3
    arguments = dict(advantages=advantages, response_mask=torch.ones(4, 16), loss_agg_mode="token-mean", config=config)
    ours, metrics = get_policy_loss_fn(LOSS_MODE)(old_log_prob=old, log_prob=new, **arguments)
    theirs, _ = get_policy_loss_fn("vanilla")(old_log_prob=old, log_prob=new, **arguments)
    assert torch.equal(ours, theirs)
    ratio = (new - old).exp()
    positive, negative = advantages > 0, advantages < 0
    assert metrics[names.CLIP_FRAC_POS_ADV] == pytest.approx((ratio[positive] > 1.3).float().mean().item())
    assert metrics[names.CLIP_FRAC_NEG_ADV] == pytest.approx((ratio[negative] < 0.9).float().mean().item())


def test_request_seeds_are_distinct_and_fixed():
    from verl.jetrl.rollout.agent_loop import request_seed

    keys = list(itertools.product((0, 1), (-2, 1, 11), range(12), range(12)))
    seeds = [request_seed(*key) for key in keys]
    assert len(set(seeds)) == len(seeds), "(1, 11) and (11, 1) must not collide"
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds == [request_seed(*key) for key in keys]
    # Fixed for good: another function would resume old runs with other samples.
    assert request_seed(42, 3, 5, 7) == 977857692248045780


@pytest.mark.parametrize("loss", ["vanilla_signed", "gspo"])
def test_a_loss_without_signed_clip_fractions_is_no_error(monkeypatch, loss):
    """verl has other losses than the fork's, which alone counts by sign."""
    from verl.jetrl.trainer.ppo import JetRLTrainer, PPOTrainerSync

    monkeypatch.setattr(PPOTrainerSync, "_compute_metrics", lambda *_: None)
    counted = {f"actor/{name}": 0.25 for name in names.CLIP} if loss == "vanilla_signed" else {}
    metrics = {"perf/total_num_tokens": 10, "actor/perf/max_memory_allocated_gb": 1.0, **counted}
    seconds = dict.fromkeys(("old_log_prob", "update_actor", "update_weights", "step"), 2.0)
    JetRLTrainer._compute_metrics(object.__new__(JetRLTrainer), None, metrics, seconds, 1, 0)
    assert metrics[names.TOKENS_PER_S] == 5.0
    assert {name: metrics.get(name) for name in names.CLIP} == dict.fromkeys(names.CLIP, 0.25 if counted else None)
    assert not any(f"actor/{name}" in metrics for name in names.CLIP)
