"""The FP8 linear of the trainer: three GEMMs, each operand rounded to FP8 once.

=======  =======================  ==========================  =============================
GEMM     computes                 left operand                right operand
=======  =======================  ==========================  =============================
fprop    ``y = x @ w.T``          x, 1x128 along K            w, 128x128 blocks
dgrad    ``dx = dy @ w``          dy, 1x128 along N           w transposed, the same bytes
wgrad    ``dw = dy.T @ x``        dy, 1x128 along tokens      x, 1x128 along tokens
=======  =======================  ==========================  =============================

The rollout runs only fprop, on the same bytes: its graph is a subgraph of this one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from verl.jetrl.fp8 import format as ref
from verl.jetrl.fp8 import ops


class _Fp8Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_MK: Tensor, w_NK: Tensor) -> Tensor:
        w = ops.quantize_blocks(w_NK)
        x_t = ops.quantize_cols(x_MK)
        ctx.save_for_backward(x_t.q, x_t.s, w.q, w.s)
        ctx.weight_dtype = w_NK.dtype
        return ops.fprop(ops.quantize_rows(x_MK), w)

    @staticmethod
    def backward(ctx, dy_MN: Tensor):
        x_q, x_s, w_q, w_s = ctx.saved_tensors
        dy_MN = dy_MN.to(torch.bfloat16)
        dx_MK = dw_NK = None
        if ctx.needs_input_grad[0]:
            dx_MK = ops.dgrad(ops.quantize_rows(dy_MN), ref.transpose(ref.Quantized(w_q, w_s)))
        if ctx.needs_input_grad[1]:
            dw_NK = ops.wgrad(ops.quantize_cols(dy_MN), ref.Quantized(x_q, x_s)).to(ctx.weight_dtype)
        return dx_MK, dw_NK


def fp8_linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` with FP8 GEMMs in forward and backward.

    Args:
        x: (..., K), rounded to BF16 first.  weight_NK: (N, K), rounded to BF16 before it is quantized, so that a BF16
        export quantizes to the same bytes.  bias_N: (N,), added in BF16 to the BF16 product.
    Returns: (..., N) BF16.
    """
    x_MK = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
    y_MN = _Fp8Matmul.apply(x_MK, weight_NK.to(torch.bfloat16))
    y = y_MN.view(*x.shape[:-1], weight_NK.shape[0])
    return y if bias_N is None else y + bias_N.to(torch.bfloat16)


class Fp8Linear(nn.Linear):
    """``nn.Linear`` whose GEMMs run in FP8; parameters and state-dict names are those of ``nn.Linear``."""

    def forward(self, x: Tensor) -> Tensor:
        return fp8_linear(x, self.weight, self.bias)
