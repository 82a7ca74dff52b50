"""q/k norm and rotary embedding on the GPU: the CPU reference's bits, gradients, invariance, CUDA graphs, compile.

``python tests/gpu/test_rope.py`` prints times against copies of as many bytes.
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from fp8_cases import randn, relative, same  # noqa: E402

from verl.jetrl.model import rope  # noqa: E402
from verl.jetrl.model.rope import qk_norm_rope  # noqa: E402

# model: (q heads, k and v heads, head_dim, q/k norm)
MODELS = {
    "Qwen3-8B": (32, 8, 128, True),
    "Qwen2.5-7B": (28, 4, 128, False),
    "Llama-3.1-8B": (32, 8, 128, False),
    "SmolLM2-135M": (9, 3, 64, False),
    "96 columns": (4, 2, 96, True),
    "256 columns": (2, 1, 256, True),
    "6 columns": (2, 1, 6, True),
}
P = 4096


def table(D: int) -> torch.Tensor:
    """Angles of theta 1e6, in the layout of rope_table."""
    angles = torch.arange(P, dtype=torch.float64)[:, None] * 1e6 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    return torch.cat((angles.cos(), angles.sin()), -1).float().cuda()


def case(model: str, M: int):
    """The function's arguments, positions in any order."""
    heads, kv_heads, D, norm = MODELS[model]
    qkv = randn(M, (heads + 2 * kv_heads) * D)
    weights = (1 + randn(D, scale=0.3), 1 + randn(D, scale=0.3)) if norm else (None, None)
    return qkv, torch.randint(0, P, (M,), device="cuda"), table(D), heads, kv_heads, D, *weights


def cpu(arguments):
    return [a.detach().cpu() if isinstance(a, torch.Tensor) else a for a in arguments]


@pytest.mark.parametrize("M", (0, 1, 5, 64, 777))
@pytest.mark.parametrize("model", MODELS)
def test_forward_has_the_bits_of_the_cpu_reference(model, M):
    arguments = case(model, M)
    for a, b in zip(qk_norm_rope(*arguments), qk_norm_rope(*cpu(arguments)), strict=True):
        same(a.cpu(), b)


def test_wide_magnitudes_zeros_nan_and_positions_outside_the_table():
    qkv, positions, *rest = case("Qwen3-8B", 40)
    qkv = (qkv.float() * torch.exp(10 * torch.randn(40, 1, device="cuda"))).bfloat16()
    qkv[0], qkv[1] = 0.0, -0.0
    qkv[2, 5], qkv[3, 7] = torch.nan, torch.inf
    qkv[4] *= 2.0**-100
    positions[5], positions[6] = P, -1
    got = qk_norm_rope(qkv, positions, *rest)
    for a, b in zip(got, qk_norm_rope(*cpu((qkv, positions, *rest))), strict=True):
        same(a.cpu(), b)
    assert got[0][5:7].isnan().all()


@pytest.mark.parametrize("M", (1, 37, 3000))
@pytest.mark.parametrize("model", MODELS)
def test_gradients(model, M):
    qkv, positions, cos_sin, heads, kv_heads, D, *weights = case(model, M)
    leaves = [qkv.requires_grad_(), *(w.float().requires_grad_() for w in weights if w is not None)]
    outputs = qk_norm_rope(leaves[0], positions, cos_sin, heads, kv_heads, D, *leaves[1:])
    grads = [randn(o.shape[1], M, D).transpose(0, 1) for o in outputs]
    got = torch.autograd.grad(outputs, leaves, grads)
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    x = doubles[0].unflatten(1, (-1, D))
    cos, sin = cos_sin[positions][:, None].double().chunk(2, -1)
    want_outputs, first = [], 0
    for n, weight in ((heads, 1), (kv_heads, 2)):
        y = x[:, first : first + n]
        if len(doubles) > 1:
            y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * doubles[weight]
        y1, y2 = y.chunk(2, -1)
        want_outputs.append(torch.cat((y1 * cos - y2 * sin, y2 * cos + y1 * sin), -1))
        first += n
    want_outputs.append(x[:, first:])
    want = torch.autograd.grad(want_outputs, doubles, [g.double() for g in grads])
    for a, b in zip(got, want, strict=True):
        assert relative(a, b) < 8e-3  # a few random terms: their BF16 roundings do not average out
    again = torch.autograd.grad(qk_norm_rope(leaves[0], positions, cos_sin, heads, kv_heads, D, *leaves[1:]), leaves, grads)
    for a, b in zip(got, again, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("model", MODELS)
def test_a_tokens_bits_do_not_depend_on_the_others(model):
    qkv, positions, *rest = case(model, 4096)
    full = qk_norm_rope(qkv, positions, *rest)
    subsets = [torch.randperm(4096, device="cuda")[:n] for n in (1, 2, 7, 33, 64, 256, 4096)]
    for rows in (*subsets, torch.arange(4095, -1, -1, device="cuda")):
        for p in (positions[rows], positions[rows].int()):
            for a, b in zip(qk_norm_rope(qkv[rows], p, *rest), full, strict=True):
                assert torch.equal(a, b[rows])


@pytest.mark.parametrize("left", (0, 1, 8))
def test_strided_and_misaligned_rows(left):
    """Another alignment loads in other pieces; the bits stay."""
    qkv, *rest = case("Qwen3-8B", 100)
    wide = torch.full((100, qkv.shape[1] + 24 + left), torch.nan, dtype=torch.bfloat16, device="cuda")
    view = wide[:, left : left + qkv.shape[1]].copy_(qkv)
    for a, b in zip(qk_norm_rope(view, *rest), qk_norm_rope(qkv, *rest), strict=True):
        assert torch.equal(a, b)


def test_cuda_graph():
    """Captured once, replayed on other data: eager's bits.  Capture also proves that nothing synchronizes."""
    qkv, positions, *rest = case("Qwen3-8B", 64)
    qk_norm_rope(qkv, positions, *rest)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = qk_norm_rope(qkv, positions, *rest)
    for _ in range(3):
        qkv.copy_(randn(*qkv.shape))
        positions.copy_(torch.randint(0, P, (64,), device="cuda"))
        graph.replay()
        for a, b in zip(captured, qk_norm_rope(qkv, positions, *rest), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("model", ("Qwen3-8B", "SmolLM2-135M"))
def test_compile(model):
    qkv, positions, *rest = case(model, 100)

    def neighbours(x, positions):
        q, k, v = qk_norm_rope(x * 2, positions, *rest)
        return q.sin(), k * 3, v + 1

    compiled = torch.compile(neighbours, fullgraph=True)
    with torch.inference_mode():
        for a, b in zip(compiled(qkv, positions), neighbours(qkv, positions), strict=True):
            assert relative(a, b) < 1e-2
        assert compiled(qkv[:77], positions[:77])[0].shape[0] == 77
    x = qkv.requires_grad_()
    grads = [randn(*y.shape) for y in neighbours(x, positions)]
    got, want = (torch.autograd.grad(f(x, positions), x, grads)[0] for f in (compiled, neighbours))
    assert relative(got, want) < 1e-2


def microseconds(f, repeats: int = 50) -> float:
    """One call inside a CUDA graph, so that the host's launch time is not counted."""
    f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            f()
    times = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / repeats)
    return min(times)


def main() -> None:
    """us per call, and over a copy that reads and writes as many bytes.  Small sizes stay in the L2 cache."""
    for model in ("Qwen3-8B", "Llama-3.1-8B", "SmolLM2-135M"):
        for M in (64, 256, 8192, 32768):
            qkv, positions, cos_sin, heads, kv_heads, D, *weights = case(model, M)
            qk = qkv[:, : (heads + kv_heads) * D].contiguous()
            target, target_all = torch.empty_like(qk), torch.empty_like(qkv)
            forward = microseconds(lambda: qk_norm_rope(qkv, positions, cos_sin, heads, kv_heads, D, *weights))  # noqa: B023
            copy = microseconds(lambda: target.copy_(qk))  # noqa: B023
            grads = [randn(M, n, D) for n in (heads, kv_heads, kv_heads)]
            x = qkv if weights[0] is not None else None
            backward = microseconds(
                lambda: rope._ops.qk_norm_rope_backward(*grads, x, positions, cos_sin, *weights, 1e-6)  # noqa: B023
            )
            copy_all = microseconds(lambda: target_all.copy_(qkv))  # noqa: B023
            print(
                f"{model} M={M}: forward {forward:.1f} us ({forward / copy:.2f} of a copy), "
                f"backward {backward:.1f} us ({backward / copy_all:.2f} of a copy of qkv)"
            )


if __name__ == "__main__":
    main()
