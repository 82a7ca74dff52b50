"""Exact mode: attention of both sides, the dropped pass and its check.  tests/test_jobs.py runs it as a whole."""

from __future__ import annotations

import types

import pytest
import torch

from verl.jetrl import metric_names as names

HEADS, KV_HEADS, D, BLOCK = 4, 2, 32, 16
LENGTHS = (37, 16, 5, 90)


@pytest.fixture(scope="module")
def sequences() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    shapes = (HEADS, KV_HEADS, KV_HEADS)
    return [tuple(torch.randn(length, h, D).bfloat16() for h in shapes) for length in LENGTHS]


@pytest.fixture(scope="module")
def trainers(sequences) -> list[torch.Tensor]:
    """The trainer's attention over all sequences packed in one row."""
    from verl.jetrl.trainer.attention import exact_attention

    packed = [torch.cat(parts).transpose(0, 1)[None] for parts in zip(*sequences, strict=True)]
    owner = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    mask = (owner[:, None] == owner[None]) & torch.ones(len(owner), len(owner), dtype=torch.bool).tril()
    out, _ = exact_attention(None, *packed, mask[None, None], scaling=D**-0.5)
    return list(out[0].split(LENGTHS))


def rollouts(sequences, steps: list[list[int]]) -> list[torch.Tensor]:
    """vLLM's side: ``steps[i][s]`` new tokens of sequence s in engine step i, on a paged cache with scattered blocks."""
    from verl.jetrl.rollout.exact_attention import backend

    cls = backend("cpu")
    impl = object.__new__(cls.get_impl_cls())
    impl.scale, impl.attn_type = D**-0.5, "decoder"
    shape = cls.get_kv_cache_shape(64, BLOCK, KV_HEADS, D)
    cache = torch.full(shape, torch.nan).bfloat16()
    tables = torch.randperm(64)[: 4 * 8].view(4, 8)
    done = [0] * len(LENGTHS)
    outputs = [[] for _ in LENGTHS]
    for step in steps:
        rows = [(s, done[s], done[s] + n) for s, n in enumerate(step) if n]
        q, k, v = (torch.cat([sequences[s][i][a:b] for s, a, b in rows]) for i in range(3))
        at = [(tables[s][p // BLOCK] * BLOCK + p % BLOCK).item() for s, a, b in rows for p in range(a, b)]
        starts = torch.tensor([0, *(b - a for _, a, b in rows)]).cumsum(0)
        metadata = types.SimpleNamespace(
            query_start_loc=starts,
            seq_lens=torch.tensor([b for _, _, b in rows]),
            block_table=tables[[s for s, _, _ in rows]],
        )
        impl.do_kv_cache_update(None, k, v, cache, torch.tensor(at))
        out = impl.forward(None, q, k, v, cache, metadata, torch.empty(len(q), HEADS * D).bfloat16())
        for (s, a, b), start in zip(rows, starts.tolist(), strict=False):
            outputs[s].append(out.view(-1, HEADS, D)[start : start + b - a])
            done[s] = b
    assert done == list(LENGTHS)
    return [torch.cat(parts) for parts in outputs]


PREFILL = [list(LENGTHS)]
CHUNKS = [[20, 16, 0, 30], [17, 0, 5, 30], [0, 0, 0, 30]]
DECODE = [[30, 10, 4, 80]] + [[int(30 + i < 37), int(10 + i < 16), int(4 + i < 5), int(80 + i < 90)] for i in range(10)]


@pytest.mark.parametrize("steps", [PREFILL, CHUNKS, DECODE], ids=["prefill", "chunked", "decode"])
def test_rollout_attention_has_the_trainers_bits(sequences, trainers, steps):
    for mine, theirs in zip(trainers, rollouts(sequences, steps), strict=True):
        assert torch.equal(mine, theirs)


def test_heads_whose_keys_come_in_tiles_of_one_length():
    from verl.jetrl.rollout.exact_attention import longest_query, same_bits

    assert {d for d in range(8, 300, 8) if same_bits(d)} == {*range(8, 65, 8), *range(104, 129, 8), *range(200, 257, 8)}
    for head_dim, tokens, told in ((128, 1, 1), (128, 500, 500), (64, 500, 500)):
        assert longest_query(tokens, head_dim) == told
    assert longest_query(1, 64) * 1 > 64, "or the kernel takes the tile of short queries, also without groups"


def test_the_rollouts_schedule_is_made_for_the_tiles_it_runs(monkeypatch):
    """A decode batch of head_dim 64 is announced as long before vLLM plans it; one of head_dim 128 as it is."""
    from vllm.v1.attention.backends import flash_attn

    from verl.jetrl.rollout.exact_attention import _one_split, longest_query

    planned = []

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        planned.append(common_attn_metadata.max_query_len)
        return types.SimpleNamespace(max_num_splits=1)

    class Batch(types.SimpleNamespace):
        def replace(self, **changes):
            return Batch(**(vars(self) | changes))

    monkeypatch.setattr(flash_attn.FlashAttentionMetadataBuilder, "build", build)
    for head_dim in (64, 128):
        builder = object.__new__(_one_split().get_builder_cls())
        builder.headdim = head_dim
        builder.build(0, Batch(max_query_len=1))
    assert planned == [longest_query(1, 64), 1] and planned[0] > 1


@pytest.mark.parametrize(("device", "D", "refused"), [("cuda", 80, True), ("cuda", 64, False), ("cpu", 80, False)])
def test_heads_that_decode_with_other_bits_are_refused(device, D, refused):
    from omegaconf import OmegaConf
    from transformers import AutoConfig

    from verl.jetrl.preflight import _exact

    rollout = dict(top_p=1, top_k=-1, min_p=0, repetition_penalty=1, presence_penalty=0, frequency_penalty=0)
    rollout["logprobs_mode"] = "processed_logprobs"
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "trainer": {"device": device}})
    found = _exact(config, AutoConfig.for_model("qwen3", head_dim=D))
    assert [f"head_dim={D}" in problem for problem in found] == [True] * refused


def test_nothing_is_hidden_from_the_loss_check():
    from verl.jetrl.trainer.attention import fp64_attention

    q, k, v = torch.randn(4, 2, 8), torch.randn(4, 2, 8), torch.randn(4, 2, 8)
    k[1] = torch.nan
    out = fp64_attention(q, k, v, 1.0)
    assert out[0].isfinite().all() and out[1:].isnan().all()


def test_an_additive_mask_is_refused():
    from verl.jetrl.trainer.attention import exact_attention

    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match="boolean mask"):
        exact_attention(None, q, q, q, torch.zeros(1, 1, 3, 3), scaling=1.0)


# --- the dropped pass -----------------------------------------------------------------------------------------------------


@pytest.fixture
def trainer(monkeypatch):
    """A JetRLTrainer whose queue is a dictionary, and the names of the calls it makes."""
    from omegaconf import OmegaConf

    from verl.jetrl.trainer import ppo

    calls: list[str] = []
    one = object.__new__(ppo.JetRLTrainer)
    one.config = OmegaConf.create(
        {
            "jetrl": {"verify_log_probs_every": 3},
            "actor_rollout_ref": {"actor": {"fsdp_config": {"precision_flow": {"exact": True}}}},
        }
    )
    one._first_step, one._submitted_at, one.calls, one.difference = 5, 0.0, calls, 0.0
    base = ppo.JetRLTrainer.__mro__[1]
    monkeypatch.setattr(base, "_compute_old_log_prob", lambda self, batch, metrics: calls.append("pass") or batch)
    found = lambda self, batch: {names.ABS_DLOGP_MAX: self.difference, names.TIME_ROLLOUT: 1.0}  # noqa: E731
    monkeypatch.setattr(ppo.JetRLTrainer, "_mismatch", found)
    monkeypatch.setattr(ppo.JetRLTrainer, "_rollout_seconds", lambda self, extra: 2.0)
    written: dict = {}

    def get(keys, partition_id, select_fields):
        return {"rollout_log_probs": "theirs", "extra_fields": "extra"}

    def put(keys, partition_id, fields):
        written.update(fields)
        calls.append("copied")
        return "batch"

    monkeypatch.setattr(ppo.tq, "kv_batch_get", get)
    monkeypatch.setattr(ppo.tq, "kv_batch_put", put)
    one.written = written
    return one


def steps_of(trainer, steps) -> list[str]:
    batch = types.SimpleNamespace(keys=[], partition_id="train")
    for step in steps:
        trainer.global_steps = step
        trainer._compute_old_log_prob(batch, {})
    return trainer.calls


def test_the_pass_runs_at_the_start_and_every_n_steps(trainer):
    assert steps_of(trainer, range(5, 12)) == ["pass", "copied", "copied", "pass", "copied", "copied", "pass"]
    assert trainer.written == {"old_log_probs": "theirs"}


def test_without_exact_mode_it_always_runs(trainer):
    trainer.config.actor_rollout_ref.actor.fsdp_config.precision_flow.exact = False
    trainer.difference = 1e-3
    assert steps_of(trainer, range(5, 8)) == ["pass"] * 3


def test_never_checked_if_so_configured(trainer):
    trainer.config.jetrl.verify_log_probs_every = 0
    assert steps_of(trainer, range(5, 8)) == ["copied"] * 3


def test_any_difference_ends_the_run(trainer):
    from verl.jetrl.trainer.ppo import RolloutError

    trainer.difference = 1e-9
    with pytest.raises(RolloutError, match=r"exact mode: rollout and trainer differ by up to 1.000e-09.*of step 5"):
        steps_of(trainer, [5])
