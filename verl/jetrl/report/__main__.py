"""Command line of the report."""

import argparse
import sys
from pathlib import Path

from verl.jetrl.report import ReportError, load_arms, write_report

DESCRIPTION = """\
Write the report of a recipe's runs: report.html (self-contained), report.md, summary.json, plots/*.png, and per arm
<arm>/metrics.jsonl (its segments joined). Runs that are unfinished, failed or without validation are fine.
"""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m verl.jetrl.report",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="runs/<recipe>", help="the folder with one subfolder per arm")
    parser.add_argument("--arms", metavar="a,b,c", help="only these arms, separated by commas (all by default)")
    args = parser.parse_args(argv)
    names = [name.strip() for name in args.arms.split(",") if name.strip()] if args.arms is not None else None
    try:
        arms = load_arms(args.folder, names)
    except ReportError as error:
        sys.exit(f"report: {error}")
    print(f"Report: {write_report(args.folder, arms)}")


if __name__ == "__main__":
    main()
