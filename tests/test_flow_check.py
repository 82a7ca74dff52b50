"""The precision-flow check: who may differ from whom, and what it prints."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from verl.jetrl import flow_check
from verl.jetrl.flow_check import BF16, FP8_BLOCK, PrecisionMismatch, Row, compare, describe_rollout, describe_trainer
from verl.jetrl.model.decoder import Decoder, Fp8Linear
from verl.jetrl.precision import PrecisionFlow

LAYER = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj", "input_layernorm")
LAYERS = 3


def config_of(tied: bool = True) -> PretrainedConfig:
    sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    return AutoConfig.for_model("qwen3", vocab_size=64, num_hidden_layers=LAYERS, tie_word_embeddings=tied, **sizes)


def trainer_model(flow: PrecisionFlow, tied: bool = True) -> nn.Module:
    """The shared decoder, or the Hugging Face model."""
    if flow.fp8:
        return Decoder(config_of(tied))
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(tied))


class Linear(nn.Module):
    """Stands for one of vLLM's linears: a weight, and the quantization method that vLLM gave it."""

    def __init__(self, method: object | None, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4, device="meta").to(dtype), requires_grad=False)
        if method is not None:
            self.quant_method = method


class Fp8LinearMethodOfVllm:
    """Stands for vLLM's stock block-FP8 method."""


def rollout_model(make: callable, lm_head: bool = False) -> nn.Module:
    """A tree with vLLM's names; ``make(name)`` gives the linears."""
    model = nn.Module()
    model.model = nn.Module()
    model.model.embed_tokens = Linear(None)
    layers = []
    for i in range(LAYERS):
        layer = nn.Module()
        layer.self_attn, layer.mlp = nn.Module(), nn.Module()
        for name in ("qkv_proj", "o_proj"):
            layer.self_attn.add_module(name, make(f"{i}.{name}"))
        for name in ("q_norm", "k_norm"):
            layer.self_attn.add_module(name, Linear(None))
        for name in ("gate_up_proj", "down_proj"):
            layer.mlp.add_module(name, make(f"{i}.{name}"))
        layer.input_layernorm, layer.post_attention_layernorm = Linear(None), Linear(None)
        layers.append(layer)
    model.model.layers = nn.ModuleList(layers)
    model.model.norm = Linear(None)
    if lm_head:
        model.lm_head = Linear(None)
    return model


def ours(name: str) -> Fp8Linear:
    return Fp8Linear([4], 4)


def stock(name: str) -> Linear:
    return Linear(Fp8LinearMethodOfVllm(), torch.float8_e4m3fn)


def bf16(name: str) -> Linear:
    return Linear(object())


BF16_FLOW, FP8_FLOW = PrecisionFlow(), PrecisionFlow(linear="fp8")


def rows(flow: PrecisionFlow, make: callable, tied: bool = True) -> list[Row]:
    trainer = describe_trainer(trainer_model(flow, tied))
    return compare(trainer, describe_rollout(rollout_model(make, lm_head=not tied)))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("flow", "make"), [(BF16_FLOW, bf16), (FP8_FLOW, ours)])
def test_equal_flows_pass(flow, make, tied):
    found = rows(flow, make, tied)
    assert all(row.equal for row in found)
    flow_check.require_equal(found, mixed_baseline=False)
    # The comparison has substance: every linear of every layer is in it, in the precision asked for.
    linears = {row.operator: row for row in found if row.operator.endswith("_proj")}
    assert sorted(name.rsplit(".", 1)[1] for name in linears) == ["down_proj", "gate_up_proj", "o_proj", "qkv_proj"]
    assert {row.trainer for row in linears.values()} == {FP8_BLOCK if flow.fp8 else BF16}
    assert {row.count for row in linears.values()} == {LAYERS}
    assert ("lm_head" in {row.operator for row in found}) is not tied


def test_fp8_trainer_with_a_bf16_rollout_is_refused():
    """FP8 silently off in the rollout."""
    with pytest.raises(PrecisionMismatch, match="differ in precision"):
        flow_check.require_equal(rows(FP8_FLOW, bf16), mixed_baseline=False)


def test_bf16_trainer_with_an_fp8_rollout_is_refused():
    """FP8 silently off in the trainer."""
    with pytest.raises(PrecisionMismatch, match="differ in precision"):
        flow_check.require_equal(rows(BF16_FLOW, ours), mixed_baseline=False)


@pytest.mark.parametrize("odd", ["1.o_proj", "0.qkv_proj", "2.gate_up_proj"])
def test_one_layer_left_unquantized_is_refused(odd):
    found = rows(FP8_FLOW, lambda name: bf16(name) if name == odd else ours(name))
    with pytest.raises(PrecisionMismatch) as error:
        flow_check.require_equal(found, mixed_baseline=False)
    (different,) = [row for row in found if not row.equal]
    assert different.operator.endswith(odd[2:]) and (different.count, different.rollout) == (1, BF16)
    assert odd[2:] in str(error.value) and "precision_flow" in str(error.value)


def test_one_part_of_a_fused_layer_in_another_precision_is_refused():
    model = trainer_model(BF16_FLOW)
    for name, layer in list(model.named_modules()):
        parent, _, last = name.rpartition(".")
        if last.endswith("_proj") and name != "model.layers.1.self_attn.k_proj":
            setattr(model.get_submodule(parent), last, Fp8Linear([layer.out_features], layer.in_features))
    found = compare(describe_trainer(model), describe_rollout(rollout_model(ours)))
    (different,) = [row for row in found if not row.equal]
    assert different.operator == "model.layers.*.self_attn.qkv_proj" and different.count == 1
    assert BF16 in different.trainer and FP8_BLOCK in different.trainer


def test_vllms_own_fp8_is_not_the_trainers():
    """The same granularity is not the same bits: stock FP8 under an FP8 trainer is refused."""
    with pytest.raises(PrecisionMismatch, match="Fp8LinearMethodOfVllm of vLLM"):
        flow_check.require_equal(rows(FP8_FLOW, stock), mixed_baseline=False)


def test_a_missing_layer_is_refused():
    trainer = describe_trainer(trainer_model(FP8_FLOW))
    rollout = [r for r in describe_rollout(rollout_model(ours)) if r["name"] != "model.layers.2.mlp.down_proj"]
    with pytest.raises(PrecisionMismatch, match="absent"):
        flow_check.require_equal(compare(trainer, rollout), mixed_baseline=False)


def test_another_rollout_dtype_is_refused():
    with pytest.raises(PrecisionMismatch, match="float16"):
        flow_check.require_equal(rows(BF16_FLOW, lambda name: Linear(None, torch.float16)), mixed_baseline=False)


def test_declared_mixed_baseline_passes():
    flow_check.require_equal(rows(BF16_FLOW, stock), mixed_baseline=True)


@pytest.mark.parametrize(("flow", "make"), [(BF16_FLOW, bf16), (FP8_FLOW, ours)])
def test_mixed_baseline_without_a_difference_is_refused(flow, make):
    with pytest.raises(PrecisionMismatch, match="rollout is off.*quantization=fp8"):
        flow_check.require_equal(rows(flow, make), mixed_baseline=True)


@pytest.mark.parametrize("mixed", [True, False])
def test_nothing_compared_is_refused(mixed):
    with pytest.raises(PrecisionMismatch):
        flow_check.require_equal(compare([], []), mixed)


def test_table():
    table = flow_check.table([Row("model.layers.*.mlp.down_proj", 28, FP8_BLOCK, BF16), Row("lm_head", 1, BF16, BF16)])
    head, first, second = table.splitlines()
    assert head.split() == ["operator", "count", "trainer", "rollout", "equal"]
    assert first.startswith("model.layers.*.mlp.down_proj  28     fp8 e4m3, w 128x128, x 1x128, fp32 scales  bf16")
    assert first.endswith("NO") and second.endswith("yes")
    assert len({line.index("bf16", line.index(")") if ")" in line else 0) for line in (second,)}) == 1
    assert first.index("NO") == second.index("yes") == head.index("equal")
