"""Runs the arms of a recipe one after the other and writes the report.

    python -m verl.jetrl.run recipes/tiny --arms bf16,jetrl trainer.total_training_steps=5

Everything is checked before the first arm starts.  Each arm is a process tree of its own; however it ends, nothing of it
is left behind.  A run that was stopped or killed goes on from its last checkpoint when it is started again.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from types import FrameType

from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from verl.jetrl import checkpoints, device_memory, memory_plan, preflight, processes
from verl.jetrl import metric_names as names
from verl.jetrl.checkpoints import write_atomically
from verl.jetrl.compose import RecipeError, arms, compose, machine, resolved_yaml
from verl.jetrl.config_diff import diff, load_config
from verl.jetrl.environment import environment, ray_address

# jetrl before the stock FP8 rollout: it compiles DeepGEMM's kernels in parallel, vLLM one by one, and both read one cache.
MAIN_ARMS = ("bf16", "jetrl", "bf16-train-fp8-rollout")
VERSIONS = ("verl", "vllm", "torch", "ray", "transformers", "triton")
POLL_S = 0.5
LONGEST = 1000  # characters of an error that is shown; the log has all
# "(JetRLHttpServer pid=7) (EngineCore pid=9) ERROR 11-29 19:58:29 [core.py:10] " before what a worker says.
WORKER_PREFIX = re.compile(r"^(?:\([^()]*pid=\d+[^()]*\) ?)+(?:[A-Z]+ [\d-]+ [\d:.]+ \[[^\]]*\] ?)?")
ERROR_LINE = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Mismatch|Interrupt|Exit|Empty|Timeout|Stopped)(?::.*)?$")


class Stopped(Exception):
    """SIGINT or SIGTERM arrived; carries the signal's number."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m verl.jetrl.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path, help="folder of the recipe, e.g. recipes/tiny")
    parser.add_argument("--arms", help=f"comma-separated arms (default: {','.join(MAIN_ARMS)})")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where runs go (default: runs)")
    parser.add_argument("--fresh", action="store_true", help="delete earlier runs of these arms first")
    parser.add_argument("--check", action="store_true", help="check the configurations and stop")
    parser.add_argument("--print-config", metavar="ARM", help="print the resolved configuration of ARM and stop")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides for every arm: trainer.total_training_steps=5")
    args = parser.parse_intermixed_args(argv)
    recipe = args.recipe.resolve()
    runs = args.runs.resolve() / recipe.name
    try:
        if args.print_config is not None:
            print(resolved_yaml(compose(recipe, args.print_config, runs / args.print_config, args.overrides)))
            return 0
        main_arms = [a for a in MAIN_ARMS if a in arms(recipe)] or arms(recipe)
        chosen = main_arms if args.arms is None else [arm.strip() for arm in args.arms.split(",")]
        configs = {arm: compose(recipe, arm, runs / arm, args.overrides) for arm in chosen}
        wrong = []
        if args.overrides:  # the same in all arms: one tells
            wrong = preflight.wrong_types(configs[chosen[0]], compose(recipe, chosen[0], runs / chosen[0]))
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found = wrong or check(recipe, configs)
    if found:
        print(f"recipe {recipe.name} cannot run here:", *(f"  - {p}" for p in found), sep="\n", file=sys.stderr)
        return 2
    for config in configs.values():
        print(memory_plan.describe(config), end="", flush=True)
    if args.check:
        print(f"recipe {recipe.name}: {', '.join(configs)} can run")
        return 0
    code = 0
    for arm, config in configs.items():
        code = Arm(recipe, arm, runs / arm, config, args.overrides).run(args.fresh) or code
        report = subprocess.run(
            [sys.executable, "-m", "verl.jetrl.report", str(runs)], check=True, stdout=subprocess.PIPE, text=True
        )
        if code > 128:
            break
    print(results(runs), report.stdout, sep="\n", end="")
    return code


def results(runs: Path) -> str:
    """The report's table of results."""
    _, _, rest = (runs / "report.md").read_text().partition("## Results\n")
    return rest.partition("\n## ")[0].strip("\n") + "\n"


def check(recipe: Path, configs: dict[str, DictConfig]) -> list[str]:
    """Problems of all arms, each named once; what is missing is made when the recipe has a script for it and nothing else
    stands in the way: its data, then its model."""

    def all_problems() -> list[str]:
        found = [problem for config in configs.values() for problem in preflight.problems(config)]
        return list(dict.fromkeys(found + preflight.disk(configs.values())))

    def make(what: str, script: str, out_dir: str, missing: str) -> list[str]:
        """The problems after the script ran; what the script said stands for those it should have solved."""
        print(f"making the {what} of recipe {recipe.name} in {out_dir}", flush=True)
        command = [sys.executable, recipe / script, "--out-dir", out_dir]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode == 0:
            return all_problems()
        said = (result.stderr.strip().splitlines() or ["no message"])[-1]
        return [p for p in found if missing not in p] + [f"{what}: {script} failed: {said}"]

    found = all_problems()
    settings = next(iter(configs.values())).jetrl
    made = (preflight.MISSING_DATA, preflight.MISSING_MODEL) if settings.prepare_model else (preflight.MISSING_DATA,)
    only_to_make = all(any(missing in problem for missing in made) for problem in found)
    if settings.prepare and only_to_make and any(preflight.MISSING_DATA in problem for problem in found):
        found = make("data", settings.prepare, settings.data_dir, preflight.MISSING_DATA)
    if found and all(preflight.MISSING_MODEL in problem for problem in found):
        found = make("model", settings.prepare_model, settings.model_dir, preflight.MISSING_MODEL)
    return found


class Arm:
    """One arm's run: its folder, its process tree, its progress bar.

    The folder holds ``config.yaml``, ``status.json``, ``log.txt``, ``segments/NNN.jsonl`` (one file per start, written by
    verl's file tracker), ``tensorboard/`` and ``checkpoints/``.
    """

    def __init__(self, recipe: Path, arm: str, folder: Path, config: DictConfig, overrides: Sequence[str]) -> None:
        self.recipe, self.arm, self.folder, self.config, self.overrides = recipe, arm, folder, config, list(overrides)
        self.total = config.trainer.total_training_steps
        self.run_id = uuid.uuid4().hex[:12]
        self.segments_seen: set[str] = set()
        self.peak_device_gb: float | None = None

    def run(self, fresh: bool = False) -> int:
        """Runs to the end, to an error or to a signal; returns the exit code (128 + signal when stopped)."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with open(self.folder.parent / f".{self.arm}.lock", "a") as lock:  # gone with this process, however it ends
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                supervisor = self._read("status.json", damaged_is_empty=True).get("supervisor", "unknown")
                raise SystemExit(f"error: {self.arm} is running already (process {supervisor})") from None
            return self._run(fresh)

    def _run(self, fresh: bool) -> int:
        status = self._read("status.json", damaged_is_empty=fresh)
        self.peak_device_gb = None if fresh else status.get("peak_device_gb")  # of all starts
        self._end_earlier(status)
        if fresh and self.folder.exists():
            subprocess.run(["rm", "-rf", str(self.folder)], check=True)
            status = {}
        changed = self._changed_settings()
        if status.get("state") == "finished" and status.get("total_steps") == self.total and self.folder.exists():
            if changed:
                raise SystemExit(f"error: {self.arm} has finished with other settings ({changed}); --fresh runs it again")
            print(f"{self.arm}: finished already, {self.total} steps (--fresh or `make clean-runs` to run it again)")
            return 0
        if changed:
            print(f"{self.arm}: settings changed since the last start: {changed}")
        (self.folder / "segments").mkdir(parents=True, exist_ok=True)
        own = checkpoints.repair(self.folder / "checkpoints")
        begin = self._begin(own)
        step = checkpoints.step_of(begin) if begin else 0
        if step and step >= self.total:
            if other := self._changed_settings(but="trainer.total_training_steps"):
                raise SystemExit(f"error: {self.arm} is at step {step} with other settings ({other}); --fresh starts over")
            print(
                f"{self.arm}: already at step {step}, trainer.total_training_steps={self.total}: nothing to do "
                "(--fresh, or FRESH=1 with make, starts over)"
            )
            return 0
        if begin:
            self._require_shards(begin)
            print(f"{self.arm}: going on from step {step}" if own else f"{self.arm}: going on from {begin}")
        elif status:
            every = self.config.trainer.save_freq
            print(f"{self.arm}: the earlier start left no checkpoint (trainer.save_freq={every}): starting over")
        write_atomically(self.folder / "config.yaml", resolved_yaml(self.config))
        numbers = [int(p.stem) for p in (self.folder / "segments").glob("*.jsonl") if p.stem.isdecimal()]
        number = max(numbers, default=0) + 1
        segment = self.folder / "segments" / f"{number:03d}.jsonl"
        return self._supervise(segment, step, own is not None)

    def _begin(self, own: int | None) -> Path | None:
        """The checkpoint that the run begins with: its last one, of step ``own``; without one trainer.resume_from_path, if set.

        Ends where another history would be saved beside that one, from whose last checkpoint the run would go on after its
        next stop.
        """
        asked = self._resumes(self.config)
        mode, given = asked
        if own is None:
            return given
        last = (self.folder / "checkpoints" / f"global_step_{own}").resolve()
        before = self.folder / "config.yaml"  # with the same, a stopped run goes on
        if mode != "auto" and given != last and not (before.is_file() and self._resumes(load_config(before)) == asked):
            given_path = "" if given is None else f", trainer.resume_from_path={given}"
            raise SystemExit(
                f"error: {self.arm} has checkpoints up to step {own}, and trainer.resume_mode={mode}{given_path} would begin "
                f"another history beside them: trainer.resume_mode=auto goes on from step {own}; --fresh deletes them, or move "
                f"them away from {last.parent}"
            )
        return last

    @staticmethod
    def _resumes(config: DictConfig) -> tuple[str, Path | None]:
        """How a run is to begin: trainer.resume_mode, and of resume_path the checkpoint."""
        mode = OmegaConf.select(config, "trainer.resume_mode") or "auto"
        return mode, Path(config.trainer.resume_from_path).resolve() if mode == "resume_path" else None

    def _require_shards(self, checkpoint: Path) -> None:
        """Ends where the checkpoint was saved by another number of processes: verl would look for files that are not there."""
        try:
            saved = checkpoints.world_size_of(checkpoint / "actor")
        except checkpoints.CheckpointError as error:
            raise SystemExit(f"error: {error}") from error
        if saved is None:
            return
        wanted = memory_plan.gpus(self.config)
        if saved != wanted:
            raise SystemExit(
                f"error: {checkpoint} was saved by {saved} processes, this run has {wanted}. To go on from it:\n"
                f"  python -m verl.jetrl.checkpoints reshard {shlex.quote(str(checkpoint))} --world-size {wanted}"
            )

    def _changed_settings(self, but: str = "") -> str:
        """The settings, ``but`` one, that differ from those of the last start; "" without any, or if nothing was started."""
        path = self.folder / "config.yaml"
        if not path.is_file():
            return ""
        try:
            before = load_config(path)
        except ValueError as error:
            raise SystemExit(f"error: {path} is damaged; delete it, or start over with --fresh") from error
        rows = diff(before, OmegaConf.create(resolved_yaml(self.config)))
        return ", ".join(f"{key}: {before} -> {now}" for key, before, now in rows if key != but)

    def _supervise(self, segment: Path, first_step: int, from_own: bool) -> int:
        self._status("running", started=time.time(), ended=None, error=None, shared_memory=[])
        log = self.folder / "log.txt"
        print(f"{self.arm}: the first step takes minutes to reach; log: {log}", flush=True)
        previous = {s: signal.signal(s, _raise_stopped) for s in (signal.SIGINT, signal.SIGTERM)}
        state, error, code = "failed", None, 1
        child = None
        try:
            with open(log, "ab") as out:
                log_start = out.tell()
                own_ray = (
                    [] if ray_address(self.config) else [f"+ray_kwargs.ray_init._temp_dir={processes.ray_dir(self.run_id)}"]
                )
                # Or verl would begin with trainer.resume_from_path again, whatever the run has done since.
                going_on = ["trainer.resume_mode=auto"] if from_own else []
                arguments = [self.recipe, self.arm, self.folder, *own_ray, *self.overrides, *going_on]
                child = subprocess.Popen(
                    [sys.executable, "-m", "verl.jetrl.train", *arguments],
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    env=environment(machine(), self.run_id, self.folder, segment),
                    cwd=self.folder,
                )
            self._watch(child, segment, first_step)
            code = child.returncode
            if code == 0:
                state = "finished"
            else:
                error = last_error(log.read_bytes()[log_start:].decode(errors="replace")) or f"exit code {code}"
                error = error if len(error) <= LONGEST else f"{error[:LONGEST]}..."  # some of Ray's have 7000 characters
        except Stopped as stop:
            name = signal.Signals(stop.args[0]).name
            print(
                f"{self.arm}: {name}, ending its processes; the same command goes on from the last checkpoint", file=sys.stderr
            )
            state, code, error = "stopped", 128 + stop.args[0], f"stopped by {name}"
        finally:
            for s in previous:
                signal.signal(s, signal.SIG_IGN)  # a second Ctrl-C must not interrupt the clean-up
            processes.end(self.run_id, self.segments_seen)
            self._status(state, ended=time.time(), error=error, peak_device_gb=self.peak_device_gb)
            for s, handler in previous.items():
                signal.signal(s, handler)
        if state == "failed":
            print(f"{self.arm} failed: {error}\n  full log: {log}", file=sys.stderr)
        return code if code >= 0 else 128 - code

    def _watch(self, child: subprocess.Popen, segment: Path, first_step: int) -> None:
        """Shows progress until the child ends."""
        position, seen_at = 0, 0.0
        in_use = device_memory.meter() if machine() == "gpu" else None
        interactive = sys.stderr.isatty()
        # smoothing=0: the time left is from the average step; _advance leaves the start out of it.
        every = 0 if interactive else 15
        with tqdm(total=self.total, initial=first_step, desc=self.arm, unit="step", mininterval=every, smoothing=0) as bar:
            bar.started = False
            bar.set_postfix_str("starting")
            while child.poll() is None:
                time.sleep(POLL_S)
                if in_use is not None:
                    self.peak_device_gb = max(self.peak_device_gb or 0.0, in_use())
                position = _advance(bar, segment, position)
                if time.monotonic() - seen_at > 2:
                    seen_at = time.monotonic()
                    bar.refresh() if interactive else None
                    before = len(self.segments_seen)
                    self.segments_seen |= processes.shared_memory(processes.of_run(self.run_id))
                    if len(self.segments_seen) > before:
                        self._status("running", shared_memory=sorted(self.segments_seen))
            _advance(bar, segment, position)

    def _end_earlier(self, status: dict) -> None:
        """Ends what a killed run of this arm left."""
        if status.get("state") == "running" and "run_id" in status:
            processes.end(status["run_id"], set(status.get("shared_memory", ())))

    def _status(self, state: str, **values: object) -> None:
        status = self._read("status.json") | {
            "state": state,
            "total_steps": self.total,
            "run_id": self.run_id,
            "supervisor": os.getpid(),
            "device": device_name(),
            "versions": {name: version(name) for name in VERSIONS},
            "command": " ".join(["python -m verl.jetrl.run", *sys.argv[1:]]),
        }
        write_atomically(self.folder / "status.json", json.dumps(status | values, indent=1))

    def _read(self, name: str, damaged_is_empty: bool = False) -> dict:
        path = self.folder / name
        try:
            content = json.loads(path.read_text()) if path.is_file() else {}
        except ValueError:
            content = None
        if not isinstance(content, dict):
            if damaged_is_empty:
                return {}
            raise SystemExit(f"error: {path} is damaged; delete it, or start over with --fresh")
        return content


def _raise_stopped(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)


def _advance(bar: tqdm, segment: Path, position: int) -> int:
    """Moves the bar by the records written since ``position``; returns the new position."""
    if not segment.exists():
        return position
    with open(segment, "rb") as file:
        file.seek(position)
        for line in file:
            if not line.endswith(b"\n"):
                break
            position += len(line)
            try:
                record = json.loads(line)
                data = record["data"]
            except (ValueError, KeyError, TypeError):
                continue  # a damaged record is no reason to stop the run
            if names.REWARD in data:
                mismatch = data.get(names.ABS_DLOGP_MEAN)  # exact mode computes it in some steps only
                shown = "" if mismatch is None else f", |Δlog p| {mismatch:.1e}"
                bar.set_postfix_str(f"reward {data[names.REWARD]:.3f}{shown}", refresh=False)
                if not bar.started:  # what came before this step was mostly the start: minutes that no step takes
                    bar.started, bar.initial, bar.start_t = True, record["step"], time.time()
                bar.update(record["step"] - bar.n)
            else:
                bar.set_postfix_str("validated", refresh=False)
    return position


def last_error(log: str) -> str | None:
    """The message of the error that ended a run: the last one of its first process, else the last one of a worker.

    Of an exception raised while another one was handled (in a clean-up, say) it is the other one; RayTaskErrors are
    wrappings, and what Python ignores ends nothing.
    """
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in log.splitlines()]
    own = [line for line in lines if not WORKER_PREFIX.match(line)]
    workers = [WORKER_PREFIX.sub("", line) for line in lines]
    error = _last_raised(own) or _last_raised(workers)
    if error and "Memory usage increased after sleeping" in error:
        return f"{error} (another program took memory of the GPU meanwhile: docs/memory.md, Several runs on one GPU)"
    if error and "EngineDeadError" in error:
        # It only points at the worker's error, which was the first to be raised.
        roots = [x for x in workers if ERROR_LINE.match(x) and "EngineDeadError" not in x and "RayTaskError" not in x]
        return f"{roots[0].strip()} (vLLM's engine died of it)" if roots else error
    return error


def _last_raised(lines: list[str]) -> str | None:
    message, skip_next = None, False
    for line in lines:
        if line.startswith(("During handling of the above exception", "Exception ignored in")):
            skip_next = True
        elif ERROR_LINE.match(line) and "RayTaskError" not in line:
            message = message if skip_next and message else line.strip()
            skip_next = False
    return message


def device_name() -> str:
    """The GPU's name, or the processor's."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"CPU {line.partition(':')[2].strip()}, {os.cpu_count()} cores"
    return "CPU"


if __name__ == "__main__":
    sys.exit(main())
