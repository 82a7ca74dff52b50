"""Writes MATH as verl reads it: train.parquet (the 12,000 problems outside MATH-500) and validation.parquet (MATH-500).

Sources: the Hugging Face hub, or a local folder with the same files (--source, or the environment variable MATH_SOURCE)
that holds one sub-folder or file set per data set name.  Answers are scored by verl's own rule for these data sets.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from datasets import Dataset, concatenate_datasets, load_dataset
from verl.utils.reward_score.math_reward import last_boxed_only_string, remove_boxed

TRAIN = "DigitalLearningGmbH/MATH-lighteval"
VALIDATION = "HuggingFaceH4/MATH-500"
INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."


def load(name: str, split: str, source: Path | None) -> Dataset:
    """The data set ``name`` from the hub, or from ``source/<last part of name>``."""
    if source is None:
        return load_dataset(name, split=split)
    folder = source / name.split("/")[-1]
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist: --source needs a folder named {folder.name} in it")
    return load_dataset(str(folder), split=split)


def rows(problems: Dataset, data_source: str, split: str) -> Dataset:
    """verl's columns for problems with ``problem`` and either ``answer`` or a boxed ``solution``."""

    def row(problem: dict, index: int) -> dict:
        answer = problem.get("answer") or remove_boxed(last_boxed_only_string(problem["solution"]))
        return {
            "data_source": data_source,
            "prompt": [{"role": "user", "content": f"{problem['problem']} {INSTRUCTION}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"split": split, "index": index},
        }

    return problems.map(row, with_indices=True, remove_columns=problems.column_names, desc=split)


def main(out_dir: Path, source: Path | None) -> None:
    validation = load(VALIDATION, "test", source)
    held_out = set(validation["problem"])
    every = concatenate_datasets(
        [load(TRAIN, split, source).select_columns(["problem", "solution"]) for split in ("train", "test")]
    )
    train = every.filter(lambda problem: problem["problem"] not in held_out, desc="leave out MATH-500")
    out_dir.mkdir(parents=True, exist_ok=True)
    rows(train, TRAIN, "train").to_parquet(out_dir / "train.parquet")
    rows(validation, VALIDATION, "validation").to_parquet(out_dir / "validation.parquet")
    print(f"{len(train)} training and {len(validation)} validation problems in {out_dir}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out-dir", type=Path, required=True)
    parser.add_argument("--source", type=Path, default=os.environ.get("MATH_SOURCE"), help="local folder instead of the hub")
    args = parser.parse_args()
    try:
        main(args.out_dir, args.source)
    except (OSError, ValueError) as error:
        sys.exit(f"MATH is not to be had: {str(error).splitlines()[0]} (--source or MATH_SOURCE names a local folder)")
