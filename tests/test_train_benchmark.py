"""benchmarks/train.py at tiny size: its arms compute the same step, and the file says what was run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import train

ARMS = (
    "fp8",
    "bf16",
    "bf16_fused",
    "bf16_fused_kept",
    "fp8_resident",
    "fp8_requantized",
    "fp8_unfused",
    "fp8_bf16_saved",
    "bf16_fused_checkpointing",
)


def test_every_arm_trains_the_same_step(root: Path, tmp_path: Path):
    """Two processes.  A part of an earlier run stays in the file as it was."""
    out = tmp_path / "train.json"
    earlier = {"gpus": 1, "micro_batches": 4, "micro_batch_tokens": 8, "shapes": train.TINY, "ceilings": {}, "arms": {}}
    run = {"command": "an earlier one", "device": "another", "versions": {}}
    out.write_text(json.dumps({"runs": {"4b": run}, "samples": {"4b": earlier}}))
    options = ["--quick", "--layers", "1", "--parts", "8b", "--arms", ",".join(ARMS), "--out", str(out)]
    command = [sys.executable, "-m", "benchmarks.train", *options]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(out.read_text())
    assert result["runs"]["4b"] == run and result["samples"]["4b"] == earlier
    assert result["command"] == result["runs"]["8b"]["command"] and "--parts 8b" in result["command"]
    arms = result["samples"]["8b"]["arms"]
    assert tuple(arms) == ARMS and not [a for a in arms.values() if "error" in a or "skipped" in a]

    shapes = result["samples"]["8b"]["shapes"]
    norms = {name: [s["grad_norm"] for s in arm["steps"]["32"] + arm["phases"]["32"]] for name, arm in arms.items()}
    for arm in arms.values():  # whole steps wait for nothing, phases add up to theirs
        assert not any(set(train.PHASES) & set(s) for s in arm["steps"]["32"])
        assert all(sum(s[p] for p in train.PHASES) <= s[train.STEP] for s in arm["phases"]["32"])
    for name, values in norms.items():
        assert values == pytest.approx([norms["bf16"][0]] * len(values), rel=0.02), f"{name} does not train what bf16 trains"
    assert norms["fp8"] != norms["bf16"] and norms["fp8_requantized"] != norms["bf16_fused"], "FP8 is off"

    matrices = sum(N * K for N, K in train.linears(shapes)) * shapes["num_hidden_layers"]
    vectors = (2 * shapes["hidden_size"] + 2 * shapes["head_dim"]) * shapes["num_hidden_layers"] + shapes["hidden_size"]
    parameters = matrices + vectors + 2 * shapes["vocab_size"] * shapes["hidden_size"]
    gathered = {name: arm["collective_bytes"]["all_gather"] for name, arm in arms.items() if "collective_bytes" in arm}
    # Forward, backward and the log-prob pass of four micro-batches gather BF16.
    assert gathered["bf16"] == gathered["bf16_fused"] == 2 * parameters * 3 * train.MICRO_BATCHES
    # Kept: one gather serves the log-prob pass and the first micro-batch, forward and backward; one more each of the others.
    assert gathered["bf16_fused_kept"] == 2 * parameters * train.MICRO_BATCHES
    assert result["figures"]["gather_bytes_vs_bf16"] == gathered["fp8"] / gathered["bf16"] < 0.25
    assert result["figures"]["same_gradient_bits"] == 1
    assert result["figures"]["train_vs_bf16_8b"] > 0
    printed = train.report(result)
    assert all(f"| 8b | {name} | 32 |" in printed for name in ARMS)


def test_the_ratio_is_against_the_fastest_bf16_arm():
    def arm(seconds: dict[str, list[float]]) -> dict:
        step = dict.fromkeys((*train.PHASES, "grad_norm"), 0.0)
        peak = {"allocated": 0, "reserved": 0}
        steps = {n: [step | {"step": s} for s in values] for n, values in seconds.items()}
        return {"steps": steps, "peak": dict.fromkeys(steps, peak)}

    arms = {
        "fp8": arm({"64": [9.0, 1.0, 1.0], "128": [2.0]}),
        "bf16": arm({"64": [3.0], "128": [3.0]}),
        "bf16_fused": arm({"64": [1.5], "128": [2.5]}),
        "bf16_checkpointing": {"error": "out of memory"},
        "bf16_compiled": {"skipped": "too large"},
    }
    part = {"gpus": 2, "micro_batches": 4, "micro_batch_tokens": 256, "shapes": train.TINY, "arms": arms}
    part["ceilings"] = {"bf16_tflop_s": 700.0, "fp8_tflop_s": 1400.0}
    figures = train.figures({"8b": part})
    assert figures["train_vs_bf16_8b"] == pytest.approx(1.5) and figures["train_vs_bf16_8b_worse"] == pytest.approx(1.25)
    assert "same_gradient_bits" not in figures and "gather_bytes_vs_bf16" not in figures
    faster = {"fp8_resident": arm({"64": [0.5]}), "fp8_unfused": arm({"64": [0.1]})}
    of_settings = train.figures({"8b": part | {"arms": arms | faster}})
    assert of_settings["train_vs_bf16_8b"] == pytest.approx(3.0), "a setting of FP8's counts, an ablation does not"
    assert of_settings["train_vs_bf16_8b_default"] == pytest.approx(1.5)
    rows = {(row["arm"], row["length"]): row for row in train.rows({"8b": part})}
    assert rows["fp8", 64]["tokens_per_s"] == pytest.approx(2048.0)
    ratio = rows["fp8", 64]["share_of_bf16_ceiling"] / rows["fp8", 64]["share_of_fp8_ceiling"]
    assert ratio == pytest.approx(2.0)


def test_kernel_times_stand_side_by_side():
    arms = {"fp8": {"profile": {"ms_per_step": {"FP8 GEMM": 2.0, "no kernel": 1.0}}}, "bf16": {"error": "out of memory"}}
    arms["bf16_fused"] = {"profile": {"ms_per_step": {"BF16 GEMM": 4.0}}}
    rows = train.profiles("8b", arms).splitlines()
    assert rows[2:] == ["| kernels | fp8 | bf16_fused |", "|---|---|---|", "| FP8 GEMM | 2 | - |", "| no kernel | 1 | - |",
                        "| BF16 GEMM | - | 4 |"]  # fmt: skip
    assert train.profiles("4b", {"fp8": {}}) == ""
    profiled = {"ms_per_step": {"BF16 GEMM": 6.0, "no kernel": 9.0}, "busy_ms_per_step": 5.0}  # two streams, and a slow host
    arms = {"fp8": {"profile": profiled, "steps": {"4096": [{"step": 0.007}, {"step": 0.008}, {"step": 0.020}]}}}
    assert train.profiles("4b", arms).splitlines()[-1] == "| no kernel | 3 |"


def test_peaks_of_whole_runs(tmp_path):
    """Arms are compared at equal settings only."""
    out = tmp_path / "train.json"

    def run(name: str, arm: str, peak: float | None, checkpointing: bool, arena: str = "replicated") -> None:
        folder = tmp_path / name / arm
        folder.mkdir(parents=True)
        status = {"state": "finished", "total_steps": 3, "device": "NVIDIA H200", "peak_device_gb": peak}
        (folder / "status.json").write_text(json.dumps(status))
        flow = {"linear": "fp8" if arm == "jetrl" else "bf16"}
        actor = {"ppo_max_token_len_per_gpu": 8192, "fsdp_config": {"arena": arena, "precision_flow": flow}}
        rollout = {"gpu_memory_utilization": 0.5, "max_model_len": 512, "enforce_eager": False}
        model = {"path": "/models/Qwen3-8B", "enable_gradient_checkpointing": checkpointing}
        ref = {"model": model, "actor": actor, "rollout": rollout}
        config = {"actor_rollout_ref": ref, "trainer": {"nnodes": 1, "n_gpus_per_node": 2}}
        (folder / "config.yaml").write_text(json.dumps(config))

    run("a", "bf16", 100.0, False)
    run("a", "jetrl", 90.0, False)
    run("b", "bf16", 80.0, True)
    run("b", "jetrl", 84.0, True)
    run("c", "jetrl", 76.0, True, "sharded")
    run("d", "jetrl", None, True)
    for name in "abcd":
        train.add_jobs(out, tmp_path / name)
    figures = json.loads(out.read_text())["figures"]
    assert figures == pytest.approx(
        {"job_peak_vs_bf16": 0.9, "job_peak_checkpointing_minus_bf16": 4.0, "job_peak_sharded_vs_bf16": 0.95}
    )
