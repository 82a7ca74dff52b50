"""The shared decoder inside a Hugging Face model: the trainer's forward and backward run on the weight arena.

The Hugging Face modules stay as holders of the FP32 master parameters, under their names; what computes is
:class:`verl.jetrl.model.decoder.Decoder`, with the attention that the configuration names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast

from verl.jetrl.model.decoder import Decoder
from verl.jetrl.trainer import flash

_UNUSED = ("use_cache", "output_attentions", "output_hidden_states", "return_dict")


def share_decoder(module: nn.Module, decoder: Decoder, with_head: bool = True) -> None:
    """Makes ``module`` (a Hugging Face causal LM) compute with ``decoder``, in place.

    ``with_head=False``: its "logits" are the final hidden states (:mod:`verl.jetrl.trainer.log_probs` takes those).
    """
    module.model.forward = MethodType(_forward_of(decoder), module.model)
    module.lm_head.forward = MethodType(lambda _, x: _head(decoder, x) if with_head else x, module.lm_head)


def _attention(name: str) -> Callable:
    known = AttentionInterface()
    if name not in known.valid_keys():
        raise ValueError(
            f"attn_implementation={name!r} is not supported by the FP8 decoder; set "
            "actor_rollout_ref.model.override_config.attn_implementation to jetrl_fa3 (GPU) or jetrl_fp32 (CPU)"
        )
    return known[name]


def _head(decoder: Decoder, x_BTH: Tensor) -> Tensor:
    return decoder.head(x_BTH.reshape(-1, x_BTH.shape[-1])).view(*x_BTH.shape[:-1], -1)


def _forward_of(decoder: Decoder):
    config = decoder.config

    def forward(
        self: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        if past_key_values is not None or inputs_embeds is not None or kwargs.get("use_cache"):
            raise ValueError("the FP8 decoder trains on whole sequences of token ids: no cache, no input embeddings")
        B, T = input_ids.shape
        if position_ids is None:
            position_ids = torch.arange(T, device=input_ids.device).expand(B, T)
        mask = None
        if (
            attention_mask is not None or config._attn_implementation != flash.NAME
        ):  # which needs none, and this reads positions
            mask = create_causal_mask(
                config=config,
                inputs_embeds=torch.empty((B, T, 0), dtype=torch.bfloat16, device=input_ids.device),
                attention_mask=attention_mask,
                past_key_values=None,
                position_ids=position_ids,
            )
        attention = _attention(config._attn_implementation)
        extra = {k: v for k, v in kwargs.items() if k not in _UNUSED} | {"position_ids": position_ids}

        def attend(holder: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            heads = [t.view(B, T, *t.shape[1:]).transpose(1, 2) for t in (q, k, v)]
            out, _ = attention(holder, *heads, mask, dropout=0.0, scaling=holder.scaling, **extra)
            return out.reshape(B * T, -1)

        def call(layer: nn.Module, *args: Any) -> tuple[Tensor, Tensor]:
            if self.training and torch.is_grad_enabled() and self.layers[0].gradient_checkpointing:
                return checkpoint(layer, *args, use_reentrant=False)
            return layer(*args)

        hidden = decoder.model.run(
            input_ids.flatten(),
            position_ids.expand(B, T).flatten(),
            [partial(attend, holder.self_attn) for holder in self.layers],
            call,
        )
        return BaseModelOutputWithPast(last_hidden_state=hidden.view(B, T, -1))

    return forward
