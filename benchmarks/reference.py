"""Qwen3, Qwen2.5 and Llama in FP64, one sequence at a time: what the gradients of both arms are measured against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from verl.jetrl.arena import has_qk_norm, head_dim


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x_THD: Tensor, theta: float) -> Tensor:
    """Rotary embedding of positions 0 .. T-1: the halves of a head are the two coordinates of its planes."""
    T, _, D = x_THD.shape
    frequencies = theta ** (-torch.arange(0, D, 2, dtype=torch.float64, device=x_THD.device) / D)
    angles = torch.arange(T, dtype=torch.float64, device=x_THD.device)[:, None, None] * frequencies
    a, b = x_THD.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def attend(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
    """Causal attention; each key head serves as many query heads as there are for one."""
    T, H, D = q_THD.shape
    k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k_TKD, v_TKD))
    scores = torch.einsum("qhd,khd->hqk", q_THD, k) / D**0.5
    future = torch.ones(T, T, dtype=torch.bool, device=q_THD.device).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), v)


def hidden_states(config: PretrainedConfig, weights: Mapping[str, Tensor], ids_T: Tensor) -> list[Tensor]:
    """The residual stream (T, H) after each layer, and last the final norm's output; ``weights`` under Hugging Face's names."""
    eps, theta, D = config.rms_norm_eps, config.rope_parameters["rope_theta"], head_dim(config)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    x, found = weights["model.embed_tokens.weight"][ids_T], []
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}"
        n = rms_norm(x, weights[f"{layer}.input_layernorm.weight"], eps)
        q, k, v = (linear(n, f"{layer}.self_attn.{p}_proj").unflatten(-1, (-1, D)) for p in "qkv")
        if has_qk_norm(config):
            q, k = (rms_norm(t, weights[f"{layer}.self_attn.{p}_norm.weight"], eps) for t, p in ((q, "q"), (k, "k")))
        x = x + linear(attend(rotate(q, theta), rotate(k, theta), v).flatten(1), f"{layer}.self_attn.o_proj")
        n = rms_norm(x, weights[f"{layer}.post_attention_layernorm.weight"], eps)
        x = x + linear(
            F.silu(linear(n, f"{layer}.mlp.gate_proj")) * linear(n, f"{layer}.mlp.up_proj"), f"{layer}.mlp.down_proj"
        )
        found.append(x)
    return [*found, rms_norm(x, weights["model.norm.weight"], eps)]


def loss_and_gradients(
    config: PretrainedConfig, weights: Mapping[str, Tensor], sequences: Sequence[Tensor], masks: Sequence[Tensor]
) -> tuple[float, dict[str, Tensor], list[Tensor]]:
    """Mean next-token loss over the tokens with mask 1, its gradient for every weight, and for every tensor of
    :func:`hidden_states`, the sequences one after the other."""
    leaves = {name: w.double().requires_grad_() for name, w in weights.items()}
    head = leaves.get("lm_head.weight", leaves["model.embed_tokens.weight"])
    tokens, total, states = sum(int(mask[1:].sum()) for mask in masks), 0.0, []
    for ids, mask in zip(sequences, masks, strict=True):
        states.append(hidden_states(config, leaves, ids))
        log_p = F.linear(states[-1][-1], head).log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
        total = total - (log_p * mask[1:]).sum() / tokens
    flat = [x for found in states for x in found]
    (*of_states,) = torch.autograd.grad(total, [*flat, *leaves.values()])
    of_weights = dict(zip(leaves, of_states[len(flat) :], strict=True))
    each = len(states[0])
    return total.item(), of_weights, [torch.cat(of_states[i : len(flat) : each]) for i in range(each)]
