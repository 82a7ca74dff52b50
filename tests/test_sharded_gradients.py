"""Several ranks on gloo: sharded gradients and the exchange of FP8 bytes against one rank alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent))  # as a script, there is no conftest
from decoder_cases import Trainer, make, trainer_of  # noqa: E402

from verl.jetrl.arena import layout_of  # noqa: E402
from verl.jetrl.model import autograd  # noqa: E402
from verl.jetrl.trainer import gradients, log_probs  # noqa: E402
from verl.jetrl.trainer.decoder import share_decoder  # noqa: E402
from verl.jetrl.trainer.gradients import Gradients, ShardedGradient, transient_values  # noqa: E402

VOCABULARY, MICRO_BATCHES, STEPS = 384, 2, 2
ALIGNED = dict(hidden_size=256, intermediate_size=512, num_key_value_heads=4, head_dim=64, tie_word_embeddings=False)
# case: model, changes, ranks, replicas of each shard
CASES = {
    "aligned-2": ("qwen3", ALIGNED, 2, 1),  # every rank has whole 128-blocks
    "odd-2": ("qwen2", dict(intermediate_size=193, vocab_size=385), 2, 1),  # rows that two ranks cannot share equally
    "three": ("llama", dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True), 3, 1),
    "hsdp": ("qwen2", {}, 4, 2),
}


def tokens_of(rank: int, step: int, micro_batch: int) -> Tensor:
    """Each rank and micro-batch has another number of tokens."""
    count = 5 + 6 * rank + 3 * micro_batch
    return (torch.arange(count) * (7 + rank + 2 * step) + 11 * micro_batch)[None] % VOCABULARY


def loss_of(trainer: Trainer, tokens: Tensor) -> Tensor:
    """As the engine takes it: log-probs a few tokens at a time, so another number of times on each rank."""
    hidden = trainer.model(tokens, use_cache=False).logits.flatten(0, 1)
    ids, temperature = tokens.flatten().roll(-1), torch.ones(tokens.numel())
    return -log_probs.log_probs(hidden, trainer.decoder.lm_head, ids, temperature, VOCABULARY)[0].mean()


def build(case: str, mesh, deferred: bool = False) -> Trainer:
    name, changes, _, _ = CASES[case]
    trainer = trainer_of(make(name, **changes), mesh, deferred=deferred)
    share_decoder(trainer.model, trainer.decoder, with_head=False)
    trainer.model.train()
    return trainer


class Traffic(TorchDispatchMode):
    """Bytes that each kind of collective delivers to this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.name()
        for kind in (
            "allgather",
            "all_gather",
            "reduce_scatter",
            "allreduce",
            "all_reduce",
            "alltoall",
            "all_to_all",
            "broadcast",
        ):
            if name.startswith(("c10d::", "_c10d_functional::")) and kind in name:
                tensors = args[0] if name.startswith("c10d::") else out
                tensors = tensors if isinstance(tensors, list | tuple) else [tensors]
                self.nbytes[kind.replace("_", "")] += sum(t.nbytes for t in tensors)
        return out


def train(trainer: Trainer, rank: int) -> tuple[list[Tensor], dict[str, Tensor], dict[str, int], list[int]]:
    """Some steps: the arena after each; gradients and traffic of the last one; what the gradients' ring held."""
    from verl.utils.fsdp_utils import fsdp2_clip_grad_norm_

    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=0.02)
    arenas, rings = [], []
    for step in range(STEPS):
        trainer.masters.zero_grad()
        with Traffic() as traffic:
            for micro_batch in range(MICRO_BATCHES):
                loss_of(trainer, tokens_of(rank, step, micro_batch)).backward()
                rings.append(trainer.masters._gradients._reducer._ring.numel())
            trainer.masters.assign_grads()
            assert trainer.masters._gradients._reducer._ring is None, "the memory for whole gradients is not freed"
        grads = {name: p.grad.full_tensor() for name, p in trainer.model.named_parameters()}
        with traffic:
            fsdp2_clip_grad_norm_(trainer.model.parameters(), max_norm=1.0)
            optimizer.step()
            trainer.masters.drop_grads()
            trainer.masters.write()
        arenas.append(trainer.arena.data.clone())
    return arenas, grads, dict(traffic.nbytes), rings


def deferred_gradients(case: str, mesh, rank: int, arena: Tensor) -> tuple[dict[str, Tensor], int]:
    """Those of the last step with weights ``arena``, reduced once; bytes that the reduce-scatters delivered."""
    trainer = build(case, mesh, deferred=True)
    trainer.arena.data.copy_(arena)
    with Traffic() as traffic:
        for micro_batch in range(MICRO_BATCHES):
            loss_of(trainer, tokens_of(rank, STEPS - 1, micro_batch)).backward()
        assert not traffic.nbytes["reducescatter"]
        trainer.masters.assign_grads()
    return {name: p.grad.full_tensor() for name, p in trainer.model.named_parameters()}, traffic.nbytes["reducescatter"]


def held(trainer: Trainer) -> int:
    """FP32 numbers in this rank's accumulators."""
    trainer.masters.zero_grad()
    sinks = trainer.masters._gradients.sinks.values()
    return sum(sum(o.numel() for o in s.own) if isinstance(s, ShardedGradient) else s.numel() for s in sinks)


def micro_batches_of_verl(rank: int) -> int:
    """How many micro-batches verl makes when this rank's sequences are longer than the other's."""
    import warnings

    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine.utils import prepare_micro_batches

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ids = torch.nested.as_nested_tensor([torch.arange(4 + 12 * (rank % 2)) for _ in range(4)], layout=torch.jagged)
    data = TensorDict({"input_ids": ids}, batch_size=[4])
    tu.assign_non_tensor(data, use_dynamic_bsz=True, max_token_len_per_gpu=32)
    return len(prepare_micro_batches(data, dp_group=dist.group.WORLD, same_micro_num_in_dp=True)[0])


def main(case: str, rank: int, folder: str) -> None:
    _, _, ranks, replicas = CASES[case]
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    shape = (ranks,) if replicas == 1 else (replicas, ranks // replicas)
    mesh = dist.init_device_mesh("cpu", shape)
    log_probs.MULTIPLE, log_probs.CHUNK_VALUES = 4, 1  # four tokens' logits at a time
    trainer = build(case, mesh)
    start = trainer.arena.data.clone()
    result = train(trainer, rank)
    weights = {name: p.full_tensor().detach() for name, p in trainer.model.named_parameters()}
    again = train(build(case, mesh), rank)
    gradients.LAYERS = 0  # the least memory: a gradient waits for the one before
    recomputed = build(case, mesh)
    recomputed.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    little = train(recomputed, rank)
    same = [
        all(torch.equal(a, b) for a, b in zip(result[0], other[0], strict=True))
        and all(torch.equal(result[1][name], other[1][name]) for name in result[1])
        for other in (again, little)
    ]
    counts = micro_batches_of_verl(rank)
    late, nbytes = deferred_gradients(case, mesh, rank, result[0][-2])
    torch.testing.assert_close(late, result[1], rtol=1e-5, atol=1e-7)  # the sums are taken in another order
    assert 0 < nbytes <= result[2]["reducescatter"] / MICRO_BATCHES  # less where a tied embedding has two gradients
    torch.save((start, result, weights, same, held(trainer), little[3], counts), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks_of(tmp_path_factory):
    """Runs a case once and gives what its ranks saved."""
    saved = {}

    def of(case: str) -> list:
        if case not in saved:
            folder = tmp_path_factory.mktemp(case)
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            count, saved[case] = CASES[case][2], None
            processes = [
                subprocess.Popen([sys.executable, __file__, case, str(rank), str(folder)], env=environment)
                for rank in range(count)
            ]
            assert [process.wait(300) for process in processes] == [0] * count
            saved[case] = [torch.load(folder / f"{rank}.pt") for rank in range(count)]
        return saved[case] or pytest.fail("the ranks failed, see the first test of this case")

    return of


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_the_mean_of_the_ranks(case, ranks_of, mesh):
    """Of the last step's micro-batches, each rank's as one rank alone computes them; reduced at once or deferred, see main."""
    ranks = ranks_of(case)
    alone = build(case, mesh)
    assert all(torch.equal(start, alone.arena.data) for start, *_ in ranks)
    # One rank alone steps with the mean, so that the last step's gradients are of the same weights.
    alone.arena.data.copy_(ranks[0][1][0][-2])
    total: dict[str, Tensor] = {}
    for rank in range(len(ranks)):
        alone.masters.zero_grad()
        for micro_batch in range(MICRO_BATCHES):
            loss_of(alone, tokens_of(rank, STEPS - 1, micro_batch)).backward()
        for name, gradient in alone.gradients().items():
            total[name] = total.get(name, 0) + gradient / len(ranks)
    for name, mean in total.items():
        for _, (_, grads, _, _), *_ in ranks:
            torch.testing.assert_close(grads[name], mean, rtol=1e-5, atol=1e-7, msg=lambda m, k=name: f"{k}: {m}")
            assert torch.equal(grads[name], ranks[0][1][1][name])
        assert mean.abs().max() > 0, name


@pytest.mark.parametrize("case", CASES)
def test_every_rank_holds_the_bytes_that_one_alone_would_write(case, ranks_of, mesh):
    ranks = ranks_of(case)
    for start, (arenas, *_), *_ in ranks:
        assert all(torch.equal(a, b) for a, b in zip(arenas, ranks[0][1][0], strict=True))
        assert not torch.equal(arenas[0], start) and not torch.equal(arenas[0], arenas[1])
    whole = build(case, mesh)
    parameters = dict(whole.model.named_parameters())
    with torch.no_grad():
        for name, value in ranks[0][2].items():
            parameters[name].to_local().copy_(value)
    whole.masters.write()
    assert torch.equal(whole.arena.data, ranks[0][1][0][-1])


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_again_with_checkpointing_and_with_little_memory(case, ranks_of):
    for *_, same, _, _, _ in ranks_of(case):
        assert same == [True, True]


@pytest.mark.parametrize("case", CASES)
def test_a_rank_keeps_the_gradients_of_its_own_rows(case, ranks_of):
    name, changes, count, replicas = CASES[case]
    layout = layout_of(make(name, **changes).config)
    shards = count // replicas
    vectors = sum(e.shape[0] for e in layout.weights if len(e.shape) == 1)
    matrices = sum(e.shape[0] * e.shape[1] for e in layout.weights if len(e.shape) == 2)
    ranks = ranks_of(case)
    accumulators = [rank[4] - vectors for rank in ranks]
    assert sum(accumulators) == replicas * matrices
    assert all(0.8 * matrices / shards < a < 1.2 * matrices / shards for a in accumulators)
    for _, (_, _, _, rings), _, _, _, little, _ in ranks:
        assert set(rings) == {transient_values(layout, shards)}, "the memory for whole gradients grows"
        assert max(little) < min(rings)


def test_traffic_of_a_step_is_fp8(ranks_of):
    """All-gathers deliver the linears' FP8 bytes with their scales and the rest in BF16: once a step, not per micro-batch."""
    layout = layout_of(make("qwen3", **ALIGNED).config)
    weights = sum(e.nbytes for e in layout.weights)
    scales = sum(e.nbytes for e in layout.entries if e.name.endswith("weight_scale_inv"))
    matrices = 4 * sum(e.shape[0] * e.shape[1] for e in layout.weights if len(e.shape) == 2)
    for _, (_, _, traffic, _), *_ in ranks_of("aligned-2"):
        assert traffic.keys() == {"allgather", "reducescatter", "allreduce"}
        assert traffic["allgather"] == weights + scales
        assert traffic["reducescatter"] == MICRO_BATCHES * matrices // 2
        assert traffic["allreduce"] < matrices / 100, "vectors and norms alone"
    # What cannot be cut into whole blocks goes in BF16, and is counted: the count can tell.
    name, changes, _, _ = CASES["odd-2"]
    layout = layout_of(make(name, **changes).config)
    bf16 = 2 * sum(torch.Size(e.shape).numel() for e in layout.weights)
    for _, (_, _, traffic, _), *_ in ranks_of("odd-2"):
        assert bf16 <= traffic["allgather"] < 1.05 * bf16, "BF16, and the padding of odd rows"


def test_verl_gives_every_rank_as_many_micro_batches(ranks_of):
    """What the order of the reductions rests on: 16 tokens on one rank, 64 on the other, 32 at a time."""
    assert [rank[-1] for rank in ranks_of("aligned-2")] == [2, 2]


def test_a_backward_that_fails_reduces_nothing_and_two_open_gradients_are_refused(mesh):
    gradient = ShardedGradient(gradients.Reducer(mesh.get_group(), 256, torch.device("cpu")), [2, 2], 32)
    with pytest.raises(ZeroDivisionError), gradient.opened() as grad:
        grad.fill_(1)
        raise ZeroDivisionError
    with gradient.opened() as grad:
        assert not grad.any() and grad.shape == (4, 32)
        grad[1:].fill_(2)
        with pytest.raises(RuntimeError, match="two weight gradients are open"), gradient.opened():
            pass
    for _ in range(3):
        with gradient.opened(zeroed=False) as grad:
            grad.fill_(1)
    gradient._reducer.finish()
    assert [part.sum().item() for part in gradient.own] == [64 + 3 * 64, 128 + 3 * 64]


def test_one_rank_adds_straight_into_the_accumulator(mesh):
    layout = layout_of(make("qwen2").config)
    found = Gradients(layout, mesh, torch.device("cpu"))
    assert found._reducer is None
    for name, grad in found.sinks.items():
        with autograd.sink(grad, name) as whole:
            assert whole is grad and whole.shape == layout[name].shape
            whole.fill_(3)
    reduced = dict(found.reduced())
    assert all((grad == 3).all() for grad in reduced.values())
    storages = {grad.untyped_storage().data_ptr() for grad in found.sinks.values()}
    assert {grad.untyped_storage().data_ptr() for grad in reduced.values()} == storages, "a copy"


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
