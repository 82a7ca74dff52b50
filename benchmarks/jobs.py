"""Peaks of whole 8B jobs: ``recipes/qwen3-8b`` with random weights, BF16 beside FP8 at equal settings, for train.json.

    python -m benchmarks.jobs                                  # five jobs, each with all visible GPUs; minutes each
    python -m benchmarks.jobs --cases plain --seconds 600      # without activation checkpointing; no job starts after 600 s
    python -m benchmarks.jobs --folder FOLDER actor_rollout_ref.rollout.enforce_eager=true
    python -m benchmarks.jobs --check                          # only checks the jobs' configurations

A job is ``python -m verl.jetrl.run`` as anyone starts it, two steps long, with the demo's problems and tokenizer and responses
of full length (a random model does not end one).  Its micro-batches are full, two or more to a mini-batch and GPU, so that the
peak is that of a longer run.  Case ``plain`` keeps all activations, ``checkpointing`` recomputes them, in larger micro-batches.
``benchmarks.train`` says what the figures are.  A job that has finished in ``--folder`` is not run again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.shapes import QWEN3_8B, save_config
from benchmarks.train import RESULTS, add_jobs
from verl.jetrl import preflight
from verl.jetrl.checkpoints import nearest, writable
from verl.jetrl.compose import RecipeError, compose

ROOT = Path(__file__).resolve().parent.parent
RECIPE, DEMO = ROOT / "recipes" / "qwen3-8b", ROOT / "recipes" / "tiny"
MODEL = "Qwen3-8B-random"
PROMPT, RESPONSE = 48, 464  # tokens
STEPS = 2  # the second has optimizer states from its start
PROMPTS_PER_GPU, RESPONSES = 8, 8
TOKENS = {"plain": 5120, "checkpointing": 16384}  # of a micro-batch, by case


class Job(NamedTuple):
    """An arm of the recipe in one of the cases; ``arena`` is of jetrl."""

    case: str
    arm: str
    arena: str = "replicated"

    @property
    def name(self) -> str:
        """Its folder's, beside those of the other jobs."""
        return f"{self.case}-{self.arena}"


JOBS = (
    Job("plain", "bf16"),
    Job("plain", "jetrl"),
    Job("checkpointing", "bf16"),
    Job("checkpointing", "jetrl"),
    Job("checkpointing", "jetrl", "sharded"),
)


def overrides(job: Job, folder: Path, gpus: int, more: Sequence[str]) -> list[str]:
    """Of the recipe's settings; ``more`` come last and win."""
    prompts = PROMPTS_PER_GPU * gpus
    return [
        f"actor_rollout_ref.model.path={folder / MODEL}",
        f"actor_rollout_ref.model.enable_gradient_checkpointing={str(job.case == 'checkpointing').lower()}",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={TOKENS[job.case]}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
        f"actor_rollout_ref.actor.fsdp_config.arena={job.arena}",
        f"actor_rollout_ref.rollout.n={RESPONSES}",
        f"actor_rollout_ref.rollout.max_model_len={PROMPT + RESPONSE}",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.3",
        f"data.train_files={folder / 'data' / 'train.parquet'}",
        f"data.val_files={folder / 'data' / 'validation.parquet'}",
        f"data.train_batch_size={prompts}",
        f"data.max_prompt_length={PROMPT}",
        f"data.max_response_length={RESPONSE}",
        f"reward.custom_reward_function.path={DEMO / 'reward.py'}",
        "reward.custom_reward_function.name=compute_score",
        f"trainer.n_gpus_per_node={gpus}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        *more,
    ]


def prepare(jobs: Sequence[Job], folder: Path, gpus: int, more: Sequence[str]) -> None:
    """Makes the model, of random weights, with the demo's tokenizer, and the demo's data, unless they are there; then exits
    with the problems of all jobs' configurations, each named once, if there are any."""
    from transformers import AutoModelForCausalLM

    model, data = folder / MODEL, folder / "data"
    if not model.is_dir():
        partial = folder / "partial"
        shutil.rmtree(partial, ignore_errors=True)
        config = save_config(partial, QWEN3_8B)
        torch.manual_seed(0)
        with torch.device("cuda"):
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(partial)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(DEMO / "model" / name, partial)
        partial.rename(model)
    if not (data / "validation.parquet").is_file():
        subprocess.run([sys.executable, DEMO / "task.py", "--out-dir", data], check=True, stdout=subprocess.DEVNULL)
    configs = [compose(RECIPE, job.arm, folder / "runs" / job.name, overrides(job, folder, gpus, more)) for job in jobs]
    if found := list(dict.fromkeys(problem for config in configs for problem in preflight.problems(config))):
        sys.exit("\n".join(["the jobs cannot run here:", *(f"  - {problem}" for problem in found)]))


def run(jobs: Sequence[Job], folder: Path, gpus: int, more: Sequence[str], out: Path, deadline: float) -> Iterator[str]:
    """Runs the jobs one after the other, the peaks of each into ``out``; what to say of those that did not finish."""
    for job in jobs:
        if time.time() > deadline:
            yield f"{job.name} {job.arm}: out of time, not run"
            continue
        runs = folder / "runs" / job.name
        command = [sys.executable, "-m", "verl.jetrl.run", RECIPE, "--arms", job.arm, "--runs", runs]
        code = subprocess.run([*map(str, command), *overrides(job, folder, gpus, more)], cwd=ROOT).returncode
        if code == 0:
            add_jobs(out, runs / RECIPE.name)
            continue
        yield f"{job.name} {job.arm}: exit code {code}, log in {runs / RECIPE.name / job.arm / 'log.txt'}"
        if code < 0 or code > 128:  # stopped by a signal: so are the others
            return


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.jobs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--cases", default=",".join(TOKENS), help=f"of {', '.join(TOKENS)}")
    parser.add_argument("--folder", type=Path, help="keep model and runs here (default: a folder that goes when all finished)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further job after so many seconds")
    parser.add_argument("--check", action="store_true", help="check the jobs' configurations and stop")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides for every job")
    args = parser.parse_intermixed_args()
    deadline = time.time() + args.seconds
    cases = args.cases.split(",")
    if unknown := [case for case in cases if case not in TOKENS]:
        parser.error(f"unknown cases {unknown}; there are {', '.join(TOKENS)}")
    gpus = torch.cuda.device_count()
    if not gpus:
        sys.exit("benchmarks.jobs needs Hopper GPUs")
    if args.out.is_dir() or not writable(nearest(args.out.resolve().parent)):
        parser.error(f"--out {args.out} cannot be written")
    jobs = [job for job in JOBS if job.case in cases]
    folder = args.folder.resolve() if args.folder else Path(tempfile.mkdtemp(prefix="jetrl-jobs-"))
    try:  # before the model is made
        compose(RECIPE, jobs[0].arm, folder, overrides(jobs[0], folder, gpus, args.overrides))
    except RecipeError as error:
        parser.error(str(error))
    folder.mkdir(parents=True, exist_ok=True)
    # A process of its own: what it holds on a GPU would count in the jobs' peaks.
    preparing = multiprocessing.get_context("spawn").Process(target=prepare, args=(jobs, folder, gpus, args.overrides))
    preparing.start()
    preparing.join()
    if not args.folder and (preparing.exitcode or args.check):
        shutil.rmtree(folder)  # or 16 GB of weights stay in /tmp
    if preparing.exitcode:
        sys.exit(preparing.exitcode)
    if args.check:
        return print(f"{len(jobs)} jobs can run")
    left = list(run(jobs, folder, gpus, args.overrides, args.out, deadline))
    print(*left, sep="\n")
    if not args.folder and not left:
        shutil.rmtree(folder)
    sys.exit(1 if left else 0)


if __name__ == "__main__":
    main()
