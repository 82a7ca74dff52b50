"""The seam between the FP8 linear and its kernels: the same functions on every device.

Each function is a torch operator of the namespace ``jetrl`` with a fake implementation, so it works under
``torch.compile``, CUDA graphs, activation checkpointing and autocast, and never synchronizes with the host.  CPU
tensors go to the reference in :mod:`verl.jetrl.fp8.format`, CUDA tensors to Triton (:mod:`verl.jetrl.fp8.kernels`) and
DeepGEMM (:mod:`verl.jetrl.fp8.gemm`); a CUDA device other than Hopper is an error.

Inputs are 2-D, of BF16 (other floating types are rounded to BF16 first, so that an FP32 master quantizes to the bytes
of its BF16 export).  Operands of the weight gradient are transposed, and their tokens padded with zeros to a multiple
of 128; P is that number.  Scales per row may be column-major: index them, do not view them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.jetrl.fp8 import format as ref
from verl.jetrl.fp8 import gemm, kernels
from verl.jetrl.fp8.format import BLOCK, Quantized, groups
from verl.jetrl.fp8.kernels import padded
from verl.jetrl.fp8.registration import register

TRANSPOSED_GROUPS = ("group", "block")


class Fp8Weight(NamedTuple):
    """A quantized weight for all three GEMMs: q (N, K), s (N/128, K/128), and the bytes transposed, q_t (K, N)."""

    q: Tensor
    s: Tensor
    q_t: Tensor

    @property
    def forward(self) -> Quantized:
        return Quantized(self.q, self.s)

    @property
    def transposed(self) -> Quantized:
        return Quantized(self.q_t, self.s.t())


# --- CPU: the reference ---------------------------------------------------------------------------------------------


def _pad_tokens(x_MK: Tensor) -> Tensor:
    return F.pad(x_MK, (0, 0, 0, padded(x_MK.shape[0]) - x_MK.shape[0]))


def _ref_transposed(x_MK: Tensor, transposed: str) -> Quantized:
    x_PK = _pad_tokens(x_MK)
    return ref.quantize_cols(x_PK) if transposed == "group" else ref.transpose(ref.quantize_blocks(x_PK))


def _rms(x_MK: Tensor, weight_K: Tensor, eps: float, residual_MK: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    h = x_MK if residual_MK is None else (x_MK.float() + residual_MK.float()).to(torch.bfloat16)
    rstd = 1.0 / torch.sqrt(h.float().square().mean(-1) + eps)
    return h, rstd, (h.float() * rstd[:, None]).to(torch.bfloat16) * weight_K


def _silu_mul(gu_M2I: Tensor) -> Tensor:
    gate, up = gu_M2I.chunk(2, -1)
    return F.silu(gate.float()).to(torch.bfloat16) * up


class _Cpu:
    """The reference implementation of every operator."""

    @staticmethod
    def quantize_rows(x):
        return tuple(ref.quantize_rows(x))

    @staticmethod
    def quantize_transposed(x, transposed):
        return tuple(_ref_transposed(x, transposed))

    @staticmethod
    def quantize_both(x, transposed):
        return (*ref.quantize_rows(x), *_ref_transposed(x, transposed))

    @staticmethod
    def quantize_blocks(x):
        return tuple(ref.quantize_blocks(x.to(torch.bfloat16)))

    @staticmethod
    def quantize_blocks_(q, s, x):
        values = ref.quantize_blocks(x.to(torch.bfloat16))
        q.view(torch.uint8).copy_(values.q.view(torch.uint8))
        s.copy_(values.s)

    @staticmethod
    def quantize_weight(x):
        w = ref.quantize_blocks(x)
        return w.q, w.s, ref.transpose(w).q

    @staticmethod
    def regroup(q, s, transposed):
        return tuple(_ref_transposed(ref.dequantize(Quantized(q, s)), transposed))

    @staticmethod
    def transpose_bytes(q):
        return q.view(torch.uint8).t().contiguous().view(ref.FP8)

    @staticmethod
    def gemm_nt(a_q, a_s, b_q, b_s, bias, backend):
        y = ref.gemm_nt(Quantized(a_q, a_s), Quantized(b_q, b_s))
        return y if bias is None else y + bias

    @staticmethod
    def wgrad(a_q, a_s, b_q, b_s, out_dtype):
        return ref.gemm_nt(Quantized(a_q, a_s), Quantized(b_q, b_s), out_dtype)

    @staticmethod
    def wgrad_(target, a_q, a_s, b_q, b_s, add):
        if not add:
            target.zero_()
        ref.gemm_nt(Quantized(a_q, a_s), Quantized(b_q, b_s), torch.float32, target)

    @staticmethod
    def rms_norm(x, weight, eps, residual):
        h, rstd, y = _rms(x, weight, eps, residual)
        return y, rstd, h if residual is not None else h.new_empty(0)

    @staticmethod
    def rms_norm_quantize(x, weight, eps, residual):
        h, rstd, y = _rms(x, weight, eps, residual)
        return (*ref.quantize_rows(y), rstd, h if residual is not None else h.new_empty(0))

    @staticmethod
    def rms_norm_transposed(h, rstd, weight, transposed):
        return tuple(_ref_transposed((h.float() * rstd[:, None]).to(torch.bfloat16) * weight, transposed))

    @staticmethod
    def rms_norm_backward(dy, h, rstd, weight, d_residual):
        x_hat = h.float() * rstd[:, None]
        g = (dy.float() * weight.float()).to(torch.bfloat16).float()
        dx = rstd[:, None] * (g - x_hat * (g * x_hat).mean(-1, keepdim=True))
        if d_residual is not None:
            dx = dx.to(torch.bfloat16).float() + d_residual.float()
        return dx.to(torch.bfloat16), (dy.float() * x_hat.to(torch.bfloat16).float()).sum(0)

    @staticmethod
    def silu_mul(gu):
        return _silu_mul(gu)

    @staticmethod
    def silu_mul_quantize(gu):
        return tuple(ref.quantize_rows(_silu_mul(gu)))

    @staticmethod
    def silu_mul_quantize_both(gu, transposed):
        y = _silu_mul(gu)
        return (*ref.quantize_rows(y), *_ref_transposed(y, transposed))

    @staticmethod
    def silu_mul_backward(gu, dy):
        gate, up = (t.float() for t in gu.chunk(2, -1))
        sigmoid = torch.sigmoid(gate)
        d_up = dy.float() * (gate * sigmoid).to(torch.bfloat16).float()
        d_gate = (dy * up.to(torch.bfloat16)).float() * (sigmoid * (1 + gate * (1 - sigmoid)))
        return torch.cat((d_gate, d_up), -1).to(torch.bfloat16)

    @staticmethod
    def silu_mul_backward_quantize(gu, dy):
        d_gu = _Cpu.silu_mul_backward(gu, dy)
        return (*ref.quantize_rows(d_gu), *_ref_transposed(d_gu, "group"))

    @staticmethod
    def bf16_gemm_nt(a, b):
        # One row at a time in FP32 order would be slow; FP64 sums make the BF16 result independent of the blocking.
        return (a.double() @ b.double().t()).to(torch.bfloat16)


# --- CUDA -----------------------------------------------------------------------------------------------------------


def _wgrad(a: Quantized, b: Quantized, out_dtype: torch.dtype) -> Tensor:
    N, K = a.q.shape[0], b.q.shape[0]
    if b.s.shape[0] == groups(K) and b.s.shape[0] != K:
        return gemm.gemm_nt(a, b, gemm.NO_TOKENS).to(out_dtype)
    out = torch.zeros((N, K), dtype=torch.float32, device=a.q.device)
    if a.q.shape[1]:
        gemm.gemm_nt_groups(a, b, out)
    return out.to(out_dtype)


class _Cuda:
    """Triton and DeepGEMM."""

    @staticmethod
    def quantize_rows(x):
        return tuple(kernels.quantize(x, True, None)[0])

    @staticmethod
    def quantize_transposed(x, transposed):
        return tuple(kernels.quantize(x, False, transposed)[1])

    @staticmethod
    def quantize_both(x, transposed):
        rows, x_t = kernels.quantize(x, True, transposed)
        return (*rows, *x_t)

    @staticmethod
    def quantize_blocks(x):
        return kernels.quantize_weight(x, False)[:2]

    @staticmethod
    def quantize_blocks_(q, s, x):
        kernels.quantize_weight(x, False, Quantized(q, s))

    @staticmethod
    def quantize_weight(x):
        return kernels.quantize_weight(x, True)

    @staticmethod
    def regroup(q, s, transposed):
        return tuple(kernels.regroup(Quantized(q, s), transposed))

    @staticmethod
    def transpose_bytes(q):
        return kernels.transpose_bytes(q)

    @staticmethod
    def gemm_nt(a_q, a_s, b_q, b_s, bias, backend):
        product = gemm.gemm_nt if backend == "deep_gemm" else gemm.cublaslt_gemm_nt
        y = product(Quantized(a_q, a_s), Quantized(b_q, b_s))
        return y if bias is None else y.add_(bias)

    @staticmethod
    def wgrad(a_q, a_s, b_q, b_s, out_dtype):
        return _wgrad(Quantized(a_q, a_s), Quantized(b_q, b_s), out_dtype)

    @staticmethod
    def wgrad_(target, a_q, a_s, b_q, b_s, add):
        K, tokens = b_q.shape[0], a_q.shape[1]
        if tokens and b_s.shape[0] == groups(K) and b_s.shape[0] != K:
            product = gemm.gemm_nt(Quantized(a_q, a_s), Quantized(b_q, b_s), gemm.NO_TOKENS)
            kernels.widen(product, target, add)
            return
        if not add:
            target.zero_()
        if tokens:
            gemm.gemm_nt_groups(Quantized(a_q, a_s), Quantized(b_q, b_s), target)

    @staticmethod
    def rms_norm(x, weight, eps, residual):
        h, rstd, y, _ = kernels.rms_norm(x, weight, eps, residual, fp8=False, bf16=True)
        return y, rstd, h if residual is not None else h.new_empty(0)

    @staticmethod
    def rms_norm_quantize(x, weight, eps, residual):
        h, rstd, _, rows = kernels.rms_norm(x, weight, eps, residual, fp8=True, bf16=False)
        return (*rows, rstd, h if residual is not None else h.new_empty(0))

    @staticmethod
    def rms_norm_transposed(h, rstd, weight, transposed):
        return tuple(kernels.rms_norm_transposed(h, rstd, weight, transposed))

    @staticmethod
    def rms_norm_backward(dy, h, rstd, weight, d_residual):
        return kernels.rms_norm_backward(dy, h, rstd, weight, d_residual)

    @staticmethod
    def silu_mul(gu):
        return kernels.silu_mul_bf16(gu)

    @staticmethod
    def silu_mul_quantize(gu):
        return tuple(kernels.silu_mul(gu, True, None)[0])

    @staticmethod
    def silu_mul_quantize_both(gu, transposed):
        rows, x_t = kernels.silu_mul(gu, True, transposed)
        return (*rows, *x_t)

    @staticmethod
    def silu_mul_backward(gu, dy):
        return kernels.silu_mul_backward(gu, dy)

    @staticmethod
    def silu_mul_backward_quantize(gu, dy):
        rows, dy_t = kernels.silu_mul_backward_quantize(gu, dy)
        return (*rows, *dy_t)

    @staticmethod
    def bf16_gemm_nt(a, b):
        return gemm.bf16_gemm_nt(a, b)


# --- fake implementations: shapes, dtypes, strides ------------------------------------------------------------------


def _like_rows(x: Tensor, M: int, K: int) -> tuple[Tensor, Tensor]:
    q = x.new_empty((M, K), dtype=ref.FP8)
    if x.device.type == "cpu":
        return q, x.new_empty((M, groups(K)), dtype=torch.float32)
    return q, x.new_empty((groups(K), -(-M // 4) * 4), dtype=torch.float32).t()[:M]


def _like_transposed(x: Tensor, M: int, K: int, transposed: str) -> tuple[Tensor, Tensor]:
    P = padded(M)
    q = x.new_empty((K, P), dtype=ref.FP8)
    if transposed == "block":
        return q, x.new_empty((groups(K), P // BLOCK), dtype=torch.float32)
    if x.device.type == "cpu":
        return q, x.new_empty((K, P // BLOCK), dtype=torch.float32)
    return q, x.new_empty((P // BLOCK, -(-K // 4) * 4), dtype=torch.float32).t()[:K]


def _like_norm(x, residual):
    h = torch.empty_like(x) if residual is not None else x.new_empty(0)
    return x.new_empty((x.shape[0],), dtype=torch.float32), h


class _Fake:
    """Shapes, dtypes and strides of every operator's results."""

    @staticmethod
    def quantize_rows(x):
        return _like_rows(x, *x.shape)

    @staticmethod
    def quantize_transposed(x, transposed):
        return _like_transposed(x, *x.shape, transposed)

    @staticmethod
    def quantize_both(x, transposed):
        return (*_like_rows(x, *x.shape), *_like_transposed(x, *x.shape, transposed))

    @staticmethod
    def quantize_blocks(x):
        N, K = x.shape
        return x.new_empty((N, K), dtype=ref.FP8), x.new_empty((groups(N), groups(K)), dtype=torch.float32)

    @staticmethod
    def quantize_blocks_(q, s, x):
        return None

    @staticmethod
    def quantize_weight(x):
        N, K = x.shape
        return (*_Fake.quantize_blocks(x), x.new_empty((K, N), dtype=ref.FP8))

    @staticmethod
    def regroup(q, s, transposed):
        return _like_transposed(q, *q.shape, transposed)

    @staticmethod
    def transpose_bytes(q):
        return q.new_empty((q.shape[1], q.shape[0]))

    @staticmethod
    def gemm_nt(a_q, a_s, b_q, b_s, bias, backend):
        return a_q.new_empty((a_q.shape[0], b_q.shape[0]), dtype=torch.bfloat16)

    @staticmethod
    def wgrad(a_q, a_s, b_q, b_s, out_dtype):
        return a_q.new_empty((a_q.shape[0], b_q.shape[0]), dtype=out_dtype)

    @staticmethod
    def wgrad_(target, a_q, a_s, b_q, b_s, add):
        return None

    @staticmethod
    def rms_norm(x, weight, eps, residual):
        return (torch.empty_like(x), *_like_norm(x, residual))

    @staticmethod
    def rms_norm_quantize(x, weight, eps, residual):
        return (*_like_rows(x, *x.shape), *_like_norm(x, residual))

    @staticmethod
    def rms_norm_transposed(h, rstd, weight, transposed):
        return _like_transposed(h, *h.shape, transposed)

    @staticmethod
    def rms_norm_backward(dy, h, rstd, weight, d_residual):
        return torch.empty_like(dy), dy.new_empty((dy.shape[1],), dtype=torch.float32)

    @staticmethod
    def silu_mul(gu):
        return gu.new_empty((gu.shape[0], gu.shape[1] // 2))

    @staticmethod
    def silu_mul_quantize(gu):
        return _like_rows(gu, gu.shape[0], gu.shape[1] // 2)

    @staticmethod
    def silu_mul_quantize_both(gu, transposed):
        M, I = gu.shape[0], gu.shape[1] // 2
        return (*_like_rows(gu, M, I), *_like_transposed(gu, M, I, transposed))

    @staticmethod
    def silu_mul_backward(gu, dy):
        return torch.empty_like(gu)

    @staticmethod
    def silu_mul_backward_quantize(gu, dy):
        return (*_like_rows(gu, *gu.shape), *_like_transposed(gu, *gu.shape, "group"))

    @staticmethod
    def bf16_gemm_nt(a, b):
        return a.new_empty((a.shape[0], b.shape[0]))


_SCHEMAS = (
    "quantize_rows(Tensor x) -> (Tensor, Tensor)",
    "quantize_transposed(Tensor x, str transposed) -> (Tensor, Tensor)",
    "quantize_both(Tensor x, str transposed) -> (Tensor, Tensor, Tensor, Tensor)",
    "quantize_blocks(Tensor x) -> (Tensor, Tensor)",
    "quantize_blocks_(Tensor(a!) q, Tensor(b!) s, Tensor x) -> ()",
    "quantize_weight(Tensor x) -> (Tensor, Tensor, Tensor)",
    "regroup(Tensor q, Tensor s, str transposed) -> (Tensor, Tensor)",
    "transpose_bytes(Tensor q) -> Tensor",
    "gemm_nt(Tensor a_q, Tensor a_s, Tensor b_q, Tensor b_s, Tensor? bias, str backend) -> Tensor",
    "wgrad(Tensor a_q, Tensor a_s, Tensor b_q, Tensor b_s, ScalarType out_dtype) -> Tensor",
    "wgrad_(Tensor(a!) target, Tensor a_q, Tensor a_s, Tensor b_q, Tensor b_s, bool add) -> ()",
    "rms_norm(Tensor x, Tensor weight, float eps, Tensor? residual) -> (Tensor, Tensor, Tensor)",
    "rms_norm_quantize(Tensor x, Tensor weight, float eps, Tensor? residual) -> (Tensor, Tensor, Tensor, Tensor)",
    "rms_norm_transposed(Tensor h, Tensor rstd, Tensor weight, str transposed) -> (Tensor, Tensor)",
    "rms_norm_backward(Tensor dy, Tensor h, Tensor rstd, Tensor weight, Tensor? d_residual) -> (Tensor, Tensor)",
    "silu_mul(Tensor gu) -> Tensor",
    "silu_mul_quantize(Tensor gu) -> (Tensor, Tensor)",
    "silu_mul_quantize_both(Tensor gu, str transposed) -> (Tensor, Tensor, Tensor, Tensor)",
    "silu_mul_backward(Tensor gu, Tensor dy) -> Tensor",
    "silu_mul_backward_quantize(Tensor gu, Tensor dy) -> (Tensor, Tensor, Tensor, Tensor)",
    "bf16_gemm_nt(Tensor a, Tensor b) -> Tensor",
)

_library = register(_SCHEMAS, _Cpu, _Cuda, _Fake)
_ops = torch.ops.jetrl


# --- the functions --------------------------------------------------------------------------------------------------


def _matrix(x: Tensor, what: str, keep: torch.dtype = torch.bfloat16) -> Tensor:
    """A 2-D BF16 tensor (``keep``: or one of this dtype) with contiguous rows on a supported device."""
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"{what}: want a 2-D floating-point tensor, got {tuple(x.shape)} {x.dtype}; flatten it first.")
    if x.device.type not in ("cpu", "cuda", "meta"):
        raise RuntimeError(f"{what}: no FP8 operators for device {x.device}; use CPU or a Hopper GPU.")
    if x.device.type == "cuda":
        gemm.require_hopper(x.device)
    return (x if x.dtype == keep else x.to(torch.bfloat16)).contiguous()


def _grouping(transposed: str) -> str:
    if transposed not in TRANSPOSED_GROUPS:
        raise ValueError(f"transposed must be one of {TRANSPOSED_GROUPS}, got {transposed!r}")
    return transposed


def quantize_rows(x_MK: Tensor) -> Quantized:
    """1x128 groups along K: q (M, K), s (M, ceil(K/128)).  The operand of fprop (x) and of dgrad (dY)."""
    return Quantized(*_ops.quantize_rows(_matrix(x_MK, "quantize_rows")))


def quantize_cols(x_MK: Tensor) -> Quantized:
    """1x128 groups along tokens: q (K, P), s (K, P/128).  An operand of wgrad."""
    return Quantized(*_ops.quantize_transposed(_matrix(x_MK, "quantize_cols"), "group"))


def quantize_transposed(x_MK: Tensor, transposed: str) -> Quantized:
    """The wgrad operand (K, P) in ``"group"`` (s (K, P/128)) or ``"block"`` (s (ceil(K/128), P/128)) scaling."""
    return Quantized(*_ops.quantize_transposed(_matrix(x_MK, "quantize_transposed"), _grouping(transposed)))


def quantize_both(x_MK: Tensor, transposed: str) -> tuple[Quantized, Quantized]:
    """:func:`quantize_rows` and :func:`quantize_transposed` in one read of ``x``."""
    q, s, q_t, s_t = _ops.quantize_both(_matrix(x_MK, "quantize_both"), _grouping(transposed))
    return Quantized(q, s), Quantized(q_t, s_t)


def quantize_blocks(w_NK: Tensor, out: Quantized | None = None) -> Quantized:
    """128x128 blocks: q (N, K), s (ceil(N/128), ceil(K/128)).  The weight of fprop.

    An FP32 ``w`` is rounded to BF16 on its way, in the same read.  ``out``: contiguous tensors to write into.
    """
    x_NK = _matrix(w_NK, "quantize_blocks", keep=torch.float32)
    if out is None:
        return Quantized(*_ops.quantize_blocks(x_NK))
    _check_blocks(out, *x_NK.shape)
    _ops.quantize_blocks_(out.q, out.s, x_NK)
    return out


def _check_blocks(out: Quantized, N: int, K: int) -> None:
    for tensor, shape, dtype in ((out.q, (N, K), ref.FP8), (out.s, (groups(N), groups(K)), torch.float32)):
        if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"quantize_blocks: out must be contiguous {shape} {dtype}, got {tuple(tensor.shape)} {tensor.dtype} with "
                f"strides {tensor.stride()}"
            )


def quantize_masters(weights: Sequence[tuple[Tensor, Quantized]]) -> None:
    """:func:`quantize_blocks` of each FP32 weight into its ``out``; on a GPU those of one shape in one launch."""
    for w_NK, out in weights:
        _check_blocks(out, *w_NK.shape)
    left_out = kernels.quantize_masters(weights) if weights and weights[0][0].is_cuda else weights
    for w_NK, out in left_out:
        quantize_blocks(w_NK, out)


def quantize_weight(w_NK: Tensor) -> Fp8Weight:
    """:func:`quantize_blocks` with the transposed bytes for dgrad, in one read of ``w``."""
    return Fp8Weight(*_ops.quantize_weight(_matrix(w_NK, "quantize_weight")))


def with_transposed(w: Quantized) -> Fp8Weight:
    """The transposed bytes of a weight that is already quantized; never quantized again."""
    return Fp8Weight(w.q, w.s, _ops.transpose_bytes(w.q))


def regroup(x: Quantized, transposed: str) -> Quantized:
    """The wgrad operand from saved FP8 rows: rounded a second time; an ablation of the format."""
    return Quantized(*_ops.regroup(x.q, x.s, _grouping(transposed)))


def fprop(x: Quantized, w: Quantized, bias_N: Tensor | None = None, backend: str = "deep_gemm") -> Tensor:
    """``x_MK @ w_NK.T (+ bias)`` in BF16; ``x`` in 1x128 row groups, ``w`` in 128x128 blocks.

    The bias is added in BF16 to the BF16 product.  ``backend`` is ``"deep_gemm"`` (each row's bits independent of M) or
    ``"cublaslt"``; the CPU has one implementation.
    """
    bias_N = None if bias_N is None else bias_N.to(torch.bfloat16)
    return _ops.gemm_nt(x.q, x.s, w.q, w.s, bias_N, backend)


def dgrad(dy: Quantized, w_t: Quantized, backend: str = "deep_gemm") -> Tensor:
    """``dy_MN @ w_NK`` in BF16; ``dy`` in 1x128 row groups, ``w_t`` the transposed weight (K, N)."""
    return _ops.gemm_nt(dy.q, dy.s, w_t.q, w_t.s, None, backend)


def wgrad(
    dy_t: Quantized,
    x_t: Quantized,
    accumulate_NK: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    add: bool = True,
) -> Tensor:
    """``dy_MN.T @ x_MK`` from transposed operands: ``dy_t`` (N, P) in groups, ``x_t`` (K, P) in groups or blocks.

    The sum over a call's tokens is taken in FP32.  Returns it as ``out_dtype``, or adds it to ``accumulate_NK`` (FP32,
    in place; with ``add=False`` what is there is overwritten) and returns that.  On a GPU blocks run the fast 1D-2D
    kernel, whose sum is rounded to BF16 once before it is returned or added; groups run the 1D-1D kernel, which adds in
    FP32.
    """
    if accumulate_NK is None:
        return _ops.wgrad(dy_t.q, dy_t.s, x_t.q, x_t.s, out_dtype)
    if accumulate_NK.dtype != torch.float32 or not accumulate_NK.is_contiguous():
        raise ValueError("wgrad: accumulate_NK must be a contiguous FP32 tensor")
    _ops.wgrad_(accumulate_NK, dy_t.q, dy_t.s, x_t.q, x_t.s, add)
    return accumulate_NK


class Norm(NamedTuple):
    """What RMSNorm's backward needs: its BF16 input after the residual add ``h (M, K)``, and ``rstd (M,)`` FP32."""

    h: Tensor
    rstd: Tensor


def rms_norm(x_MK: Tensor, weight_K: Tensor, eps: float, residual_MK: Tensor | None = None) -> tuple[Tensor, Norm]:
    """RMSNorm of ``x`` (+ ``residual``) in BF16, with Hugging Face's rounding: normalized in FP32, rounded to BF16,
    multiplied by the weight in BF16.  Each row's bits are independent of M."""
    x_MK = _matrix(x_MK, "rms_norm")
    y, rstd, h = _ops.rms_norm(x_MK, weight_K, eps, residual_MK)
    return y, Norm(x_MK if residual_MK is None else h, rstd)


def rms_norm_quantize(x_MK: Tensor, weight_K: Tensor, eps: float, residual_MK: Tensor | None = None) -> tuple[Quantized, Norm]:
    """:func:`rms_norm` then :func:`quantize_rows`, in one kernel and with the same bytes."""
    x_MK = _matrix(x_MK, "rms_norm_quantize")
    q, s, rstd, h = _ops.rms_norm_quantize(x_MK, weight_K, eps, residual_MK)
    return Quantized(q, s), Norm(x_MK if residual_MK is None else h, rstd)


def rms_norm_transposed(norm: Norm, weight_K: Tensor, transposed: str = "block") -> Quantized:
    """:func:`quantize_transposed` of the output that :func:`rms_norm` gave, from what its backward keeps anyway: the same
    bytes, in one kernel and one read."""
    h_MK = _matrix(norm.h, "rms_norm_transposed")
    return Quantized(*_ops.rms_norm_transposed(h_MK, norm.rstd, weight_K, _grouping(transposed)))


def rms_norm_backward(
    dy_MK: Tensor, norm: Norm, weight_K: Tensor, d_residual_MK: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """dx (M, K) BF16, plus the residual stream's own gradient when given, and d_weight (K,) FP32."""
    return _ops.rms_norm_backward(_matrix(dy_MK, "rms_norm_backward"), norm.h, norm.rstd, weight_K, d_residual_MK)


def silu_mul(gate_up_M2I: Tensor) -> Tensor:
    """``silu(gate) * up`` (M, I) in BF16 of the concatenated (M, 2I); silu is rounded to BF16 before the product."""
    return _ops.silu_mul(_matrix(gate_up_M2I, "silu_mul"))


def silu_mul_quantize(gate_up_M2I: Tensor) -> Quantized:
    """:func:`silu_mul` then :func:`quantize_rows`, in one kernel and with the same bytes."""
    return Quantized(*_ops.silu_mul_quantize(_matrix(gate_up_M2I, "silu_mul_quantize")))


def silu_mul_quantize_both(gate_up_M2I: Tensor, transposed: str = "block") -> tuple[Quantized, Quantized]:
    """:func:`silu_mul` then :func:`quantize_both`, in one kernel and with the same bytes."""
    gate_up_M2I = _matrix(gate_up_M2I, "silu_mul_quantize_both")
    q, s, q_t, s_t = _ops.silu_mul_quantize_both(gate_up_M2I, _grouping(transposed))
    return Quantized(q, s), Quantized(q_t, s_t)


def silu_mul_backward(gate_up_M2I: Tensor, dy_MI: Tensor) -> Tensor:
    """Gradient (M, 2I) BF16 of :func:`silu_mul`."""
    return _ops.silu_mul_backward(_matrix(gate_up_M2I, "silu_mul_backward"), _matrix(dy_MI, "silu_mul_backward"))


def silu_mul_backward_quantize(gate_up_M2I: Tensor, dy_MI: Tensor) -> tuple[Quantized, Quantized]:
    """:func:`silu_mul_backward` then :func:`quantize_both` in groups, in one kernel; I must be a multiple of 128."""
    if dy_MI.shape[-1] % BLOCK:
        raise ValueError(
            f"silu_mul_backward_quantize: {dy_MI.shape[-1]} features; groups of gate and up would straddle. Use "
            "silu_mul_backward and quantize_both."
        )
    what = "silu_mul_backward_quantize"
    q, s, q_t, s_t = _ops.silu_mul_backward_quantize(_matrix(gate_up_M2I, what), _matrix(dy_MI, what))
    return Quantized(q, s), Quantized(q_t, s_t)


def bf16_gemm_nt(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    """``a @ b.T`` in BF16 (the lm_head); on a GPU each row's bits are independent of M, unlike cuBLAS."""
    return _ops.bf16_gemm_nt(_matrix(a_MK, "bf16_gemm_nt"), _matrix(b_NK, "bf16_gemm_nt"))
