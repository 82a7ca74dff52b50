"""Per-head RMSNorm of q and k, and rotary embedding: one operator for trainer and rollout.

The kernel reads the fused projection's output once and writes q and k; v is a view of its input::

    n = round(round(x * rstd) * weight)         BF16, rstd = 1 / sqrt(mean(x**2) + eps) per head; Qwen3 only
    out[:D/2] = round(n[:D/2] * cos - n[D/2:] * sin)
    out[D/2:] = round(n[D/2:] * cos + n[:D/2] * sin)

Every product and sum of the rotation is rounded to FP32 by itself (no fused multiply-add).  Of the squares, x[d]**2 +
x[d + D/2]**2 is taken in FP32, and those D/2 numbers are added in FP64, where what the order of additions changes lies
far below the last place of the FP32 result.  A head's bits therefore depend neither on the other tokens, nor on a tile's
layout, nor on the device.

Names: M tokens, N features of the projection, D head_dim, P positions of the table; q heads come first in N, then k
heads, then v heads.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from triton.experimental.gluon import language as gl

from verl.jetrl.fp8.gemm import require_hopper
from verl.jetrl.fp8.kernels import _NATIVE, TOKEN_SIZES, _bf16, _iota, jit, tl
from verl.jetrl.fp8.registration import register

# Types whose frequencies depend on the configuration alone; "dynamic" and "longrope" recompute them from the lengths of
# a batch, so that a token's angle would depend on its neighbours.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
MAX_HEAD_DIM = 256


def rope_table(config: PretrainedConfig, positions: int) -> Tensor:
    """The angles of positions 0 .. ``positions`` - 1 for a Llama, Qwen2 or Qwen3 model.

    Frequencies and scaling are Hugging Face's own; angles are computed in FP64 and cos and sin rounded to FP32 once.

    Returns: FP32 (positions, head_dim) on the CPU: head_dim/2 cosines, then head_dim/2 sines, both times the scaling.
    Raises: ValueError for a rope type outside ``ROPE_TYPES`` or one that rotates a part of the head only.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    rope_type = parameters.get("rope_type")
    if rope_type not in ROPE_TYPES:
        raise ValueError(
            f"rope type {rope_type!r} is not supported: the fork's rotary embedding reads a fixed table of angles, so the "
            f"type must be one of {', '.join(ROPE_TYPES)}. Change rope_parameters in the model's config.json, or run the "
            "BF16 arm, which uses the upstream model."
        )
    # Explicit, because model code is often built under torch.device("meta") or "cuda".
    with torch.device("cpu"):
        rope = LlamaRotaryEmbedding(config, device=torch.device("cpu"))
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if 2 * rope.inv_freq.numel() != head_dim:
            raise ValueError(
                f"rope type {rope_type!r} with {2 * rope.inv_freq.numel()} of {head_dim} head dimensions rotated is not "
                "supported: partial_rotary_factor must be 1"
            )
        angles_PD = torch.arange(positions, dtype=torch.float64)[:, None] * rope.inv_freq.double()
        return (torch.cat((angles_PD.cos(), angles_PD.sin()), -1) * rope.attention_scaling).float()


# --- GPU ------------------------------------------------------------------------------------------------------------

# A tile is ROWS heads of one or several tokens, each as its two halves of DH_PAD columns: 8 values (16 bytes) of each half
# per thread, so that a warp holds whole heads and a sum along a head needs no shared memory.
_WARPS = 4
# Programs of the backward when there are weight gradients: 4 per multiprocessor of an H200.  Fixed, so that the sum over
# their partial gradients is reproducible.
_PROGRAMS = 528


@jit
def _round(x):
    """As kernels._bf16, two values per conversion: alone, a value takes a unit that is four times slower."""
    if _NATIVE:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; shl.b32 $0, t, 16; and.b32 $1, t, 0xffff0000; }",
            "=f,=f,f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return _bf16(x)


@jit
def _angles(positions, cos_sin, m, d, rows, inside, P, D: tl.constexpr):
    """cos and sin of each row's position; NaN where the table does not reach, so that the loss check sees it."""
    p = tl.load(positions + m, mask=rows, other=0).to(tl.int64)
    known = ((p >= 0) & (p < P))[:, None]
    at = p[:, None] * D + d[None, :]
    cos = tl.load(cos_sin + at, mask=inside & known, other=0.0)
    sin = tl.load(cos_sin + at + D // 2, mask=inside & known, other=0.0)
    return tl.where(known, cos, float("nan")), tl.where(known, sin, float("nan"))


@jit
def _inverse_rms(x1, x2, eps, D: tl.constexpr):
    """1 / sqrt(mean(x**2) + eps) per row of two halves; see the module docstring for FP64."""
    total = tl.sum((x1 * x1 + x2 * x2).to(tl.float64), 1)
    mean = tl.div_rn(total.to(tl.float32), D * 1.0)
    return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))[:, None]


@jit
def _weights(q_norm, k_norm, is_q, d, columns):
    """The norm weight of each row: q's or k's."""
    q = tl.load(q_norm + d, mask=columns, other=0.0).to(tl.float32)[None, :]
    k = tl.load(k_norm + d, mask=columns, other=0.0).to(tl.float32)[None, :]
    return tl.where(is_q, q, k)


@jit(do_not_specialize=TOKEN_SIZES)
def _forward_kernel(
    qkv, positions, cos_sin, q_norm, k_norm, q, k, M, P, stride_x, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DH_PAD: tl.constexpr, NORM: tl.constexpr,
    ROWS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    LAYOUT: tl.constexpr = gl.BlockedLayout([1, 8], [256 // DH_PAD, DH_PAD // 8], [WARPS, 1], [1, 0])
    r = tl.program_id(0) * ROWS + _iota(ROWS, gl.SliceLayout(1, LAYOUT))
    d = _iota(DH_PAD, gl.SliceLayout(0, LAYOUT))
    m = r // (HEADS + KV_HEADS)
    h = r - m * (HEADS + KV_HEADS)
    rows = m < M
    columns = d < D // 2
    inside = rows[:, None] & columns[None, :]
    is_q = (h < HEADS)[:, None]
    cos, sin = _angles(positions, cos_sin, m, d, rows, inside, P, D)
    at = (m.to(tl.int64) * stride_x + h * D)[:, None] + d[None, :]
    x1 = tl.load(qkv + at, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(qkv + at + D // 2, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        inverse = _inverse_rms(x1, x2, eps, D)
        x1 = _round(_round(x1 * inverse) * _weights(q_norm, k_norm, is_q, d, columns))
        x2 = _round(_round(x2 * inverse) * _weights(q_norm + D // 2, k_norm + D // 2, is_q, d, columns))
    y1 = _bf16(x1 * cos - x2 * sin).to(tl.bfloat16)
    y2 = _bf16(x2 * cos + x1 * sin).to(tl.bfloat16)
    at_q = ((m.to(tl.int64) * HEADS + h) * D)[:, None] + d[None, :]
    at_k = ((m.to(tl.int64) * KV_HEADS + h - HEADS) * D)[:, None] + d[None, :]
    tl.store(q + at_q, y1, mask=inside & is_q)
    tl.store(q + at_q + D // 2, y2, mask=inside & is_q)
    tl.store(k + at_k, y1, mask=inside & (is_q == 0))
    tl.store(k + at_k + D // 2, y2, mask=inside & (is_q == 0))


@jit
def _load_gradient(dq, dk, dv, at_q, at_k, at_v, inside, is_q, is_k, is_v):
    """Each row's gradient: one of three sources, so two of the three loads read nothing."""
    g = tl.load(dq + at_q, mask=inside & is_q, other=0.0).to(tl.float32)
    g += tl.load(dk + at_k, mask=inside & is_k, other=0.0).to(tl.float32)
    return g + tl.load(dv + at_v, mask=inside & is_v, other=0.0).to(tl.float32)


@jit(do_not_specialize=TOKEN_SIZES)
def _backward_kernel(
    dq, dk, dv, qkv, positions, cos_sin, q_norm, k_norm, d_qkv, d_norm, M, P, stride_x, eps, programs,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DH_PAD: tl.constexpr, NORM: tl.constexpr,
    ROWS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """d_qkv of every head of q, k and v, and one partial gradient of the two norm weights per program."""
    LAYOUT: tl.constexpr = gl.BlockedLayout([1, 8], [256 // DH_PAD, DH_PAD // 8], [WARPS, 1], [1, 0])
    ALL: tl.constexpr = HEADS + 2 * KV_HEADS
    r_0 = _iota(ROWS, gl.SliceLayout(1, LAYOUT))
    d = _iota(DH_PAD, gl.SliceLayout(0, LAYOUT))
    columns = d < D // 2
    zero = ((r_0 * 0)[:, None] + (d * 0)[None, :]).to(tl.float32)
    dw_q1, dw_q2, dw_k1, dw_k2 = zero, zero, zero, zero
    for i in range(tl.cdiv(tl.cdiv(M * ALL, ROWS) - tl.program_id(0), programs)):
        r = (tl.program_id(0) + i * programs) * ROWS + r_0
        m = r // ALL
        h = r - m * ALL
        rows = m < M
        inside = rows[:, None] & columns[None, :]
        is_q = (h < HEADS)[:, None]
        is_v = (h >= HEADS + KV_HEADS)[:, None]
        is_k = (is_q | is_v) == 0
        rotated = inside & (is_v == 0)
        m = m.to(tl.int64)
        at_q = ((m * HEADS + h) * D)[:, None] + d[None, :]
        at_k = ((m * KV_HEADS + h - HEADS) * D)[:, None] + d[None, :]
        at_v = ((m * KV_HEADS + h - HEADS - KV_HEADS) * D)[:, None] + d[None, :]
        g1 = _load_gradient(dq, dk, dv, at_q, at_k, at_v, inside, is_q, is_k, is_v)
        g2 = _load_gradient(dq, dk, dv, at_q + D // 2, at_k + D // 2, at_v + D // 2, inside, is_q, is_k, is_v)
        cos, sin = _angles(positions, cos_sin, m, d, rows, rotated, P, D)
        t1 = g1 * cos + g2 * sin
        t2 = g2 * cos - g1 * sin
        if NORM:
            at_x = (m * stride_x + h * D)[:, None] + d[None, :]
            x1 = tl.load(qkv + at_x, mask=rotated, other=0.0).to(tl.float32)
            x2 = tl.load(qkv + at_x + D // 2, mask=rotated, other=0.0).to(tl.float32)
            inverse = _inverse_rms(x1, x2, eps, D)
            x1 *= inverse
            x2 *= inverse
            dw1, dw2 = t1 * _round(x1), t2 * _round(x2)
            dw_q1 += tl.where(is_q, dw1, 0.0)
            dw_q2 += tl.where(is_q, dw2, 0.0)
            dw_k1 += tl.where(is_k, dw1, 0.0)
            dw_k2 += tl.where(is_k, dw2, 0.0)
            t1 *= _weights(q_norm, k_norm, is_q, d, columns)
            t2 *= _weights(q_norm + D // 2, k_norm + D // 2, is_q, d, columns)
            dot = (tl.sum(t1 * x1 + t2 * x2, 1) / D)[:, None]
            t1 = inverse * (t1 - x1 * dot)
            t2 = inverse * (t2 - x2 * dot)
        at = (r.to(tl.int64) * D)[:, None] + d[None, :]  # d_qkv is contiguous
        tl.store(d_qkv + at, _bf16(tl.where(is_v, g1, t1)).to(tl.bfloat16), mask=inside)
        tl.store(d_qkv + at + D // 2, _bf16(tl.where(is_v, g2, t2)).to(tl.bfloat16), mask=inside)
    if NORM:
        at_d = tl.program_id(0) * (2 * D) + d
        tl.store(d_norm + at_d, tl.sum(dw_q1, 0), mask=columns)
        tl.store(d_norm + at_d + D // 2, tl.sum(dw_q2, 0), mask=columns)
        tl.store(d_norm + at_d + D, tl.sum(dw_k1, 0), mask=columns)
        tl.store(d_norm + at_d + D + D // 2, tl.sum(dw_k2, 0), mask=columns)


def _tile(head_dim: int, heads_per_thread: int) -> dict:
    DH_PAD = max(triton.next_power_of_2(head_dim // 2), 8)  # a thread holds 8 columns
    return dict(DH_PAD=DH_PAD, ROWS=heads_per_thread * _WARPS * 256 // DH_PAD, WARPS=_WARPS, num_warps=_WARPS)


class _Cuda:
    """Triton."""

    @staticmethod
    def qk_norm_rope(qkv, positions, cos_sin, q_norm, k_norm, heads, kv_heads, head_dim, eps):
        M = qkv.shape[0]
        q = qkv.new_empty((M, heads, head_dim))
        k = qkv.new_empty((M, kv_heads, head_dim))
        if M:
            tile = _tile(head_dim, 2)
            _forward_kernel[(triton.cdiv(M * (heads + kv_heads), tile["ROWS"]),)](
                qkv, positions, cos_sin, q_norm, k_norm, q, k, M, cos_sin.shape[0], qkv.stride(0), eps,
                HEADS=heads, KV_HEADS=kv_heads, D=head_dim, NORM=q_norm is not None, enable_fp_fusion=False,
                **tile,
            )  # fmt: skip
        return q, k

    @staticmethod
    def qk_norm_rope_backward(dq, dk, dv, qkv, positions, cos_sin, q_norm, k_norm, eps):
        M, heads, head_dim = dq.shape
        kv_heads = dk.shape[1]
        norm = q_norm is not None
        d_qkv = dq.new_empty((M, (heads + 2 * kv_heads) * head_dim))
        # Two heads per thread have twice the loads under way; beside sums of weight gradients registers do not suffice.
        tile = _tile(head_dim, 1 if norm else 2)
        tiles = triton.cdiv(M * (heads + 2 * kv_heads), tile["ROWS"])
        programs = min(tiles, _PROGRAMS) if norm else tiles
        d_norm = torch.empty((programs, 2, head_dim), dtype=torch.float32, device=dq.device) if norm else None
        if M:
            _backward_kernel[(programs,)](
                dq, dk, dv, qkv, positions, cos_sin, q_norm, k_norm, d_qkv, d_norm, M, cos_sin.shape[0],
                qkv.stride(0) if norm else 0, eps, programs,
                HEADS=heads, KV_HEADS=kv_heads, D=head_dim, NORM=norm, **tile,
            )  # fmt: skip
        return d_qkv, d_norm.sum(0) if norm else dq.new_empty(0, dtype=torch.float32)


# --- CPU: the reference ---------------------------------------------------------------------------------------------


def _rows_of(cos_sin_PD: Tensor, positions_M: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin (M, 1, D/2) of each token."""
    P = cos_sin_PD.shape[0]
    known_M = (positions_M >= 0) & (positions_M < P)
    rows_MD = cos_sin_PD[torch.where(known_M, positions_M, 0).long()].masked_fill(~known_M[:, None], torch.nan)
    cos, sin = rows_MD[:, None].chunk(2, -1)
    return cos, sin


def _rstd(x_MHD: Tensor, eps: float) -> Tensor:
    """(M, H, 1) FP32."""
    squares = x_MHD.float().square().chunk(2, -1)
    total = (squares[0] + squares[1]).double().sum(-1, keepdim=True).float()
    # Divide by a tensor: by a Python number torch may multiply with its reciprocal, which is another rounding.
    return 1.0 / torch.sqrt(total / torch.full_like(total, x_MHD.shape[-1]) + eps)


def _rotate(x_MHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x_MHD.float().chunk(2, -1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)


class _Cpu:
    """The reference implementation."""

    @staticmethod
    def qk_norm_rope(qkv, positions, cos_sin, q_norm, k_norm, heads, kv_heads, head_dim, eps):
        angles = _rows_of(cos_sin, positions)
        results = []
        for first, count, weight in ((0, heads, q_norm), (heads, kv_heads, k_norm)):
            x = qkv[:, first * head_dim : (first + count) * head_dim].unflatten(1, (count, head_dim))
            if weight is not None:
                x = (x.float() * _rstd(x, eps)).to(torch.bfloat16) * weight
            results.append(_rotate(x, *angles).to(torch.bfloat16))
        return tuple(results)

    @staticmethod
    def qk_norm_rope_backward(dq, dk, dv, qkv, positions, cos_sin, q_norm, k_norm, eps):
        cos, sin = _rows_of(cos_sin, positions)
        head_dim, first = dq.shape[-1], 0
        d_x, d_norm = [], []
        for g, weight in ((dq, q_norm), (dk, k_norm)):
            count = g.shape[1]
            g = _rotate(g, cos, -sin)
            if weight is not None:
                x = qkv[:, first * head_dim : (first + count) * head_dim].unflatten(1, (count, head_dim))
                rstd = _rstd(x, eps)
                n = x.float() * rstd
                d_norm.append((g * n.to(torch.bfloat16).float()).sum((0, 1)))
                g = g * weight.float()
                g = rstd * (g - n * (g * n).mean(-1, keepdim=True))
            d_x.append(g.to(torch.bfloat16).flatten(1))
            first += count
        d_qkv = torch.cat((*d_x, dv.flatten(1)), 1)
        return d_qkv, torch.stack(d_norm) if d_norm else dq.new_empty(0, dtype=torch.float32)


class _Fake:
    """Shapes, dtypes and strides of the results."""

    @staticmethod
    def qk_norm_rope(qkv, positions, cos_sin, q_norm, k_norm, heads, kv_heads, head_dim, eps):
        M = qkv.shape[0]
        return qkv.new_empty((M, heads, head_dim)), qkv.new_empty((M, kv_heads, head_dim))

    @staticmethod
    def qk_norm_rope_backward(dq, dk, dv, qkv, positions, cos_sin, q_norm, k_norm, eps):
        M, heads, head_dim = dq.shape
        d_norm = dq.new_empty((2, head_dim) if q_norm is not None else 0, dtype=torch.float32)
        return dq.new_empty((M, (heads + 2 * dk.shape[1]) * head_dim)), d_norm


_SCHEMAS = (
    "qk_norm_rope(Tensor qkv, Tensor positions, Tensor cos_sin, Tensor? q_norm, Tensor? k_norm, int heads, int kv_heads, "
    "int head_dim, float eps) -> (Tensor, Tensor)",
    "qk_norm_rope_backward(Tensor dq, Tensor dk, Tensor dv, Tensor? qkv, Tensor positions, Tensor cos_sin, Tensor? q_norm, "
    "Tensor? k_norm, float eps) -> (Tensor, Tensor)",
)

_library = register(_SCHEMAS, _Cpu, _Cuda, _Fake)
_ops = torch.ops.jetrl


# --- the function ---------------------------------------------------------------------------------------------------


def _value(qkv_MN: Tensor, heads: int, kv_heads: int, head_dim: int) -> Tensor:
    return qkv_MN[:, (heads + kv_heads) * head_dim :].unflatten(1, (kv_heads, head_dim))


def _bf16_weight(weight_D: Tensor | None) -> Tensor | None:
    return None if weight_D is None else weight_D.to(torch.bfloat16).contiguous()


class _QkNormRope(torch.autograd.Function):
    """qkv -> q, k, v.  v is an output too, so that one kernel writes the whole gradient of qkv."""

    @staticmethod
    def forward(ctx, qkv, positions, cos_sin, q_norm, k_norm, heads, kv_heads, head_dim, eps):
        ctx.eps, ctx.norm_dtypes = eps, None if q_norm is None else (q_norm.dtype, k_norm.dtype)
        # Cast here, so that an FP32 weight gets its gradient in FP32.
        q_norm, k_norm = _bf16_weight(q_norm), _bf16_weight(k_norm)
        # Without a norm the gradient does not depend on qkv.
        ctx.save_for_backward(None if q_norm is None else qkv, positions, cos_sin, q_norm, k_norm)
        q, k = _ops.qk_norm_rope(qkv, positions, cos_sin, q_norm, k_norm, heads, kv_heads, head_dim, eps)
        return q, k, _value(qkv, heads, kv_heads, head_dim)

    @staticmethod
    def backward(ctx, dq, dk, dv):
        qkv, positions, cos_sin, q_norm, k_norm = ctx.saved_tensors
        dq, dk, dv = (g.to(torch.bfloat16).contiguous() for g in (dq, dk, dv))
        d_qkv, d_norm = _ops.qk_norm_rope_backward(dq, dk, dv, qkv, positions, cos_sin, q_norm, k_norm, ctx.eps)
        d_q_norm, d_k_norm = (None, None)
        if ctx.norm_dtypes is not None:
            d_q_norm, d_k_norm = (d.to(dtype) for d, dtype in zip(d_norm, ctx.norm_dtypes, strict=True))
        return d_qkv, None, None, d_q_norm, d_k_norm, None, None, None, None


def _check(qkv: Tensor, positions: Tensor, cos_sin: Tensor, heads: int, kv_heads: int, head_dim: int) -> None:
    what = "qk_norm_rope"
    if qkv.dim() != 2 or qkv.dtype != torch.bfloat16:
        raise ValueError(f"{what}: want a 2-D BF16 qkv, got {tuple(qkv.shape)} {qkv.dtype}; flatten it to (tokens, features).")
    if head_dim % 2 or not 0 < head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"{what}: head_dim must be even and at most {MAX_HEAD_DIM}, got {head_dim}")
    if qkv.shape[1] != (heads + 2 * kv_heads) * head_dim:
        raise ValueError(
            f"{what}: qkv has {qkv.shape[1]} features, but {heads} q heads and {kv_heads} k and v heads of {head_dim} make "
            f"{(heads + 2 * kv_heads) * head_dim}"
        )
    if positions.dim() != 1 or positions.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{what}: want 1-D int64 or int32 positions, got {tuple(positions.shape)} {positions.dtype}")
    if positions.shape[0] != qkv.shape[0]:
        raise ValueError(f"{what}: {positions.shape[0]} positions for {qkv.shape[0]} tokens")
    if cos_sin.dim() != 2 or cos_sin.shape[1] != head_dim or cos_sin.dtype != torch.float32 or not cos_sin.is_contiguous():
        raise ValueError(
            f"{what}: cos_sin must be rope_table's contiguous FP32 (positions, {head_dim}), got {tuple(cos_sin.shape)} "
            f"{cos_sin.dtype}"
        )
    if not qkv.device == positions.device == cos_sin.device:
        raise ValueError(f"{what}: qkv is on {qkv.device}, positions on {positions.device}, cos_sin on {cos_sin.device}")
    if qkv.device.type not in ("cpu", "cuda", "meta"):
        raise RuntimeError(f"{what}: no operator for device {qkv.device}; use CPU or a Hopper GPU.")
    if qkv.device.type == "cuda":
        require_hopper(qkv.device)


def qk_norm_rope(
    qkv_MN: Tensor,
    positions_M: Tensor,
    cos_sin_PD: Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    q_norm_D: Tensor | None = None,
    k_norm_D: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k, normalized per head (where there are weights) and rotated, and v.

    Args:
        qkv_MN: BF16 (M, (heads + 2 kv_heads) * head_dim): q heads, k heads, v heads.  Rows may have a stride.
        positions_M: int64 or int32 (M,), in any order.  A position outside the table gives NaN: reading it back to raise
        would wait for the GPU.
        cos_sin_PD: :func:`rope_table`, FP32 (P, head_dim), on qkv's device.
        q_norm_D, k_norm_D: (head_dim,), both or neither; rounded to BF16.  eps: of the two norms.
    Returns: q (M, heads, head_dim), k and v (M, kv_heads, head_dim), BF16; v is a view of ``qkv_MN``.
    Raises: ValueError where shapes, dtypes or devices do not fit; RuntimeError on a GPU other than Hopper.
    """
    _check(qkv_MN, positions_M, cos_sin_PD, heads, kv_heads, head_dim)
    norms = (q_norm_D, k_norm_D)
    if (q_norm_D is None) != (k_norm_D is None):
        raise ValueError("qk_norm_rope: give both norm weights, or neither")
    if any(w is not None and w.shape != (head_dim,) for w in norms):
        raise ValueError(f"qk_norm_rope: norm weights must have shape ({head_dim},), got {[tuple(w.shape) for w in norms]}")
    if qkv_MN.stride(1) != 1:
        qkv_MN = qkv_MN.contiguous()
    positions_M, sizes = positions_M.contiguous(), (heads, kv_heads, head_dim)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (qkv_MN, *norms)):
        return _QkNormRope.apply(qkv_MN, positions_M, cos_sin_PD, q_norm_D, k_norm_D, *sizes, eps)
    q_norm_D, k_norm_D = (_bf16_weight(w) for w in norms)
    q, k = _ops.qk_norm_rope(qkv_MN, positions_M, cos_sin_PD, q_norm_D, k_norm_D, *sizes, eps)
    return q, k, _value(qkv_MN, *sizes)
