"""Where a decode step's time goes on the GPU: kernel times of an engine from vLLM's torch profiler, by kind."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

KINDS = (  # the first that matches a kernel's name
    ("KV cache write", r"reshape_and_cache"),
    ("attention", r"flash|fmha|attn"),
    ("GEMM", r"gemm|nvjet|cutlass|cublas|gemv|splitk"),
    ("sampling", r"gumbel|topk|top_k|softmax|argmax|sample|temperature"),
    ("norm, RoPE, activation, quantization", r"rms|rope|rotary|silu|act_and_mul|quant|_rows_kernel|triton_"),
)
REST = "copies and the rest"
IDLE = "no kernel"
PREFILL, STEPS = 40, 16  # engine steps before recording starts, and those recorded


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


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), REST)


def kernel_times(folder: Path, layers: int) -> dict[str, Any]:
    """Milliseconds per step by kind of kernel, from the traces in ``folder``; and the largest kernels by name.

    A step writes the KV cache once per layer, which tells how many there were.  Raises ValueError without such a kernel.
    """
    events = [
        event
        for path in sorted(folder.glob("*.json.gz"))
        for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    steps = sum(kind_of(event["name"]) == "KV cache write" for event in events) / layers
    if not steps:
        raise ValueError(f"no decode step was recorded in {folder}")
    kinds: Counter[str] = Counter()
    names: Counter[str] = Counter()
    busy, end = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event["ts"]):
        kinds[kind_of(event["name"])] += event["dur"]
        names[event["name"]] += event["dur"]
        busy += max(event["ts"] + event["dur"] - max(end, event["ts"]), 0.0)
        end = max(end, event["ts"] + event["dur"])
    kinds[IDLE] = end - min(event["ts"] for event in events) - busy
    ms = 1e-3 / steps
    return {
        "steps": steps,
        "ms_per_step": {kind: us * ms for kind, us in kinds.most_common()},
        "largest": {name[:160]: us * ms for name, us in names.most_common(12)},
    }
