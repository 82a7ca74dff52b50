"""The seam between the FP8 linear and its kernels: the same functions on every device.

CPU tensors go to the reference in :mod:`verl.jetrl.fp8.format`; CUDA tensors go to the GPU kernels.
"""

from __future__ import annotations

from torch import Tensor

from verl.jetrl.fp8 import format as ref
from verl.jetrl.fp8.format import Quantized

quantize_rows = ref.quantize_rows
quantize_cols = ref.quantize_cols
quantize_blocks = ref.quantize_blocks


def fprop(x: Quantized, w: Quantized, bias_N: Tensor | None = None) -> Tensor:
    """``x_MK @ w_NK.T (+ bias)`` in BF16; ``x`` in 1x128 row groups, ``w`` in 128x128 blocks."""
    y_MN = ref.gemm_nt(x, w)
    return y_MN if bias_N is None else y_MN + bias_N


def dgrad(dy: Quantized, w_t: Quantized) -> Tensor:
    """``dy_MN @ w_NK`` in BF16; ``dy`` in 1x128 row groups, ``w_t`` the transposed weight (K, N)."""
    return ref.gemm_nt(dy, w_t)


def wgrad(dy_t: Quantized, x_t: Quantized, accumulate_NK: Tensor | None = None) -> Tensor:
    """``dy_MN.T @ x_MK`` in FP32, added to ``accumulate_NK`` when given; both operands transposed and grouped along tokens."""
    import torch

    return ref.gemm_nt(dy_t, x_t, torch.float32, accumulate_NK)
