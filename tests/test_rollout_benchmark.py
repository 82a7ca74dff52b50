"""The rollout benchmark's trainer and arms; its figures and tables are tested where the results are (test_tables.py)."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from decoder_cases import config_of
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

from benchmarks import rollout
from benchmarks.shapes import QWEN3_8B
from verl.jetrl.trainer import flash


def test_the_masters_behind_the_arena_are_those_of_the_stock_arms(mesh, owned):
    """After a forward of the stock arms FSDP2's root has BF16 copies where the masters were."""
    config = config_of("qwen3")
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    masters = {name: value.detach().clone() for name, value in module.named_parameters()}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    for layer in module.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    with torch.no_grad():
        module(input_ids=torch.arange(4)[None], use_cache=False)
    assert module.lm_head.weight.dtype == torch.bfloat16, "the case is not the one meant"
    flash.register()
    trainer = rollout.Trainer.__new__(rollout.Trainer)
    trainer.module, trainer.masters = module, None
    del module
    trainer.share()
    owned.append(trainer.masters.arena)
    held = {name: value.to_local() for name, value in trainer.masters.parameters.items()}
    assert held.keys() == masters.keys() and all(torch.equal(held[name], masters[name]) for name in held)


def test_an_arm_that_cannot_run_a_model_is_left_out(capsys):
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    smollm2 = SimpleNamespace(**sizes)
    assert rollout.arms_of(smollm2, list(rollout.ARMS)) == ["bf16", "jetrl", "jetrl_exact"]
    assert "stock_fp8 left out" in capsys.readouterr().out
    assert rollout.arms_of(SimpleNamespace(**QWEN3_8B), list(rollout.ARMS)) == list(rollout.ARMS)
