"""The processes of a run and what they leave: found by the run's id in their environment, however they were started."""

from __future__ import annotations

import os
import shutil
import time
from collections import defaultdict
from pathlib import Path

import psutil

from verl.jetrl.environment import RUN_ID, run_tmp

SHM = "/dev/shm/"


ray_dir = run_tmp


def of_run(run_id: str) -> list[psutil.Process]:
    """Living processes of the run, this one excepted: those with its id in their environment, and their descendants.

    Descendants, because a process that sets its title (as Ray's and vLLM's do) may overwrite its environment.
    """
    children: dict[int, list[psutil.Process]] = defaultdict(list)
    mine = []
    for process in psutil.process_iter():  # once: psutil's children() reads the whole table for each process
        try:
            children[process.ppid()].append(process)
            if process.environ().get(RUN_ID) == run_id:
                mine.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue  # ended while we looked, or not ours
    found: dict[int, psutil.Process] = {}
    while mine:
        process = mine.pop()
        if process.pid not in found:
            found[process.pid] = process
            mine += children[process.pid]
    return [p for p in found.values() if p.pid != os.getpid() and alive(p.pid)]


def alive(pid: int) -> bool:
    """Whether process ``pid`` runs; one that has ended and waits for its parent does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def shared_memory(processes: list[psutil.Process]) -> set[str]:
    """Files in /dev/shm that the processes have mapped.

    Found by their inode: a semaphore is mapped before it has its name, and /proc goes on to say the one it had then.
    """
    mapped: set[tuple[str, int]] = set()  # device as /proc writes it, inode
    for process in processes:
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text()
        except OSError:
            continue
        fields = [line.split(maxsplit=5) for line in maps.splitlines() if SHM in line]
        mapped |= {(device, int(inode)) for *_, device, inode, _ in fields}
    found: set[str] = set()
    for path in (f"{folder.rstrip('/')}/{name}" for folder, _, names in os.walk(SHM) for name in names):
        try:
            status = os.lstat(path)
        except OSError:
            continue  # removed meanwhile
        if (f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}", status.st_ino) in mapped:
            found.add(path)
    return found


def end(run_id: str, segments: set[str], grace_s: float = 5.0) -> list[str]:
    """Ends every process of the run and removes what it left; returns what had to be removed or killed.

    ``segments``: shared-memory files seen while it ran.  SIGTERM first, SIGKILL after ``grace_s``.
    """
    processes = of_run(run_id)
    segments = segments | shared_memory(processes)
    for process in processes:
        _signal(process, "terminate")
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    deadline = time.monotonic() + 10
    # Some may have been started meanwhile; descendants of ended ones are no longer found by descent.
    while (alive := list({p.pid: p for p in (*alive, *of_run(run_id))}.values())) and time.monotonic() < deadline:
        segments |= shared_memory(alive)
        processes += [p for p in alive if p not in processes]
        for process in alive:
            _signal(process, "kill")
        _, alive = psutil.wait_procs(alive, timeout=1)
    removed = [f"process {p.pid}" for p in processes]
    for path in sorted(segments):
        try:
            os.unlink(path)
            removed.append(path)
        except FileNotFoundError:
            pass  # removed by its owner
    if ray_dir(run_id).exists():
        shutil.rmtree(ray_dir(run_id), ignore_errors=True)
    return removed


def _signal(process: psutil.Process, name: str) -> None:
    try:
        getattr(process, name)()
    except psutil.NoSuchProcess:
        pass
