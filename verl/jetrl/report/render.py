"""Write the report's files. Each is written whole under another name and renamed, so that a reader never sees half."""

import base64
import json
import math
import os
import time
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2

from verl.jetrl import metric_names as names
from verl.jetrl.config_diff import diff, format_value
from verl.jetrl.report.load import Arm, arm_folders
from verl.jetrl.report.plots import SECTIONS, Plot, arm_styles, draw_plots
from verl.jetrl.report.summary import Row, Summary, summarize
from verl.jetrl.report.template import HTML, MARKDOWN

TITLE = "training precision side by side"


def write_report(folder: Path, arms: list[Arm]) -> Path:
    """Write everything into ``folder`` (runs/<recipe>) and return the path of report.html."""
    summary = summarize(arms)
    all_names = arm_folders(folder) or [arm.name for arm in arms]
    plots = draw_plots(arms, all_names)
    page = _page(folder.resolve().name, summary, plots, arm_styles(all_names))

    for arm in arms:
        lines = [json.dumps({"step": step, "data": _json(record)}) for step, record in arm.records.items()]
        write_atomically(folder / arm.name / "metrics.jsonl", "".join(f"{line}\n" for line in lines).encode())
    (folder / "plots").mkdir(exist_ok=True)
    for plot in plots:
        write_atomically(folder / "plots" / f"{plot.name}.png", plot.png)
    for old in (folder / "plots").glob("*.png"):
        if old.stem not in {plot.name for plot in plots}:
            old.unlink(missing_ok=True)  # of an earlier report, with other arms: beside the new ones it would mislead
    write_atomically(folder / "summary.json", _summary_json(folder.resolve().name, summary).encode())
    write_atomically(folder / "report.md", _render(MARKDOWN, page, escape=False).encode())
    write_atomically(folder / "report.html", _render(HTML, page, escape=True).encode())
    return folder / "report.html"


def write_atomically(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def format_number(value: float, kind: str = "number") -> str:
    """A value as people read it, three digits: ``0.712``, ``3.6e-4``, ``8,236``, ``41.2%``, ``12.3 s``."""
    if kind == "exact" and value == 0:
        return "0 (exact)"
    if kind == "percent":
        return f"{_three_digits(100 * value)}%"
    if kind == "seconds":
        return f"{_three_digits(value)} s"
    if kind == "correlation":
        return f"{value:.6f}"
    return _three_digits(value)


def format_ratio(ratio: float) -> str:
    if 0 < ratio < 0.01:
        return f"{ratio:.1g}x"
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x" if ratio < 100 else f"{ratio:,.0f}x"


def _three_digits(value: float) -> str:
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)))
    if exponent < -3 or exponent > 8:
        mantissa, power = f"{value:.1e}".split("e")
        return f"{mantissa}e{int(power)}"
    return f"{value:,.{max(0, 2 - exponent)}f}"


def _render(template: str, page: dict[str, Any], escape: bool) -> str:
    environment = jinja2.Environment(autoescape=escape, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(page)


def _page(recipe: str, summary: Summary, plots: list[Plot], styles: dict[str, tuple]) -> dict[str, Any]:
    """What the templates show, as plain values."""
    colours = {name: style[0] for name, style in styles.items()}
    ratios_note = (
        f"Beside a number: its ratio to {names.BASELINE_ARM}; 0.87x means 0.87 times as much. "
        if summary.has_baseline and len(summary.arms) > 1
        else ""
    )
    return {
        "recipe": recipe,
        "title": TITLE,
        "subtitle": f"{len(summary.arms)} arm{'s' if len(summary.arms) > 1 else ''}. "
        f"Written {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}.",
        "arms": [_arm_card(arm, colours[arm.name]) for arm in summary.arms],
        "notices": summary.notices,
        "table_note": f"{ratios_note}Times and tokens per second are medians over the steps after the first (warm-up).",
        "show_ratios": bool(ratios_note),
        "groups": [
            (group, [_table_row(row, summary, colours) for row in rows])
            for group, rows in groupby(summary.rows, key=lambda row: row.group)
        ],
        "sections": [
            (section, [_plot_fields(plot) for plot in plots if plot.section == section])
            for section in SECTIONS
            if any(plot.section == section for plot in plots)
        ],
        "how": _how(summary),
        "details": [*_config_details(summary.arms), *_version_details(summary.arms)],
    }


def _plot_fields(plot: Plot) -> dict[str, Any]:
    return vars(plot) | {"data": base64.b64encode(plot.png).decode()}


def _arm_card(arm: Arm, colour: str) -> dict[str, Any]:
    status, step = arm.status, max(arm.train_steps, default=0)
    total = status.total_steps
    facts = []
    if status.started is not None and status.ended is not None:
        facts.append(f"took {_duration(status.ended - status.started)}")
    elif status.started is not None and status.state == "running":
        facts.append(f"running for {_duration(time.time() - status.started)}")
    if status.device:
        facts.append(status.device)
    return {
        "name": arm.name,
        "colour": colour,
        "state": status.state,
        "step": step,
        "total_steps": total,
        "progress": f"step {step} of {total}" if total else f"step {step}",
        "facts": facts,
        "error": status.error,
    }


def _table_row(row: Row, summary: Summary, colours: dict[str, str]) -> dict[str, Any]:
    cells = []
    for arm in summary.arms:
        value, ratio = summary.values[arm.name][row.key], summary.ratios[arm.name][row.key]
        number = "—" if value is None else format_number(value, row.kind)
        # "0.00x" beside a zero, and "1.00x" beside the baseline itself, say nothing.
        times = None if not ratio or arm.name == names.BASELINE_ARM else format_ratio(ratio)
        text = f"{number} ({times})" if times else number
        cells.append(
            {
                "arm": arm.name,
                "colour": colours[arm.name],
                "value": number,
                "ratio": times,
                "text": text,
                "baseline": arm.name == names.BASELINE_ARM,
            }
        )
    return {"label": row.label, "better": row.better, "cells": cells}


def _how(summary: Summary) -> list[str]:
    k = summary.last_k
    return [
        f"Reward: mean over the first and the last {k} recorded steps of the arm."
        if k > 1
        else "Reward: the first and the last recorded step of the arm.",
        "Validation accuracy: the best of all validations favours arms with more of them; the last does not.",
        "Mean |Δ log p|, k3 KL, Pearson correlation and clipped tokens: mean over all recorded steps. "
        "Max |Δ log p|: the largest of any step. Both sides score the same sampled tokens with the same weights.",
        "Times and tokens per second: median over steps, without the first step after each start of the run, which "
        "compiles and fills caches. Other: what rollout, log-prob, update and weight sync leave of the whole step. "
        "Medians of parts need not add up to the median of the whole.",
        "Peak memory: the largest of any step.",
        f"Ratios: the arm's number divided by that of {names.BASELINE_ARM}, from unrounded values. None is given where "
        "that is zero.",
        "A run that was resumed counts from its last history: steps that were done again replace those done before.",
    ]


def _config_details(arms: list[Arm]) -> list[dict[str, Any]]:
    baseline = next((arm.config for arm in arms if arm.name == names.BASELINE_ARM), None)
    if baseline is None:
        return []
    return [
        {
            "title": f"Configuration: {names.BASELINE_ARM} against {arm.name}",
            "head": ("key", names.BASELINE_ARM, arm.name),
            "rows": [(key, format_value(a), format_value(b)) for key, a, b in diff(baseline, arm.config)],
            "empty": "The two have the same configuration.",
        }
        for arm in arms
        if arm.name != names.BASELINE_ARM and arm.config is not None
    ]


def _version_details(arms: list[Arm]) -> list[dict[str, Any]]:
    arms = [arm for arm in arms if arm.status.versions]
    if not arms:
        return []
    packages = sorted({package for arm in arms for package in arm.status.versions})
    rows = [(package, *(arm.status.versions.get(package, "—") for arm in arms)) for package in packages]
    return [{"title": "Versions", "head": ("package", *(arm.name for arm in arms)), "rows": rows, "empty": ""}]


def _summary_json(recipe: str, summary: Summary) -> str:
    arms = {}
    for arm in summary.arms:
        arms[arm.name] = {
            "state": arm.status.state,
            "step": max(arm.train_steps, default=0),
            "total_steps": arm.status.total_steps,
            "error": arm.status.error,
            "device": arm.status.device,
            "metrics": summary.values[arm.name],
            "ratios": summary.ratios[arm.name],
        }
    content = {
        "recipe": recipe,
        "written": int(time.time()),
        "baseline": names.BASELINE_ARM if summary.has_baseline else None,
        "reward_steps": summary.last_k,
        "notices": summary.notices,
        "arms": arms,
    }
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def _json(record: dict[str, float]) -> dict[str, float | None]:
    """JSON has no NaN: null, as verl's file tracker writes it."""
    return {metric: value if math.isfinite(value) else None for metric, value in record.items()}


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
