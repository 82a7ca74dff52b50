"""The recipe's reward: 1 for the right number, 0.1 for a marked wrong one, else 0. verl loads this file by its path.

An answer is what follows `####` to the end of its line, or is inside `\\boxed{}`; the last one marked counts, so listing
guesses gains nothing. The tenth for a wrong answer teaches an untrained model to commit to one, long before it is right
often; it is small enough that a response is worth more the likelier it is right.
"""

from __future__ import annotations

import re

# Bounded, so that no response takes long to search: the answers have two digits.
MARKED = re.compile(r"####((?:(?!\\boxed)[^\n#]){0,100})|\\boxed\{([^{}\n]{0,100})\}")
# One number: digits with or without thousands separators, ".0" allowed, before it "$" or "*", after it no further digit.
NUMBER = re.compile(r"[\s*$\\]*(-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,18}))(?:\.0{1,9})?\D*")
WRONG, RIGHT = 0.1, 1.0


def marked_answer(response: str) -> int | None:
    """The number of the last mark, None if there is no mark or no single number in it."""
    marks = MARKED.findall(response)
    if not marks:
        return None
    number = NUMBER.fullmatch(marks[-1][0] or marks[-1][1])
    return int(number[1].replace(",", "")) if number else None


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None, **kwargs) -> float:
    """1.0 if the last marked answer is `ground_truth`, 0.1 if it is another number, 0.0 if there is none.

    The steps before it are not judged. Other arguments are verl's and are not used.
    """
    answer = marked_answer(solution_str)
    if answer is None:
        return 0.0
    return RIGHT if answer == int(ground_truth) else WRONG
