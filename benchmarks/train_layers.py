"""What the arms of :mod:`benchmarks.train` change in the trainer's model.

The strongest BF16 baseline is the fork's own decoder step with BF16 GEMMs: the same fused RMSNorm, q/k norm with RoPE,
SiLU*mul and chunked log-probs, on parameters that FSDP2 gathers.  The ablations take one part of the FP8 engine away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType, SimpleNamespace

import torch
from torch import Tensor, nn
from verl.models.transformers.dense_common import CausalLMOutputForPPO

from verl.jetrl.fp8 import ops
from verl.jetrl.fp8.format import Quantized
from verl.jetrl.fp8.linear import fp8_linear, fp8_rms_norm_linear, fp8_swiglu_mlp
from verl.jetrl.fp8.ops import Norm
from verl.jetrl.model import autograd, decoder
from verl.jetrl.model.decoder import Attend
from verl.jetrl.model.rope import qk_norm_rope, rope_table
from verl.jetrl.trainer import log_probs
from verl.jetrl.trainer.decoder import share_decoder

Layer = Callable[[nn.Module, Tensor, Tensor | None, Tensor, Tensor, Attend], tuple[Tensor, Tensor]]
"""(Hugging Face layer, x, residual, positions, RoPE table, attend) to (x, residual), as in the fork's decoder."""


# --- BF16 steps on ordinary parameters ------------------------------------------------------------------------------


class _RmsNorm(torch.autograd.Function):
    """(x, residual) to (rms_norm(h), h) with h = x + residual, in one kernel each way."""

    @staticmethod
    def forward(ctx, x, residual, weight, eps):
        y, kept = ops.rms_norm(x, weight, eps, residual)
        ctx.set_materialize_grads(False)  # nobody uses h after the final norm
        ctx.save_for_backward(kept.h, kept.rstd, weight)
        return y, x.view_as(x) if residual is None else kept.h

    @staticmethod
    def backward(ctx, dy, dh):
        h, rstd, weight = ctx.saved_tensors
        dx, d_weight = ops.rms_norm_backward(dy, Norm(h, rstd), weight, dh)
        return dx, dx if ctx.needs_input_grad[1] else None, d_weight.to(weight.dtype), None


class _Linears(torch.autograd.Function):
    """``x @ w.T`` of several weights side by side in one output, without copying weights or outputs together."""

    @staticmethod
    def forward(ctx, x, *weights):
        ctx.save_for_backward(x, *weights)
        if len(weights) == 1:
            return x @ weights[0].t()
        rows = [w.shape[0] for w in weights]
        y = x.new_empty(x.shape[0], sum(rows))
        for part, w in zip(y.split(rows, 1), weights, strict=True):
            torch.mm(x, w.t(), out=part)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, *weights = ctx.saved_tensors
        dx, grads = None, []
        for part, w in zip(dy.split([w.shape[0] for w in weights], 1), weights, strict=True):
            dx = part @ w if dx is None else dx.addmm_(part, w)
            grads.append(part.t() @ x)
        return dx, *grads


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        return ops.silu_mul(gate_up)

    @staticmethod
    def backward(ctx, dy):
        return ops.silu_mul_backward(*ctx.saved_tensors, dy)


def _rotated(layer: nn.Module, qkv: Tensor, positions: Tensor, rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    a = layer.self_attn
    heads, kv_heads = a.config.num_attention_heads, a.config.num_key_value_heads
    eps = a.config.rms_norm_eps
    return qk_norm_rope(qkv, positions, rope, heads, kv_heads, a.head_dim, a.q_norm.weight, a.k_norm.weight, eps)


def bf16_layer(layer: nn.Module, x: Tensor, residual: Tensor | None, positions: Tensor, rope: Tensor, attend: Attend):
    """The fork's decoder layer with BF16 GEMMs."""
    a, m, eps = layer.self_attn, layer.mlp, layer.self_attn.config.rms_norm_eps
    n, h = _RmsNorm.apply(x, residual, layer.input_layernorm.weight, eps)
    qkv = _Linears.apply(n, a.q_proj.weight, a.k_proj.weight, a.v_proj.weight)
    y = _Linears.apply(attend(*_rotated(layer, qkv, positions, rope)), a.o_proj.weight)
    n, h = _RmsNorm.apply(y, h, layer.post_attention_layernorm.weight, eps)
    act = _SiluMul.apply(_Linears.apply(n, m.gate_proj.weight, m.up_proj.weight))
    return _Linears.apply(act, m.down_proj.weight), h


def requantized_layer(layer: nn.Module, x: Tensor, residual: Tensor | None, positions: Tensor, rope: Tensor, attend: Attend):
    """The fork's FP8 layer without an arena: FSDP2 gathers BF16 weights, and every forward quantizes them again."""
    a, m, eps = layer.self_attn, layer.mlp, layer.self_attn.config.rms_norm_eps
    qkv_weight = torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight])
    qkv, h = fp8_rms_norm_linear(x, layer.input_layernorm.weight, eps, qkv_weight, residual=residual)
    y = fp8_linear(attend(*_rotated(layer, qkv, positions, rope)), a.o_proj.weight)
    gate_up = torch.cat([m.gate_proj.weight, m.up_proj.weight])
    return fp8_swiglu_mlp(y, layer.post_attention_layernorm.weight, eps, gate_up, m.down_proj.weight, residual=h)


class _HeadLogProbs(torch.autograd.Function):
    """The fork's chunked log-probs with an ordinary parameter as head."""

    @staticmethod
    def forward(ctx, x, weight, ids, temperature):
        ctx.save_for_backward(x, weight, ids, temperature)
        return log_probs._forward(x, SimpleNamespace(weight=weight), ids, temperature, len(weight), False)[0]

    @staticmethod
    def backward(ctx, d_log_prob):
        x, weight, ids, temperature = ctx.saved_tensors
        head = SimpleNamespace(weight=weight, main_grad=torch.zeros_like(weight, dtype=torch.float32))
        saved = SimpleNamespace(saved_tensors=(x, ids, temperature), head=head, tokens=len(weight), with_entropy=False)
        dx = log_probs._LogProbs.backward(saved, d_log_prob, None)[0]
        return dx, head.main_grad.to(weight.dtype), None, None


def _head(self: nn.Module, x: Tensor, ids: Tensor, temperature: float, rows: Tensor) -> tuple[Tensor, Tensor | None]:
    M, x, ids = len(x), log_probs.rows_of(x, rows), ids[rows]
    temperature_R = torch.full(ids.shape, temperature, dtype=torch.float32, device=ids.device)
    if torch.is_grad_enabled():
        return log_probs.spread(_HeadLogProbs.apply(x, self.weight, ids, temperature_R), rows, M), None
    found = log_probs._forward(x, SimpleNamespace(weight=self.weight), ids, temperature_R, len(self.weight), True)
    return tuple(log_probs.spread(values, rows, M) for values in found)


def _causal_lm(self: nn.Module, input_ids, attention_mask=None, position_ids=None, temperature=1.0, shift_labels=None, *,
               response_rows, **_):  # fmt: skip
    """What verl calls with ``use_fused_kernels``: log-probs instead of logits, as in the FP8 engine of responses alone."""
    model = self.model(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False)
    # Through the head's own forward: FSDP2 gathers its weight there.
    chosen, entropy = self.lm_head(model.last_hidden_state[0], shift_labels[0], temperature, response_rows)
    return CausalLMOutputForPPO(log_probs=chosen[None], entropy=None if entropy is None else entropy[None])


def chunked_head(module: nn.Module) -> None:
    """The head's log-probs in chunks; the engine's batches need ``use_fused_kernels``."""
    module.lm_head.forward = MethodType(_head, module.lm_head)
    module.forward = MethodType(_causal_lm, module)


def fused(module: nn.Module, layer_forward: Layer) -> None:
    """Makes a Hugging Face model compute with ``layer_forward``, its parameters where FSDP2 finds them."""
    config, body = module.config, module.model
    rope = {torch.device("cpu"): rope_table(config, config.max_position_embeddings)}

    def step(layer: nn.Module, x: Tensor, residual: Tensor | None, positions: Tensor, attend: Attend):
        if x.device not in rope:
            rope[x.device] = rope[torch.device("cpu")].to(x.device)
        # FSDP2 casts what it passes to a layer to BF16; the table of angles is FP32 and goes around it.
        return layer_forward(layer, x, residual, positions, rope[x.device], attend)

    def run(ids: Tensor, positions: Tensor, attends: Sequence[Attend], _: Callable) -> Tensor:
        x, residual = body.embed_tokens(ids), None
        for layer, attend in zip(body.layers, attends, strict=True):
            x, residual = layer(x, residual, positions, attend)  # Hugging Face's layers checkpoint themselves
        return _RmsNorm.apply(x, residual, body.norm.weight, config.rms_norm_eps)[0]

    for layer in body.layers:
        layer.forward = partial(step, layer)
    share_decoder(module, SimpleNamespace(config=config, model=SimpleNamespace(run=run)), with_head=False)
    chunked_head(module)


def compiled(module: nn.Module) -> None:
    """Hugging Face's layers through torch.compile, inside FSDP2's hooks; the head in chunks."""
    for layer in module.model.layers:
        layer.forward = torch.compile(layer.forward)
    chunked_head(module)


# --- the FP8 engine without its fused producers ---------------------------------------------------------------------


class _MasterNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, norm, eps):
        y, kept = ops.rms_norm(x, norm.weight, eps, residual)
        ctx.norm = norm
        ctx.save_for_backward(kept.h, kept.rstd)
        return y, x.view_as(x) if residual is None else kept.h

    @staticmethod
    def backward(ctx, dy, dh):
        dx = autograd._norm_backward(ctx.norm, Norm(*ctx.saved_tensors), dy.contiguous(), dh)
        return dx, dx if ctx.needs_input_grad[1] else None, None, None


class _MasterLinear(torch.autograd.Function):
    """x is read and rounded into both forms (``saved="fp8"``), or into one and kept in BF16 for the backward."""

    @staticmethod
    def forward(ctx, x, proj, saved):
        ctx.proj, ctx.saved = proj, saved
        if saved == "fp8":
            rows, x_t = ops.quantize_both(x, autograd.X_GROUPS)
            ctx.save_for_backward(*x_t)
        else:
            rows = ops.quantize_rows(x)
            ctx.save_for_backward(x)
        return proj.fprop(rows)

    @staticmethod
    def backward(ctx, dy):
        kept = ctx.saved_tensors
        x_t = Quantized(*kept) if ctx.saved == "fp8" else ops.quantize_transposed(kept[0], autograd.X_GROUPS)
        return autograd._linear_backward(ctx.proj, dy.contiguous(), x_t), None, None


@contextmanager
def unfused(saved: str) -> Iterator[None]:
    """The FP8 decoder with norms and SiLU*mul that write BF16, and separate kernels that quantize it."""

    def linear(x, proj):
        if torch.is_grad_enabled():
            return _MasterLinear.apply(x, proj, saved)
        return proj.fprop(ops.quantize_rows(x))

    def norm_linear(x, residual, norm, proj, eps):
        n, h = _MasterNorm.apply(x, residual, norm, eps)
        return linear(n, proj), h

    def swiglu_mlp(x, residual, norm, mlp, eps):
        gate_up, h = norm_linear(x, residual, norm, mlp.gate_up_proj, eps)
        return linear(_SiluMul.apply(gate_up), mlp.down_proj), h

    replaced = {"linear": linear, "norm_linear": norm_linear, "swiglu_mlp": swiglu_mlp}
    originals = {name: getattr(decoder, name) for name in replaced}
    try:
        for name, function in replaced.items():
            setattr(decoder, name, function)
        yield
    finally:
        for name, function in originals.items():
            setattr(decoder, name, function)
