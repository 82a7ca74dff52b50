"""vLLM's side of the shared decoder: the model on the trainer's arena, its loader, the server's lease; stock FP8 on the CPU."""

from __future__ import annotations

import asyncio
import json
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from decoder_cases import CPU, MODELS, TOKENS, Trainer, config_of, make, trainer_of
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from verl.jetrl import flow_check
from verl.jetrl.arena import (
    ENGINE,
    SLOTS,
    TRAINER,
    Arena,
    ArenaError,
    Control,
    LeaseError,
    handle_path,
    layer_of,
    layout_of,
    read_handle,
)
from verl.jetrl.fp8 import format as ref
from verl.jetrl.weights import compare

vllm_model = pytest.importorskip("verl.jetrl.rollout.vllm_model")

from verl.jetrl.rollout import server, vllm_quant  # noqa: E402
from verl.jetrl.rollout.server import JetRLHttpServer  # noqa: E402

EXACT = "jetrl_test_fp64"


def fp64_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float, mask: Tensor) -> Tensor:
    """(heads, T, D), (KV heads, S, D) twice and (T, S) give (T, heads, D): FP64 rounded to BF16 once, so that it has the same
    bits in any batch."""
    groups = query.shape[0] // key.shape[0]
    key, value = (x.double().repeat_interleave(groups, 0) for x in (key, value))
    scores = (query.double() @ key.transpose(1, 2) * scaling).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ value).to(query.dtype).transpose(0, 1)


def trainers_attention(module, query, key, value, mask, scaling=None, **_):
    T = query.shape[2]
    causal = torch.ones(T, T, dtype=torch.bool).tril()
    sequences = [
        fp64_attention(query[b], key[b], value[b], scaling, causal if mask is None else mask[b, 0]) for b in range(len(query))
    ]
    return torch.stack(sequences), None


AttentionInterface.register(EXACT, trainers_attention)
AttentionMaskInterface.register(EXACT, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


class Engine:
    """Stands for vLLM's engine around its model: a KV cache per sequence, batches of parts of sequences."""

    def __init__(self, model: nn.Module, monkeypatch) -> None:
        self.model, self.cache, self.batch = model, {}, []
        monkeypatch.setattr(vllm_model, "_attend", self.attend)

    def attend(self, attention: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert attention.impl is not None and attention.num_kv_heads == k.shape[1]
        outputs = []
        for sequence, *mine in zip(
            [s for s, _ in self.batch], *(t.split([n for _, n in self.batch]) for t in (q, k, v)), strict=True
        ):
            key = (attention.layer_name, sequence)
            held = self.cache.get(key, tuple(t[:0] for t in mine[1:]))
            keys, values = self.cache[key] = tuple(torch.cat(pair) for pair in zip(held, mine[1:], strict=True))
            T, S = len(mine[0]), len(keys)
            mask = torch.ones(T, S, dtype=torch.bool).tril(S - T)
            heads = [t.transpose(0, 1) for t in (mine[0], keys, values)]
            outputs.append(fp64_attention(*heads, attention.head_size**-0.5, mask))
        return torch.cat(outputs).flatten(1)

    @torch.inference_mode()
    def step(self, batch: list[tuple[int, int]]) -> dict[int, Tensor]:
        """Logits of the next tokens of some sequences, {row of TOKENS: (n, V)}."""
        first = next(iter(self.model.model.layers)).self_attn.attn.layer_name
        done = {s: len(self.cache[first, s][0]) if (first, s) in self.cache else 0 for s, _ in batch}
        ids = torch.cat([TOKENS[s, done[s] : done[s] + n] for s, n in batch])
        positions = torch.cat([torch.arange(done[s], done[s] + n) for s, n in batch])
        self.batch = batch
        logits = self.model.compute_logits(self.model(ids, positions))
        return dict(zip([s for s, _ in batch], logits.split([n for _, n in batch]), strict=True))


def engine_config(folder, config):
    """vLLM's configuration as verl's server asks for it."""
    from vllm.engine.arg_utils import EngineArgs

    from verl.jetrl.activate import vllm_plugin

    vllm_plugin()
    config.save_pretrained(folder)
    return EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        load_format=vllm_model.LOAD_FORMAT,
        quantization=vllm_quant.METHOD,
        hf_overrides={
            "architectures": [vllm_model.ARCHITECTURE],
            "quantization_config": {"quant_method": vllm_quant.METHOD},
        },
    ).create_engine_config()


CONFIGS: dict[str, object] = {}


@pytest.fixture
def load(monkeypatch, tmp_path):
    """Loads a model as vLLM's worker does."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader

    monkeypatch.setattr(vllm_model, "get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(vllm_model, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.delenv("VERL_REPLICA_RANK", raising=False)

    def load(name: str) -> nn.Module:
        if name not in CONFIGS:
            CONFIGS[name] = engine_config(tmp_path / "model", config_of(name))
        config = CONFIGS[name]
        config.compilation_config.static_forward_context.clear()
        with set_current_vllm_config(config):
            return get_model_loader(config.load_config).load_model(vllm_config=config, model_config=config.model_config)

    return load


@pytest.fixture
def sides(load, mesh, owned):
    """Trainer and vLLM's model on one arena; with ``slots`` the model has weights of its own, which have not come yet."""

    def sides(name: str, slots: int = 0):
        trainer = trainer_of(make(name, attn=EXACT), mesh, rank=0, slots=slots)
        owned.append(trainer.arena)
        return trainer, load(name)

    return sides


def update(trainer: Trainer, model: nn.Module) -> None:
    """What verl's weight update comes to: nothing, or with arena=sharded a stream to the worker."""
    window = trainer.masters.window
    if window is None:
        return
    window.updates += 1
    with ThreadPoolExecutor(1) as worker:
        received = worker.submit(model.take_weights, window.updates)
        window.send(window.updates)
        received.result(30)
    assert trainer.arena.control.served == trainer.arena.control.version


# --- the model --------------------------------------------------------------------------------------------------------

SCHEDULES = {
    "whole prompts": [[(0, 12), (1, 12)]],
    "chunks": [[(0, 5)], [(1, 7), (0, 3)], [(0, 4), (1, 5)]],
    "token by token": [[(0, 1), (1, 1)]] * 12,
    "prefill beside decode": [[(0, 9)], [(0, 1), (1, 10)], [(1, 1), (0, 1)], [(1, 1)], [(0, 1)]],
}


@pytest.mark.parametrize(("name", "slots"), [*((name, 0) for name in MODELS), ("qwen3", SLOTS)])
def test_the_rollouts_logits_are_the_trainers_bit_for_bit(name, slots, sides, monkeypatch):
    """However the tokens are batched, and after an update, of which the engine is told nothing."""
    trainer, model = sides(name, slots)
    assert type(model) is vllm_model.JetRLForCausalLM and not model.training
    logits = []
    for number in range(2):
        update(trainer, model)
        expected = trainer.model(TOKENS, use_cache=False).logits.detach()  # the pass that is differentiated
        for schedule in SCHEDULES.values():
            engine, got = Engine(model, monkeypatch), {0: [], 1: []}
            for batch in schedule:
                for sequence, rows in engine.step(batch).items():
                    got[sequence].append(rows)
            assert torch.equal(torch.stack([torch.cat(got[s]) for s in (0, 1)]), expected), number
        logits.append(expected)
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                local = parameter.to_local()
                local += 0.05 * local.abs().mean() * torch.randn_like(local)
        trainer.masters.write()
    assert not torch.equal(*logits) and logits[1].isfinite().all()


@pytest.mark.parametrize("name", MODELS)
def test_the_engine_allocates_nothing_of_the_models_size(name, sides):
    trainer, model = sides(name)
    data = model.arena.data
    held = {key: p for key, p in model.named_parameters()}
    assert held.keys() == dict(trainer.arena).keys()
    for key, parameter in held.items():
        inside = data.data_ptr() <= parameter.data_ptr() < data.data_ptr() + data.nbytes
        assert inside and not parameter.requires_grad, key
    others = sum(b.nbytes for b in model.buffers())
    assert others < 1000, f"{others} bytes of buffers"


def test_sharded_weights_are_zero_until_they_come(sides, monkeypatch):
    """FP8 weights of the worker's own, in vLLM's pool; the rest is the trainer's.  Nothing can be served without them, but
    vLLM's start-up samples: from finite logits."""
    trainer, model = sides("qwen3", SLOTS)
    for key, parameter in model.named_parameters():
        holder = model.own if key in model.own.layout else model.arena
        assert holder.data.data_ptr() <= parameter.data_ptr() < holder.data.data_ptr() + holder.data.nbytes, key
    assert not any(linear.weight.float().any() for linear in model.linears()) and trainer.arena.control.served == 0
    assert Engine(model, monkeypatch).step([(0, 12)])[0].isfinite().all()
    assert not list(model.buffers()) or sum(b.nbytes for b in model.buffers()) < 1000, "sleep copies buffers to the host"


@pytest.mark.parametrize("slots", [0, SLOTS])
@pytest.mark.parametrize("name", MODELS)
def test_checks_of_a_running_engine(name, slots, sides, monkeypatch):
    """Both sides describe the same precision and hash the same bytes; an update that does not arrive is named."""
    from verl.jetrl.rollout.worker_extension import JetRLWorkerExtension
    from verl.jetrl.trainer.engine import JetRLEngine

    trainer, model = sides(name, slots)
    update(trainer, model)
    worker, engine = object.__new__(JetRLWorkerExtension), object.__new__(JetRLEngine)
    worker.model_runner = types.SimpleNamespace(model=model)
    engine.engine_config = types.SimpleNamespace(precision_flow=server.PrecisionFlow(linear="fp8"))
    engine.masters, engine.decoder, engine.module = trainer.masters, trainer.decoder, trainer.model
    rows = flow_check.compare(engine.describe_precision(), worker.jetrl_describe_precision())
    flow_check.require_equal(rows, mixed_baseline=False)
    assert sum(row.count for row in rows if row.rollout == flow_check.FP8_BLOCK) == len(model.linears())
    assert compare(engine.weight_digests(), worker.jetrl_weight_digests()) == []
    monkeypatch.setenv("JETRL_FAULT", "drop_weight_sync")
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(-1.5)
    trainer.masters.write()
    update(trainer, model)
    stale = compare(engine.weight_digests(), worker.jetrl_weight_digests())
    assert set(stale) == set(dict(trainer.arena))
    monkeypatch.delenv("JETRL_FAULT")
    trainer.masters.write()
    if slots:  # a layer that is not gathered anew
        layer = len(model.model.layers) - 1
        trainer.masters.window._held[layer % SLOTS] = layer
        update(trainer, model)
        stale = compare(engine.weight_digests(), worker.jetrl_weight_digests())
        assert set(stale) == {entry.name for entry in trainer.arena.layout.linears if layer_of(entry.name) == layer}
        trainer.masters.window.forget()
    update(trainer, model)
    assert compare(engine.weight_digests(), worker.jetrl_weight_digests()) == []


def written(family: str, rank: int) -> Arena:
    """An arena of zeros that says it was written."""
    arena = Arena.create(layout_of(config_of(family)), CPU, rank)
    arena.control.wrote()
    return arena


def test_an_arena_that_was_never_written_is_refused(load, owned):
    owned.append(Arena.create(layout_of(config_of("qwen3")), CPU, 0))
    with pytest.raises(ArenaError, match="has not been written"):
        load("qwen3")


def test_the_loader_needs_the_trainers_arena(load, owned, monkeypatch):
    with pytest.raises(ArenaError, match="no weight arena of trainer rank 0"):
        load("qwen3")
    owned.append(written("qwen2", 0))
    with pytest.raises(ArenaError, match="same model configuration"):
        load("qwen3")
    monkeypatch.setenv("VERL_REPLICA_RANK", "2")
    with pytest.raises(ArenaError, match="no weight arena of trainer rank 2"):
        load("qwen3")
    owned.append(written("qwen3", 2))
    owned[-1]["model.norm.weight"].fill_(7)
    assert (load("qwen3").model.norm.weight == 7).all(), "each replica maps the arena of its own trainer process"


def test_weights_are_not_loaded_into_it(load, owned):
    from vllm.config.load import LoadConfig

    owned.append(written("qwen3", 0))
    with pytest.raises(ArenaError, match="live in the trainer's arena"):
        vllm_model.ArenaLoader(LoadConfig(load_format=vllm_model.LOAD_FORMAT)).load_weights(load("qwen3"), None)


CUT = dict(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=4, head_dim=64)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_the_shares_of_two_gpus_add_up_to_the_whole(family, mesh):
    """Two decoders on slices of one arena, in two threads that add their partial sums: the whole decoder's hidden states."""
    import threading

    from verl.jetrl.fp8 import ops
    from verl.jetrl.model.decoder import Decoder
    from verl.jetrl.trainer.attention import fp64_attention
    from verl.jetrl.trainer.decoder import share_decoder
    from verl.jetrl.trainer.masters import Masters, shard_parameters

    changes = {**MODELS[family], **CUT, "num_hidden_layers": 2, "attention_bias": family == "llama"}
    changes.pop("model_type")
    model = make(family, **changes)
    whole = Decoder(model.config)
    share_decoder(model, whole)
    shard_parameters(model, mesh, CPU)
    arena = Arena.private(layout_of(model.config, 2), CPU)
    whole.bind(arena)
    Masters(model, whole, arena).write()
    barrier, partial_sums = threading.Barrier(2), [None, None]

    def share(rank: int) -> Decoder:
        def reduce(y: torch.Tensor) -> torch.Tensor:
            partial_sums[rank] = y
            barrier.wait(60)
            total = (partial_sums[0].float() + partial_sums[1].float()).bfloat16()
            barrier.wait(60)
            return total

        decoder = Decoder(model.config)
        decoder.bind(arena)
        decoder.slice(rank, 2, reduce, arena)
        return decoder

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return fp64_attention(q, k, v, 64**-0.5).flatten(1)

    ids = torch.arange(40) * 7 % 384
    results: list = [None, None]

    def run(rank: int) -> None:
        with torch.no_grad():
            results[rank] = share(rank).model.run(ids, torch.arange(40), [attend] * 2)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    with torch.no_grad():
        wanted = whole.model.run(ids, torch.arange(40), [attend] * 2)
    assert torch.equal(results[0], results[1])
    error = (results[0].double() - wanted.double()).norm() / wanted.double().norm()
    # The partial sums are rounded to BF16 before they are added, which FP8 amplifies; nothing else differs.
    assert error < 0.06, error
    one_rank_only = share(0)
    for module in one_rank_only.linears():
        module.reduce = None
    with torch.no_grad():
        lost = one_rank_only.model.run(ids, torch.arange(40), [attend] * 2)
    assert (lost.double() - wanted.double()).norm() / wanted.double().norm() > 0.2, "half of every sum is missing: must show"
    x = ops.quantize_rows(torch.randn(5, 256).bfloat16())
    layers = [decoder.model.layers[0] for decoder in (whole, share(0), share(1))]
    full, *halves = (layer.self_attn.qkv_proj.fprop(x) for layer in layers)
    for mine, theirs in zip(full.split(256, -1), zip(*(half.split(128, -1) for half in halves), strict=True), strict=True):
        assert torch.equal(mine, torch.cat(theirs, -1)), "columns and their biases are cut, not rounded again"


@pytest.mark.parametrize(("family", "changes", "what"), [("qwen3", {}, "intermediate_size=192"), ("llama", {}, "=576")])
def test_layers_that_cannot_be_cut_are_refused(family, changes, what):
    with pytest.raises(ValueError, match=f"tensor_model_parallel_size=2.*{what}"):
        layout_of(config_of(family, **changes), 2)


def test_vllm_knows_the_method():
    from vllm.model_executor.layers.quantization import get_quantization_config

    assert get_quantization_config(vllm_quant.METHOD) is vllm_quant.JetRLFp8Config
    config = vllm_quant.JetRLFp8Config.from_config({"quant_method": vllm_quant.METHOD})
    assert config.get_name() == "jetrl_fp8" and config.get_min_capability() == 90
    assert config.get_supported_act_dtypes() == [torch.bfloat16]


# --- the server ---------------------------------------------------------------------------------------------------------


class Calls(list):
    """What reached verl's methods, in order; ``answer``: what verl's ``generate`` waits for."""

    answer: asyncio.Event | None = None


@pytest.fixture
def calls(monkeypatch) -> Calls:
    """verl's server methods replaced by their names."""
    calls = Calls()

    async def generate(self, *args, **kwargs):
        calls.append("generate")
        if args == ("fails",):
            raise RuntimeError("out of memory")
        if calls.answer is not None:
            await calls.answer.wait()
        return "output"

    monkeypatch.setattr(server.vLLMHttpServer, "generate", generate)
    for method in ("sleep", "clear_kv_cache", "set_global_steps"):

        async def note(self, *args, m=method):
            calls.append((m, *args, self.controls[0].holder if self.controls else None))

        monkeypatch.setattr(server.vLLMHttpServer, method, note)
    return calls


def server_of(linear: str = "fp8", control: Control | None = None) -> JetRLHttpServer:
    made = object.__new__(JetRLHttpServer)
    made.config = types.SimpleNamespace(custom={"precision_flow": {"linear": linear}}, quantization=None)
    made._controls, made._running, made.replica_rank, made.node_rank = [control] if control else [], 0, 0, 0
    made.replica_world_size = 1
    return made


@pytest.fixture
def control(tmp_path) -> Control:
    """Of an arena whose first weights were written."""
    control = Control.create(str(tmp_path / "control"))
    control.wrote()
    return control


def test_requests_are_served_while_the_engine_holds_the_weights(calls, control):
    one = server_of(control=control)
    with pytest.raises(LeaseError, match="a request while the trainer holds the weights .version 1.*to the engine first"):
        asyncio.run(one.generate())
    assert calls == [] and one._running == 0
    control.hand_over(ENGINE)
    assert asyncio.run(one.generate()) == "output"
    with pytest.raises(RuntimeError, match="out of memory"):
        asyncio.run(one.generate("fails"))
    assert one._running == 0, "a request that failed is over"


def test_weights_that_change_under_a_request(calls, control):
    """A write at that time is refused by the lease; should one come about some other way, its samples are no version's."""
    one = server_of(control=control)

    async def scenario() -> None:
        calls.answer = asyncio.Event()
        request = asyncio.ensure_future(one.generate())
        await asyncio.sleep(0.01)
        with pytest.raises(LeaseError):
            control.wrote()
        control._set("version", 9)
        calls.answer.set()
        await request

    control.hand_over(ENGINE)
    with pytest.raises(LeaseError, match="changed from version \[1\] to \[9\] under a running request"):
        asyncio.run(scenario())
    assert one._running == 0


def test_sleep_waits_for_running_requests(calls, control):
    one = server_of(control=control)

    async def scenario() -> None:
        calls.answer = asyncio.Event()
        requests = [asyncio.ensure_future(one.generate()) for _ in range(3)]
        await asyncio.sleep(0.01)
        sleep = asyncio.ensure_future(one.sleep())
        await asyncio.sleep(0.05)
        assert not sleep.done() and control.holder == ENGINE and len(calls) == 3
        calls.answer.set()
        assert await asyncio.gather(*requests) == ["output"] * 3
        await sleep

    control.hand_over(ENGINE)
    asyncio.run(scenario())
    assert calls[3:] == [("sleep", TRAINER)] and control.holder == TRAINER
    asyncio.run(one.sleep())  # asleep already: verl's affair
    assert calls[4:] == [("sleep", TRAINER)] and control.holder == TRAINER


def test_a_request_that_never_ends(calls, control, monkeypatch):
    monkeypatch.setattr(server, "DRAIN_S", 0.05)
    one = server_of(control=control)

    async def scenario() -> None:
        calls.answer = asyncio.Event()
        request = asyncio.ensure_future(one.generate())
        await asyncio.sleep(0.01)
        try:
            await one.sleep()
        finally:
            assert control.holder == ENGINE and calls == ["generate"], "the trainer must not get the weights"
            calls.answer.set()
            await request

    control.hand_over(ENGINE)
    with pytest.raises(LeaseError, match="1 requests still run 0 s after.*JETRL_DRAIN_DEADLINE_S"):
        asyncio.run(scenario())


def test_taking_the_weights(calls, control):
    one = server_of(control=control)
    asyncio.run(one.take_weights(1, 4))
    assert calls == [("clear_kv_cache", TRAINER), ("set_global_steps", 4, TRAINER)], "before a request can be served"
    assert control.holder == ENGINE
    calls.clear()
    asyncio.run(one.take_weights(1, None))  # again, the same: verl updates once more before its first step
    assert calls == [("clear_kv_cache", ENGINE)] and control.holder == ENGINE


@pytest.mark.parametrize("version", [0, 2])
def test_another_version_than_handed_over_is_refused(calls, control, version):
    with pytest.raises(LeaseError, match=rf"handed over version {version} of the weights, the arenas have \[1\]"):
        asyncio.run(server_of(control=control).take_weights(version, 4))
    assert calls == [] and control.holder == TRAINER


def test_an_engine_with_weights_of_its_own_serves_what_it_has_taken(calls, tmp_path):
    control = Control.create(str(tmp_path / "control"), sharded=True)
    control.wrote()
    one = server_of(control=control)
    with pytest.raises(LeaseError, match=r"handed over version 1 of the weights, the engine has \[0\]"):
        asyncio.run(one.take_weights(1, 4))
    assert calls == [] and control.holder == TRAINER
    control.serve(1)
    asyncio.run(one.take_weights(1, 4))
    assert control.holder == ENGINE
    asyncio.run(one.sleep())
    assert control.holder == TRAINER and control.served == 0, "sleep frees them"


def test_the_other_arms_have_no_lease(calls):
    one = server_of("bf16")
    assert asyncio.run(one.generate()) == "output" and one.controls == []
    asyncio.run(one.sleep())
    assert calls == ["generate", ("sleep", None)]


def test_the_server_finds_its_replicas_control_blocks(owned):
    """Of a replica on two GPUs both; handed over together."""
    one = server_of()
    one.replica_rank, one.replica_world_size = 1, 2
    for rank in (2, 3):
        with pytest.raises(ArenaError, match=f"no weight arena of trainer rank {rank}"):
            _ = one.controls
        owned.append(written("qwen3", rank))
    assert [control.version for control in one.controls] == [1, 1] and one.controls is one.controls


def test_both_gpus_of_a_replica_are_handed_over(calls, owned):
    one = server_of()
    one.replica_world_size = 2
    owned += [written("qwen3", 0), written("qwen3", 1)]
    asyncio.run(one.take_weights(1, 4))
    assert [control.holder for control in one.controls] == [ENGINE, ENGINE]
    asyncio.run(one.sleep())
    assert [control.holder for control in one.controls] == [TRAINER, TRAINER]
    owned[1].control.wrote()
    with pytest.raises(LeaseError, match=r"handed over version 1 of the weights, the arenas have \[1, 2\]"):
        asyncio.run(one.take_weights(1, 4))


def test_what_the_server_asks_of_vllm(monkeypatch, owned):
    owned.append(written("qwen3", 0))
    monkeypatch.setattr(server.vLLMHttpServer, "_preprocess_engine_kwargs", lambda self, kwargs: kwargs.update(verl=1))
    monkeypatch.setattr(server.vLLMHttpServer, "_apply_quantization", lambda self: ("stock", {}))
    for linear, wanted in (("fp8", {"load_format": "jetrl_arena", "verl": 1}), ("bf16", {"verl": 1})):
        kwargs: dict = {}
        server_of(linear)._preprocess_engine_kwargs(kwargs)
        assert kwargs == wanted
    path = handle_path(0)
    assert read_handle(0)["rollout_nbytes"] == owned[0].layout.nbytes
    path.write_text(json.dumps(read_handle(0) | {"gpu_nbytes": owned[0].layout.nbytes * 4}))
    for asked, beside in ((0.6, 0.35), (0.25, None)):
        one = server_of()
        one.config.gpu_memory_utilization = asked
        if beside is None:
            with pytest.raises(ValueError, match=r"gpu_memory_utilization=0.25: the weights take 0.250 of the GPU; set more"):
                one._preprocess_engine_kwargs({})
            continue
        one._preprocess_engine_kwargs(kwargs := {})
        assert kwargs["gpu_memory_utilization"] == pytest.approx(beside), "the weights count as the rollout's"
    assert server_of("bf16")._apply_quantization() == ("stock", {})
    method, overrides = server_of()._apply_quantization()
    assert method == "jetrl_fp8" and overrides["architectures"] == ["JetRLForCausalLM"]
    assert json.loads(json.dumps(overrides))["quantization_config"] == {"quant_method": "jetrl_fp8", "exact": False}
    both = server_of()
    both.config.quantization = "fp8"
    with pytest.raises(ValueError, match="exclude each other.*Remove actor_rollout_ref.rollout.quantization"):
        both._apply_quantization()


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
