"""Results of the demo: ``python -m benchmarks.demo [RUNS]`` after ``make demo``.

Writes benchmarks/results/demo.json from RUNS/summary.json (default runs/tiny) and the table in README.md between its marks.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks/results/demo.json"
COLUMNS = (  # title, metric of the summary, format
    ("reward, first steps", "reward_first", "{:.2f}"),
    ("last steps", "reward_last", "{:.2f}"),
    ("validation", "validation_last", "{:.1%}"),
    ("mean \\|Δ log p\\|", "abs_dlogp_mean", "{:.1e}"),
    ("k3 KL", "k3_kl", "{:.1e}"),
    ("s per step", "step_s", "{:.1f}"),
    ("tokens/s", "tokens_per_s", "{:.0f}"),
)


def table(result: dict) -> str:
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


def main(runs: Path) -> None:
    summary = json.loads((runs / "summary.json").read_text())
    unfinished = [arm for arm, values in summary["arms"].items() if values["state"] != "finished"]
    if unfinished:
        sys.exit(f"{', '.join(unfinished)} of {runs} did not finish: run `make demo` first")
    status = {arm: json.loads((runs / arm / "status.json").read_text()) for arm in summary["arms"]}
    result = {
        "command": "make demo && python -m benchmarks.demo",
        "versions": next(iter(status.values()))["versions"],
        "seconds": {arm: state["ended"] - state["started"] for arm, state in status.items()},
        "reward_steps": summary["reward_steps"],
        "arms": {arm: {k: v[k] for k in ("total_steps", "device", "metrics")} for arm, v in summary["arms"].items()},
        "samples": {arm: [json.loads(x) for x in (runs / arm / "metrics.jsonl").open()] for arm in summary["arms"]},
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    readme = ROOT / "README.md"
    text = re.sub(
        r"(<!-- demo -->\n).*?(\n<!-- /demo -->)",
        lambda marks: f"{marks[1]}{table(result)}{marks[2]}",
        readme.read_text(),
        flags=re.S,
    )
    readme.write_text(text)
    print(table(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "runs/tiny")
