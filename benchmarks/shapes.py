"""The models that the benchmarks run: shapes alone, with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_QWEN3 = dict(
    num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=40960,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6}, num_hidden_layers=36,
)  # fmt: skip
QWEN3_8B = _QWEN3 | dict(hidden_size=4096, intermediate_size=12288, tie_word_embeddings=False)
QWEN3_4B = _QWEN3 | dict(hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True)
QWEN2_5_7B = dict(
    hidden_size=3584, intermediate_size=18944, num_attention_heads=28, num_key_value_heads=4, head_dim=128,
    num_hidden_layers=28, vocab_size=152064, tie_word_embeddings=False, max_position_embeddings=32768,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
)  # fmt: skip
SMOLLM2_135M = dict(
    hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
    num_hidden_layers=30, vocab_size=49152, tie_word_embeddings=True, max_position_embeddings=8192, rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 1e5},
)  # fmt: skip
_CLASSES = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}


def save_config(folder: Path, shapes: Mapping[str, Any], family: str = "qwen3") -> PretrainedConfig:
    """Makes the folder that stands for a model: a configuration without weights."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, max_window_layers=shapes["num_hidden_layers"], **shapes)
    config.architectures, config.dtype, config.eos_token_id, config.bos_token_id = [_CLASSES[family]], "bfloat16", None, None
    config.save_pretrained(folder)
    return config


def linears(shapes: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(N, K) of a layer's four fused linears."""
    H, I, D = shapes["hidden_size"], shapes["intermediate_size"], shapes["head_dim"]
    q, kv = shapes["num_attention_heads"] * D, shapes["num_key_value_heads"] * D
    return [(q + 2 * kv, H), (H, q), (2 * I, H), (H, I)]
