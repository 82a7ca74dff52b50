"""Row invariance of every operator that has rows: any subset of them, in any order, gives the full batch's bits.

On every width of Qwen3-8B, Qwen2.5-7B, Llama-3.1-8B, Qwen3-0.6B and SmolLM2-135M.  The GEMMs' and lm_head's are in
test_fp8_gemm.py; the transposed forms and the weight gradient sum or scale over tokens, and have no rows of their own.
"""

import pytest
import torch
from fp8_cases import HIDDEN, INTERMEDIATE, WIDTHS, randn, same

from verl.jetrl.fp8 import ops

M = 3000
SUBSETS = (1, 2, 7, 33, 64, 65, 127, 128, 129, 300, 1000, 1024, 1025, 2999, M)


def check(run, *inputs):
    """``run`` maps tensors of rows to tensors of rows."""
    full = run(*inputs)
    for m in SUBSETS:
        rows = torch.randperm(M, device="cuda")[:m]
        for got, want in zip(run(*(x[rows] for x in inputs)), full, strict=True):
            same(got, want[rows])


@pytest.mark.parametrize("K", WIDTHS)
def test_quantizers(K):
    x = randn(M, K)
    check(ops.quantize_rows, x)
    for transposed in ops.TRANSPOSED_GROUPS:
        check(lambda x, t=transposed: ops.quantize_both(x, t)[0], x)
    same(ops.quantize_both(x, "block")[0].q, ops.quantize_rows(x).q)


@pytest.mark.parametrize("I", INTERMEDIATE)
def test_silu_mul(I):
    gate_up, dy = randn(M, 2 * I), randn(M, I)
    check(lambda gu: (ops.silu_mul(gu),), gate_up)
    check(ops.silu_mul_quantize, gate_up)
    for transposed in ops.TRANSPOSED_GROUPS:
        check(lambda gu, t=transposed: ops.silu_mul_quantize_both(gu, t)[0], gate_up)
    check(lambda gu, dy: (ops.silu_mul_backward(gu, dy),), gate_up, dy)
    if I % 128 == 0:
        check(lambda gu, dy: ops.silu_mul_backward_quantize(gu, dy)[0], gate_up, dy)


@pytest.mark.parametrize("residual", (False, True), ids=("plain", "residual"))
@pytest.mark.parametrize("K", HIDDEN)
def test_rms_norm(K, residual):
    weight = randn(K)
    inputs = (randn(M, K), randn(M, K)) if residual else (randn(M, K),)

    def bf16(x, r=None):
        y, norm = ops.rms_norm(x, weight, 1e-6, r)
        return y, *norm

    def rows(x, r=None):
        q, norm = ops.rms_norm_quantize(x, weight, 1e-6, r)
        return *q, *norm

    for run in (bf16, rows):
        check(run, *inputs)


@pytest.mark.parametrize("residual", (False, True), ids=("plain", "residual"))
@pytest.mark.parametrize("K", HIDDEN)
def test_rms_norm_backward(K, residual):
    weight, x = randn(K), randn(M, K)
    _, norm = ops.rms_norm(x, weight, 1e-6)

    def dx(dy, h, rstd, d_residual=None):
        return (ops.rms_norm_backward(dy, ops.Norm(h, rstd), weight, d_residual)[0],)

    check(dx, randn(M, K), *norm, *((randn(M, K),) if residual else ()))
