"""Read the arms of a recipe: their segments (joined), configuration and status.

An arm is a folder with ``segments/001.jsonl``, ``002.jsonl``, ... (one file per start of the run, as verl's ``file``
tracker writes it), ``config.yaml`` and ``status.json``. All but one of these may be missing.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from omegaconf import DictConfig

from verl.jetrl import metric_names as names
from verl.jetrl.config_diff import load_config

Record = dict[str, float]  # metric name -> value; NaN where the run had no finite number

STATES = ("running", "finished", "failed", "stopped", "unknown")


class ReportError(ValueError):
    """Input that the report cannot be made from. The message names the file."""


@dataclass(frozen=True)
class Status:
    """What the launcher last said about a run. Times are seconds since the epoch."""

    state: str = "unknown"
    total_steps: int | None = None
    started: float | None = None
    ended: float | None = None
    error: str | None = None
    device: str | None = None
    command: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    peak_device_gb: float | None = None  # in use on the fullest GPU, by all processes: what the launcher saw twice a second


@dataclass(frozen=True)
class Arm:
    """One run. ``records`` maps steps, in ascending order, to metrics."""

    name: str
    records: dict[int, Record] = field(default_factory=dict)
    warmup: frozenset[int] = frozenset()  # first training step after each start of the run
    status: Status = Status()
    config: DictConfig | None = None

    def series(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps (int, shape [n]) at which the metric was recorded, and its values (float, shape [n])."""
        found = [(step, record[metric]) for step, record in self.records.items() if metric in record]
        return np.array([s for s, _ in found], dtype=int), np.array([v for _, v in found], dtype=float)

    @property
    def train_steps(self) -> list[int]:
        """Steps of training: a record with nothing but validation (step 0, say) is none."""
        return [step for step, record in self.records.items() if _is_training(record)]

    @property
    def metrics(self) -> set[str]:
        return {metric for record in self.records.values() for metric in record}

    @property
    def validation_metrics(self) -> list[str]:
        return sorted(m for m in self.metrics if m.startswith(names.VALIDATION_PREFIX) and names.VALIDATION_MARK in m)


def load_arms(folder: Path, arm_names: Iterable[str] | None = None) -> list[Arm]:
    """The arms under ``runs/<recipe>`` in the order in which they are shown, or only those named.

    Raises ``ReportError`` when there are none, when a named one is missing, or when a file is damaged.
    """
    if not folder.is_dir():
        raise ReportError(f"{folder}: no such folder")
    found = arm_folders(folder)
    if not found:
        raise ReportError(f"{folder}: no arms here. An arm is a subfolder with segments/*.jsonl or status.json.")
    wanted = found if arm_names is None else list(dict.fromkeys(arm_names))
    missing = [name for name in wanted if name not in found]
    if missing or not wanted:
        raise ReportError(f"{folder}: no arm {', '.join(missing) or 'named'}. There are: {', '.join(found)}.")
    return [load_arm(folder / name) for name in found if name in wanted]


def arm_folders(folder: Path) -> list[str]:
    """Names of the arms in a recipe's folder: the known ones in their order, then others by name."""
    arms = [
        path.name
        for path in folder.iterdir()
        if (path / "segments").is_dir() or (path / "status.json").is_file() or (path / "config.yaml").is_file()
    ]
    return sorted(arms, key=lambda name: (names.ARMS.index(name) if name in names.ARMS else len(names.ARMS), name))


def load_arm(folder: Path) -> Arm:
    """Read one arm. Raises ``ReportError`` that names file (and line) when something in it is damaged."""
    segments = sorted((folder / "segments").glob("*.jsonl"))
    records, warmup = join_segments([read_segment(path) for path in segments])
    return Arm(
        name=folder.name,
        records=records,
        warmup=warmup,
        status=read_status(folder / "status.json"),
        config=_read_config(folder / "config.yaml"),
    )


def read_segment(path: Path) -> list[tuple[int, Record]]:
    """The records of one file in the order in which they were written.

    A last line without its newline was cut off by a kill and is ignored unless it is whole. Any other line that is
    not a record raises ``ReportError`` with file and line.
    """
    *lines, unfinished = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(_parse_record(line))
        except ValueError as error:
            raise ReportError(f"{path}:{number}: not a record of metrics ({error})") from error
    if unfinished:
        try:
            records.append(_parse_record(unfinished))
        except ValueError:
            pass  # cut off in mid-write
    return records


def join_segments(segments: list[list[tuple[int, Record]]]) -> tuple[dict[int, Record], frozenset[int]]:
    """One history out of the segments of a run that stopped and resumed, and its warm-up steps.

    A segment that begins at step s was resumed from weights of step s or s-1, so what earlier segments recorded after
    s belongs to weights that are gone, and is dropped. At s itself the later values win, metric by metric: a resumed
    run may begin with the validation of a step whose training metrics the earlier segment has.
    """
    joined: dict[int, Record] = {}
    warmup: set[int] = set()
    for segment in segments:
        if not segment:
            continue
        start = segment[0][0]
        joined = {step: record for step, record in joined.items() if step <= start}
        warmup = {step for step in warmup if step <= start}
        for step, record in segment:
            joined[step] = joined.get(step, {}) | record
        warmup.update([step for step, record in segment if _is_training(record)][:1])
    return dict(sorted(joined.items())), frozenset(warmup)


def read_status(path: Path) -> Status:
    """``status.json``; a missing file gives the state "unknown"."""
    if not path.is_file():
        return Status()
    try:
        status = json.loads(path.read_bytes())
    except ValueError as error:
        raise ReportError(f"{path}: not JSON ({error})") from error
    if not isinstance(status, dict) or status.get("state") not in STATES:
        raise ReportError(f'{path}: needs a "state" out of {", ".join(STATES)}')
    known = {key: status[key] for key in Status.__dataclass_fields__ if status.get(key) is not None}
    return Status(**known)


def _read_config(path: Path) -> DictConfig | None:
    if not path.is_file():
        return None
    try:
        return load_config(path)
    except ValueError as error:
        raise ReportError(f"{path}: not a configuration ({error})") from error


def _is_training(record: Record) -> bool:
    return names.REWARD in record or names.TIME_STEP in record


def _parse_record(line: bytes) -> tuple[int, Record]:
    record = json.loads(line)
    if not isinstance(record, dict) or type(record.get("step")) is not int or not isinstance(record.get("data"), dict):
        raise ValueError('needs {"step": integer, "data": {metric: number}}')
    # verl's file tracker writes NaN and Inf as null. Texts and lists are nothing that the report could show.
    return record["step"], {
        metric: math.nan if value is None else float(value)
        for metric, value in record["data"].items()
        if value is None or isinstance(value, int | float)
    }
