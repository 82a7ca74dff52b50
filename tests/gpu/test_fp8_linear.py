"""The FP8 linear and the fused blocks on the GPU: gradients, compile, CUDA graphs, checkpointing, autocast."""

import pytest
import torch
import torch.nn.functional as F
from fp8_cases import randn, relative
from torch import nn
from torch.utils.checkpoint import checkpoint

from verl.jetrl.fp8 import ops
from verl.jetrl.fp8.linear import SAVED, Fp8Linear, Wgrad, bf16_linear, fp8_linear, fp8_rms_norm_linear, fp8_swiglu_mlp
from verl.jetrl.model.autograd import add_head_gradient
from verl.jetrl.model.decoder import Weight

WGRADS = [Wgrad(groups, saved) for groups in ops.TRANSPOSED_GROUPS for saved in SAVED]


def gradients(y, inputs, dy):
    return torch.autograd.grad(y, inputs, dy)


@pytest.mark.parametrize("wgrad", WGRADS, ids=lambda w: f"{w.x_groups}-{w.saved}")
@pytest.mark.parametrize("M", (1, 200, 1024))
def test_gradients(wgrad, M):
    x, w, b = randn(M, 576).requires_grad_(), randn(960, 576, scale=0.05).requires_grad_(), randn(960).requires_grad_()
    dy = randn(M, 960)
    y = fp8_linear(x, w, b, wgrad=wgrad)
    got = gradients(y, (x, w, b), dy)
    inputs = [t.detach().double().requires_grad_() for t in (x, w, b)]
    want_y = F.linear(*inputs)
    want = gradients(want_y, inputs, dy.double())
    for name, a, c in (("y", y, want_y), ("dx", got[0], want[0]), ("dw", got[1], want[1])):
        # FP8, and visibly so; but the only token of a group is its maximum, which FP8 represents exactly.
        assert (5e-3 if M > 1 else 0) < relative(a, c) < 7e-2, name
    assert relative(got[2], want[2]) < 1e-2


def test_saved_bf16_gives_the_bytes_of_saved_fp8():
    x, w, dy = randn(300, 256), randn(384, 256).requires_grad_(), randn(300, 384)
    for groups in ops.TRANSPOSED_GROUPS:
        once, later = (
            gradients(fp8_linear(x, w, wgrad=Wgrad(groups, saved)), (w,), dy)[0] for saved in ("fp8", "bf16")
        )  # fmt: skip
        assert torch.equal(once, later)


def test_gpu_agrees_with_the_cpu_reference():
    x, w, dy = randn(200, 256), randn(384, 256, scale=0.05), randn(200, 384)
    results = []
    for device in ("cuda", "cpu"):
        leaves = [t.to(device).requires_grad_() for t in (x, w)]
        y = fp8_linear(*leaves)
        results.append([t.cpu() for t in (y, *gradients(y, leaves, dy.to(device)))])
    for got, want in zip(*results, strict=True):
        assert relative(got, want) < 4e-3  # the same bytes; sums differ in order and in BF16 rounding only


def test_main_grad_accumulates_in_fp32():
    x, w, dy = randn(256, 256), nn.Parameter(randn(384, 256)), randn(256, 384)
    for wgrad in (Wgrad("block"), Wgrad("group")):
        (once,) = gradients(fp8_linear(x, w, wgrad=wgrad), (w,), dy)
        main_grad = torch.zeros(384, 256, device="cuda")
        for _ in range(3):
            fp8_linear(x, w, main_grad_NK=main_grad, wgrad=wgrad).backward(dy)
        assert w.grad is None and relative(main_grad, 3 * once.double()) < 3e-3


def test_quantized_weight_is_used_and_only_the_gradient_reaches_the_parameter():
    x, w, dy = randn(128, 256), nn.Parameter(randn(384, 256)), randn(128, 384)
    other = ops.quantize_weight(randn(384, 256))
    y = fp8_linear(x, w, quantized=other)
    assert torch.equal(y, ops.fprop(ops.quantize_rows(x), other.forward))
    y.backward(dy)
    assert w.grad.dtype == w.dtype


def block_reference(h, residual, norm, gate_up, down):
    s = h + residual
    n = s * torch.rsqrt(s.square().mean(-1, keepdim=True) + 1e-6) * norm
    gate, up = F.linear(n, gate_up).chunk(2, -1)
    return F.linear(F.silu(gate) * up, down), s


def test_fused_blocks():
    M, K, I = 300, 512, 768
    leaves = [randn(M, K), randn(M, K), randn(K), randn(2 * I, K, scale=0.05), randn(K, I, scale=0.05)]
    leaves = [t.requires_grad_() for t in leaves]
    h, residual, norm, gate_up, down = leaves
    dy, dh = randn(M, K), randn(M, K)
    y, s = fp8_swiglu_mlp(h, norm, 1e-6, gate_up, down, residual)
    got = gradients((y, s), leaves, (dy, dh))
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    want_y, want_s = block_reference(*doubles)
    want = gradients((want_y, want_s), doubles, (dy.double(), dh.double()))
    assert 5e-3 < relative(y, want_y) < 0.1 and relative(s, want_s) < 5e-3
    for a, b in zip(got, want, strict=True):
        assert relative(a, b) < 0.1
    # The fused forward is the unfused one, bit for bit.
    n, after = fp8_rms_norm_linear(h, norm, 1e-6, gate_up, None, residual)
    normed, unfused = ops.rms_norm(h.detach(), norm.detach(), 1e-6, residual.detach())
    assert torch.equal(after, unfused.h)
    assert torch.equal(n, fp8_linear(normed, gate_up))
    assert torch.equal(y, fp8_linear(ops.silu_mul(n.detach()), down))
    # ... and so is inference, which writes no wgrad operand.
    with torch.no_grad():
        assert torch.equal(fp8_swiglu_mlp(h, norm, 1e-6, gate_up, down, residual)[0], y)


def test_compile():
    x, w, b, dy = randn(200, 256).requires_grad_(), randn(384, 256).requires_grad_(), randn(384), randn(200, 384)
    eager = fp8_linear(x, w, b)
    compiled_linear = torch.compile(lambda x: F.gelu(fp8_linear(x, w, b)), fullgraph=True)
    y = compiled_linear(x)
    assert relative(y, F.gelu(eager)) < 5e-3
    got = gradients(y, (x, w), dy)
    want = gradients(F.gelu(eager), (x, w), dy)
    for a, c in zip(got, want, strict=True):
        assert relative(a, c) < 2e-2
    x = randn(77, 256)
    assert compiled_linear(x).shape == (77, 384)


def test_cuda_graph():
    """Captured once, replayed on other data: eager's bits.  Capture also proves that nothing synchronizes."""
    x, w = randn(64, 256), ops.quantize_weight(randn(512, 256))
    norm, down = randn(256), ops.quantize_weight(randn(256, 256))
    residual = randn(64, 256)

    def block(x):
        n, after = ops.rms_norm_quantize(x, norm, 1e-6, residual)
        return ops.fprop(ops.silu_mul_quantize(ops.fprop(n, w.forward)), down.forward) + after.h

    block(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = block(x)
    for _ in range(3):
        x.copy_(randn(64, 256))
        y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(y, block(x))


def test_training_step_in_a_cuda_graph():
    x, w, dy = randn(256, 256).requires_grad_(), randn(384, 256).requires_grad_(), randn(256, 384)

    def step():
        return gradients(fp8_linear(x, w), (x, w), dy)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    for a, b in zip(captured, step(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpointing(reentrant):
    layer = Fp8Linear(256, 384, device="cuda", dtype=torch.bfloat16)
    x, dy = randn(200, 256).requires_grad_(), randn(200, 384)
    plain = gradients(layer(x), (x, layer.weight), dy)
    checkpoint(layer, x, use_reentrant=reentrant).backward(dy)
    assert torch.equal(x.grad, plain[0]) and torch.equal(layer.weight.grad, plain[1])


def test_autocast_changes_nothing():
    layer = Fp8Linear(256, 384, device="cuda")  # FP32 master
    x, dy = randn(200, 256).requires_grad_(), randn(200, 384)
    plain = layer(x)
    with torch.autocast("cuda", torch.bfloat16):
        cast = layer(x)
        got = gradients(cast, (x, layer.weight), dy)
    assert torch.equal(plain, cast) and got[1].dtype == torch.float32
    for a, b in zip(got, gradients(plain, (x, layer.weight), dy), strict=True):
        assert torch.equal(a, b)


def test_no_host_synchronization():
    x, w, dy = randn(200, 256).requires_grad_(), randn(384, 256).requires_grad_(), randn(200, 384)
    gradients(fp8_linear(x, w), (x, w), dy)
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients(fp8_linear(x, w), (x, w), dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_operators_are_well_formed():
    """torch.library.opcheck: the fake implementations agree in shape, dtype and strides."""
    x = randn(200, 256)
    q, s = ops.quantize_rows(x)
    w = ops.quantize_weight(randn(384, 256))
    for op, args in (
        (torch.ops.jetrl.quantize_both, (x, "block")),
        (torch.ops.jetrl.quantize_both, (x, "group")),
        (torch.ops.jetrl.quantize_weight, (x,)),
        (torch.ops.jetrl.quantize_blocks_, (torch.zeros_like(w.q), torch.zeros_like(w.s), randn(384, 256).float())),
        (torch.ops.jetrl.gemm_nt, (q, s, w.q, w.s, None, "deep_gemm")),
        (torch.ops.jetrl.rms_norm_quantize, (x, randn(256), 1e-6, randn(200, 256))),
        (torch.ops.jetrl.rms_norm_transposed, (x, torch.ones(200, device="cuda"), randn(256), "block")),
        (torch.ops.jetrl.silu_mul_backward_quantize, (randn(200, 512), x)),
    ):
        torch.library.opcheck(op, args, test_utils="test_faketensor")


def test_head_gradient_is_added_in_fp32():
    """Into a view of a larger accumulator, over chunks of tokens; the same bits each time."""
    head = Weight(1100, 256).to_empty(device="cuda")
    head.weight.data.normal_()
    x, dy = randn(400, 256), randn(400, 1100)
    want = dy.double().t() @ x.double()
    sums = []
    for _ in range(2):
        memory = torch.ones(1200, 256, device="cuda")
        for rows in (slice(0, 300), slice(300, 400)):
            dx = add_head_gradient(head, memory[50:1150], dy[rows], x[rows])
            assert relative(dx, dy[rows] @ head.weight) < 5e-3
        assert bool((memory[:50] == 1).all()) and bool((memory[1150:] == 1).all())
        sums.append(memory[50:1150] - 1)
    assert relative(sums[0], want) < 1e-5 and torch.equal(*sums)


def test_lm_head():
    x, w, dy = randn(64, 256).requires_grad_(), randn(1024, 256).requires_grad_(), randn(64, 1024)
    got = gradients(bf16_linear(x, w), (x, w), dy)
    want = gradients(F.linear(x, w), (x, w), dy)
    for a, b in zip(got, want, strict=True):
        assert relative(a, b) < 5e-3
