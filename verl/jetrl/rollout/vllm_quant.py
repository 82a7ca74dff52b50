"""Quantization method ``jetrl_fp8`` as vLLM's configuration knows it.

The linear layers of the jetrl arm are the shared decoder's (:mod:`verl.jetrl.rollout.vllm_model`): no vLLM layer is left
to quantize.  The method states the precision, and refuses activations other than BF16 and GPUs older than Hopper.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

METHOD = "jetrl_fp8"


@register_quantization_config(METHOD)
class JetRLFp8Config(QuantizationConfig):
    """float8_e4m3fn weights in 128x128 blocks with FP32 scales, activations in 1x128 groups, quantized by the trainer.

    ``exact``: attention gives the trainer's bits.
    """

    def __init__(self, exact: bool = False) -> None:
        super().__init__()
        self.exact = exact

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
        return cls(bool(config.get("exact", False)))

    def get_quant_method(self, layer: nn.Module, prefix: str) -> None:
        return None
