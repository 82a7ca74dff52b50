"""The trainer's FP8 linears inside Hugging Face models, alone and under FSDP2, and what is sent to the rollout."""

from __future__ import annotations

import os
import subprocess
import sys
import types
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from verl.jetrl.fp8 import format as ref
from verl.jetrl.fp8.linear import Fp8Linear, fp8_linear
from verl.jetrl.precision import PrecisionFlow

FP8 = PrecisionFlow(linear="fp8")
MODELS = {
    "qwen3": dict(model_type="qwen3", head_dim=16, tie_word_embeddings=True),
    "qwen2, with biases": dict(model_type="qwen2"),
    "llama, ragged": dict(
        model_type="llama", hidden_size=576, num_attention_heads=9, num_key_value_heads=3, num_hidden_layers=1
    ),
}
LINEARS = {name: 7 * values.get("num_hidden_layers", 2) for name, values in MODELS.items()}
TOKENS = torch.arange(24).view(2, 12) * 7 % 384


def make(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=192, num_attention_heads=4, num_key_value_heads=2, vocab_size=384)
    values = sizes | dict(num_hidden_layers=2, max_position_embeddings=64) | MODELS[name]
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.normal_(std=0.1)  # Hugging Face starts biases at zero, where a lost one would not show
    return model


def install(model: nn.Module, flow: PrecisionFlow = FP8) -> nn.Module:
    from verl.jetrl.trainer.engine import install_fp8_linears

    install_fp8_linears(model, flow)
    return model


def computed_in_bf16(model: nn.Module) -> nn.Module:
    """What FSDP2's mixed precision makes of FP32 masters: BF16 parameters; buffers (RoPE's frequencies) stay in FP32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


def loss_and_gradients(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits (FP32), and every parameter's gradient of a next-token loss."""
    logits = model(TOKENS).logits.float()
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters()}


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return nn.functional.cosine_similarity(a.flatten().double(), b.flatten().double(), 0).item()


# --- the model --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_fp8_is_on_and_near_bf16_forward_and_backward(name):
    bf16, bf16_gradients = loss_and_gradients(make(name, dtype=torch.bfloat16))
    fp8, gradients = loss_and_gradients(install(make(name, dtype=torch.bfloat16)))
    error = ((fp8 - bf16).norm() / bf16.norm()).item()
    assert 1e-3 < error < 0.1, f"relative difference of logits {error}: FP8 is off, or wrong"
    for key, gradient in gradients.items():
        assert gradient is not None and gradient.isfinite().all() and gradient.abs().max() > 0, key
        assert cosine(gradient, bf16_gradients[key]) > 0.98, f"{key}: gradient far from BF16's"
    linears = [key for key in gradients if key.endswith("_proj.weight")]
    assert len(linears) == LINEARS[name] and not any(torch.equal(gradients[key], bf16_gradients[key]) for key in linears)


@pytest.mark.parametrize("name", MODELS)
def test_the_state_dict_stays(name):
    plain, fp8 = make(name), install(make(name))
    before, after = plain.state_dict(), fp8.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)
    assert [n for n, _ in plain.named_parameters()] == [n for n, _ in fp8.named_parameters()]
    assert sum(type(module) is Fp8Linear for module in fp8.modules()) == LINEARS[name]
    assert type(fp8.lm_head) is nn.Linear, "the head stays in BF16"


def test_only_the_named_layers():
    model = install(make("qwen3"), PrecisionFlow(linear="fp8", modules=["down_proj", "o_proj"]))
    converted = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, Fp8Linear)}
    assert converted == {"down_proj", "o_proj"}


def test_an_unsupported_model_is_refused():
    config = AutoConfig.for_model("gpt2", n_layer=1, n_embd=32, n_head=2, vocab_size=64)
    with pytest.raises(ValueError, match="qwen3, qwen2, llama; this model is 'gpt2'.*precision_flow.linear=bf16"):
        install(AutoModelForCausalLM.from_config(config))


def test_an_incomplete_conversion_is_refused():
    """A layer of another class (a LoRA wrapper, say) must not stay in BF16 without a word."""

    class Other(nn.Linear):
        pass

    model = make("qwen3")
    model.model.layers[1].mlp.up_proj.__class__ = Other
    with pytest.raises(RuntimeError, match="13 linear layers became FP8 where 14 were expected"):
        install(model)


@pytest.mark.parametrize("tokens", [0, 1, 127, 130])
def test_any_number_of_tokens(tokens):
    layer = nn.Linear(72, 130)
    layer.__class__ = Fp8Linear
    x = torch.randn(tokens, 72, requires_grad=True)
    y = layer(x)
    y.float().sum().backward()
    assert y.shape == (tokens, 130) and x.grad.shape == x.shape
    assert layer.weight.grad.shape == (130, 72) and layer.bias.grad.tolist() == [float(tokens)] * 130


# --- what the rollout is sent -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_the_stream_has_the_bytes_that_the_forward_uses(name, monkeypatch):
    """FP32 masters in the trainer, BF16 in its forward: the rollout gets what was multiplied, byte for byte."""
    from verl.jetrl.fp8 import ops
    from verl.jetrl.trainer.engine import quantized_stream

    master = install(make(name))
    used: list[tuple[torch.Tensor, torch.Tensor]] = []
    quantize = ops.quantize_weight

    def record(weight: torch.Tensor):
        q = quantize(weight)
        used.append((q.q, q.s))
        return q

    monkeypatch.setattr(ops, "quantize_weight", record)
    forward = computed_in_bf16(install(make(name)))
    forward(TOKENS)
    sent = dict(quantized_stream(iter(master.state_dict().items()), FP8))
    bytes_sent = {
        sent[key].view(torch.uint8).numpy().tobytes() + sent[f"{key}_scale_inv"].numpy().tobytes()
        for key in sent
        if f"{key}_scale_inv" in sent
    }
    bytes_used = {q.view(torch.uint8).numpy().tobytes() + s.numpy().tobytes() for q, s in used}
    assert len(bytes_used) == LINEARS[name] and bytes_sent == bytes_used
    for key, tensor in sent.items():
        if key.endswith("_proj.weight"):
            assert tensor.dtype == ref.FP8
        elif key.endswith("_scale_inv"):
            assert tensor.dtype == torch.float32
        else:
            assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, master.state_dict()[key].bfloat16())


def test_the_stream_in_bf16_is_not_quantized():
    from verl.jetrl.trainer.engine import quantized_stream

    weights = make("qwen3").state_dict()
    sent = dict(quantized_stream(iter(weights.items()), PrecisionFlow()))
    assert list(sent) == list(weights) and {tensor.dtype for tensor in sent.values()} == {torch.bfloat16}


def test_rounding_to_bf16_comes_first():
    """xtuner #2044: a trainer that quantizes FP32 masters and a rollout that quantizes the BF16 export are two policies."""
    from verl.jetrl.trainer.engine import quantized_stream

    torch.manual_seed(0)
    master = torch.randn(128, 128)
    (_, q), _ = quantized_stream(iter([("a.q_proj.weight", master)]), FP8)
    exported = ref.quantize_blocks(master.bfloat16()).q
    assert torch.equal(q.view(torch.uint8), exported.view(torch.uint8))
    assert not torch.equal(q.view(torch.uint8), ref.quantize_blocks(master).q.view(torch.uint8)), (
        "the case is not the one meant"
    )
    x = torch.randn(3, 128).bfloat16()
    assert torch.equal(fp8_linear(x, master), fp8_linear(x, master.bfloat16()))


# --- FSDP2 --------------------------------------------------------------------------------------------------------------


def sharded(rank: int, world_size: int, folder: str) -> None:
    """One rank: every model under FSDP2; rank 0 saves logits, gradients and weights."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    for name in MODELS:
        model = make(name)
        for key, layer in model.named_modules():
            if type(layer) is nn.Linear and key.endswith("_proj"):  # as the engine does; importing it takes seconds
                layer.__class__ = Fp8Linear
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
        mesh = dist.init_device_mesh("cpu", (world_size,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        logits, gradients = loss_and_gradients(model)
        full = {key: gradient.full_tensor() for key, gradient in gradients.items()}
        weights = {key: tensor.full_tensor() for key, tensor in model.state_dict().items()}
        if rank == 0:
            torch.save((logits, full, weights), f"{folder}/{name.split(',')[0]}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [1, 2])
def test_fsdp2_gives_the_unsharded_forward(tmp_path, world_size):
    """As verl's engine shards it: FP32 masters, BF16 parameters in forward and backward, FP32 reduction."""
    from verl.jetrl.trainer.engine import quantized_stream

    if world_size == 1:
        sharded(0, 1, str(tmp_path))
    else:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, str(world_size), str(tmp_path)]
        ranks = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(world_size)]
        assert [rank.wait(120) for rank in ranks] == [0] * world_size
    for name in MODELS:
        logits, gradients, weights = torch.load(tmp_path / f"{name.split(',')[0]}.pt")
        alone, alone_gradients = loss_and_gradients(computed_in_bf16(install(make(name))))
        assert torch.equal(logits, alone), f"{name}: sharding changes the forward"
        for key, gradient in gradients.items():
            assert gradient.dtype == torch.float32
            torch.testing.assert_close(
                gradient, alone_gradients[key].float(), rtol=1e-2, atol=1e-4, msg=lambda m, k=key: f"{k}: {m}"
            )
        # The weights that leave the shards quantize to the same bytes.
        sent = dict(quantized_stream(iter(weights.items()), FP8))
        expected = dict(quantized_stream(iter(make(name).state_dict().items()), FP8))
        assert all(torch.equal(sent[k].view(torch.uint8), expected[k].view(torch.uint8)) for k in expected)


# --- the vocabulary's padding -------------------------------------------------------------------------------------------


def test_masked_log_probs_normalise_over_the_tokenizers_ids():
    from verl.jetrl.vocabulary import mask_padding, padding_mass

    torch.manual_seed(0)
    for dtype, temperature in ((torch.float32, 1.0), (torch.float32, 0.5), (torch.bfloat16, 0.7)):
        logits = (torch.randn(2, 5, 384) * 3).to(dtype)
        masked = mask_padding(logits, 311).float() / temperature
        wanted = torch.log_softmax(logits[..., :311].float() / temperature, -1)
        torch.testing.assert_close(torch.log_softmax(masked, -1)[..., :311], wanted)
        assert torch.softmax(masked, -1)[..., 311:].max() == 0
        unmasked = torch.log_softmax(logits.float() / temperature, -1)[..., :311]
        mass = padding_mass(logits, 311, temperature)
        assert mass.shape == (2, 5) and (mass < 0).all() and mass.min() < -0.1
        torch.testing.assert_close(unmasked - wanted, mass[..., None].expand_as(wanted), rtol=1e-4, atol=1e-5)
    assert mask_padding(logits, 384) is logits and mask_padding(logits, 400) is logits


PROMPT = 3  # tokens of the packed sequence that are the prompt


def outputs(flow: PrecisionFlow, logits: torch.Tensor, vocabulary: int, temperature: float = 1.0) -> tuple[dict, object]:
    """Log-probs and entropy by the engine's own method, and the engine; ``logits`` (T, V) of one packed sequence."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.utils.torch_functional import entropy_from_logits

    from verl.jetrl.trainer.engine import JetRLEngine

    engine = object.__new__(JetRLEngine)
    engine.engine_config = types.SimpleNamespace(
        precision_flow=flow, entropy_checkpointing=False, entropy_from_logits_with_chunking=False
    )
    engine.model_config = types.SimpleNamespace(tokenizer=range(vocabulary))
    engine.use_ulysses_sp = False
    engine.compute_entropy_from_logits = entropy_from_logits
    engine._gather_and_unpad_packed = lambda tensor, pad_size: tensor
    tokens = logits.shape[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ids = torch.nested.as_nested_tensor([torch.arange(tokens)], layout=torch.jagged)
        prompts = torch.nested.as_nested_tensor([torch.arange(PROMPT)], layout=torch.jagged)
        responses = torch.nested.as_nested_tensor([torch.arange(PROMPT, tokens)], layout=torch.jagged)
    batch = TensorDict({"input_ids": ids, "prompts": prompts, "responses": responses}, batch_size=[1])
    tu.assign_non_tensor(batch, temperature=temperature, calculate_entropy=True, use_remove_padding=True)
    arguments = dict(
        input_ids_rmpad_rolled=torch.arange(tokens) % vocabulary,
        temperature_rmpad=torch.full((tokens,), temperature),
        pad_size=0,
    )
    output = types.SimpleNamespace(logits=logits[None])
    return engine.prepare_model_outputs(output, arguments, batch, None), engine


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_engine_masks_in_fp8_and_reports_in_bf16(temperature):
    torch.manual_seed(0)
    logits = torch.randn(9, 384)
    labels = torch.arange(9)[:, None]
    with torch.no_grad():
        fp8, _ = outputs(FP8, logits.clone(), 311, temperature)
        stock, engine = outputs(PrecisionFlow(), logits.clone(), 311, temperature)
    scaled = logits / temperature
    wanted = torch.log_softmax(scaled[:, :311], -1)
    torch.testing.assert_close(fp8["log_probs"].values(), wanted.gather(1, labels)[:, 0])
    entropy = -(wanted.exp() * wanted).sum(-1)
    torch.testing.assert_close(fp8["entropy"].values(), entropy), "entropy over the tokenizer's ids, and no NaN"
    plain = torch.log_softmax(scaled, -1).gather(1, labels)[:, 0]
    torch.testing.assert_close(stock["log_probs"].values(), plain)
    # of the response's tokens: predicted by the positions from the prompt's last to the last but one
    difference = (wanted.gather(1, labels)[:, 0] - plain).abs()[PROMPT - 1 : -1].mean().item()
    assert difference > 0.05 and engine.take_padding_abs_dlogp() == pytest.approx(difference, rel=1e-4)
    assert engine.take_padding_abs_dlogp() == 0.0, "taken once"


def test_gradients_through_the_mask():
    torch.manual_seed(0)
    logits = torch.randn(9, 384, requires_grad=True)
    result, _ = outputs(FP8, logits, 311)
    (result["log_probs"].values().sum() + result["entropy"].values().sum()).backward()
    assert logits.grad.isfinite().all(), "an entropy bonus must not give NaN"
    assert logits.grad[:, 311:].abs().max() == 0 and logits.grad[:, :311].abs().min() > 0


# --- verl -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_verl_picks_the_forks_engine(monkeypatch, device):
    from verl.workers.engine.base import EngineRegistry

    from verl.jetrl.trainer import engine

    engine.register()
    engine.register()
    monkeypatch.setenv("VERL_ENGINE_DEVICE", device)
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "nvidia" if device == "cuda" else "cpu")
    assert EngineRegistry.get_engine_cls("language_model", "fsdp2") is engine.JetRLEngine


def test_lora_is_refused_by_the_engine():
    from verl.jetrl.trainer.engine import JetRLEngine

    for rank, path in ((8, None), (0, "/adapter")):
        engine = object.__new__(JetRLEngine)
        engine.engine_config = types.SimpleNamespace(precision_flow=FP8)
        engine.model_config = types.SimpleNamespace(lora_rank=rank, lora_adapter_path=path)
        with pytest.raises(ValueError, match="lora_rank=0"):
            engine._build_module()


if __name__ == "__main__":
    sharded(int(sys.argv[3]), int(sys.argv[1]), sys.argv[2])
