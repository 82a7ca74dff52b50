"""Recipes: every arm composes, arms differ only in what their names say, and what is missing is said before anything runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from omegaconf import OmegaConf

from verl.jetrl.compose import arms, compose
from verl.jetrl.config_diff import diff
from verl.jetrl.run import MAIN_ARMS

RECIPES = ("tiny", "qwen3-8b", "smollm2-135m")
ALL_ARMS = {*MAIN_ARMS, "bf16-train-fp8-rollout-tis", "jetrl-exact"}
# vLLM's own block FP8 does not run SmolLM2's widths.
ARMS_OF = {recipe: {arm for arm in ALL_ARMS if recipe != "smollm2-135m" or "fp8-rollout" not in arm} for recipe in RECIPES}
PRECISION = "actor_rollout_ref.actor.fsdp_config.precision_flow.linear"
MIXED = {"jetrl.mixed_precision", "actor_rollout_ref.rollout.quantization"}
# What a difference of precision_flow.linear shows up as, through the interpolations of the base configuration.
FLOW = {
    PRECISION,
    "actor_rollout_ref.ref.fsdp_config.precision_flow.linear",
    "actor_rollout_ref.rollout.custom.precision_flow.linear",
}
DIFFERENCES = {
    "jetrl": FLOW,
    "jetrl-exact": FLOW | {key.replace("linear", "exact") for key in FLOW},
    "bf16-train-fp8-rollout": MIXED,
    "bf16-train-fp8-rollout-tis": MIXED | {"algorithm.rollout_correction.rollout_is"},
}
OF_THE_ARM = {
    "jetrl.arm",
    "jetrl.run_dir",
    "trainer.experiment_name",
    "trainer.default_local_dir",
    "actor_rollout_ref.rollout.trace.experiment_name",
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_arms_differ_only_in_what_they_are_about(root: Path, tmp_path: Path, recipe: str) -> None:
    folder = root / "recipes" / recipe
    assert set(arms(folder)) == ARMS_OF[recipe]
    base = compose(folder, "bf16", tmp_path / "bf16")
    for arm in ARMS_OF[recipe] - {"bf16"}:
        expected = DIFFERENCES[arm]
        changed = {key for key, _, _ in diff(base, compose(folder, arm, tmp_path / arm))}
        assert changed - OF_THE_ARM == expected, arm


@pytest.mark.parametrize("recipe", RECIPES)
def test_arm_files_are_short(root: Path, recipe: str) -> None:
    for arm in ARMS_OF[recipe]:
        assert len((root / "recipes" / recipe / f"{arm}.yaml").read_text().splitlines()) <= 15, arm


def test_overrides_pass_through(root: Path, tmp_path: Path) -> None:
    config = compose(root / "recipes/tiny", "jetrl", tmp_path, ["trainer.total_training_steps=7", "+jetrl.extra=1"])
    assert config.trainer.total_training_steps == 7 and config.jetrl.extra == 1
    assert OmegaConf.select(config, PRECISION) == "fp8"


def test_qwen3_8b_lists_everything_missing_and_stops(root: Path, tmp_path: Path) -> None:
    """At once: nothing is downloaded for a run that cannot start."""
    env = {**os.environ, "JETRL_DEVICE": "cpu", "MATH_SOURCE": str(tmp_path / "nowhere")}
    command = [sys.executable, "-m", "verl.jetrl.run", str(root / "recipes/qwen3-8b"), "--runs", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, env=env)
    assert result.returncode == 2
    for missing in ("no CUDA GPU", "actor_rollout_ref.model.path", "data.train_files", "prepare.py --out-dir"):
        assert missing in result.stderr, result.stderr
    assert "making the data" not in result.stdout
    assert not (tmp_path / "qwen3-8b" / "bf16").exists()


def test_math_is_prepared_from_a_local_folder(root: Path, tmp_path: Path) -> None:
    def write(name: str, split: str, rows: list[dict]) -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    solved = [{"problem": f"What is {i}+1?", "solution": rf"It is \boxed{{{i + 1}}}.", "level": "1"} for i in range(6)]
    write("MATH-lighteval", "train", solved[:4])
    write("MATH-lighteval", "test", solved[4:])
    write("MATH-500", "test", [{"problem": solved[5]["problem"], "solution": solved[5]["solution"], "answer": "6"}])
    script = root / "recipes/qwen3-8b/prepare.py"
    env = {**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, str(script), "--out-dir", str(tmp_path / "out"), "--source", str(tmp_path)]
    subprocess.run(command, check=True, env=env)
    train = pd.read_parquet(tmp_path / "out/train.parquet")
    validation = pd.read_parquet(tmp_path / "out/validation.parquet")
    assert len(train) == 5 and len(validation) == 1
    assert not set(p[0]["content"] for p in train["prompt"]) & set(p[0]["content"] for p in validation["prompt"])
    assert [r["ground_truth"] for r in train["reward_model"]] == ["1", "2", "3", "4", "5"]

    from verl.utils.reward_score import default_compute_score

    for row in (*train.to_dict("records"), *validation.to_dict("records")):
        right = rf"So \boxed{{{row['reward_model']['ground_truth']}}}."
        assert float(default_compute_score(row["data_source"], right, row["reward_model"]["ground_truth"])) == 1.0
        assert float(default_compute_score(row["data_source"], r"\boxed{17}", row["reward_model"]["ground_truth"])) == 0.0
