"""The FP8 operators and the linear on the CPU: gradients, options, padding, compile, checkpointing, operator checks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from verl.jetrl.fp8 import format as ref
from verl.jetrl.fp8 import gemm, ops
from verl.jetrl.fp8.linear import SAVED, Fp8Linear, Wgrad, bf16_linear, fp8_linear, fp8_rms_norm_linear, fp8_swiglu_mlp

WGRADS = [Wgrad(groups, saved) for groups in ops.TRANSPOSED_GROUPS for saved in SAVED]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape) * scale).bfloat16()


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("wgrad", WGRADS, ids=lambda w: f"{w.x_groups}-{w.saved}")
def test_gradients_against_fp64(wgrad):
    """Every choice is FP8-accurate, and visibly FP8; the bias gradient is exact but for BF16."""
    x, w, b = randn(200, 192).requires_grad_(), randn(320, 192).requires_grad_(), randn(320).requires_grad_()
    dy = randn(200, 320)
    y = fp8_linear(x, w, b, wgrad=wgrad)
    got = torch.autograd.grad(y, (x, w, b), dy)
    doubles = [t.detach().double().requires_grad_() for t in (x, w, b)]
    want_y = F.linear(*doubles)
    want = torch.autograd.grad(want_y, doubles, dy.double())
    for a, c in ((y, want_y), (got[0], want[0]), (got[1], want[1])):
        assert 0.01 < relative(a, c) < 0.06
    assert relative(got[2], want[2]) < 5e-3


def test_rounding_once_beats_regrouping_and_saved_bf16_is_the_same_bytes():
    x, w, dy = randn(256, 256), randn(256, 256).requires_grad_(), randn(256, 256)
    want = dy.double().t() @ x.double()
    for groups in ops.TRANSPOSED_GROUPS:
        grads = {saved: torch.autograd.grad(fp8_linear(x, w, wgrad=Wgrad(groups, saved)), (w,), dy)[0] for saved in SAVED}
        assert torch.equal(grads["fp8"], grads["bf16"])
        assert 1.1 * relative(grads["fp8"], want) < relative(grads["regrouped"], want)


@pytest.mark.parametrize("M", (0, 1, 127, 128, 130))
def test_padding_tokens_are_inert(M):
    """Tokens are padded to 128 with zeros for the weight gradient: no scale and no sum changes."""
    x, dy = randn(M, 192), randn(M, 256)
    dy_t = ops.quantize_cols(dy)
    assert dy_t.q.shape == (256, ops.padded(M)) and not dy_t.q[:, M:].view(torch.uint8).any()
    for transposed in ops.TRANSPOSED_GROUPS:
        x_t = ops.quantize_transposed(x, transposed)
        exact = ref.gemm_nt(
            ref.quantize_cols(dy),
            ref.quantize_cols(x) if transposed == "group" else ref.transpose(ref.quantize_blocks(x)),
            torch.float32,
        )
        assert torch.equal(ops.wgrad(dy_t, x_t), exact)


def test_zero_tokens():
    layer = Fp8Linear(192, 256)
    x = torch.zeros(0, 192, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == (0, 256) and x.grad.shape == (0, 192) and not layer.weight.grad.any()


def test_only_one_byte_per_value_is_saved():
    x, w = randn(256, 512).requires_grad_(), ops.quantize_weight(randn(256, 512))
    parameter = nn.Parameter(randn(256, 512))
    kept = {}

    def saved(wgrad):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.update({t.data_ptr(): t}) or t, lambda t: t):
            y = fp8_linear(x, parameter, quantized=w, wgrad=wgrad)
        weights = {t.data_ptr() for t in w}
        del y
        return sum(t.nbytes for p, t in kept.items() if p not in weights)

    bf16 = x.numel() * 2
    assert saved(Wgrad()) <= 0.52 * bf16 and saved(Wgrad("group")) <= 0.55 * bf16 and saved(Wgrad(saved="bf16")) == bf16


@pytest.mark.parametrize("tokens", [0, 130])
def test_a_weight_gradient_replaces_what_was_there_on_request(tokens):
    dy_t = ops.quantize_cols(torch.randn(tokens, 256).bfloat16())
    x_t = ops.quantize_transposed(torch.randn(tokens, 128).bfloat16(), "block")
    over = ops.wgrad(dy_t, x_t, torch.full((256, 128), torch.nan), add=False)
    assert torch.equal(over, ops.wgrad(dy_t, x_t, torch.zeros(256, 128))) and over.isfinite().all()


def test_main_grad_accumulates_and_the_parameter_gets_none():
    x, w, dy = randn(128, 192), nn.Parameter(torch.randn(256, 192)), randn(128, 256)
    (once,) = torch.autograd.grad(fp8_linear(x, w), (w,), dy)
    main_grad = torch.zeros(256, 192)
    for _ in range(2):
        fp8_linear(x, w, main_grad_NK=main_grad).backward(dy)
    assert w.grad is None and relative(main_grad, 2 * once) < 1e-6


def test_given_bytes_are_used():
    x, w, dy = randn(128, 192), nn.Parameter(torch.randn(256, 192)), randn(128, 256)
    other = ops.quantize_weight(randn(256, 192))
    y = fp8_linear(x, w, quantized=other)
    assert torch.equal(y, ops.fprop(ops.quantize_rows(x), other.forward))
    y.backward(dy)
    assert w.grad.dtype == torch.float32
    again = ops.with_transposed(other.forward)
    assert torch.equal(again.q_t.view(torch.uint8), other.q_t.view(torch.uint8))


def test_fused_blocks_are_the_unfused_ones():
    M, K, I = 130, 192, 256
    h, residual, norm = randn(M, K).requires_grad_(), randn(M, K).requires_grad_(), randn(K).requires_grad_()
    gate_up, down = randn(2 * I, K, scale=0.1).requires_grad_(), randn(K, I, scale=0.1).requires_grad_()
    y, s = fp8_swiglu_mlp(h, norm, 1e-6, gate_up, down, residual)
    n, after = fp8_rms_norm_linear(h, norm, 1e-6, gate_up, None, residual)
    normed, state = ops.rms_norm(h.detach(), norm.detach(), 1e-6, residual.detach())
    assert torch.equal(s, state.h) and torch.equal(after, state.h)
    assert torch.equal(n, fp8_linear(normed, gate_up))
    assert torch.equal(y, fp8_linear(ops.silu_mul(n.detach()), down))
    dy, dh = randn(M, K), randn(M, K)
    leaves = (h, residual, norm, gate_up, down)
    got = torch.autograd.grad((y, s), leaves, (dy, dh))
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    want_s = doubles[0] + doubles[1]
    want_n = want_s * torch.rsqrt(want_s.square().mean(-1, keepdim=True) + 1e-6) * doubles[2]
    gate, up = F.linear(want_n, doubles[3]).chunk(2, -1)
    want = torch.autograd.grad((F.linear(F.silu(gate) * up, doubles[4]), want_s), doubles, (dy.double(), dh.double()))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.bfloat16 and relative(a, b) < 0.1
    with pytest.raises(ValueError, match="never hold the BF16 activation"):
        fp8_rms_norm_linear(h, norm, 1e-6, gate_up, wgrad=Wgrad(saved="bf16"))


def test_bias_and_leading_dimensions():
    layer = Fp8Linear(192, 256)
    x = randn(2, 5, 192)
    flat = fp8_linear(x.view(10, 192), layer.weight)
    assert torch.equal(layer(x), (flat + layer.bias.bfloat16()).view(2, 5, 256))
    assert list(layer.state_dict()) == list(nn.Linear(192, 256).state_dict())


def test_compile_checkpoint_and_autocast_change_nothing():
    layer = Fp8Linear(128, 256)
    x, dy = randn(130, 128).requires_grad_(), randn(130, 256)
    plain = layer(x)
    want = torch.autograd.grad(plain, (x, layer.weight), dy)
    with torch.autocast("cpu", torch.bfloat16):
        cast = layer(x)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    saved = checkpoint(layer, x, use_reentrant=False)
    for y in (cast, compiled, saved):
        assert torch.equal(y, plain)
        for a, b in zip(torch.autograd.grad(y, (x, layer.weight), dy), want, strict=True):
            assert torch.equal(a, b)


def test_operators_are_well_formed():
    """torch.library.opcheck: the fake implementations agree in shape, dtype and strides."""
    x, w = randn(130, 256), ops.quantize_weight(randn(384, 256))
    q, s = ops.quantize_rows(x)
    dy_t, x_t = ops.quantize_cols(randn(130, 384)), ops.quantize_transposed(x, "block")
    gate_up, norm = randn(130, 512), randn(256)
    calls = {
        "quantize_rows": (x,),
        "quantize_transposed": (x, "group"),
        "quantize_both": (x, "block"),
        "quantize_blocks": (x,),
        "quantize_blocks_": (torch.zeros_like(w.q), torch.zeros_like(w.s), randn(384, 256).float()),
        "quantize_weight": (x,),
        "regroup": (q, s, "block"),
        "transpose_bytes": (q,),
        "gemm_nt": (q, s, w.q, w.s, None, "deep_gemm"),
        "wgrad": (*dy_t, *x_t, torch.bfloat16),
        "wgrad_": (torch.zeros(384, 256), *dy_t, *x_t, True),
        "rms_norm": (x, norm, 1e-6, None),
        "rms_norm_quantize": (x, norm, 1e-6, x),
        "rms_norm_transposed": (x, torch.ones(130), norm, "group"),
        "rms_norm_backward": (x, x, torch.ones(130), norm, None),
        "silu_mul": (gate_up,),
        "silu_mul_quantize": (gate_up,),
        "silu_mul_quantize_both": (gate_up, "block"),
        "silu_mul_backward": (gate_up, x),
        "silu_mul_backward_quantize": (gate_up, x),
        "bf16_gemm_nt": (x, x),
    }
    assert set(calls) == {schema.partition("(")[0] for schema in ops._SCHEMAS}
    for name, args in calls.items():
        torch.library.opcheck(getattr(torch.ops.jetrl, name), args, test_utils="test_faketensor")


def test_lm_head():
    x, w, dy = randn(10, 128).requires_grad_(), randn(300, 128).requires_grad_(), randn(10, 300)
    got = torch.autograd.grad(bf16_linear(x, w), (x, w), dy)
    want = torch.autograd.grad(F.linear(x, w), (x, w), dy)
    for a, b in zip(got, want, strict=True):
        assert relative(a, b) < 5e-3


def test_errors_say_what_to_do(monkeypatch):
    with pytest.raises(ValueError, match="flatten it first"):
        ops.quantize_rows(torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match="2-D floating-point"):
        ops.quantize_rows(torch.zeros(2, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match="'group', 'block'"):
        ops.quantize_both(torch.zeros(2, 128), "rows")
    with pytest.raises(ValueError, match="x_groups must be one of"):
        fp8_linear(torch.zeros(2, 128), torch.zeros(128, 128), wgrad=Wgrad("rows"))
    q = ref.quantize_rows(torch.zeros(4, 100))
    with pytest.raises(ValueError, match="multiple of 16. A model with such a layer cannot train in FP8"):
        gemm.gemm_nt(q, q)
    with pytest.raises(ValueError, match="contiguous FP32"):
        ops.wgrad(q, q, torch.zeros(4, 4, dtype=torch.bfloat16))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "B200")
    with pytest.raises(RuntimeError, match="B200 has compute capability 10.0; only 9.0"):
        gemm.require_hopper.__wrapped__(torch.device("cuda"))


def test_kernels_in_the_interpreter():
    """The GPU kernels' own source, run on the CPU by Triton's interpreter, gives the reference's bytes."""
    root = Path(__file__).parent.parent
    env = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    script = str(Path(__file__).parent / "fp8_interpreted.py")
    done = subprocess.run([sys.executable, script], env=env, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
