"""GPU kernels of the FP8 format: quantizers, and the producers (RMSNorm, SiLU*mul) fused with them.

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

The kernels are written in Gluon, Triton's language with explicit layouts: a tile is transposed as BF16, by matrix loads
from shared memory, and then quantized along its other axis.  (Triton's own choice of layouts transposed bytes one by
one and ran at a third to a half of the bandwidth.)  Under ``TRITON_INTERPRET=1`` the same source runs as plain Triton
on the CPU.

The bytes are those of :mod:`verl.jetrl.fp8.format`.  A maximum is exact whatever its order, so a quantizer's result
does not depend on tile sizes; RMSNorm's sum of squares does, and is always taken by the same code over a whole row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from verl.jetrl.fp8 import format as ref
from verl.jetrl.fp8.format import BLOCK, FP8, Quantized, groups

# Triton's interpreter knows no layouts, neither rounds to float8e4nv correctly nor to BF16, and has no fused
# multiply-add: there the kernels use an IEEE division and round by integer arithmetic instead.
NATIVE = not triton.knobs.runtime.interpret
if NATIVE:
    tl, jit = gl, gluon.jit

    @gluon.jit
    def _iota(n: gl.constexpr, layout: gl.constexpr):
        return gl.arange(0, n, layout=layout)

    @gluon.jit
    def _relayout(x, layout: gl.constexpr):
        return gl.convert_layout(x, layout)
else:
    tl, jit = triton.language, triton.jit

    @triton.jit
    def _iota(n: tl.constexpr, layout: tl.constexpr):
        return tl.arange(0, n)

    @triton.jit
    def _relayout(x, layout: tl.constexpr):
        return x


# Arguments that follow from the number of tokens.  Triton would compile a kernel of its own for those that 16 divides, and one
# for 1: seconds in the midst of a run, each step, for loads and stores that are as wide without it (rstd of two rows is not).
TOKEN_SIZES = ["M", "stride_s", "stride_xs", "stride_st_k", "stride_st_m", "programs"]

_NATIVE = tl.constexpr(NATIVE)
assert (ref.AMAX_FLOOR, ref.FP8_MAX) == (2.0**-80, 448.0)  # written as bits into _scale
_AMAX_FLOOR = tl.constexpr(ref.AMAX_FLOOR)
_FP8_MAX = tl.constexpr(ref.FP8_MAX)
_PROPAGATE_NAN = tl.constexpr(triton.language.PropagateNan.ALL)
_INF_BITS = tl.constexpr(0x7F800000)
_ABS_MASK = tl.constexpr(0x7FFFFFFF)

# What a tile is read from.
_PLAIN, _SILU_MUL, _RMS_NORM, _FP8_ROWS, _FP32 = map(tl.constexpr, range(5))
# How a form is grouped.
_NONE, _GROUP, _BLOCK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

# A 128x128 tile is held in four slices of 32 columns: coalesced along columns for reading and for rows, and along
# tokens for the transposed form.  A tile on 8 warps takes 80 registers per thread, so that three fit on a multiprocessor;
# the two tiles of SiLU's backward take 120, and no configuration with more warps ran faster.
_SLICE = tl.constexpr(32)
_TILE = dict(WARPS=8, num_warps=8, maxnreg=80)
_TWO_TILES = dict(WARPS=8, num_warps=8, maxnreg=128)
# How many programs ahead a tile is prefetched: one per multiprocessor of an H200.  It gains 5% where a tile is read and
# quantized only; twice as far ahead it loses, and so it does in SiLU's kernels (at 132) and in RMSNorm's (at 264).
_PREFETCH = tl.constexpr(132)


@jit
def _float(x):
    """FP32 of BF16, one instruction per value; other types are converted."""
    if _NATIVE and x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=&f,=f,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    elif x.dtype == tl.bfloat16:  # the interpreter converts subnormal values wrongly
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@jit
def _round(x):
    """BF16 of FP32, two values to an instruction."""
    if _NATIVE:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return _bf16(x).to(tl.bfloat16)


@jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=_PROPAGATE_NAN)


@jit
def _amax(x, axis: tl.constexpr):
    """max|x| along an axis; NaN if there is one."""
    x = tl.abs(_float(x))
    if _NATIVE:
        return tl.reduce(x, axis, _larger)
    else:  # as integers NaN > infinity > finite
        return tl.max(x.to(tl.int32, bitcast=True), axis).to(tl.float32, bitcast=True)


@jit
def _abs_max(a, b):
    """max(|a|, |b|) of two BF16 tensors but for its sign, NaN if there is one; two values to an instruction."""
    if _NATIVE:
        return tl.inline_asm_elementwise(
            "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;",
            "=r,r,r",
            [a, b],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        return _larger(tl.abs(a.to(tl.float32)), tl.abs(b.to(tl.float32)))


@jit
def _tile_amax(slices):
    """max|x| along the columns of a tile in four slices."""
    if slices[0].dtype == tl.bfloat16:
        return _amax(_abs_max(_abs_max(slices[0], slices[1]), _abs_max(slices[2], slices[3])), 1)
    else:
        amax = _amax(slices[0], 1)
        for i in tl.static_range(1, 4):
            amax = _larger(amax, _amax(slices[i], 1))
        return amax


@jit
def _scale(amax):
    """max(amax, floor) / 448 as an IEEE division; NaN of NaN and infinity."""
    if _NATIVE:
        # A product with the rounded 1/448, corrected by the exact remainder: the correctly rounded quotient in four
        # instructions.  An infinity's remainder is NaN.
        return tl.inline_asm_elementwise(
            "{ .reg .f32 a, q, e; max.NaN.f32 a, $1, 0f17800000; mul.rn.f32 q, a, 0f3B124925;"
            " fma.rn.f32 e, q, 0fC3E00000, a; fma.rn.f32 $0, e, 0f3B124925, q; }",
            "=f,f",
            [amax],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        s = tl.div_rn(tl.maximum(amax, _AMAX_FLOOR), _FP8_MAX)
        return tl.where(amax < float("inf"), s, float("nan"))


@jit
def _reciprocal(s):
    """1 / s as an unevaluated sum of two FP32 numbers, the second not negative, to 2**-46."""
    if _NATIVE:
        # The approximation is within 1 ulp, so 2 ulp less is below 1 / s, and what is missing is positive: with a
        # negative second part -0 would become +0.
        return tl.inline_asm_elementwise(
            "{ .reg .f32 e, n; .reg .s32 b; rcp.approx.ftz.f32 n, $2; mov.b32 b, n; add.s32 b, b, -2; mov.b32 n, b;"
            " neg.f32 e, $2; fma.rn.f32 e, n, e, 0f3F800000; mul.rn.f32 $1, e, n; mov.f32 $0, n; }",
            "=&f,=&f,f",
            [s],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        return s, s


@jit
def _encode(x, s, high, low):
    """The bytes of round(x / s) where high + low = 1 / s.  A NaN scale gives 0x7F everywhere."""
    if _NATIVE:
        if x.dtype == tl.bfloat16:
            # The quotient to 2**-46 before it is rounded to FP32.  BF16 values under a BF16 maximum come no closer than
            # that to a number where FP8's rounding changes; tests/gpu/test_fp8_kernels.py compares with IEEE division
            # over every pair of BF16 maximum and value.
            x = _float(x)
            y = tl.fma(x, high, x * low)
        else:
            # Any FP32 value: correct the quotient by its exact remainder.  The signs are arranged so that -0 stays -0.
            r = high + low
            y = x * r
            y = tl.fma(tl.fma(y, s, x * -1.0), r * -1.0, y)
        return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = tl.div_rn(x.to(tl.float32), s).to(tl.int32, bitcast=True)
        mag = bits & _ABS_MASK
        normal = ((mag + 0x7FFFF + ((mag >> 20) & 1)) >> 20) - (120 << 3)
        # Adding 2**14 rounds to a multiple of 2**-9, the smallest FP8 number, in the FP32 mantissa.
        small = (mag.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.minimum(tl.where(mag < 0x3C800000, small, normal), 0x7E)
        code = tl.where(mag > _INF_BITS, 0x7F, code | ((bits >> 24) & 0x80))
        return code.to(tl.uint8)


@jit
def _bf16(x):
    """FP32 values rounded to BF16, as FP32."""
    if _NATIVE:
        return x.to(tl.bfloat16).to(tl.float32)
    else:  # the interpreter truncates
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return tl.where((bits & _ABS_MASK) > _INF_BITS, bits, rounded).to(tl.float32, bitcast=True)


@jit
def _times(a, b):
    """The BF16 product of two BF16 tensors, two values to an instruction."""
    if _NATIVE:
        return tl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        return _bf16(a.to(tl.float32) * b.to(tl.float32)).to(tl.bfloat16)


@jit
def _sigmoid(x):
    """Within about 2 ulp of 1 / (1 + exp(-x)); every kernel that needs a sigmoid calls this, so that all agree."""
    if _NATIVE:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 e; ex2.approx.ftz.f32 e, $1; add.ftz.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 $0, e; }",
            "=f,f",
            [x * -1.4426950408889634],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return 1.0 / (1.0 + tl.exp(x * -1.0))


@jit
def _silu_mul(gate_up, at, inside, I):
    """silu(gate) * up, rounded to BF16 after each of the two operations."""
    gate = _float(tl.load(gate_up + at, mask=inside, other=0.0))
    up = tl.load(gate_up + at + I, mask=inside, other=0.0)
    return _times(_round(gate * _sigmoid(gate)), up)


@jit
def _prefetch_tile(x, m_block, k_block, M, K, stride_x, WARPS: tl.constexpr):
    """Ask for a later tile of BF16, so that its reader finds it in the L2 cache: one 128-byte line per thread.

    Tiles past the end are clamped onto the last row.
    """
    if _NATIVE:
        lines: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [WARPS, 1], [1, 0])
        m = tl.minimum(m_block * 128 + _iota(128, gl.SliceLayout(1, lines)), M - 1)
        k = tl.minimum(k_block * 128 + 64 * _iota(2, gl.SliceLayout(0, lines)), K - 1)
        address = (x + m[:, None].to(tl.int64) * stride_x + k[None, :]).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
        )


@jit
def _normalize(row, inverse, weight):
    """Hugging Face's rounding: normalize in FP32, round to BF16, multiply by the weight, round to BF16."""
    return _times(_round(row * inverse), weight)


@jit
def _normalize_tile(row, inverse, weight, m, M):
    """The same of a tile: +0 in rows past M, where 0 times a negative weight would be -0."""
    if _NATIVE:
        zero = tl.where(m < M, -32768, 0).to(tl.int16).to(tl.bfloat16, bitcast=True)  # -0 added changes nothing
        return tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;",
            "=r,r,r,r",
            [_round(row * inverse), weight, zero[:, None]],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        return tl.where(m[:, None] < M, _normalize(row, inverse, weight).to(tl.float32), 0.0).to(tl.bfloat16)


@jit
def _load_tile(x, x_s, weight, at, inside, m, k, M, k_block, K, stride_xs, SOURCE: tl.constexpr):
    if SOURCE == _PLAIN:
        tile = tl.load(x + at, mask=inside, other=0.0)
    elif SOURCE == _FP32:
        tile = _round(tl.load(x + at, mask=inside, other=0.0))
    elif SOURCE == _SILU_MUL:
        tile = _silu_mul(x, at, inside, K)
    elif SOURCE == _RMS_NORM:
        row = _float(tl.load(x + at, mask=inside, other=0.0))
        inverse = tl.load(x_s + m, mask=m < M, other=0.0)[:, None]
        w = tl.load(weight + k, mask=k < K, other=0.0)[None, :]
        tile = _normalize_tile(row, inverse, w, m, M)
    else:
        byte = tl.load(x + at, mask=inside, other=0)
        scale = tl.load(x_s + k_block * stride_xs + m, mask=m < M, other=0.0)
        tile = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale[:, None]
    return tile


@jit
def _load_slices(
    x, x_s, weight, m_block, k_block, M, K, stride_x, stride_xs, SOURCE: tl.constexpr, WARPS: tl.constexpr
):  # fmt: skip
    """A tile in four slices (128, 32), zero outside (M, K)."""
    ROW_LAYOUT: tl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [WARPS, 1], [1, 0])
    m = m_block * 128 + _iota(128, gl.SliceLayout(1, ROW_LAYOUT))
    k = k_block * 128 + _iota(_SLICE, gl.SliceLayout(0, ROW_LAYOUT))
    at = m[:, None].to(tl.int64) * stride_x + k[None, :]
    slices = ()
    for i in tl.static_range(4):
        inside = (m[:, None] < M) & (k[None, :] + i * _SLICE < K)
        slices = slices + (
            _load_tile(x, x_s, weight, at + i * _SLICE, inside, m, k + i * _SLICE, M, k_block, K, stride_xs, SOURCE),
        )
    return slices


@jit
def _write_forms(
    slices, q, s, q_t, s_t, m_block, k_block, M, K, M_T, stride_s, stride_st_k, stride_st_m,
    ROWS: tl.constexpr, TRANSPOSED: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Quantize a tile, four slices (128, 32) that are zero outside (M, K), into the forms asked for."""
    ROW_LAYOUT: tl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [WARPS, 1], [1, 0])
    TOKEN_LAYOUT: tl.constexpr = gl.BlockedLayout([128 // WARPS, 1], [WARPS, 32 // WARPS], [1, WARPS], [0, 1])
    m = m_block * 128 + _iota(128, gl.SliceLayout(1, ROW_LAYOUT))
    k_0 = k_block * 128 + _iota(_SLICE, gl.SliceLayout(0, ROW_LAYOUT))
    row = m[:, None].to(tl.int64) * K
    m_t = m_block * 128 + _iota(128, gl.SliceLayout(1, TOKEN_LAYOUT))
    k_t0 = k_block * 128 + _iota(_SLICE, gl.SliceLayout(0, TOKEN_LAYOUT))
    if ROWS != _NONE or TRANSPOSED == _BLOCK:
        row_amax = _tile_amax(slices)
    if ROWS == _BLOCK or TRANSPOSED == _BLOCK:
        s_b = _scale(_amax(row_amax, 0))
        high_b, low_b = _reciprocal(s_b)
        tl.store(s_t + k_block * stride_st_k + m_block * stride_st_m, s_b)
    if ROWS == _GROUP:
        s_m = _scale(row_amax)
        high_m, low_m = _reciprocal(s_m)
        tl.store(s + k_block * stride_s + m, s_m, mask=m < M)
    for i in tl.static_range(4):
        k = k_0 + i * _SLICE
        inside = (m[:, None] < M) & (k[None, :] < K)
        if ROWS == _GROUP:
            tl.store(q + row + k[None, :], _encode(slices[i], s_m[:, None], high_m[:, None], low_m[:, None]), mask=inside)
        if ROWS == _BLOCK:
            tl.store(q + row + k[None, :], _encode(slices[i], s_b, high_b, low_b), mask=inside)
        if TRANSPOSED != _NONE:
            k_t = k_t0 + i * _SLICE
            tile = _relayout(slices[i], TOKEN_LAYOUT)
            if TRANSPOSED == _GROUP:
                s_k = _scale(_amax(tile, 0))
                tl.store(s_t + k_t * stride_st_k + m_block * stride_st_m, s_k, mask=k_t < K)
                high_k, low_k = _reciprocal(s_k)
                byte = _encode(tile, s_k[None, :], high_k[None, :], low_k[None, :])
            else:
                byte = _encode(tile, s_b, high_b, low_b)
            at_t = k_t[None, :].to(tl.int64) * M_T + m_t[:, None]
            tl.store(q_t + at_t, byte, mask=(k_t[None, :] < K) & (m_t[:, None] < M_T))


@jit(do_not_specialize=TOKEN_SIZES)
def _tiles_kernel(
    x, x_s, weight, q, s, q_t, s_t, M, K, M_T, stride_x, stride_xs, stride_s, stride_st_k, stride_st_m,
    SOURCE: tl.constexpr, ROWS: tl.constexpr, TRANSPOSED: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """One 128x128 tile, into rows or weight blocks and/or a transposed form."""
    program = tl.program_id(0)
    k_blocks = (K + 127) // 128
    m_block = program // k_blocks
    k_block = program % k_blocks
    if SOURCE == _PLAIN:
        later = program + _PREFETCH
        _prefetch_tile(x, later // k_blocks, later % k_blocks, M, K, stride_x, WARPS)
    slices = _load_slices(x, x_s, weight, m_block, k_block, M, K, stride_x, stride_xs, SOURCE, WARPS)
    _write_forms(
        slices, q, s, q_t, s_t, m_block, k_block, M, K, M_T, stride_s, stride_st_k, stride_st_m, ROWS, TRANSPOSED,
        WARPS,
    )  # fmt: skip


@jit(do_not_specialize_on_alignment=["places"])
def _masters_kernel(x, q, s, places, N, K, WARPS: tl.constexpr):
    """One 128x128 tile of one of many FP32 weights (N, K) into weight blocks.

    ``places`` (weights, 3): how far behind x, q and s a weight begins; of x and q in units of 16 elements, so that the
    compiler knows that loads and stores are aligned.
    """
    place = places + tl.program_id(1) * 3
    x += tl.load(place) * 16
    q += tl.load(place + 1) * 16
    s += tl.load(place + 2)
    k_blocks = (K + 127) // 128
    m_block = tl.program_id(0) // k_blocks
    k_block = tl.program_id(0) % k_blocks
    slices = _load_slices(x, None, None, m_block, k_block, N, K, K, 0, _FP32, WARPS)
    _write_forms(slices, q, None, None, s, m_block, k_block, N, K, N, 0, 1, k_blocks, _BLOCK, _NONE, WARPS)


@jit(do_not_specialize=TOKEN_SIZES)
def _rows_kernel(
    x, q, s, M, K, stride_x, stride_s,
    SOURCE: tl.constexpr, BLOCK_M: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """(BLOCK_M, 128) values into FP8 rows."""
    LAYOUT: tl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    k_blocks = (K + 127) // 128
    k_block = tl.program_id(0) % k_blocks
    m = (tl.program_id(0) // k_blocks) * BLOCK_M + _iota(BLOCK_M, gl.SliceLayout(1, LAYOUT))
    k = k_block * 128 + _iota(128, gl.SliceLayout(0, LAYOUT))
    inside = (m[:, None] < M) & (k[None, :] < K)
    at = m[:, None].to(tl.int64) * stride_x + k[None, :]
    tile = _load_tile(x, None, None, at, inside, m, k, M, k_block, K, 0, SOURCE)
    s_m = _scale(_amax(tile, 1))
    tl.store(s + k_block * stride_s + m, s_m, mask=m < M)
    high_m, low_m = _reciprocal(s_m)
    byte = _encode(tile, s_m[:, None], high_m[:, None], low_m[:, None])
    tl.store(q + m[:, None].to(tl.int64) * K + k[None, :], byte, mask=inside)


@jit(do_not_specialize=TOKEN_SIZES)
def _silu_mul_kernel(gate_up, y, M, I, BLOCK_M: tl.constexpr, WARPS: tl.constexpr):
    LAYOUT: tl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    i_blocks = (I + 127) // 128
    m = (tl.program_id(0) // i_blocks) * BLOCK_M + _iota(BLOCK_M, gl.SliceLayout(1, LAYOUT))
    i = (tl.program_id(0) % i_blocks) * 128 + _iota(128, gl.SliceLayout(0, LAYOUT))
    inside = (m[:, None] < M) & (i[None, :] < I)
    row = m[:, None].to(tl.int64) * I
    tl.store(y + row + i[None, :], _silu_mul(gate_up, 2 * row + i[None, :], inside, I), mask=inside)


@jit
def _silu_mul_gradients(gate_up, dy, at, at_dy, inside, I):
    """Gradients of gate and up, rounded to BF16 where BF16 operations would round."""
    gate = _float(tl.load(gate_up + at, mask=inside, other=0.0))
    up = tl.load(gate_up + at + I, mask=inside, other=0.0)
    dy = tl.load(dy + at_dy, mask=inside, other=0.0)
    sigmoid = _sigmoid(gate)
    d_up = _times(dy, _round(gate * sigmoid))
    d_gate = _round(_float(_times(dy, up)) * (sigmoid * (1.0 + gate * (1.0 - sigmoid))))
    return d_gate, d_up


@jit(do_not_specialize=TOKEN_SIZES)
def _silu_mul_backward_kernel(gate_up, dy, d_gate_up, M, I, BLOCK_M: tl.constexpr, WARPS: tl.constexpr):
    LAYOUT: tl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    i_blocks = (I + 127) // 128
    m = (tl.program_id(0) // i_blocks) * BLOCK_M + _iota(BLOCK_M, gl.SliceLayout(1, LAYOUT))
    i = (tl.program_id(0) % i_blocks) * 128 + _iota(128, gl.SliceLayout(0, LAYOUT))
    inside = (m[:, None] < M) & (i[None, :] < I)
    at_dy = m[:, None].to(tl.int64) * I + i[None, :]
    at = m[:, None].to(tl.int64) * (2 * I) + i[None, :]
    d_gate, d_up = _silu_mul_gradients(gate_up, dy, at, at_dy, inside, I)
    tl.store(d_gate_up + at, d_gate, mask=inside)
    tl.store(d_gate_up + at + I, d_up, mask=inside)


@jit(do_not_specialize=TOKEN_SIZES)
def _silu_mul_backward_tiles_kernel(
    gate_up, dy, q, s, q_t, s_t, M, I, M_T, stride_s, stride_st_k, stride_st_m, WARPS: tl.constexpr,
):  # fmt: skip
    """A tile of gate's and one of up's gradient, as FP8 rows and transposed groups.  I % 128 == 0.

    Both from one read of gate, up and dy: up's waits in registers, as BF16, while gate's is quantized.
    """
    ROW_LAYOUT: tl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [WARPS, 1], [1, 0])
    i_blocks = I // 128
    m_block = tl.program_id(0) // i_blocks
    i_block = tl.program_id(0) % i_blocks
    m = m_block * 128 + _iota(128, gl.SliceLayout(1, ROW_LAYOUT))
    i = i_block * 128 + _iota(_SLICE, gl.SliceLayout(0, ROW_LAYOUT))
    at_dy = m[:, None].to(tl.int64) * I + i[None, :]
    at = m[:, None].to(tl.int64) * (2 * I) + i[None, :]
    inside = (m[:, None] < M) & (i[None, :] < I)
    gate, up = (), ()
    for j in tl.static_range(4):
        d_gate, d_up = _silu_mul_gradients(gate_up, dy, at + j * _SLICE, at_dy + j * _SLICE, inside, I)
        gate = gate + (d_gate,)
        up = up + (d_up,)
    _write_forms(
        gate, q, s, q_t, s_t, m_block, i_block, M, 2 * I, M_T, stride_s, stride_st_k, stride_st_m, _GROUP, _GROUP, WARPS,
    )  # fmt: skip
    _write_forms(
        up, q, s, q_t, s_t, m_block, i_block + i_blocks, M, 2 * I, M_T, stride_s, stride_st_k, stride_st_m, _GROUP, _GROUP,
        WARPS,
    )  # fmt: skip


@jit
def _load_rows(x, m, M, K, K_PAD: tl.constexpr, LAYOUT: tl.constexpr):
    """Whole rows ``m`` in BF16; zeros where there are none."""
    k = _iota(K_PAD, gl.SliceLayout(0, LAYOUT))
    inside = (m[:, None] < M) & (k[None, :] < K)
    return tl.load(x + m[:, None].to(tl.int64) * K + k[None, :], mask=inside, other=0.0)


@jit
def _norm_rows(
    x, residual, h, rstd, m, M, K, eps,
    RESIDUAL: tl.constexpr, K_PAD: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """Residual add and reciprocal RMS of loaded rows ``m``: the only place where a sum of squares is taken.

    Its order of additions depends on K_PAD and the warps along K alone, so a row's result is the same in every kernel.
    """
    row = _float(x)
    if RESIDUAL:
        total = _round(row + _float(residual))
        k = _iota(K_PAD, gl.SliceLayout(0, LAYOUT))
        inside = (m[:, None] < M) & (k[None, :] < K)
        tl.store(h + m[:, None].to(tl.int64) * K + k[None, :], total, mask=inside)
        row = _float(total)
    mean = tl.div_rn(tl.sum(row * row, 1), K * 1.0)
    inverse = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    tl.store(rstd + m, inverse, mask=m < M)
    return row, inverse


@jit(do_not_specialize=TOKEN_SIZES)
def _rms_norm_rows_kernel(
    x, residual, h, rstd, weight, y, q, s, M, K, stride_s, eps,
    RESIDUAL: tl.constexpr, BF16_OUT: tl.constexpr, FP8_OUT: tl.constexpr, K_PAD: tl.constexpr,
    ROWS: tl.constexpr, WARPS_K: tl.constexpr,
):  # fmt: skip
    """Whole rows: RMSNorm to FP8 rows, to BF16, to both, or (neither) the residual add and the statistics alone."""
    LAYOUT: tl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8 // WARPS_K, WARPS_K], [1, 0])
    m = tl.program_id(0) * ROWS + _iota(ROWS, gl.SliceLayout(1, LAYOUT))
    k = _iota(K_PAD, gl.SliceLayout(0, LAYOUT))
    w = tl.load(weight + k, mask=k < K, other=0.0)  # asked for before the sums are waited for
    x = _load_rows(x, m, M, K, K_PAD, LAYOUT)
    if RESIDUAL:
        residual = _load_rows(residual, m, M, K, K_PAD, LAYOUT)
    row, inverse = _norm_rows(x, residual, h, rstd, m, M, K, eps, RESIDUAL, K_PAD, LAYOUT)
    out = _normalize(row, inverse[:, None], w[None, :])
    at = m[:, None].to(tl.int64) * K + k[None, :]
    inside = (m[:, None] < M) & (k[None, :] < K)
    if BF16_OUT:
        tl.store(y + at, out, mask=inside)
    if FP8_OUT:
        G_PAD: tl.constexpr = K_PAD // 128
        grouped = tl.reshape(out, (ROWS, G_PAD, 128))
        s_mg = _scale(_amax(grouped, 2))
        high, low = _reciprocal(s_mg)
        byte = _encode(grouped, s_mg[:, :, None], high[:, :, None], low[:, :, None])
        tl.store(q + at, _relayout(tl.reshape(byte, (ROWS, K_PAD)), LAYOUT), mask=inside)
        # One scale to a thread; in the rows' own layout every thread would store all of its row's.
        SCALES: tl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [8, 1], [1, 0])
        s_mg = _relayout(s_mg, SCALES)
        m = tl.program_id(0) * ROWS + _iota(ROWS, gl.SliceLayout(1, SCALES))
        g = _iota(G_PAD, gl.SliceLayout(0, SCALES))
        tl.store(s + g[None, :] * stride_s + m[:, None], s_mg, mask=(m[:, None] < M) & (g[None, :] < (K + 127) // 128))


@jit(do_not_specialize=TOKEN_SIZES)
def _rms_norm_backward_kernel(
    dy, h, rstd, weight, d_residual, dx, d_weight, M, K, programs,
    RESIDUAL: tl.constexpr, K_PAD: tl.constexpr, ROWS: tl.constexpr, WARPS_K: tl.constexpr,
):  # fmt: skip
    """dx of every row (plus the residual stream's own gradient), and one partial d_weight per program."""
    LAYOUT: tl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8 // WARPS_K, WARPS_K], [1, 0])
    k = _iota(K_PAD, gl.SliceLayout(0, LAYOUT))
    w = tl.load(weight + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
    m_0 = _iota(ROWS, gl.SliceLayout(1, LAYOUT))
    dw = (m_0 * 0).to(tl.float32)[:, None] + w * 0.0
    for i in range(tl.cdiv(tl.cdiv(M, ROWS) - tl.program_id(0), programs)):
        m = (tl.program_id(0) + i * programs) * ROWS + m_0
        inside = (m[:, None] < M) & (k[None, :] < K)
        at = m[:, None].to(tl.int64) * K + k[None, :]
        g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(rstd + m, mask=m < M, other=0.0)[:, None]
        x_hat = tl.load(h + at, mask=inside, other=0.0).to(tl.float32) * inverse
        dw += g * _bf16(x_hat)
        g = _bf16(g * w)
        out = inverse * (g - x_hat * (tl.sum(g * x_hat, 1) / K)[:, None])
        if RESIDUAL:
            out = _bf16(out) + tl.load(d_residual + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + at, _bf16(out).to(tl.bfloat16), mask=inside)
    tl.store(d_weight + tl.program_id(0) * K + k, tl.sum(dw, 0), mask=k < K)


@jit
def _transpose_kernel(q, q_t, R, C, WARPS: tl.constexpr):
    ROW_LAYOUT: tl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [WARPS, 1], [1, 0])
    TOKEN_LAYOUT: tl.constexpr = gl.BlockedLayout([128 // WARPS, 1], [WARPS, 32 // WARPS], [1, WARPS], [0, 1])
    r_0 = tl.program_id(0) * 128
    c_0 = tl.program_id(1) * _SLICE
    r = r_0 + _iota(128, gl.SliceLayout(1, ROW_LAYOUT))
    c = c_0 + _iota(_SLICE, gl.SliceLayout(0, ROW_LAYOUT))
    inside = (r[:, None] < R) & (c[None, :] < C)
    tile = _relayout(tl.load(q + r[:, None].to(tl.int64) * C + c[None, :], mask=inside, other=0), TOKEN_LAYOUT)
    r = r_0 + _iota(128, gl.SliceLayout(1, TOKEN_LAYOUT))
    c = c_0 + _iota(_SLICE, gl.SliceLayout(0, TOKEN_LAYOUT))
    tl.store(q_t + c[None, :].to(tl.int64) * R + r[:, None], tile, mask=(c[None, :] < C) & (r[:, None] < R))


@jit
def _widen_kernel(product, target, n, ADD: tl.constexpr, VALUES: tl.constexpr, WARPS: tl.constexpr):
    """BF16 into FP32, or added to it."""
    LAYOUT: tl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    at = tl.program_id(0).to(tl.int64) * VALUES + _iota(VALUES, LAYOUT)
    inside = at < n
    value = _float(tl.load(product + at, mask=inside, other=0.0))
    if ADD:
        value += tl.load(target + at, mask=inside, other=0.0)
    tl.store(target + at, value, mask=inside)


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


BLOCK_WARPS = 8


def _rows_config(M: int) -> dict:
    """Tile of a kernel that writes rows only.  Speed only: the bytes do not depend on it."""
    block_m, warps = (4, 1) if M <= 64 else (16, 2) if M <= 1024 else (32, 4)
    return dict(BLOCK_M=block_m, WARPS=warps, num_warps=warps)


def _launch(
    x: Tensor,
    x_s: Tensor | None,
    weight: Tensor | None,
    source: tl.constexpr,
    M: int,
    K: int,
    rows: Quantized | None,
    transposed: Quantized | None,
    blocks: bool,
) -> None:
    """Quantize a source of logical shape (M, K) into ``rows`` and ``transposed`` (either may be None).

    ``x_s``: the scales of FP8 rows, or rstd of a norm, whose weight is ``weight``.
    """
    if M == 0 or K == 0:
        return
    q, s = (_bytes(rows.q), rows.s) if rows is not None else (None, None)
    if transposed is None:
        config = _rows_config(M)
        _rows_kernel[(triton.cdiv(M, config["BLOCK_M"]) * groups(K),)](
            x, q, s, M, K, x.stride(0), s.stride(1), SOURCE=source, **config
        )
        return
    q_t, s_t = _bytes(transposed.q), transposed.s
    _tiles_kernel[(groups(M) * groups(K),)](
        x, x_s, weight, q, s, q_t, s_t, M, K, padded(M), x.stride(0), x_s.stride(-1) if x_s is not None else 0,
        s.stride(1) if rows is not None else 0, s_t.stride(0), s_t.stride(1),
        SOURCE=source, ROWS=_GROUP if rows is not None else _NONE, TRANSPOSED=_BLOCK if blocks else _GROUP,
        **_TILE,
    )  # fmt: skip


def quantize(x_MK: Tensor, rows: bool, transposed: str | None) -> tuple[Quantized | None, Quantized | None]:
    """Row form and/or transposed form (``"group"`` or ``"block"``) of a 2-D tensor, in one read of it."""
    M, K = x_MK.shape
    out = empty_rows(M, K, x_MK.device) if rows else None
    out_t = empty_transposed(M, K, x_MK.device, transposed == "block") if transposed else None
    _launch(x_MK, None, None, _PLAIN, M, K, out, out_t, transposed == "block")
    return out, out_t


def regroup(x: Quantized, transposed: str) -> Quantized:
    """The transposed form from saved FP8 rows: a second rounding, kept as an ablation."""
    M, K = x.q.shape
    out_t = empty_transposed(M, K, x.q.device, transposed == "block")
    _launch(_bytes(x.q), x.s, None, _FP8_ROWS, M, K, None, out_t, transposed == "block")
    return out_t


def silu_mul(gate_up_M2I: Tensor, rows: bool, transposed: str | None) -> tuple[Quantized | None, Quantized | None]:
    """``silu(gate) * up`` of (M, 2I), rounded to BF16 as two BF16 operations would, then quantized."""
    M, I = gate_up_M2I.shape[0], gate_up_M2I.shape[1] // 2
    out = empty_rows(M, I, gate_up_M2I.device) if rows else None
    out_t = empty_transposed(M, I, gate_up_M2I.device, transposed == "block") if transposed else None
    _launch(gate_up_M2I, None, None, _SILU_MUL, M, I, out, out_t, transposed == "block")
    return out, out_t


def silu_mul_bf16(gate_up_M2I: Tensor) -> Tensor:
    """``silu(gate) * up`` in BF16 (M, I)."""
    M, I = gate_up_M2I.shape[0], gate_up_M2I.shape[1] // 2
    y = torch.empty((M, I), dtype=torch.bfloat16, device=gate_up_M2I.device)
    if M and I:
        config = _rows_config(M)
        grid = (triton.cdiv(M, config["BLOCK_M"]) * groups(I),)
        _silu_mul_kernel[grid](gate_up_M2I, y, M, I, **config)
    return y


def quantize_weight(w_NK: Tensor, with_transposed: bool, out: Quantized | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """q (N, K), s (N/128, K/128) and, on request, the transposed bytes (K, N); the transposed scales are ``s.t()``.

    ``w`` in BF16, or in FP32 and rounded to BF16 on its way; ``out``: where q and s go.
    """
    N, K = w_NK.shape
    q = torch.empty((N, K), dtype=FP8, device=w_NK.device) if out is None else out.q
    s = torch.empty((groups(N), groups(K)), dtype=torch.float32, device=w_NK.device) if out is None else out.s
    q_t = torch.empty((K, N), dtype=FP8, device=w_NK.device) if with_transposed else None
    if N and K:
        _tiles_kernel[(groups(N) * groups(K),)](
            w_NK, None, None, _bytes(q), None, _bytes(q_t) if with_transposed else None, s, N, K, N, w_NK.stride(0), 0, 0,
            s.stride(1), s.stride(0),
            SOURCE=_FP32 if w_NK.dtype == torch.float32 else _PLAIN,
            ROWS=_BLOCK, TRANSPOSED=_BLOCK if with_transposed else _NONE, **_TILE,
        )  # fmt: skip
    return q, s, q_t


def quantize_masters(weights: Sequence[tuple[Tensor, Quantized]]) -> list[tuple[Tensor, Quantized]]:
    """Contiguous FP32 weights (N, K), each into its ``Quantized``, those of one shape in one launch.

    Returns those that it leaves out: of another type, or with rows or addresses that are not aligned to 16 elements.
    """
    shapes: dict[tuple[int, int], list[list[int]]] = {}
    left_out, bases = [], []
    for w_NK, out in weights:
        aligned = w_NK.shape[1] % 16 == 0 and w_NK.data_ptr() % 64 == 0 and out.q.data_ptr() % 16 == 0
        if w_NK.dtype != torch.float32 or not w_NK.is_contiguous() or not aligned:
            left_out.append((w_NK, out))
        elif w_NK.numel():
            bases = bases or [w_NK, _bytes(out.q), out.s]
            away = [a.data_ptr() - b.data_ptr() for a, b in zip((w_NK, *out), bases, strict=True)]
            shapes.setdefault(tuple(w_NK.shape), []).append([away[0] // 64, away[1] // 16, away[2] // 4])
    if shapes:
        places = torch.tensor([place for of_shape in shapes.values() for place in of_shape])
        if bases[0].is_cuda:  # from pinned memory nobody waits
            places = places.pin_memory().to(bases[0].device, non_blocking=True)
        for (N, K), some in zip(shapes, places.split([len(x) for x in shapes.values()]), strict=True):
            _masters_kernel[(groups(N) * groups(K), len(some))](*bases, some, N, K, **_TILE)
    return left_out


def transpose_bytes(q_RC: Tensor) -> Tensor:
    """(R, C) FP8 to (C, R) FP8, bytes unchanged."""
    R, C = q_RC.shape
    q_t = torch.empty((C, R), dtype=FP8, device=q_RC.device)
    if R and C:
        _transpose_kernel[(triton.cdiv(R, 128), triton.cdiv(C, _SLICE.value))](_bytes(q_RC), _bytes(q_t), R, C, **_TILE)
    return q_t


def widen(product: Tensor, target: Tensor, add: bool) -> None:
    """BF16 ``product`` into FP32 ``target``, or added to it; both contiguous, of one shape.

    Its loads and stores are of 16 bytes; torch's kernel for two types took longer on an H200.
    """
    n, values, warps = product.numel(), 4096, 8
    if n:
        _widen_kernel[(triton.cdiv(n, values),)](product, target, n, ADD=add, VALUES=values, WARPS=warps, num_warps=warps)


def silu_mul_backward(gate_up_M2I: Tensor, dy_MI: Tensor) -> Tensor:
    """BF16 gradient (M, 2I) of gate and up."""
    M, I = dy_MI.shape
    d_gu = torch.empty_like(gate_up_M2I)
    if M and I:
        config = _rows_config(M)
        grid = (triton.cdiv(M, config["BLOCK_M"]) * groups(I),)
        _silu_mul_backward_kernel[grid](gate_up_M2I, dy_MI, d_gu, M, I, **config)
    return d_gu


def silu_mul_backward_quantize(gate_up_M2I: Tensor, dy_MI: Tensor) -> tuple[Quantized, Quantized]:
    """The same gradient as FP8 rows and transposed groups; its BF16 form never reaches memory.  I % 128 == 0."""
    M, I = dy_MI.shape
    out = empty_rows(M, 2 * I, dy_MI.device)
    out_t = empty_transposed(M, 2 * I, dy_MI.device, blocks=False)
    if M and I:
        _silu_mul_backward_tiles_kernel[(groups(M) * (I // BLOCK),)](
            gate_up_M2I, dy_MI, _bytes(out.q), out.s, _bytes(out_t.q), out_t.s, M, I, padded(M),
            out.s.stride(1), out_t.s.stride(0), out_t.s.stride(1), **_TWO_TILES,
        )  # fmt: skip
    return out, out_t


def _norm_config(K: int, values: int) -> dict:
    """Whole rows, about ``values`` numbers per program.  K_PAD and the warps along K set the order of
    additions: functions of K alone."""
    K_PAD = max(triton.next_power_of_2(K), 256)
    return dict(K_PAD=K_PAD, ROWS=max(1, min(16, values // K_PAD)), WARPS_K=min(8, K_PAD // 256))


def rms_norm(
    x_MK: Tensor,
    weight_K: Tensor,
    eps: float,
    residual_MK: Tensor | None,
    fp8: bool,
    bf16: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Quantized | None]:
    """RMSNorm of ``x`` (+ ``residual``): h (what was normalized), rstd (M,) FP32, y BF16, row form."""
    M, K = x_MK.shape
    device = x_MK.device
    h = torch.empty_like(x_MK) if residual_MK is not None else x_MK
    rstd = torch.empty((M,), dtype=torch.float32, device=device)
    y = torch.empty_like(x_MK) if bf16 else None
    out = empty_rows(M, K, device) if fp8 else None
    if M == 0:
        return h, rstd, y, out
    q, s = (_bytes(out.q), out.s) if fp8 else (None, None)
    config = _norm_config(K, 0 if M <= 1024 else 8192)
    _rms_norm_rows_kernel[(triton.cdiv(M, config["ROWS"]),)](
        x_MK, residual_MK, h, rstd, weight_K, y, q, s, M, K, s.stride(1) if fp8 else 0, eps,
        RESIDUAL=residual_MK is not None, BF16_OUT=bf16, FP8_OUT=fp8, num_warps=8, **config,
    )  # fmt: skip
    return h, rstd, y, out


def rms_norm_transposed(h_MK: Tensor, rstd_M: Tensor, weight_K: Tensor, transposed: str) -> Quantized:
    """The transposed form of an RMSNorm's output, from its input and statistics: one read of ``h``."""
    M, K = h_MK.shape
    out_t = empty_transposed(M, K, h_MK.device, transposed == "block")
    _launch(h_MK, rstd_M, weight_K, _RMS_NORM, M, K, None, out_t, transposed == "block")
    return out_t


def rms_norm_backward(
    dy_MK: Tensor, h_MK: Tensor, rstd_M: Tensor, weight_K: Tensor, d_residual_MK: Tensor | None
) -> tuple[Tensor, Tensor]:
    """dx (M, K) BF16, with ``d_residual`` added when given, and d_weight (K,) FP32."""
    M, K = dy_MK.shape
    dx = torch.empty_like(dy_MK)
    config = _norm_config(K, 0)
    # 4 programs per multiprocessor of an H200; fixed, so that d_weight is reproducible.
    programs = min(triton.cdiv(M, config["ROWS"]), 528)
    partial = torch.empty((programs, K), dtype=torch.float32, device=dy_MK.device)
    if M:
        _rms_norm_backward_kernel[(programs,)](
            dy_MK, h_MK, rstd_M, weight_K, d_residual_MK, dx, partial, M, K, programs,
            RESIDUAL=d_residual_MK is not None, num_warps=8, **config,
        )  # fmt: skip
    return dx, partial.sum(0)
