"""The trainer's handle on its vLLM server: verl's, with a weight update that fails instead of hanging."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import ray
import torch
import zmq
from torch import Tensor
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from verl.jetrl.arena import DEADLINE_S, ENGINE, WeightSyncError
from verl.jetrl.environment import socket_of_run
from verl.jetrl.trainer.engine import WrittenWeights
from verl.jetrl.window import Window

POLL_MS = 500


class PatientSocket:
    """A ZeroMQ socket that watches the receiver while it waits, for an answer or for the receiver to connect.

    verl's sender waits for a receiver that may have raised or died, for ever.  ``receiver`` is the Ray reference of the
    receiver's call: its exception is raised here, and so is silence past ``deadline_s``.
    """

    def __init__(self, socket: zmq.Socket, receiver: ray.ObjectRef | None, deadline_s: float = DEADLINE_S) -> None:
        self.socket, self.receiver, self.deadline_s = socket, receiver, deadline_s
        self.last_sent: Any = None

    def _wait(self, event: int) -> None:
        """Returns when there is something to receive (zmq.POLLIN), or somebody to send to (zmq.POLLOUT)."""
        started = time.monotonic()
        while not self.socket.poll(POLL_MS, event):
            if self.receiver is not None and ray.wait([self.receiver], timeout=0)[0]:
                ray.get(self.receiver)  # raises what the receiver raised
                if not self.socket.poll(POLL_MS, event):
                    raise WeightSyncError("the rollout worker ended the weight update before it had all weights")
                break
            if time.monotonic() - started > self.deadline_s:
                raise WeightSyncError(
                    f"the rollout worker did not answer within {self.deadline_s:.0f} s of a weight update "
                    "(JETRL_WEIGHT_SYNC_DEADLINE_S sets the limit)"
                )

    def recv(self) -> bytes:
        self._wait(zmq.POLLIN)
        return self.socket.recv()

    def send_pyobj(self, obj: Any) -> None:
        self.last_sent = obj
        self._wait(zmq.POLLOUT)
        self.socket.send_pyobj(obj)

    def close(self) -> None:
        self.socket.close(linger=0)


class PatientSender(BucketedWeightSender):
    """verl's bucketed sender on a :class:`PatientSocket`."""

    def __init__(self, receiver: ray.ObjectRef | None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.receiver = receiver

    def _init_socket(self) -> None:
        super()._init_socket()
        self.socket = PatientSocket(self.socket, self.receiver)

    def _init_buffer(self) -> None:
        try:
            super()._init_buffer()
        except BaseException:
            # verl keeps the segment to itself until the receiver has answered: nobody else would remove it.
            if self.use_shm and self.socket.last_sent is not None:
                SharedMemory(name=self.socket.last_sent["name"]).unlink()
            raise


class JetRLServerAdapter(ServerAdapter):
    """verl's adapter.  The receiver's exception, or its silence, ends a weight update; with an arena nothing is sent, or with
    arena=sharded the FP8 weights, layer by layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.zmq_handle = socket_of_run(self.zmq_handle)

    @torch.no_grad()
    async def update_weights(
        self,
        weights: Iterable[tuple[str, Tensor]] | WrittenWeights,
        global_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(weights, WrittenWeights):
            if weights.window is not None:
                await self._stream(weights.window)
            if torch.distributed.is_initialized():
                torch.distributed.barrier()  # every rank of the replica has written before its server takes the weights
            if self._ensure_server_handle():
                await self.server_handle.take_weights.remote(weights.version, global_steps)
            return
        receiver = await self._execute_method(
            "update_weights_from_ipc", non_block=True, kwargs={**kwargs, "use_shm": self.use_shm}
        )
        if os.environ.get("JETRL_FAULT") == "drop_weight_sync" and global_steps:
            weights = ()  # a test's fault: everything runs, no weight arrives
        sender = PatientSender(
            receiver,
            zmq_handle=self.zmq_handle,
            bucket_size_mb=self.config.checkpoint_engine.update_weights_bucket_megabytes,
            use_shm=self.use_shm,
        )
        await sender.async_send_weights(weights)
        if receiver is not None:
            await receiver
        if self._has_server:
            await self.server_handle.clear_kv_cache.remote()
            if global_steps is not None:
                await self.server_handle.set_global_steps.remote(global_steps)

    async def _stream(self, window: Window) -> None:
        """Every rank sends to the worker on its own GPU, while the rank with the server has called them all to receive."""
        if window.arena.control.holder == ENGINE:
            return  # it has these weights: the trainer cannot have written since
        window.updates += 1
        receiver = await self._execute_method("jetrl_take_weights", non_block=True, args=(window.updates,))

        def watch() -> None:
            if receiver is not None and ray.wait([receiver], timeout=0)[0]:
                ray.get(receiver)  # raises what the receiver raised

        window.send(window.updates, watch)
        if receiver is not None:
            await receiver
