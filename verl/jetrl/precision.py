"""Which numbers flow where: the one description that trainer and rollout share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from verl.base_config import BaseConfig
from verl.workers.config import FSDPEngineConfig

LINEAR_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Model types (``config.model_type`` of the Hugging Face checkpoint) whose linear layers the fork knows.
SUPPORTED_MODELS = ("qwen3", "qwen2", "llama")


@dataclass
class PrecisionFlow(BaseConfig):
    """Precision of the decoder's linear layers, in training and rollout.

    ``linear``: "bf16", or "fp8": float8_e4m3fn with FP32 scales, weights in 128x128 blocks, activations and output
    gradients in 1x128 groups along the reduction (see :mod:`verl.jetrl.fp8.format`).  Everything else stays in BF16.
    ``modules``: names of the linear layers that ``linear`` speaks of.
    ``exact``: rollout and training log-probs equal bit for bit (docs/exact.md).
    """

    linear: str = "bf16"
    modules: list[str] = field(default_factory=lambda: list(LINEAR_MODULES))
    exact: bool = False

    def __post_init__(self) -> None:
        if self.linear not in ("bf16", "fp8"):
            raise ValueError(f"precision_flow.linear is {self.linear!r}; it must be bf16 or fp8")
        if isinstance(self.modules, str) or not isinstance(self.modules, Sequence):
            raise ValueError(f"precision_flow.modules is {self.modules!r}; it must be a list of layer names")
        unknown = sorted(set(map(str, self.modules)) - set(LINEAR_MODULES))
        if unknown:
            raise ValueError(f"precision_flow.modules names unknown layers {unknown}; known: {', '.join(LINEAR_MODULES)}")
        if len(set(self.modules)) != len(self.modules):
            raise ValueError(f"precision_flow.modules names a layer twice: {', '.join(self.modules)}")
        if self.fp8 and not self.modules:
            raise ValueError("precision_flow.linear=fp8 with an empty precision_flow.modules: no layer would run in FP8")
        if self.fp8 and set(self.modules) != set(LINEAR_MODULES):
            missing = sorted(set(LINEAR_MODULES) - set(self.modules))
            raise ValueError(
                f"precision_flow.modules lacks {', '.join(missing)}: the decoder that trainer and rollout share runs all of "
                f"{', '.join(LINEAR_MODULES)} in FP8; name them all, or set precision_flow.linear=bf16"
            )
        if self.exact and not self.fp8:
            raise ValueError("precision_flow.exact=true needs precision_flow.linear=fp8: the BF16 arms run upstream's models")

    @property
    def fp8(self) -> bool:
        return self.linear == "fp8"


@dataclass
class JetRLEngineConfig(FSDPEngineConfig):
    """verl's FSDP engine configuration with the precision of the linear layers.

    ``resident_transposed``: keep the transposed FP8 weights for the input gradient (one more byte per parameter) instead of
    making them for each use.  ``rollout_tensor_parallel``: the rollout's ``tensor_model_parallel_size``.  ``arena``:
    "replicated", every GPU holds all FP8 weights and shares them with the rollout; or "sharded", each trainer process keeps its
    own rows and gathers a layer before it runs, and the rollout has FP8 weights of its own (:mod:`verl.jetrl.window`).
    """

    precision_flow: PrecisionFlow = field(default_factory=PrecisionFlow)
    resident_transposed: bool = False
    rollout_tensor_parallel: int = 1
    arena: str = "replicated"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.arena not in ("replicated", "sharded"):
            raise ValueError(f"fsdp_config.arena is {self.arena!r}; it must be replicated or sharded")
        if self.arena == "sharded" and self.resident_transposed:
            raise ValueError(
                "fsdp_config.resident_transposed=true keeps a whole copy of the weights, which arena=sharded avoids: "
                "set actor_rollout_ref.actor.fsdp_config.resident_transposed=false"
            )
        if self.precision_flow.fp8 and self.offload_policy and not self.forward_only:
            raise ValueError(
                "precision_flow.linear=fp8 does not support fsdp_config.offload_policy: FSDP2 holds none of its weights; set "
                "param_offload=true and optimizer_offload=true instead"
            )
        if self.precision_flow.fp8 and self.ulysses_sequence_parallel_size > 1:
            raise ValueError(
                "precision_flow.linear=fp8 does not support ulysses_sequence_parallel_size > 1: "
                "set actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=1"
            )
