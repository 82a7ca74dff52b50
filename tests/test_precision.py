"""The precision flow's own rules, and what is refused before a run starts: each with the setting's name."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
import yaml
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedTokenizerFast

from verl.jetrl import checkpoints, patching, preflight, run
from verl.jetrl.compose import RecipeError, arms, compose, resolved_yaml
from verl.jetrl.precision import LINEAR_MODULES, JetRLEngineConfig, PrecisionFlow
from verl.jetrl.weight_files import HEAD
from verl.jetrl.weights import EMBEDDING

FP8 = "actor_rollout_ref.actor.fsdp_config.precision_flow.linear=fp8"
STOCK = "actor_rollout_ref.rollout.quantization=fp8"
TOKENS = 300
ROOT = Path(__file__).resolve().parent.parent


def make_checkpoint(folder: Path, model_type: str = "qwen3", vocab_size: int = 320, shard: str = "1GB", **changes: Any) -> Path:
    """A checkpoint of a few thousand weights with a tokenizer of 300 tokens."""
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    config = AutoConfig.for_model(model_type, vocab_size=vocab_size, max_position_embeddings=256, **{**sizes, **changes})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size=shard)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(TOKENS)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", eos_token="w1", pad_token="w2").save_pretrained(folder)
    return folder


def make_data(folder: Path, rows: int = 64, column: str = "prompt") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train", "validation"):
        infos = pyarrow.array([{"index": row} for row in range(rows)], pyarrow.struct([("index", pyarrow.int64())]))
        pyarrow.parquet.write_table(pyarrow.table({column: ["1+1"] * rows, "extra_info": infos}), folder / f"{name}.parquet")


@functools.cache
def composed(arm: str) -> DictConfig:
    return compose(ROOT / "recipes/tiny", arm, Path("/runs") / arm)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def setting(checkpoint: Path, tmp_path: Path):
    """A runnable setting of recipes/tiny: function of arm and overrides that gives its configuration."""
    model = shutil.copytree(checkpoint, tmp_path / "model")
    make_data(tmp_path / "runs" / "data")

    def config(arm: str, *overrides: str) -> DictConfig:
        config = composed(arm).copy()
        paths = {
            "actor_rollout_ref.model.path": str(model),
            "jetrl.data_dir": str(tmp_path / "runs" / "data"),
            "jetrl.run_dir": str(tmp_path / "runs" / arm),
            "trainer.default_local_dir": str(tmp_path / "runs" / arm / "checkpoints"),
        }
        changes = {key: yaml.safe_load(value) for key, _, value in (o.partition("=") for o in overrides)}
        for key, value in {**paths, **changes}.items():
            OmegaConf.update(config, key, value)
        return config

    config.model, config.data = model, tmp_path / "runs" / "data"
    return config


# --- PrecisionFlow --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"linear": "fp4"}, "precision_flow.linear is 'fp4'"),
        ({"linear": None}, "precision_flow.linear is None"),
        ({"linear": "FP8"}, "precision_flow.linear is 'FP8'"),
        ({"linear": "fp8", "modules": ["q_proj", "lm_head"]}, "unknown layers ['lm_head']"),
        ({"linear": "fp8", "modules": "q_proj"}, "must be a list"),
        ({"linear": "fp8", "modules": None}, "must be a list"),
        ({"linear": "fp8", "modules": [1, "q_proj"]}, "unknown layers ['1']"),
        ({"linear": "fp8", "modules": []}, "no layer would run in FP8"),
        ({"linear": "fp8", "modules": ["q_proj", "k_proj", "v_proj"]}, "lacks down_proj, gate_proj, o_proj, up_proj:"),
        ({"linear": "fp8", "modules": [m for m in LINEAR_MODULES if m != "o_proj"]}, "lacks o_proj: the decoder that trainer"),
        ({"linear": "fp8", "modules": ["o_proj", "o_proj"]}, "names a layer twice"),
        ({"exact": True}, "precision_flow.exact=true needs precision_flow.linear=fp8"),
    ],
)
def test_flow_refuses(values, message):
    with pytest.raises(ValueError) as error:
        PrecisionFlow(**values)
    assert message in str(error.value)


def test_flow_names_all_linears_of_the_decoder():
    PrecisionFlow(linear="fp8", modules=LINEAR_MODULES[::-1])  # in any order
    PrecisionFlow(linear="bf16", modules=["down_proj"])  # says nothing in BF16


def test_flow_cannot_change_after_it_was_checked():
    flow = PrecisionFlow(linear="fp8")
    with pytest.raises(AttributeError):
        flow.linear = "bf16"


def test_sequence_parallel_fp8_is_refused():
    with pytest.raises(ValueError, match="ulysses_sequence_parallel_size=2 with .* set it to 1"):
        JetRLEngineConfig(strategy="fsdp2", ulysses_sequence_parallel_size=2, precision_flow=PrecisionFlow(linear="fp8"))
    JetRLEngineConfig(strategy="fsdp2", ulysses_sequence_parallel_size=2)  # the same in BF16 is verl's affair


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(arena="half"), "set it to replicated or sharded"),
        (dict(arena="sharded", resident_transposed=True), "resident_transposed=true .* set it to false"),
    ],
)
def test_sharded_weights_are_refused_with_a_whole_copy(values, message):
    with pytest.raises(ValueError, match=message):
        JetRLEngineConfig(**values)


def test_fp8_under_fsdps_own_offloading_is_refused():
    with pytest.raises(ValueError, match="offload_policy=True .* param_offload=true moves them; set it to false"):
        JetRLEngineConfig(strategy="fsdp2", offload_policy=True, precision_flow=PrecisionFlow(linear="fp8"))
    JetRLEngineConfig(strategy="fsdp2", offload_policy=True)


# --- preflight ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ["bf16", "bf16-train-fp8-rollout", "bf16-train-fp8-rollout-tis", "jetrl"])
def test_a_sound_configuration_has_no_problems(setting, arm):
    if "fp8-rollout" in arm:
        assert "hidden_size=32" in preflight.problems(setting(arm))[0]
        heads = dict(num_attention_heads=2, num_key_value_heads=2, head_dim=64)
        make_checkpoint(setting.model, hidden_size=128, intermediate_size=256, **heads)
    assert preflight.problems(setting(arm)) == []


BAD = [
    ("bf16", [STOCK], "jetrl.mixed_precision=true"),
    ("jetrl", [STOCK], "remove rollout.quantization"),
    ("bf16", ["jetrl.mixed_precision=true"], "jetrl.mixed_precision=true needs BF16 training"),
    ("jetrl", ["jetrl.mixed_precision=true"], "jetrl.mixed_precision=true needs BF16 training"),
    ("bf16-train-fp8-rollout", ["actor_rollout_ref.rollout.quantization=torchao"], "rollout.quantization=fp8"),
    ("jetrl", ["actor_rollout_ref.model.lora_rank=8"], "actor_rollout_ref.model.lora_rank=0"),
    ("bf16-train-fp8-rollout", ["actor_rollout_ref.model.lora_rank=8"], "actor_rollout_ref.model.lora_rank=0"),
    ("jetrl", ["actor_rollout_ref.actor.strategy=fsdp"], "actor_rollout_ref.actor.strategy=fsdp:"),
    ("bf16", ["actor_rollout_ref.actor.strategy=fsdp"], "actor_rollout_ref.actor.strategy=fsdp:"),
    ("jetrl", ["actor_rollout_ref.rollout.tensor_model_parallel_size=2"], "tensor_model_parallel_size=2"),
    ("bf16", ["actor_rollout_ref.rollout.tensor_model_parallel_size=2"], "tensor_model_parallel_size=2"),
    ("jetrl", ["actor_rollout_ref.rollout.name=sglang"], "actor_rollout_ref.rollout.name=sglang"),
    ("jetrl", ["actor_rollout_ref.model.use_fused_kernels=true"], "actor_rollout_ref.model.use_fused_kernels=true"),
    ("bf16", ["actor_rollout_ref.actor.checkpoint.async_save=true"], "actor_rollout_ref.actor.checkpoint.async_save=true"),
    ("bf16", ["trainer.use_v1=false"], "trainer.use_v1=false: the fork runs with use_v1=true only; set it to that"),
    ("bf16", ["trainer.v1.trainer_mode=separate_async"], "trainer.v1.trainer_mode=separate_async"),
    ("bf16", ["trainer.v1.trainer_mode=colocate_async"], "trainer.v1.trainer_mode=colocate_async"),
    ("jetrl", ["algorithm.rollout_correction.bypass_mode=true"], "rollout_correction.bypass_mode=true: the fork runs with"),
    ("bf16", ["algorithm.filter_groups.enable=true"], "algorithm.filter_groups.enable=true: the fork runs with enable=false"),
    ("bf16", ["trainer.v1.sampler.sync_refill_failed_groups=true"], "sync_refill_failed_groups=true: the fork runs with"),
    ("jetrl", ["actor_rollout_ref.rollout.agent.agent_loop_manager_class=null"], "class=null: it must name a subclass of"),
    (
        "jetrl",
        ["actor_rollout_ref.rollout.agent.agent_loop_manager_class=verl.trainer.ppo.v1.agent_loop_tq.AgentLoopManagerTQ"],
        "AgentLoopManagerTQ: it must name a subclass of verl.jetrl.rollout.agent_loop.SeededAgentLoopManager",
    ),
    ("jetrl", ["actor_rollout_ref.rollout.agent.agent_loop_manager_class=no.such.Manager"], "no.such.Manager: it must name"),
    ("jetrl", [f"{FP8[:-3]}fp4"], "precision_flow.linear is 'fp4'"),
    ("jetrl", ["actor_rollout_ref.actor.fsdp_config.precision_flow.modules=[]"], "no layer would run in FP8"),
    (
        "jetrl",
        ["actor_rollout_ref.actor.fsdp_config.precision_flow.modules=[o_proj]"],
        "precision_flow.modules lacks down_proj",
    ),
    ("bf16", ["actor_rollout_ref.actor.fsdp_config.precision_flow.exact=true"], "precision_flow.exact=true needs"),
    ("jetrl-exact", ["actor_rollout_ref.rollout.top_p=0.9"], "rollout.top_p=0.9 with precision_flow.exact=true"),
    ("jetrl-exact", ["actor_rollout_ref.rollout.top_k=50"], "rollout.top_k=50 with precision_flow.exact=true"),
    (
        "jetrl-exact",
        ["actor_rollout_ref.rollout.logprobs_mode=raw_logprobs", "actor_rollout_ref.rollout.temperature=0.7"],
        "logprobs_mode=raw_logprobs with precision_flow.exact=true",
    ),
    ("jetrl", ["actor_rollout_ref.model.use_remove_padding=false"], "model.use_remove_padding=False with"),
    ("jetrl", ["actor_rollout_ref.model.enable_activation_offload=true"], "model.enable_activation_offload=True with"),
    ("jetrl", ["actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"], "actor.ulysses_sequence_parallel_size=2 with"),
    ("jetrl", ["actor_rollout_ref.actor.fsdp_config.offload_policy=true"], "param_offload=true moves them; set it to false"),
    ("jetrl", ["actor_rollout_ref.actor.fsdp_config.model_dtype=bf16"], "the masters are FP32; set it to fp32"),
    ("jetrl", ["actor_rollout_ref.actor.pad_to_length=true"], "actor.pad_to_length=True with"),
    (
        "jetrl",
        ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.ref.fsdp_config.offload_policy=true"],
        "actor_rollout_ref.ref.fsdp_config.offload_policy=True with",
    ),
    ("jetrl", ["actor_rollout_ref.actor.fsdp_config.arena=half"], "set it to replicated or sharded"),
    (
        "jetrl",
        ["actor_rollout_ref.actor.fsdp_config.arena=sharded", "trainer.n_gpus_per_node=2"],
        "arena=sharded: 2 ranks cannot each have whole blocks of 128 rows of every FP8 weight (k_proj has 128 rows",
    ),
    (
        "jetrl",
        [
            "actor_rollout_ref.actor.fsdp_config.arena=sharded",
            "actor_rollout_ref.actor.fsdp_config.resident_transposed=true",
        ],
        "resident_transposed=true with arena=sharded",
    ),
    ("bf16", ["data.train_batch_size=30"], "data.train_batch_size=30 is not a multiple"),
    ("bf16", ["data.gen_batch_size=12"], "data.gen_batch_size=12 does not divide data.train_batch_size=16"),
    ("bf16", ["data.gen_batch_size=32"], "data.gen_batch_size=32 does not divide data.train_batch_size=16"),
    ("bf16", ["data.gen_batch_size=-8"], "data.gen_batch_size=-8 does not divide data.train_batch_size=16"),
    ("bf16", ["data.train_batch_size=128"], "data.train_files: 64 prompts, at least 128"),
    ("bf16", ["data.train_files=null"], "data.train_files: 0 prompts"),
    ("bf16", ["data.max_response_length=1000"], "max_position_embeddings 256"),
    ("bf16", ["actor_rollout_ref.rollout.max_model_len=100"], "actor_rollout_ref.rollout.max_model_len=100"),
    ("bf16", ["jetrl.least_gpu_memory_gb=78"], "no CUDA GPU found: this recipe needs 1 Hopper GPUs (H100, H200) of 78 GB"),
    ("bf16", ["trainer.device=cuda"], "no CUDA GPU found: trainer.device=cuda"),
    ("bf16", ["trainer.device=foo"], "trainer.device=foo: on this machine it is cpu; leave it out"),
    ("bf16", ["trainer.device=null"], "trainer.device=null: on this machine it is cpu; leave it out"),
    ("bf16", ["trainer.nnodes=2"], "trainer.nnodes=2: the run would start Ray on this machine alone"),
    ("bf16", ["actor_rollout_ref.rollout.enable_chunked_prefill=true"], "enable_chunked_prefill=true does not work"),
    ("bf16", ["trainer.max_actor_ckpt_to_keep=1"], "trainer.max_actor_ckpt_to_keep=1"),
    # values of the wrong type
    ("bf16", ["data.train_batch_size=many"], "data.train_batch_size=many: it must be a whole number, 1 or more"),
    ("bf16", ["data.max_prompt_length=null"], "data.max_prompt_length=null: it must be a whole number"),
    ("bf16", ["actor_rollout_ref.model.path=null"], "actor_rollout_ref.model.path: cannot be checked"),
    ("jetrl", ["trainer.save_freq=often"], "trainer.default_local_dir: cannot be checked"),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU says")
@pytest.mark.parametrize(("arm", "overrides", "message"), BAD, ids=[f"{a}-{o[0].split('.')[-1]}" for a, o, _ in BAD])
def test_a_bad_setting_is_named(setting, arm, overrides, message):
    found = preflight.problems(setting(arm, *overrides))
    assert any(message in problem for problem in found), found


A = "actor_rollout_ref"
NO_RUN = [  # values with which a run hangs, learns nothing, or dies late
    (f"{A}.rollout.n=0", "whole number"),
    (f"{A}.rollout.n=2.5", "whole number"),
    (f"{A}.rollout.temperature=0", "above 0"),
    (f"{A}.rollout.temperature=-1", "above 0"),
    (f"{A}.rollout.top_p=2", "at most 1"),
    (f"{A}.rollout.gpu_memory_utilization=2", "at most 1"),
    (f"{A}.rollout.agent.num_workers=0", "whole number"),
    (f"{A}.rollout.log_prob_max_token_len_per_gpu=10", "= 112 tokens"),
    (f"{A}.actor.ppo_mini_batch_size=-8", "whole number"),
    (f"{A}.actor.ppo_max_token_len_per_gpu=20", "= 112 tokens"),
    (f"{A}.actor.optim.lr=-1", "0 or more"),
    (f"{A}.actor.optim.lr=.nan", "0 or more"),
    ("trainer.total_training_steps=0", "whole number"),
    ("trainer.total_training_steps=null", "whole number"),
    ("trainer.total_epochs=0", "whole number"),
    ("trainer.n_gpus_per_node=0", "whole number"),
    ("trainer.logger=[console]", "add file"),
    ("jetrl.verify_weights_every=-1", "0 or more"),
    ("trainer.default_local_dir=/elsewhere", "--runs"),
    ("trainer.resume_mode=foo", "one of auto, disable, resume_path"),
    ("algorithm.adv_estimator=foo", "one of"),
    (f"{A}.actor.policy_loss.loss_mode=foo", "vanilla_signed"),
    (f"{A}.actor.optim.lr_scheduler_type=foo", "one of constant, cosine"),
    ("reward.custom_reward_function.path=/nowhere.py", "no such file"),
]


@pytest.mark.parametrize(("override", "message"), NO_RUN, ids=[override for override, _ in NO_RUN])
def test_a_value_that_no_run_can_have_is_refused(setting, override, message):
    assert preflight.problems(setting("jetrl")) == []
    found, *same = preflight.problems(setting("jetrl", override))
    assert found.startswith(override.partition("=")[0] + "=") and message in found
    assert all(message in problem for problem in same)  # of a setting that is this one unless it is given


def test_what_verls_own_classes_refuse_is_said_before_the_start(setting):
    for override, message in (
        (f"{A}.actor.loss_agg_mode=foo", "Invalid loss_agg_mode: foo"),
        (f"{A}.actor.use_dynamic_bsz=false", "ppo_micro_batch_size"),
    ):
        found = preflight.problems(setting("jetrl", override))
        assert any(p.startswith(f"{A}.actor: ") and message in p for p in found), found
    (found,) = preflight.problems(setting("jetrl", "trainer.resume_mode=resume_path"))
    assert "trainer.resume_from_path" in found


def test_a_value_of_another_type_is_refused():
    """verl takes any text for true."""
    recipe, flow = ROOT / "recipes/tiny", preflight.FLOW
    wrong = [f"{flow}.exact=maybe", "trainer.balance_batch='false'", "trainer.save_freq=often", f"{A}.rollout.temperature=true"]
    right = [f"{flow}.exact=true", f"{A}.actor.optim.lr=1e-5", f"{A}.rollout.seed=3", f"{A}.actor.entropy_coeff=0.01"]
    default = compose(recipe, "jetrl", Path("/runs/jetrl"))
    found = preflight.wrong_types(compose(recipe, "jetrl", Path("/runs/jetrl"), [*wrong, *right[1:]]), default)
    shown = ("exact=maybe: set it to true", "balance_batch=false: set it to true", "save_freq=often: it must be a number")
    for message in (*shown, "temperature=true: it must be a number, like 1.0"):
        assert any(message in problem for problem in found), (message, found)
    assert all(any(w.partition("=")[0].split(".")[-1] in problem for w in wrong) for problem in found), found
    assert preflight.wrong_types(compose(recipe, "jetrl", Path("/runs/jetrl"), right), default) == []


@pytest.mark.parametrize("place", ("precision_flow", "actor_rollout_ref.actor.precision_flow"))
def test_a_precision_flow_that_nothing_reads_is_named(setting, place):
    """Hydra's ``+`` adds a key anywhere."""
    config = setting("jetrl")
    OmegaConf.update(config, f"{place}.exact", True, force_add=True)
    (found,) = preflight.problems(config)
    assert found.startswith(f"{place}: nothing reads") and found.endswith("actor_rollout_ref.actor.fsdp_config.precision_flow")


def test_verls_old_name_for_one_checkpoint_is_refused(setting):
    """As trainer.max_actor_ckpt_to_keep=1 is."""
    config = setting("bf16")
    OmegaConf.update(config, "trainer.remove_previous_ckpt_in_save", True, force_add=True)
    (found,) = preflight.problems(config)
    assert found.startswith("trainer.remove_previous_ckpt_in_save=true: verl would keep 1 checkpoint")
    config.trainer.save_freq = -1
    assert preflight.problems(config) == []


def test_all_problems_are_listed_at_once(setting, tmp_path):
    shutil.rmtree(setting.data)
    found = preflight.problems(
        setting(
            "jetrl",
            STOCK,
            "actor_rollout_ref.model.path=/nowhere",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
            "actor_rollout_ref.model.lora_rank=4",
            "trainer.v1.trainer_mode=colocate_async",
            "trainer.max_actor_ckpt_to_keep=many",
        )
    )
    parts = ("/nowhere: no such folder", "data.train_files", "data.val_files", "rollout.quantization", "lora_rank=0")
    parts += ("tensor_model_parallel_size=2", "trainer_mode")
    assert [part for part in parts if not any(part in problem for problem in found)] == []


def test_a_check_that_fails_does_not_hide_the_others(setting):
    found = preflight.problems(setting("jetrl", "actor_rollout_ref.model.path=null", "trainer.v1.trainer_mode=colocate_async"))
    assert any("model.path: cannot be checked: TypeError" in problem for problem in found)
    assert any("trainer_mode" in problem for problem in found)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda m: shutil.rmtree(m), "no such folder"),
        (lambda m: (shutil.rmtree(m), m.write_text("")), "it is a file"),
        (lambda m: (m / "config.json").unlink(), "no config.json"),
        (lambda m: (m / "config.json").write_text("{"), "config.json cannot be used"),
        (lambda m: (m / "config.json").write_text('{"model_type": "novel"}'), "config.json cannot be used"),
        (lambda m: (m / "model.safetensors").unlink(), "weights are missing: no *.safetensors"),
        (lambda m: (m / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"), "not downloaded"),
        (lambda m: os.truncate(m / "model.safetensors", 5000), "model.safetensors is damaged"),
        (lambda m: (m / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}'), "gone.saf"),
        (lambda m: (m / "model.safetensors.index.json").write_text("[]"), "index.json is damaged"),
        (lambda m: (m / "tokenizer.json").write_text("{"), "tokenizer cannot be loaded"),
        (lambda m: [(m / name).unlink() for name in ("tokenizer.json", "tokenizer_config.json")], "tokenizer cannot be"),
    ],
)
def test_a_damaged_checkpoint_is_named(setting, damage, message):
    config = setting("jetrl")
    damage(setting.model)
    found = preflight.problems(config)
    assert any(message in problem and str(setting.model) in problem for problem in found), found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": TOKENS - 1}, f"vocab_size {TOKENS - 1} is smaller than the tokenizer's {TOKENS} tokens"),
        ({"model_type": "gemma"}, "supports the model types qwen3, qwen2, llama; this model is 'gemma'"),
        ({"hidden_act": "gelu"}, "does not support hidden_act='gelu'"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "4 attention heads do not divide among 3"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope type 'dynamic' is not supported",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_named(setting, tmp_path, changes, message):
    model = make_checkpoint(tmp_path / "other", **changes)
    found = preflight.problems(setting("jetrl", f"actor_rollout_ref.model.path={model}"))
    assert any(message in problem for problem in found), found
    if "model_type" in changes:
        assert preflight.problems(setting("bf16", f"actor_rollout_ref.model.path={model}")) == [], "BF16 runs any model"


def edit_config(model: Path, **changes) -> None:
    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("shard", ["1GB", "40KB"])
@pytest.mark.parametrize(
    ("made", "changes", "message"),
    [
        ({}, {"hidden_size": 48}, "embed_tokens.weight is (320, 32) in the files, (320, 48) by config.json (and"),
        ({}, {"intermediate_size": 96}, "0.mlp.gate_proj.weight is (64, 32) in the files, (96, 32) by config.json (and"),
        ({}, {"num_hidden_layers": 3}, "2.self_attn.q_proj.weight is absent in the files, (32, 32) by config.json (and"),
        ({}, {"num_hidden_layers": 1}, "1.input_layernorm.weight is (32,) in the files, absent by config.json (and"),
        ({"attention_bias": True}, {"attention_bias": False}, "k_proj.bias is (16,) in the files, absent by config.json (and"),
        ({}, {"tie_word_embeddings": False}, "lm_head.weight is absent in the files, (320, 32) by config.json; take"),
        ({"tie_word_embeddings": False}, {"tie_word_embeddings": True}, "set tie_word_embeddings=false in its config.json"),
    ],
    ids=["width", "part", "layer too few", "layer too many", "bias", "no head", "two heads"],
)
def test_weights_that_are_not_config_jsons_are_named(setting, made, changes, message, shard):
    """transformers would make some anew, or leave some out, and say so in a worker's log."""
    shutil.rmtree(setting.model)
    make_checkpoint(setting.model, "llama", shard=shard, **{"tie_word_embeddings": True, **made})
    assert preflight.problems(setting("jetrl")) == preflight.problems(setting("bf16")) == []
    assert (len(list(setting.model.glob("*.safetensors"))) > 1) == (shard == "40KB")
    edit_config(setting.model, **changes)
    for arm in ("jetrl", "bf16"):
        found = preflight.problems(setting(arm))
        named = [problem for problem in found if message in problem]
        assert len(named) == 1 and named[0].startswith(f"actor_rollout_ref.model.path={setting.model}: "), found


def test_a_tensor_that_the_index_promises_is_missed(setting):
    make_checkpoint(setting.model, shard="40KB")
    (setting.model / "model.safetensors").unlink()
    assert preflight.problems(setting("jetrl")) == []
    file = sorted(setting.model.glob("*.safetensors"))[-1]
    weights = load_file(file)
    name, weight = weights.popitem()
    save_file(weights, file)
    (problem,) = preflight.problems(setting("jetrl"))
    assert f"{name} is absent in the files, {tuple(weight.shape)} by config.json" in problem


def saved_as_bin(model: Path) -> None:
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()


def rewrite(model: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    save_file(change(load_file(model / "model.safetensors")), model / "model.safetensors")


@pytest.mark.parametrize(
    "change",
    [
        saved_as_bin,
        lambda m: AutoModel.from_pretrained(m).save_pretrained(m),  # without the head, and without "model." in the names
        lambda m: rewrite(m, lambda w: w | {HEAD: w[EMBEDDING].clone()}),
        lambda m: rewrite(m, lambda w: {HEAD: w.pop(EMBEDDING), **w}),
        lambda m: rewrite(m, lambda w: w | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}),
        lambda m: rewrite(m, lambda w: w | {"score.weight": torch.ones(1)}),
    ],
    ids=["bin", "base model", "tied head is there", "tied head alone", "of an old file", "another head"],
)
def test_what_transformers_loads_whole_is_no_problem(setting, change):
    make_checkpoint(setting.model, tie_word_embeddings=True)
    change(setting.model)
    _, found = AutoModelForCausalLM.from_pretrained(setting.model, output_loading_info=True)
    assert not found["missing_keys"] and not found["mismatched_keys"], "not one of these cases"
    assert preflight.problems(setting("jetrl")) == []


def test_a_device_that_the_environment_chooses_is_not_overridden(setting, monkeypatch):
    monkeypatch.setenv("JETRL_DEVICE", "gpu")
    found = preflight.problems(setting("bf16", "trainer.device=cpu"))
    assert any(p.startswith("trainer.device=cpu: on this machine it is cuda; leave it out") for p in found), found


def test_several_nodes_need_a_ray_that_spans_them(setting, monkeypatch):
    config = setting("bf16", "trainer.nnodes=2")
    OmegaConf.update(config, "ray_kwargs.ray_init.address", "auto", force_add=True)
    assert not any("nnodes" in problem for problem in preflight.problems(config))
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert not any("nnodes" in problem for problem in preflight.problems(setting("bf16", "trainer.nnodes=2")))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "train.parquet").unlink(), "train.parquet does not exist"),
        (lambda d: (d / "train.parquet").write_bytes(b"PAR1 not really"), "train.parquet is damaged"),
        (lambda d: (d / "train.parquet").write_bytes(b""), "train.parquet is damaged"),
        (lambda d: make_data(d, rows=0), "data.val_files: 0 prompts"),
        (lambda d: make_data(d, column="question"), "has no column 'prompt'"),
    ],
)
def test_damaged_data_is_named(setting, damage, message):
    damage(setting.data)
    found = preflight.problems(setting("bf16"))
    assert any(message in problem for problem in found), found


def test_chunks_of_a_batch_are_no_problem(setting):
    for size in ("null", 16, 8, 1):
        assert preflight.problems(setting("bf16", f"data.gen_batch_size={size}")) == []


@pytest.fixture
def disk_of(monkeypatch):
    """Function that sets the free bytes of every disk."""
    usage = shutil.disk_usage("/")

    def free(nbytes: float) -> None:
        monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: usage._replace(free=nbytes))

    return free


def test_full_disk(setting, disk_of):
    disk_of(4 * 2**30)
    (problem,) = run.check(ROOT / "recipes/tiny", {"bf16": setting("bf16", "jetrl.checkpoint_disk_gb=5")})
    assert "checkpoints need 5.0 GB" in problem and "4.0 GB are free" in problem and "--runs" in problem
    assert preflight.disk([setting("bf16", "jetrl.checkpoint_disk_gb=5", "trainer.save_freq=-1")]) == []
    disk_of(0)
    assert "checkpoints need" in preflight.disk([setting("bf16")])[0]
    (problem,) = preflight.disk([setting("bf16", "trainer.max_actor_ckpt_to_keep=many")])
    assert problem.startswith("trainer.default_local_dir: cannot be checked")


def one_checkpoint(config: DictConfig) -> int:
    """Bytes of a checkpoint of the configuration's model."""
    model, _ = preflight.folder(Path(config.actor_rollout_ref.model.path))
    return preflight.parameter_count(model) * preflight.BYTES_PER_PARAMETER


def hold(config: DictConfig, step: int, nbytes: int, mark: bool = True) -> None:
    """Makes a checkpoint of so many bytes, half-saved without a mark."""
    folder = Path(config.trainer.default_local_dir)
    actor = folder / f"global_step_{step}" / "actor"
    actor.mkdir(parents=True)
    (actor / "model.pt").touch()
    os.truncate(actor / "model.pt", nbytes)
    if mark:
        checkpoints.mark_complete(folder, step)


def test_the_disk_holds_what_all_arms_keep(setting, disk_of):
    """2 + 3 checkpoints, and one more; an arm that does not save needs none."""
    keep = "trainer.max_actor_ckpt_to_keep"
    configs = {
        "bf16": setting("bf16", f"{keep}=2"),
        "jetrl": setting("jetrl", f"{keep}=null", "trainer.save_freq=-1"),
        "jetrl-exact": setting("jetrl-exact", f"{keep}=3"),
    }
    one = one_checkpoint(configs["bf16"])
    disk_of(6 * one - 1)
    (problem,) = run.check(ROOT / "recipes/tiny", configs)
    assert f"below {Path(configs['bf16'].jetrl.run_dir).parent}, " in problem
    assert [preflight.disk([config]) for config in configs.values()] == [[], [], []], "each fits alone"
    disk_of(6 * one)
    assert run.check(ROOT / "recipes/tiny", configs) == []


def test_what_a_run_holds_is_not_needed_again(setting, disk_of):
    config = setting("bf16", "trainer.max_actor_ckpt_to_keep=2")
    one = one_checkpoint(config)

    def least() -> float:
        """Fewest free checkpoints with which the run starts, in halves."""
        for halves in range(-1, 10):
            disk_of(halves * one / 2 + 100)  # a mark is a few bytes
            if not preflight.disk([config]):
                return halves / 2
        raise AssertionError("it never starts")

    assert least() == 3
    hold(config, 4, one)
    assert least() == 2
    hold(config, 6, one // 2, mark=False)  # goes before the start
    assert least() == 1.5
    for step in (8, 12):
        hold(config, step, one)
    assert least() == 0.5, "no more than two count"
    checkpoints.repair(Path(config.trainer.default_local_dir))
    assert least() == 1
    config.trainer.max_actor_ckpt_to_keep = None
    assert least() == 1, "without a limit a run needs one more each time"


def test_an_arms_leftovers_are_no_room_for_the_arms_before_it(setting, disk_of):
    first, second = setting("bf16"), setting("jetrl")
    one = one_checkpoint(first)
    hold(second, 3, 10 * one, mark=False)
    disk_of(one)
    assert preflight.disk([first, second]) != []
    assert preflight.disk([second, first]) == []


def test_a_run_goes_on_from_whole_checkpoints_only(setting, tmp_path):
    """Of the fork's: verl alone leaves no marks to tell by."""
    other = setting("jetrl")
    other.trainer.default_local_dir = str(tmp_path / "runs/other/checkpoints")
    made = Path(other.trainer.default_local_dir)
    hold(other, 4, 1)
    hold(other, 8, 1, mark=False)
    hold(other, 12, 1)
    shutil.rmtree(made / "global_step_12/actor")

    def found(step: int | str) -> list[str]:
        mode = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={made}/global_step_{step}")
        return preflight.problems(setting("bf16", *mode))

    assert found(4) == []
    for step, why in ((8, "its save was interrupted"), (12, "its folder actor was removed")):
        (problem,) = found(step)
        assert problem.startswith("trainer.resume_from_path=") and why in problem and "name another" in problem
    assert "is no folder global_step_N" in found(16)[0]
    assert "is no folder global_step_N" in found("4/")[0], "verl would look for a step '4/'"
    for step in (4, 12):
        (made / f"global_step_{step}" / checkpoints.MARK).unlink()
    assert found(8) == []
    (made.parent / "status.json").write_text("{}")
    assert "its save was interrupted" in found(8)[0], "the first save of a run"


def test_a_run_folder_that_cannot_be_written(setting, monkeypatch, tmp_path):
    monkeypatch.setattr(preflight.os, "access", lambda path, mode: False)  # as root, permissions alone do not show
    assert any("is not a folder that can be written to" in p for p in preflight.problems(setting("bf16")))
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    places = (f"jetrl.run_dir={tmp_path}/file", f"trainer.default_local_dir={tmp_path}/file/checkpoints")
    found = preflight.problems(setting("bf16", *places))
    assert any("trainer.default_local_dir" in problem and "written" in problem for problem in found), found


def test_parameter_count_is_the_models(tmp_path):
    for tied in (True, False):
        config = AutoConfig.for_model("qwen3", vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
        config.update(dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=tied))
        model = AutoModelForCausalLM.from_config(config)
        matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
        assert preflight.parameter_count(config) == matrices


def test_upstream_of_another_version_is_a_problem(setting, monkeypatch):
    monkeypatch.setattr(patching, "version", lambda package: "0.8.0")
    found = preflight.problems(setting("bf16"))
    assert any("verl 0.8.0 is installed" in problem and "0.9.1" in problem for problem in found)


# --- recipes and overrides --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["two words", "größe", "a=b,c", "it's", 'q"r', "a${b}", "x#y%20", "{q}[z](w)", "end\\"])
def test_recipes_and_runs_in_folders_of_any_name(root, tmp_path, name):
    recipe, run = tmp_path / name, tmp_path / f"runs {name}" / "jetrl"
    recipe.mkdir()
    for file in (root / "recipes/tiny").glob("*.yaml"):
        shutil.copy(file, recipe)
    config = compose(recipe, "jetrl", run)
    assert config.jetrl.recipe_dir == str(recipe) and config.trainer.project_name == name
    assert config.trainer.default_local_dir == str(run / "checkpoints")
    assert config.data.train_files == str(run.parent / "data/train.parquet")


@pytest.mark.parametrize(
    "override",
    ["trainer.total_trainin_steps=3", "trainer.x", "=", "a=1,2", "@", "~trainer.foo", "trainer=3", "data.seed=${nope}", "+m=("],
)
def test_an_override_that_does_not_fit_is_one_error(root, tmp_path, override):
    with pytest.raises(RecipeError, match="recipe 'tiny', arm 'bf16'"):
        compose(root / "recipes/tiny", "bf16", tmp_path / "bf16", [override])


def test_an_override_below_a_setting_that_follows_another(root, tmp_path):
    place = f"{A}.ref.fsdp_config.precision_flow"
    with pytest.raises(RecipeError, match=rf"{place} follows \$\{{.*actor.*\}}: set that, or .*'{place}={{linear: ...}}'"):
        compose(root / "recipes/tiny", "jetrl", tmp_path, [f"{place}.linear=bf16"])
    whole = compose(root / "recipes/tiny", "jetrl", tmp_path, [f"{place}={{linear: bf16}}"])
    assert OmegaConf.select(whole, f"{place}.linear") == "bf16"


def test_an_override_that_hydra_stumbles_over(root, tmp_path):
    for override in ("data=3", "=3"):
        with pytest.raises(RecipeError, match="recipe 'tiny', arm 'jetrl'"):
            compose(root / "recipes/tiny", "jetrl", tmp_path, [override])


@pytest.mark.parametrize(("given", "said"), [(["--arms", ""], "no arm ''"), (["--print-config", ""], "no arm ''")])
def test_an_empty_argument_starts_nothing(root, tmp_path, monkeypatch, given, said, capsys):
    """As a shell gives one for a variable that is not set."""
    monkeypatch.setattr(run, "check", lambda *_: pytest.fail("a run would start"))
    assert run.main([str(root / "recipes/tiny"), "--runs", str(tmp_path), *given]) == 2
    assert said in capsys.readouterr().err


def test_wrong_types_are_refused_before_the_run(root, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "check", lambda *_: pytest.fail("a run would start"))
    command = [str(root / "recipes/tiny"), "--runs", str(tmp_path), "--arms", "bf16, jetrl", "trainer.balance_batch=maybe"]
    assert run.main(command) == 2
    assert capsys.readouterr().err.count("trainer.balance_batch=maybe: set it to true or false") == 1


def test_unknown_recipes_and_arms(root, tmp_path):
    for wrong, meant in (("rollout.temprature", "rollout.temperature"), ("rolout.temperature", "rollout.temperature")):
        with pytest.raises(
            RecipeError, match=rf"no setting actor_rollout_ref.{wrong}; did you mean actor_rollout_ref.{meant}?"
        ):
            compose(root / "recipes/tiny", "bf16", tmp_path, [f"actor_rollout_ref.{wrong}=1"])
    with pytest.raises(RecipeError, match="no arm 'fp9'; it has bf16, bf16-train-fp8-rollout"):
        compose(root / "recipes/tiny", "fp9", tmp_path)
    with pytest.raises(RecipeError, match="is not a recipe: it has no base.yaml"):
        arms(tmp_path)


@pytest.mark.parametrize("text", [b"defaults: [base\n", b"\xff\xfe\x00", b"defaults: [nowhere]\n", b"a: ${b}\n"])
def test_an_arm_that_cannot_be_read_is_one_error(root, tmp_path, text):
    (tmp_path / "base.yaml").write_bytes((root / "recipes/tiny/base.yaml").read_bytes())
    (tmp_path / "odd.yaml").write_bytes(text)
    with pytest.raises(RecipeError, match="arm 'odd'"):
        compose(tmp_path, "odd", tmp_path / "runs" / "odd")


def test_arms_differ_only_in_precision(root, tmp_path):
    """One base, arms of a few lines: what is compared is the precision and nothing else."""
    from verl.jetrl.config_diff import diff

    def changed(recipe: str, arm: str) -> set[str]:
        a, b = (compose(root / "recipes" / recipe, one, tmp_path / one) for one in ("bf16", arm))
        own = ("jetrl.arm", "jetrl.run_dir", "trainer.default_local_dir")
        return {key for key, *_ in diff(a, b) if key not in own and not key.endswith("experiment_name")}

    for recipe in ("tiny", "qwen3-8b"):
        flow = "precision_flow.linear"
        places = ("actor.fsdp_config", "ref.fsdp_config", "rollout.custom")
        assert changed(recipe, "jetrl") == {f"actor_rollout_ref.{place}.{flow}" for place in places}
        mixed = {"jetrl.mixed_precision", "actor_rollout_ref.rollout.quantization"}
        assert changed(recipe, "bf16-train-fp8-rollout") == mixed
        tis = {key for key in changed(recipe, "bf16-train-fp8-rollout-tis") if "rollout_correction" not in key}
        assert tis == mixed


def test_the_printed_configuration_is_whole(root, tmp_path):
    text = resolved_yaml(compose(root / "recipes/tiny", "jetrl", tmp_path / "jetrl"))
    assert "${" not in text and json.dumps(str(root / "recipes/tiny"))[1:-1] in text


@pytest.mark.parametrize(
    ("model", "refused"),
    [
        (dict(hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8, head_dim=128), []),
        (
            dict(hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3),  # SmolLM2-135M
            ["hidden_size=576", "num_attention_heads * head_dim=576", "num_key_value_heads * head_dim=192"],
        ),
    ],
)
def test_models_that_the_stock_fp8_rollout_gets_wrong_are_refused(model, refused):
    from transformers import AutoConfig

    found = "\n".join(preflight.stock_fp8_problems(AutoConfig.for_model("llama", **model)))
    assert bool(found) == bool(refused) and all(part in found for part in refused) and "intermediate_size" not in found


def test_relative_paths_are_refused(setting, tmp_path, monkeypatch):
    """They would be looked for in the run's folder, where its processes work."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").touch()
    found = preflight.problems(
        setting(
            "bf16", "actor_rollout_ref.model.path=model", "data.train_files=[runs/data/train.parquet]",
            "reward.custom_reward_function.path=reward.py",
        )
    )  # fmt: skip
    assert sorted(problem.partition(":")[0] for problem in found) == [
        "actor_rollout_ref.model.path=model", "data.train_files=runs/data/train.parquet",
        "reward.custom_reward_function.path=reward.py",
    ]  # fmt: skip
    assert all(f"give the full path, {tmp_path}" in problem for problem in found)


@pytest.mark.parametrize("info", [None, "split", 1], ids=["no column", "no index", "no struct"])
def test_prompts_without_an_index_are_refused(setting, tmp_path, info):
    """All requests of a step would sample with the same seeds."""
    config, rows = setting("bf16"), {"prompt": ["1+1"] * 64}
    if info is not None:
        rows["extra_info"] = [{info: "x"} if isinstance(info, str) else info] * 64
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "runs" / "data" / "train.parquet")
    (problem,) = preflight.problems(config)
    assert "train.parquet has no extra_info.index" in problem


def test_what_attention_on_a_gpu_refuses_is_named_before_the_start(setting):
    """In the BF16 arms too, whose layers are Hugging Face's."""
    config = setting(
        "bf16", "actor_rollout_ref.model.use_remove_padding=false", "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
    )
    model = AutoConfig.for_model(
        "qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=0, num_hidden_layers=1, attention_dropout=0.1
    )
    found = preflight._attention(config, model)
    for named in ("use_remove_padding=false", "actor.ulysses_sequence", "sliding-window layers", "attention_dropout=0.1"):
        assert sum(named in problem for problem in found) == 1, found
    assert preflight._attention(setting("bf16"), AutoConfig.for_model("qwen3")) == []
