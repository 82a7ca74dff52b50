"""The operators that the rollout shares with the trainer give the bits of the trainer's model; attention rounds once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding, apply_rotary_pos_emb
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding import get_rope

from verl.jetrl.rollout.shared_operators import share_operators
from verl.jetrl.trainer.attention import fp32_attention

CONFIG = Qwen3Config(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64)


class Operators(nn.Module):
    """The operators of one vLLM decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(256, eps=CONFIG.rms_norm_eps)
        self.act = SiluAndMul()
        self.rotary = get_rope(64, max_position=512, rope_parameters=CONFIG.rope_parameters)


@pytest.fixture(scope="module")
def rollout() -> Operators:
    torch.manual_seed(0)
    with set_current_vllm_config(VllmConfig()):
        operators = Operators().to(torch.bfloat16)
    operators.norm.weight.data = (1 + 0.2 * torch.randn(256)).bfloat16()
    assert share_operators(operators, CONFIG) == {"rms_norm": 1, "silu_mul": 1, "rope": 1}
    return operators


def test_rms_norm(rollout: Operators) -> None:
    theirs = Qwen3RMSNorm(256, eps=CONFIG.rms_norm_eps).to(torch.bfloat16)
    theirs.weight.data = rollout.norm.weight.data
    x, residual = (3 * torch.randn(2, 37, 256)).bfloat16()
    assert torch.equal(rollout.norm(x), theirs(x))
    y, stream = rollout.norm(x, residual)
    assert torch.equal(stream, x + residual) and torch.equal(y, theirs(x + residual))


def test_silu_mul(rollout: Operators) -> None:
    gate_up = (3 * torch.randn(37, 1024)).bfloat16()
    mlp = Qwen3MLP(CONFIG)
    assert torch.equal(rollout.act(gate_up), mlp.act_fn(gate_up[:, :512]) * gate_up[:, 512:])


def test_rope(rollout: Operators) -> None:
    positions = torch.randint(0, 500, (37,))
    query, key = torch.randn(37, 4 * 64).bfloat16(), torch.randn(37, 2 * 64).bfloat16()
    cos, sin = Qwen3RotaryEmbedding(CONFIG)(query, positions[None])
    heads = [x.view(1, 37, -1, 64).transpose(1, 2) for x in (query, key)]
    wanted = [x.transpose(1, 2).reshape(37, -1) for x in apply_rotary_pos_emb(*heads, cos, sin)]
    rotated = rollout.rotary(positions, query, key)
    assert all(torch.equal(a, b) for a, b in zip(rotated, wanted, strict=True))


def test_nothing_to_share_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="were not found"):
        share_operators(nn.Linear(2, 2), CONFIG)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_rounds_once_even_under_autocast(masked: bool) -> None:
    torch.manual_seed(0)
    T = 40
    query = torch.randn(1, 4, T, 64).bfloat16()
    key, value = torch.randn(2, 1, 2, T, 64).bfloat16()
    mask = torch.ones(T, T, dtype=torch.bool).tril()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = torch.autocast("cpu", enabled=False)(fp32_attention)(None, query, key, value, mask if masked else None, 0.125)
    scores = query.double() @ key.double().repeat_interleave(2, 1).transpose(-1, -2) * 0.125
    exact = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value.double().repeat_interleave(2, 1)
    assert out.dtype == torch.bfloat16
    equal = (out == exact.transpose(1, 2).bfloat16()).float().mean()
    assert equal > 0.999, f"{equal:.4f} of the values are the exact ones rounded to BF16"
