"""The exact-mode benchmark's arithmetic: steps put together from measured ones, waves, the step without the log-prob pass;
its gates, and that the parts of exact.json leave each other alone."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import exact, rollout
from benchmarks.shapes import QWEN3_8B
from benchmarks.tables import fill
from verl.jetrl.report.load import ReportError

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
    shapes = QWEN3_8B
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


# --- gates, jobs, and the file they share -----------------------------------------------------------------------------


def outcome(first: float = 0.0, last: float | None = 0.0, rows: int = 0) -> dict:
    """What the parity tool writes; ``rows``: how many of an operator's differ after the updates."""

    def stage(worst: float, differ: int) -> dict:
        rows = {"rows": {"attention": 50, "o": 50}, "different_rows": {"attention": differ, "o": 0}}
        return rows | {"max_abs_dlogp": worst, "sampled_tokens": 10, "equal": worst == 0 and not differ}

    stages = {"0 updates": stage(first, 0)}
    if last is not None:
        stages["3 updates"] = stage(last, rows) | {"stale_mean_abs_dlogp": 0.25}
    return {"stages": stages}


@pytest.mark.parametrize(
    ("found", "code", "expected"),
    [
        (outcome(), 0, (0.0, 0.0)),
        (outcome(last=0.125), 1, (0.0, 0.125)),
        (outcome(last=math.nan), 1, (0.0, math.nan)),
        (outcome(rows=3), 1, (0.0, math.inf)),  # operators differ
        (outcome(last=None), 1, (0.0, math.nan)),  # ended during the updates
        (outcome(), -11, (0.0, math.inf)),  # ended after all was compared
        ({}, 1, (math.nan, math.nan)),
    ],
)
def test_only_a_gate_that_passed_is_zero(found, code, expected):
    figures = exact.gate_figures("qwen3_8b", "compiled", code, found)
    assert list(figures) == ["max_abs_dlogp_qwen3_8b_0_updates_compiled", "max_abs_dlogp_qwen3_8b_3_updates_compiled"]
    assert tuple(figures.values()) == pytest.approx(expected, nan_ok=True)


def test_a_failing_case_stays_in_the_file(tmp_path, monkeypatch):
    """Cases of an earlier run stay, each with its own command."""
    out = tmp_path / "results" / "exact.json"

    def run(command, stderr, **_):
        config = json.loads((Path(command[3]) / "config.json").read_text())
        if config["model_type"] == "qwen2":
            print("torch.OutOfMemoryError: too much", file=stderr, flush=True)
            return subprocess.CompletedProcess(command, 1)
        Path(command[command.index("--json") + 1]).write_text(json.dumps(outcome()))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    assert exact.run_gates(["qwen3_8b"], ["eager"], None, True, out, "the first") == []
    assert exact.run_gates(["qwen2_5_7b", "smollm2_135m"], ["eager"], None, False, out, "the second") == ["qwen2_5_7b"]
    result = json.loads(out.read_text())
    assert [entry["command"] for entry in result["gates"].values()] == ["the first", "the second", "the second"]
    assert result["gates"]["qwen2_5_7b"]["error"] == "torch.OutOfMemoryError: too much"
    figures = {name.removeprefix("max_abs_dlogp_"): value for name, value in result["figures"].items()}
    assert math.isnan(figures["qwen2_5_7b_0_updates"]) and math.isnan(figures["qwen2_5_7b_3_updates"])
    assert [figures[f"{case}_{n}_updates"] for case in ("qwen3_8b", "smollm2_135m") for n in (0, 3)] == [0.0] * 4


def make_run(
    folder: Path, gaps: list[list[float | None]], arena: str = "replicated", gpus: int = 2, state: str = "finished"
) -> Path:
    """runs/<recipe> with the arm jetrl-exact: of each start its steps' largest difference, None where none was taken."""
    arm = folder / "jetrl-exact"
    (arm / "segments").mkdir(parents=True)
    (arm / "status.json").write_text(json.dumps({"state": state, "total_steps": 9, "device": "NVIDIA H200"}))
    actor = {"fsdp_config": {"arena": arena}}
    config = {"actor_rollout_ref": {"model": {"path": "/models/Qwen3-8B"}, "actor": actor}}
    (arm / "config.yaml").write_text(json.dumps(config | {"trainer": {"nnodes": 1, "n_gpus_per_node": gpus}}))
    step = 0
    for index, start in enumerate(gaps):
        lines = []
        for gap in start:
            step += 1
            data = {"critic/score/mean": 0.5} | ({} if gap is None else {exact.METRIC: gap})
            lines.append(json.dumps({"step": step, "data": data}) + "\n")
        (arm / "segments" / f"{index + 1:03d}.jsonl").write_text("".join(lines))
        step -= 1  # the next start does its last step again
    return folder


def test_jobs_are_added_by_recipe_gpus_and_arena(tmp_path):
    """A difference counts although a later start did its step again."""
    out = tmp_path / "exact.json"
    exact.add_job(out, make_run(tmp_path / "a" / "qwen3-8b", [[0.0, None, None], [0.0, None, 0.0]]))
    exact.add_job(out, make_run(tmp_path / "b" / "qwen3-8b", [[0.0, 0.5], [0.0]], arena="sharded"))
    result = json.loads(out.read_text())
    assert result["figures"] == {"max_abs_dlogp_job_qwen3_8b_2gpu": 0.0, "max_abs_dlogp_job_qwen3_8b_2gpu_sharded": 0.5}
    job = result["jobs"]["qwen3_8b_2gpu"]
    assert (job["steps"], job["verified_steps"], job["starts"], job["model"]) == (5, 3, 2, "Qwen3-8B")


def test_jobs_without_a_verified_step_are_refused_by_name(tmp_path):
    with pytest.raises(ReportError, match=r"tiny/jetrl-exact: no step has mismatch/abs_dlogp_max"):
        exact.add_job(tmp_path / "exact.json", make_run(tmp_path / "tiny", [[None, None]]))
    with pytest.raises(ReportError, match=r"other/jetrl-exact: a finished run .* is failed"):
        exact.add_job(tmp_path / "exact.json", make_run(tmp_path / "other", [[0.0]], state="failed"))
    assert not (tmp_path / "exact.json").exists()


def test_both_writers_keep_what_the_other_wrote(tmp_path):
    """benchmarks.rollout writes the file anew, benchmarks.exact adds to it."""
    out = tmp_path / "exact.json"
    exact.add_job(out, make_run(tmp_path / "tiny", [[0.0]], gpus=1))
    result = json.loads(out.read_text())
    result["cost"] = {"figures": exact.figures_of(SAMPLES), "command": "the cost's", "device": "H200"}
    result["gates"] = {"qwen3_8b": {"figures": exact.gate_figures("qwen3_8b", "eager", 0, outcome()), "outcome": outcome()}}
    exact.save(out, result)
    before = json.loads(out.read_text())
    samples = {
        "commands": ["the rollout's"],
        "rollout": {"jetrl_exact": dict.fromkeys(rollout.CASES, [{"seconds": 1.0, "tokens": 8}])},
        "mismatch": {"jetrl_exact": {"mean": 0.0, "max": 0.0}},
    }
    rollout.write(argparse.Namespace(out=tmp_path, layers=2), samples)
    after = json.loads(out.read_text())
    assert after["command"] == "the rollout's" and all(after[part] == before[part] for part in rollout.EXACT_PARTS)
    assert after["figures"] == before["figures"] | {"max_abs_dlogp_qwen3_8b": 0.0}
    exact.save(out, after)
    assert json.loads(out.read_text()) == after


def test_the_page_takes_the_parts_that_there_are(root, tmp_path):
    page, gates = tmp_path / "exact.md", {}
    shutil.copy(root / "docs" / "exact.md", page)
    for mode, found in (("eager", outcome(last=0.125)), ("compiled", {})):
        figures = exact.gate_figures("qwen3_8b", mode, 1, found)
        gates[f"qwen3_8b {mode}"] = {"weights": "random", "figures": figures, "outcome": found, "device": "H200"}
    fill(page, exact.report({"gates": gates, "figures": {}}))
    lines = page.read_text().splitlines()
    assert "| qwen3_8b eager | random | 0 | 0.125 | 20 | 200 | 0 | 0.25 | H200 |" in lines
    assert "| qwen3_8b compiled | random | nan | nan | 0 | 0 | 0 | - | H200 |" in lines
    out = tmp_path / "exact.json"
    exact.add_job(out, make_run(tmp_path / "qwen3-8b", [[0.0]]))
    fill(page, exact.report(json.loads(out.read_text())))
    assert "| qwen3_8b_2gpu | Qwen3-8B | 2 | replicated | 1 | 1 | 1 | 0 | NVIDIA H200 |" in page.read_text().splitlines()
    assert exact.report({"models": {}, "figures": {}}) == {}


@pytest.mark.job
@pytest.mark.skipif(exact.device().type == "cpu", reason="a minute of CI; the tool's stages are tested in tests/test_parity.py")
def test_the_gates_are_zero_on_tiny_shapes(root, tmp_path):
    """With vLLM's real engine: Qwen2.5 with its biases, before and after three updates."""
    out, case = tmp_path / "exact.json", "qwen2_5_7b"
    line = [sys.executable, "-m", "benchmarks.exact", "--gates", "--quick", "--cases", case, "--out", str(out)]
    done = subprocess.run(line, cwd=root, capture_output=True, text=True, timeout=900)
    modes = ("", "_compiled") if exact.device().type == "cuda" else ("",)
    assert done.returncode == 0 and done.stdout.count("\nequal\n") == len(modes), done.stderr[-3000:] + done.stdout[-3000:]
    result = json.loads(out.read_text())
    expected = {f"max_abs_dlogp_{case}_{n}_updates{mode}" for n in (0, 3) for mode in modes}
    assert result["figures"] == dict.fromkeys(expected, 0.0)
    for entry in result["gates"].values():
        stage = entry["outcome"]["stages"]["3 updates"]
        assert entry["exit_code"] == 0 and stage["stale_mean_abs_dlogp"] > 0.01 and all(stage["rows"].values())
