"""The parity tool: what it calls equal is, and it names the first operator that is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from decoder_cases import TOKENS, make, trainer_of

from verl.jetrl.parity import Recorder, differences, row_hashes, table


def test_row_hashes_see_every_bit_and_its_place():
    torch.manual_seed(0)
    rows = torch.randn(200, 64).bfloat16()
    hashes = row_hashes(rows)
    assert len(set(hashes.tolist())) == 200 and torch.equal(row_hashes(rows[[7]]), hashes[[7]])
    flipped = rows[:1].repeat(64 * 16, 1).view(torch.int16)
    for bit in range(64 * 16):
        flipped[bit, bit // 16] ^= torch.tensor(1 << (bit % 16), dtype=torch.int32).to(torch.int16)
    swapped = rows[:1].roll(1, 1)
    seen = {*row_hashes(flipped.view(torch.bfloat16)).tolist(), *row_hashes(swapped).tolist()}
    assert len(seen) == 64 * 16 + 1 and hashes[0].item() not in seen


@pytest.fixture
def record(mesh):
    """Records one forward pass of a small model; ``change`` may damage it first."""

    def record(change=lambda decoder: None, tokens=TOKENS, **sizes):
        trainer = trainer_of(make("qwen3", **sizes), mesh)
        change(trainer.decoder)
        recorder = Recorder(trainer.decoder.model)
        with torch.no_grad():
            trainer.model(tokens, use_cache=False)
        assert all(module.tap is not None for module in trainer.decoder.model.layers)
        rows = recorder.take()
        assert all(module.tap is None for module in trainer.decoder.model.layers)
        return rows

    return record


def test_a_part_of_the_trainers_rows_is_equal(record):
    trainer = record()
    assert differences(trainer, record(tokens=TOKENS[:1, :7])) == []
    assert "NO" not in table(trainer, trainer) and len(trainer) == 3 + 6 * 2


@pytest.mark.parametrize(
    ("layer", "name", "operator"),
    [
        (0, "self_attn.qkv_proj.weight", "norm, qkv"),
        (1, "self_attn.k_norm.weight", "k norm, RoPE"),
        (1, "self_attn.o_proj.weight", "o"),
        (1, "mlp.gate_up_proj.weight_scale_inv", "residual, norm, gate, up, SiLU, down"),
    ],
)
def test_the_first_different_operator_is_named(record, layer, name, operator):
    def change(decoder):
        tensor = decoder.get_parameter(f"model.layers.{layer}.{name}").data
        tensor.view(torch.uint8)[0].bitwise_xor_(0x10)

    found = differences(record(), record(change))
    assert (found[0].layer, found[0].operator) == (layer, operator) and 0 < found[0].rows <= found[0].of
    assert f"{operator:40}" in table(record(), record(change)) and "NO: " in table(record(), record(change))


def test_a_different_head_is_named_last(record):
    own_head = dict(tie_word_embeddings=False)
    same, other = record(**own_head), record(lambda decoder: decoder.lm_head.weight.data[0].neg_(), **own_head)
    found = differences(same, other)
    assert [d.operator for d in found] == ["logits"] and 0 < found[0].rows <= found[0].of
    assert f"{'logits':40}{found[0].of:>10}  NO: {found[0].rows} of {found[0].of} rows" in table(same, other).splitlines()


@pytest.mark.job
def test_the_tool_finds_vllms_own_attention(root: Path):
    """Without exact mode attention adds in another order; everything before the first attention is equal all the same."""
    line = [sys.executable, "-m", "verl.jetrl.parity", str(root / "recipes/tiny/model"), "--not-exact", "--prompts", "12"]
    result = subprocess.run(line, capture_output=True, text=True, timeout=600)
    assert result.returncode == 1 and result.stdout.rstrip().endswith("NOT equal"), result.stderr[-3000:]
    rows = {
        row[:40].rstrip(): row[40:].split(maxsplit=1)[1] for row in result.stdout.splitlines() if row[40:50].strip().isdigit()
    }
    assert rows["embedding"] == "yes" and "first in layer 0" in rows["attention"], result.stdout
    assert not any("first in layer 0" in rows[name] for name in ("norm, qkv", "q norm, RoPE", "k norm, RoPE")), result.stdout
    assert [p for folder in ("/dev/shm", "/tmp") for p in Path(folder).glob("jetrl*parity-*")] == []
