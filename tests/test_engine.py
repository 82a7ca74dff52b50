"""The trainer on the shared decoder: its numbers, its gradients, its FP32 masters alone and sharded, what the engine adds."""

from __future__ import annotations

import os
import subprocess
import sys
import types
import warnings
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))  # as a script, there is no conftest
from decoder_cases import MODELS, TOKENS, config_of, loss_of, make, run, same_bytes, trainer_of  # noqa: E402

from verl.jetrl.arena import ENGINE, ROPE, SCALE, SLOTS, LeaseError, read_handle  # noqa: E402
from verl.jetrl.fp8 import format as ref  # noqa: E402
from verl.jetrl.model.decoder import Decoder  # noqa: E402
from verl.jetrl.precision import PrecisionFlow  # noqa: E402

FP8 = PrecisionFlow(linear="fp8")
LINEARS = {"qwen3": 14, "qwen2": 14, "llama": 7}


def plain_gradients(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and gradients of a Hugging Face model as it is."""
    logits, loss = loss_of(model)
    loss.backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters()}


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return nn.functional.cosine_similarity(a.flatten().double(), b.flatten().double(), 0).item()


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# --- the model --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_fp8_is_on_and_near_bf16_forward_and_backward(name, mesh):
    bf16, bf16_gradients = plain_gradients(make(name, dtype=torch.bfloat16))
    fp8, gradients = run(trainer_of(make(name), mesh))
    assert 1e-3 < relative(fp8, bf16) < 0.1, f"relative difference of logits {relative(fp8, bf16)}: FP8 is off, or wrong"
    assert gradients.keys() == bf16_gradients.keys()
    for key, gradient in gradients.items():
        assert gradient.dtype == torch.float32 and gradient.isfinite().all() and gradient.abs().max() > 0, key
        assert cosine(gradient, bf16_gradients[key]) > 0.98, f"{key}: gradient far from BF16's"
        assert 0.9 < gradient.norm() / bf16_gradients[key].float().norm() < 1.1, f"{key}: another size than BF16's"
    linears = [key for key in gradients if key.endswith("_proj.weight")]
    assert len(linears) == LINEARS[name]
    assert all(relative(gradients[key], bf16_gradients[key]) > 5e-3 for key in linears), "a linear's backward is not in FP8"


@pytest.mark.parametrize("name", MODELS)
def test_no_linear_layer_computes_in_bf16(name, mesh):
    """Each layer's own output is the FP8 reference's, and no BF16 product's."""
    trainer = trainer_of(make(name), mesh)
    weights = {key: p.full_tensor().detach().bfloat16() for key, p in trainer.model.named_parameters()}
    torch.manual_seed(1)
    checked = 0
    for entry in trainer.arena.layout.entries:
        if entry.dtype != ref.FP8:
            continue
        linear = trainer.decoder.get_submodule(entry.name.rpartition(".")[0])
        x = torch.randn(5, linear.K).bfloat16()
        bf16 = torch.cat([x @ weights[part].t() for part, _ in entry.parts], -1)
        fp8 = torch.cat([ref.gemm_nt(ref.quantize_rows(x), ref.quantize_blocks(weights[part])) for part, _ in entry.parts], -1)
        y = linear.fprop(ref.quantize_rows(x))
        if linear.bias is not None:
            bias = torch.cat([weights[part.replace("weight", "bias")] for part, _ in entry.parts])
            bf16, fp8 = bf16 + bias, fp8 + bias
        assert torch.equal(y, fp8), entry.name
        assert 1e-3 < relative(y, bf16) < 0.1, entry.name
        checked += len(entry.parts)
    assert checked == LINEARS[name]


@pytest.mark.parametrize("tokens", [1, 5, 64])
@pytest.mark.parametrize("name", MODELS)
def test_the_forward_without_gradients_has_the_same_bits(name, tokens, mesh):
    trainer = trainer_of(make(name), mesh)
    ids = torch.arange(2 * tokens).view(2, tokens) * 11 % 384
    with_gradients = trainer.model(ids, use_cache=False).logits
    assert with_gradients.requires_grad and with_gradients.dtype == torch.bfloat16
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert torch.equal(trainer.model(ids, use_cache=False).logits, with_gradients)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):  # as verl calls it
        assert torch.equal(trainer.model(ids, use_cache=False).logits, with_gradients)


@pytest.mark.parametrize("name", MODELS)
def test_packed_sequences_are_the_separate_ones(name, mesh):
    """Position ids that start again separate sequences, forward and backward."""
    trainer = trainer_of(make(name), mesh)
    lengths = (7, 1, 12, 4)
    torch.manual_seed(0)
    ids = [torch.randint(0, 384, (1, n)) for n in lengths]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = trainer.model(torch.cat(ids, 1), position_ids=positions, use_cache=False).logits
    separate = [trainer.model(one, use_cache=False).logits for one in ids]
    assert torch.equal(packed, torch.cat(separate, 1))
    joined = trainer.model(torch.cat(ids, 1), use_cache=False).logits
    assert not torch.equal(joined[:, lengths[0] :], packed[:, lengths[0] :]), "the case cannot tell"
    # What one sequence's loss depends on: nothing of another's tokens.
    other = torch.cat([ids[0], (ids[1] + 1) % 384, (ids[2] + 1) % 384, ids[3]], 1)
    changed = trainer.model(other, position_ids=positions, use_cache=False).logits
    assert torch.equal(changed[:, :7], packed[:, :7]) and torch.equal(changed[:, -4:], packed[:, -4:])


def test_a_padded_batch_is_its_sequences(mesh):
    """verl without remove_padding: left-padded prompts, an attention mask."""
    trainer = trainer_of(make("qwen3"), mesh)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = trainer.model(TOKENS, attention_mask=mask, position_ids=positions, use_cache=False).logits
    for row, start in ((0, 0), (1, 5)):
        alone = trainer.model(TOKENS[row : row + 1, start:], use_cache=False).logits[0]
        torch.testing.assert_close(logits[row, start:], alone, rtol=0.02, atol=0.02)
    logits[1, 5:].float().logsumexp(-1).sum().backward()
    assert all(gradient.isfinite().all() for gradient in trainer.gradients().values())


@pytest.mark.parametrize("name", MODELS)
def test_gradient_checkpointing_gives_the_same_gradients(name, mesh):
    plain, checkpointed = trainer_of(make(name), mesh), trainer_of(make(name), mesh)
    checkpointed.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    calls = []
    for layer in checkpointed.decoder.model.layers:
        layer.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    for trainer in (plain, checkpointed):
        trainer.model.train()
    (logits, gradients), (others, other_gradients) = run(plain), run(checkpointed)
    assert torch.equal(logits, others) and equal(gradients, other_gradients)
    assert len(calls) == 2 * len(checkpointed.decoder.model.layers), "no layer was computed again"
    calls.clear()
    with torch.no_grad():
        checkpointed.model(TOKENS, use_cache=False)
    assert len(calls) == len(checkpointed.decoder.model.layers)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_micro_batches_add_up(name, mesh):
    trainer = trainer_of(make(name), mesh)
    (_, first), (_, second) = run(trainer, TOKENS[:1]), run(trainer, TOKENS[1:])
    trainer.masters.zero_grad()
    for tokens in (TOKENS[:1], TOKENS[1:]):
        loss_of(trainer.model, tokens)[1].backward()
    both = trainer.gradients()
    for key in both:
        torch.testing.assert_close(both[key], first[key] + second[key], rtol=1e-5, atol=1e-7, msg=lambda m, k=key: f"{k}: {m}")
    assert not torch.equal(both["model.norm.weight"], first["model.norm.weight"])
    trainer.masters.zero_grad()
    assert all(not gradient.any() for gradient in trainer.gradients().values())


def test_a_backward_pass_needs_accumulators(mesh):
    """A forward pass of a reference policy allocates none; a backward pass by mistake says so."""
    trainer = trainer_of(make("qwen3"), mesh)
    for module in trainer.decoder.modules():
        if hasattr(module, "main_grad"):
            module.main_grad = None
    with pytest.raises(RuntimeError, match="no gradient accumulator"):
        loss_of(trainer.model)[1].backward()


@pytest.mark.parametrize("name", MODELS)
def test_the_state_dict_stays(name, mesh):
    plain, trainer = make(name), trainer_of(make(name), mesh)
    before, after = plain.state_dict(), trainer.model.state_dict()
    assert list(before) == list(after)
    for key, value in before.items():
        assert value.dtype == after[key].dtype == torch.float32 and torch.equal(value, after[key].full_tensor()), key
    assert [n for n, _ in plain.named_parameters()] == [n for n, _ in trainer.model.named_parameters()]
    tied = plain.config.tie_word_embeddings
    assert (trainer.model.lm_head.weight is trainer.model.model.embed_tokens.weight) is tied
    assert not any(p.requires_grad for p in trainer.decoder.parameters()), "the optimizer must see the masters alone"


def test_resident_transposed_weights_give_the_same_gradients(mesh):
    for name in MODELS:
        scratch, resident = trainer_of(make(name), mesh), trainer_of(make(name), mesh, resident_transposed=True)
        assert all(linear.transposed is None for linear in scratch.decoder.linears())
        assert all(linear.transposed is not None for linear in resident.decoder.linears())
        (logits, gradients), (others, other_gradients) = run(scratch), run(resident)
        assert torch.equal(logits, others) and equal(gradients, other_gradients)
        # They follow the weights.
        for trainer in (scratch, resident):
            with torch.no_grad():
                for parameter in trainer.model.parameters():
                    parameter.mul_(-0.75)
            trainer.masters.write()
        (_, moved), (_, other_moved) = run(scratch), run(resident)
        assert equal(moved, other_moved) and not equal(moved, gradients)


def test_a_tied_embedding_gets_the_gradients_of_both_uses(mesh):
    _, gradients = run(trainer_of(make("qwen3"), mesh))
    key = "model.embed_tokens.weight"
    exact = make("qwen3", dtype=torch.float64, attn="sdpa")
    _, both = plain_gradients(exact)
    parts = make("qwen3", dtype=torch.float64, attn="sdpa")
    parts.lm_head.weight = nn.Parameter(parts.model.embed_tokens.weight.detach().clone())
    _, apart = plain_gradients(parts)
    torch.testing.assert_close(apart[key] + apart["lm_head.weight"], both[key])
    seen = torch.zeros(384, dtype=torch.bool).index_fill(0, TOKENS.flatten(), True)
    assert 0 < seen.sum() < 384
    for rows in (seen, ~seen):
        assert relative(gradients[key][rows], both[key][rows]) < 0.1
    for part in (apart[key], apart["lm_head.weight"]):
        assert relative(gradients[key][seen], part[seen]) > 0.2, "one of the uses is lost"


# --- what is refused ----------------------------------------------------------------------------------------------------


def gpt2():
    from transformers import AutoConfig

    return AutoConfig.for_model("gpt2", n_layer=1, n_embd=32, n_head=2, vocab_size=64)


REFUSED = {
    "gpt2": (gpt2, "model_type='gpt2' .supported: qwen3, qwen2, llama"),
    "gelu": (lambda: config_of("qwen3", hidden_act="gelu"), "hidden_act='gelu'"),
    "mlp bias": (lambda: config_of("llama", mlp_bias=True), "mlp_bias=true"),
    "sliding window": (
        lambda: config_of("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1),
        "sliding-window attention",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_decoder_does_not_compute_is_refused(case):
    config, message = REFUSED[case]
    with pytest.raises(ValueError, match=f"the FP8 decoder does not support.*{message}"):
        Decoder(config())


@pytest.mark.parametrize("extra", [{"past_key_values": object()}, {"inputs_embeds": torch.zeros(1)}, {"use_cache": True}])
def test_a_cache_or_embeddings_are_refused(extra, mesh):
    trainer = trainer_of(make("qwen3"), mesh)
    with pytest.raises(ValueError, match="no cache, no input embeddings"):
        trainer.model.model(TOKENS, **extra)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("layer", ["self_attn.k_proj", "mlp.down_proj", "input_layernorm"])
def test_a_weight_that_is_no_number_is_seen_in_the_logits(layer, bad, mesh):
    """NaN or infinity must reach the loss check; the format's largest number in its place would hide it."""
    model = make("llama")
    model.model.layers[0].get_submodule(layer).weight.data.view(-1)[70] = bad
    trainer = trainer_of(model, mesh)
    logits, loss = loss_of(trainer.model)
    assert not loss.isfinite()
    assert logits.isnan().any()


# --- the masters and the arena ------------------------------------------------------------------------------------------


def assert_arena_is_rounded(trainer, why: str = "") -> None:
    """Every byte of the arena is what the format makes of the masters' BF16 rounding."""
    masters = {key: p.full_tensor().detach() for key, p in trainer.model.named_parameters()}
    checked = 0
    for entry in trainer.arena.layout.entries:
        if entry.name.endswith(SCALE) or entry.name == ROPE:
            continue
        for part, tensor in trainer.arena.parts(entry.name):
            wanted = masters[part].bfloat16()
            if entry.dtype == ref.FP8:
                wanted, scale = ref.quantize_blocks(wanted)
                scales = dict(trainer.arena.parts(f"{entry.name.rpartition('.')[0]}.{SCALE}"))
                assert same_bytes(scales[f"{part.rpartition('.')[0]}.{SCALE}"], scale), f"{part} {why}"
            assert same_bytes(tensor, wanted), f"{part} {why}"
            checked += 1
    assert checked == len(masters)


def test_rounding_to_bf16_comes_first(mesh):
    """xtuner #2044: a trainer that quantizes FP32 masters and a rollout that quantizes the BF16 export are two policies."""
    trainer = trainer_of(make("qwen3"), mesh)
    key = "model.layers.0.mlp.down_proj.weight"
    master = dict(trainer.model.named_parameters())[key].full_tensor().detach()
    assert same_bytes(trainer.arena[key], ref.quantize_blocks(master.bfloat16()).q)
    assert not same_bytes(ref.quantize_blocks(master).q, trainer.arena[key]), "the case is not the one meant"


@pytest.mark.parametrize("name", MODELS)
def test_an_optimizer_step_and_its_write(name, mesh, owned):
    trainer = trainer_of(make(name), mesh, rank=0)
    owned.append(trainer.arena)
    addresses = {key: tensor.data_ptr() for key, tensor in trainer.arena}
    assert trainer.arena.control.version == 1
    assert_arena_is_rounded(trainer, "at the start")
    before = trainer.arena.data.clone()
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=0.02)
    logits, _ = run(trainer)
    optimizer.step()
    assert torch.equal(trainer.arena.data, before), "the weights may change in Masters.write alone"
    trainer.masters.write()
    assert trainer.arena.control.version == 2
    assert_arena_is_rounded(trainer, "after a step")
    rope = trainer.arena.layout[ROPE]
    changed = (trainer.arena.data != before).nonzero()
    assert len(changed) and changed.max() < rope.offset, "nothing was written, or the table of angles was"
    # The decoder sees it: its parameters are the arena.
    assert addresses == {key: p.data_ptr() for key, p in trainer.decoder.named_parameters()}
    assert not torch.equal(loss_of(trainer.model)[0], logits)
    fresh = make(name)
    fresh.load_state_dict({key: value.full_tensor() for key, value in trainer.model.state_dict().items()})
    assert torch.equal(loss_of(trainer_of(fresh, mesh).model)[0], loss_of(trainer.model)[0])


@pytest.mark.parametrize("name", MODELS)
def test_a_loaded_state_dict_is_written(name, mesh):
    trainer = trainer_of(make(name), mesh)
    start = trainer.arena.data.clone()
    saved = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.1)
    trainer.masters.write()
    assert not torch.equal(trainer.arena.data, start)
    trainer.model.load_state_dict(saved)
    trainer.masters.write()
    assert torch.equal(trainer.arena.data, start)


def test_a_write_while_the_engine_holds_the_weights_raises(mesh, owned):
    trainer = trainer_of(make("qwen3"), mesh, rank=0)
    owned.append(trainer.arena)
    with torch.no_grad():
        trainer.model.model.norm.weight.add_(1)
    before = trainer.arena.data.clone()
    trainer.arena.control.hand_over(ENGINE)
    with pytest.raises(LeaseError, match="weight update while the engine holds the weights .version 1.*to the trainer first"):
        trainer.masters.write()
    assert torch.equal(trainer.arena.data, before) and trainer.arena.control.version == 1


def test_the_fault_drops_updates_but_not_the_first(mesh, owned, monkeypatch):
    """What test_jobs.py injects: everything goes on, no weight arrives."""
    monkeypatch.setenv("JETRL_FAULT", "drop_weight_sync")
    trainer = trainer_of(make("qwen3"), mesh, rank=0)
    owned.append(trainer.arena)
    assert_arena_is_rounded(trainer)
    before = trainer.arena.data.clone()
    with torch.no_grad():
        trainer.model.model.norm.weight.add_(1)
    trainer.masters.write()
    assert torch.equal(trainer.arena.data, before) and trainer.arena.control.version == 2


# --- two ranks ------------------------------------------------------------------------------------------------------------


def tokens_of(rank: int) -> torch.Tensor:
    return (TOKENS + 5 * rank) % 384


def sharded(rank: int, world_size: int, folder: str) -> None:
    """One rank: every model's logits, mean gradients, arena before and after a step, saved."""
    from accelerate import init_empty_weights

    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    mesh = dist.init_device_mesh("cpu", (world_size,))
    for name in MODELS:
        # As verl does: rank 0 has the weights; the others have none, unless the head is tied.
        with nullcontext() if rank == 0 or name == "qwen3" else init_empty_weights(include_buffers=False):
            model = make(name)
        trainer = trainer_of(model, mesh)
        before = trainer.arena.data.clone()
        logits, gradients = run(trainer, tokens_of(rank))
        rows = {key: p.to_local().shape[0] for key, p in trainer.model.named_parameters()}
        torch.optim.SGD(trainer.model.parameters(), lr=0.3).step()
        trainer.masters.write()
        weights = {key: p.full_tensor().detach() for key, p in trainer.model.named_parameters()}
        torch.save((logits, gradients, rows, before, trainer.arena.data, weights), f"{folder}/{name}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_are_one(tmp_path, mesh):
    """The same forward; gradients averaged over the ranks' batches; each holds half the masters and the whole arena."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "2", str(tmp_path)]
    ranks = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(2)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    for name in MODELS:
        alone = trainer_of(make(name), mesh)
        start = alone.arena.data.clone()
        expected = [run(alone, tokens_of(rank)) for rank in range(2)]
        assert not torch.equal(expected[0][0], expected[1][0])
        saved = [torch.load(tmp_path / f"{name}-{rank}.pt") for rank in range(2)]
        for rank, (logits, gradients, rows, before, after, weights) in enumerate(saved):
            assert torch.equal(logits, expected[rank][0]), f"{name}: sharding changes the forward"
            assert torch.equal(before, start) and not torch.equal(after, start)
            assert torch.equal(after, saved[0][4]), f"{name}: the ranks hold other weights"
            for key, gradient in gradients.items():
                mean = (expected[0][1][key] + expected[1][1][key]) / 2
                torch.testing.assert_close(gradient, mean, rtol=1e-5, atol=1e-7, msg=lambda m, k=f"{name} {key}": f"{k}: {m}")
                assert torch.equal(gradient, saved[0][1][key])
            for key, value in weights.items():
                assert rows[key] + saved[1 - rank][2][key] == value.shape[0] and rows[key] < value.shape[0], (
                    f"{key} is not sharded"
                )
        # After the step: the bytes that one rank alone would write from the same masters.
        whole = make(name)
        whole.load_state_dict(saved[0][5], strict=False)
        if whole.config.tie_word_embeddings:
            assert torch.equal(whole.lm_head.weight, saved[0][5]["model.embed_tokens.weight"])
        assert torch.equal(trainer_of(whole, mesh).arena.data, saved[0][4])


# --- the engine -----------------------------------------------------------------------------------------------------------


def engine_of(trainer, flow: PrecisionFlow = FP8):
    from verl.jetrl.trainer.engine import JetRLEngine

    engine = object.__new__(JetRLEngine)
    engine.engine_config = types.SimpleNamespace(precision_flow=flow)
    if trainer is not None:
        engine.masters, engine.decoder, engine.module = trainer.masters, trainer.decoder, trainer.model
    return engine


@pytest.mark.parametrize("name", MODELS)
def test_the_engine_says_what_the_rollout_must_hold(name, mesh, owned):
    """Names, bytes and hashes from the masters are those of the arena, so that an update that did not arrive shows."""
    from verl.jetrl.weights import compare, digest

    trainer = trainer_of(make(name), mesh, rank=0)
    owned.append(trainer.arena)
    engine = engine_of(trainer)
    held = dict(trainer.arena)
    stated = dict(engine.rollout_weights())
    assert stated.keys() == held.keys() and all(same_bytes(stated[key], held[key]) for key in held)

    def rollouts() -> dict[str, str]:
        return {key: digest(p.data) for key, p in trainer.decoder.named_parameters()}

    assert compare(engine.weight_digests(), rollouts()) == []
    with torch.no_grad():
        dict(trainer.model.named_parameters())["model.layers.0.self_attn.v_proj.weight"].mul_(1.5)
    layer = "model.layers.0.self_attn.qkv_proj"
    assert layer in {name.rpartition(".")[0] for name in compare(engine.weight_digests(), rollouts())}
    trainer.masters.write()
    assert compare(engine.weight_digests(), rollouts()) == []
    weights, _ = engine.get_per_tensor_param()
    assert weights.version == trainer.arena.control.version == 2


def test_the_engine_steps_and_loads_through_the_masters(monkeypatch, mesh, tmp_path):
    """Gradients before verl's optimizer step, the arena after it and after a checkpoint; in BF16 verl's methods alone."""
    from verl.jetrl.trainer.engine import JetRLEngine

    calls: list[str] = []
    base = JetRLEngine.__mro__[1]
    for method in ("optimizer_zero_grad", "forward_backward_batch", "optimizer_step", "load_checkpoint"):
        monkeypatch.setattr(base, method, lambda self, *args, m=method: calls.append(f"verl {m}"))
    masters = types.SimpleNamespace(
        **{m: lambda m=m: calls.append(m) for m in ("allocate_grads", "assign_grads", "drop_grads", "write")}
    )

    def step(engine) -> list[str]:
        calls.clear()
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(None, None, forward_only=True)
        engine.forward_backward_batch(None, None)
        engine.optimizer_step()
        engine.optimizer_zero_grad()
        engine.load_checkpoint(tmp_path)
        return calls

    engine = engine_of(None)
    engine.masters = masters
    assert step(engine) == [
        "drop_grads", "verl forward_backward_batch", "allocate_grads", "verl forward_backward_batch",
        "assign_grads", "verl optimizer_step", "drop_grads", "write", "drop_grads", "verl load_checkpoint", "write",
    ]  # fmt: skip
    assert step(engine_of(None, PrecisionFlow())) == [
        "verl optimizer_zero_grad", "verl forward_backward_batch", "verl forward_backward_batch", "verl optimizer_step",
        "verl optimizer_zero_grad", "verl load_checkpoint",
    ]  # fmt: skip


def test_no_gradients_are_held_between_training_and_rollout(mesh):
    """Four bytes per parameter that the KV cache can use: verl zeroes gradients once more when training ends."""
    trainer = trainer_of(make("qwen3"), mesh)
    engine = engine_of(trainer)
    trainer.masters.allocate_grads()
    _, loss = loss_of(trainer.model)
    loss.backward()
    first = trainer.decoder.model.norm.main_grad
    trainer.masters.allocate_grads()
    assert trainer.decoder.model.norm.main_grad is first and first.any(), "gradients of a first pass are kept for a second"
    engine.optimizer_zero_grad()
    assert all(module.main_grad is None for module in trainer.decoder.modules() if hasattr(module, "main_grad"))


def test_the_embeddings_gradient_is_the_same_run_to_run():
    """Many tokens of few ids, so that additions in another order would show."""
    from verl.jetrl.model import autograd
    from verl.jetrl.model.decoder import Weight

    torch.manual_seed(0)
    table = Weight(8, 256)
    table.weight = nn.Parameter(torch.randn(8, 256).bfloat16(), requires_grad=False)
    ids, dy = torch.randint(0, 8, (700,)), torch.randn(700, 256)
    grads = []
    for _ in range(10):
        table.main_grad = torch.zeros(8, 256)
        autograd.embed(ids, table).backward(dy.bfloat16())
        grads.append(table.main_grad)
    assert all(torch.equal(grads[0], grad) for grad in grads[1:])
    wanted = torch.zeros(8, 256, dtype=torch.float64).index_add_(0, ids, dy.bfloat16().double())
    torch.testing.assert_close(grads[0].double(), wanted, rtol=1e-4, atol=1e-3)


def test_a_checkpoint_of_another_number_of_processes_is_refused(mesh, tmp_path):
    (tmp_path / "fsdp_config.json").write_text('{"world_size": 2}')
    with pytest.raises(ValueError, match=r"saved by 2 processes, this run has 1: .*reshard .* --world-size 1"):
        engine_of(None).load_checkpoint(tmp_path)


def test_verls_fsdp_module_of_the_engine(monkeypatch, mesh, owned):
    """What the engine builds is what these tests run on; the wrapper leaves the parameters alone."""
    from verl.utils.fsdp_utils import fsdp2_clip_grad_norm_

    model = make("qwen2")
    engine = engine_of(None)
    config = dict(forward_only=False, arena="replicated", use_no_sync_for_gradient_accumulation=False)
    for name, value in {**config, "resident_transposed": False, "rollout_tensor_parallel": 1}.items():
        setattr(engine.engine_config, name, value)
    from verl.jetrl.trainer.decoder import share_decoder

    engine.decoder = Decoder(model.config)
    share_decoder(model, engine.decoder)
    engine.device_mesh, engine.rank = mesh, 0
    monkeypatch.setattr("verl.jetrl.trainer.engine.get_device_name", lambda: "cpu")
    module = engine._build_fsdp_module(model)
    owned.append(engine.masters.arena)
    trainer = trainer_of(make("qwen2"), mesh)
    assert torch.equal(engine.masters.arena.data, trainer.arena.data) and engine.masters.arena.control.version == 1
    engine.masters.zero_grad()
    logits, loss = loss_of(module)
    loss.backward()
    engine.masters.assign_grads()
    expected, gradients = run(trainer)
    assert torch.equal(logits, expected)
    assert equal({name: p.grad.full_tensor() for name, p in module.named_parameters()}, gradients)
    total = torch.stack([g.norm() for g in gradients.values()]).norm()
    norm = fsdp2_clip_grad_norm_(module.parameters(), max_norm=total.item() / 2)
    torch.testing.assert_close(getattr(norm, "full_tensor", lambda: norm)(), total)
    clipped = torch.stack([p.grad.full_tensor().norm() for p in module.parameters()]).norm()
    torch.testing.assert_close(clipped, total / 2, rtol=1e-4, atol=0)

    def built(rank: int, **changes):
        other = engine_of(None)
        for name, value in {**config, "resident_transposed": False, **changes}.items():
            setattr(other.engine_config, name, value)
        model = make("qwen2")
        other.decoder = Decoder(model.config)
        share_decoder(model, other.decoder)
        other.device_mesh, other.rank = mesh, rank
        assert torch.equal(loss_of(other._build_fsdp_module(model))[0], expected)
        return other

    # A reference policy's arena belongs to nobody else, and is whole.
    reference = built(0, forward_only=True, arena="sharded")
    assert reference.masters.arena.control is None and reference.masters.window is None
    assert (
        not engine.masters.deferred and built(0, forward_only=True, use_no_sync_for_gradient_accumulation=True).masters.deferred
    )
    sharded = built(1, arena="sharded")
    owned.append(sharded.masters.arena)
    weights, _ = sharded.get_per_tensor_param()
    assert weights.window is sharded.masters.window and read_handle(1)["slots"] == SLOTS
    held = sharded.masters.arena.data.nbytes + sharded.masters.window.home.data.nbytes
    assert read_handle(1)["rollout_nbytes"] == held, "what vLLM's share of the GPU leaves to the trainer's copies"
    assert engine.get_per_tensor_param()[0].window is None


# --- attention on the CPU ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
def test_attention_rounds_once_even_under_autocast(masked):
    from verl.jetrl.trainer.attention import fp32_attention

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


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("which", range(3))
def test_attention_does_not_hide_what_is_no_number(which, bad):
    """torch's CPU kernel gives zeros to a row whose scores are all NaN."""
    from verl.jetrl.trainer.attention import fp32_attention

    tensors = list(torch.randn(3, 1, 2, 6, 8).bfloat16())
    assert fp32_attention(None, *tensors, None)[0].isfinite().all()
    tensors[which][0, 1] = bad
    assert not fp32_attention(None, *tensors, None)[0].isfinite().all()


# --- the vocabulary's padding -------------------------------------------------------------------------------------------


def test_masked_log_probs_normalise_over_the_tokenizers_ids():
    from verl.jetrl.vocabulary import mask_padding_, padding_mass

    torch.manual_seed(0)
    for dtype, temperature in ((torch.float32, 1.0), (torch.float32, 0.5), (torch.bfloat16, 0.7)):
        logits = (torch.randn(2, 5, 384) * 3).to(dtype)
        masked = mask_padding_(logits.clone(), 311).float() / temperature
        wanted = torch.log_softmax(logits[..., :311].float() / temperature, -1)
        torch.testing.assert_close(torch.log_softmax(masked, -1)[..., :311], wanted)
        assert torch.softmax(masked, -1)[..., 311:].max() == 0
        unmasked = torch.log_softmax(logits.float() / temperature, -1)[..., :311]
        scaled = logits.float().flatten(0, 1) / temperature
        for chosen in (0, 300):
            mass = padding_mass(scaled[:, 311:], scaled[:, chosen], unmasked.flatten(0, 1)[:, chosen])
            assert mass.shape == (10,) and (mass < 0).all() and mass.min() < -0.1
            expected = mass.view(2, 5, 1).expand_as(wanted)
            torch.testing.assert_close(unmasked - wanted, expected, rtol=1e-4, atol=1e-5)
    for vocabulary in (384, 400):  # nothing is padding
        assert torch.equal(mask_padding_(logits.clone(), vocabulary), logits)


PROMPT = 3  # tokens of the packed sequence that are the prompt


def outputs(
    flow: PrecisionFlow,
    hidden: torch.Tensor,
    head: torch.Tensor,
    vocabulary: int,
    temperature: float = 1.0,
    sampled: bool = True,
):
    """Log-probs and entropy by the engine's own method, and the engine; ``hidden`` (T, H) of one packed sequence."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.utils.torch_functional import entropy_from_logits

    from verl.jetrl.model.decoder import Weight
    from verl.jetrl.trainer.engine import JetRLEngine
    from verl.jetrl.trainer.staging import response_rows

    engine = object.__new__(JetRLEngine)
    engine.engine_config = types.SimpleNamespace(
        precision_flow=flow, entropy_checkpointing=False, entropy_from_logits_with_chunking=False
    )
    engine.model_config = types.SimpleNamespace(tokenizer=range(vocabulary))
    engine.use_ulysses_sp = False
    engine.compute_entropy_from_logits = entropy_from_logits
    engine._gather_and_unpad_packed = lambda tensor, pad_size: tensor
    tokens = hidden.shape[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ids = torch.nested.as_nested_tensor([torch.arange(tokens)], layout=torch.jagged)
        prompts = torch.nested.as_nested_tensor([torch.arange(PROMPT)], layout=torch.jagged)
        responses = torch.nested.as_nested_tensor([torch.arange(PROMPT, tokens)], layout=torch.jagged)
    batch = TensorDict({"input_ids": ids, **({"prompts": prompts, "responses": responses} if sampled else {})}, batch_size=[1])
    tu.assign_non_tensor(batch, temperature=temperature, calculate_entropy=True, use_remove_padding=True)
    arguments = dict(
        input_ids_rmpad_rolled=torch.arange(tokens) % vocabulary,
        temperature_rmpad=torch.full((tokens,), temperature),
        pad_size=0,
    )
    if flow.fp8:  # the FP8 model's "logits" are its hidden states
        arguments["response_rows"] = response_rows(batch)
        engine.decoder = types.SimpleNamespace(lm_head=Weight(*head.shape))
        engine.decoder.lm_head.weight = nn.Parameter(head, requires_grad=False)
        engine.decoder.lm_head.main_grad = torch.zeros(head.shape)
        output = types.SimpleNamespace(logits=hidden[None])
    else:
        output = types.SimpleNamespace(logits=(hidden.double() @ head.double().t()).to(torch.bfloat16).float()[None])
    result = engine.prepare_model_outputs(output, arguments, batch, None)
    assert not tu.get_non_tensor_data(batch, "use_fused_kernels", False), "the micro-batch stays as it was"
    return result, engine


def hidden_and_head() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(9, 32, dtype=torch.bfloat16), (torch.randn(384, 32) * 0.2).to(torch.bfloat16)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_engine_masks_in_fp8_and_reports_in_bf16(temperature):
    hidden, head = hidden_and_head()
    labels = torch.arange(9)[:, None]
    with torch.no_grad():
        fp8, _ = outputs(FP8, hidden, head, 311, temperature, sampled=False)
        of_response, _ = outputs(FP8, hidden, head, 311, temperature)
        stock, engine = outputs(PrecisionFlow(), hidden, head, 311, temperature)
    scaled = (hidden.double() @ head.double().t()).to(torch.bfloat16).float() / temperature
    wanted = torch.log_softmax(scaled[:, :311], -1)
    torch.testing.assert_close(fp8["log_probs"].values(), wanted.gather(1, labels)[:, 0])
    entropy = -(wanted.exp() * wanted).sum(-1)
    torch.testing.assert_close(fp8["entropy"].values(), entropy), "entropy over the tokenizer's ids, and no NaN"
    for name in ("log_probs", "entropy"):
        of_all, given = fp8[name].values(), of_response[name].values()
        assert torch.equal(given[PROMPT - 1 : -1], of_all[PROMPT - 1 : -1]), "a token's bits do not depend on the others"
        assert given[: PROMPT - 1].abs().max() == 0 and given[-1] == 0, "nobody reads those that predict no response"
    plain = torch.log_softmax(scaled, -1).gather(1, labels)[:, 0]
    torch.testing.assert_close(stock["log_probs"].values(), plain)
    # of the response's tokens: predicted by the positions from the prompt's last to the last but one
    difference = (wanted.gather(1, labels)[:, 0] - plain).abs()[PROMPT - 1 : -1].mean().item()
    assert difference > 0.05 and engine.take_padding_abs_dlogp() == pytest.approx(difference, rel=1e-4)
    assert engine.take_padding_abs_dlogp() == 0.0, "taken once"


def test_fine_tuning_data_has_no_responses():
    """Nothing was sampled, so there is nothing to report."""
    with torch.no_grad():
        (sampled, _), (given, engine) = (outputs(PrecisionFlow(), *hidden_and_head(), 311, sampled=s) for s in (True, False))
    assert torch.equal(given["log_probs"].values(), sampled["log_probs"].values())
    assert engine.take_padding_abs_dlogp() == 0.0


@pytest.mark.parametrize("sampled", (True, False))
def test_gradients_through_the_mask(sampled):
    hidden, head = hidden_and_head()
    hidden.requires_grad_()
    result, engine = outputs(FP8, hidden, head, 311, sampled=sampled)
    (result["log_probs"].values().sum() + result["entropy"].values().sum()).backward()
    grad = engine.decoder.lm_head.main_grad
    assert hidden.grad.isfinite().all() and grad.isfinite().all(), "an entropy bonus must not give NaN"
    learned = hidden.grad.abs().amax(1) > 0
    assert learned.tolist() == [not sampled or PROMPT - 1 <= at < 8 for at in range(9)]
    assert grad[311:].abs().max() == 0 and grad[:311].abs().max(1).values.min() > 0


def test_padded_batches_are_refused():
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    from verl.jetrl.trainer.engine import JetRLEngine

    engine = object.__new__(JetRLEngine)
    engine.engine_config = types.SimpleNamespace(precision_flow=FP8)
    engine.model_config = types.SimpleNamespace(tokenizer=range(311))
    batch = TensorDict({}, batch_size=[1])
    tu.assign_non_tensor(batch, use_remove_padding=False)
    with pytest.raises(ValueError, match="use_remove_padding=true"):
        engine.prepare_model_outputs(types.SimpleNamespace(logits=torch.zeros(1, 2, 3)), {}, batch, None)


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
