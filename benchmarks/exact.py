"""What exact mode costs the rollout, and what it saves: the whole step without the log-prob pass, against default mode.

    python -m benchmarks.exact                      # Qwen3-8B shapes, random weights, one Hopper GPU -> exact.json
    python -m benchmarks.exact --quick --out FILE   # tiny shapes, also without a GPU: checks the script itself
    python -m benchmarks.exact --docs               # writes the table of --out into docs/exact.md

A rollout of 8K tokens takes minutes, so it is put together: the time of a decode step is measured at several lengths of
context, and a response's steps are the sum over its contexts, interpolated.  What does not fit into the KV cache at once runs
in waves.  The training phase is timed on full micro-batches of sequences as long as the responses.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.engines import Engine, Settings
from benchmarks.rollout import RESULTS, SHAPES, compile_kernels, prompts, provenance_of, stored
from benchmarks.tables import fill, markdown
from benchmarks.timing import Clock
from benchmarks.train import synchronize
from benchmarks.trainers import restart_as_run
from verl.jetrl.checkpoints import write_atomically
from verl.jetrl.environment import RUN_ID, run_tmp
from verl.jetrl.parity import trainer_side

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
NOTES = {
    "arms": "jetrl: attention's work split as vLLM chooses; jetrl_exact: one split.  Everything else is the same code.",
    "decode_ms": f"time of one decode step, mean of {STEPS} that start at the context named (the prefix cache holds it).",
    "rollout_seconds": f"prompts of {PROMPT} tokens: the decode steps of the response, from decode_ms by linear interpolation; "
    "prefill is not counted.  More sequences than the KV cache holds run in equal waves.",
    "training": "seconds per token of full micro-batches: the log-prob pass, forward and backward; the optimizer (its states "
    "do not fit beside the rest on one GPU) and the weight write are left out, in both arms.",
    "step_vs_default": "(rollout + log-prob pass + training) of jetrl over (rollout + training + log-prob pass / "
    f"{VERIFY_EVERY}) of jetrl_exact; step_vs_default is the smallest over the cases.",
    "norm": "microseconds of the fork's RMSNorm with residual that writes FP8, against vLLM's fused norm and quantizer, whose "
    "rows depend on how many there are.",
}


def device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


# --- the trainer ------------------------------------------------------------------------------------------------------


def make_trainer(shapes: Mapping[str, Any], layers: int, folder: Path) -> tuple[nn.Module, Masters]:
    """A random model on the shared decoder, and its masters behind an arena that the engines map."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("qwen3", num_hidden_layers=layers, max_window_layers=layers, **shapes)
    config.architectures, config.dtype, config.eos_token_id, config.bos_token_id = ["Qwen3ForCausalLM"], "bfloat16", None, None
    config.save_pretrained(folder)
    torch.manual_seed(0)

    def load(attention: str) -> nn.Module:
        with device():
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)

    model, _, masters = trainer_side(load)
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
    steps = []
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
    figures["step_vs_default"] = min(steps)
    return figures | {f"norm_us_{name}": value for name, value in samples["norm"].items()}


def report(result: Mapping[str, Any]) -> dict[str, str]:
    """The cost table of docs/exact.md."""
    cost, rows = result["cost"], []
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--quick", action="store_true", help="tiny shapes: checks the script itself, also without a GPU")
    parser.add_argument("--docs", action="store_true", help="only write the table of --out into docs/exact.md")
    parser.add_argument("--out", type=Path, default=RESULTS / "exact.json")
    args = parser.parse_args()
    if args.docs:
        fill(ROOT / "docs" / "exact.md", report(stored(args.out)))
        return
    if not torch.cuda.is_available() and not args.quick:
        sys.exit("benchmarks.exact needs a Hopper GPU; --quick --out FILE checks the script on a CPU")
    restart_as_run()
    os.environ["VERL_REPLICA_RANK"] = "0"
    shapes, layers = (TINY, 2) if args.quick else (SHAPES, args.layers)
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
    command = " ".join(["python -m benchmarks.exact", *sys.argv[1:]])
    result = stored(args.out)
    figures = figures_of(samples, cases, grid)
    result["cost"] = provenance_of(command) | {
        "notes": NOTES,
        "shapes": shapes | {"num_hidden_layers": layers},
        "samples": samples,
        "figures": figures,
    }
    result["figures"] |= figures
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(args.out, json.dumps(result, indent=1) + "\n")
    for table in report(result).values():
        print(table)


if __name__ == "__main__":
    main()
