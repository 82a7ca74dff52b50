"""verl's hybrid worker (actor, rollout handle, reference policy) with the fork's engine, adapter and checks."""

from __future__ import annotations

from typing import Any

import torch
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_name
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.base import _ROLLOUT_REGISTRY

import verl.jetrl.trainer.losses  # noqa: F401  registers the policy loss
from verl.jetrl import patching
from verl.jetrl.trainer import engine
from verl.jetrl.weights import combined, digest

engine.register()
_ROLLOUT_REGISTRY[("vllm", "async")] = "verl.jetrl.rollout.adapter.JetRLServerAdapter"


class JetRLWorker(ActorRolloutRefWorker):
    """One trainer process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        patching.require_active("verl")
        if get_device_name() == "cpu":
            # verl would ask for "cpu:gloo,cpu:gloo", which torch refuses.
            initialize_global_process_group_ray(backend="cpu:gloo")
        super().__init__(*args, **kwargs)
        # verl seeds accelerators only; a run's random numbers must not depend on when it was started.
        torch.manual_seed(self.config.actor.fsdp_config.seed + self.rank)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def jetrl_patches(self) -> dict[str, str]:
        """State of every verl patch in this process."""
        return patching.status("verl")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def jetrl_describe_precision(self) -> list[dict[str, str]]:
        """One row per weight-bearing operator of the actor's module tree."""
        return self.actor.engine.describe_precision()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def jetrl_weight_digests(self) -> dict[str, str]:
        """Hash of every tensor as the rollout must hold it, under the rollout's names."""
        return self.actor.engine.weight_digests()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def jetrl_state_digests(self) -> dict[str, str]:
        """One hash each of the weights as the rollout holds them, this rank's optimizer state, and its random generator."""
        optimizer = self.actor.engine.optimizer
        state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        return {
            "weights": combined(self.actor.engine.weight_digests().values()),
            "optimizer": combined(digest(getattr(v, "_local_tensor", v).reshape(-1)) for v in state),
            "rng": digest(torch.get_rng_state()),
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def jetrl_padding_abs_dlogp(self) -> float:
        """What an unmasked padded vocabulary costs per response token, since the last call, in nats."""
        return self.actor.engine.take_padding_abs_dlogp()
