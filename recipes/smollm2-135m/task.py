"""The recipe's task: arithmetic word problems of one to four steps, generated from a seed.

    Maya has 7 apples. She buys 3 bags of 4 apples each. Then she gives 5 apples to Omar. How many apples does Maya have now?

Four kinds of story (a collection, money, a comparison, a workshop) with names, things and wordings drawn at random; all
numbers are integers, no amount falls below zero. GRPO learns from problems of which some samples are right and some are not,
so numbers and lengths suit the 135M-parameter model that the recipe trains: sampled at temperature 1 it starts at about a
fifth of the one-step problems, few of those with two steps, and next to none of the longer ones, which leave room to learn.
The worked examples in the prompt give the form; without them the model hardly ever marks an answer.

Each problem belongs to one split by a hash of its text, so train and validation are disjoint whatever the seeds.
`python recipes/smollm2-135m/task.py --out-dir DIR` writes `train.parquet` and `validation.parquet` in the columns verl reads.
"""

from __future__ import annotations

import argparse
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DATA_SOURCE = "jetrl/word-problems"
SPLITS = ("train", "validation")
MIN_STEPS, MAX_STEPS = 1, 4
STEP_WEIGHTS = (5, 3, 1, 1)  # how often a problem has 1, 2, 3, 4 steps
MAX_AMOUNT = 40  # stories add nothing to an amount that comes near it

INSTRUCTION = "Solve the problem, one equation a line. End with #### and the answer."
EXAMPLES = (
    ("Lena has 6 pens. She buys 3 more pens. How many pens does Lena have now?", "6 + 3 = 9\n#### 9"),
    ("Sam has $9. He spends $4 on food. How many dollars does Sam have left?", "9 - 4 = 5\n#### 5"),
    (
        "Eva has 2 cups. Leo has 3 times as many cups as Eva. Ann has 2 more cups than Leo. How many cups does Ann have?",
        "2 * 3 = 6\n6 + 2 = 8\n#### 8",
    ),
)

PEOPLE = [(name, "She") for name in ("Maya", "Anna", "Zoe", "Priya", "Ruth", "Ines", "Nora", "Aisha", "Clara", "Mei")]
PEOPLE += [(name, "He") for name in ("Omar", "Tom", "Luis", "Ken", "Ivan", "Paul", "Ravi", "Ben", "Jonas", "Hugo")]
THINGS = (
    "apples",
    "marbles",
    "stickers",
    "books",
    "shells",
    "coins",
    "cards",
    "eggs",
    "pencils",
    "stamps",
    "buttons",
    "cookies",
)
PACKS = ("bags", "boxes", "packs", "baskets")
GOODS = ("tickets", "toys", "sandwiches", "notebooks", "plants", "hats", "lamps", "cups")
MAKERS = (("baker", "loaves"), ("potter", "bowls"), ("carpenter", "chairs"), ("tailor", "shirts"), ("printer", "posters"))


@dataclass(frozen=True)
class Problem:
    """A story with its question, and what is to be found."""

    text: str
    answer: int
    steps: int  # arithmetic operations

    @property
    def split(self) -> str:
        """One problem in eight is for validation."""
        return "validation" if zlib.crc32(self.text.encode()) % 8 == 0 else "train"


class Story:
    """Sentences, and the amount after them."""

    def __init__(self, rng: random.Random, start: str, amount: int) -> None:
        self.rng, self.sentences, self.amount, self.steps = rng, [start], amount, 0

    def then(self, sentence: str, amount: int, steps: int = 1) -> None:
        if len(self.sentences) > 1:
            opening = self.rng.choice(("Then ", "After that, ", "Next, ", ""))
            sentence = opening + sentence[0].lower() + sentence[1:] if opening else sentence
        self.sentences.append(sentence)
        self.amount, self.steps = amount, self.steps + steps

    def problem(self, question: str) -> Problem:
        return Problem(" ".join([*self.sentences, question]), self.amount, self.steps)


def collection(rng: random.Random, steps: int) -> Problem:
    """Someone's things grow and shrink; sometimes the rest is shared out at the end."""
    (name, pronoun), thing = rng.choice(PEOPLE), rng.choice(THINGS)
    friend = rng.choice([other for other, _ in PEOPLE if other != name])
    amount = rng.randint(2, 8)
    story = Story(rng, f"{name} has {amount} {thing}.", amount)
    while story.steps < steps:
        now, left = story.amount, steps - story.steps
        shares = [k for k in range(2, 7) if now % k == 0 and now > k] if left == 1 and story.steps else []
        kinds = ["more", "packs"] * (now < MAX_AMOUNT - 20) + ["fewer"] * (now > 4) + ["half"] * (now % 2 == 0 and now > 4)
        kind = rng.choice([k for k in kinds if k != "packs" or left > 1] + ["share"] * bool(shares))
        if kind == "more":
            n = rng.randint(2, 6)
            story.then(f"{pronoun} {rng.choice(('finds', 'buys', 'gets'))} {n} more {thing}.", now + n)
        elif kind == "packs":
            k, n = rng.randint(2, 3), rng.randint(2, 4)
            story.then(f"{pronoun} buys {k} {rng.choice(PACKS)} of {n} {thing} each.", now + k * n, steps=2)
        elif kind == "fewer":
            n = rng.randint(2, min(now - 1, 6))
            story.then(f"{pronoun} {rng.choice(('gives', 'sells'))} {n} {thing} to {friend}.", now - n)
        elif kind == "half":
            story.then(f"{pronoun} gives half of the {thing} to {friend}.", now // 2)
        else:
            k = rng.choice(shares)
            story.then(f"{pronoun} puts all the {thing} into {k} {rng.choice(PACKS)}, the same number in each.", now // k)
            return story.problem(f"How many {thing} are in each?")
    return story.problem(f"How many {thing} does {name} have now?")


def money(rng: random.Random, steps: int) -> Problem:
    """Someone earns and spends dollars."""
    (name, pronoun), amount = rng.choice(PEOPLE), rng.randint(4, 12)
    story = Story(rng, f"{name} has ${amount}.", amount)
    while story.steps < steps:
        now, left = story.amount, steps - story.steps
        kinds = ["earn"] * (now < MAX_AMOUNT - 20) + ["wage"] * (left > 1 and now < MAX_AMOUNT - 20)
        kinds += ["spend"] * (now > 3) + ["buy"] * (left > 1 and now > 6)
        kind = rng.choice(kinds)
        if kind == "earn":
            n = rng.randint(2, 6)
            story.then(f"{pronoun} {rng.choice(('earns', 'finds', 'gets'))} ${n}.", now + n)
        elif kind == "wage":
            k, n = rng.randint(2, 3), rng.randint(2, 4)
            story.then(f"{pronoun} works for {k} hours and earns ${n} an hour.", now + k * n, steps=2)
        elif kind == "spend":
            n = rng.randint(2, min(now - 1, 6))
            story.then(f"{pronoun} spends ${n} on {rng.choice(('food', 'a bus ride', 'a gift', 'a book'))}.", now - n)
        else:
            k = rng.randint(2, min(4, now // 3))
            n = rng.randint(2, min(5, now // k))
            story.then(f"{pronoun} buys {k} {rng.choice(GOODS)} for ${n} each.", now - k * n, steps=2)
    return story.problem(f"How many dollars does {name} have left?")


def comparison(rng: random.Random, steps: int) -> Problem:
    """Each person has more or fewer than the one before, or a multiple; asked for the last one's amount or for the sum."""
    thing, amount = rng.choice(THINGS), rng.randint(2, 8)
    people = [name for name, _ in rng.sample(PEOPLE, MAX_STEPS + 1)]
    amounts = [amount]
    sentences = [f"{people[0]} has {amount} {thing}."]
    # The sum of k amounts takes k - 1 steps, and so does finding them: an even number in all.
    total = steps % 2 == 0 and rng.random() < 0.6
    for before, name in zip(people, people[1 : 1 + (steps // 2 if total else steps)], strict=False):
        now = amounts[-1]
        kind = rng.choice(["more"] + ["fewer"] * (now > 3) + ["times"] * (now <= 15))
        if kind == "more":
            n = rng.randint(2, 6)
            amounts.append(now + n)
            sentences.append(f"{name} has {n} more {thing} than {before}.")
        elif kind == "fewer":
            n = rng.randint(2, min(now - 1, 6))
            amounts.append(now - n)
            sentences.append(f"{name} has {n} fewer {thing} than {before}.")
        else:
            k = rng.randint(2, 3)
            amounts.append(now * k)
            sentences.append(f"{name} has {k} times as many {thing} as {before}.")
    if total:
        return Problem(" ".join([*sentences, f"How many {thing} do they have together?"]), sum(amounts), steps)
    question = f"How many {thing} does {people[len(amounts) - 1]} have?"
    return Problem(" ".join([*sentences, question]), amounts[-1], steps)


def workshop(rng: random.Random, steps: int) -> Problem:
    """Someone makes things at a steady rate; some are sold, some break, the rest is packed."""
    maker, thing = rng.choice(MAKERS)
    rate, days = rng.randint(2, 5), rng.randint(2, 3)
    story = Story(rng, f"A {maker} makes {rate} {thing} a day for {days} days.", rate * days)
    story.steps = 1
    while story.steps < steps:
        now = story.amount
        packs = [k for k in range(2, 7) if now % k == 0 and now > k] if story.steps == steps - 1 else []
        kind = rng.choice(["more"] * (now < MAX_AMOUNT - 20) + ["sold", "broken"] * (now > 4) + ["pack"] * bool(packs))
        if kind == "more":
            n = rng.randint(2, 6)
            story.then(f"The {maker} makes {n} more {thing}.", now + n)
        elif kind == "sold":
            n = rng.randint(2, min(now - 1, 6))
            story.then(f"The {maker} sells {n} {thing}.", now - n)
        elif kind == "broken":
            n = rng.randint(2, min(now - 1, 5))
            story.then(f"The {maker} gives {n} {thing} away.", now - n)
        else:
            k = rng.choice(packs)
            story.then(f"The {maker} packs all the {thing} into boxes of {k}.", now // k)
            return story.problem("How many boxes are there?")
    return story.problem(f"How many {thing} does the {maker} have now?")


STORIES = (collection, money, comparison, workshop)


def generate(seed: int, split: str) -> Iterator[Problem]:
    """Endless distinct problems of one split. The same seed gives the same sequence."""
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, got {split!r}")
    rng = random.Random(f"{split}-{seed}")  # seeding by a string is the same in every process
    seen: set[str] = set()
    while True:
        (steps,) = rng.choices(range(MIN_STEPS, MAX_STEPS + 1), STEP_WEIGHTS)
        problem = rng.choice(STORIES)(rng, steps)
        if problem.split == split and problem.text not in seen:
            seen.add(problem.text)
            yield problem


def prompt(problem: Problem) -> list[dict[str, str]]:
    """The chat: the instruction, worked examples, the problem."""
    chat = [{"role": "system", "content": INSTRUCTION}]
    for question, answer in EXAMPLES:
        chat += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return [*chat, {"role": "user", "content": problem.text}]


def rows(seed: int, split: str, count: int) -> list[dict]:
    """`count` rows of one split in verl's columns."""
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": prompt(problem),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
            "extra_info": {"index": index, "split": split, "steps": problem.steps},
        }
        for index, problem in zip(range(count), generate(seed, split), strict=False)
    ]


def main(out_dir: str | Path, train: int = 8192, val: int = 256, seed: int = 0) -> tuple[Path, Path]:
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
    parser = argparse.ArgumentParser(description="Write the recipe's word problems as parquet files for verl.")
    parser.add_argument("--out-dir", required=True, help="folder for train.parquet and validation.parquet")
    parser.add_argument("--train", type=int, default=8192, help="train rows (default %(default)s)")
    parser.add_argument("--val", type=int, default=256, help="validation rows (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="other problems, same splits (default %(default)s)")
    args = parser.parse_args()
    for path in main(args.out_dir, args.train, args.val, args.seed):
        print(path)
