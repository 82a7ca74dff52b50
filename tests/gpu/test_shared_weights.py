"""Trainer and vLLM on one copy of the weights, on a GPU: updates, sleep, the allocator, restarts, and what they compute.

This process plays the trainer, real vLLM engines run beside it (:mod:`shared_weights_harness`).  Engines that the selected
tests need start together; one takes 30 to 60 s.  Needs packages vllm and flash-attn-4 (for gradients).  Run it alone
(``python -m pytest tests/gpu/test_shared_weights.py -s``): the tests about memory need a GPU that nobody else uses.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import NamedTuple

import psutil
import pytest
import shared_weights_harness as harness
import torch
import torch.distributed as dist
from shared_weights_harness import MIB, PARITY, PROMPT, RESPONSE, ROW, STALE, asked, gap, give, one_by_one, parity

from benchmarks.engines import Engine
from benchmarks.rollout import Trainer, send_stock
from verl.jetrl import arena as arena_module
from verl.jetrl.arena import ENGINE, TRAINER, ArenaError, LeaseError

UPDATES = 3
# vLLM's KV cache holds two and a half of the longest sequences; one block of it vLLM keeps to itself.
TINY_BLOCKS = ROW // harness.BLOCK_TOKENS * 5 // 2

ENGINES = {
    "main": ("jetrl", dict(splits=1, extension="shared_weights_worker.PoisonExtension")),
    "default": ("jetrl", dict()),  # FlashAttention splits its work as vLLM likes
    "exact": ("jetrl", dict(exact=True)),
    "tight": ("jetrl", dict(eager=True, prefix_cache=True, statistics=True, kv_bytes=TINY_BLOCKS * harness.BLOCK_BYTES)),
    "bf16": ("bf16", dict(eager=True)),
    "stock_fp8": ("stock_fp8", dict(eager=True)),
}


def needs_gradients() -> None:
    from verl.jetrl.trainer import flash

    try:
        flash.backward_kernel()
    except ImportError as error:
        pytest.skip(str(error))


# --- trainers and engines ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The environment of a run and a folder for it."""
    name, folder = f"gpu-{os.getpid()}", tmp_path_factory.mktemp("shared_weights")
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in harness.environment(name).items():
            patch.setenv(variable, value)
        torch.cuda.set_device(0)
        harness.init_process_group(folder)
        yield folder
        dist.destroy_process_group()
    harness.remove_run(name)


class Trained(NamedTuple):
    """A trainer and its optimizer."""

    trainer: Trainer
    optimizer: torch.optim.Optimizer


@pytest.fixture(scope="module")
def stock(run) -> Trained:
    """verl's FSDP2 trainer in BF16."""
    trainer = Trainer(harness.LAYERS, run / "model", harness.SMALL)
    return Trained(trainer, harness.optimizer_of(trainer))


@pytest.fixture(scope="module")
def shared(run):
    """The trainer behind the arena, which the engines hold."""
    trainer = Trainer(harness.LAYERS, run / "model", harness.SMALL)
    trainer.share()
    give(trainer.masters.arena.control, ENGINE)
    yield Trained(trainer, harness.optimizer_of(trainer))
    trainer.masters.arena.close()


@pytest.fixture(scope="module")
def fleet(request, run, shared):
    """The engines that the selected tests name, started together; each fails its own tests only."""
    wanted = {name for item in request.session.items if item.module is request.module for name in item.fixturenames}
    begun, engines = time.perf_counter(), {}
    for name, (kind, options) in ENGINES.items():
        if name in wanted:
            # Two engines that compile the same model at once must not write the same cache.
            env = {} if name == "main" else {"VLLM_CACHE_ROOT": str(run / name)}
            engines[name] = harness.start(kind, harness.settings(run / "model", **options), env, wait=False)
    started: dict[str, Engine | Exception] = {}
    for name, engine in engines.items():
        try:
            engine.result()
            engine.patience_s = 120.0
            started[name] = engine
        except (RuntimeError, TimeoutError) as error:
            started[name] = error
    print(f"\n{', '.join(engines)}: started in {time.perf_counter() - begun:.0f} s", flush=True)
    yield started
    for engine in {*engines.values(), *(e for e in started.values() if isinstance(e, Engine))}:
        engine.close()


def member(name: str):
    @pytest.fixture(name=name)
    def engine(fleet) -> Engine:
        """An engine of the fleet, awake (a test that failed may have left it asleep), its prefix cache empty."""
        if isinstance(fleet[name], Exception):
            raise fleet[name]
        fleet[name]("wake", ["weights"])
        fleet[name]("wake", ["kv_cache"])
        return fleet[name]

    return engine


main, default, exact, tight, bf16, stock_fp8 = map(member, ENGINES)


@pytest.fixture
def control(shared):
    """The lease, with the engine before and after each test."""
    control = shared.trainer.masters.arena.control
    give(control, ENGINE)
    yield control
    give(control, ENGINE)


@pytest.fixture(autouse=True)
def plain_segments(run):
    """verl leaves expandable segments on after an update: off again for the next test."""
    from verl.utils.device import set_expandable_segments

    yield
    set_expandable_segments(False)
    torch.cuda.empty_cache()


def update(trained: Trained, engine: Engine, control, prompts: list[list[int]], responses: list[list[int]]) -> list[str]:
    """One step of a run: the engine sleeps, the trainer trains and writes, the engine wakes.  Weights that did not arrive."""
    engine("sleep")
    give(control, TRAINER)
    norm = harness.train(*trained, prompts, responses)
    assert 0 < norm < float("inf")
    return harness.publish(trained.trainer, engine)


# --- updates ----------------------------------------------------------------------------------------------------------


def test_three_updates_reach_the_engine(shared, main, control, record_property):
    """verl's allocator toggle around each: digests agree, log-probs agree, and would not with the weights of before."""
    needs_gradients()
    trainer = shared.trainer
    assert harness.different(trainer, main) == []
    prompts = asked(4, PROMPT, 1)
    greedy = one_by_one(main, prompts[:2], RESPONSE)
    for index in range(UPDATES):
        version = control.version
        _, ids, theirs = main("generate", prompts, RESPONSE, True)
        before = gap(theirs, harness.log_probs_of(trainer, prompts, ids))
        assert update(shared, main, control, prompts, ids) == []
        assert control.version == version + 1 and control.holder == ENGINE
        stale = gap(theirs, harness.log_probs_of(trainer, prompts, ids))
        after = parity(trainer, main, prompts, RESPONSE)
        print(f"update {index}: mean |dlogp| {before:.2e} before, {after:.2e} after, {stale:.2e} if stale", flush=True)
        record_property(f"update_{index}", {"before": before, "after": after, "stale": stale})
        assert before < PARITY and after < PARITY, "rollout and trainer compute with other weights"
        assert stale > STALE * max(PARITY, after), "the check would not see weights that did not arrive"
        now = one_by_one(main, prompts[:2], RESPONSE)
        assert [tokens for tokens, _ in now] != [tokens for tokens, _ in greedy]
        greedy = now


def test_a_write_that_is_skipped_is_found(shared, main, control, monkeypatch):
    """The fault of the CPU tests, with real updates: every step runs, no byte arrives."""
    needs_gradients()
    trainer, prompts = shared.trainer, asked(4, PROMPT, 2)
    _, ids, theirs = main("generate", prompts, RESPONSE, True)
    with monkeypatch.context() as fault:
        fault.setenv("JETRL_FAULT", "drop_weight_sync")
        found = update(shared, main, control, prompts, ids)
    weights = {name for name, _ in trainer.masters.arena if name.endswith("_proj.weight")}
    assert weights <= set(found), "the hashes do not see an update that was lost"
    kept = one_by_one(main, prompts[:1], RESPONSE)
    assert gap(theirs, harness.log_probs_of(trainer, prompts, ids)) < PARITY, "the arena changed after all"
    main("sleep")
    give(control, TRAINER)
    assert harness.publish(trainer, main) == []
    assert gap(theirs, harness.log_probs_of(trainer, prompts, ids)) > STALE * PARITY
    assert one_by_one(main, prompts[:1], RESPONSE) != kept


def test_a_write_while_the_engine_holds_the_weights_raises(shared, main, control):
    trainer, version = shared.trainer, control.version
    answers = one_by_one(main, asked(1, PROMPT, 3), RESPONSE)
    with pytest.raises(LeaseError, match="a weight update while the engine holds the weights"):
        trainer.masters.write()
    assert (control.version, control.holder) == (version, ENGINE)
    assert harness.different(trainer, main) == [] and one_by_one(main, asked(1, PROMPT, 3), RESPONSE) == answers
    give(control, TRAINER)
    trainer.masters.write()
    assert control.version == version + 1
    assert one_by_one(main, asked(1, PROMPT, 3), RESPONSE) == answers, "the same masters give the same weights"


# --- sleep ------------------------------------------------------------------------------------------------------------


def test_nan_in_all_free_memory_between_sleep_and_wake(shared, main):
    prompts = asked(3, PROMPT, 4)
    before = one_by_one(main, prompts, RESPONSE)
    main("sleep")
    free = torch.cuda.mem_get_info()[0]
    filled = harness.fill_free_memory_with_nan()
    print(f"{filled / 2**30:.1f} of {free / 2**30:.1f} GiB filled", flush=True)
    assert filled > 0.98 * free
    main("wake", ["weights"])
    main("wake", ["kv_cache"])
    assert harness.different(shared.trainer, main) == []
    assert one_by_one(main, prompts, RESPONSE) == before


def test_nan_in_all_that_sleep_gives_back(shared, main):
    """The same inside the engine, where the driver cannot have cleared it: every byte of vLLM's pool is 0xFF on waking."""
    prompts = asked(3, PROMPT, 5)
    before = one_by_one(main, prompts, RESPONSE)
    main("rpc", "poison_on_wake")
    main("sleep")
    main("wake", ["weights"])
    main("wake", ["kv_cache"])
    assert main("rpc", "stop_poisoning") >= 64 * MIB
    assert harness.different(shared.trainer, main) == []
    assert one_by_one(main, prompts, RESPONSE) == before
    assert parity(shared.trainer, main, asked(4, PROMPT, 6), RESPONSE) < PARITY


def test_sleeping_and_waking_50_times_grows_nothing(main, record_property):
    prompts = asked(1, PROMPT, 7)
    answer = one_by_one(main, prompts, RESPONSE)

    def cycle() -> None:
        main("sleep")
        main("wake", ["weights"])
        main("wake", ["kv_cache"])

    for _ in range(3):  # the first ones may allocate what stays
        cycle()
    assert one_by_one(main, prompts, RESPONSE) == answer
    first = harness.footprint(main)
    for index in range(50):
        cycle()
        if index % 10 == 9:
            assert one_by_one(main, prompts, RESPONSE) == answer, f"after {index + 1} cycles"
    last = harness.footprint(main)
    lost = first["free"] - last["free"]
    assert last["files"].keys() <= first["files"].keys(), "new processes"
    files = {pid: (first["files"][pid], count) for pid, count in last["files"].items()}
    print(f"50 cycles: {lost / MIB:.1f} MiB lost, open files {files}", flush=True)
    record_property("lost_bytes", lost)
    assert lost <= 32 * MIB
    assert last["shm"] <= first["shm"], f"new in /dev/shm: {sorted(last['shm'] - first['shm'])}"
    assert all(now <= then + 4 for then, now in files.values()), files


# --- what the arms compute --------------------------------------------------------------------------------------------


def test_mismatch_of_the_arms(shared, stock, main, default, bf16, stock_fp8, control, record_property):
    """After three updates, on responses of 224 tokens: the jetrl arm's mismatch is at most half the mixed arm's."""
    needs_gradients()
    prompts = asked(4, PROMPT, 8)
    long = ROW - PROMPT
    for _ in range(UPDATES):
        send_stock(stock.trainer, bf16)
        _, ids, _ = bf16("generate", prompts, RESPONSE, True)
        harness.train(*stock, prompts, ids)
    mean: dict[str, float] = {}
    for arm, engine in (("bf16", bf16), ("mixed", stock_fp8)):
        before = parity(stock.trainer, engine, prompts, RESPONSE)  # with older, or no, weights
        send_stock(stock.trainer, engine)
        mean[arm] = parity(stock.trainer, engine, prompts, long)
        print(f"{arm}: {before:.2e} before the weights arrived", flush=True)
        assert not before <= 2 * mean[arm], "the check would not see weights that did not arrive"
    for _ in range(UPDATES):
        _, ids, _ = main("generate", prompts, RESPONSE, True)
        assert update(shared, main, control, prompts, ids) == []
    mean["jetrl"] = parity(shared.trainer, default, prompts, long)
    mean["jetrl, one split"] = parity(shared.trainer, main, prompts, long)
    print("mean |dlogp| " + ", ".join(f"{arm} {value:.2e}" for arm, value in mean.items()), flush=True)
    record_property("mean_abs_dlogp", mean)
    assert mean["jetrl"] <= mean["mixed"] / 2 and mean["jetrl, one split"] < PARITY
    assert mean["bf16"] < mean["mixed"], "the mixed arm's rollout is not in FP8"


def test_exact_mode(shared, exact, record_property):
    """The same bits with CUDA graphs, on sequences whose attention vLLM would split."""
    assert harness.different(shared.trainer, exact) == []
    mean = parity(shared.trainer, exact, asked(4, PROMPT, 8), ROW - PROMPT)
    print(f"exact mode: mean |dlogp| {mean:.2e}", flush=True)
    record_property("mean_abs_dlogp", mean)
    assert mean == 0


def test_a_cached_prefix_gives_the_same_log_probs(shared, tight):
    (prompt,) = asked(1, ROW - RESPONSE, 9)
    cached, answers = [], []
    for _ in range(2):
        answers += one_by_one(tight, [prompt], RESPONSE)
        cached += tight("cached_tokens")
    assert cached[0] == 0 and len(prompt) // 2 < cached[1] < len(prompt)
    for tokens, values in answers:
        assert gap([values], harness.log_probs_of(shared.trainer, [prompt], [tokens])) < PARITY
    (first, first_values), (second, second_values) = answers
    print(f"cached prefix: same bits {answers[0] == answers[1]}", flush=True)
    assert first == second
    assert gap([first_values], [second_values]) < PARITY


def test_chunked_prefill(shared, tight):
    """Prompts of 224 tokens, at most 64 a step."""
    prompts = asked(4, ROW - RESPONSE, 10)
    value = parity(shared.trainer, tight, prompts, RESPONSE)
    print(f"chunked prefill: mean |dlogp| {value:.2e}", flush=True)
    assert tight("cached_tokens") == [0] * 4
    assert value < PARITY


def test_preemption(shared, tight, record_property):
    """Eight sequences that grow to 256 tokens in a cache for two and a half."""
    before = tight("metrics")["vllm:num_preemptions"]
    value = parity(shared.trainer, tight, asked(8, PROMPT, 11), ROW - PROMPT)
    preemptions = tight("metrics")["vllm:num_preemptions"] - before
    print(f"preemption: mean |dlogp| {value:.2e}, {preemptions:.0f} preemptions", flush=True)
    record_property("preemptions", preemptions)
    assert preemptions > 0
    assert value < PARITY


# --- the allocator and devices ----------------------------------------------------------------------------------------


def test_an_expandable_arena_is_refused_by_name(run, monkeypatch):
    from verl.utils.device import set_expandable_segments

    set_expandable_segments(True)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda _: None)
    with pytest.raises(ArenaError, match="expandable_segments cannot be shared with vLLM's process"):
        arena_module._own_segment(64 * MIB, torch.device("cuda", 0))


def test_expandable_segments_in_the_environment(tmp_path, record_property):
    """A trainer and an engine that inherit PYTORCH_CUDA_ALLOC_CONF: the arena is made, mapped and updated."""
    needs_gradients()
    name = f"gpu-{os.getpid()}-expandable"
    seen = in_a_run(name, ["trainer", str(tmp_path)], {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    record_property("seen", seen)
    assert seen["conf"] == "expandable_segments:True"
    arrived(seen)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_order_of_the_devices(tmp_path, record_property):
    """The trainer sees two GPUs in the other order and uses its second, the engine sees that one alone; and an engine's
    process on another GPU than its trainer cannot map the arena."""
    needs_gradients()
    first, second = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:2]
    arguments = ["trainer", str(tmp_path), "--device", "1", "--engine-gpu", first, "--other-gpu", second]
    seen = in_a_run(f"gpu-{os.getpid()}-order", arguments, {"CUDA_VISIBLE_DEVICES": f"{second},{first}"})
    record_property("seen", seen)
    assert seen["device"] == 1
    arrived(seen)
    assert "must use the same GPU" in seen["other"].get("error", ""), seen["other"]


def in_a_run(name: str, arguments: list[str], env: dict[str, str]) -> dict:
    try:
        return harness.as_script(arguments, harness.environment(name) | env)
    finally:
        harness.remove_run(name)


def arrived(seen: dict) -> None:
    print(seen, flush=True)
    assert seen["different"] == [[], []]
    assert max(seen["gap"]) < PARITY and seen["stale"] > STALE * max(PARITY, *seen["gap"])


# --- restarts; last, because they replace an engine ---------------------------------------------------------------------


def test_another_engine_on_the_same_arena(shared, tight, fleet, run):
    """After the first was closed, and after that one was killed: the same bits from the same arena."""
    kind, options = ENGINES["tight"]
    trainer, prompts = shared.trainer, asked(2, PROMPT, 12)
    before = one_by_one(tight, prompts, RESPONSE)

    def restarted() -> Engine:
        fleet["tight"] = harness.start(kind, harness.settings(run / "model", **options))
        fleet["tight"].patience_s = 120.0
        assert harness.different(trainer, fleet["tight"]) == []
        assert one_by_one(fleet["tight"], prompts, RESPONSE) == before
        assert parity(trainer, fleet["tight"], asked(4, PROMPT, 13), RESPONSE) < PARITY
        return fleet["tight"]

    tight.close()
    kill(restarted())
    restarted()


def kill(engine: Engine) -> None:
    """SIGKILL for the engine's core, which maps the arena, and for the process that started it; waits until both are gone."""
    parent = psutil.Process(engine.pid)
    processes = [*parent.children(recursive=True), parent]
    assert len(processes) > 1, "the engine's core is a process of its own"
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    engine.close()  # reaps the parent
    deadline = time.monotonic() + 30
    while alive := [process for process in processes if runs(process)]:
        assert time.monotonic() < deadline, f"still alive after SIGKILL: {alive}"
        time.sleep(0.1)


def runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
