"""The FP8 engine's optimizer step against verl's own on the same gradients: clipping, weight decay, schedule, skipped steps.

Both engines are whole ones, built as a run builds them; gradients are put where a backward pass leaves them.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import distribute_tensor

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]  # as a script, there is no conftest
from decoder_cases import TOKENS, make, same_bytes  # noqa: E402

from benchmarks import numerics, trainers  # noqa: E402

LR, DECAY = 0.01, 0.3
Gradients = dict[str, Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with biases, norms, an embedding and a head of its own."""
    return numerics.save(make("qwen2", tie_word_embeddings=False), tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(model: Path, mesh, owned) -> Iterator[Callable]:
    """Builds the engine of an arm; the FP8 one's arena is closed at the end of the test."""
    with ExitStack() as stack:
        yield lambda arm, **optimizer: stack.enter_context(
            trainers.trainer(model, arm, **{"lr": LR, "weight_decay": DECAY, "total_training_steps": 10, **optimizer})
        )


def gradients_of(engine, seed: int, norm: float) -> Gradients:
    """Random gradients whose norm over all parameters is ``norm``."""
    generator = torch.Generator().manual_seed(seed)
    found = {name: torch.randn(p.shape, generator=generator) for name, p in engine.module.named_parameters()}
    total = torch.stack([g.double().norm() for g in found.values()]).norm()
    return {name: (g * (norm / total)).float() for name, g in found.items()}


def step(engine, gradients: Gradients) -> float:
    """An optimizer step from ``gradients`` in place of a backward pass; its gradient norm."""
    engine.optimizer_zero_grad()
    if not engine.flow.fp8:
        for name, p in engine.module.named_parameters():
            p.grad = distribute_tensor(gradients[name], p.device_mesh, p.placements)
        return engine.optimizer_step()
    engine.masters.allocate_grads()
    engine.masters.zero_grad()  # accumulators, as before a backward pass
    for parts, sink in sinks(engine):
        with nullcontext(sink) if isinstance(sink, Tensor) else sink as whole:
            whole.copy_(torch.cat([gradients[part] for part in parts]))
    return engine.optimizer_step()


def sinks(engine) -> Iterator[tuple[list[str], Tensor | AbstractContextManager[Tensor] | None]]:
    """What a backward pass of the FP8 decoder adds to, and the parameters that it is of."""
    for entry in engine.masters.arena.layout.weights:
        owner, _, kind = entry.name.rpartition(".")
        module = engine.decoder.get_submodule(owner)
        yield [part for part, _ in entry.parts], module.bias_grad if kind == "bias" else module.main_grad


def state(engine) -> dict[str, Tensor]:
    """Everything that a step may change: masters, optimizer state, and the arena."""
    found = {f"weight {name}": w for name, w in trainers.weights(engine).items()}
    for name, p in engine.module.named_parameters():
        for key, value in engine.optimizer.state.get(p, {}).items():
            found[f"{key} {name}"] = getattr(value, "full_tensor", value.clone)().clone()
    return found | ({"arena": engine.masters.arena.data.clone()} if engine.flow.fp8 else {})


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not same_bytes(a[name], b[name])] == []


def assert_close(fp8, bf16) -> None:
    """The same masters up to the order in which a norm is summed."""
    ours, theirs = trainers.weights(fp8), trainers.weights(bf16)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=2e-6, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")


def assert_arena_is_the_masters(engine) -> None:
    for name, tensor in engine.rollout_weights():
        assert same_bytes(engine.masters.arena[name], tensor), name


def test_a_forward_is_verls(tmp_path):
    """The GPU's test of it, where there is none."""
    script = Path(__file__).parent / "gpu" / "test_staging.py"
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_clipping(engine, optimizer):
    """The same norm, and the same weights after steps that clip and steps that do not."""
    fp8, bf16, free = (
        engine(arm, optimizer=optimizer, clip_grad=clip, weight_decay=0.0)
        for arm, clip in (("fp8", 1.0), ("bf16", 1.0), ("bf16", 1e9))
    )
    start = trainers.weights(fp8)
    for seed, norm in enumerate((0.5, 40.0, 0.01, 1.0)):
        gradients = gradients_of(fp8, seed, norm)
        found = [step(e, gradients) for e in (fp8, bf16, free)]
        assert found == pytest.approx([norm] * 3, rel=1e-5), "the norm is the one before clipping"
        if optimizer == "SGD" and seed < 2:
            before = start if seed == 0 else after  # noqa: F821  set in the first pass
            after = trainers.weights(fp8)
            size = torch.stack([(after[n] - before[n]).double().norm() for n in after]).norm().item()
            assert size == pytest.approx(LR * min(norm, 1.0), rel=1e-3)
    assert_close(fp8, bf16)
    assert_arena_is_the_masters(fp8)
    clipped, unclipped = trainers.weights(bf16), trainers.weights(free)
    assert max((clipped[n] - unclipped[n]).abs().max() for n in clipped) > LR / 10, "the case does not show clipping"


def test_weight_decay(engine):
    """Without a gradient every parameter shrinks by the same factor, as upstream's: biases and norms too."""
    fp8, bf16 = engine("fp8"), engine("bf16")
    start = trainers.weights(fp8)
    for e in (fp8, bf16):
        assert step(e, {name: torch.zeros_like(w) for name, w in start.items()}) == 0.0
    ours, theirs = trainers.weights(fp8), trainers.weights(bf16)
    assert_same(ours, theirs)
    for name, before in start.items():
        torch.testing.assert_close(ours[name], before * (1 - LR * DECAY), rtol=1e-6, atol=0, msg=name)
    assert_arena_is_the_masters(fp8)
    step(fp8, gradients_of(fp8, 0, 1.0))
    step(bf16, gradients_of(bf16, 0, 1.0))
    assert_close(fp8, bf16)


def test_schedule(engine):
    """Warm-up and cosine: the same learning rates, and they act."""
    options = dict(lr_scheduler_type="cosine", lr_warmup_steps_ratio=0.3, min_lr_ratio=0.1, weight_decay=0.0)
    fp8, bf16 = engine("fp8", **options), engine("bf16", **options)
    rates = []
    for seed in range(10):
        for e in (fp8, bf16):
            step(e, gradients_of(e, seed, 1.0))
        rates.append((fp8.lr_scheduler_step(), bf16.lr_scheduler_step()))
    assert all(ours == theirs for ours, theirs in rates) and rates[0][0] < max(rates)[0] > rates[-1][0]
    assert_close(fp8, bf16)


@pytest.mark.parametrize(
    ("where", "bad"),
    [
        ("model.layers.1.self_attn.k_proj.weight", torch.nan),
        ("model.layers.0.self_attn.v_proj.bias", torch.inf),
        ("model.embed_tokens.weight", -torch.inf),
    ],
)
def test_a_gradient_that_is_no_number_skips_the_step(engine, where, bad, capsys):
    """One value is enough.  Weights, moments, step counts and the arena's bytes stay, and nothing of it reaches later steps."""
    fp8, bf16, untouched = engine("fp8"), engine("bf16"), engine("bf16")
    for e in (fp8, bf16, untouched):
        step(e, gradients_of(e, 0, 1.0))
    held = fp8.masters.arena.data.clone()
    for e in (fp8, bf16):
        before = state(e)
        gradients = gradients_of(e, 1, 1.0)
        gradients[where].view(-1)[3] = bad
        capsys.readouterr()
        assert not math.isfinite(step(e, gradients)), "the metric must show it"
        assert "grad_norm is not finite" in capsys.readouterr().out
        assert_same(state(e), before)
        assert all(p.grad is None for p in e.module.parameters())
    assert all(sink is None for _, sink in sinks(fp8)), "the accumulators hold what is no number"
    for e in (fp8, bf16, untouched):
        assert step(e, gradients_of(e, 2, 1.0)) == pytest.approx(1.0, rel=1e-5)
    assert_same(state(bf16), state(untouched))
    assert_close(fp8, untouched)
    assert_arena_is_the_masters(fp8)
    assert not same_bytes(fp8.masters.arena.data, held), "the case does not show that a step writes"


@pytest.mark.parametrize("arm", trainers.ARMS)
def test_a_loss_that_is_no_number_skips_the_step(engine, arm):
    """The same through verl's own training step, forward and backward included."""
    e, loss = engine(arm), trainers.sft_loss()
    batch = lambda: trainers.batch_of(TOKENS, torch.ones_like(TOKENS))  # noqa: E731

    def broken(**arguments):
        value, metrics = loss(**arguments)
        return value * torch.nan, metrics

    def train(function) -> float:
        with e.train_mode():
            return e.train_batch(batch(), function)["metrics"]["grad_norm"]

    assert math.isfinite(train(loss))
    before = state(e)
    assert math.isnan(train(broken))
    assert_same(state(e), before)
    assert math.isfinite(train(loss))
    changed = [name for name, value in state(e).items() if not same_bytes(value, before[name])]
    assert any(name.startswith("weight") for name in changed) and ("arena" in changed) is (arm == "fp8")


def test_a_skipped_step_counts_as_an_update(engine):
    """The arena's version goes up as after any step: rollout and trainer count updates, and must agree."""
    fp8 = engine("fp8")
    version = fp8.masters.arena.control.version
    gradients = gradients_of(fp8, 0, 1.0)
    gradients["lm_head.weight"][0, 0] = torch.nan
    step(fp8, gradients)
    assert fp8.masters.arena.control.version == version + 1


# --- two ranks ----------------------------------------------------------------------------------------------------------


def test_two_ranks_clip_and_skip_together(model, tmp_path):
    """One norm over both ranks' rows; what is no number on one rank alone skips the step on both."""
    run_id = f"test-{os.getpid()}-ranks"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VERL_PLATFORM": "cpu", "JETRL_RUN": run_id}
    arguments = [sys.executable, __file__, str(model), str(tmp_path)]
    try:
        started = [subprocess.Popen([*arguments, str(rank)], env=environment) for rank in range(2)]
        assert [process.wait(240) for process in started] == [0, 0]
    finally:
        shutil.rmtree(f"/tmp/jetrl-{run_id}", ignore_errors=True)
    found = {(arm, rank): torch.load(tmp_path / f"{arm}-{rank}.pt") for arm in trainers.ARMS for rank in range(2)}
    for (arm, rank), held in found.items():
        assert held["norms"] == pytest.approx([3.0, math.nan, 0.2], rel=1e-5, nan_ok=True), (arm, rank)
        assert_same(held["skipped"], held["first"])
        for name, weight in held["last"].items():
            torch.testing.assert_close(weight, found["bf16", 0]["last"][name], rtol=2e-6, atol=1e-8, msg=f"{arm} {rank} {name}")
        assert not same_bytes(held["last"]["lm_head.weight"], held["first"]["lm_head.weight"])


def two_ranks(model: Path, out: Path, rank: int) -> None:
    """One rank: a step that clips, one with a NaN in the last rank's own gradient, one that does not clip."""
    dist.init_process_group("cpu:gloo", init_method=f"file://{out}/rendezvous", rank=rank, world_size=2)
    for arm in trainers.ARMS:
        with trainers.trainer(model, arm, lr=LR, weight_decay=DECAY, total_training_steps=3) as engine:
            norms, held = [], []
            for seed, norm in enumerate((3.0, 1.0, 0.2)):
                mean = gradients_of(engine, seed, norm)
                if seed == 1:
                    mean["model.layers.0.mlp.up_proj.weight"][0, 0] = torch.nan
                # FP8: each rank has a part of the mean, and the NaN is the last one's.  BF16: reduced already.
                mine = {n: g * (0.5 + rank) for n, g in mean.items()} if engine.flow.fp8 else mean
                if engine.flow.fp8 and rank == 0:
                    mine = {n: g.nan_to_num() for n, g in mine.items()}
                norms.append(step(engine, mine))
                held.append(trainers.weights(engine))
                if engine.flow.fp8:
                    assert_arena_is_the_masters(engine)
            torch.save(dict(zip(("first", "skipped", "last"), held, strict=True)) | {"norms": norms}, out / f"{arm}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    two_ranks(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
