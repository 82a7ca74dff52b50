"""Triton kernels of the FP8 format: quantizers, and the producers (RMSNorm, SiLU*mul) fused with them.

Every kernel works on tiles of 128 columns and writes up to two FP8 forms of a tile from one read of its source:

=================  ==============================  ====================================================
form               bytes, scales                   used by
=================  ==============================  ====================================================
rows               ``q (M, K)``, ``s (M, G)``      fprop (x) and dgrad (dY); G is ceil(K / 128)
transposed groups  ``q (K, P)``, ``s (K, P/128)``  wgrad: 1x128 groups along tokens
transposed blocks  ``q (K, P)``, ``s (G, P/128)``  wgrad: 128x128 blocks
weight blocks      ``q (N, K)``, ``q_t (K, N)``    fprop and dgrad: one rounding, two layouts
=================  ==============================  ====================================================

P is M rounded up to a multiple of 128: the tokens past M are zeros, which neither change a scale nor add to a product.

Layout of scales per row: ``s[m, g]`` has strides ``(1, align(M, 4))``, the layout in which TMA reads them, so that the
GEMM launches no transposing kernel of its own.

The bytes are those of :mod:`verl.jetrl.fp8.format`.  A maximum is exact whatever its order, so a quantizer's result
does not depend on tile sizes; RMSNorm's sum of squares does, and is always taken by the same code over a whole row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl.jetrl.fp8 import format as ref
from verl.jetrl.fp8.format import BLOCK, FP8, Quantized, groups

_AMAX_FLOOR = tl.constexpr(ref.AMAX_FLOOR)
_FP8_MAX = tl.constexpr(ref.FP8_MAX)
_INF_BITS = tl.constexpr(0x7F800000)
_ABS_MASK = tl.constexpr(0x7FFFFFFF)

# What a tile is read from.
_PLAIN, _SILU_MUL, _FP8_ROWS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# How a form is grouped.
_NONE, _GROUP, _BLOCK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

# Triton's interpreter neither rounds to float8e4nv correctly nor has a fused multiply-add: there the kernels use an
# IEEE division and round by integer arithmetic instead.
NATIVE = not triton.knobs.runtime.interpret


@triton.jit
def _scale(amax_bits):
    """Scales from the bits of max|x|.  As integers NaN > infinity > finite, so a maximum of bits keeps NaN."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    s = tl.div_rn(tl.maximum(amax, _AMAX_FLOOR), _FP8_MAX + tl.zeros_like(amax))
    return tl.where(amax_bits >= _INF_BITS, float("nan"), s)


@triton.jit
def _abs_bits(x):
    return x.to(tl.int32, bitcast=True) & _ABS_MASK


@triton.jit
def _encode(x, s, NATIVE: tl.constexpr):
    """The bytes of round(x / s); ``s`` is broadcast to ``x``, and a NaN scale gives 0x7F everywhere."""
    if NATIVE:
        # A correctly rounded quotient without a division per value: multiply by the correctly rounded reciprocal,
        # then correct by the exact remainder.  Scaling tiny groups by a power of two keeps the remainder a normal
        # number; this order of signs keeps -0.  tests/gpu/test_fp8_kernels.py compares it with IEEE division over
        # every pair of BF16 value and scale.
        up = tl.where(s < 8.673617379884035e-19, 1.8446744073709552e19, 1.0)  # 2**-60, 2**64
        s = s * up
        r = tl.div_rn(1.0 + tl.zeros_like(s), s)
        x = x * up
        y = x * r
        y = tl.fma(-tl.fma(y, s + tl.zeros_like(y), -x), r + tl.zeros_like(y), y)
        return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        y = tl.div_rn(x, s + tl.zeros_like(x))
        bits = y.to(tl.int32, bitcast=True)
        mag = bits & _ABS_MASK
        normal = ((mag + 0x7FFFF + ((mag >> 20) & 1)) >> 20) - (120 << 3)
        # Adding 2**14 rounds to a multiple of 2**-9, the smallest FP8 number, in the FP32 mantissa.
        small = (mag.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.minimum(tl.where(mag < 0x3C800000, small, normal), 0x7E)
        code = tl.where(mag > _INF_BITS, 0x7F, code | ((bits >> 24) & 0x80))
        return code.to(tl.uint8)


@triton.jit
def _bf16(x, NATIVE: tl.constexpr):
    """Round FP32 values to BF16 and back."""
    if NATIVE:
        return x.to(tl.bfloat16).to(tl.float32)
    else:  # the interpreter truncates
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return tl.where((bits & _ABS_MASK) > _INF_BITS, bits, rounded).to(tl.float32, bitcast=True)


@triton.jit
def _sigmoid(x):
    return tl.div_rn(1.0 + tl.zeros_like(x), 1.0 + tl.exp(-x))


@triton.jit
def _write_tile(
    x, q, s, q_t, s_t, m, k, m_block, k_block, M, K, M_T, stride_s, stride_st_k, stride_st_m,
    ROWS: tl.constexpr, TRANSPOSED: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Quantize one tile ``x`` (BLOCK_M, 128), zero outside (M, K), into the forms asked for."""
    bits = _abs_bits(x)
    if ROWS != _NONE or TRANSPOSED == _BLOCK:
        row_amax = tl.max(bits, 1)
    if ROWS == _BLOCK or TRANSPOSED == _BLOCK:
        block_s = _scale(tl.max(row_amax, 0))
        tl.store(s_t + k_block * stride_st_k + m_block * stride_st_m, block_s)
    inside = (m[:, None] < M) & (k[None, :] < K)
    at = m[:, None].to(tl.int64) * K + k[None, :]
    if ROWS == _GROUP:
        s_m = _scale(row_amax)
        tl.store(s + k_block * stride_s + m, s_m, mask=m < M)
        tl.store(q + at, _encode(x, s_m[:, None], NATIVE), mask=inside)
    if ROWS == _BLOCK:
        byte = _encode(x, block_s, NATIVE)
        tl.store(q + at, byte, mask=inside)
    if TRANSPOSED != _NONE:
        if TRANSPOSED == _GROUP:
            s_k = _scale(tl.max(bits, 0))
            tl.store(s_t + k * stride_st_k + m_block * stride_st_m, s_k, mask=k < K)
            byte = _encode(x, s_k[None, :], NATIVE)
        elif ROWS != _BLOCK:
            byte = _encode(x, block_s, NATIVE)
        at_t = k[:, None].to(tl.int64) * M_T + m[None, :]
        tl.store(q_t + at_t, tl.trans(byte), mask=(k[:, None] < K) & (m[None, :] < M_T))


@triton.jit
def _silu_mul_tile(gate_up, at, inside, I, NATIVE: tl.constexpr):
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + I, mask=inside, other=0.0).to(tl.float32)
    return _bf16(_bf16(gate * _sigmoid(gate), NATIVE) * up, NATIVE)


@triton.jit
def _silu_mul_kernel(gate_up, y, M, I, BLOCK_M: tl.constexpr, NATIVE: tl.constexpr):
    i_blocks = (I + 127) // 128
    m = (tl.program_id(0) // i_blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    i = (tl.program_id(0) % i_blocks) * 128 + tl.arange(0, 128)
    inside = (m[:, None] < M) & (i[None, :] < I)
    row = m[:, None].to(tl.int64) * I
    tile = _silu_mul_tile(gate_up, 2 * row + i[None, :], inside, I, NATIVE)
    tl.store(y + row + i[None, :], tile.to(tl.bfloat16), mask=inside)


@triton.jit
def _quantize_kernel(
    x, x_s, q, s, q_t, s_t, M, K, M_T, stride_x, stride_xs, stride_s, stride_st_k, stride_st_m,
    SOURCE: tl.constexpr, ROWS: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK_M: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    k_blocks = (K + 127) // 128
    m_block = tl.program_id(0) // k_blocks
    k_block = tl.program_id(0) % k_blocks
    m = m_block * BLOCK_M + tl.arange(0, BLOCK_M)
    k = k_block * 128 + tl.arange(0, 128)
    inside = (m[:, None] < M) & (k[None, :] < K)
    at = m[:, None].to(tl.int64) * stride_x + k[None, :]
    if SOURCE == _PLAIN:
        tile = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    elif SOURCE == _SILU_MUL:
        tile = _silu_mul_tile(x, at, inside, K, NATIVE)
    else:
        byte = tl.load(x + at, mask=inside, other=0)
        scale = tl.load(x_s + k_block * stride_xs + m, mask=m < M, other=0.0)
        tile = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale[:, None]
    _write_tile(
        tile, q, s, q_t, s_t, m, k, m_block, k_block, M, K, M_T, stride_s, stride_st_k, stride_st_m,
        ROWS, TRANSPOSED, NATIVE,
    )  # fmt: skip


@triton.jit
def _silu_mul_backward_kernel(
    gu, dy, d_gu, q, s, q_t, s_t, M, I, M_T, stride_s, stride_st_k, stride_st_m,
    FP8_OUT: tl.constexpr, BLOCK_M: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Gradients of gate and up, as BF16 ``(M, 2I)`` or as FP8 rows and transposed groups of it.  I % 128 == 0."""
    i_blocks = I // 128 if FP8_OUT else (I + 127) // 128
    m_block = tl.program_id(0) // i_blocks
    i_block = tl.program_id(0) % i_blocks
    m = m_block * BLOCK_M + tl.arange(0, BLOCK_M)
    i = i_block * 128 + tl.arange(0, 128)
    inside = (m[:, None] < M) & (i[None, :] < I)
    at = m[:, None].to(tl.int64) * (2 * I) + i[None, :]
    gate = tl.load(gu + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gu + at + I, mask=inside, other=0.0).to(tl.float32)
    dy_tile = tl.load(dy + m[:, None].to(tl.int64) * I + i[None, :], mask=inside, other=0.0).to(tl.float32)
    sigmoid = _sigmoid(gate)
    d_up = _bf16(dy_tile * _bf16(gate * sigmoid, NATIVE), NATIVE)
    d_gate = _bf16(_bf16(dy_tile * up, NATIVE) * (sigmoid * (1.0 + gate * (1.0 - sigmoid))), NATIVE)
    if FP8_OUT:
        _write_tile(
            d_gate, q, s, q_t, s_t, m, i, m_block, i_block, M, 2 * I, M_T, stride_s, stride_st_k, stride_st_m,
            _GROUP, _GROUP, NATIVE,
        )  # fmt: skip
        _write_tile(
            d_up, q, s, q_t, s_t, m, i + I, m_block, i_block + i_blocks, M, 2 * I, M_T, stride_s, stride_st_k,
            stride_st_m, _GROUP, _GROUP, NATIVE,
        )  # fmt: skip
    else:
        tl.store(d_gu + at, d_gate.to(tl.bfloat16), mask=inside)
        tl.store(d_gu + at + I, d_up.to(tl.bfloat16), mask=inside)


@triton.jit
def _norm_rows(
    x, residual, h, rstd, m, M, K, eps, RESIDUAL: tl.constexpr, K_PAD: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Residual add and reciprocal RMS of whole rows ``m``: the only place where a sum of squares is taken."""
    k = tl.arange(0, K_PAD)
    inside = (m[:, None] < M) & (k[None, :] < K)
    at = m[:, None].to(tl.int64) * K + k[None, :]
    row = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        row = _bf16(row + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32), NATIVE)
        tl.store(h + at, row.to(tl.bfloat16), mask=inside)
    mean = tl.sum(row * row, 1)
    mean = tl.div_rn(mean, tl.zeros_like(mean) + K)
    inverse = tl.div_rn(1.0 + tl.zeros_like(mean), tl.sqrt_rn(mean + eps))
    tl.store(rstd + m, inverse, mask=m < M)
    return row, inverse


@triton.jit
def _normalize(row, inverse, weight, NATIVE: tl.constexpr):
    """Hugging Face's rounding: normalize in FP32, round to BF16, multiply by the weight, round to BF16."""
    return _bf16(_bf16(row * inverse, NATIVE) * weight, NATIVE)


@triton.jit
def _rms_norm_rows_kernel(
    x, residual, h, rstd, weight, y, q, s, M, K, stride_s, eps,
    RESIDUAL: tl.constexpr, BF16_OUT: tl.constexpr, FP8_OUT: tl.constexpr, K_PAD: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One row: RMSNorm to FP8 rows, to BF16, or to both."""
    m = tl.program_id(0) + tl.arange(0, 1)
    row, inverse = _norm_rows(x, residual, h, rstd, m, M, K, eps, RESIDUAL, K_PAD, NATIVE)
    k = tl.arange(0, K_PAD)
    w = tl.load(weight + k, mask=k < K, other=0.0).to(tl.float32)
    out = _normalize(row, inverse[:, None], w[None, :], NATIVE)
    at = m[:, None].to(tl.int64) * K + k[None, :]
    if BF16_OUT:
        tl.store(y + at, out.to(tl.bfloat16), mask=k[None, :] < K)
    if FP8_OUT:
        G_PAD: tl.constexpr = K_PAD // 128
        grouped = tl.reshape(out, (G_PAD, 128))
        s_g = _scale(tl.max(_abs_bits(grouped), 1))
        g = tl.arange(0, G_PAD)
        tl.store(s + g * stride_s + tl.program_id(0), s_g, mask=g < (K + 127) // 128)
        k_2d = g[:, None] * 128 + tl.arange(0, 128)[None, :]
        byte = _encode(grouped, s_g[:, None], NATIVE)
        tl.store(q + tl.program_id(0).to(tl.int64) * K + k_2d, byte, mask=k_2d < K)


@triton.jit
def _rms_norm_tiles_kernel(
    x, residual, h, rstd, weight, q, s, q_t, s_t, ready, M, K, M_T, stride_s, stride_st_k, stride_st_m, eps,
    RESIDUAL: tl.constexpr, TRANSPOSED: tl.constexpr, K_PAD: tl.constexpr, ROWS_PER_PROGRAM: tl.constexpr,
    AHEAD: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """RMSNorm to FP8 rows and a transposed form.

    A 128x128 tile needs its rows' statistics, and those need whole rows, which do not fit on one multiprocessor.  So
    programs come in two kinds, in one launch: row programs take the statistics of a stripe of 128 tokens, tile
    programs quantize it and find its BF16 values still in the L2 cache.  Programs start in order, and a stripe's row
    programs come AHEAD stripes before its tile programs, which wait on the stripe's counter.
    """
    row_programs: tl.constexpr = 128 // ROWS_PER_PROGRAM
    k_blocks = (K + 127) // 128
    per_stripe = row_programs + k_blocks
    stripe = tl.program_id(0) // per_stripe
    part = tl.program_id(0) % per_stripe
    stripes = M_T // 128
    if part < row_programs:
        if stripe < stripes:
            m = stripe * 128 + part * ROWS_PER_PROGRAM + tl.arange(0, ROWS_PER_PROGRAM)
            _norm_rows(x, residual, h, rstd, m, M, K, eps, RESIDUAL, K_PAD, NATIVE)
            tl.debug_barrier()
            tl.atomic_add(ready + stripe, 1, sem="release")
    elif stripe >= AHEAD:
        m_block = stripe - AHEAD
        k_block = part - row_programs
        while tl.atomic_add(ready + m_block, 0, sem="acquire") < row_programs:
            pass
        tl.debug_barrier()
        m = m_block * 128 + tl.arange(0, 128)
        k = k_block * 128 + tl.arange(0, 128)
        inside = (m[:, None] < M) & (k[None, :] < K)
        at = m[:, None].to(tl.int64) * K + k[None, :]
        source = h if RESIDUAL else x
        row = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(rstd + m, mask=m < M, other=0.0)
        w = tl.load(weight + k, mask=k < K, other=0.0).to(tl.float32)
        tile = _normalize(row, inverse[:, None], w[None, :], NATIVE)
        _write_tile(
            tile, q, s, q_t, s_t, m, k, m_block, k_block, M, K, M_T, stride_s, stride_st_k, stride_st_m,
            _GROUP, TRANSPOSED, NATIVE,
        )  # fmt: skip


@triton.jit
def _rms_norm_backward_kernel(
    dy, h, rstd, weight, d_residual, dx, d_weight, M, K, programs,
    RESIDUAL: tl.constexpr, K_PAD: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """dx of every row (plus the residual stream's own gradient), and one partial d_weight per program."""
    k = tl.arange(0, K_PAD)
    inside = k < K
    w = tl.load(weight + k, mask=inside, other=0.0).to(tl.float32)
    dw = tl.zeros((K_PAD,), tl.float32)
    for i in range(tl.cdiv(M - tl.program_id(0), programs)):
        m = tl.program_id(0) + i * programs
        at = m.to(tl.int64) * K + k
        g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(rstd + m)
        x_hat = tl.load(h + at, mask=inside, other=0.0).to(tl.float32) * inverse
        dw += g * _bf16(x_hat, NATIVE)
        g = _bf16(g * w, NATIVE)
        out = inverse * (g - x_hat * (tl.sum(g * x_hat, 0) / K))
        if RESIDUAL:
            out = _bf16(out, NATIVE) + tl.load(d_residual + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + at, out.to(tl.bfloat16), mask=inside)
    tl.store(d_weight + tl.program_id(0) * K + k, dw, mask=inside)


@triton.jit
def _transpose_kernel(q, q_t, R, C, TILE: tl.constexpr):
    r = tl.program_id(0) * TILE + tl.arange(0, TILE)
    c = tl.program_id(1) * TILE + tl.arange(0, TILE)
    tile = tl.load(q + r[:, None].to(tl.int64) * C + c[None, :], mask=(r[:, None] < R) & (c[None, :] < C), other=0)
    at_t = c[:, None].to(tl.int64) * R + r[None, :]
    tl.store(q_t + at_t, tl.trans(tile), mask=(c[:, None] < C) & (r[None, :] < R))


# --- launchers: allocate the outputs and pick tile sizes ------------------------------------------------------------


def padded(tokens: int) -> int:
    """Tokens rounded up to a multiple of 128: the reduction length of the weight gradient."""
    return groups(tokens) * BLOCK


def empty_rows(M: int, K: int, device: torch.device) -> Quantized:
    """Uninitialized row form: q (M, K), s (M, G) with strides (1, align(M, 4))."""
    s = torch.empty((groups(K), -(-M // 4) * 4), dtype=torch.float32, device=device)
    return Quantized(torch.empty((M, K), dtype=FP8, device=device), s.t()[:M])


def empty_transposed(M: int, K: int, device: torch.device, blocks: bool) -> Quantized:
    """Uninitialized transposed form of (M, K): q (K, P), s (K, P/128) column-major, or (G, P/128) for blocks."""
    P = padded(M)
    q_t = torch.empty((K, P), dtype=FP8, device=device)
    if blocks:
        return Quantized(q_t, torch.empty((groups(K), P // BLOCK), dtype=torch.float32, device=device))
    s = torch.empty((P // BLOCK, -(-K // 4) * 4), dtype=torch.float32, device=device)
    return Quantized(q_t, s.t()[:K])


def _bytes(q: Tensor) -> Tensor:
    return q.view(torch.uint8)


def _row_tile(M: int) -> tuple[int, int]:
    """BLOCK_M and warps of a kernel that writes rows only.  Speed only: the bytes do not depend on it."""
    if M <= 64:
        return 4, 1
    return (16, 2) if M <= 1024 else (32, 4)


def _launch(x: Tensor, x_s: Tensor | None, source: tl.constexpr, M: int, K: int, rows, transposed, blocks: bool):
    """Quantize a source of logical shape (M, K) into ``rows`` and ``transposed`` (either may be None)."""
    if M == 0 or K == 0:
        return
    block_m, warps = _row_tile(M) if transposed is None else (BLOCK, 8)
    none = x if rows is None or transposed is None else None
    q, s = rows if rows is not None else (none, none)
    q_t, s_t = transposed if transposed is not None else (none, none)
    mode_t = _NONE if transposed is None else (_BLOCK if blocks else _GROUP)
    _quantize_kernel[(triton.cdiv(M, block_m) * groups(K),)](
        _bytes(x) if source == _FP8_ROWS else x,
        x_s,
        _bytes(q) if rows is not None else q,
        s,
        _bytes(q_t) if transposed is not None else q_t,
        s_t,
        M,
        K,
        padded(M),
        x.stride(0),
        x_s.stride(1) if x_s is not None else 0,
        s.stride(1) if rows is not None else 0,
        s_t.stride(0) if transposed is not None else 0,
        s_t.stride(1) if transposed is not None else 0,
        SOURCE=source,
        ROWS=_GROUP if rows is not None else _NONE,
        TRANSPOSED=mode_t,
        BLOCK_M=block_m,
        NATIVE=NATIVE,
        num_warps=warps,
    )


def quantize(x_MK: Tensor, rows: bool, transposed: str | None) -> tuple[Quantized | None, Quantized | None]:
    """Row form and/or transposed form (``"group"`` or ``"block"``) of a 2-D tensor, in one read of it."""
    M, K = x_MK.shape
    out = empty_rows(M, K, x_MK.device) if rows else None
    out_t = empty_transposed(M, K, x_MK.device, transposed == "block") if transposed else None
    _launch(x_MK, None, _PLAIN, M, K, out, out_t, transposed == "block")
    return out, out_t


def regroup(x: Quantized, transposed: str) -> Quantized:
    """The transposed form from saved FP8 rows: a second rounding, kept as an ablation."""
    M, K = x.q.shape
    out_t = empty_transposed(M, K, x.q.device, transposed == "block")
    _launch(x.q, x.s, _FP8_ROWS, M, K, None, out_t, transposed == "block")
    return out_t


def silu_mul(gate_up_M2I: Tensor, rows: bool, transposed: str | None) -> tuple[Quantized | None, Quantized | None]:
    """``silu(gate) * up`` of (M, 2I), rounded to BF16 as two BF16 operations would, then quantized."""
    M, I = gate_up_M2I.shape[0], gate_up_M2I.shape[1] // 2
    out = empty_rows(M, I, gate_up_M2I.device) if rows else None
    out_t = empty_transposed(M, I, gate_up_M2I.device, transposed == "block") if transposed else None
    _launch(gate_up_M2I, None, _SILU_MUL, M, I, out, out_t, transposed == "block")
    return out, out_t


def silu_mul_bf16(gate_up_M2I: Tensor) -> Tensor:
    """``silu(gate) * up`` in BF16 (M, I)."""
    M, I = gate_up_M2I.shape[0], gate_up_M2I.shape[1] // 2
    y = torch.empty((M, I), dtype=torch.bfloat16, device=gate_up_M2I.device)
    if M and I:
        block_m, warps = _row_tile(M)
        _silu_mul_kernel[(triton.cdiv(M, block_m) * groups(I),)](
            gate_up_M2I, y, M, I, BLOCK_M=block_m, NATIVE=NATIVE, num_warps=warps
        )
    return y


def quantize_weight(w_NK: Tensor, with_transposed: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """q (N, K), s (N/128, K/128) and, on request, the transposed bytes (K, N); the transposed scales are ``s.t()``."""
    N, K = w_NK.shape
    q = torch.empty((N, K), dtype=FP8, device=w_NK.device)
    s = torch.empty((groups(N), groups(K)), dtype=torch.float32, device=w_NK.device)
    q_t = torch.empty((K, N), dtype=FP8, device=w_NK.device) if with_transposed else None
    if N and K:
        _quantize_kernel[(groups(N) * groups(K),)](
            w_NK, None, _bytes(q), s, _bytes(q_t) if with_transposed else q, s, N, K, N, w_NK.stride(0), 0, 0,
            s.stride(1), s.stride(0),
            SOURCE=_PLAIN, ROWS=_BLOCK, TRANSPOSED=_BLOCK if with_transposed else _NONE, BLOCK_M=BLOCK, NATIVE=NATIVE,
            num_warps=8,
        )  # fmt: skip
    return q, s, q_t


def transpose_bytes(q_RC: Tensor) -> Tensor:
    """(R, C) FP8 to (C, R) FP8, bytes unchanged."""
    R, C = q_RC.shape
    q_t = torch.empty((C, R), dtype=FP8, device=q_RC.device)
    if R and C:
        _transpose_kernel[(triton.cdiv(R, 64), triton.cdiv(C, 64))](_bytes(q_RC), _bytes(q_t), R, C, TILE=64)
    return q_t


def silu_mul_backward(gate_up_M2I: Tensor, dy_MI: Tensor) -> Tensor:
    """BF16 gradient (M, 2I) of gate and up."""
    M, I = dy_MI.shape
    d_gu = torch.empty_like(gate_up_M2I)
    if M and I:
        _silu_mul_backward_kernel[(triton.cdiv(M, 32) * groups(I),)](
            gate_up_M2I, dy_MI, d_gu, None, None, None, None, M, I, 0, 0, 0, 0,
            FP8_OUT=False, BLOCK_M=32, NATIVE=NATIVE, num_warps=4,
        )  # fmt: skip
    return d_gu


def silu_mul_backward_quantize(gate_up_M2I: Tensor, dy_MI: Tensor) -> tuple[Quantized, Quantized]:
    """The same gradient as FP8 rows and transposed groups; its BF16 form never reaches memory.  I % 128 == 0."""
    M, I = dy_MI.shape
    out = empty_rows(M, 2 * I, dy_MI.device)
    out_t = empty_transposed(M, 2 * I, dy_MI.device, blocks=False)
    if M and I:
        _silu_mul_backward_kernel[(groups(M) * (I // BLOCK),)](
            gate_up_M2I, dy_MI, None, _bytes(out.q), out.s, _bytes(out_t.q), out_t.s, M, I, padded(M),
            out.s.stride(1), out_t.s.stride(0), out_t.s.stride(1),
            FP8_OUT=True, BLOCK_M=BLOCK, NATIVE=NATIVE, num_warps=8,
        )  # fmt: skip
    return out, out_t


NORM_WARPS = 8  # the same in every kernel that takes a sum of squares: its order is part of the result
_AHEAD = 4


def rms_norm(
    x_MK: Tensor,
    weight_K: Tensor,
    eps: float,
    residual_MK: Tensor | None,
    fp8: bool,
    bf16: bool,
    transposed: str | None,
) -> tuple[Tensor, Tensor, Tensor | None, Quantized | None, Quantized | None]:
    """RMSNorm of ``x`` (+ ``residual``): h (what was normalized), rstd (M,) FP32, y BF16, row form, transposed form.

    ``transposed`` asks for both FP8 forms at once and excludes ``bf16``.
    """
    M, K = x_MK.shape
    device = x_MK.device
    h = torch.empty_like(x_MK) if residual_MK is not None else x_MK
    rstd = torch.empty((M,), dtype=torch.float32, device=device)
    y = torch.empty_like(x_MK) if bf16 else None
    out = empty_rows(M, K, device) if fp8 else None
    out_t = empty_transposed(M, K, device, transposed == "block") if transposed else None
    K_PAD = max(triton.next_power_of_2(K), BLOCK)
    if M == 0:
        return h, rstd, y, out, out_t
    q, s = (_bytes(out.q), out.s) if fp8 else (None, None)
    if out_t is None:
        _rms_norm_rows_kernel[(M,)](
            x_MK, residual_MK, h, rstd, weight_K, y, q, s, M, K, s.stride(1) if fp8 else 0, eps,
            RESIDUAL=residual_MK is not None, BF16_OUT=bf16, FP8_OUT=fp8, K_PAD=K_PAD, NATIVE=NATIVE,
            num_warps=NORM_WARPS,
        )  # fmt: skip
        return h, rstd, y, out, out_t
    rows = max(1, min(8, 32768 // K_PAD))
    ready = torch.zeros((groups(M),), dtype=torch.int32, device=device)
    per_stripe = BLOCK // rows + groups(K)
    _rms_norm_tiles_kernel[((groups(M) + _AHEAD) * per_stripe,)](
        x_MK, residual_MK, h, rstd, weight_K, q, s, _bytes(out_t.q), out_t.s, ready, M, K, padded(M),
        s.stride(1), out_t.s.stride(0), out_t.s.stride(1), eps,
        RESIDUAL=residual_MK is not None, TRANSPOSED=_BLOCK if transposed == "block" else _GROUP, K_PAD=K_PAD,
        ROWS_PER_PROGRAM=rows, AHEAD=_AHEAD, NATIVE=NATIVE, num_warps=NORM_WARPS,
    )  # fmt: skip
    return h, rstd, y, out, out_t


def rms_norm_backward(
    dy_MK: Tensor, h_MK: Tensor, rstd_M: Tensor, weight_K: Tensor, d_residual_MK: Tensor | None
) -> tuple[Tensor, Tensor]:
    """dx (M, K) BF16, with ``d_residual`` added when given, and d_weight (K,) FP32."""
    M, K = dy_MK.shape
    dx = torch.empty_like(dy_MK)
    programs = min(M, 1056)  # 8 per multiprocessor of an H200; fixed, so that d_weight is reproducible
    partial = torch.empty((programs, K), dtype=torch.float32, device=dy_MK.device)
    if M:
        _rms_norm_backward_kernel[(programs,)](
            dy_MK, h_MK, rstd_M, weight_K, d_residual_MK, dx, partial, M, K, programs,
            RESIDUAL=d_residual_MK is not None, K_PAD=max(triton.next_power_of_2(K), BLOCK), NATIVE=NATIVE,
            num_warps=NORM_WARPS,
        )  # fmt: skip
    return dx, partial.sum(0)
