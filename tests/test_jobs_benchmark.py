"""benchmarks.jobs: what its jobs are, and what becomes of those that fail."""

from __future__ import annotations

import math
import subprocess
from types import SimpleNamespace

import pytest

from benchmarks import jobs
from verl.jetrl.compose import compose

HERE = [f"actor_rollout_ref.model.path={jobs.DEMO / 'model'}", "jetrl.least_gpu_memory_gb=null"]  # what a CPU has room for


@pytest.mark.parametrize("job", jobs.JOBS, ids=lambda job: f"{job.name}-{job.arm}")
def test_a_job_can_start_and_fills_its_micro_batches(tmp_path, job):
    (tmp_path / jobs.MODEL).mkdir()  # not made again
    jobs.prepare([job], tmp_path, 1, HERE)  # exits where the job cannot start
    config = compose(jobs.RECIPE, job.arm, tmp_path / "runs", jobs.overrides(job, tmp_path, 1, HERE))
    root = config.actor_rollout_ref
    assert root.model.enable_gradient_checkpointing == (job.case == "checkpointing")
    assert (root.actor.fsdp_config.arena, root.actor.fsdp_config.precision_flow.linear) == (
        job.arena, "fp8" if job.arm == "jetrl" else "bf16",
    )  # fmt: skip
    tokens = config.data.train_batch_size * root.rollout.n * config.data.max_response_length
    micro_batches = math.ceil(tokens / root.actor.ppo_max_token_len_per_gpu)
    assert micro_batches >= 2 and tokens / micro_batches > 0.9 * root.actor.ppo_max_token_len_per_gpu


def test_arms_of_a_case_differ_in_their_precision_alone():
    """Equal settings, or the peaks say nothing."""
    for case in jobs.TOKENS:
        of_case = [job._replace(arm="", arena="replicated") for job in jobs.JOBS if job.case == case]
        assert len(of_case) > 1 and len(set(of_case)) == 1


def test_what_a_job_cannot_run_with_is_named_before_the_first(tmp_path):
    (tmp_path / jobs.MODEL).mkdir()
    with pytest.raises(SystemExit, match="(?s)the jobs cannot run here:.*data.train_batch_size"):
        jobs.prepare(jobs.JOBS, tmp_path, 1, [*HERE, "data.train_batch_size=0"])


def test_failed_jobs_are_told_and_the_others_run(tmp_path, monkeypatch):
    ran, added, codes = [], [], iter([0, 1, 0, 130])
    monkeypatch.setattr(subprocess, "run", lambda command, **_: ran.append(command) or SimpleNamespace(returncode=next(codes)))
    monkeypatch.setattr(jobs, "add_jobs", lambda out, runs: added.append(runs.parent.name))
    told = list(jobs.run(jobs.JOBS, tmp_path, 2, ["a.b=1"], tmp_path / "out.json", math.inf))
    assert [line.partition(",")[0] for line in told] == [
        "plain-replicated jetrl: exit code 1",
        "checkpointing-replicated jetrl: exit code 130",
    ]
    assert added == ["plain-replicated", "checkpointing-replicated"], "of a stopped run nothing more starts"
    assert all(command[-1] == "a.b=1" for command in ran), "what the command line says wins"


def test_no_job_starts_after_the_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("started"))
    told = list(jobs.run(jobs.JOBS[:2], tmp_path, 1, [], tmp_path / "out.json", 0.0))
    assert told == ["plain-replicated bf16: out of time, not run", "plain-replicated jetrl: out of time, not run"]
