"""What can be known to be wrong before anything expensive starts: every problem of a configuration, in one list."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from omegaconf import DictConfig
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

from verl.jetrl import patching
from verl.jetrl.precision import SUPPORTED_MODELS, PrecisionFlow

GB = 2**30
MISSING_DATA = "does not exist"
BYTES_PER_PARAMETER = 12  # FP32 master and two FP32 Adam moments


def problems(config: DictConfig) -> list[str]:
    """Everything that would stop this run, each with the setting and the fix; empty when it can start."""
    found = [*_software(), *_hardware(config), *_data(config)]
    model, model_problems = _model(config)
    found += model_problems + _precision(config, model)
    if model is not None:
        found += _disk(config, model)
    return found


def _software() -> list[str]:
    found = []
    for package in patching.PINNED:
        try:
            patching.check_version(package)
        except patching.PatchError as error:
            found.append(str(error))
    return found


def _hardware(config: DictConfig) -> list[str]:
    if config.trainer.device == "cpu":
        least = config.jetrl.get("least_gpu_memory_gb")
        return [f"no CUDA GPU found: this recipe needs {least} GB per GPU on Hopper GPUs (H100, H200)"] if least else []
    if not torch.cuda.is_available():
        return ["no CUDA GPU found: trainer.device=cuda needs Hopper GPUs (H100, H200); JETRL_DEVICE=cpu runs on the CPU"]
    found = []
    count = torch.cuda.device_count()
    if config.trainer.nnodes == 1 and config.trainer.n_gpus_per_node > count:
        found.append(f"trainer.n_gpus_per_node={config.trainer.n_gpus_per_node}, but this machine has {count} GPUs")
    if _flow(config).fp8 or config.actor_rollout_ref.rollout.quantization:
        for index in range(count):
            major, minor = torch.cuda.get_device_capability(index)
            if major != 9:
                name = torch.cuda.get_device_name(index)
                found.append(
                    f"GPU {index} ({name}) has compute capability {major}.{minor}: FP8 was tested on Hopper (9.0) only"
                )
    least = config.jetrl.get("least_gpu_memory_gb")
    if least:
        memory = min(torch.cuda.get_device_properties(i).total_memory for i in range(count)) / GB
        if memory < least:
            found.append(f"this recipe needs {least} GB per GPU, the smallest here has {memory:.0f} GB")
    return found


def _flow(config: DictConfig) -> PrecisionFlow:
    return PrecisionFlow(**config.actor_rollout_ref.actor.fsdp_config.precision_flow)


def _data(config: DictConfig) -> list[str]:
    found = []
    for key in ("train_files", "val_files"):
        files = config.data[key]
        for file in [files] if isinstance(files, str) else files:
            if not Path(file).expanduser().is_file():
                found.append(f"data.{key}: {file} {MISSING_DATA}")
    if config.data.train_batch_size % config.actor_rollout_ref.actor.ppo_mini_batch_size:
        found.append(
            f"data.train_batch_size={config.data.train_batch_size} is not a multiple of "
            f"actor_rollout_ref.actor.ppo_mini_batch_size={config.actor_rollout_ref.actor.ppo_mini_batch_size}"
        )
    return found


def _model(config: DictConfig) -> tuple[PretrainedConfig | None, list[str]]:
    path = Path(config.actor_rollout_ref.model.path).expanduser()
    setting = f"actor_rollout_ref.model.path={path}"
    if not path.is_dir():
        return None, [f"{setting}: no such folder. Download the model and set the path (make recipe-NAME MODEL=/path/to/model)"]
    if not (path / "config.json").is_file():
        return None, [f"{setting}: no config.json in it, so it is not a Hugging Face checkpoint"]
    found = []
    missing = _missing_weights(path)
    if missing:
        found.append(f"{setting}: weights are missing: {missing}")
    model = AutoConfig.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    if model.vocab_size < len(tokenizer):
        found.append(f"{setting}: vocab_size {model.vocab_size} is smaller than the tokenizer's {len(tokenizer)} tokens")
    length = config.data.max_prompt_length + config.data.max_response_length
    if length > model.max_position_embeddings:
        found.append(
            f"data.max_prompt_length + data.max_response_length = {length} exceeds the model's "
            f"max_position_embeddings {model.max_position_embeddings}"
        )
    return model, found


def _missing_weights(path: Path) -> str:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return ", ".join(name for name in names if not (path / name).is_file())
    return "" if any(path.glob("*.safetensors")) or any(path.glob("*.bin")) else "no *.safetensors"


def _precision(config: DictConfig, model: PretrainedConfig | None) -> list[str]:
    actor_rollout_ref = config.actor_rollout_ref
    stock = actor_rollout_ref.rollout.quantization
    try:
        flow = _flow(config)
    except (TypeError, ValueError) as error:
        return [str(error)]
    found = []
    if flow.fp8 and stock:
        found.append(
            f"actor_rollout_ref.rollout.quantization={stock} with precision_flow.linear=fp8: the rollout derives its "
            "precision from the trainer's; remove rollout.quantization"
        )
    if not flow.fp8 and stock and not config.jetrl.mixed_precision:
        found.append(
            f"the trainer runs in BF16 and the rollout in {stock}: the precision flow differs. Set "
            "actor_rollout_ref.actor.fsdp_config.precision_flow.linear=fp8, or declare the mixed baseline with "
            "jetrl.mixed_precision=true"
        )
    if config.jetrl.mixed_precision and (flow.fp8 or not stock):
        found.append("jetrl.mixed_precision=true needs BF16 training and actor_rollout_ref.rollout.quantization=fp8")
    if flow.fp8 or stock:
        lora = actor_rollout_ref.model.get("lora_rank", 0) or actor_rollout_ref.model.get("lora", {}).get("rank", 0)
        if lora or actor_rollout_ref.model.get("lora_adapter_path"):
            found.append("LoRA with FP8 is not supported: set actor_rollout_ref.model.lora_rank=0")
    if flow.fp8:
        if actor_rollout_ref.actor.strategy != "fsdp2":
            found.append(f"FP8 training needs actor_rollout_ref.actor.strategy=fsdp2, not {actor_rollout_ref.actor.strategy}")
        if actor_rollout_ref.rollout.tensor_model_parallel_size != 1:
            found.append("the jetrl arm needs actor_rollout_ref.rollout.tensor_model_parallel_size=1")
        if actor_rollout_ref.rollout.name != "vllm":
            found.append(f"the jetrl arm needs actor_rollout_ref.rollout.name=vllm, not {actor_rollout_ref.rollout.name}")
        if model is not None and model.model_type not in SUPPORTED_MODELS:
            found.append(f"FP8 supports the model types {', '.join(SUPPORTED_MODELS)}; this model is {model.model_type!r}")
    mode = config.trainer.v1.trainer_mode
    if mode != "sync" or not config.trainer.use_v1:
        found.append(f"trainer.v1.trainer_mode={mode}: the fork's recipes run the synchronous V1 trainer; set it to sync")
    return found


def _disk(config: DictConfig, model: PretrainedConfig) -> list[str]:
    if config.trainer.save_freq <= 0:
        return []
    folder = Path(config.trainer.default_local_dir)
    existing = next(p for p in (folder, *folder.parents) if p.is_dir())
    free = shutil.disk_usage(existing).free / GB
    needed = config.jetrl.checkpoint_disk_gb
    if needed is None:
        kept = (config.trainer.max_actor_ckpt_to_keep or 1) + 1
        needed = kept * parameter_count(model) * BYTES_PER_PARAMETER / GB
    if free < needed:
        return [
            f"checkpoints need {needed:.1f} GB below {folder}, {free:.1f} GB are free: point trainer.default_local_dir "
            "elsewhere, lower trainer.max_actor_ckpt_to_keep, or set trainer.save_freq=-1"
        ]
    return []


def parameter_count(model: PretrainedConfig) -> int:
    """Parameters of a dense decoder with this configuration (embedding, attention, gated MLP, head)."""
    head_dim = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    attention = model.hidden_size * head_dim * (2 * model.num_attention_heads + 2 * model.num_key_value_heads)
    mlp = 3 * model.hidden_size * model.intermediate_size
    embeddings = model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    return model.num_hidden_layers * (attention + mlp) + embeddings
