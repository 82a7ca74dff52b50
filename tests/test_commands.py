"""The commands ``python -m ...``: arguments that do not fit end with one message, before anything is started."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from verl.jetrl import patching
from verl.jetrl.compose import machine

ROOT = Path(__file__).resolve().parent.parent
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for package in ("verl/jetrl", "benchmarks")
    for path in sorted((ROOT / package).rglob("*.py"))
    if '\nif __name__ == "__main__":\n' in path.read_text()
]
TINY = str(ROOT / "recipes/tiny")
FLOW = "actor_rollout_ref.actor.fsdp_config.precision_flow"
MODEL = "actor_rollout_ref.model.path"
GPUS = "trainer.n_gpus_per_node"
LONG = (  # what a command does once its arguments fit
    "verl.jetrl.fp8.precompile.run",
    "verl.jetrl.parity.run",
    "verl.jetrl.run.check",
    "verl.jetrl.show_flow.trainer_rows",
    "verl.jetrl.show_patches.apply_all",
    "verl.jetrl.train.run_ppo",
    "benchmarks.exact.run_gates",
    "benchmarks.ops.measure",
    "benchmarks.rollout.Trainer",
    "benchmarks.soak.soak",
    "benchmarks.train.run_part",
    "benchmarks.trainers.restart_as_run",
)


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs a module's command in this process; its exit code, and what it said to stderr."""
    monkeypatch.setenv("JETRL_DEVICE", machine())  # memory_plan sets it
    for place in LONG:
        monkeypatch.setattr(place, lambda *_, place=place: pytest.fail(f"{place} was reached"))

    def run(name: str, *arguments: str) -> tuple[int, str]:
        module = importlib.import_module(name)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        capsys.readouterr()
        try:
            code = module.main()
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr().err
        return (1, said + code) if isinstance(code, str) else (code, said)  # Python prints such a text and exits with 1

    return run


@pytest.mark.parametrize("name", MODULES)
def test_help_and_an_unknown_option(command, name):
    assert command(name, "--help") == (0, "")
    code, said = command(name, "--nope")
    assert code == 2 and f"python -m {name.removesuffix('.__main__')}: error: " in said


REFUSED = [
    ("verl.jetrl.config_diff", ["{tmp}/a.yaml", "{tmp}"], "{tmp}: a folder, not a file"),
    ("verl.jetrl.config_diff", ["{tmp}/a.yaml", "{tmp}/none.yaml"], "none.yaml: no such file"),
    ("verl.jetrl.config_diff", ["{tmp}/a.yaml", "{tmp}/broken.yaml"], "broken.yaml: no YAML"),
    ("verl.jetrl.config_diff", ["{tmp}/a.yaml", "{tmp}/bytes.yaml"], "bytes.yaml: no YAML"),
    ("verl.jetrl.config_diff", ["{tmp}/a.yaml", "{tmp}/list.yaml"], "list.yaml: not a mapping"),
    ("verl.jetrl.config_diff", ["{tmp}/a.yaml", "{tmp}/open.yaml"], "open.yaml: Interpolation key 'b' not found"),
    ("verl.jetrl.config_diff", ["{tmp}/a.yaml", "{tmp}/a.yaml", "--names", "a"], "--names a: give two names"),
    ("verl.jetrl.config_diff", ["{tmp}/a.yaml", "{tmp}/a.yaml", "--names", "a,b,c"], "--names a,b,c: give two names"),
    ("verl.jetrl.config_diff", ["{tmp}/a.yaml", "{tmp}/a.yaml", "--names", ""], "--names : give two names"),
    ("verl.jetrl.show_patches", ["fp8"], "unrecognized arguments: fp8"),
    ("verl.jetrl.show_flow", ["{tmp}"], "is not a recipe"),
    ("verl.jetrl.show_flow", [TINY, "--arms", ""], "no arm ''"),
    ("verl.jetrl.show_flow", [TINY, "--arms", "bf16,fp9"], "no arm 'fp9'"),
    ("verl.jetrl.show_flow", [TINY, f"{MODEL}={{tmp}}/none"], f"{MODEL}={{tmp}}/none: no such folder"),
    ("verl.jetrl.show_flow", [TINY, f"{FLOW}.linear=fp4"], "precision_flow.linear is 'fp4'"),
    ("verl.jetrl.train", ["{tmp}", "bf16", "{tmp}/run"], "is not a recipe"),
    ("verl.jetrl.train", [TINY, "fp9", "{tmp}/run"], "no arm 'fp9'"),
    ("verl.jetrl.train", [TINY, "bf16", "{tmp}/run", "a.b=1"], "RecipeError: recipe 'tiny', arm 'bf16': there is no setting"),
    ("verl.jetrl.memory_plan", [TINY, "--gpu-gb", "0"], "--gpu-gb 0.0: it must be above 0"),
    ("verl.jetrl.memory_plan", [TINY, "--gpu-gb", "nan"], "--gpu-gb nan: it must be above 0"),
    ("verl.jetrl.memory_plan", [TINY, "--gpu-gb", "80", f"{GPUS}=0"], f"{GPUS}=0: it must be a whole number"),
    ("verl.jetrl.memory_plan", [TINY, "--gpu-gb", "80", f"{MODEL}={{tmp}}"], f"{MODEL}={{tmp}}: no config.json"),
    ("verl.jetrl.memory_plan", [TINY, "--gpu-gb", "80", "critic.enable=true"], "without LoRA, critic"),
    ("verl.jetrl.parity", ["{tmp}/none"], "{tmp}/none: no such folder"),
    ("verl.jetrl.parity", ["{tmp}/a.yaml"], "a.yaml: it is a file"),
    ("verl.jetrl.parity", ["{tmp}"], "{tmp}: no config.json"),
    ("verl.jetrl.parity", [f"{TINY}/model", "--tokens", "0"], "--tokens 0: it must be 1 or more"),
    ("verl.jetrl.parity", [f"{TINY}/model", "--batched-tokens", "0"], "--batched-tokens 0: it must be 1 or more"),
    ("verl.jetrl.parity", [f"{TINY}/model", "--updates", "-1"], "--updates -1: it must be 0 or more"),
    ("verl.jetrl.parity", [f"{TINY}/model", "--temperature", "0"], "--temperature 0.0: it must be above 0"),
    ("verl.jetrl.parity", [f"{TINY}/model", "--tokens", "100000"], "exceeds its max_position_embeddings"),
    ("verl.jetrl.parity", [f"{TINY}/model", "--json", "{tmp}/none/found.json"], "found.json cannot be written"),
    ("verl.jetrl.fp8.precompile", ["jobs"], "argument JOBS: invalid"),
    ("benchmarks.exact", ["--docs", "--out", "{tmp}/none.json"], "{tmp}/none.json: no such file"),
    ("benchmarks.exact", ["--jobs", "{tmp}/none"], "--jobs: {tmp}/none: no such folder"),
    ("benchmarks.exact", ["--quick", "--gates", "--cases", "smollm2_135m", "--model", "{tmp}"], "{tmp}: no config.json"),
    ("benchmarks.jobs", ["--cases", "none"], "unknown cases ['none']"),
    ("benchmarks.numerics", ["--docs", "--out", "{tmp}/none.json"], "{tmp}/none.json: no such file"),
    ("benchmarks.numerics", ["--bf16", "{tmp}"], "--bf16 needs --grpo"),
    ("benchmarks.numerics", ["--parts"], "argument --parts: expected at least one"),
    ("benchmarks.numerics", ["--steps", "0"], "--steps 0: it must be 20 or more"),
    ("benchmarks.ops", ["--docs", "--out", "{tmp}/none.json"], "{tmp}/none.json: no such file"),
    ("benchmarks.ops", ["--quick", "--sections"], "argument --sections: expected at least one"),
    ("benchmarks.rollout", ["--docs", "--out", "{tmp}"], "{tmp}/rollout.json: no such file"),
    ("benchmarks.rollout", ["--arms", "fp9"], "unknown arms ['fp9']"),
    ("benchmarks.rollout", ["--model", "{tmp}"], "{tmp}: no config.json"),
    ("benchmarks.rollout", ["--add", "--out", "{tmp}"], "{tmp}/rollout_samples.json: no such file"),
    ("benchmarks.soak", ["--out", "{tmp}/soak.json", "a.b=1"], "there is no setting a.b"),
    ("benchmarks.train", ["--docs", "--out", "{tmp}/none.json"], "{tmp}/none.json: no such file"),
    ("benchmarks.train", ["--jobs", "{tmp}/none"], "--jobs: {tmp}/none: no such folder"),
    ("benchmarks.train", ["--quick", "--parts", "9b"], "unknown parts ['9b']"),
    ("benchmarks.train", ["--quick", "--lengths", "long"], "argument --lengths: invalid"),
]


@pytest.mark.parametrize(("name", "arguments", "message"), REFUSED, ids=[f"{n} {' '.join(a)}" for n, a, _ in REFUSED])
def test_what_does_not_fit_is_one_message(command, tmp_path, name, arguments, message):
    files = {"a": b"a: 1\n", "broken": b"a: [\n", "bytes": b"\xff\xfe\x00", "list": b"- 1\n", "open": b"a: ${b}\n"}
    for file, content in files.items():
        (tmp_path / f"{file}.yaml").write_bytes(content)
    code, said = command(name, *(argument.format(tmp=tmp_path) for argument in arguments))
    assert code in (1, 2) and message.format(tmp=tmp_path) in said, said


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU says")
def test_a_benchmark_of_the_gpu_says_so(command):
    for name in ("rollout", "exact", "ops", "train", "jobs"):
        code, said = command(f"benchmarks.{name}")
        assert code == 1 and said.startswith(f"benchmarks.{name} needs ")


def test_a_device_that_is_none_is_named(command, monkeypatch):
    monkeypatch.setenv("JETRL_DEVICE", "tpu")
    for name, *arguments in (("run", TINY), ("show_flow", TINY), ("parity", f"{TINY}/model")):
        code, said = command(f"verl.jetrl.{name}", *arguments)
        assert code == 2 and "JETRL_DEVICE=tpu: set it to cpu or gpu" in said


def test_patches_that_do_not_fit_are_one_message(command, monkeypatch):
    def refuse(scope: str) -> None:
        raise patching.PatchError(f"{scope} 0.8.0 is installed")

    monkeypatch.setattr("verl.jetrl.show_patches.apply_all", refuse)
    assert command("verl.jetrl.show_patches") == (1, "error: verl 0.8.0 is installed\n")
