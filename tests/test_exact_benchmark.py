"""The exact-mode benchmark's arithmetic: steps put together from measured ones, waves, the step without the log-prob pass."""

from __future__ import annotations

import pytest

from benchmarks import exact

SAMPLES = {
    "prompt": 256,
    "steps": 128,
    # 2 ms and 1 us per token of context; exact mode 10% more
    "decode_ms": {
        arm: {str(n): {str(c): slower * (2 + 0.001 * (c + 64)) for c in contexts} for n, contexts in exact.GRID.items()}
        for arm, slower in (("jetrl", 1.0), ("jetrl_exact", 1.1))
    },
    "training": {str(n): {"log_prob": 1e-6, "forward_backward": 4e-6} for n in (1024, 4096, 8192)},
    "norm": {"jetrl_64": 3.0, "vllm_64": 4.0},
}


@pytest.mark.parametrize("response", [1024, 4096, 8192])
def test_a_linear_step_time_is_summed_exactly(response):
    contexts = range(256, 256 + response)
    expected = sum(2 + 0.001 * c for c in contexts) / 1e3
    assert exact.rollout_seconds(SAMPLES["decode_ms"]["jetrl"]["64"], 256, response) == pytest.approx(expected)


def test_between_two_measurements_the_time_is_interpolated():
    assert exact.rollout_seconds({"0": 1.0, "100": 3.0}, 50, 1, steps=0) == pytest.approx(2e-3)
    assert exact.rollout_seconds({"0": 1.0}, 0, 10) == pytest.approx(10e-3)


@pytest.mark.parametrize(
    ("count", "response", "expected"), [(64, 8192, (64, 1)), (256, 1024, (256, 1)), (256, 4096, (128, 2)), (256, 8192, (64, 4))]
)
def test_what_does_not_fit_runs_in_waves(count, response, expected):
    assert exact.waves(count, response, exact.GRID) == expected


def test_longer_responses_than_measured_are_an_error():
    with pytest.raises(ValueError, match="256 responses of 16384 tokens"):
        exact.waves(256, 16384, exact.GRID)


def test_the_kv_cache_holds_every_cell_of_the_grid():
    shapes = exact.SHAPES
    token = 2 * 36 * shapes["num_key_value_heads"] * shapes["head_dim"] * 2
    for count, contexts in exact.GRID.items():
        assert count * (max(contexts) + exact.STEPS + exact.LARGEST_BLOCK) * token < exact.KV_BYTES


def test_figures():
    figures = exact.figures_of(SAMPLES)
    tokens = 64 * (256 + 1024)
    rollout = figures["rollout_seconds_jetrl_64_1024"]
    default, ours = rollout + tokens * 5e-6, 1.1 * rollout + tokens * 4.1e-6
    assert figures["rollout_vs_default_64_1024"] == pytest.approx(1 / 1.1)
    assert figures["step_vs_default_64_1024"] == pytest.approx(default / ours)
    assert figures["step_vs_default"] == min(figures[f"step_vs_default_{n}_{r}"] for n, r in exact.CASES)
    assert figures["norm_us_vllm_64"] == 4.0


def test_report():
    result = {"cost": {"figures": exact.figures_of(SAMPLES), "command": "python -m benchmarks.exact", "device": "H200"}}
    tables = exact.report(result)
    lines = tables["cost"].splitlines()
    assert len(lines) == 2 + len(exact.CASES) and lines[2].startswith("| 64 x 1024 |")
