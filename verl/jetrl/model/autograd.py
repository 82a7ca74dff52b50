"""The decoder's steps with gradients: the operators of :mod:`verl.jetrl.model.decoder` plus their backward.

Weights are no autograd tensors here: they are views of the arena, which holds no gradients.  Each backward adds its weight
gradient to the FP32 ``main_grad`` of the layer, summed over micro-batches: a tensor, or a :class:`GradientSink` that is
opened once per backward; :func:`anchor` keeps the graph alive down to the first layer.  What the forward saves of an
activation is wgrad's FP8 operand, rounded once from BF16; after a norm not even that: it is made in the backward from the
norm's input, which its own backward needs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from verl.jetrl.fp8 import ops
from verl.jetrl.fp8.format import BLOCK, Quantized
from verl.jetrl.fp8.ops import Norm

if TYPE_CHECKING:
    from verl.jetrl.model.decoder import Fp8Linear, Mlp, Weight

X_GROUPS = "block"  # wgrad's x operand: 128x128 blocks, the fast kernel (docs/fp8.md has its error and speed)


class GradientSink(Protocol):
    """A weight's gradient whose sum lies elsewhere."""

    def opened(self, zeroed: bool = True) -> AbstractContextManager[Tensor]:
        """Gives an FP32 matrix for one backward's gradient and takes it back; not ``zeroed``, all of it has to be written."""


def anchor(device: torch.device) -> Tensor:
    """An empty tensor that requires a gradient: what makes the embedding's output part of the graph."""
    return torch.empty(0, device=device, requires_grad=True)


def sink(grad: Tensor | GradientSink | None, what: str, zeroed: bool = True) -> AbstractContextManager[Tensor]:
    """``with sink(layer.main_grad, ...) as grad``: the FP32 tensor that a backward adds the whole gradient to.

    ``zeroed=False``: a sink's is not, and has to be overwritten.
    """
    if grad is None:
        raise RuntimeError(f"{what}: no gradient accumulator; the trainer allocates them before a backward pass")
    return nullcontext(grad) if isinstance(grad, Tensor) else grad.opened(zeroed)


def _linear_backward(
    proj: Fp8Linear, dy_MN: Tensor | None, x_t: Quantized, quantized_dy: tuple[Quantized, Quantized] | None = None
) -> Tensor:
    """dx (M, K) BF16; adds the weight's and the bias's gradients to their accumulators."""
    if proj.bias is not None:
        with sink(proj.bias_grad, "bias") as bias_grad_N:
            bias_grad_N.add_(dy_MN.sum(0, dtype=torch.float32))
    parts, start, dys, dx = proj.part_rows, 0, [], None
    add = isinstance(proj.main_grad, Tensor)  # the parts are all of a sink's matrix: no need to zero it first
    with sink(proj.main_grad, "Fp8Linear", zeroed=False) as main_grad_NK:  # closed before dgrad, which its reduction overlaps
        for rows in parts:
            if quantized_dy is not None:
                dy, dy_t = quantized_dy
            else:
                part_dy = dy_MN if len(parts) == 1 else dy_MN[:, start : start + rows].contiguous()
                dy, dy_t = ops.quantize_both(part_dy, "group")
            ops.wgrad(dy_t, x_t, accumulate_NK=main_grad_NK[start : start + rows], add=add)
            dys.append(dy)
            start += rows
    for index, dy in enumerate(dys):
        part_dx = ops.dgrad(dy, proj.transposed_part(index))
        dx = part_dx if dx is None else dx.float() + part_dx.float()
    return dx.to(torch.bfloat16)


def _norm_backward(norm: Weight, kept: Norm, dn: Tensor, d_residual: Tensor | None) -> Tensor:
    dx, d_norm = ops.rms_norm_backward(dn, kept, norm.weight, d_residual)
    with sink(norm.main_grad, "norm") as main_grad_H:
        main_grad_H.add_(d_norm)
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
        dy_MH = dy_MH.float()
        with sink(ctx.table.main_grad, "embedding") as grad_VH:
            # The same bits run to run: index_put sorts the ids on a GPU, where index_add adds in any order; on the CPU it is
            # the other way round.
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
        with sink(ctx.head.main_grad, "head") as main_grad_VH:
            return add_head_gradient(ctx.head, main_grad_VH, dy_MV.to(torch.bfloat16), x_MH), None


def add_head_gradient(head: Weight, main_grad_VH: Tensor, dy_MV: Tensor, x_MH: Tensor) -> Tensor:
    """dx (M, H) of the head for BF16 ``dy_MV``; adds the head's own gradient to ``main_grad_VH``, its opened sink."""
    _add_matmul(main_grad_VH, dy_MV.t(), x_MH)
    return dy_MV @ head.weight


def _add_matmul(sum_NK: Tensor, a_NM: Tensor, b_MK: Tensor) -> None:
    """``sum += a @ b`` of BF16 matrices, in FP32: the GEMM adds, so that the sum is read and written once."""
    if sum_NK.is_cuda:
        torch.addmm(sum_NK, a_NM, b_MK, out_dtype=torch.float32, out=sum_NK)
    else:
        sum_NK.addmm_(a_NM.float(), b_MK.float())


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
        with sink(norm.main_grad, "norm") as main_grad_D:
            main_grad_D.add_(grad)

    value.register_hook(add)
    return value
