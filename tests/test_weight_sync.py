"""The weight update between trainer and rollout: it arrives, or it fails with the real error; nothing is left behind."""

from __future__ import annotations

import asyncio
import glob
import os
import threading
import time
import uuid
from collections.abc import Callable
from types import SimpleNamespace

import psutil
import pytest
import ray
import torch
import zmq

from verl.jetrl import processes
from verl.jetrl.fp8.format import quantize_blocks
from verl.jetrl.rollout import adapter
from verl.jetrl.rollout.adapter import PatientSender, PatientSocket, WeightSyncError


class Receiver:
    """A receiver in a thread, in place of the Ray call that runs it in vLLM's worker."""

    def __init__(self, function: Callable[[str], object], handle: str) -> None:
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(function, handle), daemon=True)
        self.thread.start()

    def _run(self, function: Callable[[str], object], handle: str) -> None:
        try:
            function(handle)
        except Exception as error:
            self.error = error

    def get(self) -> None:
        self.thread.join()
        if self.error is not None:
            raise self.error


@pytest.fixture(autouse=True)
def threads_for_ray(monkeypatch):
    """ray.wait and ray.get on :class:`Receiver`; a short poll."""
    monkeypatch.setattr(ray, "wait", lambda refs, timeout: ([r for r in refs if not r.thread.is_alive()], []))
    monkeypatch.setattr(ray, "get", lambda ref: ref.get())
    monkeypatch.setattr(adapter, "POLL_MS", 20)


def leftovers() -> set[str]:
    segments = set(glob.glob("/dev/shm/verl_weights_*"))
    if segments:  # not those of a run beside these tests
        others = [process for process in psutil.process_iter() if process.pid != os.getpid()]
        segments = set(filter(os.path.exists, segments - processes.shared_memory(others)))
    return segments | set(glob.glob("/tmp/jetrl-test-*"))


@pytest.fixture
def handle():
    before = leftovers()
    yield f"ipc:///tmp/jetrl-test-{uuid.uuid4().hex}.sock"
    assert leftovers() <= before, "a shared-memory segment or a socket was left"


def send(handle: str, function: Callable[[str], object], weights=(), deadline_s: float = 10.0, bucket_mb: int = 1) -> None:
    """One update from a :class:`PatientSender` to ``function``."""
    receiver = Receiver(function, handle)
    sender = PatientSender(receiver, zmq_handle=handle, bucket_size_mb=bucket_mb, use_shm=True)
    sender_init = sender._init_socket

    def init_socket() -> None:
        sender_init()
        sender.socket.deadline_s = deadline_s

    sender._init_socket = init_socket
    asyncio.run(sender.async_send_weights(iter(weights)))
    receiver.get()


def receive(handle: str, received: dict[str, torch.Tensor], on_bucket: Callable[[int], None] = lambda n: None) -> None:
    """verl's receiver, copying what comes."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

    buckets = 0

    def bucket(weights, is_last) -> None:
        nonlocal buckets
        buckets += 1
        on_bucket(buckets)
        received.update({name: tensor.clone() for name, tensor in weights})

    BucketedWeightReceiver(handle, torch.device("cpu"), use_shm=True).receive_weights(bucket)


def fp8_stream(layers: int = 8):
    """FP8 bytes, FP32 scales, BF16 norms; odd sizes, so that alignment within the bucket matters."""
    g = torch.Generator().manual_seed(0)
    for i in range(layers):
        q, s = quantize_blocks(torch.randn(577, 579, generator=g).bfloat16())
        yield f"layers.{i}.o_proj.weight", q
        yield f"layers.{i}.o_proj.weight_scale_inv", s
        yield f"layers.{i}.norm.weight", torch.randn(7, generator=g).bfloat16()
    yield "empty.weight", torch.zeros(0, 4).bfloat16()


def test_round_trip_of_fp8_weights_in_several_buckets(handle):
    received: dict[str, torch.Tensor] = {}
    buckets = []
    send(handle, lambda h: receive(h, received, buckets.append), fp8_stream())
    sent = dict(fp8_stream())
    assert len(buckets) > 1 and received.keys() == sent.keys()
    for name, tensor in sent.items():
        assert received[name].dtype == tensor.dtype and received[name].shape == tensor.shape
        same = torch.equal(received[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8))
        assert same, f"{name}: other bytes than sent"


def test_round_trip_of_nothing(handle):
    received: dict[str, torch.Tensor] = {}
    send(handle, lambda h: receive(h, received))
    assert received == {}


def test_the_receivers_exception_is_raised_with_its_message(handle, monkeypatch):
    """Through the worker's extension: verl's clean-up raises a BufferError on top, which would hide the message."""
    from verl.jetrl.rollout.worker_extension import JetRLWorkerExtension

    base = JetRLWorkerExtension.__mro__[1]
    monkeypatch.setattr(base, "update_weights_from_ipc", lambda self, h, on_bucket: receive(h, {}, on_bucket))
    worker = object.__new__(JetRLWorkerExtension)

    def broken(number: int) -> None:
        if number == 2:
            raise KeyError("layers.1.o_proj.weight is no parameter of this model")

    with pytest.raises(KeyError, match="layers.1.o_proj.weight is no parameter"):
        send(handle, lambda h: worker.update_weights_from_ipc(h, broken), fp8_stream())


def test_a_receiver_that_raises_before_it_connects(handle):
    """Nobody ever connects: a plain socket's first send would wait for ever."""

    def broken(h: str) -> None:
        raise RuntimeError("no model is loaded in this worker")

    started = time.monotonic()
    with pytest.raises(RuntimeError, match="no model is loaded"):
        send(handle, broken, fp8_stream(), deadline_s=60)
    assert time.monotonic() - started < 10


def connect(handle: str, answers: int) -> zmq.Socket:
    """A receiver that gives ``answers`` answers and then leaves the rest unanswered."""
    socket = zmq.Context.instance().socket(zmq.REP)
    socket.connect(handle)
    for i in range(answers + 1):
        socket.recv()
        if i < answers:
            socket.send(b"")
    return socket


@pytest.mark.parametrize("answers", [0, 1, 2])
def test_silence_past_the_deadline(handle, answers):
    ended = threading.Event()

    def silent(h: str) -> None:
        socket = connect(h, answers)
        ended.wait(30)
        socket.close(linger=0)

    started = time.monotonic()
    try:
        with pytest.raises(WeightSyncError, match="did not answer within 1 s.*JETRL_WEIGHT_SYNC_DEADLINE_S"):
            send(handle, silent, fp8_stream(), deadline_s=1.0)
    finally:
        ended.set()
    assert 1.0 <= time.monotonic() - started < 10


def test_nobody_connects_within_the_deadline(handle):
    ended = threading.Event()
    try:
        with pytest.raises(WeightSyncError, match="did not answer within 1 s"):
            send(handle, lambda h: ended.wait(30), fp8_stream(), deadline_s=1.0)
    finally:
        ended.set()


@pytest.mark.parametrize("answers", [0, 1])
def test_a_receiver_that_ends_early(handle, answers):
    with pytest.raises(WeightSyncError, match="ended the weight update before it had all weights"):
        send(handle, lambda h: connect(h, answers).close(linger=0), fp8_stream(), deadline_s=60)


def test_a_receiver_that_ends_before_it_connects(handle):
    with pytest.raises(WeightSyncError, match="ended the weight update before it had all weights"):
        send(handle, lambda h: None, fp8_stream(), deadline_s=60)


def test_a_slow_receiver_is_waited_for(handle):
    received: dict[str, torch.Tensor] = {}

    def slowly(h: str) -> None:
        time.sleep(0.4)
        receive(h, received, lambda n: time.sleep(0.2))

    send(handle, slowly, fp8_stream(), deadline_s=5)
    assert len(received) == 25


def test_an_answer_that_came_before_the_receiver_ended_counts(tmp_path):
    """The last answer may lie in the socket while the call has ended already."""
    handle = f"ipc://{tmp_path}/s"
    context = zmq.Context.instance()
    ours, theirs = context.socket(zmq.REQ), context.socket(zmq.REP)
    ours.bind(handle)
    theirs.connect(handle)
    receiver = Receiver(lambda h: None, handle)
    receiver.thread.join()
    socket = PatientSocket(ours, receiver, deadline_s=5)
    socket.send_pyobj({"x": 1})
    assert theirs.recv_pyobj() == {"x": 1}
    theirs.send(b"done")
    assert socket.recv() == b"done"
    socket.close()
    theirs.close(linger=0)


def test_a_weight_larger_than_the_bucket_names_itself(handle):
    huge = [("model.embed_tokens.weight", torch.zeros(1 << 20, 2).bfloat16())]
    with pytest.raises(AssertionError, match="model.embed_tokens.weight.*too large to fit in the bucket"):
        asyncio.run(_send_to_daemon(handle, huge))


async def _send_to_daemon(handle: str, weights) -> None:
    """The receiver stays behind, waiting for a bucket that never comes; it is a daemon thread."""
    receiver = Receiver(lambda h: connect(h, 1), handle)
    await PatientSender(receiver, zmq_handle=handle, bucket_size_mb=1, use_shm=True).async_send_weights(iter(weights))


# --- with an arena --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_server", [True, False])
def test_written_weights_are_handed_over_and_not_sent(monkeypatch, has_server):
    """One rank tells the server; nobody sends or receives, and verl's own calls stay out of the lease's order."""
    from verl.jetrl.trainer.engine import WrittenWeights

    handed = []

    async def take_weights(*arguments) -> None:
        handed.append(arguments)

    one = object.__new__(adapter.JetRLServerAdapter)
    monkeypatch.setattr(adapter.JetRLServerAdapter, "_ensure_server_handle", lambda self: has_server)
    one.server_handle = SimpleNamespace(take_weights=SimpleNamespace(remote=take_weights))  # and nothing else
    asyncio.run(one.update_weights(WrittenWeights(version=5), global_steps=3))
    assert handed == ([(5, 3)] if has_server else [])


@pytest.mark.parametrize("has_server", [True, False])
def test_sharded_weights_are_streamed_before_they_are_handed_over(monkeypatch, has_server):
    """One rank calls all workers of the replica to receive; every rank sends to its own."""
    from verl.jetrl.arena import ENGINE, TRAINER
    from verl.jetrl.trainer.engine import WrittenWeights

    calls = []

    async def take_weights(*arguments) -> None:
        calls.append(arguments)

    async def execute(self, method, non_block, args):
        calls.append((method, non_block, *args))
        return take_weights() if has_server else None

    one = object.__new__(adapter.JetRLServerAdapter)
    monkeypatch.setattr(adapter.JetRLServerAdapter, "_ensure_server_handle", lambda self: has_server)
    monkeypatch.setattr(adapter.JetRLServerAdapter, "_execute_method", execute)
    one.server_handle = SimpleNamespace(take_weights=SimpleNamespace(remote=take_weights))
    control = SimpleNamespace(holder=TRAINER)
    window = SimpleNamespace(updates=7, arena=SimpleNamespace(control=control), send=lambda n, watch: calls.append(("send", n)))
    asyncio.run(one.update_weights(WrittenWeights(5, window), global_steps=3))
    sent = [("jetrl_take_weights", True, 8), ("send", 8)]
    assert calls == sent + ([(), (5, 3)] if has_server else [])
    control.holder = ENGINE  # an engine that was not put to sleep has them
    asyncio.run(one.update_weights(WrittenWeights(5, window), global_steps=4))
    assert calls[4 if has_server else 2 :] == ([(5, 4)] if has_server else [])


def test_what_a_worker_raises_ends_the_stream(monkeypatch):
    def broken(handle: str) -> None:
        raise RuntimeError("no model is loaded in this worker")

    receiver = Receiver(broken, "")
    receiver.thread.join()

    async def execute(self, *arguments, **options):
        return receiver

    def send(update, watch) -> None:
        watch()

    one = object.__new__(adapter.JetRLServerAdapter)
    monkeypatch.setattr(adapter.JetRLServerAdapter, "_execute_method", execute)
    window = SimpleNamespace(updates=0, arena=SimpleNamespace(control=SimpleNamespace(holder=0)), send=send)
    with pytest.raises(RuntimeError, match="no model is loaded"):
        asyncio.run(one._stream(window))


def test_a_refused_hand_over_is_raised(monkeypatch):
    from verl.jetrl.arena import LeaseError
    from verl.jetrl.trainer.engine import WrittenWeights

    async def take_weights(*arguments) -> None:
        raise LeaseError("the trainer handed over version 5 of the weights, the arena has 6")

    one = object.__new__(adapter.JetRLServerAdapter)
    monkeypatch.setattr(adapter.JetRLServerAdapter, "_ensure_server_handle", lambda self: True)
    one.server_handle = SimpleNamespace(take_weights=SimpleNamespace(remote=take_weights))
    with pytest.raises(LeaseError, match="the arena has 6"):
        asyncio.run(one.update_weights(WrittenWeights(version=5), global_steps=3))
