"""What can be known to be wrong before anything expensive starts: every problem of a configuration, in one list."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path

import pyarrow
import pyarrow.parquet
import torch
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

from verl.jetrl import checkpoints, memory_plan, patching, weight_files
from verl.jetrl.arena import head_dim, layout_of, rows_of
from verl.jetrl.compose import machine
from verl.jetrl.config_diff import diff, format_value
from verl.jetrl.environment import ray_address
from verl.jetrl.fp8.format import BLOCK
from verl.jetrl.model.decoder import Decoder
from verl.jetrl.model.rope import rope_table
from verl.jetrl.precision import SUPPORTED_MODELS, PrecisionFlow, engine_problems
from verl.jetrl.rollout.exact_attention import same_bits

GB = 2**30
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
MISSING_DATA = "does not exist"
MISSING_MODEL = "not made yet"  # a model that the recipe can make
BYTES_PER_PARAMETER = 12  # FP32 master and two FP32 Adam moments
FLOW = "actor_rollout_ref.actor.fsdp_config.precision_flow"
FLOW_COPIES = ("actor_rollout_ref.ref.fsdp_config.precision_flow", "actor_rollout_ref.rollout.custom.precision_flow")


def problems(config: DictConfig) -> list[str]:
    """Everything that would stop this run, each with the setting and the fix; empty when it can start, and :func:`disk` finds
    nothing for all arms."""
    model, found = None, []
    try:
        model, model_problems = _model(config)
        found += model_problems
    except Exception as error:
        found.append(_cannot_check("actor_rollout_ref.model.path", error))
    no_run = _checked("values", lambda: values(config))
    if no_run:  # the other checks would stumble over them
        return found + no_run
    for what, check in {
        "installed versions": lambda: _software(),
        "trainer": lambda: _hardware(config),
        "names": lambda: _choices(config),
        "paths": lambda: _paths(config),
        "data": lambda: _data(config),
        "actor_rollout_ref": lambda: _precision(config, model),
        "actor_rollout_ref.rollout": lambda: _seeds(config),
        "trainer.default_local_dir": lambda: _saving(config),
        "memory plan": lambda: memory_plan.problems(config, model),
    }.items():
        found += _checked(what, check)
    return found or _upstreams(config)


def of_the_trees(config: DictConfig) -> list[str]:
    """Those of :func:`problems` with which the two sides' module trees cannot even be built."""

    def check() -> list[str]:
        model, found = _model(config)
        try:
            fp8 = _flow(config).fp8
        except (TypeError, ValueError) as error:
            return [*found, str(error)]
        refused = decoder(model) if fp8 and model is not None else []
        return found + [f"actor_rollout_ref.model.path: {problem}" for problem in refused]

    return _checked("actor_rollout_ref", check)


def _checked(what: str, check: Callable[[], list[str]]) -> list[str]:
    try:
        return check()
    except Exception as error:
        return [_cannot_check(what, error)]


def _cannot_check(what: str, error: Exception) -> str:
    """A value of the wrong type or a damaged file that stops one check is one more problem, and does not hide the others."""
    return f"{what}: cannot be checked: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def wrong_types(config: DictConfig, default: DictConfig) -> list[str]:
    """Settings whose values are no longer what they are by default: verl takes any text for true, and reads numbers late."""
    found = []
    for name, value, given in diff(default, config):
        if isinstance(value, bool) and not isinstance(given, bool):
            found.append(f"{name}={_shown(given)}: set it to true or false")
        elif isinstance(value, int | float) and not isinstance(value, bool) and isinstance(given, bool | str):
            found.append(f"{name}={_shown(given)}: it must be a number, like {value}")
    return found


def _shown(value: object) -> str:
    """A value as one writes it on the command line."""
    return value if isinstance(value, str) else format_value(value)


_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_COUNTS = (
    "trainer.total_training_steps", "trainer.total_epochs", "trainer.nnodes", "trainer.n_gpus_per_node",
    "data.train_batch_size", "data.max_prompt_length", "data.max_response_length",
    f"{_ACTOR}.ppo_mini_batch_size", f"{_ACTOR}.ppo_epochs",
    f"{_ROLLOUT}.n", f"{_ROLLOUT}.max_num_seqs", f"{_ROLLOUT}.max_num_batched_tokens", f"{_ROLLOUT}.agent.num_workers",
)  # fmt: skip
_RANGES = {  # what lies inside, and how to say it
    f"{_ROLLOUT}.temperature": (lambda x: x > 0, "above 0: at 0 every sample of a prompt is the same, and nothing is learned"),
    f"{_ROLLOUT}.top_p": (lambda x: 0 < x <= 1, "above 0 and at most 1"),
    f"{_ROLLOUT}.gpu_memory_utilization": (lambda x: 0 < x <= 1, "above 0 and at most 1"),
    f"{_ACTOR}.optim.lr": (lambda x: 0 <= x < float("inf"), "0 or more"),
    f"{_ACTOR}.clip_ratio": (lambda x: x >= 0, "0 or more"),
    f"{_ACTOR}.grad_clip": (lambda x: x > 0, "above 0"),
    "jetrl.verify_weights_every": (lambda x: x >= 0, "0 or more (0: at the start only)"),
    "jetrl.verify_log_probs_every": (lambda x: x >= 0, "0 or more"),
}


def values(config: DictConfig) -> list[str]:
    """Numbers that no run can have, and those that do not fit each other."""
    found = []
    for name in _COUNTS:
        value = OmegaConf.select(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            found.append(f"{name}={_shown(value)}: it must be a whole number, 1 or more")
    for name, (inside, words) in _RANGES.items():
        value = OmegaConf.select(config, name)
        if isinstance(value, int | float) and not inside(value):
            found.append(f"{name}={value}: it must be {words}")
    if found:
        return found
    sequence = config.data.max_prompt_length + config.data.max_response_length
    limits = {
        f"{_ACTOR}.ppo_max_token_len_per_gpu": config.actor_rollout_ref.actor.use_dynamic_bsz,
        f"{_ROLLOUT}.log_prob_max_token_len_per_gpu": config.actor_rollout_ref.rollout.log_prob_use_dynamic_bsz,
    }
    for name, dynamic in limits.items():
        tokens = OmegaConf.select(config, name)
        if dynamic and (not isinstance(tokens, int) or tokens < sequence):
            found.append(
                f"{name}={_shown(tokens)}: a micro-batch must hold the longest sequence, data.max_prompt_length + "
                f"data.max_response_length = {sequence} tokens"
            )
    if "file" not in config.trainer.logger:
        found.append(
            f"trainer.logger={list(config.trainer.logger)}: the launcher and the report read the file logger; add file"
        )
    return found


def _choices(config: DictConfig) -> list[str]:
    """Names that verl looks up late."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

    from verl.jetrl.trainer import losses  # noqa: F401  registers its own

    known = {
        "trainer.resume_mode": ("auto", "disable", "resume_path"),
        "algorithm.adv_estimator": sorted(ADV_ESTIMATOR_REGISTRY),
        f"{_ACTOR}.policy_loss.loss_mode": sorted(POLICY_LOSS_REGISTRY),
        f"{_ACTOR}.optim.lr_scheduler_type": ("constant", "cosine"),
    }
    found = []
    for name, values in known.items():
        value = OmegaConf.select(config, name)
        if value not in values:
            found.append(f"{name}={_shown(value)}: it must be one of {', '.join(values)}")
    found += _agent_loop(config)
    reward = (config.reward.custom_reward_function.path or ".").removeprefix("file://")
    if not reward.startswith("pkg://") and not Path(reward).exists():
        found.append(f"reward.custom_reward_function.path={reward}: there is no such file")
    if config.trainer.resume_mode == "resume_path":
        found += _resumed(config.trainer.resume_from_path)
    return found


def _resumed(given: str | None) -> list[str]:
    # verl takes what follows the last "global_step_" for the step, a slash at the end included.
    if not (given and Path(given).is_dir() and re.search(r"/global_step_[0-9]+$", given)):
        return [f"trainer.resume_mode=resume_path: trainer.resume_from_path={_shown(given)} is no folder global_step_N"]
    if checkpoints.has_marks(Path(given).absolute().parent):  # not one of verl alone, which leaves none
        try:
            checkpoints.require_whole(Path(given))
        except checkpoints.CheckpointError as error:
            return [f"trainer.resume_from_path={given}: {error}; name another"]
    return []


def _paths(config: DictConfig) -> list[str]:
    """Paths that are found from here, and not from the run's folder, where its processes work."""
    found = []
    for name in (
        "actor_rollout_ref.model.path", "data.train_files", "data.val_files", "reward.custom_reward_function.path",
        "trainer.resume_from_path",
    ):  # fmt: skip
        value = OmegaConf.select(config, name) or []
        for text in [value] if isinstance(value, str) else value:
            path = Path(text.removeprefix("file://")).expanduser()
            if not path.is_absolute() and path.exists():
                found.append(f"{name}={text}: give the full path, {path.resolve()}")
    return found


def _agent_loop(config: DictConfig) -> list[str]:
    name = config.actor_rollout_ref.rollout.agent.agent_loop_manager_class
    ours = "verl.jetrl.rollout.agent_loop.SeededAgentLoopManager"
    if name == ours:  # which need not be imported here, for seconds
        return []
    from verl.utils.import_utils import load_class_from_fqn

    try:
        fits = issubclass(load_class_from_fqn(name or "", "agent loop manager"), load_class_from_fqn(ours))
    except (ImportError, AttributeError, ValueError):
        fits = False
    refused = (
        f"{_ROLLOUT}.agent.agent_loop_manager_class={_shown(name)}: it must name a subclass of {ours}, which seeds requests"
    )
    return [] if fits else [refused]


def _upstreams(config: DictConfig) -> list[str]:
    """What verl's own configuration classes refuse when a worker makes them."""
    from verl.utils.config import omega_conf_to_dataclass

    found = []
    for part in (_ACTOR, _ROLLOUT):
        try:
            omega_conf_to_dataclass(OmegaConf.select(config, part))
        except InstantiationException as error:
            found.append(f"{part}: {' '.join(str(error.__cause__ or error).split())}")
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
    device, here = config.trainer.device, {"cpu": "cpu", "gpu": "cuda"}[machine()]
    if device == "cuda" and not torch.cuda.is_available():
        return ["no CUDA GPU found: trainer.device=cuda needs Hopper GPUs (H100, H200); JETRL_DEVICE=cpu runs on the CPU"]
    if device != here:
        return [
            f"trainer.device={_shown(device)}: on this machine it is {here}; leave it out (the environment variable "
            "JETRL_DEVICE=cpu or gpu chooses, with all that belongs to it)"
        ]
    found = []
    if config.trainer.nnodes > 1 and not ray_address(config):
        found.append(
            f"trainer.nnodes={config.trainer.nnodes}: the run would start Ray on this machine alone. Start it on every node "
            "and add +ray_kwargs.ray_init.address=auto, or set trainer.nnodes=1"
        )
    if device == "cpu":
        if least := config.jetrl.get("least_gpu_memory_gb"):
            gpus = memory_plan.gpus(config)
            found.append(f"no CUDA GPU found: this recipe needs {gpus} Hopper GPUs (H100, H200) of {least} GB")
        return found
    count = torch.cuda.device_count()
    if config.trainer.nnodes == 1 and config.trainer.n_gpus_per_node > count:
        found.append(f"trainer.n_gpus_per_node={config.trainer.n_gpus_per_node}, but this machine has {count} GPUs")
    for index in range(count):
        major, minor = torch.cuda.get_device_capability(index)
        if major != 9:
            name = torch.cuda.get_device_name(index)
            found.append(
                f"GPU {index} ({name}) has compute capability {major}.{minor}: all arms' attention and FP8 need Hopper, 9.0"
            )
    least = config.jetrl.get("least_gpu_memory_gb")
    if least:
        memory = min(torch.cuda.get_device_properties(i).total_memory for i in range(count)) / GB
        if memory < least:
            found.append(f"this recipe needs {least} GB per GPU, the smallest here has {memory:.0f} GB")
    return found


def _flow(config: DictConfig) -> PrecisionFlow:
    return PrecisionFlow(**config.actor_rollout_ref.actor.fsdp_config.precision_flow)


def _made_by(script: Path, folder: str | Path) -> str:
    command = f"{sys.executable} {script} --out-dir {os.path.normpath(folder)}"
    return f"A run makes it once nothing else is missing, as does: {command}"


def _data(config: DictConfig) -> list[str]:
    found = []
    for key, least in {"train_files": config.data.train_batch_size, "val_files": 1}.items():
        files = config.data[key]
        files = [files] if isinstance(files, str) else files or []
        problems_here = _data_files(f"data.{key}", files, config.data.prompt_key, least)
        if config.jetrl.prepare and all(Path(file).parent == Path(config.jetrl.data_dir) for file in files):
            script = Path(config.jetrl.recipe_dir) / config.jetrl.prepare
            how = f"{MISSING_DATA}. {_made_by(script, config.jetrl.data_dir)}"
            problems_here = [problem.replace(MISSING_DATA, how) for problem in problems_here]
        found += problems_here
    if config.data.train_batch_size % config.actor_rollout_ref.actor.ppo_mini_batch_size:
        found.append(
            f"data.train_batch_size={config.data.train_batch_size} is not a multiple of "
            f"actor_rollout_ref.actor.ppo_mini_batch_size={config.actor_rollout_ref.actor.ppo_mini_batch_size}"
        )
    chunk = config.data.get("gen_batch_size")
    if chunk and (chunk < 1 or config.data.train_batch_size % chunk):
        found.append(
            f"data.gen_batch_size={chunk} does not divide data.train_batch_size={config.data.train_batch_size}, which is put "
            "together from such chunks; leave it out"
        )
    return found


def _data_files(setting: str, files: Sequence[str], prompt_key: str, least: int) -> list[str]:
    found, rows = [], 0
    for file in files:
        path = Path(file).expanduser()
        if not path.is_file():
            found.append(f"{setting}: {file} {MISSING_DATA}")
        elif path.suffix == ".parquet":
            try:
                table = pyarrow.parquet.ParquetFile(path)
            except (pyarrow.ArrowException, OSError) as error:
                found.append(f"{setting}: {file} is damaged: {error}")
                continue
            rows += table.metadata.num_rows
            schema = table.schema_arrow
            if prompt_key not in schema.names:
                found.append(f"{setting}: {file} has no column {prompt_key!r} (data.prompt_key)")
            info = schema.field("extra_info").type if "extra_info" in schema.names else None
            if info is None or not pyarrow.types.is_struct(info) or info.get_field_index("index") < 0:
                found.append(
                    f"{setting}: {file} has no extra_info.index, a number of its own for each prompt: with it and the step "
                    "every request is seeded"
                )
    if not found and rows < least and all(str(file).endswith(".parquet") for file in files):
        found.append(f"{setting}: {rows} prompts, at least {least} are needed")
    return found


def _model(config: DictConfig) -> tuple[PretrainedConfig | None, list[str]]:
    path = Path(config.actor_rollout_ref.model.path).expanduser()
    if config.jetrl.prepare_model and path == Path(config.jetrl.model_dir) and not path.is_dir():
        script = Path(config.jetrl.recipe_dir) / config.jetrl.prepare_model
        return None, [f"actor_rollout_ref.model.path={path}: {MISSING_MODEL}. {_made_by(script, path)}"]
    model, found = folder(path)
    found = [f"actor_rollout_ref.model.path={path}: {problem}" for problem in found]
    if model is None:
        return None, found
    length = config.data.max_prompt_length + config.data.max_response_length
    if length > model.max_position_embeddings:
        found.append(
            f"data.max_prompt_length + data.max_response_length = {length} exceeds the model's "
            f"max_position_embeddings {model.max_position_embeddings}"
        )
    longest = config.actor_rollout_ref.rollout.max_model_len
    if longest is not None and longest < length:
        found.append(
            f"actor_rollout_ref.rollout.max_model_len={longest} is less than data.max_prompt_length + "
            f"data.max_response_length = {length}"
        )
    return model, found


def folder(path: Path, whole: bool = True) -> tuple[PretrainedConfig | None, list[str]]:
    """The model of a Hugging Face checkpoint's folder, None where nothing tells, and what is wrong with the folder: with
    config.json alone unless ``whole``."""
    if not path.is_dir():
        if path.exists():
            return None, ["it is a file, not a Hugging Face checkpoint's folder"]
        return None, ["no such folder. Download the model and set the path (make recipe-NAME MODEL=/path/to/model)"]
    if not (path / "config.json").is_file():
        return None, ["no config.json in it, so it is not a Hugging Face checkpoint"]
    missing = weight_files.missing(path) if whole else ""
    found = [f"weights are missing: {missing}"] if missing else []
    try:
        config = AutoConfig.from_pretrained(path)
        model = config.get_text_config()
    except (OSError, ValueError) as error:
        return None, [*found, f"its config.json cannot be used: {str(error).partition(chr(10))[0]}"]
    if not whole:
        return model, found
    if not missing:
        found += _checked("weights", lambda: weight_files.different(path, config))
    if not any((path / name).is_file() for name in TOKENIZER_FILES):  # transformers would make an empty tokenizer
        return model, [*found, f"its tokenizer cannot be loaded: none of {', '.join(TOKENIZER_FILES)} is in it"]
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # what it raises for a damaged or missing file differs from file to file
        return model, [*found, f"its tokenizer cannot be loaded: {str(error).partition(chr(10))[0]}"]
    if model.vocab_size < len(tokenizer):
        found.append(f"vocab_size {model.vocab_size} is smaller than the tokenizer's {len(tokenizer)} tokens")
    return model, found


def decoder(model: PretrainedConfig) -> list[str]:
    """What the shared decoder refuses about the model, by making one without memory."""
    try:
        with torch.device("meta"):
            Decoder(model)
        rope_table(model, 1)
    except (ValueError, ArithmeticError, KeyError, RuntimeError) as error:
        return [f"its config.json does not fit: {error}"]
    return []


def _seeds(config: DictConfig) -> list[str]:
    if config.trainer.device == "cpu" and config.actor_rollout_ref.rollout.enable_chunked_prefill:
        return [
            "actor_rollout_ref.rollout.enable_chunked_prefill=true does not work without a GPU: every request has a seed, and "
            "vLLM cannot rewind a CPU random generator after a partial prefill; set it to false"
        ]
    return []


def _places(node: DictConfig, key: str, where: str = "") -> list[str]:
    """Where ``key`` is in a configuration."""
    found = []
    for name in node if not (node._is_none() or node._is_missing()) else ():
        if name == key:
            found.append(where + name)
        elif isinstance(child := node._get_node(name), DictConfig) and not child._is_interpolation():
            found += _places(child, key, f"{where}{name}.")
    return found


def _precision(config: DictConfig, model: PretrainedConfig | None) -> list[str]:
    actor_rollout_ref = config.actor_rollout_ref
    stock = actor_rollout_ref.rollout.quantization
    try:
        flow = _flow(config)
    except (TypeError, ValueError) as error:
        return [str(error)]
    found = [
        f"{place}: nothing reads a precision flow there; the setting is {FLOW}"
        for place in _places(config, "precision_flow")
        if place not in (FLOW, *FLOW_COPIES)
    ]
    if flow.fp8 and stock:
        found.append(
            f"actor_rollout_ref.rollout.quantization={stock} with precision_flow.linear=fp8: the rollout derives its "
            "precision from the trainer's; remove rollout.quantization"
        )
    if not flow.fp8 and stock and not config.jetrl.mixed_precision:
        found.append(
            f"the trainer runs in BF16 and the rollout in {stock}: the precision flow differs. Set {FLOW}.linear=fp8, or "
            "declare the mixed baseline with jetrl.mixed_precision=true"
        )
    if config.jetrl.mixed_precision and (flow.fp8 or stock != "fp8"):
        found.append("jetrl.mixed_precision=true needs BF16 training and actor_rollout_ref.rollout.quantization=fp8")
    if flow.fp8 or stock:
        lora = actor_rollout_ref.model.get("lora_rank") or (actor_rollout_ref.model.get("lora") or {}).get("rank")
        if lora or actor_rollout_ref.model.get("lora_adapter_path"):
            found.append("LoRA with FP8 is not supported: set actor_rollout_ref.model.lora_rank=0")
    if (flow.fp8 or stock) and model is not None and model.model_type not in SUPPORTED_MODELS:
        found.append(f"FP8 supports the model types {', '.join(SUPPORTED_MODELS)}; this model is {model.model_type!r}")
    if stock == "fp8" and model is not None and model.model_type in SUPPORTED_MODELS:
        found += stock_fp8_problems(model)
    if flow.fp8:
        found += _fp8_training(config)
        if model is not None and model.model_type in SUPPORTED_MODELS:
            found += [f"actor_rollout_ref.model.path: {problem}" for problem in decoder(model)]
        found += _arena(config, model)
    if flow.exact:
        found += _exact(config, model)
    if not flow.fp8 and config.trainer.device != "cpu":
        found += _attention(config, model)
    # What every arm needs: its checks of precision flow and weights look into these parts.
    for setting, value, needed in (
        ("actor_rollout_ref.actor.strategy", actor_rollout_ref.actor.strategy, "fsdp2"),
        ("actor_rollout_ref.rollout.name", actor_rollout_ref.rollout.name, "vllm"),
        ("actor_rollout_ref.rollout.data_parallel_size", actor_rollout_ref.rollout.data_parallel_size, 1),
        ("actor_rollout_ref.rollout.pipeline_model_parallel_size", actor_rollout_ref.rollout.pipeline_model_parallel_size, 1),
        ("actor_rollout_ref.model.use_fused_kernels", actor_rollout_ref.model.use_fused_kernels, False),
        ("actor_rollout_ref.actor.checkpoint.async_save", actor_rollout_ref.actor.checkpoint.async_save, False),
        ("trainer.use_v1", config.trainer.use_v1, True),
        ("trainer.v1.trainer_mode", config.trainer.v1.trainer_mode, "sync"),
        *(
            (setting, OmegaConf.select(config, setting) or False, False)
            for setting in (
                # With it verl takes the rollout's log-probs for the trainer's: the mismatch would be 0 whatever both do.
                "algorithm.rollout_correction.bypass_mode",
                # verl gives these to its own sampler only, and says nothing of it.
                "algorithm.filter_groups.enable",
                "trainer.v1.sampler.sync_refill_failed_groups",
            )
        ),
    ):
        if value != needed:
            name = setting.rpartition(".")[2]
            found.append(f"{setting}={_shown(value)}: the fork runs with {name}={_shown(needed)} only; set it to that")
    found += _tensor_parallel(config, flow, model)
    return found


def _attention(config: DictConfig, model: PretrainedConfig | None) -> list[str]:
    """What the attention kernels of BF16 training would refuse in the first forward; :func:`_fp8_training` has FP8's."""
    actor_rollout_ref, found = config.actor_rollout_ref, []
    if not actor_rollout_ref.model.use_remove_padding:
        found.append("actor_rollout_ref.model.use_remove_padding=false: attention is of packed sequences; set it to true")
    for role in ("actor", "ref"):
        name = f"{role}.ulysses_sequence_parallel_size"
        if (OmegaConf.select(actor_rollout_ref, name) or 1) != 1:
            found.append(f"actor_rollout_ref.{name}: attention is of whole sequences; set it to 1")
    if model is not None and "sliding_attention" in (getattr(model, "layer_types", None) or ()):
        found.append(
            "actor_rollout_ref.model.path: the model has sliding-window layers; attention is full and causal in all arms"
        )
    if model is not None and getattr(model, "attention_dropout", 0):
        found.append(f"actor_rollout_ref.model.path: attention_dropout={model.attention_dropout}; set it to 0 in config.json")
    return found


def stock_fp8_problems(model: PretrainedConfig) -> list[str]:
    """Widths that vLLM's own block FP8 takes without an error and gets wrong (scales of fused layers), or stops at on a GPU."""
    D = head_dim(model)
    widths = {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_attention_heads * head_dim": model.num_attention_heads * D,
        "num_key_value_heads * head_dim": model.num_key_value_heads * D,
    }
    wrong = [f"{name}={width}" for name, width in widths.items() if width % BLOCK]
    if not wrong:
        return []
    return [
        f"actor_rollout_ref.rollout.quantization=fp8 with {', '.join(wrong)}: vLLM's own block FP8 is right for multiples of "
        f"{BLOCK} only. Run the arms bf16, jetrl or jetrl-exact"
    ]


def _fp8_training(config: DictConfig) -> list[str]:
    """Settings of verl's engine that the FP8 engine would ignore, or stop at in the first step."""
    needed = {
        "model.use_remove_padding": (True, "it trains on packed sequences"),
        "model.enable_activation_offload": (False, "its layers are not Hugging Face's"),
        "model.tiled_mlp.enabled": (False, "its layers are not Hugging Face's"),
        "model.mtp.enable": (False, "it has no layers that predict several tokens"),
    }
    roles = ["actor"]
    if config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward:
        roles.append("ref")
    for role in roles:
        needed |= {
            f"{role}.pad_to_length": (False, "it runs any number of tokens"),
            f"{role}.use_prefix_grouper": (False, "it attends to whole sequences"),
            f"{role}.ulysses_sequence_parallel_size": (1, "sequences are not cut"),
        }
    found = []
    for role in roles:
        where = f"{role}.fsdp_config"
        found += engine_problems(OmegaConf.select(config.actor_rollout_ref, where), True, f"actor_rollout_ref.{where}")
    for key, (value, why) in needed.items():
        actual = OmegaConf.select(config.actor_rollout_ref, key)
        if actual is not None and actual != value:
            found.append(
                f"actor_rollout_ref.{key}={actual} with precision_flow.linear=fp8: {why}; set it to {str(value).lower()}"
            )
    return found


def _arena(config: DictConfig, model: PretrainedConfig | None) -> list[str]:
    """Weights that cannot be divided among the ranks."""
    fsdp = config.actor_rollout_ref.actor.fsdp_config
    if fsdp.arena != "sharded" or model is None or model.model_type not in SUPPORTED_MODELS:
        return []
    try:
        rows_of(layout_of(model), memory_plan.ranks_of(config))
    except ValueError as error:
        return [str(error)]
    return []


def _tensor_parallel(config: DictConfig, flow: PrecisionFlow, model: PretrainedConfig | None) -> list[str]:
    setting = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    size = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    if size == 1:
        return []
    if not flow.fp8:
        return [f"{setting}={size}: the BF16 and mixed arms run with 1 only (their weights are compared whole); set it to 1"]
    if flow.exact:
        return [
            f"{setting}={size} with precision_flow.exact=true: the order of an all-reduce is not the trainer's; set it to 1"
        ]
    if config.trainer.device == "cpu":
        return [f"{setting}={size}: without a GPU the rollout runs in one process; set it to 1"]
    if config.trainer.n_gpus_per_node % size:
        return [f"{setting}={size} does not divide trainer.n_gpus_per_node={config.trainer.n_gpus_per_node}"]
    if model is not None:
        try:
            layout_of(model, size)
        except ValueError as error:
            return [str(error)]
    return []


def _exact(config: DictConfig, model: PretrainedConfig | None) -> list[str]:
    """Sampling settings that change a token's probability after the log-softmax that both sides share, and heads for which
    the attention kernel adds in another order when it decodes."""
    rollout = config.actor_rollout_ref.rollout
    needed = {"top_p": (1,), "top_k": (-1, 0), "min_p": (0, None), "repetition_penalty": (1, None)}
    needed |= {"presence_penalty": (0, None), "frequency_penalty": (0, None), "logprobs_mode": ("processed_logprobs",)}
    found = []
    for name, values in needed.items():
        value = rollout.get(name)
        if value not in values:
            found.append(
                f"actor_rollout_ref.rollout.{name}={value} with precision_flow.exact=true: the log-probs of sampled tokens "
                f"would not be the policy's; set it to {values[0]}"
            )
    if model is not None and model.model_type in SUPPORTED_MODELS and config.trainer.device != "cpu":
        if not same_bits(head_dim(model)):
            found.append(
                f"precision_flow.exact=true with head_dim={head_dim(model)}: FlashAttention 3 decodes and prefills alike "
                "at 64 or less, 97 to 128 and 193 to 256 only. Set precision_flow.exact=false"
            )
    return found


def _saving(config: DictConfig) -> list[str]:
    folder = Path(config.trainer.default_local_dir)
    if folder != (own := Path(config.jetrl.run_dir) / "checkpoints"):
        return [
            f"trainer.default_local_dir={folder}: a run resumes, repairs and deletes checkpoints in its own folder, {own}; "
            "leave it out, and choose another disk with --runs"
        ]
    existing = checkpoints.nearest(folder)
    if not checkpoints.writable(existing):
        return [f"trainer.default_local_dir={folder}: {existing} is not a folder that can be written to"]
    if config.trainer.save_freq <= 0:
        return []
    found = []
    lost = "a run killed while it saves would keep no whole checkpoint"
    if config.trainer.max_actor_ckpt_to_keep == 1:
        found.append(f"trainer.max_actor_ckpt_to_keep=1: {lost}; set 2 or more")
    if config.trainer.get("remove_previous_ckpt_in_save"):
        found.append(
            f"trainer.remove_previous_ckpt_in_save=true: verl would keep 1 checkpoint, and {lost}; leave it out, "
            "trainer.max_actor_ckpt_to_keep says how many are kept"
        )
    return found


def disk(configs: Iterable[DictConfig]) -> list[str]:
    """Disks that are too full for what the arms keep: they run one after the other, in this order, and none removes another's
    checkpoints."""
    return _checked("trainer.default_local_dir", lambda: _disk(configs))


def _disk(configs: Iterable[DictConfig]) -> list[str]:
    disks: dict[int, list[tuple[Path, float, float]]] = {}  # per arm: its folder, GB that will come to stay, GB for a while
    for config in configs:
        model = memory_plan.read_model(config)
        if config.trainer.save_freq <= 0 or model is None:
            continue
        folder = Path(config.trainer.default_local_dir)
        keep = max(1, config.trainer.max_actor_ckpt_to_keep or 1)  # without a limit, at least one before the one being saved
        # One more than is kept, to spare: verl removes the oldest before it saves.
        one = parameter_count(model) * BYTES_PER_PARAMETER / GB
        given = config.jetrl.checkpoint_disk_gb
        kept, spare = (keep * one, one) if given is None else (given, 0)
        held, removed = (size / GB for size in checkpoints.taken(folder, keep))
        arms = disks.setdefault(checkpoints.nearest(folder).stat().st_dev, [])
        arms.append((folder, max(0, kept - held) - removed, spare))  # what an arm removes is there until it starts
    found = []
    for arms in disks.values():
        folders, stay, pass_by = zip(*arms, strict=True)
        needed = max(total + more for total, more in zip(accumulate(stay), pass_by, strict=True))
        free = shutil.disk_usage(checkpoints.nearest(folders[0])).free / GB
        if free < needed:
            found.append(
                f"checkpoints need {needed:.1f} GB more below {os.path.commonpath(folders)}, {free:.1f} GB are free: choose "
                "another disk with --runs, lower trainer.max_actor_ckpt_to_keep, or set trainer.save_freq=-1"
            )
    return found


def parameter_count(model: PretrainedConfig) -> int:
    """Parameters of a dense decoder with this configuration (embedding, attention, gated MLP, head)."""
    attention = model.hidden_size * head_dim(model) * (2 * model.num_attention_heads + 2 * model.num_key_value_heads)
    mlp = 3 * model.hidden_size * model.intermediate_size
    embeddings = model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    return model.num_hidden_layers * (attention + mlp) + embeddings
