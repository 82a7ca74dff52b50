"""Hashes of weights: a stale, missing or changed tensor is named."""

from __future__ import annotations

import pytest
import torch

from verl.jetrl.weights import combined, compare, digest, fused_digests

E = torch.float8_e4m3fn
ROWS = {"self_attn.q": 8, "self_attn.k": 4, "self_attn.v": 4, "self_attn.o": 8, "mlp.gate": 12, "mlp.up": 12}
ROLLOUT_NAME = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
ROLLOUT_NAME["up_proj"] = "gate_up_proj"


def stream(layers: int = 2, seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    """What the trainer of a small model in FP8 sends: bytes and scales of the linears, biases, norms, embedding."""
    g = torch.Generator().manual_seed(seed)
    weights = [("model.embed_tokens.weight", torch.randn(16, 8, generator=g).bfloat16())]
    for i in range(layers):
        for name, rows in ROWS.items():
            layer = f"model.layers.{i}.{name}_proj"
            weights.append((f"{layer}.weight", torch.randn(rows, 8, generator=g).to(E)))
            weights.append((f"{layer}.weight_scale_inv", torch.rand(1, 1, generator=g)))
            if name[-1] in "qkv":
                weights.append((f"{layer}.bias", torch.randn(rows, generator=g).bfloat16()))
        weights.append((f"model.layers.{i}.input_layernorm.weight", torch.ones(8).bfloat16()))
    return weights


def rollout_of(weights: list[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The tensors as vLLM holds them: q, k, v and gate, up one below the other."""
    held: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        *path, layer, kind = name.split(".")
        name = ".".join([*path, ROLLOUT_NAME.get(layer, layer), kind])
        held[name] = torch.cat([held[name], tensor]) if name in held else tensor
    return held


def digests_of(held: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in held.items()}


def test_digest_sees_bytes_shape_and_dtype():
    x = torch.arange(12, dtype=torch.float32).view(3, 4)
    assert digest(x) == digest(x.clone()) == digest([x[:1], x[1:]]) == digest(x.t().contiguous().t())
    changed = x.clone()
    changed[2, 3] += 1e-6
    others = [changed, x.view(4, 3), x.view(torch.int32), x.t(), x[:2], -x, torch.zeros(0, 4), x.bfloat16()]
    assert len({digest(x), *map(digest, others)}) == len(others) + 1
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0])), "equal as numbers, not as bytes"
    nan = torch.tensor([torch.nan])
    assert digest(nan) == digest(nan.clone()), "bytes, not numbers"
    fp8 = torch.randn(4, 4).to(E)
    assert digest(fp8) != digest(fp8.view(torch.uint8))


def test_fused_digests_are_the_rollouts():
    weights = stream()
    assert fused_digests(weights) == digests_of(rollout_of(weights))
    assert fused_digests(reversed(weights)) == fused_digests(weights), "parts go by name, not by order of arrival"


def test_swapped_parts_are_seen():
    weights = dict(stream())
    k, v = (f"model.layers.0.self_attn.{x}_proj.weight" for x in "kv")
    swapped = {**weights, k: weights[v], v: weights[k]}
    theirs = digests_of(rollout_of(list(swapped.items())))
    assert compare(fused_digests(weights.items()), theirs) == ["model.layers.0.self_attn.qkv_proj.weight"]


def test_parts_are_hashed_as_soon_as_they_are_complete():
    """The whole model must not pile up in memory: at most the parts of one fused layer are held."""
    import gc
    import weakref

    alive: weakref.WeakSet = weakref.WeakSet()
    most = 0

    def counted():
        nonlocal most
        for name, tensor in stream(layers=6):
            copy = tensor.clone()
            alive.add(copy)
            yield name, copy
            del copy
            gc.collect(0)
            most = max(most, len(alive))

    fused_digests(counted())
    assert 0 < most <= 10


def test_equal_weights_compare_equal():
    weights = stream()
    assert compare(fused_digests(weights), digests_of(rollout_of(weights))) == []


def test_stale_weights_are_named():
    """The rollout still holds the weights of before the update."""
    assert compare(fused_digests(stream(seed=1)), digests_of(rollout_of(stream(seed=0)))) == sorted(
        name for name in rollout_of(stream()) if "norm" not in name
    )
    held = rollout_of(stream())
    held["model.layers.1.mlp.gate_up_proj.weight"].view(torch.uint8)[20, 3] ^= 1
    assert compare(fused_digests(stream()), digests_of(held)) == ["model.layers.1.mlp.gate_up_proj.weight"]


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.o_proj.weight_scale_inv", "model.layers.1.self_attn.qkv_proj.bias"])
def test_missing_tensors_are_named_on_both_sides(name):
    mine = fused_digests(stream())
    less = {key: value for key, value in mine.items() if key != name}
    assert compare(mine, less) == compare(less, mine) == [name]


def test_a_missing_part_of_a_fused_layer_is_named():
    weights = [(n, w) for n, w in stream() if n != "model.layers.0.self_attn.v_proj.weight"]
    assert compare(fused_digests(weights), fused_digests(stream())) == ["model.layers.0.self_attn.qkv_proj.weight"]


def test_stock_fp8_compares_what_stays_in_bf16():
    """A stock FP8 rollout holds bytes that the trainer never had; a stale norm or embedding still shows."""
    held = {n: w.float().bfloat16() if w.dtype == E else w for n, w in stream() if not n.endswith("scale_inv")}
    mine = fused_digests(held.items())
    theirs = digests_of(rollout_of(stream()))
    assert compare(mine, theirs) != []
    assert compare(mine, theirs, quantized_by_rollout=True) == []
    for stale in (
        "model.embed_tokens.weight",
        "model.layers.1.input_layernorm.weight",
        "model.layers.0.self_attn.qkv_proj.bias",
    ):
        assert compare(mine, {**theirs, stale: "old"}, quantized_by_rollout=True) == [stale]


def test_a_tied_head_is_one_tensor_in_the_rollout():
    weights = stream()
    theirs = digests_of(rollout_of(weights))
    embedding = weights[0][1]
    assert compare(fused_digests([*weights, ("lm_head.weight", embedding)]), theirs) == []
    head = ("lm_head.weight", embedding + 1)
    assert compare(fused_digests([*weights, head]), theirs) == ["lm_head.weight"], "a head of its own must be there"


def test_nothing_to_compare_raises():
    with pytest.raises(ValueError, match="nothing to compare"):
        compare({}, {})
    with pytest.raises(ValueError, match="nothing to compare"):
        compare({"a.o_proj.weight": "1"}, {"a.o_proj.weight": "1"}, quantized_by_rollout=True)


def test_combined_depends_on_every_digest_and_their_order():
    assert combined(["a", "b"]) == combined(iter(["a", "b"])) != combined(["b", "a"])
    assert combined(["a", "b"]) != combined(["a"])
