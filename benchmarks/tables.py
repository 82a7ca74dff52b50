"""Tables of the result files, and their places in the documentation."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

END = "<!-- end -->"


def result_of(path: Path) -> dict[str, Any]:
    """What a benchmark wrote to ``path``; exits where there is nothing."""
    if not path.is_file():
        sys.exit(f"{path}: no such file; run the benchmark first, or name its result with --out")
    return json.loads(path.read_text())


def markdown(header: list[str], rows: list[list]) -> str:
    """A Markdown table; numbers with three digits, None as a dash."""

    def cell(v) -> str:
        if v is None:
            return "-"
        return f"{v:.3g}" if isinstance(v, float) and abs(v) < 10 else f"{v:.0f}" if isinstance(v, float) else str(v)

    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(cell(v) for v in row) + " |" for row in rows])


def fill(path: Path, tables: dict[str, str]) -> None:
    """Replaces what stands between ``<!-- table NAME -->`` and ``<!-- end -->`` in a page by ``tables[NAME]``."""
    text = path.read_text()
    for name, body in tables.items():
        start = f"<!-- table {name} -->"
        if start in text:
            before, rest = text.split(start, 1)
            text = before + start + "\n\n" + body + "\n\n" + END + rest.split(END, 1)[1]
    path.write_text(text)
