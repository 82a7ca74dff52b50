"""Exact mode on a GPU, operator by operator, through the parity tool: every family, chunked prefill, preemption, CUDA graphs.

Each run starts a trainer and vLLM (a minute with cold kernels); they share nothing, so ``-n 4`` runs them side by side.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from verl.jetrl.parity import shake

ROOT = Path(__file__).resolve().parent.parent.parent
TOKENIZER = ROOT / "recipes" / "tiny" / "model"
COMMON = dict(num_hidden_layers=3, vocab_size=512, max_position_embeddings=8192)
MODELS = {
    "qwen3": dict(hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8, head_dim=128),
    # Qwen2.5: biases on q, k, v
    "qwen2": dict(hidden_size=896, intermediate_size=4864, num_attention_heads=14, num_key_value_heads=2),
    # SmolLM2-135M: widths that are no multiples of 128, tied embeddings
    "llama": dict(
        hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True
    ),
}
SMALL_CACHE_MB = {"qwen3": 8, "qwen2": 1, "llama": 2}  # for two or three of the 24 sequences at their full length


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory) -> Path:
    """A random checkpoint with a tokenizer; biases and norms differ from their trivial values."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **COMMON, **MODELS[request.param], bos_token_id=0, eos_token_id=1)
    made = shake(AutoModelForCausalLM.from_config(config, dtype=torch.float32), norms=0.3)
    assert any(name.endswith("bias") for name, _ in made.named_parameters()) == (request.param == "qwen2")
    made.save_pretrained(folder)
    for file in TOKENIZER.glob("*token*"):
        shutil.copy(file, folder)
    return folder


def parity(model: Path, *options: str) -> str:
    line = [sys.executable, "-m", "verl.jetrl.parity", str(model), *options]
    done = subprocess.run(line, capture_output=True, text=True, timeout=900, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.rstrip().endswith("\nequal"), done.stderr[-3000:] + done.stdout[-3000:]
    worst = re.search(r"log-probs of (\d+) sampled tokens: largest difference (\S+)", done.stdout)
    assert float(worst[2]) == 0 and int(worst[1]) > 0
    return done.stdout


@pytest.mark.parametrize("temperature", ("1.0", "0.7"))
def test_every_operator_is_equal(model, temperature):
    """Prompts of many lengths with shared prefixes, 64 tokens a step: chunks of prompts beside decode."""
    printed = parity(
        model, "--prompt", "300", "--tokens", "120", "--temperature", temperature, "--kv-mb", "1024", "--batched-tokens", "64"
    )
    for operator in (
        "embedding",
        "norm, qkv",
        "attention",
        "o",
        "residual, norm, gate, up, SiLU, down",
        "final norm",
        "logits",
    ):
        assert re.search(rf"^{operator} +\d+  yes$", printed, re.MULTILINE), printed


def test_log_probs_are_equal_with_cuda_graphs(model):
    parity(model, "--prompt", "300", "--tokens", "200", "--compiled", "--kv-mb", "1024", "--batched-tokens", "256")


def test_log_probs_are_equal_after_updates(model):
    """The engine sleeps through each of three optimizer steps; CUDA graphs stay those of before."""
    # A large cache: vLLM's sleep asserts that the GPU has more free memory afterwards, whatever tests beside this one take.
    lengths = ("--prompt", "300", "--tokens", "100", "--temperature", "0.7", "--kv-mb", "8192", "--batched-tokens", "256")
    printed = parity(model, "--updates", "3", "--compiled", *lengths)
    found = re.findall(r"^(\d updates):\nlog-probs of \d+ sampled tokens: largest difference (\S+)$", printed, re.MULTILINE)
    assert found == [("0 updates", "0.000e+00"), ("3 updates", "0.000e+00")]
    moved = re.search(r"log-probs have moved by (\S+) on average", printed)
    assert float(moved[1]) > 0.01


def test_preemption(model):
    cache = next(mb for name, mb in SMALL_CACHE_MB.items() if model.name.startswith(name))
    parity(model, "--prompt", "200", "--tokens", "100", "--kv-mb", str(cache), "--batched-tokens", "64")


def test_long_sequences(model):
    parity(model, "--prompts", "4", "--prompt", "7000", "--tokens", "1000", "--kv-mb", "4096", "--batched-tokens", "2048")
