"""Run by test_fp8_kernels.py under TRITON_INTERPRET=1: the Triton kernels on the CPU against the reference."""

import torch

from verl.jetrl.fp8 import format as ref
from verl.jetrl.fp8 import kernels, ops


def same(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal bits; NaN equals NaN."""
    assert got.shape == want.shape and got.dtype == want.dtype, f"{name}: {got.shape} {got.dtype}, want {want.shape}"
    if got.dtype == ref.FP8:
        equal = got.view(torch.uint8) == want.view(torch.uint8)
    else:
        equal = (got == want) & (torch.signbit(got) == torch.signbit(want)) | got.isnan() & want.isnan()
    assert bool(equal.all()), f"{name}: {int((~equal).sum())} of {got.numel()} values differ"


def adversarial(M: int, K: int) -> torch.Tensor:
    x = torch.randn(M, K) * torch.exp(3 * torch.randn(M, K))
    x[0, :140] = 0
    x[1, 3], x[2, 200], x[2, 5] = torch.nan, torch.inf, -torch.inf
    x[3] *= 2.0**-118
    x[4] *= 2.0**110
    x[min(5, M - 1), :128] = -0.0
    return x.to(torch.bfloat16)


def forms(M: int, K: int) -> None:
    x = adversarial(M, K)
    for transposed in (None, "group", "block"):
        rows, x_t = kernels.quantize(x, True, transposed)
        want = ref.quantize_rows(x)
        same("rows q", rows.q, want.q)
        same("rows s", rows.s, want.s)
        if transposed:
            want = ops._ref_transposed(x, transposed)
            same(f"{transposed} q", x_t.q, want.q)
            same(f"{transposed} s", x_t.s, want.s)
    q, s, q_t = kernels.quantize_weight(x, True)
    want = ref.quantize_blocks(x)
    same("weight q", q, want.q)
    same("weight s", s, want.s)
    same("weight q_t", q_t, ref.transpose(want).q)
    same("transposed bytes", kernels.transpose_bytes(q), q_t)
    master = torch.nextafter(x.float(), x.float().sign() * torch.inf) * (1 + 2.0**-9)  # near ties between two BF16 values
    master[1:3] = x[1:3].float()
    out = ref.Quantized(torch.empty_like(q), torch.empty_like(s))
    kernels.quantize_weight(master, False, out)
    want = ref.quantize_blocks(master.bfloat16())
    same("master q", out.q, want.q)
    same("master s", out.s, want.s)


def masters() -> None:
    """Weights of three shapes, some twice, into one buffer with a guard behind it; one of a width that is left out."""
    shapes = ((128, 256), (200, 208), (128, 256), (130, 210), (200, 208))
    weights = [adversarial(N, K).float() * (1 + 2.0**-9) for N, K in shapes]
    total = sum(w.numel() + 16 for w in weights)
    bytes_ = torch.full((-(-total // 16) * 16,), 7, dtype=torch.uint8)
    pairs, at = [], 0
    for w in weights:
        s = torch.full((ref.groups(w.shape[0]), ref.groups(w.shape[1])), -1.0)
        pairs.append((w, ref.Quantized(bytes_[at : at + w.numel()].view(ref.FP8).view(w.shape), s)))
        at += -(-w.numel() // 16) * 16
    other = (torch.zeros(128, 128, dtype=torch.bfloat16), ref.quantize_blocks(torch.zeros(128, 128)))  # no FP32, and the first
    left_out = kernels.quantize_masters([other, *pairs])
    assert [w.shape for w, _ in left_out] == [(128, 128), (130, 210)]
    for w, out in pairs:
        if w.shape != (130, 210):
            want = ref.quantize_blocks(w.bfloat16())
            same("masters q", out.q, want.q)
            same("masters s", out.s, want.s)
    assert bool((bytes_[at:] == 7).all())


def producers(M: int, K: int) -> None:
    x, residual, weight = torch.randn(M, K).bfloat16(), torch.randn(M, K).bfloat16(), torch.randn(K).bfloat16()
    for r in (None, residual):
        h, rstd, y, rows = kernels.rms_norm(x, weight, 1e-6, r, True, True)
        want_h, want_rstd, want_y = ops._rms(x, weight, 1e-6, r)
        same("h", h, want_h)
        assert torch.allclose(rstd, want_rstd, rtol=1e-6)
        # The order of a sum is the kernel's own: a last-place difference of rstd may round a few values differently.
        assert (y != want_y).float().mean() < 1e-2 and torch.allclose(y.float(), want_y.float(), rtol=1e-2)
        same("norm q", rows.q, ref.quantize_rows(y).q)
        same("norm s", rows.s, ref.quantize_rows(y).s)
        for transposed in ("group", "block"):
            y_t = kernels.rms_norm_transposed(h, rstd, weight, transposed)
            want = ops._ref_transposed(y, transposed)
            same(f"norm {transposed} q", y_t.q, want.q)
            same(f"norm {transposed} s", y_t.s, want.s)
        for row in (0, M - 1):
            alone = kernels.rms_norm(x[row : row + 1], weight, 1e-6, None if r is None else r[row : row + 1], True, True)
            same("one row", alone[3].q, rows.q[row : row + 1])
        dy = torch.randn(M, K).bfloat16()
        dx, dw = kernels.rms_norm_backward(dy, h, rstd, weight, r)
        want_dx, want_dw = ops._Cpu.rms_norm_backward(dy, h, rstd, weight, r)
        assert torch.allclose(dx.float(), want_dx.float(), rtol=2e-2, atol=1e-2)
        assert torch.allclose(dw, want_dw, rtol=1e-4, atol=1e-4)
    gate_up = torch.cat((x, residual), 1)
    y = kernels.silu_mul_bf16(gate_up)
    want_y = ops._silu_mul(gate_up)
    assert (y != want_y).float().mean() < 1e-3
    rows, _ = kernels.silu_mul(gate_up, True, None)
    same("silu q", rows.q, ref.quantize_rows(y).q)
    rows_too, y_t = kernels.silu_mul(gate_up, True, "block")
    same("silu rows + blocks q", rows_too.q, rows.q)
    same("silu blocks q", y_t.q, ops._ref_transposed(y, "block").q)
    d_gu = kernels.silu_mul_backward(gate_up, dy)
    want = ops._Cpu.silu_mul_backward(gate_up, dy)
    assert torch.allclose(d_gu.float(), want.float(), rtol=2e-2, atol=1e-3)
    if K % 128 == 0:
        d_rows, d_t = kernels.silu_mul_backward_quantize(gate_up, dy)
        same("silu backward q", d_rows.q, ref.quantize_rows(d_gu).q)
        same("silu backward s", d_rows.s, ref.quantize_rows(d_gu).s)
        same("silu backward q_t", d_t.q, ops._ref_transposed(d_gu, "group").q)


def widening(M: int, K: int) -> None:
    product, target = adversarial(M, K), torch.randn(M, K)
    for add in (True, False):
        want = target + product.float() if add else product.float()
        kernels.widen(product, target, add)
        same(f"widen, add={add}", target, want)


def every_value() -> None:
    """Every BF16 value as numerator, in groups of several maxima: bytes as an IEEE division gives them."""
    values = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    values = values[values.isfinite()].sort().values
    for amax in (448.0, 1.0, 3.0e38, 2.0**-90, 0.0127):
        inside = values[values.abs() <= amax]
        rows = torch.nn.functional.pad(inside, (0, -inside.numel() % 127)).view(-1, 127)
        x = torch.cat((rows, torch.full((rows.shape[0], 1), amax, dtype=torch.bfloat16)), 1)
        got, _ = kernels.quantize(x, True, None)
        want = ref.quantize_rows(x)
        same(f"values up to {amax}", got.q, want.q)
        same(f"scales of {amax}", got.s, want.s)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    assert not kernels.NATIVE
    every_value()
    for shape in ((7, 576), (130, 320)):
        forms(*shape)
    masters()
    widening(17, 576)
    producers(6, 576)
    producers(5, 256)
