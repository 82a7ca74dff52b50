"""Results of a recipe's runs: ``python -m benchmarks.runs RUNS/RECIPE``, e.g. ``runs/tiny`` after ``make demo``.

Keeps what the runs' summary.json and metrics.jsonl say in ``benchmarks/results/`` and writes the table of the page that
shows it.  The arms must have finished.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.tables import fill
from verl.jetrl import metric_names as names

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


class Shown(NamedTuple):
    """Where a recipe's runs are shown: ``table`` is the result file's name and the table's."""

    table: str
    page: str


PAGES = {"tiny": Shown("demo", "README.md"), "smollm2-135m": Shown("smollm2", "docs/smollm2.md")}
COLUMNS = (  # title, metric of the summary, format
    ("reward, first steps", "reward_first", "{:.2f}"),
    ("last steps", "reward_last", "{:.2f}"),
    ("validation", "validation_last", "{:.1%}"),
    ("mean \\|Δ log p\\|", "abs_dlogp_mean", "{:.1e}"),
    ("k3 KL", "k3_kl", "{:.1e}"),
    ("s per step", "step_s", "{:.1f}"),
    ("tokens/s", "tokens_per_s", "{:.0f}"),
)
# Of every step; what else verl reports is in the run's own files.
KEPT = {names.REWARD, *names.MISMATCH, *names.CLIP, names.RESPONSE_LENGTH, names.ENTROPY, names.GRAD_NORM, names.TIME_STEP}
KEPT |= {*names.TIME_PHASES, names.TOKENS_PER_S, names.PEAK_MEMORY_GB, names.PADDING_ABS_DLOGP}


def table(result: dict[str, Any]) -> str:
    """The arms' main figures as Markdown."""
    lines = ["| arm | " + " | ".join(title for title, _, _ in COLUMNS) + " |", "|---|" + "--:|" * len(COLUMNS)]
    for arm, values in result["arms"].items():
        cells = [text.format(values["metrics"][name]) for _, name, text in COLUMNS]
        lines.append(f"| `{arm}` | " + " | ".join(cells) + " |")
    steps = {values["total_steps"] for values in result["arms"].values()}
    devices = {values["device"] for values in result["arms"].values()}
    lines += [
        "",
        f"{', '.join(map(str, steps))} steps, first and last {result['reward_steps']} averaged; {', '.join(devices)}.",
    ]
    return "\n".join(lines)


def kept(record: dict[str, Any]) -> dict[str, Any]:
    """The metrics of a step that are kept."""
    data = {k: v for k, v in record["data"].items() if k in KEPT or k.startswith(names.VALIDATION_PREFIX)}
    return {"step": record["step"], "data": data}


def collect(runs: Path) -> dict[str, Any]:
    """What is kept of the arms in ``runs``.  Exits where one has not finished."""
    if not (runs / "summary.json").is_file():
        sys.exit(f"{runs} holds no finished runs (no summary.json): run the recipe first")
    summary = json.loads((runs / "summary.json").read_text())
    unfinished = [arm for arm, values in summary["arms"].items() if values["state"] != "finished"]
    if unfinished:
        sys.exit(f"{', '.join(unfinished)} of {runs} did not finish: run the recipe to its end first")
    status = {arm: json.loads((runs / arm / "status.json").read_text()) for arm in summary["arms"]}
    return {
        "commands": {arm: state["command"] for arm, state in status.items()},
        "versions": next(iter(status.values()))["versions"],
        "seconds": {arm: state["ended"] - state["started"] for arm, state in status.items()},
        "reward_steps": summary["reward_steps"],
        "arms": {arm: {k: v[k] for k in ("total_steps", "device", "metrics")} for arm, v in summary["arms"].items()},
        "samples": {arm: [kept(json.loads(x)) for x in (runs / arm / "metrics.jsonl").open()] for arm in summary["arms"]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.runs", description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="?", default=ROOT / "runs" / "tiny", help="default: runs/tiny")
    args = parser.parse_args()
    shown = PAGES.get(args.runs.resolve().name)
    if shown is None:
        parser.error(f"no page shows {args.runs.resolve().name}; there are {', '.join(PAGES)}")
    result = collect(args.runs)
    for arm, values in result["arms"].items():
        if missing := [name for _, name, _ in COLUMNS if name not in values["metrics"]]:
            sys.exit(f"{args.runs / arm} recorded no step with {', '.join(missing)}: run the recipe again, with --fresh")
    text = table(result)
    (RESULTS / f"{shown.table}.json").write_text(json.dumps(result, indent=1) + "\n")
    fill(ROOT / shown.page, {shown.table: text})
    print(text)


if __name__ == "__main__":
    main()
