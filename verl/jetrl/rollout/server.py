"""verl's vLLM server and replica, with the shared decoder on the weight arena, its lease, and the fork's checks."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import ray
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from verl.jetrl import patching
from verl.jetrl.arena import ENGINE, TRAINER, Control, LeaseError, control_of, share_of_gpu
from verl.jetrl.environment import RUN_ID, make_run_tmp
from verl.jetrl.precision import PrecisionFlow
from verl.jetrl.rollout import vllm_model, vllm_quant

# How long running requests may take to end once the trainer asks for the weights, in seconds.
DRAIN_S = float(os.environ.get("JETRL_DRAIN_DEADLINE_S", "60"))


class JetRLHttpServer(vLLMHttpServer):
    """One vLLM server.  Without FP8 in the trainer's precision flow it is verl's, stock FP8 quantization included."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        patching.require_active("verl")
        if os.environ.get(RUN_ID):
            make_run_tmp()  # for vLLM's sockets
        super().__init__(*args, **kwargs)
        self._controls: list[Control] = []
        self._running = 0

    @property
    def flow(self) -> PrecisionFlow:
        return PrecisionFlow(**self.config.custom["precision_flow"])

    def _apply_quantization(self) -> tuple[str | None, dict]:
        if not self.flow.fp8:
            return super()._apply_quantization()
        if self.config.quantization is not None:
            raise ValueError(
                f"rollout.quantization={self.config.quantization} and precision_flow.linear=fp8 exclude each other: the "
                "rollout derives its precision from the trainer's. Remove actor_rollout_ref.rollout.quantization."
            )
        return vllm_quant.METHOD, {
            "architectures": [vllm_model.ARCHITECTURE],
            "quantization_config": {"quant_method": vllm_quant.METHOD, "exact": self.flow.exact},
        }

    def _preprocess_engine_kwargs(self, engine_kwargs: dict) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        if self.flow.fp8:
            engine_kwargs["load_format"] = vllm_model.LOAD_FORMAT
            # As in the other arms the setting counts the weights, though the trainer allocates them: all that is on the GPU
            # in place of the other arms' copy, so that a rollout takes as much of it.
            if arena := share_of_gpu(self.replica_rank * self.replica_world_size):
                engine_kwargs["gpu_memory_utilization"] = self._beside(arena)

    def _beside(self, arena: float) -> float:
        """The share of the GPU that is left to vLLM beside an arena's."""
        asked = self.config.gpu_memory_utilization
        if asked <= arena:
            raise ValueError(
                f"actor_rollout_ref.rollout.gpu_memory_utilization={asked}: the weights take {arena:.3f} of the GPU; set more"
            )
        return asked - arena

    # --- the lease on the weights ---------------------------------------------------------------------------------

    @property
    def controls(self) -> list[Control]:
        """The control blocks of this replica's arenas, one per GPU; none in the arms without an arena."""
        if not self._controls and self.flow.fp8:
            T = self.replica_world_size
            self._controls = [control_of(self.replica_rank * T + rank) for rank in range(T)]
        return self._controls

    async def generate(self, *args: Any, **kwargs: Any) -> TokenOutput:
        """verl's; with an arena only while the engine holds the weights, and from one version of them."""
        for control in self.controls:
            control.require(ENGINE, "a request")
        versions = [control.version for control in self.controls]
        self._running += 1
        try:
            output = await super().generate(*args, **kwargs)
        finally:
            self._running -= 1
        now = [control.version for control in self.controls]
        if now != versions:
            raise LeaseError(f"the weights changed from version {versions} to {now} under a running request")
        return output

    async def take_weights(self, version: int, global_steps: int | None) -> None:
        """The trainer hands over the weights it wrote: caches of the old ones go, and requests are served again."""
        versions = [control.version for control in self.controls]
        if set(versions) != {version}:
            raise LeaseError(f"the trainer handed over version {version} of the weights, the arenas have {versions}")
        served = [control.served for control in self.controls]
        if set(served) != {version}:
            raise LeaseError(f"the trainer handed over version {version} of the weights, the engine has {served} (0: none)")
        await self.clear_kv_cache()
        if global_steps is not None:
            await self.set_global_steps(global_steps)
        for control in self.controls:
            if control.holder == TRAINER:
                control.hand_over(ENGINE)

    async def sleep(self) -> None:
        """verl's, called before training; running requests are waited for, then the trainer has the weights."""
        held = [control for control in self.controls if control.holder == ENGINE]
        started = time.monotonic()
        while held and self._running:
            if time.monotonic() - started > DRAIN_S:
                raise LeaseError(
                    f"{self._running} requests still run {DRAIN_S:.0f} s after the trainer asked for the weights "
                    "(JETRL_DRAIN_DEADLINE_S sets the limit)"
                )
            await asyncio.sleep(0.005)
        for control in held:
            control.hand_over(TRAINER)
            control.serve(0)  # sleep frees weights of its own
        await super().sleep()

    # --- checks ---------------------------------------------------------------------------------------------------

    def _get_worker_extension_cls(self) -> str:
        return "verl.jetrl.rollout.worker_extension.JetRLWorkerExtension"

    async def ask_workers(self, method: str) -> list[Any]:
        """Calls ``method`` in every vLLM worker of this replica and returns their answers."""
        return await self.engine.collective_rpc(method=method)

    async def check_health(self) -> None:
        """Raises when the engine of this server is dead."""
        await self.engine.check_health()


class JetRLReplica(vLLMReplica):
    """Launches :class:`JetRLHttpServer`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(JetRLHttpServer)
