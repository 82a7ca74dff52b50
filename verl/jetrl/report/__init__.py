"""The report of a recipe's runs: ``python -m verl.jetrl.report runs/<recipe>``. See docs/report.md."""

from verl.jetrl.report.load import Arm, ReportError, Status, load_arms
from verl.jetrl.report.render import write_report

__all__ = ["Arm", "ReportError", "Status", "load_arms", "write_report"]
