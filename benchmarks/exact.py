"""Whether exact mode is exact, what it costs the rollout, and what it saves: the whole step without the log-prob pass.

    python -m benchmarks.exact                      # cost: Qwen3-8B shapes, random weights, one Hopper GPU -> exact.json
    python -m benchmarks.exact --gates              # equality of both sides' log-probs before and after updates, every case
    python -m benchmarks.exact --gates --cases smollm2_135m --model models/SmolLM2-135M-Instruct
    python -m benchmarks.exact --jobs runs/qwen3-8b # adds what whole runs of the arm jetrl-exact verified
    python -m benchmarks.exact --quick --out FILE   # tiny shapes, also without a GPU: checks the script itself
    python -m benchmarks.exact --docs               # writes the tables of --out into docs/exact.md

Each leaves what the others wrote; a case of --gates replaces that case alone, and is written when it ends.

A rollout of 8K tokens takes minutes, so it is put together: the time of a decode step is measured at several lengths of
context, and a response's steps are the sum over its contexts, interpolated.  What does not fit into the KV cache at once runs
in waves.  The training phase is timed on full micro-batches of sequences as long as the responses.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.engines import Engine, Settings
from benchmarks.rollout import RESULTS, compile_kernels, figures_of_parts, prompts, provenance_of, stored
from benchmarks.shapes import QWEN2_5_7B, QWEN3_8B, SMOLLM2_135M, save_config
from benchmarks.tables import fill, markdown, result_of
from benchmarks.timing import Clock
from benchmarks.train import synchronize
from benchmarks.trainers import restart_as_run
from verl.jetrl import metric_names
from verl.jetrl.checkpoints import write_atomically
from verl.jetrl.environment import RUN_ID, run_tmp
from verl.jetrl.parity import device, random_weights, trainer_side
from verl.jetrl.report.load import ReportError, load_arms, read_segment

if TYPE_CHECKING:
    from verl.jetrl.trainer.masters import Masters

ROOT = Path(__file__).resolve().parent.parent
GB = 2**30
ARMS = ("jetrl", "jetrl_exact")
PROMPT = 256
# By number of concurrent sequences, the contexts whose decode steps are timed; the KV cache holds each.
GRID = {64: (256, 1024, 2048, 4096, 8192), 128: (256, 1024, 2048, 4096), 256: (256, 1024, 2048)}
CASES = [(count, response) for count in (64, 256) for response in (1024, 4096, 8192)]
STEPS = 128
LARGEST_BLOCK = 128  # of vLLM's KV cache; the last one of a cached prompt is computed again
MICRO_BATCH = 8192
KV_BYTES = 82 * GB  # 256 sequences of 2K, 128 of 4K or 64 of 8K tokens
VERIFY_EVERY = 10  # jetrl.verify_log_probs_every: in one step of so many the log-prob pass runs all the same
TINY = dict(
    hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64, vocab_size=512,
    tie_word_embeddings=False, max_position_embeddings=512,
)  # fmt: skip
UPDATES = 3
JOB_ARM, METRIC = "jetrl-exact", metric_names.ABS_DLOGP_MAX
# The family and shapes of each gate.
GATES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_8b": ("qwen3", QWEN3_8B),
    "qwen2_5_7b": ("qwen2", QWEN2_5_7B),
    "smollm2_135m": ("llama", SMOLLM2_135M),
}
# CUDA graphs come first: that engine compiles the GEMM kernels of up to 256 rows side by side, and all the others find them.
MODES = {"compiled": ("--compiled", "--batched-tokens", "256"), "eager": ("--batched-tokens", "64")}
# Prompts of many lengths, cut into chunks beside decode; temperature is part of what has to be equal.
GATE_OPTIONS = ("--prompts", "24", "--prompt", "156", "--tokens", "100", "--temperature", "0.7", "--kv-mb", "4096")
QUICK_OPTIONS = ("--prompts", "4", "--prompt", "24", "--tokens", "8", "--temperature", "0.7")
GATE_NOTE = "max_abs_dlogp_* must be 0. NaN: the stage did not run; inf: log-probs were equal, and something else was not."
NOTES = {
    "arms": "jetrl: attention's work split as vLLM chooses; jetrl_exact: one split.  Everything else is the same code.",
    "decode_ms": f"time of one decode step, mean of {STEPS} that start at the context named (the prefix cache holds it).",
    "rollout_seconds": f"prompts of {PROMPT} tokens: the decode steps of the response, from decode_ms by linear interpolation; "
    "prefill is not counted.  More sequences than the KV cache holds run in equal waves.",
    "training": "seconds per token of full micro-batches: the log-prob pass, forward and backward; the optimizer (its states "
    "do not fit beside the rest on one GPU) and the weight write are left out, in both arms.",
    "step_vs_default": "(rollout + log-prob pass + training) of jetrl over (rollout + training + log-prob pass / "
    f"{VERIFY_EVERY}) of jetrl_exact; step_vs_default and rollout_vs_default_64 are the smallest over the cases, all of which "
    "have 64 or more concurrent sequences.",
    "norm": "microseconds of the fork's RMSNorm with residual that writes FP8, against vLLM's fused norm and quantizer, whose "
    "rows depend on how many there are.",
}


# --- the trainer ------------------------------------------------------------------------------------------------------


def make_trainer(shapes: Mapping[str, Any], layers: int, folder: Path) -> tuple[nn.Module, Masters]:
    """A random model on the shared decoder, and its masters behind an arena that the engines map."""
    config = save_config(folder, shapes | {"num_hidden_layers": layers})
    model, _, masters = trainer_side(partial(random_weights, config))
    return model, masters


def training_seconds(model: nn.Module, masters: Masters, length: int, tokens: int, repeats: int) -> dict[str, float]:
    """Seconds per token of the log-prob pass, and of forward and backward, for sequences of ``length`` tokens."""
    from verl.jetrl.trainer.log_probs import log_probs

    vocabulary = model.config.vocab_size
    ids = torch.randint(0, vocabulary, (1, tokens), device=device())
    positions = (torch.arange(tokens, device=device()) % length)[None]
    ones = torch.ones(tokens, device=device())

    def forward() -> Tensor:
        hidden = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
        return log_probs(hidden, masters.decoder.lm_head, ids[0].roll(-1), ones, vocabulary)[0]

    def log_prob_pass() -> None:
        with torch.no_grad():
            forward()

    def forward_backward() -> None:
        forward().mean().backward()

    model.eval()
    masters.allocate_grads()
    found = {}
    for name, work in (("log_prob", log_prob_pass), ("forward_backward", forward_backward)):
        work()  # compiles
        found[name] = statistics.median(timed(work) for _ in range(repeats)) / tokens
    masters.drop_grads()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def timed(work: Callable[[], object]) -> float:
    """Seconds, the device idle at both ends."""
    synchronize()
    started = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - started


def norm_microseconds(H: int, quick: bool) -> dict[str, float]:
    """The fork's fused norm and quantizer, and vLLM's, at decode sizes, in CUDA graphs."""
    clock, found = Clock(device().type, quick), {}
    for M in (64, 256):
        x, residual, weight = (torch.randn(n, H, device=device()).bfloat16() for n in (M, M, 1))
        for name, run in norms(x, residual, weight[0]).items():
            found[f"{name}_{M}"] = clock.graph(f"{name} {M}", run)
    return found


def norms(x_MH: Tensor, residual_MH: Tensor, weight_H: Tensor) -> dict[str, Callable[[int], object]]:
    """Both sides' norm with residual add and quantizer."""
    from verl.jetrl.fp8 import ops

    runs: dict[str, Callable[[int], object]] = {
        "jetrl": lambda _: ops.rms_norm_quantize(x_MH, weight_H, 1e-6, residual_MH),
    }
    if x_MH.is_cuda:
        from vllm import _custom_ops
        from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

        def of_vllm(_: int) -> None:
            _custom_ops.fused_add_rms_norm(x_MH, residual_MH, weight_H, 1e-6)  # in place: the values change, not the time
            per_token_group_quant_fp8(x_MH, 128, column_major_scales=True)

        runs["vllm"] = of_vllm
    return runs


# --- the rollout ------------------------------------------------------------------------------------------------------


def decode_ms(engine: Engine, grid: Mapping[int, tuple[int, ...]], steps: int, vocabulary: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a decode step by number of sequences and context."""
    found: dict[str, dict[str, float]] = {}
    for count, contexts in grid.items():
        asked = prompts(count, max(contexts), count, vocabulary)
        for context in contexts:  # each extends the last one's prompts, whose keys and values are cached
            cut = [prompt[:context] for prompt in asked]
            engine("generate", cut, 4, False)  # fills the cache, and warms up prefill and decode
            once, _, _ = engine("generate", cut, 1, False)
            cached = min(engine("cached_tokens"))
            if cached < context - LARGEST_BLOCK:
                raise RuntimeError(f"{count} prompts of {context} tokens: only {cached} of one were in the prefix cache")
            several, _, _ = engine("generate", cut, 1 + steps, False)
            found.setdefault(str(count), {})[str(context)] = 1e3 * (several - once) / steps
            print(f"{engine.kind}: {count} sequences at {context}: {found[str(count)][str(context)]:.2f} ms", flush=True)
    return found


def waves(count: int, response: int, grid: Mapping[int, tuple[int, ...]]) -> tuple[int, int]:
    """How many sequences run at a time, and how often, so that their keys and values fit."""
    fit = [n for n in grid if n <= count and count % n == 0 and max(grid[n]) >= response]
    if not fit:
        raise ValueError(f"{count} responses of {response} tokens: no number of sequences was measured that long")
    return max(fit), count // max(fit)


def rollout_seconds(measured: Mapping[str, float], prompt: int, response: int, steps: int = STEPS) -> float:
    """Seconds of ``response`` decode steps after ``prompt`` tokens, from milliseconds per step by context."""
    at = np.array([int(c) + steps / 2 for c in measured])
    ms = np.array(list(measured.values()))
    contexts = np.arange(prompt, prompt + response)
    values = np.interp(contexts, at, ms)
    if len(at) > 1:  # beyond the ends along the first or the last piece
        for side, pair in ((contexts < at[0], slice(0, 2)), (contexts > at[-1], slice(-2, None))):
            slope = np.diff(ms[pair])[0] / np.diff(at[pair])[0]
            end = pair.start if pair.start == 0 else -1
            values[side] = ms[end] + slope * (contexts[side] - at[end])
    return float(values.sum() / 1e3)


def figures_of(samples: Mapping[str, Any], cases: list[tuple[int, int]] = CASES, grid: Mapping = GRID) -> dict[str, float]:
    """Figures of all cases measured in both arms."""
    figures: dict[str, float] = {}
    steps, rollouts = [], []
    for count, response in cases:
        at_once, times = waves(count, response, grid)
        rollout = {
            arm: times * rollout_seconds(samples["decode_ms"][arm][str(at_once)], samples["prompt"], response, samples["steps"])
            for arm in ARMS
        }
        training = samples["training"][str(response)]
        tokens = count * (samples["prompt"] + response)
        log_prob, train = (tokens * training[name] for name in ("log_prob", "forward_backward"))
        default = rollout["jetrl"] + log_prob + train
        exact = rollout["jetrl_exact"] + log_prob / VERIFY_EVERY + train
        case = f"{count}_{response}"
        figures |= {f"rollout_seconds_{arm}_{case}": seconds for arm, seconds in rollout.items()}
        figures[f"training_seconds_{case}"] = train
        figures[f"log_prob_seconds_{case}"] = log_prob
        figures[f"rollout_vs_default_{case}"] = rollout["jetrl"] / rollout["jetrl_exact"]
        figures[f"step_vs_default_{case}"] = default / exact
        steps.append(default / exact)
        rollouts.append(figures[f"rollout_vs_default_{case}"])
    least = min(count for count, _ in cases)
    figures |= {"step_vs_default": min(steps), f"rollout_vs_default_{least}": min(rollouts)}
    return figures | {f"norm_us_{name}": value for name, value in samples["norm"].items()}


# --- gates ------------------------------------------------------------------------------------------------------------


def gate(case: str, mode: str, model: Path | None, quick: bool) -> dict[str, Any]:
    """Runs one case of the parity tool; its entry in exact.json.  ``model``: a checkpoint instead of random weights."""
    family, shapes = GATES[case]
    with tempfile.TemporaryDirectory(prefix="jetrl-gate-") as temporary:
        found = Path(temporary) / "outcome.json"
        options = ["--updates", str(UPDATES), "--json", str(found), *(QUICK_OPTIONS if quick else GATE_OPTIONS)]
        options += MODES[mode]
        if model is None:
            tiny = TINY | {"num_hidden_layers": 2, "tie_word_embeddings": shapes["tie_word_embeddings"]}
            save_config(Path(temporary), shapes | (tiny if quick else {}), family)
            options.append("--random")
        command = [sys.executable, "-m", "verl.jetrl.parity", str(model.resolve() if model else temporary), *options]
        with open(Path(temporary) / "stderr", "w+", errors="replace") as log:
            code = subprocess.run(command, cwd=ROOT, stderr=log).returncode
            log.seek(0)
            said = log.read()
        outcome = json.loads(found.read_text()) if found.exists() else {}
    entry = {"notes": GATE_NOTE, "weights": model.name if model else "random", "exit_code": code, "outcome": outcome}
    entry["figures"] = gate_figures(case, mode, code, outcome)
    if code:
        print(said[-6000:], file=sys.stderr)
        entry["error"] = next((line for line in reversed(said.splitlines()) if "Error" in line), f"exit code {code}")
    return entry


def gate_figures(case: str, mode: str, code: int, outcome: Mapping[str, Any]) -> dict[str, float]:
    """The largest differences of a case's stages: 0 where all is equal, else as GATE_NOTE says."""
    found = {}
    for updates in (0, UPDATES):
        name = f"max_abs_dlogp_{case}_{updates}_updates{'_compiled' * (mode == 'compiled')}"
        stage = outcome.get("stages", {}).get(f"{updates} updates", {"max_abs_dlogp": math.nan, "equal": False})
        worst = stage["max_abs_dlogp"]
        found[name] = math.inf if worst == 0 and not stage["equal"] else worst
    if code and not any(found.values()):  # the tool failed after it had found all to be equal
        found[name] = math.inf
    return found


def run_gates(cases: list[str], modes: list[str], model: Path | None, quick: bool, out: Path, command: str) -> list[str]:
    """Every case in every mode, written when it ends; those that failed."""
    failed = []
    for case in cases:
        for mode in modes:
            name = case + "_compiled" * (mode == "compiled")
            print(f"--- {name}", flush=True)
            begun = time.perf_counter()
            entry = gate(case, mode, model, quick)
            print(f"--- {name}: {time.perf_counter() - begun:.0f} s, {entry['figures']}", flush=True)
            result = stored(out)
            result.setdefault("gates", {})[name] = provenance_of(command) | entry
            save(out, result)
            if any(entry["figures"].values()):
                failed.append(name)
    return failed


def add_job(out: Path, folder: Path) -> None:
    """Adds what the finished run of the arm jetrl-exact in ``folder`` (runs/<recipe>) verified to the file.

    Raises ReportError where there is none, or no step of it was verified.
    """
    from verl.jetrl.memory_plan import gpus

    (arm,) = load_arms(folder, [JOB_ARM])
    run = folder / arm.name
    if arm.status.state != "finished" or arm.config is None:
        raise ReportError(f"{run}: a finished run with its config.yaml is needed, this one is {arm.status.state}")
    # Steps that a restart did again count too: a difference in any of them is one.
    starts = [read_segment(path) for path in sorted((run / "segments").glob("*.jsonl"))]
    gaps = [(step, record[METRIC]) for start in starts for step, record in start if METRIC in record]
    if not gaps:
        raise ReportError(f"{run}: no step has {METRIC}: nothing was verified (jetrl.verify_log_probs_every)")
    arena, count = arm.config.actor_rollout_ref.actor.fsdp_config.arena, gpus(arm.config)
    name = f"{folder.resolve().name}_{count}gpu".replace("-", "_") + ("" if arena == "replicated" else f"_{arena}")
    worst = float(np.max([gap for _, gap in gaps]))  # NaN where one is
    result = stored(out)
    result.setdefault("jobs", {})[name] = {
        "command": " ".join(["python -m benchmarks.exact", *sys.argv[1:]]),
        "device": arm.status.device,
        "versions": arm.status.versions,
        "model": Path(arm.config.actor_rollout_ref.model.path).name,
        "gpus": count,
        "arena": arena,
        "steps": len(arm.train_steps),
        "verified_steps": len({step for step, _ in gaps}),
        "starts": sum(map(bool, starts)),
        "max_abs_dlogp": worst,
        "figures": {f"max_abs_dlogp_job_{name}": worst},
    }
    save(out, result)


def save(out: Path, result: dict[str, Any]) -> None:
    """Writes the file; figures of its other parts stay."""
    result["figures"] |= figures_of_parts(result)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, json.dumps(result, indent=1) + "\n")


# --- tables -----------------------------------------------------------------------------------------------------------


def report(result: Mapping[str, Any]) -> dict[str, str]:
    """The tables of docs/exact.md of those parts that the file has."""
    tables = cost_tables(result["cost"]) if "cost" in result else {}
    parts = [of(result[name]) for name, of in (("gates", gate_table), ("jobs", job_table)) if result.get(name)]
    return tables | ({"gates": "\n\n".join(parts)} if parts else {})


def gate_table(gates: Mapping[str, Any]) -> str:
    rows = []
    for name, entry in gates.items():
        stages = entry["outcome"].get("stages", {}).values()
        last = list(stages)[-1] if stages else {}
        rows.append(
            [name, entry["weights"], *entry["figures"].values(), sum(s["sampled_tokens"] for s in stages)]
            + [sum(sum(s[kind].values()) for s in stages) for kind in ("rows", "different_rows")]
            + [last.get("stale_mean_abs_dlogp"), entry["device"]]
        )
    header = ["case", "weights", "max \\|Δ log p\\|, 0 updates", f"{UPDATES} updates", "sampled tokens", "operators' rows"]
    return markdown([*header, "rows that differ", "mean \\|Δ log p\\| of stale weights", "device"], rows)


def job_table(jobs: Mapping[str, Any]) -> str:
    columns = ("model", "gpus", "arena", "steps", "verified_steps", "starts", "max_abs_dlogp", "device")
    header = ["run", "model", "GPUs", "arena", "steps", "verified", "starts", "max \\|Δ log p\\|", "device"]
    return markdown(header, [[name, *(entry[column] for column in columns)] for name, entry in jobs.items()])


def cost_tables(cost: Mapping[str, Any]) -> dict[str, str]:
    rows = []
    for case in [name.removeprefix("step_vs_default_") for name in cost["figures"] if name.startswith("step_vs_default_")]:
        count, response = case.split("_")
        f = {name.removesuffix(f"_{case}"): value for name, value in cost["figures"].items() if name.endswith(f"_{case}")}
        rates = [int(count) * int(response) / f[f"rollout_seconds_{arm}"] for arm in ARMS]
        rows.append(
            [f"{count} x {response}", *(round(r) for r in rates), f"{f['rollout_vs_default']:.3f}"]
            + [f["log_prob_seconds"], f["training_seconds"], f"{f['step_vs_default']:.3f}"]
        )
    header = ["responses", "default, tokens/s", "exact, tokens/s", "exact / default", "log-prob pass, s", "training, s"]
    return {
        "cost": markdown([*header, "step, default / exact"], rows),
        "cost run": f"`{cost['command']}` on one {cost['device']}.",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.exact", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--quick", action="store_true", help="tiny shapes: checks the script itself, also without a GPU")
    parser.add_argument("--gates", action="store_true", help="only check that both sides' log-probs are equal")
    parser.add_argument("--cases", default=",".join(GATES), help=f"of --gates: {', '.join(GATES)}")
    modes = ",".join(MODES) if torch.cuda.is_available() else "eager"
    parser.add_argument("--modes", default=modes, help="of --gates: compiled (CUDA graphs), eager (operator by operator)")
    parser.add_argument("--model", type=Path, help="of --gates: a checkpoint for the one case named, instead of random weights")
    parser.add_argument("--jobs", type=Path, help="only add what a whole run verified, a folder such as runs/qwen3-8b")
    parser.add_argument("--docs", action="store_true", help="only write the tables of --out into docs/exact.md")
    parser.add_argument("--out", type=Path, default=RESULTS / "exact.json")
    args = parser.parse_args()
    if args.docs:
        fill(ROOT / "docs" / "exact.md", report(result_of(args.out)))
        return
    if args.jobs:
        try:
            return add_job(args.out, args.jobs)
        except ReportError as error:
            parser.error(f"--jobs: {error}")
    if not torch.cuda.is_available() and not args.quick:
        sys.exit("benchmarks.exact needs a Hopper GPU; --quick --out FILE checks the script on a CPU")
    command = " ".join(["python -m benchmarks.exact", *sys.argv[1:]])
    if args.gates:
        cases, modes = args.cases.split(","), args.modes.split(",")
        if unknown := [name for name in (*cases, *modes) if name not in (*GATES, *MODES)]:
            parser.error(f"unknown {', '.join(unknown)}; there are cases {', '.join(GATES)} and modes {', '.join(MODES)}")
        if args.model and len(cases) != 1:
            parser.error("--model needs --cases with the one case that the checkpoint is of")
        if args.model and not (args.model / "config.json").is_file():
            parser.error(f"--model {args.model}: no config.json in it, so it is not a Hugging Face checkpoint")
        if failed := run_gates(cases, modes, args.model, args.quick, args.out, command):
            sys.exit(f"NOT equal: {', '.join(failed)}")
        return
    restart_as_run()
    os.environ["VERL_REPLICA_RANK"] = "0"
    shapes, layers = (TINY, 2) if args.quick else (QWEN3_8B, args.layers)
    grid = {2: (128, 256), 4: (128,)} if args.quick else GRID
    cases = [(2, 128), (4, 256)] if args.quick else CASES
    steps, repeats = (8, 1) if args.quick else (STEPS, 3)
    longest = max(max(contexts) for contexts in grid.values()) + 2 * steps
    settings = Settings(
        model=Path(f"/tmp/jetrl-bench-exact-{os.getpid()}"),
        kv_bytes=GB if args.quick else KV_BYTES,
        max_model_len=longest,
        max_num_batched_tokens=max(MICRO_BATCH, longest),
        prefix_cache=True,
    )
    samples: dict[str, Any] = {"prompt": 128 if args.quick else PROMPT, "steps": steps, "training": {}, "decode_ms": {}}
    try:
        if not args.quick:
            compile_kernels(settings)
        model, masters = make_trainer(shapes, layers, settings.model)
        samples["norm"] = norm_microseconds(shapes["hidden_size"], args.quick)
        for length in sorted({response for _, response in cases}):
            tokens = max(length, 128 if args.quick else MICRO_BATCH)
            samples["training"][str(length)] = training_seconds(model, masters, length, tokens, repeats)
        for arm in ARMS:
            with closing(Engine("jetrl", replace(settings, exact=arm == "jetrl_exact"))) as engine:
                samples["decode_ms"][arm] = decode_ms(engine, grid, steps, shapes["vocab_size"])
    finally:
        shutil.rmtree(settings.model, ignore_errors=True)
        shutil.rmtree(run_tmp(os.environ[RUN_ID]), ignore_errors=True)
    result = stored(args.out)
    figures = figures_of(samples, cases, grid)
    result["cost"] = provenance_of(command) | {
        "notes": NOTES,
        "shapes": shapes | {"num_hidden_layers": layers},
        "samples": samples,
        "figures": figures,
    }
    save(args.out, result)
    for table in report(result).values():
        print(table)


if __name__ == "__main__":
    main()
