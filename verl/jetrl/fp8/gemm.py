"""The FP8 GEMMs on a Hopper GPU: DeepGEMM, and cuBLASLt as a second backend and cross-check.

DeepGEMM is the one that vLLM ships, so trainer and rollout run the same kernels; a separately installed ``deep_gemm``
is used where vLLM is absent.  Scales are FP32 throughout: power-of-two scales are never derived from them.
"""

from __future__ import annotations

import functools
import importlib
import os
from types import ModuleType

import torch
from torch import Tensor

from verl.jetrl.environment import KERNEL_CACHE
from verl.jetrl.fp8.format import BLOCK, Quantized, groups


@functools.cache
def require_hopper(device: torch.device) -> None:
    """Raise on a CUDA device other than Hopper; nothing else was tested."""
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        raise RuntimeError(
            f"FP8 operators: {torch.cuda.get_device_name(device)} has compute capability {major}.{minor}; only 9.0 "
            "(H100, H200) is supported. Move the job to a Hopper GPU."
        )


@functools.cache
def deep_gemm() -> ModuleType:
    """The DeepGEMM module."""
    os.environ.setdefault(*KERNEL_CACHE)  # read when it is imported
    tried = []
    for name in ("vllm.third_party.deep_gemm", "deep_gemm"):
        try:
            return importlib.import_module(name)
        except ImportError as error:
            tried.append(f"{name}: {error}")
    raise ImportError(
        "FP8 GEMMs need DeepGEMM. Install vllm (which ships it as vllm.third_party.deep_gemm) or deep_gemm. " + "; ".join(tried)
    )


def _check_reduction(K: int, what: str) -> None:
    if K % 16:
        raise ValueError(
            f"{what}: the reduction dimension is {K}; TMA reads FP8 rows in steps of 16 bytes, so it must be a "
            "multiple of 16. A model with such a layer cannot train in FP8: use the arm bf16."
        )


# Which of a GEMM's sizes DeepGEMM compiles into its kernel.  A weight's two sizes never change; but wgrad reduces over
# tokens, and a constant there would mean compiling (seconds) for every new number of tokens.
WEIGHT_SIZES, NO_TOKENS = "nk", "n"


def gemm_nt(a: Quantized, b: Quantized, compiled_dims: str = WEIGHT_SIZES) -> Tensor:
    """``a_RK @ b_CK.T`` in BF16: a in 1x128 groups, b in 128x128 blocks (DeepGEMM's 1D-2D kernel).

    Each output row has the same bits whatever the number of rows (tests/gpu/test_fp8_gemm.py).
    """
    R, K = a.q.shape
    C = b.q.shape[0]
    _check_reduction(K, "gemm_nt")
    if C % 8:
        raise ValueError(f"gemm_nt: {C} output features; DeepGEMM needs a multiple of 8. Use the arm bf16.")
    out_RC = torch.empty((R, C), dtype=torch.bfloat16, device=a.q.device)
    if R == 0 or C == 0:
        return out_RC
    if K == 0:
        return out_RC.zero_()
    deep_gemm().fp8_gemm_nt(a, b, out_RC, compiled_dims=compiled_dims, disable_ue8m0_cast=True)
    return out_RC


def gemm_nt_groups(a: Quantized, b: Quantized, accumulate_RC: Tensor) -> Tensor:
    """``accumulate += a_RK @ b_CK.T`` in FP32, 1x128 groups on both sides (DeepGEMM's 1D-1D kernel): wgrad."""
    deep_gemm().fp8_gemm_nt(
        a,
        b,
        accumulate_RC,
        c=accumulate_RC,
        recipe=(1, 1, BLOCK),
        compiled_dims=NO_TOKENS,
        disable_ue8m0_cast=True,
    )
    return accumulate_RC


def cublaslt_gemm_nt(a: Quantized, b: Quantized, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The same product by cuBLASLt; ``b`` in 128x128 blocks or in 1x128 groups, told apart by its scales' shape.

    Each output row may depend on the number of rows.  K must be a multiple of 128.
    """
    from torch.nn.functional import ScalingType, scaled_mm

    if a.q.shape[1] % BLOCK:
        raise ValueError(f"cublaslt_gemm_nt: reduction of {a.q.shape[1]}, must be a multiple of {BLOCK}")
    blocks = b.s.shape[0] == groups(b.q.shape[0])
    return scaled_mm(
        a.q,
        b.q.t(),
        _outer_major(a.s),
        ScalingType.BlockWise1x128,
        _padded_blocks(b.s) if blocks else _outer_major(b.s),
        ScalingType.BlockWise128x128 if blocks else ScalingType.BlockWise1x128,
        output_dtype=out_dtype,
    )


def _outer_major(s_RG: Tensor) -> Tensor:
    """Scales with strides (1, R), as cuBLASLt reads them; a copy only where R is not a multiple of 4."""
    return s_RG if s_RG.stride() == (1, s_RG.shape[0]) else s_RG.t().contiguous().t()


def _padded_blocks(s_BG: Tensor) -> Tensor:
    """Block scales as cuBLASLt reads them: transposed, along the reduction padded to a multiple of 4."""
    return torch.nn.functional.pad(s_BG, (0, -s_BG.shape[1] % 4)).contiguous().t()


def bf16_gemm_nt(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    """``a @ b.T`` of BF16 matrices by DeepGEMM: unlike cuBLAS, each output row has the same bits whatever M is."""
    out_MN = torch.empty((a_MK.shape[0], b_NK.shape[0]), dtype=torch.bfloat16, device=a_MK.device)
    if out_MN.numel():
        deep_gemm().bf16_gemm_nt(a_MK, b_NK, out_MN)
    return out_MN
