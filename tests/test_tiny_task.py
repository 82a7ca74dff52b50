"""The demo's task, reward, model and training script (recipes/tiny)."""

from __future__ import annotations

import importlib.util
import itertools
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "recipes" / "tiny"
MODEL = TINY / "model"


def load(name: str):
    """A module of the recipe by its path, the way verl loads the reward."""
    spec = importlib.util.spec_from_file_location(f"tiny_{name}", TINY / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


task, reward = load("task"), load("reward")


def score(response: str, truth: str = "84") -> float:
    return reward.compute_score(task.DATA_SOURCE, response, truth, {"index": 0})


def evaluate(expression: str) -> int:
    """The value of `38+47-19`, by another way than the task's own."""
    return sum(int(number) for number in re.findall(r"[+-]?\d+", expression))


# The task


def test_rows_have_verls_columns_and_true_answers(tmp_path):
    paths = task.main(tmp_path / "new" / "folder", train=300, val=64, seed=3)
    for path, split, count in zip(paths, task.SPLITS, (300, 64), strict=True):
        frame = pd.read_parquet(path)
        assert list(frame.columns) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
        assert len(frame) == count
        for index, row in enumerate(frame.to_dict("records")):
            (message,) = row["prompt"]
            expression = re.fullmatch(r"Compute (\d\d(?:[+-]\d\d){2,4})\.", message["content"])[1]
            assert message["role"] == "user"
            assert row["reward_model"] == {"style": "rule", "ground_truth": str(evaluate(expression))}
            assert row["extra_info"] == {"index": index, "split": split}
            totals = list(itertools.accumulate(map(int, re.findall(r"[+-]?\d+", expression))))
            assert min(totals) >= 0 and max(totals) <= 99


def test_same_seed_same_rows_other_seed_other_rows():
    assert task.rows(7, "train", 200) == task.rows(7, "train", 200)
    assert task.rows(7, "train", 200) != task.rows(8, "train", 200)
    # A longer file begins with the shorter one.
    assert task.rows(7, "validation", 20) == task.rows(7, "validation", 40)[:20]


def test_rows_do_not_depend_on_the_process():
    command = f"import sys; sys.path.insert(0, {str(TINY)!r}); import task; print(task.rows(7, 'train', 50))"
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    output = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True, env=environment)
    assert output.stdout.strip() == str(task.rows(7, "train", 50))


def test_splits_are_disjoint_whatever_the_seed_and_rows_are_distinct():
    texts = {
        split: [row["prompt"][0]["content"] for seed in (0, 1) for row in task.rows(seed, split, 1000)] for split in task.SPLITS
    }
    assert not set(texts["train"]) & set(texts["validation"])
    assert len(set(texts["train"][:1000])) == 1000


def test_every_step_of_a_clean_solution_is_true_and_it_earns_the_reward():
    for problem in itertools.islice(task.generate(1, "train"), 500):
        *steps, last = problem.solution().split("\n")
        assert len(steps) == len(problem.signs)
        for step in steps:
            left, right = step.split("=")
            assert evaluate(left) == int(right)
        assert last == f"#### {evaluate(problem.expression)}"
        assert score(problem.solution(), str(problem.answer)) == 1.0


def test_a_slip_changes_steps_with_a_carry_only():
    rng = random.Random(0)
    wrong = steps = 0
    for problem in itertools.islice(task.generate(1, "train"), 500):
        for step in problem.solution(slip=1.0, rng=rng).split("\n")[:-1]:
            total, sign, term, result = re.fullmatch(r"(-?\d+)([+-])(\d+)=(-?\d+)", step).groups()
            carry = task.carries(int(total), sign, int(term))
            assert (evaluate(step.split("=")[0]) != int(result)) == carry
            wrong, steps = wrong + carry, steps + 1
    assert 0.3 < wrong / steps < 0.5
    assert (task.slipped(38, "+", 47), task.slipped(62, "-", 55)) == (75, 13)


def test_bad_arguments_are_refused(tmp_path):
    with pytest.raises(ValueError, match="split"):
        next(task.generate(0, "test"))
    with pytest.raises(ValueError, match="at least one row"):
        task.main(tmp_path, train=0)


def test_command_line(tmp_path):
    command = [sys.executable, TINY / "task.py"]
    output = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)
    assert "--seed" in output.stdout
    subprocess.run([*command, "--out-dir", tmp_path, "--train", "9", "--val", "5", "--seed", "2"], check=True)
    assert len(pd.read_parquet(tmp_path / "train.parquet")) == 9
    assert (
        list(pd.read_parquet(tmp_path / "validation.parquet")["prompt"].iloc[0]) == task.rows(2, "validation", 1)[0]["prompt"]
    )


# The reward


@pytest.mark.parametrize("response", ["#### 84", "15+83=98\n98-14=84\n#### 84", "junk\n#### 84", "#### 84\n", "#### 84 \n\n"])
def test_exact_answer_scores_one(response):
    assert score(response) == 1.0


@pytest.mark.parametrize(
    "response",
    [
        "",
        " ",
        "\n\n",
        "84",
        "####",
        "#### ",
        "####84",
        "####  84",
        "####\n84",
        "#### \n84",
        " #### 84",
        "x#### 84",
        "##### 84",
        "#### #### 84",
        "#### 8",
        "#### 840",
        "#### 184",
        "#### 85",
        "#### -84",
        "#### +84",
        "#### 084",
        "#### 84.0",
        "#### 84.",
        "#### 8 4",
        "#### 84 85",
        "#### 84 or 85",
        "#### 84\nx",
        "#### 84\n#### 84",
        "#### 85\n#### 84",
        "#### 84\n#### 85",
        "#### 84####",
        "#### 0x54",
        "#### 8_4",
        "#### eighty-four",
        "#### 42*2",
        "#### \u0668\u0664",  # 84 in Arabic-Indic digits
        "#### \uff18\uff14",  # full-width digits
        "#### 8\u00b2",
        "#### 84\x00",
        "#### 84\u200b",
        "#### 84\u2028",
        "#### 84\r",
        "#### 84\ufffd",
        "{truth}",
        "[0-9]+",
        "#### .*",
        "#" * 10000,
        "9" * 10000,
        "#### " + "9" * 10000,
        "\n" * 10000 + "#### 85",
    ],
)
def test_anything_else_scores_zero(response):
    assert score(response) == 0.0


def test_reward_of_zero_and_negative_answers():
    assert score("#### 0", "0") == 1.0
    assert score("#### -0", "0") == score("#### 00", "0") == 0.0
    assert score("#### -3", "-3") == 1.0
    assert score("#### 3", "-3") == 0.0


def test_reward_is_a_float_and_takes_verls_extra_arguments():
    value = reward.compute_score(
        data_source="x", solution_str="#### 1", ground_truth="1", extra_info=None, reward_router_address=None
    )
    assert type(value) is float and value == 1.0


# The model


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


def test_model_folder_is_small_and_padded_like_the_real_ones(tokenizer):
    assert sum(path.stat().st_size for path in MODEL.rglob("*") if path.is_file()) <= 10 * 2**20
    config = AutoConfig.from_pretrained(MODEL)
    assert config.architectures == ["Qwen3ForCausalLM"]
    assert config.dtype == torch.bfloat16
    assert len(tokenizer) < config.vocab_size
    assert config.hidden_size % 64 == 0 and config.head_dim in (32, 64)
    assert config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer.bos_token_id is config.bos_token_id is None


def test_tokenizer_keeps_digits_apart_and_text_whole(tokenizer):
    assert tokenizer.tokenize("38+47=85") == list("38+47=85")
    for text in ("15+83=98\n98-14=84\n#### 84", "Ünïcödé ✓ <tag>\t  two  spaces", "0123456789" * 3):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_prompts_and_responses_fit_the_recipe(tokenizer):
    for problem in itertools.islice(task.generate(0, "train"), 500):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.prompt}], add_generation_prompt=True, return_dict=False
        )
        response = tokenizer(problem.solution())["input_ids"]
        assert len(prompt) <= 32 and 20 <= len(response) + 1 <= 60


def test_model_is_half_competent(tokenizer):
    """Sampled at temperature 1 it is right about half of the time, and it ends its responses."""
    model = AutoModelForCausalLM.from_pretrained(MODEL).eval()
    problems = list(itertools.islice(task.generate(0, "validation"), 64))
    chats = [[{"role": "user", "content": problem.prompt}] for problem in problems]
    tokenizer.padding_side = "left"
    batch = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    torch.manual_seed(0)
    with torch.no_grad():
        ids = model.generate(**batch, max_new_tokens=64, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    responses = ids[:, batch["input_ids"].shape[1] :]
    assert (responses == tokenizer.eos_token_id).any(1).float().mean() > 0.95
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    accuracy = sum(score(text, str(p.answer)) for text, p in zip(texts, problems, strict=True)) / len(problems)
    assert 0.3 <= accuracy <= 0.6  # 64 samples: one standard deviation is 0.06


# The script that trained it


def test_short_training_is_the_same_twice_and_gives_a_checkpoint(tmp_path, monkeypatch):
    arguments = {"steps": 3, "batch": 8, "threads": 1}
    flags = [text for name, value in arguments.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "recipes.tiny.train_model", "--out", str(tmp_path / "command"), *flags]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    monkeypatch.syspath_prepend(ROOT)
    threads, generator = torch.get_num_threads(), torch.get_rng_state()
    load("train_model").main(tmp_path / "call", **arguments)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    torch.set_rng_state(generator)

    first, second = (
        {path.name: path.read_bytes() for path in sorted((tmp_path / name).iterdir())} for name in ("command", "call")
    )
    assert first == second
    # Everything but the weights is what the committed folder holds, too.
    weights = "model.safetensors"
    committed = {path.name: path.read_bytes() for path in sorted(MODEL.iterdir())}
    assert first.pop(weights) != committed.pop(weights)
    assert first == committed
