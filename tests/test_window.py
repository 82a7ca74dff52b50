"""Sharded FP8 weights: the numbers of replicated ones bit for bit, on half the memory; and the stream to the engine."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))  # as a script, there is no conftest
from decoder_cases import CPU, Trainer, config_of, make, same_bytes, trainer_of  # noqa: E402

from verl.jetrl import arena as arena_module  # noqa: E402
from verl.jetrl import window  # noqa: E402
from verl.jetrl.arena import ALIGN, ENGINE, SLOTS, Arena, LeaseError, WeightSyncError, layer_of, layout_of, linears_of, rows_of  # noqa: E402
from verl.jetrl.fp8.format import FP8  # noqa: E402
from verl.jetrl.trainer import log_probs  # noqa: E402
from verl.jetrl.trainer.decoder import share_decoder  # noqa: E402
from verl.jetrl.window import receive  # noqa: E402

VOCABULARY, MICRO_BATCHES = 384, 2
WHOLE = dict(hidden_size=256, intermediate_size=256, num_key_value_heads=4, head_dim=64, tie_word_embeddings=False)
# Layers: more than places; as many as places.
CASES = {"qwen3": dict(WHOLE, num_hidden_layers=4), "qwen2": dict(WHOLE, num_hidden_layers=2)}


def build(name: str, mesh, slots: int) -> Trainer:
    trainer = trainer_of(make(name, **CASES[name]), mesh, slots=slots)
    share_decoder(trainer.model, trainer.decoder, with_head=False)
    return trainer


def tokens_of(rank: int, micro_batch: int) -> Tensor:
    """Each rank and micro-batch has another number of tokens."""
    return (torch.arange(5 + 2 * rank + 3 * micro_batch) * (7 + rank) + 11 * micro_batch)[None] % VOCABULARY


def log_probs_of(trainer: Trainer, tokens: Tensor) -> Tensor:
    hidden = trainer.model(tokens, use_cache=False).logits.flatten(0, 1)
    ids, temperature = tokens.flatten().roll(-1), torch.ones(tokens.numel())
    return log_probs.log_probs(hidden, trainer.decoder.lm_head, ids, temperature, VOCABULARY)[0]


def step(trainer: Trainer, optimizer, rank: int) -> list[Tensor]:
    """Log-probs without gradients and with them, the gradients of both micro-batches; then the update."""
    numbers: list[Tensor] = []
    micro_batches = [tokens_of(rank, i) for i in range(MICRO_BATCHES)]
    with torch.inference_mode():
        numbers += [log_probs_of(trainer, tokens) for tokens in micro_batches]
    trainer.masters.zero_grad()
    for tokens in micro_batches:
        chosen = log_probs_of(trainer, tokens)
        numbers.append(chosen.detach())
        (-chosen.mean()).backward()
    numbers += trainer.gradients().values()
    optimizer.step()
    trainer.masters.drop_grads()
    trainer.masters.write()
    return numbers


def two_steps(name: str, mesh, slots: int, checkpointing: bool, rank: int) -> tuple[list[Tensor], Trainer]:
    trainer = build(name, mesh, slots)
    trainer.model.train()
    if checkpointing:
        trainer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=0.02)
    return [number for _ in range(2) for number in step(trainer, optimizer, rank)], trainer


def gathered_layers(trainer: Trainer) -> list[int]:
    """Notes the layers that are gathered from here on."""
    order: list[int] = []
    gather = trainer.masters.window._gather

    def note(layer: int) -> None:
        if trainer.masters.window._held[layer % SLOTS] != layer:
            order.append(layer)
        gather(layer)

    trainer.masters.window._gather = note
    return order


def main(rank: int, folder: str) -> None:
    """One of two ranks: what differs from replicated weights, what a rank holds, and in which order it gathers."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    mesh = dist.init_device_mesh("cpu", (2,))
    result = {}
    for name in CASES:
        wanted, whole = two_steps(name, mesh, 0, False, rank)
        for checkpointing in (False, True):
            numbers, trainer = two_steps(name, mesh, SLOTS, checkpointing, rank)
            result[name, checkpointing] = len(numbers) == len(wanted) and all(map(torch.equal, numbers, wanted))
        result[name, "moved"] = not torch.equal(wanted[0], wanted[len(wanted) // 2])
        home = trainer.masters.window.home
        result[name, "home"] = sum(entry.nbytes for entry in home.layout.entries)
        rows = {part: rows.chunk(2)[rank] for entry in home.layout.entries for part, rows in whole.arena.parts(entry.name)}
        mine = [pair for entry in home.layout.entries for pair in home.parts(entry.name)]
        result[name, "rows"] = all(same_bytes(own, rows[part]) for part, own in mine) and len(mine) == len(rows)
        order = gathered_layers(trainer)
        with torch.no_grad():
            log_probs_of(trainer, tokens_of(rank, 0))
        trainer.masters.zero_grad()
        log_probs_of(trainer, tokens_of(rank, 0)).mean().backward()
        result[name, "order"] = order
    torch.save(result, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("window")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [subprocess.Popen([sys.executable, __file__, str(rank), str(folder)], env=environment) for rank in range(2)]
    assert [process.wait(300) for process in started] == [0, 0]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_compute_the_numbers_of_replicated_weights(name, ranks):
    """Log-probs, gradients of two micro-batches, and again after an optimizer step: bit for bit."""
    for rank in ranks:
        assert rank[name, False] and rank[name, True], "without and with activation checkpointing"
        assert rank[name, "moved"], "the steps change nothing: the case cannot tell"


@pytest.mark.parametrize("name", CASES)
def test_a_rank_keeps_its_own_rows(name, ranks):
    config = config_of(name, **CASES[name])
    linears, slots = layout_of(config).bytes_of("fp8"), layout_of(config, slots=SLOTS)
    for rank in ranks:
        assert rank[name, "home"] == linears / 2 and rank[name, "rows"]
    layers = config.num_hidden_layers
    saved = layout_of(config).nbytes - slots.nbytes - linears * (layers - SLOTS) / layers
    assert 0 <= saved < 8 * layers * ALIGN, "the padding of the layers without a place"
    if layers <= SLOTS:
        assert [e.offset for e in slots.entries] == [e.offset for e in layout_of(config).entries]
        assert slots.digest != layout_of(config).digest


def test_every_rank_gathers_the_same_layers_in_the_same_order(ranks):
    """After a write: a forward pass, then forward and backward; the two layers that are there are not gathered again."""
    for rank in ranks:
        assert rank["qwen3", "order"] == [0, 1, 2, 3, 0, 1, 2, 3, 1, 0]
        assert rank["qwen2", "order"] == [0, 1]


def test_a_layers_place_is_not_taken_while_it_runs(mesh):
    """Also when layers are asked for in no order at all; and nothing old is read after a write."""
    trainer = build("qwen3", mesh, SLOTS)
    whole, places = build("qwen3", mesh, 0), trainer.masters.window
    for layer in (0, 1, 2, 1, 0, 3, 3, 2, 0, 2, 3, 1):
        places.ensure(layer)
        names = [entry.name for entry in whole.arena.layout.linears if layer_of(entry.name) == layer]
        assert len(names) == 8 and all(same_bytes(trainer.arena[name], whole.arena[name]) for name in names), layer
    before = trainer.arena[names[0]].clone()
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(-1)
    trainer.masters.write()
    places.ensure(1)
    assert not same_bytes(trainer.arena[names[0]], before)


@pytest.mark.parametrize(("name", "ranks_", "what"), [("qwen3", 2, "q_proj has 64 rows"), ("llama", 2, "q_proj has 576 rows")])
def test_rows_that_are_no_whole_blocks_are_refused(name, ranks_, what):
    with pytest.raises(ValueError, match=f"fsdp_config.arena=sharded: 2 ranks .*{what}.*Use arena=replicated"):
        rows_of(layout_of(config_of(name)), ranks_)
    assert rows_of(layout_of(config_of(name)), 1).bytes_of("fp8") == layout_of(config_of(name)).bytes_of("fp8")


# --- the stream to the engine ---------------------------------------------------------------------------------------------


class Sides:
    """A trainer whose arena is shared, and an engine's worker in a thread."""

    def __init__(self, mesh, owned: list) -> None:
        model = make("qwen3", **CASES["qwen3"])
        self.trainer = trainer_of(model, mesh, rank=0, slots=SLOTS)
        owned.append(self.trainer.arena)
        self.window, self.control = self.trainer.masters.window, self.trainer.arena.control
        self.theirs = Arena.attach(layout_of(model.config, slots=SLOTS), CPU, 0)
        self.theirs.control.enter()
        self.own = Arena.private(linears_of(layout_of(model.config, 2)), CPU)  # of a rollout on two GPUs
        self.error: Exception | None = None

    def start(self, update: int) -> threading.Thread:
        def run() -> None:
            try:
                receive(self.theirs, self.own, update)
            except Exception as error:
                self.error = error

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread


@pytest.fixture
def sides(mesh, owned) -> Sides:
    return Sides(mesh, owned)


def ended_process() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_an_update_arrives_and_the_next_one_too(sides):
    whole = {update: {} for update in (1, 2, 3)}
    for update in whole:
        thread = sides.start(update)
        sides.window.send(update)
        thread.join(30)
        assert sides.error is None and sides.control.served == sides.control.version
        whole[update] = {name: tensor.clone() for name, tensor in sides.own}
        assert len(whole[update]) == 8 * 4
        if update == 2:  # of the same version: verl updates again after a validation that put the engine to sleep
            assert all(same_bytes(tensor, whole[1][name]) for name, tensor in whole[2].items())
            with torch.no_grad():
                for parameter in sides.trainer.model.parameters():
                    parameter.mul_(-0.75)
            sides.trainer.masters.write()
            assert sides.control.served == 1 and sides.control.version == 2
    assert not any(same_bytes(tensor, whole[1][name]) for name, tensor in whole[3].items() if tensor.dtype == FP8)
    for name, (q, s) in {
        entry.name: sides.trainer.masters.quantized(entry)
        for entry in sides.own.layout.entries
        if entry.name.endswith("down_proj.weight")
    }.items():
        assert same_bytes(sides.own[name], q) and same_bytes(sides.own[f"{name}_scale_inv"], s)
        cut = sides.own[name.replace("weight", "scale_shards")]
        assert same_bytes(torch.cat(list(cut), -1), s) and len(cut) == 2, "the scales of o and down once more, cut along K"


def test_a_layer_that_does_not_come_is_nan(sides, monkeypatch):
    thread = sides.start(1)
    sides.window.send(1)
    thread.join(30)
    monkeypatch.setattr(arena_module, "DEADLINE_S", 0.3)
    receive_error = sides.start(2)
    receive_error.join(30)
    assert isinstance(sides.error, WeightSyncError) and "trainer had not sent the weights of layer 0" in str(sides.error)
    assert all(tensor.float().isnan().all() for _, tensor in sides.own) and sides.control.served == 0


def test_an_engine_that_died_ends_the_update(sides):
    sides.control._set("engine_pid", pid := ended_process())
    with pytest.raises(WeightSyncError, match=f"the engine's process {pid} ended before it had taken the weights of layer 0"):
        sides.window.send(1)


def test_a_trainer_that_died_ends_the_engines_wait(sides):
    sides.control._set("trainer_pid", pid := ended_process())
    sides.start(1).join(30)
    assert f"the trainer's process {pid} ended before it had sent the weights of layer 0" in str(sides.error)


def test_an_engine_that_stalls(sides, monkeypatch):
    monkeypatch.setattr(arena_module, "DEADLINE_S", 0.3)
    with pytest.raises(WeightSyncError, match="engine had not taken the weights of layer 0 within.*DEADLINE_S"):
        sides.window.send(1)


def test_what_the_receiver_raised_ends_the_update(sides):
    def watch() -> None:
        raise KeyError("no model is loaded in this worker")

    with pytest.raises(KeyError, match="no model is loaded"):
        sides.window.send(1, watch)


def test_nothing_is_sent_while_the_engine_holds_the_weights(sides):
    sides.control.hand_over(ENGINE)
    with pytest.raises(LeaseError, match="a weight update while the engine holds the weights"):
        sides.window.send(1)


def test_on_a_gpu_the_gathers_are_one_launch(mesh, monkeypatch):
    """Their order and sizes; torch's manager runs them on gloo as well."""
    pairs = [(torch.zeros(4, 3), torch.ones(4, 3)), (torch.zeros(5, dtype=FP8), torch.full((5,), 2.0).to(FP8))]
    for work in window.all_gather(pairs, mesh.get_group()):
        work.wait()
    assert all(same_bytes(whole, own) for whole, own in pairs)
    assert window.all_gather([], mesh.get_group()) == []

    class OnGpu:
        is_cuda = True

        def view(self, dtype: torch.dtype) -> OnGpu:
            assert dtype == torch.uint8, "NCCL's coalesced collectives want one type"
            return self

    on_gpu, calls = [OnGpu(), OnGpu()], []
    monkeypatch.setattr(dist, "all_gather_into_tensor", lambda whole, own, group: calls.append((whole, own)))
    assert window.all_gather([(whole, whole) for whole in on_gpu], mesh.get_group()) == []
    assert calls == [(whole, whole) for whole in on_gpu]


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
