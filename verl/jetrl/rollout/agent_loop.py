"""verl's agent loop with a seed of its own for every request, so that a resumed run samples what an unbroken one does."""

from __future__ import annotations

import hashlib
import time
from contextlib import contextmanager
from typing import Any

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from verl.jetrl import patching


def request_seed(run_seed: int, step: int, prompt: int, sample: int) -> int:
    """A 63-bit seed from the run's seed, the training step, the prompt's index in the data set and the sample's number."""
    key = f"{run_seed}/{step}/{prompt}/{sample}".encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "big") >> 1


class SeededAgentLoopWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    """Seeds each request, stamps when it was finished, and remembers the first error for the trainer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        patching.require_active("verl")
        super().__init__(*args, **kwargs)
        self.first_error: str | None = None

    async def _run_agent_loop(self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any) -> None:
        seed = request_seed(
            self.config.actor_rollout_ref.rollout.seed,
            int(trajectory["step"]) if not trajectory["validate"] else -1 - int(trajectory["step"]),
            int(trajectory["sample_index"]),
            int(kwargs["session_id"]),
        )
        with self._remember_error():
            return await super()._run_agent_loop({**sampling_params, "seed": seed}, trajectory, **kwargs)

    async def _run_prompt(self, *args: Any, **kwargs: Any) -> None:
        # verl starts this without waiting for it: what it raises is heard by nobody.
        with self._remember_error():
            await super()._run_prompt(*args, **kwargs)

    @contextmanager
    def _remember_error(self):
        try:
            yield
        except Exception as error:
            self.first_error = self.first_error or f"{type(error).__name__}: {error}"
            raise

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        for one in output if isinstance(output, list) else [output]:
            one.extra_fields["finished_at"] = time.time()
        await super()._agent_loop_postprocess(output, validate, **kwargs)

    async def jetrl_first_error(self) -> str | None:
        """The first error of a request in this worker, or None."""
        return self.first_error


class SeededAgentLoopManager(AgentLoopManagerTQ):
    """verl's manager over :class:`SeededAgentLoopWorker`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(SeededAgentLoopWorker)

    def first_error(self) -> str | None:
        """The first error of a request in any worker, or None."""
        errors = ray.get([worker.jetrl_first_error.remote() for worker in self.agent_loop_workers])
        return next((error for error in errors if error), None)
