"""Small models of every family on the shared decoder, for the tests of arena, trainer and rollout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for scripts of the tests: benchmarks
from verl.jetrl.arena import Arena, layout_of  # noqa: E402
from verl.jetrl.model.decoder import Decoder  # noqa: E402
from verl.jetrl.parity import shake  # noqa: E402
from verl.jetrl.trainer import attention  # noqa: E402
from verl.jetrl.trainer.decoder import share_decoder  # noqa: E402
from verl.jetrl.trainer.masters import Masters, shard_parameters  # noqa: E402

CPU = torch.device("cpu")
MODELS = {
    "qwen3": dict(model_type="qwen3", head_dim=16, tie_word_embeddings=True),
    "qwen2": dict(model_type="qwen2"),  # biases
    "llama": dict(model_type="llama", hidden_size=576, num_attention_heads=9, num_key_value_heads=3, num_hidden_layers=1),
}
VOCABULARY = 384
TOKENS = torch.arange(24).view(2, 12) * 7 % VOCABULARY


def config_of(name: str, **changes) -> PretrainedConfig:
    """The configuration of a small model; ``llama`` has a ragged hidden size."""
    sizes = dict(hidden_size=64, intermediate_size=192, num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCABULARY)
    values = sizes | dict(num_hidden_layers=2, max_position_embeddings=64) | MODELS[name] | changes
    return AutoConfig.for_model(values.pop("model_type"), **values)


def make(name: str, dtype: torch.dtype = torch.float32, attn: str = attention.NAME, **changes) -> nn.Module:
    """A Hugging Face model, the same weights each time."""
    attention.register()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(name, **changes), attn_implementation=attn, dtype=torch.float32)
    shake(model, norms=0.2)
    return model.to(dtype) if dtype != torch.float32 else model


class Trainer(NamedTuple):
    """What the engine builds."""

    model: nn.Module
    decoder: Decoder
    masters: Masters

    @property
    def arena(self) -> Arena:
        return self.masters.arena

    def gradients(self) -> dict[str, Tensor]:
        """Every parameter's gradient (FP32, whole), from the accumulators."""
        self.masters.assign_grads()
        return {name: p.grad.full_tensor().clone() for name, p in self.model.named_parameters()}


def trainer_of(
    model: nn.Module,
    mesh: DeviceMesh,
    resident_transposed: bool = False,
    rank: int | None = None,
    write: bool = True,
    slots: int = 0,
    deferred: bool = False,
) -> Trainer:
    """``model`` on the decoder as the engine sets it up; with a ``rank`` its arena is shared (needs JETRL_RUN)."""
    decoder = Decoder(model.config)
    share_decoder(model, decoder)
    shard_parameters(model, mesh, CPU)
    layout = layout_of(model.config, slots=slots)
    arena = Arena.private(layout, CPU) if rank is None else Arena.create(layout, CPU, rank)
    decoder.bind(arena)
    masters = Masters(model, decoder, arena, resident_transposed, deferred)
    if write:
        masters.write()
    masters.zero_grad()
    return Trainer(model, decoder, masters)


def loss_of(model: nn.Module, tokens: Tensor = TOKENS) -> tuple[Tensor, Tensor]:
    """Logits (FP32) and a next-token loss."""
    logits = model(tokens, use_cache=False).logits.float()
    return logits, nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def run(trainer: Trainer, tokens: Tensor = TOKENS) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and every parameter's gradient of the loss."""
    trainer.masters.zero_grad()
    logits, loss = loss_of(trainer.model, tokens)
    loss.backward()
    return logits.detach(), trainer.gradients()


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Equal shape, dtype and bytes."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(raw(a), raw(b))


def raw(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
