"""The three FP8 GEMMs on the GPU: values, row invariance on every model shape, backends, biases, ragged sizes."""

import pytest
import torch
from fp8_cases import MODELS, SHAPES, VOCABULARIES, randn, relative

from verl.jetrl.fp8 import format as ref
from verl.jetrl.fp8 import gemm, ops
from verl.jetrl.fp8.format import Quantized, groups


def exact(a: Quantized, b: Quantized) -> torch.Tensor:
    """The product of the quantized values in FP64."""
    s_a = ref.expand(a.s, a.q.shape).double()
    s_b = ref.expand(b.s, b.q.shape).double()
    return (a.q.double() * s_a) @ (b.q.double() * s_b).t()


def same_rows(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    assert torch.equal(got, want), f"{what}: {int((got != want).any(1).sum())} of {got.shape[0]} rows differ"


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_fprop_and_dgrad_rows_do_not_depend_on_the_batch(shape):
    """Any subset and order of rows, one token included, gives the bits of the full batch."""
    N, K = shape
    M = 8192
    w = ops.quantize_weight(randn(N, K, scale=0.02))
    for name, product, width in (("fprop", w.forward, K), ("dgrad", w.transposed, N)):
        x = randn(M, width)
        full = ops.fprop(ops.quantize_rows(x), product)
        assert relative(full[:256], exact(ops.quantize_rows(x[:256]), product)) < 5e-3
        for m in (1, 2, 7, 16, 33, 64, 100, 128, 200, 256, 300, 512, 777, 1024, 2048, 4096):
            rows = torch.randperm(M, device="cuda")[:m]
            same_rows(ops.fprop(ops.quantize_rows(x[rows]), product), full[rows], f"{name} {shape}, {m} rows")


@pytest.mark.parametrize("model", MODELS)
def test_fused_projection_is_its_parts(model):
    """The trainer may run q, k, v (gate, up) one by one where the rollout runs them fused: the same bits."""
    for layer, cuts in (("qkv", 3), ("gate_up", 2)):
        N, K = MODELS[model][layer]
        part = 128 * max(1, N // cuts // 128)
        w, x = ops.quantize_blocks(randn(N, K, scale=0.02)), ops.quantize_rows(randn(500, K))
        fused = ops.fprop(x, w)
        for start in range(0, N, part):
            rows = slice(start, min(N, start + part))
            blocks = slice(start // 128, groups(rows.stop))
            alone = ops.fprop(x, Quantized(w.q[rows], w.s[blocks]))
            assert torch.equal(alone, fused[:, rows]), (model, layer, start)


@pytest.mark.parametrize("shape", ((6144, 4096), (4096, 12288), (960, 576), (576, 1536)), ids=str)
@pytest.mark.parametrize("M", (1, 100, 512, 2048))
def test_wgrad(shape, M):
    N, K = shape
    dy, x = randn(M, N), randn(M, K)
    dy_t = ops.quantize_cols(dy)
    for transposed in ops.TRANSPOSED_GROUPS:
        x_t = ops.quantize_transposed(x, transposed)
        want = exact(dy_t, x_t)
        target = randn(N, K).float()
        before = target.clone()
        assert ops.wgrad(dy_t, x_t, target) is target
        assert relative(target - before, want) < 5e-3
        over = ops.wgrad(dy_t, x_t, torch.full_like(target, torch.nan), add=False)
        assert torch.equal(over, ops.wgrad(dy_t, x_t, torch.zeros_like(target)))
        for dtype in (torch.float32, torch.bfloat16):
            got = ops.wgrad(dy_t, x_t, out_dtype=dtype)
            assert got.dtype == dtype and relative(got, want) < 5e-3
        if transposed == "group":
            assert relative(ops.wgrad(dy_t, x_t), want) < 3e-4  # FP32 throughout
        # Not silently BF16: FP8 rounding is visible, except that a group's only token is its exact maximum.
        if M > 1:
            assert relative(want, dy.double().t() @ x.double()) > 1e-2


def test_cublaslt_agrees_with_deep_gemm():
    x, w = randn(2048, 4096), ops.quantize_blocks(randn(6144, 4096, scale=0.02))
    x = ops.quantize_rows(x)
    assert relative(ops.fprop(x, w, backend="cublaslt"), ops.fprop(x, w)) < 3e-3
    for M in (128, 640, 2048):
        dy_t, x = ops.quantize_cols(randn(M, 1024)), randn(M, 512)
        for transposed in ops.TRANSPOSED_GROUPS:
            x_t = ops.quantize_transposed(x, transposed)
            theirs = gemm.cublaslt_gemm_nt(dy_t, x_t, torch.float32)
            assert relative(theirs, ops.wgrad(dy_t, x_t)) < 3e-3


def test_wgrad_compiles_once_for_all_token_counts(tmp_path):
    """DeepGEMM keeps one directory per compiled kernel; new token counts must not add any."""
    import os
    import subprocess
    import sys

    code = """
import os, torch
from verl.jetrl.fp8 import ops
cache = os.environ["DG_JIT_CACHE_DIR"]
counts = []
for M in (1024, 1152, 1280, 4096):
    dy_t = ops.quantize_cols(torch.randn(M, 256, device="cuda"))
    for form in ("block", "group"):
        ops.wgrad(dy_t, ops.quantize_transposed(torch.randn(M, 512, device="cuda"), form))
    counts.append(sum(f.endswith(".cubin") for _, _, files in os.walk(cache) for f in files))
assert counts[0] == 2 and counts[-1] == 2, counts
"""
    env = dict(os.environ, DG_JIT_CACHE_DIR=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_zero_tokens():
    w = ops.quantize_weight(randn(256, 384))
    empty = ops.quantize_rows(randn(0, 384))
    assert ops.fprop(empty, w.forward).shape == (0, 256)
    target = torch.ones(256, 384, device="cuda")
    dy_t = ops.quantize_cols(randn(0, 256))
    for transposed in ops.TRANSPOSED_GROUPS:
        x_t = ops.quantize_transposed(randn(0, 384), transposed)
        assert not ops.wgrad(dy_t, x_t).any()
        assert (ops.wgrad(dy_t, x_t, target) == 1).all()


def test_bias():
    x, w, bias = ops.quantize_rows(randn(100, 256)), ops.quantize_blocks(randn(384, 256)), randn(384)
    assert torch.equal(ops.fprop(x, w, bias), ops.fprop(x, w) + bias)


def test_nan_and_infinity_reach_the_output():
    x = randn(64, 256)
    x[3, 7], x[9, 200] = torch.nan, torch.inf
    y = ops.fprop(ops.quantize_rows(x), ops.quantize_blocks(randn(128, 256)))
    bad = y.isnan().all(1).nonzero().flatten().tolist()
    assert bad == [3, 9] and y[torch.tensor([0, 1, 2, 4])].isfinite().all()


@pytest.mark.parametrize("shape", VOCABULARIES, ids=str)
def test_lm_head_rows_do_not_depend_on_the_batch(shape):
    x, w = randn(1024, shape[1]), randn(*shape, scale=0.02)
    full = ops.bf16_gemm_nt(x, w)
    assert relative(full[:64], x[:64].double() @ w.double().t()) < 5e-3
    for m in (1, 16, 100, 128, 256, 700):
        rows = torch.randperm(1024, device="cuda")[:m]
        same_rows(ops.bf16_gemm_nt(x[rows], w), full[rows], f"lm_head, {m} rows")
