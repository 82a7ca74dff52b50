"""verl's trainer engine alone, in this process: no Ray, no rollout.  The BF16 and the FP8 arm are one class, as in a run."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl.jetrl.compose import machine
from verl.jetrl.environment import RUN_ID, machine_environment, run_tmp

if TYPE_CHECKING:
    from tensordict import TensorDict

    from verl.jetrl.trainer.engine import JetRLEngine

ARMS = ("bf16", "fp8")
ATTENTION = {"cpu": "jetrl_fp32", "gpu": "jetrl_fa3"}  # what the recipes run there, in both arms


def restart_as_run() -> None:
    """Starts this command again in the environment that a run's processes have, unless this is it already.

    The CPU's thread settings are read when torch is loaded, the arena's owner when the engine is built.
    """
    if RUN_ID not in os.environ:
        environment = {**machine_environment(machine()), **os.environ, RUN_ID: uuid.uuid4().hex[:12]}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


@contextmanager
def alone() -> Iterator[None]:
    """A process group of this process, and what its weight arenas left behind removed at the end."""
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        backend = "cpu:gloo" if machine() == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()
            shutil.rmtree(run_tmp(os.environ[RUN_ID]), ignore_errors=True)


@contextmanager
def trainer(model: Path, arm: str, settings: Mapping[str, object] | None = None, **optimizer: object) -> Iterator[JetRLEngine]:
    """The engine of ``arm`` on the checkpoint ``model``; ``settings``: more fields of ``JetRLEngineConfig``, ``optimizer``:
    fields of verl's ``FSDPOptimizerConfig``."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPOptimizerConfig, HFModelConfig

    from verl.jetrl import patching
    from verl.jetrl.precision import JetRLEngineConfig, PrecisionFlow
    from verl.jetrl.trainer import engine as engines

    patching.require_active("verl")
    engines.register()
    engine = engines.JetRLEngine(
        HFModelConfig(
            path=str(model),
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": ATTENTION[machine()]},
        ),
        JetRLEngineConfig(
            strategy="fsdp2", use_torch_compile=False, precision_flow=PrecisionFlow(linear=arm), **(settings or {})
        ),
        FSDPOptimizerConfig(**{"lr": 1e-3, "total_training_steps": 1, **optimizer}),
        CheckpointConfig(),
    )
    engine.initialize()
    try:
        yield engine
    finally:
        if engine.flow.fp8:
            engine.masters.arena.close()


def batch_of(sequences: Sequence[Tensor], masks: Sequence[Tensor]) -> TensorDict:
    """Token ids and loss masks (1: the token is learned), a pair of 1-dimensional tensors each, as verl's SFT trainer packs
    them; one micro-batch."""
    from verl.utils import tensordict_utils as tu

    nested = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    tensors = {
        "input_ids": nested(list(sequences)),
        "position_ids": nested([torch.arange(len(ids)) for ids in sequences]),
        "loss_mask": nested(list(masks)),
    }
    settings = {
        "use_remove_padding": True,
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": len(sequences),
        "temperature": 1.0,
        "global_batch_size": len(sequences),
        "pad_mode": "no_padding",
    }
    return tu.get_tensordict(tensors, settings)


def sft_loss():
    """verl's own, the mean over the learned tokens of the batch."""
    from verl.workers.utils.losses import sft_loss

    return partial(sft_loss, config=None)


def gradients(engine: JetRLEngine) -> dict[str, Tensor]:
    """Every parameter's gradient, whole, after a backward pass and before the optimizer's step."""
    if engine.flow.fp8:
        engine.masters.assign_grads()
    return {name: p.grad.full_tensor().clone() for name, p in engine.module.named_parameters()}


def weights(engine: JetRLEngine) -> dict[str, Tensor]:
    """Every FP32 parameter, whole."""
    return {name: p.detach().full_tensor().clone() for name, p in engine.module.named_parameters()}
