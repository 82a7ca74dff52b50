"""The parity tool: what it calls equal is, and it names the first operator that is not."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from decoder_cases import TOKENS, VOCABULARY, make, raw, trainer_of

from verl.jetrl import parity
from verl.jetrl.arena import ENGINE
from verl.jetrl.parity import Recorder, Sample, Sides, differences, row_hashes, table, trainers_log_probs
from verl.jetrl.trainer.decoder import share_decoder


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


class Engine:
    """Stands for vLLM: random responses, with the log-probs that the arena's weights give them at the time.

    ``stale``: it goes on answering with what its first weights gave.
    """

    def __init__(self, trainer, stale: bool = False) -> None:
        self.sides = Sides(trainer.model, trainer.decoder, trainer.masters, self, VOCABULARY)
        self.control, self.stale = trainer.arena.control, stale
        self.calls, self.recorder, self.first = [], None, None

    def collective_rpc(self, name, args):
        if args[0]:
            self.recorder = Recorder(self.sides.decoder.model)
        return [None if args[0] else self.recorder.take()]

    @torch.no_grad()
    def generate(self, prompts, params):
        self.control.require(ENGINE, "a request")
        generator = torch.Generator().manual_seed(self.control.version)
        answers = []
        for prompt, of in zip(prompts, params, strict=True):
            response = torch.randint(VOCABULARY, (of.max_tokens,), generator=generator).tolist()
            chosen = trainers_log_probs(
                self.sides, Sample(prompt["prompt_token_ids"], response, torch.empty(0)), of.temperature
            )
            steps = [{token: SimpleNamespace(logprob=p)} for token, p in zip(response, chosen.tolist(), strict=True)]
            answers.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=response, logprobs=steps)]))
        self.first = self.first or answers
        return self.first if self.stale else answers

    def sleep(self, level):
        self.calls.append(("sleep", level, self.control.holder))

    def wake_up(self, tags):
        self.calls.append(("wake", *tags, self.control.holder))

    def reset_prefix_cache(self):
        self.calls.append(("reset", self.control.holder))


@pytest.fixture
def run_updates(mesh, owned, monkeypatch, tmp_path):
    """The tool on a small model and an engine that is none: what it found, and the engine."""

    def run_updates(family="qwen3", change=lambda engine: None, stale=False, compiled=False):
        trainer = trainer_of(make(family), mesh, rank=0)
        owned.append(trainer.arena)
        trainer.masters.drop_grads()
        share_decoder(trainer.model, trainer.decoder, with_head=False)
        trainer.arena.control.hand_over(ENGINE)
        engine = Engine(trainer, stale)
        change(engine)
        monkeypatch.setattr(parity, "both_sides", lambda args: engine.sides)
        args = argparse.Namespace(
            prompts=4, prompt=9, tokens=5, temperature=0.7, updates=2, random=True, compiled=compiled, seed=0,
            json=tmp_path / "found.json",
        )  # fmt: skip
        before = raw(trainer.arena.data).clone()
        found = parity.run(args)
        assert json.dumps(found) == json.dumps(json.loads(args.json.read_text())) and list(found["stages"]) == STAGES
        return found, engine, (raw(trainer.arena.data) != before).float().mean().item()

    return run_updates


STAGES = ["0 updates", "2 updates"]


@pytest.mark.parametrize("family", ("qwen3", "qwen2", "llama"))
def test_updates_change_the_weights_of_both_sides(family, run_updates, capsys):
    found, engine, changed = run_updates(family)
    assert found["equal"] and changed > 0.01 and found["stages"]["2 updates"]["stale_mean_abs_dlogp"] > 0.01
    assert engine.control.version == 3 and engine.control.holder == ENGINE and engine.calls == [("reset", ENGINE)] * 2
    assert all(p.grad is None for p in engine.sides.masters.parameters.values())
    for stage in found["stages"].values():
        assert stage["max_abs_dlogp"] == 0 and stage["sampled_tokens"] == 20 and not any(stage["different_rows"].values())
        assert stage["rows"]["attention"] > 0 and stage["rows"]["logits"] > 0
    printed = capsys.readouterr().out
    assert printed.count("log-probs of 20 sampled tokens: largest difference 0.000e+00") == 2
    assert printed.index("0 updates:") < printed.index("2 updates:")


def test_the_engine_sleeps_while_the_trainer_has_the_weights(run_updates, monkeypatch):
    """The order of a GPU's calls; compiled, no operator is recorded."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    found, engine, _ = run_updates(compiled=True)
    update = [("sleep", 2, ENGINE), ("wake", "weights", ENGINE), ("wake", "kv_cache", ENGINE), ("reset", ENGINE)]
    assert engine.calls == 2 * update and found["equal"] and found["stages"]["0 updates"]["rows"] == {}


def test_updates_that_do_not_arrive_are_not_equal(run_updates, monkeypatch, capsys):
    """Both sides read the same old weights, and agree: only what was sampled before tells."""
    monkeypatch.setenv("JETRL_FAULT", "drop_weight_sync")
    found, engine, changed = run_updates()
    assert changed == 0 and engine.control.version == 3
    assert found["stages"]["0 updates"]["equal"] and found["stages"]["2 updates"]["max_abs_dlogp"] == 0
    assert not found["stages"]["2 updates"]["equal"] and not found["equal"]
    assert "the updates did not reach the weights" in capsys.readouterr().out


def test_an_engine_with_stale_weights_is_not_equal(run_updates):
    found, *_ = run_updates(stale=True)
    assert found["stages"]["0 updates"]["equal"] and found["stages"]["2 updates"]["max_abs_dlogp"] > 0.01
    assert not found["equal"]


def test_a_log_prob_that_is_no_number_is_not_equal(run_updates):
    def change(engine):
        real = engine.generate

        def generate(prompts, params):
            answers = real(prompts, params)
            for chosen in answers[0].outputs[0].logprobs[0].values():
                chosen.logprob = math.nan
            return answers

        engine.generate = generate

    found, *_ = run_updates(change=change)
    assert all(math.isnan(stage["max_abs_dlogp"]) and not stage["equal"] for stage in found["stages"].values())
    assert not found["equal"]


def test_operators_that_were_not_recorded_are_not_equal(run_updates):
    def change(engine):
        engine.collective_rpc = lambda name, args: [{}]

    found, *_ = run_updates(change=change)
    assert found["stages"]["0 updates"]["max_abs_dlogp"] == 0 and not found["stages"]["0 updates"]["equal"]


def test_an_update_without_a_gradient_is_an_error(run_updates):
    def change(engine):
        engine.sides.masters.assign_grads, real = lambda: (real(), norm.grad.zero_()), engine.sides.masters.assign_grads
        norm = engine.sides.masters.parameters["model.norm.weight"]

    with pytest.raises(RuntimeError, match="the gradient of model.norm.weight has norm 0.0"):
        run_updates(change=change)


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
