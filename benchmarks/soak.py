"""Soak: a GRPO run of the tiny recipe watched from outside, step by step: nothing that it holds may grow.

    python -m benchmarks.soak                                # 300 steps; writes benchmarks/results/soak.json
    python -m benchmarks.soak --steps 10 --out FILE          # tries it
    python -m benchmarks.soak --arm jetrl-exact --steps 50 --out FILE trainer.save_freq=5
    python -m benchmarks.soak --docs                         # writes the table of all results into docs/training.md

The run is ``python -m verl.jetrl.run`` as anyone starts it.  Each process of it is sampled a few times per step: its own
memory (resident, without the pages of files and of /dev/shm), open files and threads, GPU memory; and the machine: /dev/shm.
Of each step the smallest sample counts, since a leak raises the floor that phases come back to; of GPU memory the largest
as well.  Growth is the Theil-Sen slope (the median of the slopes of all pairs of steps) over the last two thirds of the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import psutil

from benchmarks.tables import fill, markdown, result_of
from verl.jetrl import device_memory, processes
from verl.jetrl import metric_names as names
from verl.jetrl.checkpoints import nearest, writable, write_atomically
from verl.jetrl.compose import RecipeError, compose
from verl.jetrl.report.load import read_segment, read_status

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/soak.json"
RECIPE = "recipes/tiny"
MIB = 2**20

# Most growth per step that passes.  Memory: 10,000 steps, a long run, may take 2.5 GiB more.  Counts: less than one in 50
# steps, so that a file or a process that stays open every few steps fails.
BOUNDS = {
    "memory_mib": 0.25,
    "fds": 0.02,
    "threads": 0.02,
    "processes": 0.02,
    "shm_mib": 0.05,
    "shm_files": 0.02,
    "gpu_mib": 0.25,
    "gpu_peak_mib": 0.25,
}
COMPUTING = {"the trainer": "ray::WorkerDict", "the rollout": "VLLM::Worker"}
NOTES = {
    "growth_*_per_step": "Theil-Sen slope over the last two thirds of the steps of the step's smallest sample (gpu_peak_mib: "
    "largest). Sums over the run's processes, its launcher included; gpu_*: likewise, or, where the driver does not say what a "
    "process has (gpu_of), of the whole GPUs; shm_*: the whole machine. The latter two above what was in use before the run: "
    "another job's changes count.",
    "roles": "growth of each kind of process, not judged: which one a growth of the sum is of.",
    "left_behind": "processes, shared memory, sockets and folders of the run after its end; judged: none may be.",
}


def theil_sen(x: Sequence[float], y: Sequence[float]) -> float:
    """Median slope over all pairs of points; half of them may be wild without moving it far."""
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    i, j = np.triu_indices(len(x), 1)
    if not len(i):
        return float("nan")
    return float(np.median((y[j] - y[i]) / (x[j] - x[i])))


# --- samples ------------------------------------------------------------------------------------------------------------


def role(process: psutil.Process) -> str:
    """What a process is, without what it is doing now: Ray and vLLM write both into its title."""
    title = " ".join(process.cmdline()) or process.name()
    if title.startswith(("ray::", "VLLM::")):
        kind, _, rest = title.partition("::")
        return f"{kind}::{re.split(r'[.:( ]', rest, maxsplit=1)[0]}"
    if module := re.search(r"-m (\S+)", title):
        return module[1]
    program, *arguments = title.split()
    script = next((a for a in arguments if a.endswith(".py")), "")
    return Path(script).name if script and "python" in program else Path(program).name


def of_processes(found: Sequence[psutil.Process]) -> dict[int, dict]:
    """Role, own memory, RSS, open files and threads by process id; processes that end meanwhile are left out."""
    samples = {}
    for process in found:
        try:
            with process.oneshot():
                memory = process.memory_info()
                samples[process.pid] = {
                    "role": role(process),
                    "memory_mib": (memory.rss - memory.shared) / MIB,
                    "rss_mib": memory.rss / MIB,
                    "fds": process.num_fds(),
                    "threads": process.num_threads(),
                }
        except (psutil.Error, OSError):
            continue
    return samples


def shared_memory() -> tuple[float, set[str]]:
    """MiB in use of /dev/shm, and the files there."""
    stat = os.statvfs("/dev/shm")
    return (stat.f_blocks - stat.f_bfree) * stat.f_frsize / MIB, set(os.listdir("/dev/shm"))


def gpu_meter() -> Callable[[], tuple[float, dict[int, float]]] | None:
    """:func:`verl.jetrl.device_memory.meter_by_process`; None where there is no GPU."""
    try:
        return device_memory.meter_by_process()
    except Exception:  # no package, no driver, no GPU: pynvml has an exception for each
        return None


class Watch:
    """Samples a run until it ends."""

    def __init__(self, folder: Path, launcher: psutil.Process, every_s: float) -> None:
        self.folder, self.launcher, self.every_s = folder, launcher, every_s
        self.shm_before, self.files_before = shared_memory()
        self.gpu = gpu_meter()
        self.gpu_before = self.gpu()[0] if self.gpu else 0.0
        self.gpu_of = "the run's processes"
        self.samples: list[dict] = []

    def step(self) -> int:
        """Last step that the run recorded."""
        found = [record for path in (self.folder / "segments").glob("*.jsonl") for record in read_segment(path)]
        return max((step for step, values in found if names.REWARD in values), default=0)

    def run(self, run: subprocess.Popen) -> None:
        while run.poll() is None:
            time.sleep(self.every_s)
            try:
                run_id = json.loads((self.folder / "status.json").read_text())["run_id"]
            except (OSError, ValueError, KeyError):
                continue  # not started
            self.sample(run_id)

    def sample(self, run_id: str) -> None:
        step = self.step()
        if not step:
            return  # starting: everything grows
        found = of_processes([self.launcher, *processes.of_run(run_id)])
        shm, files = shared_memory()
        self.samples.append({"step": step, "time": round(time.time(), 1), "processes": found, "shm_mib": shm - self.shm_before})
        self.samples[-1]["shm_files"] = len(files - self.files_before)
        if self.gpu:
            self.samples[-1]["gpu_mib"] = self.gpu_gib(found.keys()) * 1024

    def gpu_gib(self, run: Iterable[int]) -> float:
        """What the processes ``run`` have of the GPUs; where the driver does not say, what is in use above what was before."""
        total, by_process = self.gpu()
        mine = [by_process[pid] for pid in run if pid in by_process]
        if mine and self.gpu_of != "the GPUs":
            return sum(mine)
        self.gpu_of = "the GPUs"  # from here on: one measure must not follow another
        return total - self.gpu_before


# --- judgement ------------------------------------------------------------------------------------------------------------


def per_step(samples: Sequence[Mapping]) -> dict[str, dict[str, list[float]]]:
    """Series with one value per step, under "total" and under each role: the step's smallest samples."""
    series: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))

    def note(owner: str, name: str, step: int, value: float, of=min) -> None:
        known = series[owner][name]
        known[step] = of(known.get(step, value), value)

    for sample in samples:
        step, sums = sample["step"], defaultdict(lambda: defaultdict(float))
        for process in sample["processes"].values():
            for owner in ("total", process["role"]):
                sums[owner]["processes"] += 1
                for name in ("memory_mib", "rss_mib", "fds", "threads"):
                    sums[owner][name] += process[name]
        for owner, values in sums.items():
            for name, value in values.items():
                note(owner, name, step, value)
        for name in ("shm_mib", "shm_files", "gpu_mib"):
            if name in sample:
                note("total", name, step, sample[name])
        if "gpu_mib" in sample:
            note("total", "gpu_peak_mib", step, sample["gpu_mib"], max)
    steps = sorted({sample["step"] for sample in samples})
    return {
        owner: {name: [round(values.get(s, 0.0), 2) for s in steps] for name, values in found.items()} | {"step": steps}
        for owner, found in series.items()
    }


def last_two_thirds(series: Mapping[str, list[float]], name: str) -> tuple[list[float], list[float]]:
    start = len(series["step"]) // 3
    return series["step"][start:], series[name][start:]


def judge(series: Mapping[str, Mapping[str, list[float]]], left: Sequence[str]) -> tuple[dict, list[dict], list[dict]]:
    """Figures, the table of quantities with their bounds, and the table of roles."""
    figures, rows = {}, []
    for name, bound in BOUNDS.items():
        if name not in series["total"]:
            continue
        steps, values = last_two_thirds(series["total"], name)
        growth = theil_sen(steps, values)
        figures[f"growth_{name}_per_step"] = growth
        passed = bool(growth <= bound)  # no number is no pass
        first, last = float(np.median(values[: len(values) // 4 + 1])), float(np.median(values[-(len(values) // 4 + 1) :]))
        rows.append(
            {"quantity": name, "early": first, "late": last, "growth per step": growth, "bound": bound, "passed": passed}
        )
    figures["left_behind"] = len(left)
    figures["passed"] = float(all(row["passed"] for row in rows) and not left and bool(rows))
    roles = [
        {"role": owner, "processes": max(found["processes"]), "MiB": max(found["memory_mib"])}
        | {f"{name} per step": theil_sen(*last_two_thirds(found, name)) for name in ("memory_mib", "rss_mib", "fds", "threads")}
        for owner, found in series.items()
        if owner != "total"
    ]
    return figures, rows, sorted(roles, key=lambda row: -row["MiB"])


def left_behind(folder: Path, files_before: set[str]) -> list[str]:
    """What the run ought to have removed."""
    status = json.loads((folder / "status.json").read_text())
    found = [f"process {p.pid} {role(p)}" for p in processes.of_run(status["run_id"])]
    ours = {Path(path).name for path in status.get("shared_memory", ())}
    found += [f"/dev/shm/{name}" for name in sorted(os.listdir("/dev/shm")) if name in ours or status["run_id"] in name]
    found += [str(path) for path in [processes.ray_dir(status["run_id"])] if path.exists()]
    new = sorted(set(os.listdir("/dev/shm")) - files_before - {Path(path).name for path in found})
    # Others may run here as well; what carries no name of the run counts when no living process has it mapped.
    used = processes.shared_memory(list(psutil.process_iter()))
    return found + [f"/dev/shm/{name}" for name in new if f"/dev/shm/{name}" not in used]


def soak(arm: str, steps: int, every_s: float, runs: Path, overrides: Sequence[str]) -> dict:
    """Runs and judges; the result as it is written."""
    folder = runs / Path(RECIPE).name / arm
    command = [sys.executable, "-m", "verl.jetrl.run", RECIPE, "--arms", arm, "--runs", str(runs), "--fresh"]
    command += [f"trainer.total_training_steps={steps}", *overrides]
    run = subprocess.Popen(command, cwd=ROOT)
    try:
        watch = Watch(folder, psutil.Process(run.pid), every_s)
        watch.run(run)
    finally:
        if run.poll() is None:
            run.terminate()
            run.wait()
    status = read_status(folder / "status.json")
    if run.returncode or status.state != "finished":
        raise SystemExit(f"the run did not finish: {status.state}, {status.error}; its log: {folder / 'log.txt'}")
    if not any(sample["step"] < steps for sample in watch.samples):
        raise SystemExit(f"no sample between the first and the last of {steps} steps: more steps, or a smaller --every")
    series = per_step([sample for sample in watch.samples if sample["step"] < steps])  # after the last one the run ends
    left = left_behind(folder, watch.files_before)
    figures, rows, roles = judge(series, left)
    return {
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "device": {"type": "gpu" if watch.gpu else "cpu", "name": status.device},
        **({"gpu_of": watch.gpu_of} if watch.gpu else {}),
        "versions": status.versions,
        "notes": NOTES,
        "figures": figures,
        "tables": {"quantities": rows, "roles": roles},
        "left_behind": left,
        "run": {"arm": arm, "steps": steps, "overrides": list(overrides), "seconds": status.ended - status.started},
        "samples": {"count": len(watch.samples), **series},
    }


def stored() -> list[Path]:
    """The result files: of the arm jetrl first."""
    return sorted(RESULTS.parent.glob("soak*.json"), key=lambda path: (path != RESULTS, path))


def report(results: Sequence[Mapping]) -> str:
    """Growth per step of every quantity, and of the memory of the two processes that compute, run by run, in Markdown."""
    runs = [{row["quantity"]: row["growth per step"] for row in result["tables"]["quantities"]} for result in results]
    for run, result in zip(runs, results, strict=True):
        roles = {row["role"]: row["memory_mib per step"] for row in result["tables"]["roles"]}
        run |= {f"memory_mib of {name}": roles.get(role) for name, role in COMPUTING.items()}
        run["left behind"] = len(result["left_behind"])
    names = [*(name for name in BOUNDS if any(name in run for run in runs)), *(n for n in runs[0] if n not in BOUNDS)]
    header = ["growth per step", "bound", *(f"{r['run']['arm']}, {r['device']['name']}" for r in results)]
    rows = [[name, BOUNDS.get(name, 0 if name == "left behind" else None), *(run.get(name) for run in runs)] for name in names]
    commands = "".join(f"`{result['command']}`\n\n" for result in results)
    return commands + markdown(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--arm", default="jetrl")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="between samples (default %(default)s)")
    parser.add_argument("--runs", type=Path, help="keep the run here (default: a folder that goes when it has finished)")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides: trainer.save_freq=5")
    parser.add_argument("--docs", action="store_true", help="only write the table of all results into docs/training.md")
    args = parser.parse_intermixed_args()
    if args.docs:
        return fill(ROOT / "docs" / "training.md", {"soak": report([result_of(path) for path in stored()])})
    # Before the run, which takes long: what would lose its result.
    if args.steps < 2 or args.every <= 0:
        parser.error("--steps must be 2 or more, --every above 0")
    try:
        compose(ROOT / RECIPE, args.arm, Path("runs"), args.overrides)
    except RecipeError as error:
        parser.error(str(error))
    if args.out.is_dir() or not writable(nearest(args.out.resolve().parent)):
        parser.error(f"--out {args.out} cannot be written")
    runs = args.runs.resolve() if args.runs else Path(tempfile.mkdtemp(prefix="soak-"))
    result = soak(args.arm, args.steps, args.every, runs, args.overrides)
    if not args.runs:
        shutil.rmtree(runs)  # a run that failed stays, with its log
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(args.out, re.sub(r"\n {4,}", " ", json.dumps(result, indent=1)) + "\n")
    for rows in result["tables"].values():
        print("\n" + markdown(list(rows[0]), [list(row.values()) for row in rows]))
    print(f"\nleft behind: {', '.join(result['left_behind']) or 'nothing'}")
    print("passed" if result["figures"]["passed"] else "FAILED")
    sys.exit(0 if result["figures"]["passed"] else 1)


if __name__ == "__main__":
    main()
