"""The decoder's steps with gradients: the operators of :mod:`verl.jetrl.model.decoder` plus their backward.

Weights are no autograd tensors here: they are views of the arena, which holds no gradients.  Each backward adds its weight
gradient to the FP32 ``main_grad`` of the layer, summed over micro-batches; :func:`anchor` keeps the graph alive down to the
first layer.  What the forward saves of an activation is wgrad's FP8 operand, rounded once from BF16; after a norm not even
that: it is made in the backward from the norm's input, which its own backward needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl.jetrl.fp8 import ops
from verl.jetrl.fp8.format import BLOCK, Quantized
from verl.jetrl.fp8.ops import Norm

if TYPE_CHECKING:
    from verl.jetrl.model.decoder import Fp8Linear, Mlp, Weight

X_GROUPS = "block"  # wgrad's x operand: 128x128 blocks, the fast kernel (docs/fp8.md has its error and speed)
HEAD_ROWS = 16384  # rows of the head's weight gradient computed at a time


def anchor(device: torch.device) -> Tensor:
    """An empty tensor that requires a gradient: what makes the embedding's output part of the graph."""
    return torch.empty(0, device=device, requires_grad=True)


def _sink(grad: Tensor | None, what: str) -> Tensor:
    if grad is None:
        raise RuntimeError(f"{what}: no gradient accumulator; the trainer allocates them before a backward pass")
    return grad


def _linear_backward(
    proj: Fp8Linear, dy_MN: Tensor | None, x_t: Quantized, quantized_dy: tuple[Quantized, Quantized] | None = None
) -> Tensor:
    """dx (M, K) BF16; adds the weight's and the bias's gradients to their accumulators."""
    main_grad_NK = _sink(proj.main_grad, "Fp8Linear")
    if proj.bias is not None:
        _sink(proj.bias_grad, "bias").add_(dy_MN.sum(0, dtype=torch.float32))
    parts, start, dx = proj.part_rows, 0, None
    for index, rows in enumerate(parts):
        if quantized_dy is not None:
            dy, dy_t = quantized_dy
        else:
            dy, dy_t = ops.quantize_both(dy_MN if len(parts) == 1 else dy_MN[:, start : start + rows].contiguous(), "group")
        part_dx = ops.dgrad(dy, proj.transposed_part(index))
        dx = part_dx if dx is None else dx.float() + part_dx.float()
        ops.wgrad(dy_t, x_t, accumulate_NK=main_grad_NK[start : start + rows])
        start += rows
    return dx.to(torch.bfloat16)


def _norm_backward(norm: Weight, kept: Norm, dn: Tensor, d_residual: Tensor | None) -> Tensor:
    dx, d_norm = ops.rms_norm_backward(dn, kept, norm.weight, d_residual)
    _sink(norm.main_grad, "norm").add_(d_norm)
    return dx


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_MH, residual_MH, norm, proj, eps):
        x, kept = ops.rms_norm_quantize(x_MH, norm.weight, eps, residual_MH)
        ctx.norm, ctx.proj = norm, proj
        ctx.save_for_backward(kept.h, kept.rstd)
        return proj.fprop(x), x_MH.view_as(x_MH) if residual_MH is None else kept.h

    @staticmethod
    def backward(ctx, dy_MN, dh_MH):
        kept = Norm(*ctx.saved_tensors)
        x_t = ops.rms_norm_transposed(kept, ctx.norm.weight, X_GROUPS)
        dn = _linear_backward(ctx.proj, dy_MN.contiguous(), x_t)
        dx = _norm_backward(ctx.norm, kept, dn, dh_MH)
        return dx, dx if ctx.needs_input_grad[1] else None, None, None, None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_MK, proj):
        x, x_t = ops.quantize_both(x_MK, X_GROUPS)
        ctx.proj = proj
        ctx.save_for_backward(*x_t)
        return proj.fprop(x)

    @staticmethod
    def backward(ctx, dy_MN):
        return _linear_backward(ctx.proj, dy_MN.contiguous(), Quantized(*ctx.saved_tensors)), None


class _SwigluMlp(torch.autograd.Function):
    """One node, so that the gradient of gate_up's output goes from SiLU's backward into FP8 without a BF16 copy."""

    @staticmethod
    def forward(ctx, x_MH, residual_MH, norm, mlp, eps):
        x, kept = ops.rms_norm_quantize(x_MH, norm.weight, eps, residual_MH)
        gate_up = mlp.gate_up_proj.fprop(x)
        act, act_t = ops.silu_mul_quantize_both(gate_up, X_GROUPS)
        ctx.norm, ctx.mlp = norm, mlp
        ctx.save_for_backward(kept.h, kept.rstd, gate_up, *act_t)
        return mlp.down_proj.fprop(act), kept.h

    @staticmethod
    def backward(ctx, dy_MH, dh_MH):
        h, rstd, gate_up, act_q, act_s = ctx.saved_tensors
        mlp, kept = ctx.mlp, Norm(h, rstd)
        d_act = _linear_backward(mlp.down_proj, dy_MH.contiguous(), Quantized(act_q, act_s))
        if d_act.shape[-1] % BLOCK == 0:
            d_gu, quantized = None, ops.silu_mul_backward_quantize(gate_up, d_act)
        else:
            d_gu, quantized = ops.silu_mul_backward(gate_up, d_act), None
        x_t = ops.rms_norm_transposed(kept, ctx.norm.weight, X_GROUPS)
        dn = _linear_backward(mlp.gate_up_proj, d_gu, x_t, quantized)
        dx = _norm_backward(ctx.norm, kept, dn, dh_MH)
        return dx, dx if ctx.needs_input_grad[1] else None, None, None, None


class _FinalNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_MH, residual_MH, norm, eps):
        y, kept = ops.rms_norm(x_MH, norm.weight, eps, residual_MH)
        ctx.norm = norm
        ctx.save_for_backward(kept.h, kept.rstd)
        return y

    @staticmethod
    def backward(ctx, dy_MH):
        dx = _norm_backward(ctx.norm, Norm(*ctx.saved_tensors), dy_MH.contiguous(), None)
        return dx, dx, None, None


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids_M, _anchor, table):
        ctx.table = table
        ctx.save_for_backward(ids_M)
        return torch.nn.functional.embedding(ids_M, table.weight)

    @staticmethod
    def backward(ctx, dy_MH):
        (ids_M,) = ctx.saved_tensors
        grad_VH, dy_MH = _sink(ctx.table.main_grad, "embedding"), dy_MH.float()
        # The same bits run to run: index_put sorts the ids on a GPU, where index_add adds in any order; on the CPU it is the
        # other way round.
        if grad_VH.is_cuda:
            grad_VH.index_put_((ids_M,), dy_MH, accumulate=True)
        else:
            grad_VH.index_add_(0, ids_M, dy_MH)
        return None, None, None


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_MH, head):
        ctx.head = head
        ctx.save_for_backward(x_MH)
        return ops.bf16_gemm_nt(x_MH, head.weight)

    @staticmethod
    def backward(ctx, dy_MV):
        (x_MH,) = ctx.saved_tensors
        return add_head_gradient(ctx.head, dy_MV.to(torch.bfloat16), x_MH), None


def add_head_gradient(head: Weight, dy_MV: Tensor, x_MH: Tensor) -> Tensor:
    """dx (M, H) of the head for BF16 ``dy_MV``; adds the head's own gradient to its accumulator."""
    main_grad_VH = _sink(head.main_grad, "head")
    for start in range(0, dy_MV.shape[1], HEAD_ROWS):
        rows = slice(start, start + HEAD_ROWS)
        main_grad_VH[rows].add_(_mm_fp32(dy_MV[:, rows].t(), x_MH))
    return dy_MV @ head.weight


def _mm_fp32(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of BF16 matrices, in FP32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def norm_linear(x_MH: Tensor, residual_MH: Tensor | None, norm: Weight, proj: Fp8Linear, eps: float) -> tuple[Tensor, Tensor]:
    """``(proj(rms_norm(h)), h)`` of ``h = x + residual``."""
    return _NormLinear.apply(x_MH, residual_MH, norm, proj, eps)


def linear(x_MK: Tensor, proj: Fp8Linear) -> Tensor:
    """``proj(x)``."""
    return _Linear.apply(x_MK, proj)


def swiglu_mlp(x_MH: Tensor, residual_MH: Tensor, norm: Weight, mlp: Mlp, eps: float) -> tuple[Tensor, Tensor]:
    """The MLP block, see :func:`verl.jetrl.model.decoder.swiglu_mlp`."""
    return _SwigluMlp.apply(x_MH, residual_MH, norm, mlp, eps)


def final_norm(x_MH: Tensor, residual_MH: Tensor, norm: Weight, eps: float) -> Tensor:
    """``rms_norm(x + residual)``."""
    return _FinalNorm.apply(x_MH, residual_MH, norm, eps)


def embed(ids_M: Tensor, table: Weight) -> Tensor:
    """Rows of the embedding."""
    return _Embed.apply(ids_M, anchor(ids_M.device), table)


def head(x_MH: Tensor, weight: Weight) -> Tensor:
    """Logits."""
    return _Head.apply(x_MH, weight)


def leaf(norm: Weight) -> Tensor:
    """The weight as a leaf whose gradient is added to ``main_grad``: for operators with autograd of their own."""
    value = norm.weight.detach().requires_grad_()

    def add(grad: Tensor) -> None:
        _sink(norm.main_grad, "norm").add_(grad)

    value.register_hook(add)
    return value
