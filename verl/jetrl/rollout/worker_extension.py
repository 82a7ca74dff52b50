"""Methods of every vLLM worker that the trainer reaches through ``collective_rpc``."""

from __future__ import annotations

import os
from typing import Any

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from verl.jetrl import patching
from verl.jetrl.environment import socket_of_run
from verl.jetrl.weights import digests


class JetRLWorkerExtension(vLLMColocateWorkerExtension):
    """verl's worker extension; adds what the fork checks in a running engine."""

    def __new__(cls, **kwargs: Any):
        # vLLM swallows plugin errors: here, in the worker itself, a missing patch is an error.
        patching.require_active("vllm")
        return super().__new__(cls, **kwargs)

    def jetrl_patches(self) -> dict[str, str]:
        """State of every vLLM patch in this worker process."""
        return patching.status("vllm")

    def jetrl_describe_precision(self) -> list[dict[str, str]]:
        """One row per weight-bearing operator of the rollout's module tree."""
        from verl.jetrl.flow_check import describe_rollout

        return describe_rollout(self.model_runner.model)

    def jetrl_record(self, on: bool) -> dict:
        """Starts recording every operator's rows (without CUDA graphs), or stops and returns them: see verl.jetrl.parity."""
        from verl.jetrl.parity import Recorder

        if on:
            self._recorder = Recorder(self.model_runner.model.model)
            return {}
        return self._recorder.take()

    def jetrl_weight_digests(self) -> dict[str, str]:
        """Hash of every parameter as the engine holds it now; vLLM's padding of the vocabulary left out."""
        model = self.model_runner.model
        rows = {
            f"{name}.weight": module.org_vocab_size
            for name, module in model.named_modules()
            if hasattr(module, "org_vocab_size")
        }
        return digests((name, param.data[: rows.get(name)]) for name, param in model.named_parameters())

    def jetrl_take_weights(self, update: int) -> None:
        """With arena=sharded: copies what the trainer streams in its weight update number ``update``."""
        if os.environ.get("JETRL_FAULT") == "raise_in_weight_sync":
            raise RuntimeError("fault injected: raise_in_weight_sync")
        self.model_runner.model.take_weights(update)

    def _get_zmq_handle(self) -> str:
        return socket_of_run(super()._get_zmq_handle())

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        if os.environ.get("JETRL_FAULT") == "raise_in_weight_sync":
            raise RuntimeError("fault injected: raise_in_weight_sync")
        try:
            super().update_weights_from_ipc(*args, **kwargs)
        except BufferError as error:
            # Raised by the clean-up of the shared-memory bucket, which the traceback of the real error still holds.
            raise error.__context__ or error from None
