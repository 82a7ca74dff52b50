"""What a run keeps in a GPU's memory, and when: from the configurations alone, before anything starts.

    python -m verl.jetrl.memory_plan recipes/qwen3-8b --arm jetrl --gpu-gb 141 actor_rollout_ref.model.path=/path/to/model

Trainer and vLLM share each GPU; a plan is a list of :class:`Item`.  :mod:`verl.jetrl.preflight` refuses a plan that does not
fit.  docs/memory.md says what is exact and what is estimated.  Sizes are bytes, printed in GiB, in which GPUs are sold: an H200
"of 141 GB" has 140.4 GiB.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from transformers import AutoConfig, PretrainedConfig

from verl.jetrl.arena import ROPE, SLOTS, Entry, has_qk_norm, head_dim, layout_of
from verl.jetrl.compose import RecipeError, compose
from verl.jetrl.fp8.format import BLOCK, FP8
from verl.jetrl.precision import SUPPORTED_MODELS
from verl.jetrl.trainer.gradients import LAYERS
from verl.jetrl.trainer.log_probs import chunk_tokens

GIB = 2**30
CONTEXT = int(0.6 * GIB)  # CUDA context, cuBLAS workspace and NCCL buffers of one process
GRAPHS = GIB  # vLLM's CUDA graphs
MOST_GPUS = 512  # no more are proposed
ENV = "JETRL_MEMORY_PLAN"  # "warn": a plan that does not fit is printed, not refused

START, UPDATE, ROLLOUT, LOG_PROBS, BACKWARD, STEP = PHASES = ("start", "update", "rollout", "log-probs", "backward", "step")
AFTER_START = PHASES[1:]

ROOT = "actor_rollout_ref."
ARENA = "actor.fsdp_config.arena"
UTILIZATION = "rollout.gpu_memory_utilization"
CHECKPOINTING = "model.enable_gradient_checkpointing"
TRANSPOSED = "actor.fsdp_config.resident_transposed"
FUSED_ADAM = "actor.optim.override_optimizer_config.fused"
PARAM_OFFLOAD = "actor.fsdp_config.param_offload"
OPTIMIZER_OFFLOAD = "actor.fsdp_config.optimizer_offload"
NO_SYNC = "actor.fsdp_config.use_no_sync_for_gradient_accumulation"
RESHARD = "actor.fsdp_config.reshard_after_forward"
BUCKET = "rollout.checkpoint_engine.update_weights_bucket_megabytes"
SLEEP = ("rollout.free_cache_engine", "rollout.enable_sleep_mode")
# Per phase: whether tokens are counted, the limit in tokens, the limit in sequences.
MICRO_BATCH = {
    BACKWARD: ("actor.use_dynamic_bsz", "actor.ppo_max_token_len_per_gpu", "actor.ppo_micro_batch_size_per_gpu"),
    LOG_PROBS: (
        "rollout.log_prob_use_dynamic_bsz",
        "rollout.log_prob_max_token_len_per_gpu",
        "rollout.log_prob_micro_batch_size_per_gpu",
    ),
}


@dataclass(frozen=True)
class Item:
    """``nbytes`` that ``process`` holds in ``phases``; ``setting``: what governs it; ``estimate``: not counted exactly."""

    process: str
    name: str
    nbytes: float
    phases: tuple[str, ...] = PHASES
    setting: str = ""
    estimate: bool = False


@dataclass(frozen=True)
class Sizes:
    """Numbers of features, parameters and bytes of a model."""

    H: int
    I: int  # noqa: E741
    V: int
    layers: int
    heads: int
    q: int
    kv: int
    qk_norm: bool
    positions: int
    parameters: int
    of_layer: int
    of_linears: int
    of_largest_linear: int
    fp8_bytes: int  # of the linears with their scales
    bf16_bytes: int  # of the rest, without the RoPE table
    rope_bytes: int


def sizes_of(model: PretrainedConfig) -> Sizes:
    """Counted from the arena's layout."""
    layout, D = layout_of(model), head_dim(model)
    weights = list(layout.weights)
    linears = [entry for entry in weights if entry.dtype == FP8]

    def count(entries: list[Entry]) -> int:
        return sum(torch.Size(entry.shape).numel() for entry in entries)

    return Sizes(
        H=model.hidden_size,
        I=model.intermediate_size,
        V=model.vocab_size,
        layers=model.num_hidden_layers,
        heads=model.num_attention_heads,
        q=model.num_attention_heads * D,
        kv=model.num_key_value_heads * D,
        qk_norm=has_qk_norm(model),
        positions=model.max_position_embeddings,
        parameters=count(weights),
        of_layer=count([entry for entry in weights if entry.name.startswith("model.layers.0.")]),
        of_linears=count(linears),
        of_largest_linear=max(count([entry]) for entry in linears),
        fp8_bytes=layout.bytes_of("fp8"),
        bf16_bytes=layout.bytes_of("bf16") - layout[ROPE].nbytes,
        rope_bytes=layout[ROPE].nbytes,
    )


def _get(config: DictConfig, key: str) -> object:
    """A setting below ``actor_rollout_ref``; None when there is none."""
    return OmegaConf.select(config, ROOT + key)


def gpus(config: DictConfig) -> int:
    """GPUs of a run, which are its trainer processes."""
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def _fp8(config: DictConfig) -> bool:
    return _get(config, "actor.fsdp_config.precision_flow.linear") == "fp8"


def ranks_of(config: DictConfig) -> int:
    """Trainer processes that a weight's rows are divided among: verl makes one group of all for a size above their number."""
    fsdp_size = _get(config, "actor.fsdp_config.fsdp_size")
    return min(fsdp_size, gpus(config)) if fsdp_size > 0 else gpus(config)


def _sharded(config: DictConfig) -> bool:
    return _fp8(config) and _get(config, ARENA) == "sharded"


# --- activations ----------------------------------------------------------------------------------------------------


def saved_by_layer(m: Sizes, fp8: bool) -> dict[str, int]:
    """What one decoder layer saves for its backward, in bytes per token.

    FP8: what :mod:`verl.jetrl.model.autograd` saves; block scales (0.02%) left out.  BF16: Hugging Face's eager layer.
    """
    attention = {
        "attention's q, k, out and log-sum-exp": 2 * (2 * m.q + m.kv) + 4 * m.heads,
        "qkv, of which v is a view": 2 * (m.q + 2 * m.kv) if fp8 or m.qk_norm else 2 * m.kv,
    }
    if fp8:
        return attention | {
            "inputs of both norms, rstd": 2 * (2 * m.H + 4),
            "wgrad's FP8 operands: o, down": m.q + m.I,
            "gate_up": 4 * m.I,
        }
    return attention | {
        "q/k norm, FP32": 4 * (m.q + m.kv) * m.qk_norm,
        "both norms: FP32 input, BF16 before and after the weight": 2 * 8 * m.H,
        "gate, SiLU, up, product": 8 * m.I,
    }


def _micro_batch(config: DictConfig, phase: str) -> tuple[int, int, str]:
    """Tokens of the largest micro-batch on a GPU, tokens of one sequence, and the setting that governs it."""
    dynamic, most_tokens, most_rows = MICRO_BATCH[phase]
    length = config.data.max_prompt_length + config.data.max_response_length
    prompts = _get(config, "actor.ppo_mini_batch_size") if phase == BACKWARD else config.data.train_batch_size
    whole = -(-prompts * _get(config, "rollout.n") // gpus(config)) * length
    setting = most_tokens if _get(config, dynamic) else most_rows
    limit = _get(config, setting)
    return min(whole, (limit or whole) * (1 if setting == most_tokens else length)), length, setting


def _activations(m: Sizes, config: DictConfig) -> Iterator[Item]:
    fp8, checkpointing = _fp8(config), _get(config, CHECKPOINTING)
    layer = sum(saved_by_layer(m, fp8).values())
    work = 6 * m.I + 6 * m.H  # of one layer, bytes per token: gradients, or a forward's intermediates; the MLP has the most
    # Of the logits, bytes per element.  A forward: BF16, once more unless the temperature is 1, their FP32 copy and its
    # exponentials.  A backward: four FP32 tensors.  The FP8 engine holds those of a few tokens at a time, and
    # its backward writes over the BF16 logits: its forward needs more.
    forward = (2 if _get(config, "rollout.temperature") == 1 else 4) + 8
    entropy = _get(config, "actor.calculate_entropy") or _get(config, "actor.entropy_coeff")
    for phase, per_logit, per_token in (
        (LOG_PROBS, forward, work),
        (BACKWARD, 20 if entropy else forward if fp8 else 16, work + (layer if checkpointing else 0)),
    ):
        tokens, _, setting = _micro_batch(config, phase)
        logits = per_logit * m.V * (min(tokens, chunk_tokens(m.V)) if fp8 else tokens)
        # One layer's work and the vocabulary's do not coincide.
        what = "logits, log-softmax" if logits > tokens * per_token else "one layer"
        yield Item("trainer", f"{what}: {tokens} tokens", max(logits, tokens * per_token), (phase,), setting, True)
        if phase == BACKWARD:
            kept = m.layers * ((4 if fp8 else 2) * m.H if checkpointing else layer) + (4 if fp8 else 8) * m.H  # final norm
            name = f"{'inputs' if checkpointing else 'activations'} of {m.layers} layers"
            yield Item("trainer", name, tokens * kept, (phase,), CHECKPOINTING, not fp8)


# --- the plan -------------------------------------------------------------------------------------------------------


def _trainer(m: Sizes, config: DictConfig) -> Iterator[Item]:
    P, N = m.parameters, ranks_of(config)

    def item(name: str, nbytes: float, phases: tuple[str, ...] = PHASES, setting: str = "", estimate: bool = False) -> Item:
        return Item("trainer", name, nbytes, phases, setting or ("number of GPUs" if "/" in name else ""), estimate)

    yield item("CUDA context, NCCL", CONTEXT, estimate=True)
    # Offloaded, verl brings masters and moments back for training, masters for the log-prob pass too.
    training = (BACKWARD, STEP)
    masters = (LOG_PROBS, *training) if _get(config, PARAM_OFFLOAD) else PHASES
    yield item(f"FP32 masters / {N}", 4 * P / N, masters, PARAM_OFFLOAD)
    moments = training if _get(config, OPTIMIZER_OFFLOAD) else AFTER_START
    yield item(f"Adam moments / {N}", 8 * P / N, moments, OPTIMIZER_OFFLOAD)
    if not _get(config, FUSED_ADAM):
        yield item(f"Adam's temporary / {N}", 4 * P / N, (STEP,), FUSED_ADAM, estimate=True)
    # ROLLOUT: the weights' hashes are taken once the KV cache is there.
    yield item("largest parameter, whole", 4 * m.V * m.H, (START, UPDATE, STEP, ROLLOUT), estimate=True)
    if _fp8(config):
        if _sharded(config):
            yield item(f"FP8 weights, scales: own rows / {N}", m.fp8_bytes / N, PHASES, ARENA)
            yield item(f"arena: FP8 weights of {SLOTS} layers", SLOTS * m.fp8_bytes / m.layers, PHASES, ARENA)
        else:
            yield item("arena: FP8 weights, scales", m.fp8_bytes, PHASES, ARENA)
        yield item("arena: BF16 rest, RoPE table", m.bf16_bytes + m.rope_bytes)
        if _get(config, TRANSPOSED):
            yield item("transposed FP8 weights", m.of_linears, PHASES, TRANSPOSED)
        else:
            yield item("transposed: one linear at a time", m.of_largest_linear, (BACKWARD,), TRANSPOSED)
        deferred = N > 1 and _get(config, NO_SYNC)
        if deferred:
            yield item("FP32 gradients, whole", 4 * P, (BACKWARD, STEP), NO_SYNC)
        else:
            yield item(f"FP32 gradients / {N}", 4 * P / N, (BACKWARD, STEP))
        if N > 1 and not deferred:  # padding of rows that do not divide by N left out
            yield item("gradients on their way", 4 * max(LAYERS * m.of_layer, m.V * m.H), (BACKWARD,))
        if _get(config, "actor.use_kl_loss") or config.algorithm.use_kl_in_reward:
            transposed = m.of_linears if _get(config, "ref.fsdp_config.resident_transposed") else 0
            reference = m.fp8_bytes + m.bf16_bytes + m.rope_bytes + transposed
            yield item("reference: arena", reference, PHASES, "actor.use_kl_loss")
    else:  # FSDP2 gathers a layer, the next one, and embedding or head; it keeps a reference policy on the CPU
        gathered = 2 * (2 * m.of_layer + m.V * m.H) if _get(config, RESHARD) else 2 * P
        yield item("BF16 weights, gathered", gathered, (LOG_PROBS, BACKWARD), RESHARD, True)
        yield item("gradients on their way", 6 * max(m.of_layer, m.V * m.H), (BACKWARD,), estimate=True)
        if _get(config, NO_SYNC):
            yield item("FP32 gradients, whole", 4 * P, (BACKWARD,), NO_SYNC)
        yield item(f"FP32 gradients / {N}", 4 * P / N, (STEP,) if _get(config, NO_SYNC) else (BACKWARD, STEP))
        yield item("bucket of the weight update", _get(config, BUCKET) * 2**20, (UPDATE,), BUCKET)
    yield from _activations(m, config)


def _engine(m: Sizes, config: DictConfig, gpu: int) -> Iterator[Item]:
    """vLLM takes ``gpu_memory_utilization`` of the whole GPU; the KV cache is what weights, activations and graphs leave.

    FP8 weights and the BF16 rest in the trainer's process count for vLLM: the arena, and own rows with arena=sharded.
    """
    rollout = config.actor_rollout_ref.rollout
    sleeps = all(_get(config, key) is not False for key in SLEEP)
    own = m.fp8_bytes if _sharded(config) else 0
    twice = m.fp8_bytes * (1 / ranks_of(config) + SLOTS / m.layers) if own else 0  # the trainer's own rows and its two layers
    weights = own if _fp8(config) else m.fp8_bytes + m.bf16_bytes if rollout.quantization else 2 * m.parameters
    # vLLM's profile_run: one MLP, then logits, probabilities and a sorted copy in FP32.
    work = rollout.max_num_batched_tokens * (6 * m.I + 8 * m.H) + rollout.max_num_seqs * m.V * 12
    graphs = 0 if rollout.enforce_eager else GRAPHS
    counted = m.fp8_bytes + m.bf16_bytes + m.rope_bytes + twice if _fp8(config) else weights
    kv = max(0.0, rollout.gpu_memory_utilization * gpu - counted - work - graphs)
    awake = (START, ROLLOUT) if sleeps else PHASES
    name = "weights" if not _fp8(config) else "FP8 weights; the rest is the arena's" if own else "weights: the arena's"
    yield Item("vLLM", "CUDA context, NCCL", CONTEXT, estimate=True)
    yield Item("vLLM", name, weights, (START, UPDATE, ROLLOUT) if sleeps else PHASES)
    yield Item("vLLM", "activations", work, awake, "rollout.max_num_batched_tokens", True)
    yield Item("vLLM", "CUDA graphs", graphs, PHASES, "rollout.enforce_eager", True)
    yield Item("vLLM", "KV cache", kv, awake, UTILIZATION, True)


@dataclass(frozen=True)
class Plan:
    """Items of both processes on each GPU of ``gpu`` bytes; the KV cache's bytes per token and its longest sequence."""

    title: str
    items: tuple[Item, ...]
    gpu: int
    kv_token: int
    longest: int

    def total(self, phase: str, process: str | None = None) -> float:
        """Bytes in ``phase``, of one process or of both."""
        return sum(i.nbytes for i in self.items if phase in i.phases and process in (None, i.process))

    @property
    def over(self) -> list[str]:
        """Phases that do not fit."""
        return [phase for phase in PHASES if self.total(phase) > self.gpu]

    @property
    def kv(self) -> float:
        return self.items[-1].nbytes

    @property
    def sequences(self) -> float:
        """How many of the longest sequences the KV cache holds."""
        return self.kv / (self.kv_token * self.longest)

    @property
    def fits(self) -> bool:
        return not self.over and self.sequences >= 1

    def table(self) -> str:
        """For people, in GiB."""
        head = "".join(f"{phase:>10}" for phase in PHASES)
        lines = [f"{self.title}, GiB on each GPU of {self.gpu / GIB:.1f} (~ estimated)", f"{'':44}{head}  set by {ROOT}"]
        rows: dict[tuple[str, str], dict[str, str]] = {}
        for item in self.items:
            cells = dict.fromkeys(item.phases, f"{'~' * item.estimate}{item.nbytes / GIB:.1f}")
            rows.setdefault((item.process, item.name), {}).update(cells, setting=item.setting)
        for name, process in (("trainer", "trainer"), ("vLLM", "vLLM"), ("both", None)):
            rows["sum", name] = {phase: f"{self.total(phase, process) / GIB:.1f}" for phase in PHASES}
        rows["", "free"] = {phase: f"{(self.gpu - self.total(phase)) / GIB:.1f}" for phase in PHASES}
        for (process, name), cells in rows.items():
            numbers = "".join(f"{cells.get(phase, ''):>10}" for phase in PHASES)
            lines.append(f"{process:8}{name:36}{numbers}  {cells.get('setting', '')}".rstrip())
        tokens = f"{self.kv / self.kv_token:,.0f} tokens of {self.kv_token / 1024:.0f} KiB"
        lines.append(f"KV cache: {tokens}, {self.sequences:.1f} sequences of {self.longest}")
        tight = [phase for phase in PHASES if 0 <= self.gpu - self.total(phase) < 0.03 * self.gpu]
        if tight:
            lines.append(f"tight: less than 3% is free in {', '.join(tight)}; fragmentation is not counted")
        return "\n".join(lines)


def make_plan(m: Sizes, config: DictConfig, gpu: int) -> Plan:
    """The plan of a composed configuration on GPUs of ``gpu`` bytes."""
    items = (*_trainer(m, config), *_engine(m, config, gpu))
    fp8_kv = str(_get(config, "rollout.engine_kwargs.vllm.kv_cache_dtype") or "").startswith("fp8")
    longest = _get(config, "rollout.max_model_len") or m.positions
    count = gpus(config)
    title = f"Memory plan of {config.jetrl.arm} on {count} GPU{'s' * (count > 1)}"
    return Plan(title, items, gpu, 2 * m.layers * m.kv * (1 if fp8_kv else 2), longest)


# --- what would fit -------------------------------------------------------------------------------------------------


def _changed(config: DictConfig, changes: dict[str, object]) -> DictConfig:
    config = config.copy()
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    return config


def _more_gpus(config: DictConfig, factor: int) -> dict[str, object]:
    count = gpus(config) * factor
    changes = {"trainer.n_gpus_per_node": min(8, count), "trainer.nnodes": -(-count // 8)}
    return {} if factor == 1 else {k: v for k, v in changes.items() if OmegaConf.select(config, k) != v}


def remedy(m: Sizes, config: DictConfig, gpu: int) -> dict[str, object] | None:
    """The changes of settings that make the plan fit, on as few GPUs as possible; None when none do."""
    factor = 1
    while gpus(config) * factor <= MOST_GPUS:
        more = _more_gpus(config, factor)
        changes = _shrink(m, _changed(config, more), gpu)
        if changes is not None:
            return more | changes
        factor *= 2
    return None


def _shrink(m: Sizes, config: DictConfig, gpu: int) -> dict[str, object] | None:
    """The changes that make the plan fit on as many GPUs as it has."""
    trial, changes = config.copy(), {}

    def change(key: str, value: object) -> None:
        changes[ROOT + key] = value
        OmegaConf.update(trial, ROOT + key, value, force_add=True)

    def plan() -> Plan:
        return make_plan(m, trial, gpu)

    offload = ((OPTIMIZER_OFFLOAD, True), (PARAM_OFFLOAD, True))
    for key, value in (*((key, True) for key in SLEEP), (TRANSPOSED, False), (NO_SYNC, False), (CHECKPOINTING, True), *offload):
        if _get(config, key) is (not value) and plan().over:
            change(key, value)
    ranks = ranks_of(config)
    whole_blocks = all(rows % (ranks * BLOCK) == 0 for rows in (m.q, m.kv, m.H, m.I))
    if _fp8(config) and not _sharded(config) and ranks > 1 and whole_blocks and plan().over:
        change(ARENA, "sharded")
    for phase in MICRO_BATCH:
        tokens, length, setting = _micro_batch(config, phase)
        unit = 1024 if "token" in setting else length
        while phase in plan().over and tokens > length:
            tokens = max(length, (tokens - 1) // unit * unit)
            change(setting, tokens if "token" in setting else tokens // length)
    utilization = _get(config, UTILIZATION)
    excess = max(plan().total(phase) for phase in (START, ROLLOUT)) - gpu
    if excess > 0:
        utilization = math.floor(100 * (utilization - excess / gpu)) / 100
        change(UTILIZATION, utilization)
    while plan().sequences < 1 and not plan().over:
        utilization = math.floor(100 * utilization + 1.001) / 100
        change(UTILIZATION, utilization)
    if not plan().fits:
        return None
    for key in list(changes):  # what was not needed goes
        fewer = {k: v for k, v in changes.items() if k != key}
        other = _changed(config, fewer)
        if make_plan(m, other, gpu).fits and not (_sharded(other) and _get(other, TRANSPOSED)):
            changes = fewer
    return changes


def why_not(plan: Plan, m: Sizes, config: DictConfig) -> str:
    """What does not fit, and the settings that would; "" for a plan that fits."""
    if plan.fits:
        return ""
    parts = []
    if plan.over:
        worst = max(plan.over, key=plan.total)
        largest = sorted((i for i in plan.items if worst in i.phases), key=lambda i: -i.nbytes)[:3]
        needs = ", ".join(f"{phase} needs {plan.total(phase) / GIB:.1f}" for phase in plan.over)
        most = ", ".join(f"{i.name} {i.nbytes / GIB:.1f}" for i in largest)
        parts.append(f"{needs} of {plan.gpu / GIB:.1f} GiB per GPU (most in {worst}: {most})")
    if START in plan.over:
        parts.append("vLLM refuses to start unless gpu_memory_utilization x total is free beside the trainer")
    if plan.sequences < 1:
        parts.append(f"a KV cache of {plan.kv / GIB:.1f} GiB holds no sequence of {plan.longest} tokens")
    found = remedy(m, config, plan.gpu)
    alone = (_more_gpus(config, factor) for factor in (2, 4, 8, 16, 32))
    more = next((c for c in alone if make_plan(m, _changed(config, c), plan.gpu).fits), None)
    ways = dict.fromkeys(" ".join(f"{k}={v}" for k, v in way.items()).lower() for way in (found, more) if way)
    parts.append("it fits with " + ", or with ".join(ways) if ways else "no setting known here would make it fit")
    return (
        f"{plan.title} does not fit: "
        + "; ".join(parts)
        + f". python -m verl.jetrl.memory_plan prints the plan; {ENV}=warn starts it all the same"
    )


# --- for preflight, run and the command line ------------------------------------------------------------------------


def plan_of(config: DictConfig, model: PretrainedConfig | None, gpu: int | None = None) -> tuple[Plan, Sizes] | None:
    """The plan; None on the CPU, and for what it cannot count: other models, LoRA, a critic, FSDP2's own offloading.

    ``gpu``: bytes of a GPU; those of the smallest one here when None.
    """
    uncounted = ("model.lora_rank", "model.lora.rank", "model.lora_adapter_path", "actor.fsdp_config.offload_policy")
    if config.trainer.device != "cuda" or model is None or model.model_type not in SUPPORTED_MODELS:
        return None
    if any(_get(config, key) for key in uncounted) or config.critic.enable or config.algorithm.adv_estimator == "gae":
        return None
    if gpu is None:
        if not torch.cuda.is_available():
            return None
        gpu = min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
    m = sizes_of(model)
    return make_plan(m, config, gpu), m


def problems(config: DictConfig, model: PretrainedConfig | None) -> list[str]:
    """For preflight: why this configuration's plan does not fit."""
    planned = plan_of(config, model) if os.environ.get(ENV) != "warn" else None
    return [found] if planned and (found := why_not(*planned, config)) else []


def read_model(config: DictConfig) -> PretrainedConfig | None:
    """The model's configuration; None where there is no such folder."""
    path = Path(config.actor_rollout_ref.model.path).expanduser()
    return AutoConfig.from_pretrained(path).get_text_config() if (path / "config.json").is_file() else None


def describe(config: DictConfig, gpu: int | None = None) -> str:
    """The table, and below it what does not fit, as lines; "" where there is no plan."""
    planned = plan_of(config, read_model(config), gpu)
    texts = (planned[0].table(), why_not(*planned, config)) if planned else ()
    return "".join(f"{text}\n" for text in texts if text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m verl.jetrl.memory_plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path, help="folder of the recipe, e.g. recipes/qwen3-8b")
    parser.add_argument("--arm", default="jetrl", help="arm of the recipe (default: jetrl)")
    parser.add_argument("--gpu-gb", type=float, help="memory of a GPU in GiB (H100: 80, H200: 141; default: what is here)")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides: trainer.n_gpus_per_node=2")
    args = parser.parse_intermixed_args(argv)
    if args.gpu_gb is None and not torch.cuda.is_available():
        parser.error("no CUDA GPU here: say with --gpu-gb what the run's GPUs have")
    if args.gpu_gb is not None and not 0 < args.gpu_gb < float("inf"):
        parser.error(f"--gpu-gb {args.gpu_gb}: it must be above 0")
    os.environ.setdefault("JETRL_DEVICE", "gpu")
    try:
        config = compose(args.recipe, args.arm, Path(tempfile.gettempdir()) / args.arm, args.overrides)
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from verl.jetrl import preflight  # which imports this module

    path = Path(config.actor_rollout_ref.model.path).expanduser()
    _, unusable = preflight.folder(path, whole=False)
    found = preflight.values(config) + [f"actor_rollout_ref.model.path={path}: {problem}" for problem in unusable]
    if found:
        print("no plan:", *(f"  - {problem}" for problem in found), sep="\n", file=sys.stderr)
        return 2
    text = describe(config, None if args.gpu_gb is None else int(args.gpu_gb * GIB))
    if not text:
        print(
            f"no plan: actor_rollout_ref.model.path={path} must be a {', '.join(SUPPORTED_MODELS)} model, and the run be on "
            "GPUs, without LoRA, critic and fsdp_config.offload_policy",
            file=sys.stderr,
        )
        return 2
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
