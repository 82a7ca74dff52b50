"""Exported models: the very bytes that the rollout used, and what transformers, vLLM and verl's merger make of them."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_cases import ALIGNED, CASES, RAGGED, STEP
from decoder_cases import MODELS, TOKENS, same_bytes
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from verl.jetrl import checkpoints, export
from verl.jetrl.arena import ROPE, SCALE, Arena, layout_of
from verl.jetrl.checkpoints import CheckpointError
from verl.jetrl.fp8.format import FP8, Quantized, gemm_nt, quantize_rows


def folder_of(saved: dict, case: str, world_size: int = 1) -> Path:
    return saved[world_size][0] / case / f"global_step_{STEP}"


def held(saved: dict, case: str, world_size: int = 1) -> dict:
    return torch.load(saved[world_size][1] / f"{case}-0.pt")


def arena_of(saved: dict, case: str, world_size: int = 1) -> Arena:
    """The arena as it was when the checkpoint was saved."""
    config = AutoConfig.from_pretrained(folder_of(saved, case) / "actor" / "huggingface")
    return Arena(layout_of(config), held(saved, case, world_size)["arena"], None)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def exported(saved: dict, case: str, format: str, out: Path, world_size: int = 1) -> dict[str, Tensor]:
    export.export(folder_of(saved, case, world_size), out, format)
    return tensors_of(out)


# --- what is in it ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_fp8_is_the_arena_byte_by_byte(saved, case, world_size, tmp_path):
    arena, found = arena_of(saved, case, world_size), exported(saved, case, "fp8", tmp_path / "out", world_size)
    count = 0
    for entry in arena.layout.entries:
        if entry.name != ROPE:
            for name, tensor in arena.parts(entry.name):
                assert same_bytes(found.pop(name), tensor), name
                count += 1
    assert found == {}, "what the rollout did not have"
    assert count == len(held(saved, case)["masters"]) + sum(e.dtype == FP8 for e in arena.layout.entries for _ in e.parts)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", MODELS)
def test_bf16_is_the_masters_rounded(saved, case, world_size, tmp_path):
    """The same logits in transformers as of a model with the masters' values, and the same tokenizer."""
    masters = {name: value.bfloat16() for name, value in held(saved, case, world_size)["masters"].items()}
    found = exported(saved, case, "bf16", tmp_path / "out", world_size)
    assert found.keys() == masters.keys() and all(same_bytes(found[name], masters[name]) for name in found)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16 and model.config.tie_word_embeddings is (case == "qwen3")
    wanted = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
    wanted.load_state_dict(masters, strict=case != "qwen3")
    with torch.no_grad():
        logits = model(TOKENS).logits
        assert torch.equal(logits, wanted.eval()(TOKENS).logits) and logits.std() > 0.1
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab()["w7"] == 7


@pytest.mark.parametrize("format", export.FORMATS)
def test_a_big_model_is_split(saved, format, tmp_path):
    whole = exported(saved, "qwen2", format, tmp_path / "one")
    assert [path.name for path in (tmp_path / "one").glob("*.safetensors*")] == ["model.safetensors"]
    command = [folder_of(saved, "qwen2"), tmp_path / "many", "--format", format, "--max-shard-size", "20KB"]
    assert export.main([str(word) for word in command]) == 0
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 5 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    for name, tensor in whole.items():
        assert same_bytes(load_file(tmp_path / "many" / index["weight_map"][name])[name], tensor), name


def test_what_the_configuration_says(saved, tmp_path):
    source = json.loads((folder_of(saved, "llama") / "actor" / "huggingface" / "config.json").read_text())
    for format in export.FORMATS:
        exported(saved, "llama", format, tmp_path / format)
        config = json.loads((tmp_path / format / "config.json").read_text())
        said = config.pop("quantization_config", None)
        assert said == (export.QUANTIZATION if format == "fp8" else None)
        assert config == {**source, "dtype": "bfloat16"}
    assert said["weight_block_size"] == [128, 128] and said["quant_method"] == "fp8"


def test_weights_that_verl_saved_beside_the_shards_are_not_taken(saved, tmp_path):
    """``checkpoint.save_contents: [..., hf_model]`` puts BF16 weights into the same folder."""
    folder = tmp_path / f"global_step_{STEP}"
    shutil.copytree(folder_of(saved, "qwen2"), folder)
    for name in ("model.safetensors", "model-00001-of-00001.safetensors", "model.safetensors.index.json"):
        (folder / "actor" / "huggingface" / name).write_text("other weights")
    export.export(folder, tmp_path / "out", "fp8")
    assert [path.name for path in (tmp_path / "out").glob("model*")] == ["model.safetensors"]


# --- who reads it -----------------------------------------------------------------------------------------------------


def test_transformers_reads_fp8(saved, tmp_path):
    """Without a GPU it dequantizes; linear layers to FP32, so that it computes in that only."""
    exported(saved, ALIGNED, "fp8", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    arena = arena_of(saved, ALIGNED)
    name = "model.layers.1.mlp.down_proj"
    q, s = arena[f"{name}.weight"], arena[f"{name}.{SCALE}"]
    wanted = q.float() * s.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(model.get_submodule(name).weight, wanted)
    assert model(TOKENS).logits.isfinite().all()


@pytest.fixture(scope="module")
def vllm_world(mesh):
    """vLLM's process groups of one process."""
    pytest.importorskip("vllm")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    from verl.jetrl.rollout import vllm_cpu

    vllm_cpu.register()
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, "env://", 0, "gloo")
        parallel_state.initialize_model_parallel()
        yield
        parallel_state.destroy_model_parallel()


def loaded(folder: Path):
    """The model as vLLM's own loader makes it."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader

    config = EngineArgs(model=str(folder), enforce_eager=True).create_engine_config()
    with set_current_vllm_config(config):
        return get_model_loader(config.load_config).load_model(vllm_config=config, model_config=config.model_config)


@pytest.mark.parametrize(("case", "kind"), [(ALIGNED, "Qwen3ForCausalLM"), (RAGGED, "LlamaForCausalLM")])
def test_stock_vllm_loads_the_arenas_bytes(saved, case, kind, vllm_world, tmp_path):
    """vLLM's model class, FP8 method and loader; its linear layers give the rollout's outputs bit for bit."""
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod

    exported(saved, case, "fp8", tmp_path / "out", world_size=2)
    model = loaded(tmp_path / "out")
    assert type(model).__name__ == kind
    arena, held_by_vllm = arena_of(saved, case, 2), dict(model.named_parameters())
    torch.manual_seed(0)
    for name, tensor in arena:
        assert same_bytes(held_by_vllm.pop(name).data, tensor), name
        if tensor.dtype == FP8:
            linear = model.get_submodule(name.removesuffix(".weight"))
            assert type(linear.quant_method) is Fp8LinearMethod and type(linear.quant_method.quant_config) is Fp8Config
            x = torch.randn(5, tensor.shape[1]).bfloat16()
            wanted = gemm_nt(quantize_rows(x), Quantized(tensor, arena[name.replace("weight", SCALE)]))
            assert torch.equal(linear(x)[0], wanted), name
    assert held_by_vllm == {}


def test_stock_vllm_loads_bf16(saved, vllm_world, tmp_path):
    found = exported(saved, ALIGNED, "bf16", tmp_path / "out")
    parameters = dict(loaded(tmp_path / "out").named_parameters())
    down = "model.layers.1.mlp.down_proj.weight"
    assert same_bytes(parameters[down].data, found[down])
    key = "model.layers.0.self_attn"
    qkv = torch.cat([found[f"{key}.{part}_proj.weight"] for part in "qkv"])
    assert same_bytes(parameters[f"{key}.qkv_proj.weight"].data, qkv)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (ALIGNED, ()),
        (RAGGED, ("sizes that are no multiples of 128", "model.layers.0.mlp.down_proj.weight")),
        ("qwen3", ("sizes that are no multiples of 128", "so does vLLM those of model.layers.0.mlp.gate_proj.weight")),
    ],
)
def test_who_does_not_read_a_model_is_said(saved, case, said, tmp_path, capsys):
    exported(saved, case, "fp8", tmp_path / "out")
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(warnings) == len(said[:1]) and all(words in warnings[0] for words in said)
    assert ("vLLM" in str(warnings)) is (case == "qwen3")


@pytest.mark.parametrize("world_size", [1, 2])
def test_verls_own_merger_gives_the_same_bf16(saved, world_size, tmp_path):
    source = folder_of(saved, "qwen3", world_size) / "actor"
    subprocess.run(
        [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
        + ["--local_dir", str(source), "--target_dir", str(tmp_path / "merged")],
        check=True,
    )
    merged, found = tensors_of(tmp_path / "merged"), exported(saved, "qwen3", "bf16", tmp_path / "out", world_size)
    assert merged.keys() - found.keys() <= {"lm_head.weight"} and found.keys() <= merged.keys()
    assert all(same_bytes(merged[name], found[name]) for name in found)


# --- whole or not there -----------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from verl.jetrl import export
save, left = export.save_file, [2]
def killed(tensors, path, metadata):
    save(tensors, path, metadata)
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
export.save_file = killed
export.main(sys.argv[1:])
"""


def test_a_killed_export_leaves_no_model(saved, tmp_path):
    words = [str(word) for word in (folder_of(saved, "qwen2"), tmp_path / "out", "--format", "fp8", "--max-shard-size", "20KB")]
    assert subprocess.run([sys.executable, "-c", KILLED, *words]).returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
    assert export.main(words) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    wanted = exported(saved, "qwen2", "fp8", tmp_path / "again")
    found = tensors_of(tmp_path / "out")
    assert found.keys() == wanted.keys() and all(same_bytes(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("size", ["foo", "5XB"])
def test_a_shard_size_that_is_none_leaves_nothing(saved, size, tmp_path):
    with pytest.raises(CheckpointError, match=f"--max-shard-size {size}"):
        export.export(folder_of(saved, "qwen3"), tmp_path / "out", "bf16", size)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_not_replaced(saved, tmp_path, capsys):
    words = [str(folder_of(saved, "qwen2") / "actor"), str(tmp_path / "out"), "--format", "bf16"]
    (tmp_path / "out").mkdir()
    assert export.main(words) == 0, "an empty folder may be there; the actor's folder will do"
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert export.main(words) == 2
    assert "out exists already: name a new folder" in capsys.readouterr().err
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="exists already"):
        export.export(folder_of(saved, "qwen2"), tmp_path / "file", "bf16")


def unfinished(folder: Path) -> None:
    (folder / checkpoints.MARK).unlink()


def incomplete(folder: Path) -> None:
    (folder / "actor" / "model_world_size_2_rank_1.pt").unlink()


def no_configuration(folder: Path) -> None:
    shutil.rmtree(folder / "actor" / "huggingface")


def other_model(folder: Path) -> None:
    path = folder / "actor" / "huggingface" / "config.json"
    path.write_text(path.read_text().replace('"model_type": "qwen2"', '"model_type": "qwen2_moe"'))


def other_size(folder: Path) -> None:
    path = folder / "actor" / "huggingface" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"num_hidden_layers": 1, "layer_types": config["layer_types"][:1]}))


def adapters(folder: Path) -> None:
    for path in (folder / "actor").glob("model_*.pt"):
        torch.save({"base_model.q_proj.lora_A.weight": torch.zeros(2, 2)}, path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (unfinished, "is not a whole checkpoint: its save was interrupted"),
        (incomplete, "lacks model_world_size_2_rank_1.pt"),
        (no_configuration, "actor has no huggingface/config.json"),
        (other_model, "model_type 'qwen2_moe' is not one of qwen3, qwen2, llama"),
        (other_size, "the checkpoint's parameters are not the model's: .*model.layers.1.input_layernorm.weight"),
        (adapters, "LoRA adapters: merge it with python -m verl.model_merger"),
        (shutil.rmtree, "no such folder"),
    ],
)
def test_what_cannot_be_exported(saved, damage, message, tmp_path):
    folder = tmp_path / f"global_step_{STEP}"
    shutil.copytree(folder_of(saved, "qwen2", 2), folder)
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        export.export(folder, tmp_path / "out", "fp8")
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()
