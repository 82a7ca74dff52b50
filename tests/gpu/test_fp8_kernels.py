"""Quantizers and fused producers on the GPU: the bytes and scales of the reference, whatever the shape."""

import pytest
import torch
from fp8_cases import HIDDEN, adversarial, randn, same

from verl.jetrl.fp8 import format as ref
from verl.jetrl.fp8 import kernels, ops
from verl.jetrl.fp8.format import Quantized

SHAPES = ((1, 128), (7, 576), (64, 4096), (130, 320), (300, 3584), (1024, 960), (4096, 4096))


def test_eager_reference_is_the_same_on_both_devices():
    x = adversarial(300, 576)
    for quantizer in (ref.quantize_rows, ref.quantize_cols, ref.quantize_blocks):
        got, want = quantizer(x), quantizer(x.cpu())
        same(got.q.cpu(), want.q)
        same(got.s.cpu(), want.s)


def test_every_pair_of_value_and_maximum():
    """All 2**15 finite magnitudes of BF16, under every BF16 maximum's mantissa at exponents from tiny to huge.

    The kernels multiply by a reciprocal and correct the remainder; this is the proof that their bytes are a division's.
    """
    bits = torch.arange(0x7F80, dtype=torch.int32, device="cuda")
    values = bits.to(torch.int16).view(torch.bfloat16)
    values = torch.where(torch.arange(values.numel(), device="cuda") % 2 == 0, values, -values)
    columns = -(-values.numel() // 127)
    groups = torch.nn.functional.pad(values, (0, columns * 127 - values.numel())).view(columns, 127)
    for exponent in (-133, -100, -81, -80, -79, -64, -20, -8, 0, 1, 8, 40, 100, 127):
        for mantissa in range(128):
            amax = torch.tensor((1 + mantissa / 128) * 2.0**exponent, device="cuda").bfloat16()
            inside = torch.where(groups.abs() <= amax, groups, torch.zeros_like(groups))
            x = torch.cat((inside, amax.expand(columns, 1)), 1)
            got, want = ops.quantize_rows(x), ref.quantize_rows(x)
            assert torch.equal(got.q.view(torch.uint8), want.q.view(torch.uint8)), (exponent, mantissa)
            assert torch.equal(got.s, want.s), (exponent, mantissa)


@pytest.mark.parametrize("shape", SHAPES)
def test_masters_into_given_memory(shape):
    """FP32 is rounded to BF16 in the same read, ties included; nothing past the target is written."""
    x = adversarial(*shape).float()
    x = torch.where(torch.rand_like(x) < 0.5, x * (1 + 2.0**-8), x * (1 + 2.0**-9))
    want = ref.quantize_blocks(x.bfloat16())
    guarded = torch.full((x.numel() + 128,), 7, dtype=torch.uint8, device="cuda")
    out = Quantized(guarded[: x.numel()].view(x.shape).view(ref.FP8), torch.empty_like(want.s))
    ops.quantize_blocks(x, out)
    same(out.q, want.q)
    same(out.s, want.s)
    assert bool((guarded[x.numel() :] == 7).all())


def test_many_masters_in_one_launch():
    """Fused weights' parts at offsets of one buffer, masters all over the memory; widths that are no multiple of 16 too."""
    masters = [adversarial(*shape).float() * (1 + 2.0**-9) for shape in (*SHAPES, *SHAPES, (1024, 4096), (4096, 4096))]
    rows = [-(-m.numel() // 16) * 16 for m in masters]
    buffer = torch.full((sum(rows) + 128,), 7, dtype=torch.uint8, device="cuda")
    parts = [part[: m.numel()].view(ref.FP8).view(m.shape) for part, m in zip(buffer[:-128].split(rows), masters, strict=True)]
    wanted = [ref.quantize_blocks(m.bfloat16()) for m in masters]
    scales = torch.zeros(sum(w.s.numel() for w in wanted), device="cuda").split([w.s.numel() for w in wanted])
    outs = [Quantized(q, s.view(w.s.shape)) for q, s, w in zip(parts, scales, wanted, strict=True)]
    ops.quantize_masters(list(zip(masters, outs, strict=True)))
    for out, want in zip(outs, wanted, strict=True):
        same(out.q, want.q)
        same(out.s, want.s)
    assert bool((buffer[-128:] == 7).all())


@pytest.mark.parametrize("shape", SHAPES)
def test_quantizers(shape):
    x = adversarial(*shape)
    want = ref.quantize_rows(x)
    rows = ops.quantize_rows(x)
    same(rows.q, want.q)
    same(rows.s, want.s)
    for transposed in ops.TRANSPOSED_GROUPS:
        want_t = ops._ref_transposed(x, transposed)
        both, both_t = ops.quantize_both(x, transposed)
        for got in (ops.quantize_transposed(x, transposed), both_t):
            same(got.q, want_t.q)
            same(got.s, want_t.s)
        same(both.q, want.q)
        same(both.s, want.s)
        again = ops.regroup(rows, transposed)
        want_again = ops._ref_transposed(ref.dequantize(want), transposed)
        same(again.q, want_again.q)
        same(again.s, want_again.s)


@pytest.mark.parametrize("shape", SHAPES)
def test_weights(shape):
    w = adversarial(*shape)
    want = ref.quantize_blocks(w)
    for got in (ops.quantize_weight(w), ops.with_transposed(ops.quantize_blocks(w)), ops.quantize_weight(w.float())):
        same(got.q, want.q)
        same(got.s, want.s)
        same(got.q_t, ref.transpose(want).q)
        same(got.transposed.s, ref.transpose(want).s)


@pytest.mark.parametrize("M", (0, 1, 127, 128, 129))
def test_padding_is_inert_and_zero(M):
    x = randn(M, 256)
    for transposed in ops.TRANSPOSED_GROUPS:
        q = ops.quantize_transposed(x, transposed).q
        assert q.shape == (256, ops.padded(M))
        assert not q[:, M:].view(torch.uint8).any()
        real = ops._ref_transposed(x.cpu(), transposed)
        same(q.cpu(), real.q)
    assert ops.quantize_rows(x).q.shape == (M, 256)


@pytest.mark.parametrize("K", HIDDEN)
def test_rms_norm(K):
    """The fused kernels round and sum exactly as the unfused one; a row does not depend on the others."""
    x, residual, weight = randn(1500, K), randn(1500, K), randn(K)
    for r in (None, residual):
        y, norm = ops.rms_norm(x, weight, 1e-6, r)
        want_h, want_rstd, want_y = ops._rms(x, weight, 1e-6, r)
        same(norm.h, want_h)
        assert torch.allclose(norm.rstd, want_rstd, rtol=3e-7)
        assert (y != want_y).float().mean() < 1e-4
        want = ref.quantize_rows(y)
        rows, fused = ops.rms_norm_quantize(x, weight, 1e-6, r)
        same(rows.q, want.q)
        same(rows.s, want.s)
        same(fused.h, norm.h)
        same(fused.rstd, norm.rstd)
        for transposed in ops.TRANSPOSED_GROUPS:
            x_t = ops.rms_norm_transposed(fused, weight, transposed)
            want_t = ops._ref_transposed(y, transposed)
            same(x_t.q, want_t.q)
            same(x_t.s, want_t.s)
        for rows in (torch.randperm(1500, device="cuda")[:m] for m in (1, 3, 64, 200, 1100)):
            some, _ = ops.rms_norm_quantize(x[rows], weight, 1e-6, None if r is None else r[rows])
            same(some.q, want.q[rows])


@pytest.mark.parametrize("K", HIDDEN)
def test_rms_norm_matches_hugging_face(K):
    """Rounding follows Qwen3RMSNorm: FP32 normalization, BF16, then the weight in BF16."""
    x, weight = randn(512, K), randn(K)
    h = x.float()
    want = weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(torch.bfloat16)
    y, _ = ops.rms_norm(x, weight, 1e-6)
    assert (y != want).float().mean() < 1e-3
    assert torch.allclose(y.float(), want.float(), rtol=1e-2)


@pytest.mark.parametrize("K", HIDDEN)
def test_rms_norm_backward(K):
    x, dy, d_residual = randn(700, K).double().requires_grad_(), randn(700, K), randn(700, K)
    weight = randn(K).double().requires_grad_()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight
    want_dx, want_dw = torch.autograd.grad(y, (x, weight), dy.double())
    _, norm = ops.rms_norm(x.detach().bfloat16(), weight.detach().bfloat16(), 1e-6)
    dx, dw = ops.rms_norm_backward(dy, norm, weight.detach().bfloat16())
    assert (dx.double() - want_dx).norm() / want_dx.norm() < 5e-3
    assert (dw.double() - want_dw).norm() / want_dw.norm() < 5e-3
    plus, _ = ops.rms_norm_backward(dy, norm, weight.detach().bfloat16(), d_residual)
    same(plus, (dx.float() + d_residual.float()).bfloat16())
    rows = torch.randperm(700, device="cuda")[:33]
    some, _ = ops.rms_norm_backward(dy[rows], ops.Norm(norm.h[rows], norm.rstd[rows]), weight.detach().bfloat16())
    same(some, dx[rows])


@pytest.mark.parametrize("shape", ((1, 1536), (130, 3072), (2100, 1536)))
def test_silu_mul(shape):
    M, I = shape
    gate_up = adversarial(M, 2 * I)
    y = ops.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, -1)
    want = torch.nn.functional.silu(gate) * up
    finite = want.isfinite()
    assert torch.allclose(y[finite].float(), want[finite].float(), rtol=1e-2, atol=1e-30)
    want = ref.quantize_rows(y)
    same(ops.silu_mul_quantize(gate_up).q, want.q)
    for transposed in ops.TRANSPOSED_GROUPS:
        rows, y_t = ops.silu_mul_quantize_both(gate_up, transposed)
        same(rows.q, want.q)
        same(rows.s, want.s)
        want_t = ops._ref_transposed(y, transposed)
        same(y_t.q, want_t.q)
        same(y_t.s, want_t.s)
    rows = torch.randperm(M, device="cuda")[: max(1, M // 3)]
    same(ops.silu_mul_quantize(gate_up[rows]).q, want.q[rows])


def test_silu_mul_backward():
    gate_up, dy = randn(300, 3072), randn(300, 1536)
    leaf = gate_up.double().requires_grad_()
    gate, up = leaf.chunk(2, -1)
    (want,) = torch.autograd.grad(torch.nn.functional.silu(gate) * up, leaf, dy.double())
    got = ops.silu_mul_backward(gate_up, dy)
    assert (got.double() - want).norm() / want.norm() < 5e-3
    rows, d_t = ops.silu_mul_backward_quantize(gate_up, dy)
    same(rows.q, ref.quantize_rows(got).q)
    same(rows.s, ref.quantize_rows(got).s)
    same(d_t.q, ops._ref_transposed(got, "group").q)
    same(d_t.s, ops._ref_transposed(got, "group").s)


@pytest.mark.parametrize("shape", ((7, 576), (24576, 4096), (1, 1)), ids=str)
def test_widening(shape):
    """A weight gradient's BF16 product into its FP32 sum: torch's bits."""
    product, target = adversarial(*shape), torch.randn(*shape, device="cuda")
    for add in (True, False):
        want = target + product.float() if add else product.float()
        kernels.widen(product, target, add)
        same(target, want)


def test_transformer_engine_caster_with_fp32_scales():
    """TE's 1x128 quantizer, another implementation of the format: the same bytes wherever its floor of 0 is not met."""
    pytest.importorskip("transformer_engine.pytorch")
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    x = randn(512, 1024)
    quantizer = Float8BlockQuantizer(
        tex.DType.kFloat8E4M3, rowwise=True, columnwise=False, force_pow_2_scales=False, block_scaling_dim=1
    )
    theirs, ours = quantizer(x), ops.quantize_rows(x)
    scales = theirs._rowwise_scale_inv.t()[:512]
    same_scale = scales == ours.s
    bytes_equal = theirs._rowwise_data.view(torch.uint8) == ours.q.view(torch.uint8)
    print(f"TE: {same_scale.float().mean():.4f} of scales and {bytes_equal.float().mean():.6f} of bytes equal")
    assert torch.allclose(scales, ours.s, rtol=3e-7)
    assert bytes_equal.float().mean() > 0.99


def test_row_subsets_of_the_quantizer():
    x = randn(5000, 4096)
    full = ops.quantize_rows(x)
    for m in (1, 2, 63, 64, 65, 1024, 1025):
        rows = torch.randperm(5000, device="cuda")[:m]
        some = ops.quantize_rows(x[rows])
        same(some.q, full.q[rows])
        same(some.s, full.s[rows])


def test_unsupported_inputs_say_what_to_do():
    with pytest.raises(ValueError, match="flatten"):
        ops.quantize_rows(torch.zeros(2, 3, 4, device="cuda"))
    with pytest.raises(ValueError, match="multiple of 16"):
        ops.fprop(ops.quantize_rows(randn(4, 100)), ops.quantize_blocks(randn(128, 100)))
    with pytest.raises(ValueError, match="multiple of 8"):
        ops.fprop(ops.quantize_rows(randn(4, 128)), ops.quantize_blocks(randn(129, 128)))
    with pytest.raises(ValueError, match="quantize_both"):
        ops.silu_mul_backward_quantize(randn(4, 200), randn(4, 100))
    q = ops.quantize_cols(randn(4, 128))
    with pytest.raises(ValueError, match="FP32"):
        ops.wgrad(q, q, torch.zeros(128, 128, device="cuda", dtype=torch.bfloat16))
    assert isinstance(q, Quantized)
