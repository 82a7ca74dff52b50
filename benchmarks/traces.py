"""Where the time of a decode step or a training step goes on the GPU: kernel times from torch's profiler, by kind."""

from __future__ import annotations

import gzip
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

KINDS = (  # the first that matches a kernel's name
    ("KV cache write", r"reshape_and_cache"),
    ("attention", r"flash|fmha|attn"),
    ("GEMM", r"gemm|nvjet|cutlass|cublas|gemv|splitk"),
    ("sampling", r"gumbel|topk|top_k|softmax|argmax|sample|temperature"),
    ("norm, RoPE, activation, quantization", r"rms|rope|rotary|silu|act_and_mul|quant|_(rows|forward)_kernel|triton_"),
)
TRAINING_KINDS = (
    ("collectives", r"nccl"),
    ("attention, backward", r"(flash|fmha|attn).*(bwd|backward)"),
    ("attention, forward", r"flash|fmha|attn"),
    ("FP8 GEMM", r"fp8_gemm"),
    ("BF16 GEMM", r"gemm|nvjet|cutlass|cublas|gemv|splitk"),
    ("log-probs", r"softmax|logsumexp|gather|topk"),
    ("optimizer", r"adam|multi_tensor|foreach"),
    ("norm, RoPE, activation, quantization", r"rms|rope|silu|_(rows|tiles|transpose|forward|backward)_kernel|^triton_"),
)
REST = "copies and the rest"
IDLE = "no kernel"
PREFILL, STEPS = 40, 16  # engine steps before recording starts, and those recorded
NAMED = 4  # kernels of a kind that are kept by name
WAITS = 12  # longest times without a kernel that are kept


def profiler_config(folder: Path) -> dict[str, Any]:
    """vLLM's option ``profiler_config``: nothing is recorded until ``start_profile``, and then only steady decode steps."""
    return {
        "profiler": "torch",
        "torch_profiler_dir": str(folder),
        "torch_profiler_with_stack": False,
        "torch_profiler_dump_cuda_time_total": False,
        "ignore_frontend": True,
        "delay_iterations": PREFILL,
        "max_iterations": STEPS,
    }


def kind_of(name: str, kinds: tuple[tuple[str, str], ...] = KINDS) -> str:
    return next((kind for kind, pattern in kinds if re.search(pattern, name, re.IGNORECASE)), REST)


def events_of(folder: Path) -> list[dict[str, Any]]:
    """What ran on the GPU, from the traces (``*.json.gz``) in ``folder``."""
    return [
        event
        for path in sorted(folder.glob("*.json.gz"))
        for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]


def kernel_times(folder: Path, layers: int) -> dict[str, Any]:
    """Milliseconds per decode step by kind of kernel, from the traces in ``folder``; and the largest kernels by name.

    A step writes the KV cache once per layer, which tells how many there were.  Raises ValueError without such a kernel.
    """
    events = events_of(folder)
    steps = sum(kind_of(event["name"]) == "KV cache write" for event in events) / layers
    if not steps:
        raise ValueError(f"no decode step was recorded in {folder}")
    return summary(events, steps)


def summary(events: list[dict[str, Any]], steps: float, kinds: tuple[tuple[str, str], ...] = KINDS) -> dict[str, Any]:
    """Milliseconds per step by kind of kernel, and of the largest kernels of each kind.

    Streams overlap: the kinds may add up to more than the step, and ``no kernel`` is when no stream ran anything.  ``waits``:
    the longest such times, when they began and what ran before and after: in training the host was late there, as a rule.
    """
    names: dict[str, Counter[str]] = {}
    busy, end, last, waits = 0.0, float("-inf"), "", []
    ordered = sorted(events, key=lambda event: event["ts"])
    for event in ordered:
        names.setdefault(kind_of(event["name"], kinds), Counter())[event["name"]] += event["dur"]
        busy += max(event["ts"] + event["dur"] - max(end, event["ts"]), 0.0)
        if last and event["ts"] > end:
            waits.append((event["ts"] - end, end - ordered[0]["ts"], last, event["name"][:80]))
        if event["ts"] + event["dur"] > end:
            end, last = event["ts"] + event["dur"], event["name"][:80]
    by_kind = Counter({kind: of_kind.total() for kind, of_kind in names.items()})
    by_kind[IDLE] = end - ordered[0]["ts"] - busy
    ms = 1e-3 / steps
    return {
        "steps": steps,
        "busy_ms_per_step": busy * ms,
        "ms_per_step": {kind: us * ms for kind, us in by_kind.most_common()},
        "events_per_step": len(ordered) / steps,
        "waits": [
            {"ms": us * 1e-3, "at_ms": at * 1e-3, "after": before, "before": after}
            for us, at, before, after in sorted(waits, reverse=True)[:WAITS]
        ],
        "largest": {kind: {name[:160]: us * ms for name, us in of_kind.most_common(NAMED)} for kind, of_kind in names.items()},
    }


def training_times(step: Callable[[], Any]) -> dict[str, Any]:
    """The kernels of one training step, which this runs under the profiler; needs a GPU."""
    with tempfile.TemporaryDirectory() as folder:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
        profile.export_chrome_trace(f"{folder}/step.json.gz")
        return summary(events_of(Path(folder)), 1, TRAINING_KINDS)
