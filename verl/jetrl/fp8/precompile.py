"""Compiles DeepGEMM's kernels of a model in parallel processes, before the first token.

DeepGEMM chooses a kernel by the number of rows and compiles it at its first use: 3 to 5 s each, in the middle of a rollout.
One after the other they delay a first start by minutes, side by side by seconds.  The compiled kernels stay in
``environment.KERNEL_CACHE``.  As a script: ``python -m verl.jetrl.fp8.precompile JOBS`` compiles a list of [kind, rows, N, K].
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from filelock import FileLock

from verl.jetrl.environment import KERNEL_CACHE
from verl.jetrl.fp8 import gemm, ops

Job = tuple[str, int, int, int]  # "fp8" or "bf16", rows, N, K
PROCESSES = 14
PROCESS_BYTES = 3 * 2**30  # of GPU memory: a CUDA context and the operands of the largest GEMM


def row_counts(tokens: int) -> list[int]:
    """Numbers of rows that reach the kernels for up to ``tokens`` rows.

    DeepGEMM has tiles of 16, 32 and 64 rows for as few, and then another choice of tiles for every 64 rows or more.
    """
    steps = (range(64, 2048, 64), range(2048, 8192, 128), range(8192, tokens, 512))
    return sorted({rows for rows in (1, 32, *itertools.chain(*steps)) if rows < tokens} | {tokens})


def jobs_of(linears: Iterable[tuple[int, int]], head: tuple[int, int], tokens: int, sequences: int) -> list[Job]:
    """Every GEMM of a rollout: FP8 weights (N, K) at up to ``tokens`` rows, the BF16 head at up to ``sequences``."""
    fp8 = [("fp8", rows, *shape) for shape in dict.fromkeys(linears) for rows in row_counts(tokens)]
    return fp8 + [("bf16", rows, *head) for rows in row_counts(min(sequences, tokens))]


def pieces_of(jobs: list[Job], count: int) -> list[list[Job]]:
    """``jobs`` cut into up to ``count`` contiguous pieces of about as many kernels.

    Neighbours share kernels, the more of them the more rows they have: contiguous pieces compile few kernels twice.
    """
    ends = list(itertools.accumulate(1 / max(rows, 64) for _, rows, _, _ in jobs))
    pieces: list[list[Job]] = [[] for _ in range(count)]
    for job, end in zip(jobs, ends, strict=True):
        pieces[min(int(end / ends[-1] * count), count - 1)].append(job)
    return [piece for piece in pieces if piece]


@torch.inference_mode()
def run(jobs: Iterable[Job], device: torch.device) -> None:
    """Runs each GEMM once on zeros, which compiles its kernel where the cache lacks it."""
    weights: dict[tuple, object] = {}
    for kind, rows, N, K in jobs:
        x_MK = torch.zeros(rows, K, dtype=torch.bfloat16, device=device)
        if (kind, N, K) not in weights:
            w_NK = torch.zeros(N, K, dtype=torch.bfloat16, device=device)
            # One at a time: the memory is the engine's.
            weights = {(kind, N, K): ops.quantize_blocks(w_NK) if kind == "fp8" else w_NK}
        w = weights[kind, N, K]
        ops.fprop(ops.quantize_rows(x_MK), w) if kind == "fp8" else ops.bf16_gemm_nt(x_MK, w)
    torch.cuda.synchronize(device)


def precompile(jobs: list[Job], device: torch.device) -> None:
    """Fills the kernel cache for ``jobs``, once per cache, GPU model and DeepGEMM version.

    Processes on one machine that ask for the same do it once.  Raises RuntimeError with the output of a process that failed.
    """
    key = json.dumps([jobs, torch.cuda.get_device_name(device), gemm.deep_gemm().__version__])
    done = Path(os.environ[KERNEL_CACHE[0]]) / f"jetrl-{hashlib.sha256(key.encode()).hexdigest()[:16]}.compiled"
    done.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(done.with_suffix(".lock")):
        if done.exists():
            return
        free, _ = torch.cuda.mem_get_info(device)
        count = max(min(PROCESSES, (os.cpu_count() or 1) - 1, free // PROCESS_BYTES), 1)
        # The engine's process may see other device numbers than its children would.
        visible = {"CUDA_VISIBLE_DEVICES": f"GPU-{torch.cuda.get_device_properties(device).uuid}"}
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "verl.jetrl.fp8.precompile", json.dumps(piece)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=os.environ | visible,
            )
            for piece in pieces_of(jobs, count)
        ]
        try:
            for process in started:
                output, _ = process.communicate()
                if process.returncode:
                    raise RuntimeError(f"compiling GEMM kernels failed:\n{output[-4000:]}")
        finally:
            for process in started:
                process.kill()  # nothing where it has ended
                process.wait()
        done.touch()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m verl.jetrl.fp8.precompile", description=__doc__.splitlines()[0])
    parser.add_argument("jobs", metavar="JOBS", type=json.loads, help="JSON: a list of [kind, rows, N, K]; kind: fp8 or bf16")
    run([tuple(job) for job in parser.parse_args().jobs], torch.device("cuda", 0))


if __name__ == "__main__":
    main()
