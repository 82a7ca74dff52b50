"""Compiling DeepGEMM's kernels in parallel processes; a shell script stands in for the processes, CUDA's answers are faked."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace

import pytest
import torch

from verl.jetrl.fp8 import ops, precompile

LINEARS = [(256, 128), (384, 256), (256, 128)]
JOBS = precompile.jobs_of(LINEARS, (512, 128), tokens=300, sequences=40)
CPU = torch.device("cpu")


@pytest.fixture
def children(tmp_path, monkeypatch):
    """Every process that ``precompile`` starts, in order; ``children.script`` is what each runs, its jobs are ``$3``."""
    script = tmp_path / "python"
    started = SimpleNamespace(processes=[], environments=[], script=script, cache=tmp_path / "cache")
    script.write_text("#!/bin/sh\n")
    script.chmod(0o700)
    popen = subprocess.Popen

    def start(*args, env, **kwargs):
        started.processes.append(popen(*args, env=env, **kwargs))
        started.environments.append(env)
        return started.processes[-1]

    monkeypatch.setattr(precompile.subprocess, "Popen", start)
    monkeypatch.setattr(precompile.sys, "executable", str(script))
    monkeypatch.setattr(precompile.os, "cpu_count", lambda: 5)
    monkeypatch.setattr(precompile.gemm, "deep_gemm", lambda: SimpleNamespace(__version__="2.5.0"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12ab-34cd"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 * 2**30, 140 * 2**30))
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(started.cache))
    return started


def pieces(children) -> list[list[tuple]]:
    assert all(process.args[1:3] == ["-m", "verl.jetrl.fp8.precompile"] for process in children.processes)
    return [[tuple(job) for job in json.loads(process.args[3])] for process in children.processes]


def test_jobs_cover_every_shape_once():
    by_shape = {}
    for kind, rows, N, K in JOBS:
        by_shape.setdefault((kind, N, K), []).append(rows)
    everything = [1, 32, 64, 128, 192, 256, 300]
    assert by_shape == {("fp8", 256, 128): everything, ("fp8", 384, 256): everything, ("bf16", 512, 128): [1, 32, 40]}
    assert precompile.jobs_of([], (512, 128), tokens=8, sequences=256) == [("bf16", 1, 512, 128), ("bf16", 8, 512, 128)]


@pytest.mark.parametrize("tokens", [1, 16, 17, 24, 33, 64, 100, 2048, 8192, 16384, 20000])
def test_row_counts_reach_small_tiles_and_leave_no_wide_gap(tokens):
    rows = precompile.row_counts(tokens)
    assert rows == sorted(set(rows)) and rows[0] == 1 and rows[-1] == tokens
    for low, high in ((1, 16), (17, 32), (33, 64)):  # where DeepGEMM adds tiles of 16 and 32 rows
        assert tokens < low or any(low <= r <= high for r in rows), f"no number of rows in {low}..{high}"
    for a, b in zip(rows, rows[1:], strict=False):
        assert b - a <= (64 if a < 2048 else 128 if a < 8192 else 512), (a, b)


@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_pieces_are_contiguous(count):
    cut = precompile.pieces_of(JOBS, count)
    assert [job for piece in cut for job in piece] == JOBS
    assert all(cut) and len(cut) <= count and (count > 7 or len(cut) == count)


def test_every_job_goes_to_one_child_on_this_gpu(children):
    precompile.precompile(JOBS, CPU)
    assert [job for piece in pieces(children) for job in piece] == JOBS
    assert len(children.processes) == 4, "one processor is left to the engine"
    assert all(process.returncode == 0 for process in children.processes)
    assert {env["CUDA_VISIBLE_DEVICES"] for env in children.environments} == {"GPU-12ab-34cd"}
    assert all(env["DG_JIT_CACHE_DIR"] == str(children.cache) for env in children.environments)


def test_the_children_fit_the_gpu(children, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * precompile.PROCESS_BYTES, 140 * 2**30))
    precompile.precompile(JOBS, CPU)
    assert len(children.processes) == 2


def test_a_second_call_does_nothing_unless_something_changed(children, monkeypatch):
    def runs(jobs=JOBS) -> bool:
        before = len(children.processes)
        precompile.precompile(jobs, CPU)
        return len(children.processes) > before

    assert runs() and not runs()
    assert runs(JOBS[1:]) and not runs(JOBS[1:]), "other jobs"
    monkeypatch.setattr(precompile.gemm, "deep_gemm", lambda: SimpleNamespace(__version__="2.6.0"))
    assert runs() and not runs(), "another DeepGEMM"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    assert runs() and not runs(), "another GPU"


def test_a_child_that_fails(children):
    """Its output is in the error, the others are ended at once, and the next start tries again."""
    children.script.write_text(
        '#!/bin/sh\ncase "$3" in *\'["fp8", 1, 256, 128]\'*) echo out; echo "no nvcc" >&2; exit 3;; esac\nexec sleep 60\n'
    )
    with pytest.raises(RuntimeError, match="compiling GEMM kernels failed:\nout\nno nvcc"):
        precompile.precompile(JOBS, CPU)
    assert [process.returncode for process in children.processes] == [3, -9, -9, -9]
    children.script.write_text("#!/bin/sh\n")
    precompile.precompile(JOBS, CPU)
    assert len(children.processes) == 8


def test_a_bare_process_fills_the_cache_that_it_will_read(children, monkeypatch, tmp_path):
    """Without DG_JIT_CACHE_DIR, DeepGEMM's import sets where everything of the fork looks."""
    monkeypatch.delenv("DG_JIT_CACHE_DIR")
    version = precompile.gemm.deep_gemm()

    def imported():
        monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "default"))
        return version

    monkeypatch.setattr(precompile.gemm, "deep_gemm", imported)
    precompile.precompile(JOBS, CPU)
    assert list((tmp_path / "default").glob("*.compiled"))
    assert {env["DG_JIT_CACHE_DIR"] for env in children.environments} == {str(tmp_path / "default")}


def test_a_job_runs_the_rollouts_gemm(monkeypatch):
    seen = []
    fprop, head = ops.fprop, ops.bf16_gemm_nt

    def spy_fprop(x, w):
        seen.append(("fp8", x.q.shape[0], *w.q.shape))
        return fprop(x, w)

    def spy_head(x, w):
        seen.append(("bf16", x.shape[0], *w.shape))
        return head(x, w)

    monkeypatch.setattr(ops, "fprop", spy_fprop)
    monkeypatch.setattr(ops, "bf16_gemm_nt", spy_head)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    precompile.run(JOBS, CPU)
    assert seen == JOBS
