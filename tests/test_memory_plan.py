"""The memory plan: against the design's figures, against what the layers really save, and its remedies by applying them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from decoder_cases import config_of, make, trainer_of
from omegaconf import DictConfig
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AttentionInterface, AutoConfig, PretrainedConfig

from verl.jetrl import memory_plan, preflight, run
from verl.jetrl.compose import compose
from verl.jetrl.memory_plan import BACKWARD, GIB, LOG_PROBS, PHASES, ROLLOUT, START, STEP, UPDATE, Plan, Sizes

ROOT = Path(__file__).resolve().parent.parent
H200 = int(140.4 * GIB)
GPUS = "trainer.n_gpus_per_node"
UTILIZATION = "actor_rollout_ref.rollout.gpu_memory_utilization"
TOKENS = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
CHECKPOINTING = "actor_rollout_ref.model.enable_gradient_checkpointing"


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    monkeypatch.setenv("JETRL_DEVICE", "gpu")


@pytest.fixture(scope="module")
def qwen3_8b() -> PretrainedConfig:
    return AutoConfig.for_model(
        "qwen3",
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
    )


@pytest.fixture
def folder(qwen3_8b, tmp_path) -> Path:
    qwen3_8b.save_pretrained(tmp_path / "Qwen3-8B")
    return tmp_path / "Qwen3-8B"


def composed(arm: str, *overrides: str) -> DictConfig:
    return compose(ROOT / "recipes/qwen3-8b", arm, Path("/runs") / arm, overrides)


def planned(model: PretrainedConfig, arm: str, *overrides: str, gpu: int = H200) -> tuple[Plan, Sizes, DictConfig]:
    config = composed(arm, *overrides)
    return *memory_plan.plan_of(config, model, gpu), config


def bytes_of(plan: Plan, *names: str, phase: str | None = None) -> float:
    """Bytes of the items whose names start so."""
    found = [i for i in plan.items if i.name.startswith(names) and (phase is None or phase in i.phases)]
    assert found, (names, phase)
    return sum(i.nbytes for i in found)


# --- sizes ----------------------------------------------------------------------------------------------------------


def test_qwen3_8b_on_two_gpus_is_what_the_design_says(qwen3_8b):
    """DESIGN section 6, in 10**9 bytes."""
    plan, m, _ = planned(qwen3_8b, "jetrl", f"{GPUS}=2", "actor_rollout_ref.actor.fsdp_config.resident_transposed=true")
    assert m.parameters == 8_190_735_360
    figures = {
        ("FP32 masters / 2",): 16,
        ("Adam moments / 2",): 33,
        ("arena",): 9.4,
        ("transposed",): 7,
        ("FP32 gradients / 2",): 16,
        ("gradients on their way",): 2.5,
    }
    for names, expected in figures.items():
        assert bytes_of(plan, *names) / 1e9 == pytest.approx(expected, rel=0.1), names


def test_stock_gradients_stay_whole_when_their_synchronization_is_deferred(qwen3_8b):
    setting = "actor_rollout_ref.actor.fsdp_config.use_no_sync_for_gradient_accumulation"
    at_once, m, _ = planned(qwen3_8b, "bf16", f"{GPUS}=2", f"{setting}=false")
    deferred, _, _ = planned(qwen3_8b, "bf16", f"{GPUS}=2", f"{setting}=true")
    assert deferred.total(BACKWARD) - at_once.total(BACKWARD) == pytest.approx(2 * m.parameters)
    assert deferred.total(STEP) == at_once.total(STEP)


def test_fp8_gradients_stay_whole_to_the_step_when_they_are_deferred(qwen3_8b):
    setting = "actor_rollout_ref.actor.fsdp_config.use_no_sync_for_gradient_accumulation"
    at_once, deferred = (planned(qwen3_8b, "jetrl", f"{GPUS}=2", f"{setting}={value}")[0] for value in ("false", "true"))
    whole = 2 * bytes_of(at_once, "FP32 gradients / 2")
    assert bytes_of(deferred, "FP32 gradients, whole") == whole
    assert deferred.total(STEP) - at_once.total(STEP) == whole / 2
    assert deferred.total(BACKWARD) - at_once.total(BACKWARD) == whole / 2 - bytes_of(at_once, "gradients on their way")


def test_more_gpus_shard_masters_and_optimizer_but_not_the_arena(qwen3_8b):
    two, four = (planned(qwen3_8b, "jetrl", f"{GPUS}={n}")[0] for n in (2, 4))
    for name in ("FP32 masters", "Adam moments", "FP32 gradients"):
        assert bytes_of(two, name) == 2 * bytes_of(four, name)
    for name in ("arena", "gradients on their way"):
        assert bytes_of(two, name) == bytes_of(four, name)
    halves = planned(qwen3_8b, "jetrl", f"{GPUS}=4", "actor_rollout_ref.actor.fsdp_config.fsdp_size=2")[0]
    assert bytes_of(halves, "FP32 masters / 2") == bytes_of(two, "FP32 masters / 2")


@pytest.mark.parametrize("arm", ["jetrl", "bf16"])
def test_a_group_of_more_gpus_than_there_are_is_one_of_all(qwen3_8b, arm):
    """So verl makes its device mesh."""
    sized = planned(qwen3_8b, arm, f"{GPUS}=2", "actor_rollout_ref.actor.fsdp_config.fsdp_size=8")[0]
    assert sized.items == planned(qwen3_8b, arm, f"{GPUS}=2")[0].items


@pytest.mark.parametrize("arm", ["jetrl", "bf16"])
def test_offloading_frees_the_gpu_for_the_rollout(qwen3_8b, arm):
    stay, m, _ = planned(qwen3_8b, arm, f"{GPUS}=2")
    of = "actor_rollout_ref.actor.fsdp_config"
    offloaded = planned(qwen3_8b, arm, f"{GPUS}=2", f"{of}.param_offload=true", f"{of}.optimizer_offload=true")[0]
    saved = {phase: (stay.total(phase) - offloaded.total(phase)) / (m.parameters / 2) for phase in PHASES}
    expected = {START: 4, UPDATE: 12, ROLLOUT: 12, LOG_PROBS: 8, BACKWARD: 0, STEP: 0}
    assert saved == pytest.approx(expected), "bytes per parameter of a rank"


def test_tied_head_is_counted_once():
    tied, untied = (memory_plan.sizes_of(config_of("llama", tie_word_embeddings=t)) for t in (True, False))
    assert untied.parameters - tied.parameters == tied.V * tied.H


def test_reference_policy(qwen3_8b):
    kl = "actor_rollout_ref.actor.use_kl_loss=true"
    without, with_kl = (planned(qwen3_8b, "jetrl", *o)[0] for o in ((), (kl,)))
    more = with_kl.total(START) - without.total(START)
    assert more == pytest.approx(bytes_of(with_kl, "arena")), "its masters are on the CPU"
    stock = [planned(qwen3_8b, "bf16", *o)[0] for o in ((), (kl,))]
    assert stock[0].total(START) == stock[1].total(START), "FSDP2 keeps it on the CPU"


# --- the engine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ["jetrl", "bf16", "bf16-train-fp8-rollout"])
def test_engine_takes_its_share_of_the_whole_gpu(qwen3_8b, arm):
    plan, _, _ = planned(qwen3_8b, arm, f"{UTILIZATION}=0.5")
    arena = bytes_of(plan, "arena", phase=ROLLOUT) if arm == "jetrl" else 0  # the rollout's weights, in the trainer's process
    assert plan.total(ROLLOUT, "vLLM") + arena == pytest.approx(0.5 * H200 + memory_plan.CONTEXT)


def test_engine_weights(qwen3_8b):
    weights = [bytes_of(planned(qwen3_8b, arm)[0], "weights") / 1e9 for arm in ("jetrl", "bf16-train-fp8-rollout", "bf16")]
    assert weights[0] == 0, "they are the trainer's arena"
    assert weights[1:] == pytest.approx([9.4, 16.4], rel=0.02)


def test_sharded_weights_are_freed_for_the_training(qwen3_8b):
    """The trainer keeps its own rows and two layers; the engine's own FP8 weights are there while it is awake, and the KV cache
    is smaller by what both hold: a rollout takes no more of the GPU than in the other arms."""
    of = (f"{GPUS}=4", "actor_rollout_ref.actor.fsdp_config.arena")
    whole, m, _ = planned(qwen3_8b, "jetrl", of[0], f"{of[1]}=replicated")
    sharded = planned(qwen3_8b, "jetrl", of[0], f"{of[1]}=sharded")[0]
    saved = {phase: (whole.total(phase) - sharded.total(phase)) / m.fp8_bytes for phase in PHASES}
    kept = 1 / 4 + 2 / 36
    awake = {START: 0, UPDATE: -kept, ROLLOUT: 0}
    assert saved == pytest.approx(dict.fromkeys(PHASES, 1 - kept) | awake, abs=1e-9)
    assert whole.kv - sharded.kv == pytest.approx(kept * m.fp8_bytes)
    assert bytes_of(sharded, "FP8 weights; the rest", phase=ROLLOUT) == m.fp8_bytes


def test_kv_cache(qwen3_8b):
    plan, _, _ = planned(qwen3_8b, "jetrl")
    assert plan.kv_token == 36 * 2 * 8 * 128 * 2
    assert plan.sequences == pytest.approx(plan.kv / (147456 * 9216))
    fp8, _, _ = planned(qwen3_8b, "jetrl", "+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype=fp8")
    assert fp8.kv_token == plan.kv_token / 2


@pytest.mark.parametrize("setting", ["free_cache_engine=false", "enable_sleep_mode=false"])
def test_without_sleep_the_kv_cache_stays(qwen3_8b, setting):
    asleep, awake = (planned(qwen3_8b, "bf16", *o)[0] for o in ((), (f"++actor_rollout_ref.rollout.{setting}",)))
    assert asleep.total(BACKWARD, "vLLM") < 2 * GIB
    assert awake.total(BACKWARD, "vLLM") == awake.total(ROLLOUT, "vLLM")


# --- activations: what the layers really save -----------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    """Saves what FlashAttention saves: q, k, v, out, log-sum-exp."""

    @staticmethod
    def forward(ctx, q, k, v):
        out = torch.zeros(q.shape, dtype=torch.bfloat16)
        ctx.save_for_backward(q, k, v, out, torch.zeros(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx, d_out):
        return tuple(torch.zeros_like(t) for t in ctx.saved_tensors[:3])


def _attend(module, q, k, v, mask, **_):
    return _Attention.apply(q, k, v).transpose(1, 2), None


@pytest.fixture
def mesh(tmp_path) -> DeviceMesh:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


SHAPE = dict(hidden_size=256, intermediate_size=640, num_attention_heads=4, num_key_value_heads=2, head_dim=64)


@pytest.mark.parametrize("name", ["qwen3", "llama"])
@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
def test_saved_activations_are_those_of_the_layers(name, fp8, mesh):
    AttentionInterface.register("memory_plan_test", _attend)
    tokens = torch.arange(512)[None] % 384
    bytes_saved = []
    for layers in (1, 3):
        changes = SHAPE | dict(num_hidden_layers=layers, max_position_embeddings=1024)
        model = make(name, torch.float32 if fp8 else torch.bfloat16, "memory_plan_test", **changes)
        held = [trainer_of(model, mesh).arena.data] if fp8 else [*model.parameters(), *model.buffers()]
        weights = {t.untyped_storage().data_ptr() for t in held}
        storages: dict[int, Tensor] = {}

        def pack(t: Tensor, storages=storages) -> Tensor:
            storages[t.untyped_storage().data_ptr()] = t
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            logits = model(tokens, use_cache=False).logits
        sizes = [t.untyped_storage().nbytes() for pointer, t in storages.items() if pointer not in weights]
        bytes_saved.append(sum(s for s in sizes if s > 4096))  # not: ids, masks, scalars
        del logits
    m = memory_plan.sizes_of(config_of(name, **SHAPE))
    planned = sum(memory_plan.saved_by_layer(m, fp8).values())
    assert (bytes_saved[1] - bytes_saved[0]) / 2 / tokens.numel() == pytest.approx(planned, rel=0.05)


def test_checkpointing_and_fewer_tokens_save_activations(qwen3_8b):
    for arm in ("jetrl", "bf16"):
        kept, again = (planned(qwen3_8b, arm, f"{CHECKPOINTING}={c}")[0] for c in ("false", "true"))
        assert kept.total(BACKWARD) > again.total(BACKWARD) + 50 * GIB
    fewer, _, _ = planned(qwen3_8b, "bf16", f"{TOKENS}=10240")
    for phase in (LOG_PROBS, BACKWARD):
        name = "logits, log-softmax"
        assert bytes_of(fewer, name, phase=phase) == bytes_of(again, name, phase=phase) / 2
    small = "actor_rollout_ref.actor.ppo_mini_batch_size=1", "data.max_response_length=1024"
    stock, _, _ = planned(qwen3_8b, "bf16", *small)
    assert bytes_of(stock, "logits", phase=BACKWARD) == 2048 * 16 * 151936, "a GPU has one sequence of a mini-batch"
    jetrl, _, _ = planned(qwen3_8b, "jetrl", *small)
    assert bytes_of(jetrl, "logits", phase=BACKWARD) == 1664 * 10 * 151936, "the FP8 engine never holds more at a time"


def test_fixed_micro_batches(qwen3_8b):
    plan, _, _ = planned(
        qwen3_8b,
        "bf16",
        "actor_rollout_ref.actor.use_dynamic_bsz=false",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    )
    assert bytes_of(plan, "logits", phase=BACKWARD) == 2 * 9216 * 16 * 151936
    assert bytes_of(plan, "logits", phase=LOG_PROBS) == 4 * 9216 * 10 * 151936


# --- what does not fit ----------------------------------------------------------------------------------------------

TIGHT = {
    "one-gpu": ("jetrl", [f"{GPUS}=1"], 140.4),
    "kv": ("jetrl", [f"{GPUS}=2"], 100),
    "eight": ("jetrl", [], 40),
    "sharded": ("jetrl", [f"{GPUS}=4"], 36),
    "no-checkpointing": ("bf16", [f"{CHECKPOINTING}=false"], 79.6),
    "no-sleep": ("bf16", ["actor_rollout_ref.rollout.free_cache_engine=false"], 140.4),
    "deferred": ("bf16", [f"{GPUS}=2", "actor_rollout_ref.actor.fsdp_config.use_no_sync_for_gradient_accumulation=true"], 100),
    "little-kv": ("bf16", [f"{UTILIZATION}=0.12"], 140.4),
    "vllm-start": ("bf16", [f"{UTILIZATION}=0.98"], 140.4),
    "fixed": (
        "bf16",
        [
            "actor_rollout_ref.actor.use_dynamic_bsz=false",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
        ],
        140.4,
    ),
}


@pytest.mark.parametrize(("arm", "overrides", "gib"), TIGHT.values(), ids=TIGHT)
def test_named_settings_make_it_fit(qwen3_8b, arm, overrides, gib):
    gpu = int(gib * GIB)
    plan, m, config = planned(qwen3_8b, arm, *overrides, gpu=gpu)
    assert not plan.fits
    text = memory_plan.why_not(plan, m, config)
    fixes = memory_plan.remedy(m, config, gpu)
    assert fixes and all(f"{key}={str(value).lower()}" in text for key, value in fixes.items())
    args = [f"++{key}={value}" for key, value in fixes.items()]
    assert planned(qwen3_8b, arm, *overrides, *args, gpu=gpu)[0].fits
    for left_out in args:  # nothing is asked for that is not needed
        fewer = [arg for arg in args if arg != left_out]
        assert not planned(qwen3_8b, arm, *overrides, *fewer, gpu=gpu)[0].fits, left_out


def test_sharded_weights_are_proposed_where_their_rows_divide(qwen3_8b):
    def remedy(model: PretrainedConfig, *overrides: str) -> dict:
        return memory_plan.remedy(*planned(model, "jetrl", f"{GPUS}=8", *overrides, gpu=40 * GIB)[1:], 40 * GIB)

    arena = "actor_rollout_ref.actor.fsdp_config.arena"
    assert remedy(qwen3_8b)[arena] == "sharded"
    kept = "actor_rollout_ref.actor.fsdp_config.resident_transposed"
    assert remedy(qwen3_8b, f"{kept}=true") == remedy(qwen3_8b) | {kept: False}, "or the proposal would be refused"
    odd = AutoConfig.for_model(**(qwen3_8b.to_dict() | {"intermediate_size": 12288 + 128}))
    assert arena not in remedy(odd)


def test_messages(qwen3_8b):
    text = memory_plan.why_not(*planned(qwen3_8b, "bf16", f"{UTILIZATION}=0.98"))
    assert "vLLM refuses to start" in text and "start needs" in text and f"{UTILIZATION}=0.9" in text
    text = memory_plan.why_not(*planned(qwen3_8b, "bf16", f"{UTILIZATION}=0.12"))
    assert "holds no sequence of 9216 tokens" in text
    plan, m, config = planned(qwen3_8b, "jetrl", gpu=20 * GIB)
    assert memory_plan.remedy(m, config, plan.gpu) is None
    assert "no setting known here" in memory_plan.why_not(plan, m, config)
    assert memory_plan.why_not(*planned(qwen3_8b, "bf16")) == ""


@pytest.mark.parametrize(
    ("recipe", "arm"),
    [(r, a) for r in ("tiny", "smollm2-135m") for a in ("jetrl", "bf16")] + [("tiny", "bf16-train-fp8-rollout")],
)
def test_small_recipes_fit_on_one_h100(recipe, arm):
    model = AutoConfig.for_model(
        "llama",
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    plan, _ = memory_plan.plan_of(compose(ROOT / "recipes" / recipe, arm, Path("/runs") / arm), model, int(79.6 * GIB))
    assert plan.fits, plan.table()


# --- where it is shown ----------------------------------------------------------------------------------------------


@pytest.fixture
def gpu_here(monkeypatch):
    class Device:
        total_memory = H200

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))


def test_preflight_refuses_what_does_not_fit(qwen3_8b, folder, gpu_here, monkeypatch):
    overrides = [f"actor_rollout_ref.model.path={folder}", f"{GPUS}=1"]
    found = [p for p in preflight.problems(composed("jetrl", *overrides)) if "does not fit" in p]
    assert len(found) == 1 and f"{GPUS}=2" in found[0]
    assert not any("does not fit" in p for p in preflight.problems(composed("jetrl", overrides[0])))
    monkeypatch.setenv(memory_plan.ENV, "warn")
    assert not any("does not fit" in p for p in preflight.problems(composed("jetrl", *overrides)))


def test_check_prints_the_plan_of_every_arm(folder, gpu_here, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(run, "check", lambda recipe, configs: [])
    args = [str(ROOT / "recipes/qwen3-8b"), "--check", "--runs", str(tmp_path), f"actor_rollout_ref.model.path={folder}"]
    assert run.main(args) == 0
    out = capsys.readouterr().out
    assert [out.count(f"Memory plan of {arm} on 8 GPUs") for arm in run.MAIN_ARMS] == [1, 1, 1]
    assert out.endswith("can run\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU says")
def test_without_a_gpu_there_is_no_plan(qwen3_8b, folder, monkeypatch):
    config = composed("jetrl", f"actor_rollout_ref.model.path={folder}", f"{GPUS}=1")
    assert memory_plan.describe(config) == "" and memory_plan.problems(config, qwen3_8b) == []
    config.trainer.device = "cpu"
    assert memory_plan.plan_of(config, qwen3_8b, H200) is None


def test_what_it_cannot_count_has_no_plan(qwen3_8b):
    for override in (
        "actor_rollout_ref.model.lora_rank=8",
        "critic.enable=true",
        "actor_rollout_ref.actor.fsdp_config.offload_policy=true",
    ):
        assert memory_plan.plan_of(composed("bf16", override), qwen3_8b, H200) is None, override
    assert memory_plan.plan_of(composed("bf16"), AutoConfig.for_model("gemma2"), H200) is None
    assert memory_plan.plan_of(composed("bf16"), None, H200) is None


def test_command_line(folder, capsys):
    recipe = str(ROOT / "recipes/qwen3-8b")
    assert memory_plan.main([recipe, "--arm", "bf16", "--gpu-gb", "141", f"actor_rollout_ref.model.path={folder}"]) == 0
    out = capsys.readouterr().out
    assert all(phase in out for phase in PHASES) and "KV cache:" in out and "fit" not in out
    assert memory_plan.main([recipe, "--gpu-gb", "141"]) == 2, "the model's folder is missing"
    assert "actor_rollout_ref.model.path=Qwen3-8B-Base: no such folder" in capsys.readouterr().err
    assert memory_plan.main([recipe, "--arm", "none", "--gpu-gb", "141"]) == 2
    assert "no arm 'none'" in capsys.readouterr().err
