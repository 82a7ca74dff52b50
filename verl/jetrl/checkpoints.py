"""Checkpoints that are whole or not there.

verl writes ``global_step_N`` folders and a file that names the latest.  A folder counts once its ``complete`` mark exists,
written last, and while verl has not pruned its ``actor`` folder; :func:`repair` removes the others before a run starts, so
that a kill at any moment of a save leaves the last good checkpoint in place.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

MARK = "complete"
TRACKER = "latest_checkpointed_iteration.txt"


def _steps(checkpoints: Path) -> dict[int, Path]:
    folders = (p for p in checkpoints.glob("global_step_*") if p.is_dir())
    return {int(p.name.removeprefix("global_step_")): p for p in folders if p.name.removeprefix("global_step_").isdecimal()}


def write_atomically(path: Path, text: str) -> None:
    """Replaces ``path`` by ``text``; a reader sees the old or the new content, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def mark_complete(checkpoints: Path, step: int) -> None:
    """Declares the checkpoint of ``step`` whole, after everything of it was written."""
    write_atomically(checkpoints / f"global_step_{step}" / MARK, f"{step}\n")


def _whole(folder: Path) -> bool:
    actor = folder / "actor"
    return (folder / MARK).is_file() and actor.is_dir() and any(actor.iterdir())


def repair(checkpoints: Path) -> int | None:
    """Removes unfinished checkpoints and points verl at the latest whole one; returns its step, None if there is none."""
    if not checkpoints.is_dir():
        return None
    whole = []
    for step, folder in _steps(checkpoints).items():
        if _whole(folder):
            whole.append(step)
        elif folder.is_symlink():
            folder.unlink()
        else:
            shutil.rmtree(folder)
    latest = max(whole, default=None)
    if latest is None:
        (checkpoints / TRACKER).unlink(missing_ok=True)
    else:
        write_atomically(checkpoints / TRACKER, str(latest))
    return latest
