"""The demo's reward: 1 for the exact answer in the fixed form, else 0. verl loads this file by its path."""

from __future__ import annotations

import re

MARK = "####"
# ASCII digits only (`\d` would take other scripts' digits), no leading zeros, no minus zero: one spelling per number.
LAST_LINE = re.compile(r"#### (0|-?[1-9][0-9]*)")


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None, **kwargs) -> float:
    """1.0 if the response ends in the line `#### <ground_truth>` and marks no other answer, else 0.0.

    The steps before it are not judged, blank space after it is ignored. Other arguments are verl's and are not used.
    """
    if solution_str.count(MARK) != 1:
        return 0.0
    answer = LAST_LINE.fullmatch(solution_str.rstrip(" \n").rpartition("\n")[2])
    return float(answer is not None and answer[1] == str(ground_truth))
