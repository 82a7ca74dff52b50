"""The FP8 format on the CPU: exhaustive over BF16, adversarial groups, ragged sizes, and the reference GEMM."""

import math

import pytest
import torch

from verl.jetrl.fp8 import format as ref
from verl.jetrl.fp8 import ops
from verl.jetrl.fp8.format import AMAX_FLOOR, BLOCK, FP8, FP8_MAX, Quantized, groups

QUANTIZERS = (ref.quantize_rows, ref.quantize_cols, ref.quantize_blocks)


def every_bf16() -> torch.Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)


def nearest_fp8(value: torch.Tensor) -> torch.Tensor:
    """Round-to-nearest-even to e4m3 by search among its values in FP64: independent of any cast."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(FP8).double()  # 0 .. 448, ascending
    magnitude = value.double().abs().clamp(max=FP8_MAX)
    above = torch.searchsorted(codes, magnitude).clamp(max=0x7E)
    below = (above - 1).clamp(min=0)
    to_above, to_below = codes[above] - magnitude, magnitude - codes[below]
    code = torch.where((to_below < to_above) | ((to_below == to_above) & (below % 2 == 0)), below, above)
    return (code + 0x80 * torch.signbit(value)).to(torch.uint8)


@pytest.mark.parametrize("scale", (1.0, 2.0**-10, 1 / 448, 0.0127, 3.3e-20, 1e30))
def test_cast_of_every_bf16_value(scale):
    """Division in FP32, then round-to-nearest-even, saturating: for all 65536 values."""
    x = every_bf16()
    x = x[~x.isnan()]
    quotient = (x.float() / torch.tensor(scale)).clamp(-FP8_MAX, FP8_MAX)
    got = ref.cast(x, torch.tensor(scale)).view(torch.uint8)
    assert torch.equal(got, nearest_fp8(quotient))


def test_scale_of_every_bf16_maximum():
    """max(amax, floor) / 448 correctly rounded to FP32; NaN and infinity give NaN."""
    amax = every_bf16().float()
    amax = amax[amax.isnan() | (amax >= 0)]
    want = (amax.double().clamp(min=AMAX_FLOOR) / FP8_MAX).float()
    got = ref.scale_of(amax)
    finite = amax.isfinite()
    assert torch.equal(got[finite], want[finite]) and got[~finite].isnan().all()
    assert (got[finite] > torch.finfo(torch.float32).tiny).all()  # normal numbers, the zero group's too


def test_every_bf16_value_in_a_group():
    """Whole groups, whose maximum sets the scale: relative error of at most 2**-4 above the smallest normal number."""
    x = every_bf16()
    x = x[x.isfinite() & (x.abs() < 1e38)].sort().values
    x = x[: x.numel() // BLOCK * BLOCK].view(-1, BLOCK)
    q, s = ref.quantize_rows(x)
    back = q.float() * s
    normal = (x.float().abs() >= s * 2.0**-6) & (x.float().abs().amax(1, keepdim=True) > AMAX_FLOOR)
    assert ((back - x.float()).abs()[normal] <= x.float().abs()[normal] * 2.0**-4 * 1.0001).all()
    assert (q.float().abs().amax(1)[x.float().abs().amax(1) > AMAX_FLOOR] == FP8_MAX).all()


@pytest.mark.parametrize("shape", ((1, 128), (3, 576), (130, 200), (128, 128), (257, 576)))
def test_ragged_groups(shape):
    """The last group is an ordinary group: each form equals one computed group by group."""
    x = torch.randn(shape).bfloat16()
    M, K = shape
    rows, blocks = ref.quantize_rows(x), ref.quantize_blocks(x)
    assert rows.s.shape == (M, groups(K)) and blocks.s.shape == (groups(M), groups(K))
    for g in range(groups(K)):
        k = slice(g * BLOCK, (g + 1) * BLOCK)
        want = x[:, k].float().abs().amax(1) / torch.tensor(FP8_MAX)
        assert torch.equal(rows.s[:, g], want)
        assert torch.equal(rows.q[:, k].view(torch.uint8), nearest_fp8(x[:, k].float() / want[:, None]))
        for b in range(groups(M)):
            m = slice(b * BLOCK, (b + 1) * BLOCK)
            want_b = x[m, k].float().abs().max() / torch.tensor(FP8_MAX)
            assert torch.equal(blocks.s[b, g], want_b)
            assert torch.equal(blocks.q[m, k].view(torch.uint8), nearest_fp8(x[m, k].float() / want_b))
    cols = ref.quantize_cols(x)
    alone = ref.quantize_rows(x.t().contiguous())
    assert torch.equal(cols.q.view(torch.uint8), alone.q.view(torch.uint8)) and torch.equal(cols.s, alone.s)


def test_zeros_and_subnormals():
    x = torch.zeros(4, 256).bfloat16()
    x[1] = -0.0
    x[2] = 2.0**-133  # the smallest BF16 subnormal: below the floor, so it vanishes
    x[3, 0] = AMAX_FLOOR
    q, s = ref.quantize_rows(x)
    assert torch.equal(s, torch.full_like(s, AMAX_FLOOR) / torch.tensor(FP8_MAX))
    assert not q[0].view(torch.uint8).any() and (q[1].view(torch.uint8) == 0x80).all()
    assert not q[2].float().any() and q[3, 0].float() == FP8_MAX
    assert ref.dequantize(Quantized(q, s)).isfinite().all()


def test_outliers_touch_their_own_group_only():
    x = torch.randn(256, 384).bfloat16()
    plain = {f: f(x) for f in QUANTIZERS}
    x[5, 7] = 3e4
    for f, before in plain.items():
        after = f(x)
        changed = (after.s != before.s).nonzero()
        assert changed.shape[0] == 1
        assert relative(ref.dequantize(after), x if f is not ref.quantize_cols else x.t()) < 0.04


@pytest.mark.parametrize("value", (math.nan, math.inf, -math.inf))
def test_nan_and_infinity_are_not_hidden(value):
    x = torch.randn(256, 384).bfloat16()
    x[5, 7] = value
    for f in QUANTIZERS:
        q, s = f(x)
        assert s.isnan().sum() == 1
        bad = ref.expand(s, q.shape).isnan()
        assert (q.view(torch.uint8)[bad] == ref.NAN_BYTE).all() and q[~bad].float().isfinite().all()
    w = ref.quantize_blocks(torch.randn(128, 384).bfloat16())
    y = ref.gemm_nt(ref.quantize_rows(x), w)
    assert y[5].isnan().all() and y[torch.arange(256) != 5].isfinite().all()


@pytest.mark.parametrize("shape", ((0, 256), (256, 0), (0, 0)))
def test_empty(shape):
    M, K = shape
    for f in QUANTIZERS:
        q, s = f(torch.zeros(shape).bfloat16())
        assert q.dtype == FP8 and q.numel() == 0 and s.dtype == torch.float32
    y = ref.gemm_nt(ref.quantize_rows(torch.zeros(shape).bfloat16()), ref.quantize_blocks(torch.zeros(128, K).bfloat16()))
    assert y.shape == (M, 128) and not y.any()


def test_transpose_moves_bytes():
    w = ref.quantize_blocks(torch.randn(200, 576).bfloat16())
    t = ref.transpose(w)
    assert torch.equal(t.q.view(torch.uint8), w.q.view(torch.uint8).t()) and torch.equal(t.s, w.s.t())
    assert torch.equal(ref.dequantize(t), ref.dequantize(w).t())


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("K", (128, 576, 1000))
def test_gemm_against_fp64(K):
    a, b = ref.quantize_rows(torch.randn(70, K).bfloat16()), ref.quantize_blocks(torch.randn(200, K).bfloat16())
    exact = ref.dequantize(a).double() @ ref.dequantize(b).double().t()
    assert relative(ref.gemm_nt(a, b, torch.float32), exact) < 1e-6
    assert relative(ref.gemm_nt(a, b), exact) < 3e-3
    target = torch.randn(70, 200)
    want = target.double() + exact
    assert ref.gemm_nt(a, b, torch.float32, target) is target and relative(target, want) < 1e-6


def test_gemm_is_visibly_fp8():
    """Fails if FP8 were silently off: the product of the rounded operands is 2-5% away from the BF16 one."""
    x, w = torch.randn(128, 512).bfloat16(), torch.randn(256, 512).bfloat16()
    y = ref.gemm_nt(ref.quantize_rows(x), ref.quantize_blocks(w))
    assert 0.02 < relative(y, x.double() @ w.double().t()) < 0.05


def test_rows_do_not_depend_on_the_batch():
    x, w = torch.randn(300, 576).bfloat16(), ref.quantize_blocks(torch.randn(200, 576).bfloat16())
    full = ref.gemm_nt(ref.quantize_rows(x), w)
    for m in (1, 2, 17, 128, 299):
        rows = torch.randperm(300)[:m]
        assert torch.equal(ref.gemm_nt(ref.quantize_rows(x[rows]), w), full[rows])


def test_mismatched_reductions_are_named():
    with pytest.raises(ValueError, match="reduction dimensions differ"):
        ref.gemm_nt(ref.quantize_rows(torch.ones(2, 128)), ref.quantize_blocks(torch.ones(2, 256)))


def test_fp32_master_quantizes_to_the_bytes_of_its_bf16_export():
    master = torch.randn(256, 384)
    exported = ref.quantize_blocks(master.bfloat16())
    for got in (ops.quantize_blocks(master), ops.quantize_weight(master)):
        assert torch.equal(got.q.view(torch.uint8), exported.q.view(torch.uint8)) and torch.equal(got.s, exported.s)
    assert not torch.equal(ref.quantize_blocks(master).s, exported.s)


def test_masters_into_given_memory():
    master = torch.randn(200, 576)
    want = ref.quantize_blocks(master.bfloat16())
    out = ref.Quantized(torch.zeros(200, 576, dtype=ref.FP8), torch.zeros(2, 5))
    assert ops.quantize_blocks(master, out) is out
    assert torch.equal(out.q.view(torch.uint8), want.q.view(torch.uint8)) and torch.equal(out.s, want.s)
    for wrong in (
        ref.Quantized(out.q[:, :512], out.s),
        ref.Quantized(out.q, out.s.bfloat16()),
        ref.Quantized(out.q, want.s[:1]),
    ):
        with pytest.raises(ValueError, match="out must be contiguous"):
            ops.quantize_blocks(master, wrong)
