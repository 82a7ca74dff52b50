"""The demo's task: sums of two-digit numbers, one written-out step per sign, generated from a seed.

    prompt    Compute 38+47-19.
    response  38+47=85
              85-19=66
              #### 66

Each problem belongs to one split by a hash of its text, so train and validation are disjoint whatever the seeds.
`python recipes/tiny/task.py --out-dir DIR` writes `train.parquet` and `validation.parquet` in the columns verl reads.
"""

from __future__ import annotations

import argparse
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DATA_SOURCE = "jetrl/tiny-sums"
SPLITS = ("train", "validation")
MIN_TERMS, MAX_TERMS = 3, 5
ANSWER_MARK = "#### "


@dataclass(frozen=True)
class Problem:
    """`terms[0] signs[0] terms[1] ...`, worked from left to right; every running total lies in 0..99."""

    terms: tuple[int, ...]  # MIN_TERMS..MAX_TERMS numbers in 10..99
    signs: tuple[str, ...]  # "+" or "-", one fewer than terms

    @property
    def expression(self) -> str:
        return str(self.terms[0]) + "".join(f"{s}{t}" for s, t in zip(self.signs, self.terms[1:], strict=True))

    @property
    def prompt(self) -> str:
        return f"Compute {self.expression}."

    @property
    def split(self) -> str:
        """One problem in eight is for validation."""
        return "validation" if zlib.crc32(self.expression.encode()) % 8 == 0 else "train"

    @property
    def answer(self) -> int:
        return self.terms[0] + sum(t if s == "+" else -t for s, t in zip(self.signs, self.terms[1:], strict=True))

    def solution(self, slip: float = 0.0, rng: random.Random | None = None) -> str:
        """The response, step by step.

        With probability `slip` a step with a carry or a borrow goes wrong the way a pupil's does (`slipped`), and the
        next steps go on from there. `slip > 0` needs `rng`.
        """
        total, lines = self.terms[0], []
        for sign, term in zip(self.signs, self.terms[1:], strict=True):
            result = total + term if sign == "+" else total - term
            if slip > 0 and carries(total, sign, term) and rng.random() < slip:
                result = slipped(total, sign, term)
            lines.append(f"{total}{sign}{term}={result}")
            # After a slip a total may leave 0..99, which the notation allows: "12-15=-3", "-3+20=17".
            total = result
        return "\n".join([*lines, f"{ANSWER_MARK}{total}"])


def carries(total: int, sign: str, term: int) -> bool:
    """Whether the step carries (or borrows) a ten; never for a negative total, which has no column arithmetic here."""
    if total < 0 or (sign == "-" and term > total):
        return False
    return total % 10 + term % 10 >= 10 if sign == "+" else total % 10 < term % 10


def slipped(total: int, sign: str, term: int) -> int:
    """The wrong result of a step that carries: the carry forgotten (38+47=75), or the smaller unit taken from the
    larger one instead of borrowing (62-55=13)."""
    return total + term - 10 if sign == "+" else total - term + 2 * (term % 10 - total % 10)


def moves(total: int) -> list[tuple[str, int]]:
    """The signs and terms that keep a running total of 0..99 there."""
    return [("+", term) for term in range(10, 100 - total)] + [("-", term) for term in range(10, total + 1)]


def generate(seed: int, split: str) -> Iterator[Problem]:
    """Endless distinct problems of one split. The same seed gives the same sequence."""
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, got {split!r}")
    rng = random.Random(f"{split}-{seed}")  # seeding by a string is the same in every process
    seen: set[Problem] = set()
    while True:
        total = rng.randint(10, 99)
        terms, signs = [total], []
        for _ in range(rng.randint(MIN_TERMS, MAX_TERMS) - 1):
            sign, term = rng.choice(moves(total))
            total += term if sign == "+" else -term
            terms.append(term)
            signs.append(sign)
        problem = Problem(tuple(terms), tuple(signs))
        if problem.split == split and problem not in seen:
            seen.add(problem)
            yield problem


def rows(seed: int, split: str, count: int) -> list[dict]:
    """`count` rows of one split in verl's columns."""
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": problem.prompt}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
            "extra_info": {"index": index, "split": split},
        }
        for index, problem in zip(range(count), generate(seed, split), strict=False)
    ]


def main(out_dir: str | Path, train: int = 4096, val: int = 128, seed: int = 0) -> tuple[Path, Path]:
    """Writes `train` and `val` rows under `out_dir` (made if missing) and returns the two paths."""
    import pandas as pd  # here, so that the generator alone needs the standard library only

    if train < 1 or val < 1:
        raise ValueError(f"each split needs at least one row, got train={train}, val={val}")
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    paths = []
    for split, count in zip(SPLITS, (train, val), strict=True):
        paths.append(out_dir / f"{split}.parquet")
        pd.DataFrame(rows(seed, split, count)).to_parquet(paths[-1], index=False)
    return paths[0], paths[1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the demo's sums as parquet files for verl.")
    parser.add_argument("--out-dir", required=True, help="folder for train.parquet and validation.parquet")
    parser.add_argument("--train", type=int, default=4096, help="train rows (default %(default)s)")
    parser.add_argument("--val", type=int, default=128, help="validation rows (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="other problems, same splits (default %(default)s)")
    args = parser.parse_args()
    for path in main(args.out_dir, args.train, args.val, args.seed):
        print(path)
