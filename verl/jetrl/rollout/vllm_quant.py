"""vLLM's side of the FP8 linear: quantization method ``jetrl_fp8``, the trainer's forward on the trainer's bytes.

vLLM fuses q, k, v and gate, up into one linear.  Each part was quantized by itself, so the fused weight's scales are the
parts' scales one below the other; parts whose rows are not a multiple of 128 run as GEMMs of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from verl.jetrl.fp8 import ops
from verl.jetrl.fp8.format import BLOCK, FP8, Quantized, groups
from verl.jetrl.precision import PrecisionFlow
from verl.jetrl.weights import FUSED

METHOD = "jetrl_fp8"
SHARD_INDEX = {"q": 0, "k": 1, "v": 2}


@register_quantization_config(METHOD)
class JetRLFp8Config(QuantizationConfig):
    """The rollout's precision, derived from the trainer's :class:`PrecisionFlow`."""

    def __init__(self, flow: PrecisionFlow) -> None:
        super().__init__()
        self.flow = flow

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 90

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> JetRLFp8Config:
        return cls(PrecisionFlow(**config["precision_flow"]))

    def get_quant_method(self, layer: nn.Module, prefix: str) -> LinearMethodBase | None:
        if not isinstance(layer, LinearBase):
            return None
        parent, _, name = prefix.rpartition(".")
        parts = FUSED.get(name, (name,))
        return Fp8LinearMethod() if self.flow.covers(f"{parent}.{parts[0]}") else UnquantizedLinearMethod()


class Fp8LinearMethod(LinearMethodBase):
    """``y = x @ w.T`` with x quantized in 1x128 groups and w as the trainer quantized it (128x128 blocks)."""

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        if input_size_per_partition != input_size or sum(output_partition_sizes) != output_size:
            raise ValueError(
                "the jetrl arm supports one rollout GPU per replica: set actor_rollout_ref.rollout.tensor_model_parallel_size=1"
            )
        self.part_rows = list(output_partition_sizes)
        K = input_size_per_partition
        part_blocks = [groups(rows) for rows in self.part_rows]
        weight_NK = nn.Parameter(torch.zeros(sum(self.part_rows), K, dtype=torch.uint8).view(FP8), requires_grad=False)
        # NaN until the first update: a layer that never received its scales cannot pass for a working one.
        scale_BG = nn.Parameter(torch.full((sum(part_blocks), groups(K)), torch.nan, dtype=torch.float32), requires_grad=False)
        weight_NK.weight_loader = _part_loader(self.part_rows)
        scale_BG.weight_loader = _part_loader(part_blocks)
        layer.register_parameter("weight", weight_NK)
        layer.register_parameter("weight_scale_inv", scale_BG)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Nothing: the bytes are used as they came."""

    def parts(self, layer: nn.Module) -> list[Quantized]:
        """The fused weight as its separately quantized parts; one part when the blocks line up."""
        if len(self.part_rows) == 1 or all(rows % BLOCK == 0 for rows in self.part_rows):
            return [Quantized(layer.weight, layer.weight_scale_inv)]
        weights = layer.weight.split(self.part_rows)
        scales = layer.weight_scale_inv.split([groups(rows) for rows in self.part_rows])
        return [Quantized(w, s) for w, s in zip(weights, scales, strict=True)]

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        x_quantized = ops.quantize_rows(x.reshape(-1, x.shape[-1]))
        y_MN = torch.cat([ops.fprop(x_quantized, part) for part in self.parts(layer)], dim=-1)
        y_MN = y_MN if bias is None else y_MN + bias
        return y_MN.view(*x.shape[:-1], y_MN.shape[-1])


def _part_loader(sizes: list[int]):
    """A vLLM weight loader that copies one part (shard "q"/"k"/"v", 0/1, or the whole) into its rows, checked by shape."""

    def load(param: nn.Parameter, loaded: Tensor, shard_id: str | int | None = None) -> None:
        index = SHARD_INDEX.get(shard_id, shard_id)
        if index is not None and index not in range(len(sizes)):
            raise ValueError(f"jetrl_fp8 weight update: shard {shard_id!r} of a layer of {len(sizes)} parts")
        start, size = (0, sum(sizes)) if index is None else (sum(sizes[:index]), sizes[index])
        rows = param.data[start : start + size]
        if rows.shape != loaded.shape or rows.dtype != loaded.dtype:
            raise ValueError(
                f"jetrl_fp8 weight update: got {tuple(loaded.shape)} {loaded.dtype} for shard {shard_id!r}, expected "
                f"{tuple(rows.shape)} {rows.dtype}; trainer and rollout disagree about the precision flow"
            )
        rows.view(torch.uint8).copy_(loaded.view(torch.uint8))

    return load
