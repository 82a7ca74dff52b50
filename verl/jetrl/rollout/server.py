"""verl's vLLM server and replica, with the fork's quantization and checks."""

from __future__ import annotations

from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

import verl.jetrl.rollout.vllm_quant as vllm_quant
from verl.jetrl import patching
from verl.jetrl.precision import PrecisionFlow


class JetRLHttpServer(vLLMHttpServer):
    """One vLLM server.  Without FP8 in the trainer's precision flow it is verl's, stock FP8 quantization included."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        patching.require_active("verl")
        super().__init__(*args, **kwargs)

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
        flow = {"linear": self.flow.linear, "modules": list(self.flow.modules)}
        return vllm_quant.METHOD, {"quantization_config": {"quant_method": vllm_quant.METHOD, "precision_flow": flow}}

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
