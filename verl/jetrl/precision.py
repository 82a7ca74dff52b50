"""Which numbers flow where: the one description that trainer and rollout share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        if found := engine_problems(self, self.precision_flow.fp8):
            raise ValueError("\n".join(found))


def engine_problems(engine: Mapping, fp8: bool, where: str = "fsdp_config") -> list[str]:
    """What :class:`JetRLEngineConfig` refuses, each named by the setting below ``where``: values it does not know, and what the
    FP8 engine would ignore or stop at."""
    found = []
    arena = engine.get("arena", "replicated")
    if arena not in ("replicated", "sharded"):
        found.append(f"{where}.arena={arena}: set it to replicated or sharded")
    if arena == "sharded" and engine.get("resident_transposed"):
        found.append(
            f"{where}.resident_transposed=true with arena=sharded: it keeps a whole copy of the weights; set it to false"
        )
    needed = {
        "ulysses_sequence_parallel_size": (1, "sequences are not cut"),
        "offload_policy": (False, "FSDP2 holds none of its weights; param_offload=true moves them"),
        "model_dtype": ("fp32", "the masters are FP32"),
        "dtype": ("bfloat16", "what is not FP8 is BF16"),
    }
    for name, (value, why) in needed.items() if fp8 else ():
        actual = engine.get(name)
        if actual != value:
            found.append(f"{where}.{name}={actual} with precision_flow.linear=fp8: {why}; set it to {str(value).lower()}")
    return found
