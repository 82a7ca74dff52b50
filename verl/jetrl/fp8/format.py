"""The FP8 format: the one definition of how BF16 numbers become FP8 bytes, and the exact reference of the three GEMMs.

Every other quantizer or GEMM in the project (Triton, DeepGEMM, cuBLASLt) is tested against this module; the quantizers
must give the same bytes and scales.

A *group* is the set of values that share one scale:

===============  ==============================  =========================================
tensor           group                           scales
===============  ==============================  =========================================
activation, dY   1x128 along the GEMM reduction  ``(rows, ceil(reduction / 128))``
weight           128x128 block                   ``(ceil(rows / 128), ceil(cols / 128))``
===============  ==============================  =========================================

The last group of a dimension may be smaller than 128; it is an ordinary group.  Per group::

    scale = max(amax, AMAX_FLOOR) / 448          FP32, IEEE division
    value = round_to_nearest_even(x / scale)     float8_e4m3fn, IEEE division, saturating at +-448

A group that holds a NaN or an infinity has scale NaN and every byte 0x7F, so that the loss check sees it.

Names: ``x_MK`` is a tensor of shape (M, K); ``q_`` marks FP8 bytes, ``s_`` their scales, G is ceil(reduction / 128).
M counts tokens, K input features, N output features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
BLOCK = 128
# The smallest amax a scale is derived from.  8e-25 lies far below any gradient, so no real group is scaled by the floor,
# and leaves room in FP32 for the exact remainder by which the GPU kernels round a quotient correctly.
AMAX_FLOOR = 2.0**-80
NAN_BYTE = 0x7F


class Quantized(NamedTuple):
    """FP8 bytes and their scales: ``q`` is float8_e4m3fn, ``s`` is float32 (shapes in the module docstring)."""

    q: Tensor
    s: Tensor


def groups(n: int) -> int:
    """Number of 128-groups that cover ``n`` values."""
    return -(-n // BLOCK)


def scale_of(amax: Tensor) -> Tensor:
    """FP32 scales from FP32 group maxima (any shape); a non-finite maximum gives NaN."""
    # Divide by a tensor: by a Python number torch multiplies with its reciprocal on CUDA, which is another rounding.
    s = amax.clamp(min=AMAX_FLOOR) / torch.full((), FP8_MAX, dtype=amax.dtype, device=amax.device)
    return torch.where(torch.isfinite(amax), s, torch.nan)


def cast(x: Tensor, scale: Tensor) -> Tensor:
    """FP8 bytes of ``x`` under ``scale`` (FP32, broadcastable to ``x``)."""
    value = (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    nan_byte = torch.tensor(NAN_BYTE, dtype=torch.uint8, device=x.device).view(FP8)
    return torch.where(torch.isnan(scale), nan_byte.view(torch.uint8), value.view(torch.uint8)).view(FP8)


def expand(s: Tensor, shape: torch.Size | tuple[int, int]) -> Tensor:
    """Scales, per row ``(R, G)`` or per block ``(ceil(R / 128), G)``, repeated to the 2-D ``shape`` of their values."""
    rows, cols = shape
    if s.shape[0] != rows:
        s = s.repeat_interleave(BLOCK, 0)[:rows]
    return s.repeat_interleave(BLOCK, 1)[:, :cols]


def quantize_rows(x_MK: Tensor) -> Quantized:
    """1x128 groups along the last dimension: ``(M, K)`` -> q ``(M, K)``, s ``(M, ceil(K / 128))``."""
    M, K = x_MK.shape
    G = groups(K)
    padded = torch.nn.functional.pad(x_MK.float(), (0, G * BLOCK - K))
    s_MG = scale_of(padded.view(M, G, BLOCK).abs().amax(-1)) if M and G else x_MK.new_zeros((M, G), dtype=torch.float32)
    return Quantized(cast(x_MK, expand(s_MG, (M, K)) if M else s_MG.new_zeros((M, K))), s_MG)


def quantize_cols(x_MK: Tensor) -> Quantized:
    """1x128 groups along tokens, transposed for wgrad: ``(M, K)`` -> q ``(K, M)``, s ``(K, ceil(M / 128))``."""
    return quantize_rows(x_MK.t().contiguous())


def quantize_blocks(w_NK: Tensor) -> Quantized:
    """128x128 blocks: ``(N, K)`` -> q ``(N, K)``, s ``(ceil(N / 128), ceil(K / 128))``."""
    N, K = w_NK.shape
    B, G = groups(N), groups(K)
    if not (N and K):
        return Quantized(w_NK.new_zeros((N, K), dtype=torch.uint8).view(FP8), w_NK.new_zeros((B, G), dtype=torch.float32))
    padded = torch.nn.functional.pad(w_NK.float(), (0, G * BLOCK - K, 0, B * BLOCK - N))
    s_BG = scale_of(padded.view(B, BLOCK, G, BLOCK).abs().amax((1, 3)))
    return Quantized(cast(w_NK, expand(s_BG, (N, K))), s_BG)


def transpose(w: Quantized) -> Quantized:
    """The transposed weight: its bytes and scales moved, never quantized again.  128x128 blocks only."""
    return Quantized(w.q.view(torch.uint8).t().contiguous().view(FP8), w.s.t().contiguous())


def dequantize(w: Quantized) -> Tensor:
    """FP32 values of a quantized 2-D tensor (row or block scales)."""
    return w.q.float() * expand(w.s, w.q.shape)


def gemm_nt(a: Quantized, b: Quantized, out_dtype: torch.dtype = torch.bfloat16, accumulate: Tensor | None = None) -> Tensor:
    """``a_RK @ b_CK.T`` with one FP32 accumulation per 128-block of K: the reference of fprop, dgrad and wgrad.

    ``a`` and ``b`` have scales per row or per 128x128 block along K.  Products of FP8 numbers and their sums over one
    block are exact in FP64, so a block's sum depends neither on the order of additions nor on the number of rows:
    each output row has the same bits whatever rows it is computed with.  Returns ``(R, C)`` in ``out_dtype``, or adds
    to the FP32 ``accumulate`` in place and returns it.
    """
    R, K = a.q.shape
    C, K_b = b.q.shape
    if K != K_b:
        raise ValueError(f"gemm_nt: reduction dimensions differ: a {tuple(a.q.shape)}, b {tuple(b.q.shape)}")
    s_RG = a.s if a.s.shape[0] == R else a.s.repeat_interleave(BLOCK, 0)[:R]
    s_CG = b.s if b.s.shape[0] == C else b.s.repeat_interleave(BLOCK, 0)[:C]
    a_RK, b_CK = a.q.float().double(), b.q.float().double()
    acc_RC = torch.zeros(R, C, dtype=torch.float32, device=a.q.device)
    for g in range(groups(K)):
        k = slice(g * BLOCK, (g + 1) * BLOCK)
        acc_RC += (a_RK[:, k] @ b_CK[:, k].t()).float() * (s_RG[:, g, None] * s_CG[None, :, g])
    return acc_RC.to(out_dtype) if accumulate is None else accumulate.add_(acc_RC)
