"""vLLM's side of the FP8 linear: the trainer's bits, part by part; wrong updates are refused; stock FP8 really rounds."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

from verl.jetrl.fp8 import format as ref
from verl.jetrl.fp8.format import Quantized
from verl.jetrl.fp8.linear import fp8_linear
from verl.jetrl.precision import PrecisionFlow
from verl.jetrl.trainer.engine import quantized_stream

quant = pytest.importorskip("verl.jetrl.rollout.vllm_quant")

FLOW = PrecisionFlow(linear="fp8")
FUSED_SHAPES = {
    "qkv, all multiples of 128": ([256, 128, 128], 256, ("q", "k", "v")),
    "qkv, ragged parts and hidden size": ([192, 64, 64], 576, ("q", "k", "v")),
    "gate_up, multiples of 128": ([384, 384], 128, (0, 1)),
    "gate_up, ragged": ([320, 320], 200, (0, 1)),
    "one part, ragged": ([130], 72, (None,)),
}


def layer_of(sizes: list[int], K: int) -> tuple[nn.Module, quant.Fp8LinearMethod]:
    method, layer = quant.Fp8LinearMethod(), nn.Module()
    method.create_weights(layer, K, sizes, K, sum(sizes), torch.bfloat16)
    return layer, method


def update(layer: nn.Module, part: torch.Tensor, shard: str | int | None) -> None:
    """One weight as the trainer's stream brings it."""
    for name, tensor in quantized_stream(iter([("a.o_proj.weight", part)]), FLOW):
        param = getattr(layer, name.removeprefix("a.o_proj."))
        param.weight_loader(param, tensor, *([] if shard is None else [shard]))


@pytest.mark.parametrize("shape", FUSED_SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_fused_output_is_the_trainers_bit_for_bit(shape, with_bias, tokens):
    sizes, K, shards = FUSED_SHAPES[shape]
    torch.manual_seed(0)
    layer, method = layer_of(sizes, K)
    # Parts of very different size: a scale shared between them would show.
    parts = [torch.randn(rows, K) * 10.0**-i for i, rows in enumerate(sizes)]
    biases = [torch.randn(rows).bfloat16() for rows in sizes]
    for part, shard in zip(parts, shards, strict=True):
        update(layer, part, shard)
    method.process_weights_after_loading(layer)
    x = torch.randn(tokens, K).bfloat16()
    got = method.apply(layer, x, torch.cat(biases) if with_bias else None)
    wanted = [fp8_linear(x, part, bias if with_bias else None) for part, bias in zip(parts, biases, strict=True)]
    assert got.shape == (tokens, sum(sizes)) and got.dtype == torch.bfloat16
    assert torch.equal(got, torch.cat(wanted, -1))
    if tokens:
        plain = torch.cat([x @ part.bfloat16().t() for part in parts], -1)
        assert not torch.equal(got - (torch.cat(biases) if with_bias else 0), plain), "FP8 is off"
        batched = method.apply(layer, x.view(1, tokens, K), torch.cat(biases) if with_bias else None)
        assert torch.equal(batched[0], got)


def test_an_update_replaces_what_was_there():
    layer, method = layer_of([64, 64], 128)
    x = torch.randn(3, 128).bfloat16()
    addresses = layer.weight.data_ptr(), layer.weight_scale_inv.data_ptr()
    for seed in (0, 1):
        torch.manual_seed(seed)
        parts = torch.randn(2, 64, 128)
        for shard, part in enumerate(parts):
            update(layer, part, shard)
        assert torch.equal(method.apply(layer, x), torch.cat([fp8_linear(x, part) for part in parts], -1))
    assert addresses == (layer.weight.data_ptr(), layer.weight_scale_inv.data_ptr()), "captured graphs hold the addresses"


def test_a_layer_without_its_scales_gives_nan():
    """A layer that no update reached cannot pass for a working one."""
    x = torch.randn(2, 128).bfloat16()
    layer, method = layer_of([64, 64], 128)
    assert method.apply(layer, x).isnan().all()
    update(layer, torch.randn(64, 128), 0)
    y = method.apply(layer, x)
    assert not y[:, :64].isnan().any() and y[:, 64:].isnan().all()


@pytest.mark.parametrize(
    ("tensor", "shard"),
    [
        (torch.zeros(128, 128, dtype=torch.bfloat16), 0),  # a BF16 update: FP8 off in the trainer
        (torch.zeros(128, 128), 0),
        (torch.zeros(128, 128, dtype=torch.uint8), 0),
        (torch.zeros(128, 128, dtype=torch.float8_e5m2), 0),
        (torch.zeros(64, 128).to(torch.float8_e4m3fn), 0),
        (torch.zeros(128, 64).to(torch.float8_e4m3fn), 1),
        (torch.zeros(128 * 128).to(torch.float8_e4m3fn), 1),
        (torch.zeros(128, 128).to(torch.float8_e4m3fn), None),  # one part where the whole is meant
        (torch.zeros(1, 128).to(torch.float8_e4m3fn), 0),  # must not be broadcast
    ],
)
def test_a_wrong_update_is_refused(tensor, shard):
    layer, _ = layer_of([128, 128], 128)
    before = layer.weight.view(torch.uint8).clone()
    with pytest.raises(ValueError, match="jetrl_fp8 weight update.*disagree about the precision flow"):
        layer.weight.weight_loader(layer.weight, tensor, shard)
    assert torch.equal(layer.weight.view(torch.uint8), before)


def test_wrong_scales_are_refused():
    layer, _ = layer_of([192, 64], 128)
    for scales in (torch.ones(1, 1), torch.ones(2, 2), torch.ones(2, 1).bfloat16(), torch.ones(2)):
        with pytest.raises(ValueError, match="jetrl_fp8 weight update"):
            layer.weight_scale_inv.weight_loader(layer.weight_scale_inv, scales, 0)
    layer.weight_scale_inv.weight_loader(layer.weight_scale_inv, torch.ones(2, 1), 0)


def test_unknown_shards_are_refused():
    layer, _ = layer_of([128, 128], 128)
    for shard in ("w", 2, -1):
        with pytest.raises(ValueError, match="shard"):
            layer.weight.weight_loader(layer.weight, torch.zeros(128, 128).to(torch.float8_e4m3fn), shard)


@pytest.mark.parametrize(("K_here", "rows_here"), [(64, [128]), (128, [64])])
def test_tensor_parallel_slices_are_refused(K_here, rows_here):
    with pytest.raises(ValueError, match="tensor_model_parallel_size=1"):
        quant.Fp8LinearMethod().create_weights(nn.Module(), K_here, rows_here, 128, 128, torch.bfloat16)


@pytest.mark.parametrize("modules", [None, ["q_proj", "k_proj", "v_proj"], ["down_proj"]])
def test_which_layers_get_the_method(monkeypatch, modules):
    monkeypatch.setattr(quant, "LinearBase", nn.Linear)
    values = {"linear": "fp8"} | ({"modules": modules} if modules else {})
    config = quant.JetRLFp8Config.from_config({"quant_method": quant.METHOD, "precision_flow": values})
    parts = {"qkv_proj": "q_proj", "gate_up_proj": "up_proj", "o_proj": "o_proj", "down_proj": "down_proj"}
    for name, part in parts.items():
        method = config.get_quant_method(nn.Linear(1, 1), f"model.layers.0.x.{name}")
        assert isinstance(method, quant.Fp8LinearMethod) is (modules is None or part in modules), name
    assert not isinstance(config.get_quant_method(nn.Linear(1, 1), "model.router"), quant.Fp8LinearMethod)
    assert config.get_quant_method(nn.Embedding(1, 1), "lm_head") is None
    assert config.get_name() == quant.METHOD == "jetrl_fp8"


def test_vllm_knows_the_method():
    from vllm.model_executor.layers.quantization import get_quantization_config

    assert get_quantization_config(quant.METHOD) is quant.JetRLFp8Config


# --- the stock FP8 rollout on the CPU ---------------------------------------------------------------------------------


def test_stock_fp8_kernel_rounds_activations_and_weights():
    from vllm.model_executor.kernels import linear as kernels
    from vllm.platforms.interface import PlatformEnum

    from verl.jetrl.rollout import vllm_cpu

    vllm_cpu.register()
    vllm_cpu.register()
    assert kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU].count(vllm_cpu.ReferenceBlockFp8Kernel) == 1
    assert kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU][0] is vllm_cpu.ReferenceBlockFp8Kernel

    torch.manual_seed(0)
    w, x, bias = torch.randn(192, 256).bfloat16(), torch.randn(2, 5, 256).bfloat16(), torch.randn(192).bfloat16()
    q = ref.quantize_blocks(w)
    kernel = vllm_cpu.ReferenceBlockFp8Kernel.__new__(vllm_cpu.ReferenceBlockFp8Kernel)
    params = types.SimpleNamespace(weight=nn.Parameter(q.q, requires_grad=False), weight_scale=None)
    params.weight_scale_inv = nn.Parameter(q.s, requires_grad=False)
    kernel._get_layer_params = lambda layer: params
    y = kernel.apply_weights(nn.Module(), x, bias)
    x_rounded = ref.dequantize(ref.quantize_rows(x.view(-1, 256))).view_as(x)
    wanted = x_rounded.double() @ ref.dequantize(q).double().t() + bias.double()
    torch.testing.assert_close(y.double(), wanted, rtol=2e-2, atol=0.15)
    # Nearer to both rounded than to either one left unrounded: it rounds activations and weights.
    distance = {
        "both": wanted,
        "weights only": x.double() @ ref.dequantize(q).double().t() + bias.double(),
        "activations only": x_rounded.double() @ w.double().t() + bias.double(),
        "neither": x.double() @ w.double().t() + bias.double(),
    }
    errors = {name: (y.double() - value).square().mean().item() for name, value in distance.items()}
    assert min(errors, key=errors.get) == "both" and errors["both"] < 0.1 * sorted(errors.values())[1], errors
    assert y.shape == (2, 5, 192) and kernel.apply_weights(nn.Module(), x[:0], None).shape == (0, 5, 192)


def test_quantized_is_what_the_reference_multiplies():
    """The kernel of the jetrl arm and the reference agree, so the mixed arm differs by its weights' path alone."""
    torch.manual_seed(0)
    w, x = torch.randn(128, 128), torch.randn(4, 128).bfloat16()
    layer, method = layer_of([128], 128)
    update(layer, w, None)
    y = ref.gemm_nt(ref.quantize_rows(x), Quantized(layer.weight.data, layer.weight_scale_inv.data))
    assert torch.equal(method.apply(layer, x), y)
