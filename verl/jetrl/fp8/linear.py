"""The FP8 linear of the trainer: three GEMMs, each operand rounded to FP8 once.

=======  =======================  ==========================  =============================
GEMM     computes                 left operand                right operand
=======  =======================  ==========================  =============================
fprop    ``y = x @ w.T``          x, 1x128 along K            w, 128x128 blocks
dgrad    ``dx = dy @ w``          dy, 1x128 along N           w transposed, the same bytes
wgrad    ``dw = dy.T @ x``        dy, 1x128 along tokens      x, 128x128 blocks (default) or
                                                              1x128 along tokens
=======  =======================  ==========================  =============================

The rollout runs only fprop, on the same bytes: its graph is a subgraph of this one.

x and dy are read from memory once and rounded into both of their forms.  Only x's wgrad form is kept for the backward:
one byte per value, half of BF16.  :class:`Wgrad` names the other choices; docs/fp8.md has their gradient errors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from verl.jetrl.fp8 import ops
from verl.jetrl.fp8.format import Quantized
from verl.jetrl.fp8.ops import Fp8Weight, Norm

SAVED = ("fp8", "bf16", "regrouped")


class Wgrad(NamedTuple):
    """How the weight gradient is computed.

    x_groups: ``"block"`` (128x128) or ``"group"`` (1x128 along tokens): the scaling of wgrad's x operand.
    saved: what the forward keeps of x.  ``"fp8"``: the wgrad operand, rounded once from BF16.  ``"bf16"``: x itself,
        quantized in the backward to the same bytes, at twice the memory.  ``"regrouped"``: fprop's FP8 rows,
        dequantized and rounded again in the backward.
    """

    x_groups: str = "block"
    saved: str = "fp8"


DEFAULT = Wgrad()


def _check(wgrad: Wgrad) -> None:
    if wgrad.x_groups not in ops.TRANSPOSED_GROUPS or wgrad.saved not in SAVED:
        raise ValueError(f"{wgrad}: x_groups must be one of {ops.TRANSPOSED_GROUPS}, saved one of {SAVED}")


def _saved_operand(wgrad: Wgrad, tensors: tuple[Tensor, ...]) -> Quantized:
    """wgrad's x operand from what the forward saved."""
    if wgrad.saved == "fp8":
        return Quantized(*tensors)
    if wgrad.saved == "bf16":
        return ops.quantize_transposed(tensors[0], wgrad.x_groups)
    return ops.regroup(Quantized(*tensors), wgrad.x_groups)


def _weight_grad(dy_t: Quantized, x_t: Quantized, main_grad: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The weight's gradient in ``dtype``, or None once it has been added to ``main_grad``."""
    if main_grad is None:
        return ops.wgrad(dy_t, x_t, out_dtype=dtype)
    ops.wgrad(dy_t, x_t, accumulate_NK=main_grad)
    return None


class _Backward(NamedTuple):
    """Gradients of ``y = x @ w.T``; a field is None where nobody asked for it."""

    dx: Tensor | None
    dw: Tensor | None


def _backward(
    dy_MN: Tensor | None,
    quantized_dy: tuple[Quantized, Quantized] | None,
    w_t: Quantized,
    x_operand: tuple[Tensor, ...],
    wgrad: Wgrad,
    main_grad: Tensor | None,
    weight_dtype: torch.dtype,
    need_dx: bool,
    need_dw: bool,
) -> _Backward:
    dx_MK = dw_NK = dy = dy_t = None
    if quantized_dy is not None:
        dy, dy_t = quantized_dy
    elif need_dx and need_dw:
        dy, dy_t = ops.quantize_both(dy_MN, "group")
    elif need_dx:
        dy = ops.quantize_rows(dy_MN)
    elif need_dw:
        dy_t = ops.quantize_cols(dy_MN)
    if need_dx:
        dx_MK = ops.dgrad(dy, w_t)
    if need_dw:
        dw_NK = _weight_grad(dy_t, _saved_operand(wgrad, x_operand), main_grad, weight_dtype)
    return _Backward(dx_MK, dw_NK)


class _Linear(torch.autograd.Function):
    """x -> y.  ``weight_NK`` only carries the gradient; the bytes come from ``w_q, w_s, w_q_t``."""

    @staticmethod
    def forward(ctx, x_MK, weight_NK, bias_N, w_q, w_s, w_q_t, main_grad, wgrad: Wgrad):
        ctx.wgrad, ctx.weight_dtype, ctx.main_grad = wgrad, weight_NK.dtype, main_grad
        ctx.bias_dtype = None if bias_N is None else bias_N.dtype
        ctx.need_dw = ctx.needs_input_grad[1]
        operand: tuple[Tensor, ...] = ()
        if ctx.need_dw and wgrad.saved == "fp8":
            x, operand = ops.quantize_both(x_MK, wgrad.x_groups)
        else:
            x = ops.quantize_rows(x_MK)
            if ctx.need_dw:
                operand = x if wgrad.saved == "regrouped" else (x_MK,)
        ctx.save_for_backward(w_s, w_q_t, *operand)
        return ops.fprop(x, Quantized(w_q, w_s), bias_N)

    @staticmethod
    def backward(ctx, dy_MN):
        w_s, w_q_t, *operand = ctx.saved_tensors
        dy_MN = dy_MN.to(torch.bfloat16)
        need_dx, _, need_db = ctx.needs_input_grad[:3]
        dx, dw = _backward(
            dy_MN, None, Quantized(w_q_t, w_s.t()), tuple(operand), ctx.wgrad, ctx.main_grad, ctx.weight_dtype,
            need_dx, ctx.need_dw,
        )  # fmt: skip
        db = dy_MN.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if need_db else None
        return dx, dw, db, None, None, None, None, None


class _NormLinear(torch.autograd.Function):
    """(x, residual) -> (y, h): h = x + residual, y = RMSNorm(h) @ w.T, with the norm's FP8 forms written directly."""

    @staticmethod
    def forward(ctx, x_MK, residual_MK, norm_K, eps, weight_NK, bias_N, w_q, w_s, w_q_t, main_grad, wgrad: Wgrad):
        ctx.wgrad, ctx.weight_dtype, ctx.main_grad = wgrad, weight_NK.dtype, main_grad
        ctx.bias_dtype = None if bias_N is None else bias_N.dtype
        ctx.norm_dtype = norm_K.dtype
        ctx.need_dw = ctx.needs_input_grad[4]
        x, norm = ops.rms_norm_quantize(x_MK, norm_K, eps, residual_MK)
        ctx.save_for_backward(norm.h, norm.rstd, norm_K, w_s, w_q_t)
        h = x_MK.view_as(x_MK) if residual_MK is None else norm.h
        return ops.fprop(x, Quantized(w_q, w_s), bias_N), h

    @staticmethod
    def backward(ctx, dy_MN, dh_MK):
        h, rstd, norm_K, w_s, w_q_t = ctx.saved_tensors
        dy_MN = dy_MN.to(torch.bfloat16)
        operand = ops.rms_norm_transposed(Norm(h, rstd), norm_K, ctx.wgrad.x_groups) if ctx.need_dw else ()
        dn, dw = _backward(
            dy_MN, None, Quantized(w_q_t, w_s.t()), tuple(operand), ctx.wgrad, ctx.main_grad, ctx.weight_dtype,
            True, ctx.need_dw,
        )  # fmt: skip
        dx, d_norm = ops.rms_norm_backward(dn, Norm(h, rstd), norm_K, dh_MK)
        db = dy_MN.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if ctx.needs_input_grad[5] else None
        d_residual = dx if ctx.needs_input_grad[1] else None
        return dx, d_residual, d_norm.to(ctx.norm_dtype), None, dw, db, None, None, None, None, None


class _SwigluMlp(torch.autograd.Function):
    """(x, residual) -> (y, h): RMSNorm, gate_up, SiLU*mul and down in one graph node.

    One node because the gradient of gate_up's output then goes from SiLU's backward into FP8 without a BF16 copy.
    """

    @staticmethod
    def forward(
        ctx, x_MK, residual_MK, norm_K, eps, gate_up_weight, down_weight, gu_q, gu_s, gu_q_t, d_q, d_s, d_q_t,
        gate_up_main_grad, down_main_grad, wgrad: Wgrad,
    ):  # fmt: skip
        ctx.wgrad, ctx.main_grads = wgrad, (gate_up_main_grad, down_main_grad)
        ctx.dtypes = gate_up_weight.dtype, down_weight.dtype, norm_K.dtype
        ctx.need_dw = ctx.needs_input_grad[4], ctx.needs_input_grad[5]
        act_t: tuple[Tensor, ...] = ()
        x, norm = ops.rms_norm_quantize(x_MK, norm_K, eps, residual_MK)
        gate_up = ops.fprop(x, Quantized(gu_q, gu_s))
        if ctx.need_dw[1]:
            act, act_t = ops.silu_mul_quantize_both(gate_up, wgrad.x_groups)
        else:
            act = ops.silu_mul_quantize(gate_up)
        ctx.save_for_backward(norm.h, norm.rstd, norm_K, gu_s, gu_q_t, d_s, d_q_t, gate_up, *act_t)
        h = x_MK.view_as(x_MK) if residual_MK is None else norm.h
        return ops.fprop(act, Quantized(d_q, d_s)), h

    @staticmethod
    def backward(ctx, dy_MK, dh_MK):
        h, rstd, norm_K, gu_s, gu_q_t, d_s, d_q_t, gate_up, *act_t = ctx.saved_tensors
        act_t = tuple(act_t)
        x_t = ops.rms_norm_transposed(Norm(h, rstd), norm_K, ctx.wgrad.x_groups) if ctx.need_dw[0] else ()
        d_act, d_down = _backward(
            dy_MK.to(torch.bfloat16), None, Quantized(d_q_t, d_s.t()), act_t, ctx.wgrad, ctx.main_grads[1],
            ctx.dtypes[1], True, ctx.need_dw[1],
        )  # fmt: skip
        d_gu = ops.silu_mul_backward_quantize(gate_up, d_act)
        dn, d_gate_up = _backward(
            None, d_gu, Quantized(gu_q_t, gu_s.t()), x_t, ctx.wgrad, ctx.main_grads[0], ctx.dtypes[0], True,
            ctx.need_dw[0],
        )  # fmt: skip
        dx, d_norm = ops.rms_norm_backward(dn, Norm(h, rstd), norm_K, dh_MK)
        d_residual = dx if ctx.needs_input_grad[1] else None
        nones = (None,) * 9
        return dx, d_residual, d_norm.to(ctx.dtypes[2]), None, d_gate_up, d_down, *nones


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).to(torch.bfloat16).contiguous()


def _quantized(weight_NK: Tensor, quantized: Fp8Weight | None) -> Fp8Weight:
    if quantized is not None:
        return quantized
    with torch.no_grad():
        return ops.quantize_weight(weight_NK)


def fp8_linear(
    x: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    quantized: Fp8Weight | None = None,
    main_grad_NK: Tensor | None = None,
    wgrad: Wgrad = DEFAULT,
) -> Tensor:
    """``x @ weight.T + bias`` with FP8 GEMMs in forward and backward.

    Args:
        x: (..., K), rounded to BF16 first.  weight_NK: (N, K), rounded to BF16 before it is quantized, so that a BF16
        export quantizes to the same bytes.  bias_N: (N,), added in BF16 to the BF16 product.
        quantized: the weight's FP8 bytes where they exist already; ``weight_NK`` then only receives the gradient.
        main_grad_NK: FP32 (N, K) to which the weight's gradient is added; autograd then gets none for it.
    Returns: (..., N) BF16.
    """
    _check(wgrad)
    w = _quantized(weight_NK, quantized)
    y_MN = _Linear.apply(_flat(x), weight_NK, bias_N, *w, main_grad_NK, wgrad)
    return y_MN.view(*x.shape[:-1], w.q.shape[0])


def fp8_rms_norm_linear(
    x: Tensor,
    norm_weight_K: Tensor,
    eps: float,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    quantized: Fp8Weight | None = None,
    main_grad_NK: Tensor | None = None,
    wgrad: Wgrad = DEFAULT,
) -> tuple[Tensor, Tensor]:
    """``(fp8_linear(rms_norm(x + residual)), x + residual)`` with the norm fused into the quantizer.

    ``wgrad.saved`` must be ``"fp8"``: the norm's BF16 output never exists.  Other arguments as in :func:`fp8_linear`.
    """
    _check_fused(wgrad)
    w = _quantized(weight_NK, quantized)
    flat_residual = None if residual is None else _flat(residual)
    y, h = _NormLinear.apply(
        _flat(x), flat_residual, norm_weight_K, eps, weight_NK, bias_N, *w, main_grad_NK, wgrad
    )  # fmt: skip
    return y.view(*x.shape[:-1], w.q.shape[0]), h.view(x.shape)


def fp8_swiglu_mlp(
    x: Tensor,
    norm_weight_K: Tensor,
    eps: float,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    residual: Tensor | None = None,
    *,
    quantized: tuple[Fp8Weight, Fp8Weight] | None = None,
    main_grads: tuple[Tensor, Tensor] | None = None,
    wgrad: Wgrad = DEFAULT,
) -> tuple[Tensor, Tensor]:
    """The MLP block ``(down(silu(gate) * up), h)`` of ``h = x + residual``, ``gate, up = gate_up(rms_norm(h))``.

    Args:
        gate_up_weight: (2I, K), gate first.  down_weight: (K, I).  I must be a multiple of 128.
        main_grads: FP32 targets of (gate_up, down).  Other arguments as in :func:`fp8_rms_norm_linear`.
    """
    _check_fused(wgrad)
    gate_up, down = quantized or (_quantized(gate_up_weight, None), _quantized(down_weight, None))
    flat_residual = None if residual is None else _flat(residual)
    y, h = _SwigluMlp.apply(
        _flat(x), flat_residual, norm_weight_K, eps, gate_up_weight, down_weight, *gate_up, *down,
        *(main_grads or (None, None)), wgrad,
    )  # fmt: skip
    return y.view(x.shape), h.view(x.shape)


def _check_fused(wgrad: Wgrad) -> None:
    _check(wgrad)
    if wgrad.saved != "fp8":
        raise ValueError(f"{wgrad}: fused operators never hold the BF16 activation; use fp8_linear for saved={wgrad.saved!r}")


class _LmHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_MK, weight_NK):
        ctx.save_for_backward(x_MK, weight_NK)
        return ops.bf16_gemm_nt(x_MK, weight_NK)

    @staticmethod
    def backward(ctx, dy_MN):
        x_MK, weight_NK = ctx.saved_tensors
        dy_MN = dy_MN.to(torch.bfloat16)
        dx = dy_MN @ weight_NK.to(torch.bfloat16) if ctx.needs_input_grad[0] else None
        dw = (dy_MN.t() @ x_MK).to(weight_NK.dtype) if ctx.needs_input_grad[1] else None
        return dx, dw


def bf16_linear(x: Tensor, weight_NK: Tensor) -> Tensor:
    """``x @ weight.T`` in BF16 (the lm_head): (..., K) -> (..., N); on a GPU rows are independent."""
    return _LmHead.apply(_flat(x), weight_NK).view(*x.shape[:-1], weight_NK.shape[0])


class Fp8Linear(nn.Linear):
    """``nn.Linear`` whose GEMMs run in FP8; parameters and state-dict names are those of ``nn.Linear``.

    ``quantized``: the weight's bytes, when something else keeps them (the weight arena); None quantizes the weight in
    every forward.  ``main_grad``: an FP32 accumulator for the weight gradient.  ``wgrad``: see :class:`Wgrad`.
    """

    quantized: Fp8Weight | None = None
    main_grad: Tensor | None = None
    wgrad: Wgrad = DEFAULT

    def forward(self, x: Tensor) -> Tensor:
        return fp8_linear(x, self.weight, self.bias, quantized=self.quantized, main_grad_NK=self.main_grad, wgrad=self.wgrad)
