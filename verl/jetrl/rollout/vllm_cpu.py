"""What the CPU build of vLLM lacks for the stock FP8 rollout: block-FP8 GEMMs that really round activations and weights.

vLLM's own CPU kernel needs AMX and leaves activations unquantized.  This one registers with vLLM's kernel table and uses
the project's reference, so the mixed baseline loses on the CPU what it loses on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.platforms.interface import PlatformEnum

from verl.jetrl.fp8 import format as ref
from verl.jetrl.fp8.format import Quantized


class ReferenceBlockFp8Kernel(Fp8BlockScaledMMLinearKernel):
    """Weights in 128x128 blocks as the checkpoint has them, activations 1x128, FP32 accumulation."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Keeps the checkpoint's layout, so that weight updates can be loaded into it."""

    def apply_weights(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None, **_) -> Tensor:
        params = self._get_layer_params(layer)
        scale = params.weight_scale if params.weight_scale_inv is None else params.weight_scale_inv
        y_MN = ref.gemm_nt(ref.quantize_rows(x.reshape(-1, x.shape[-1])), Quantized(params.weight.data, scale.data))
        y_MN = y_MN if bias is None else y_MN + bias
        return y_MN.to(x.dtype).view(*x.shape[:-1], y_MN.shape[-1])

    def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
        raise NotImplementedError("apply_weights does the whole linear")


def register() -> None:
    """Puts the kernel first in vLLM's table of CPU block-FP8 kernels; twice is the same as once."""
    table = kernels._POSSIBLE_FP8_BLOCK_KERNELS.setdefault(PlatformEnum.CPU, [])
    if ReferenceBlockFp8Kernel not in table:
        table.insert(0, ReferenceBlockFp8Kernel)
