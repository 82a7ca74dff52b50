"""Speed and memory of the training phase: log-prob pass, forward, backward, optimizer step and weight write.

    python -m benchmarks.train                        # what the visible GPUs allow -> benchmarks/results/train.json
    python -m benchmarks.train --parts 8b --arms fp8,bf16_fused
    python -m benchmarks.train --quick --out x.json   # tiny shapes, also without a GPU: checks the script itself
    python -m benchmarks.train --jobs runs/qwen3-8b   # adds whole runs' peaks; benchmarks.jobs makes such runs
    python -m benchmarks.train --docs                 # writes the tables of --out into docs/training.md, README.md

verl's engine, built from a recipe's configuration as verl's worker builds it, on random weights: no Ray, no rollout.  Part
``8b`` has Qwen3-8B's shapes on two GPUs, part ``4b`` Qwen3-4B's on one.  Every arm gets the same packed micro-batches.  The
learning rate is zero, so that all steps of all arms start from the same weights and compute the same thing.

``train.json`` is written after each arm.  A part that is not run stays as it was in the file, with its own command, device
and versions under ``runs``; an arm that fails is named there with its error, and the others go on.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.shapes import QWEN3_4B, QWEN3_8B, linears, save_config

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "train.json"
RECIPE = ROOT / "recipes" / "qwen3-8b"

PARTS = {"8b": (2, QWEN3_8B), "4b": (1, QWEN3_4B)}  # GPUs, shapes
TINY = dict(
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=384, hidden_size=128,
    intermediate_size=256, max_position_embeddings=512,
)  # fmt: skip
MICRO_BATCHES = 4
PHASES = ("log_prob", "forward_backward", "optimizer", "write")
STEP = "step"
NOTES = {
    "tokens_per_s": "tokens (prompt and response) of a step on all GPUs over its median time; of an arm with ``phases`` the "
    "host waits for the GPU only where verl does, of others (measured earlier) between the phases too: log-prob pass with "
    "entropies, forward and backward of the policy loss, gradient clipping, AdamW, and the write of the FP8 weights. What BF16 "
    "arms spend later on sending their weights to the rollout is not counted.",
    "bf16": "verl's FSDP2 engine on Hugging Face's layers; attention as in all arms: FlashAttention 3, flash-attn-4 backward.",
    "bf16_fused": "the same engine with the FP8 decoder's non-GEMM kernels (RMSNorm with residual, q/k norm with RoPE, "
    "SiLU*mul, chunked log-probs of responses) and BF16 cuBLAS GEMMs, q/k/v and gate/up without concatenation.",
    "bf16_fused_kept": "as bf16_fused, and FSDP2 spends memory on speed: gathered weights are kept from the forward to the "
    "backward (reshard_after_forward=false); on one GPU gradients are also reduced once a step, not once a micro-batch "
    "(use_no_sync_for_gradient_accumulation=true).",
    "bf16_fused_deferred": "as bf16_fused, gradients reduced once a step, not once a micro-batch: on several GPUs FSDP2 keeps "
    "whole FP32 gradients beside the sharded ones.",
    "bf16_compiled": "verl's FSDP2 engine on Hugging Face's layers, each through torch.compile, and the chunked log-probs of "
    "responses.",
    "fp8": "the FP8 engine as it is by default.",
    "fp8_deferred": "gradients are reduced once a step, not once a micro-batch (use_no_sync_for_gradient_accumulation=true; "
    "several GPUs only).",
    "fp8_resident": "the transposed weights for the input gradient stay on the GPU and are made anew once a step.",
    "fp8_unfused": "without fused producers: norms and SiLU*mul write BF16, separate kernels quantize.",
    "fp8_bf16_saved": "as fp8_unfused, and the linears' inputs are saved in BF16: compare it with fp8_unfused.",
    "fp8_requantized": "without the arena: FSDP2 gathers BF16 weights for each forward and backward, every forward quantizes "
    "them; gradients leave in BF16. Fused producers as in fp8.",
    "_checkpointing": "with activation checkpointing of every layer.",
    "train_vs_bf16": "tokens/s of the fastest of fp8, fp8_deferred and fp8_resident over the fastest BF16 arm's, at the "
    "shortest sequences (4K): each side with the best settings that fit; BF16 arms with checkpointing are among them. _worse: "
    "at the length with the smaller ratio. _default: fp8, as it is by default, over the same. _checkpointing: among arms with "
    "checkpointing.",
    "gather_bytes_vs_bf16": "bytes of all-gather outputs of one step with 4 micro-batches on a rank (collectives seen by a "
    "dispatch mode; from the part with two GPUs), fp8 over bf16 as verl runs it (bf16_fused_kept gathers a third of that).",
    "same_gradient_bits": "1 if two steps from the same state had the same gradients, bit for bit, in every fp8 arm checked.",
    "ceilings": "largest GEMM rate of this run over the four linears of a layer at the micro-batch's tokens, from CUDA-graph "
    "replays. share_of_*_ceiling: model FLOP (recomputation not counted; causal attention counted by half; the head counted "
    "for responses alone, also of arms that compute the rest) per second over it; "
    "share_of_ideal: the time in which the linears would run at the FP8 (BF16 arms: BF16) ceiling and the rest of the FLOP at "
    "the BF16 ceiling, over the time measured.",
    "job_peak": "GiB in use on the fullest GPU, by trainer and rollout together, over a whole run of a recipe's arm, as its "
    "launcher saw it twice a second (peak_device_gb in status.json), by the settings that the arms share. job_peak_vs_bf16: "
    "jetrl over bf16 without activation checkpointing; job_peak_sharded_vs_bf16: with it, jetrl with arena=sharded; "
    "job_peak_checkpointing_minus_bf16: with it, jetrl with arena=replicated, the difference.",
    "peak": "torch's max_memory_allocated and max_memory_reserved over the timed steps, largest of the ranks, in bytes.",
}


@dataclass(frozen=True)
class Arm:
    """How an arm differs from verl's BF16 engine."""

    fp8: bool = False
    checkpointing: bool = False
    model: str = ""  # a function of train_layers: "fused:bf16_layer", "compiled"
    kept: bool = False  # FSDP2 keeps gathered weights from forward to backward, on one GPU gradients to the end of a step too
    deferred: bool = False  # gradients are reduced once a step; needs several GPUs
    resident: bool = False  # fp8: the transposed weights stay on the GPU
    saved: str = ""  # fp8: unfused producers, activations saved in this precision
    thorough: bool = True  # all sequence lengths and the comparison of two steps' gradients; else the first length alone


# The order is the order of importance: a run that is cut has the first ones.
ARMS = {
    "fp8": Arm(fp8=True),
    "bf16_fused": Arm(model="fused:bf16_layer"),
    "bf16_fused_kept": Arm(model="fused:bf16_layer", kept=True),
    "fp8_deferred": Arm(fp8=True, deferred=True),
    "bf16": Arm(),
    "bf16_checkpointing": Arm(checkpointing=True, thorough=False),
    "fp8_checkpointing": Arm(fp8=True, checkpointing=True, thorough=False),
    "bf16_fused_checkpointing": Arm(model="fused:bf16_layer", checkpointing=True, thorough=False),
    "bf16_fused_deferred": Arm(model="fused:bf16_layer", deferred=True, thorough=False),
    "fp8_resident": Arm(fp8=True, resident=True),
    "fp8_requantized": Arm(model="fused:requantized_layer", thorough=False),
    "fp8_unfused": Arm(fp8=True, saved="fp8", thorough=False),
    "fp8_bf16_saved": Arm(fp8=True, saved="bf16", thorough=False),
    "bf16_compiled": Arm(model="compiled"),
}

FP8_SETTINGS = ("fp8", "fp8_deferred", "fp8_resident")  # what a user can set without giving anything but memory


@dataclass(frozen=True)
class Options:
    """What all processes of a part know."""

    part: str
    world: int
    shapes: dict[str, Any]
    lengths: list[int]
    micro_batch: int  # tokens
    steps: int
    folder: Path
    out: Path
    command: str
    deadline: float  # no arm starts after it
    quick: bool

    @property
    def vocabulary(self) -> int:
        """Ids of the tokenizer: real models pad the vocabulary."""
        return self.shapes["vocab_size"] - (267 if not self.quick else 20)


# --- one engine -----------------------------------------------------------------------------------------------------


def compose_arm(arm: Arm, options: Options):
    """The recipe's configuration of the arm."""
    from verl.jetrl.compose import compose

    root, length = "actor_rollout_ref", max(options.lengths)
    deferred = arm.deferred or (arm.kept and options.world == 1)
    return compose(
        RECIPE,
        "jetrl" if arm.fp8 else "bf16",
        options.folder / "run",
        [
            f"{root}.model.path={options.folder}",
            f"++{root}.model.load_tokenizer=false",
            f"{root}.model.enable_gradient_checkpointing={str(arm.checkpointing).lower()}",
            f"{root}.actor.fsdp_config.reshard_after_forward={str(not arm.kept).lower()}",
            f"{root}.actor.fsdp_config.use_no_sync_for_gradient_accumulation={str(deferred).lower()}",
            f"{root}.actor.fsdp_config.resident_transposed={str(arm.resident).lower()}",
            f"trainer.n_gpus_per_node={options.world}",
            f"data.max_prompt_length={prompt_of(length)}",
            f"data.max_response_length={length - prompt_of(length)}",
            f"{root}.actor.ppo_max_token_len_per_gpu={options.micro_batch}",
            f"{root}.rollout.log_prob_max_token_len_per_gpu={options.micro_batch}",
            f"{root}.rollout.max_model_len={length}",
            f"{root}.actor.optim.lr=0.0",
            f"{root}.actor.optim.lr_warmup_steps=0",
            f"{root}.actor.optim.total_training_steps=1000",
        ],
    )


@contextmanager
def random_weights(device: torch.device) -> Iterator[None]:
    """Models are made from their configuration instead of a checkpoint, on ``device``, where that takes a second."""
    from transformers import AutoModelForCausalLM

    def from_config(pretrained_model_name_or_path: str, torch_dtype: torch.dtype, config, trust_remote_code: bool) -> nn.Module:
        torch.manual_seed(0)
        with device:
            return AutoModelForCausalLM.from_config(config, dtype=torch_dtype, attn_implementation=config._attn_implementation)

    with mock.patch.object(AutoModelForCausalLM, "from_pretrained", from_config):
        yield


def build(arm: Arm, options: Options, config) -> tuple[Any, Callable]:
    """The arm's engine and its loss, as verl's worker makes them."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.utils.losses import ppo_loss

    from benchmarks import train_layers
    from verl.jetrl.arena import Arena
    from verl.jetrl.trainer.engine import JetRLEngine
    from verl.jetrl.trainer.staging import response_rows

    class Engine(JetRLEngine):
        def _build_module(self) -> nn.Module:
            with random_weights(torch.device(device_of())):
                module = super()._build_module()
            if arm.model:
                change, _, layer = arm.model.partition(":")
                getattr(train_layers, change)(module, *([getattr(train_layers, layer)] if layer else []))
            return module

        def forward_step(self, *arguments: Any, **named: Any) -> tuple:
            # The fused BF16 arms keep the host ahead of the GPU as FP8 does: the difference is that of the precision.
            step = self.staged_step if arm.model.startswith("fused") else super().forward_step
            return step(*arguments, **named)

        def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict, dict]:
            inputs, output_args = super().prepare_model_inputs(micro_batch)
            if arm.model:
                inputs["response_rows"] = response_rows(micro_batch)  # for train_layers' head
            return inputs, output_args

        def prepare_model_outputs(self, **arguments: Any) -> dict[str, Any]:
            # BF16 arms run verl's own: the fork's also measures what the padded vocabulary costs, and reads logits for it.
            above = super() if arm.fp8 else super(JetRLEngine, self)
            return above.prepare_model_outputs(**arguments)

    model_config = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    model_config.tokenizer = range(options.vocabulary)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    actor.model_config = model_config
    engine_config = actor.engine
    engine_config.use_dynamic_bsz = config.actor_rollout_ref.actor.use_dynamic_bsz
    engine_config.max_token_len_per_gpu = engine_config.infer_max_token_len_per_gpu = options.micro_batch
    engine_config.use_remove_padding = model_config.use_remove_padding
    engine = Engine(
        model_config=model_config, engine_config=engine_config, optimizer_config=actor.optim, checkpoint_config=actor.checkpoint
    )
    # No rollout maps the arena: memory that was made ready for CUDA IPC and never opened would outlive the arm.
    with mock.patch.object(Arena, "create", lambda layout, device, rank: Arena.private(layout, device)):
        engine.initialize()
    return engine, partial(ppo_loss, config=actor)


def prompt_of(length: int) -> int:
    """Tokens of a sequence that are its prompt."""
    return length // 8


def device_of() -> str:
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"


def batch_of(arm: Arm, options: Options, length: int, micro_batches: int = MICRO_BATCHES):
    """``micro_batches`` full micro-batches of sequences of ``length`` tokens, as the trainer hands them to an engine."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    count, prompt = micro_batches * options.micro_batch // length, prompt_of(length)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    ids = torch.randint(0, options.vocabulary, (count, length), generator=generator)

    def nested(rows: Tensor) -> Tensor:
        return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)

    response = length - prompt
    data = TensorDict(
        {
            "input_ids": nested(ids),
            "position_ids": nested(torch.arange(length).expand(count, -1)),
            "loss_mask": nested((torch.arange(length) >= prompt).long().expand(count, -1)),
            "prompts": nested(ids[:, :prompt]),
            "responses": nested(ids[:, prompt:]),
            "response_mask": nested(torch.ones(count, response, dtype=torch.long)),
            "advantages": nested(torch.randn(count, 1, generator=generator).expand(count, response)),
        },
        batch_size=[count],
    )
    tu.assign_non_tensor(
        data,
        temperature=1.0,
        use_remove_padding=True,
        use_dynamic_bsz=True,
        max_token_len_per_gpu=options.micro_batch,
        use_fused_kernels=bool(arm.model),
        global_batch_size=count * options.world,
    )
    return data


# --- measuring ------------------------------------------------------------------------------------------------------


class Collectives(TorchDispatchMode):
    """Output bytes of the collectives that run under it, by kind."""

    KINDS = {name: name for name in ("all_gather", "reduce_scatter", "broadcast")} | {"allgather": "all_gather"}

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name.startswith(("c10d::", "_c10d_functional::")):
            kind = next((kind for part, kind in self.KINDS.items() if part in name), None)
            # c10d writes to its first argument; functional collectives return their output.
            out = args[0] if name.startswith("c10d::") else result
            if kind is not None:
                nbytes = sum(t.nbytes for t in tree_leaves(out) if isinstance(t, Tensor))
                self.bytes[kind] = self.bytes.get(kind, 0) + nbytes
        return result


class Meter:
    """Wall time of a step and, unless ``whole``, of its phases, the device idle at both ends."""

    def __init__(self, whole: bool) -> None:
        self.whole = whole
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self.whole and name != STEP:
            yield
            return
        synchronize()
        started = time.perf_counter()
        yield
        synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def step(engine: Any, loss: Callable, data: Any, whole: bool = False) -> dict[str, float]:
    """One training phase; its seconds and the gradient's norm, which all arms must agree on.  Unless ``whole``, seconds by
    phase too, for which the host waits between them."""
    from verl.utils import tensordict_utils as tu

    meter = Meter(whole)
    masters = getattr(engine, "masters", None)
    data = data.copy()
    dist.barrier()
    with meter.phase(STEP):
        tu.assign_non_tensor(data, calculate_entropy=True)
        with meter.phase("log_prob"), engine.eval_mode():
            output = engine.infer_batch(data, loss_function=None)
        data["old_log_probs"] = responses(output["model_output"]["log_probs"], data)
        tu.assign_non_tensor(data, calculate_entropy=False)
        writing = meter.phase("write") if masters is not None else nullcontext()
        with engine.train_mode():  # on exit it zeroes the gradients, as in verl's worker
            with meter.phase("forward_backward"):
                engine.optimizer_zero_grad()
                engine.forward_backward_batch(data, loss, forward_only=False)
            with meter.phase("optimizer"), timed_write(masters, writing):
                norm = engine.optimizer_step()
    if not whole:
        meter.seconds["optimizer"] -= meter.seconds.setdefault("write", 0.0)
    if not (norm > 0 and norm < float("inf")):
        raise RuntimeError(f"the gradient's norm is {norm}: nothing was trained")
    return meter.seconds | {"grad_norm": norm}


@contextmanager
def timed_write(masters: Any, timer: AbstractContextManager) -> Iterator[None]:
    """Runs the masters' write under ``timer``."""
    if masters is None:
        yield
        return
    write = masters.write

    def timed() -> None:
        with timer:
            write()

    with mock.patch.object(masters, "write", timed):
        yield


def responses(log_probs: Tensor, data: Any) -> Tensor:
    """The response tokens' log-probs, nested, as the trainer's ``old_log_probs``."""
    from verl.workers.utils.padding import no_padding_2_padding

    return torch.nested.as_nested_tensor(list(no_padding_2_padding(log_probs, data).cpu()), layout=torch.jagged)


def gradient_digest(engine: Any, loss: Callable, data: Any) -> str:
    """One hash of all gradients of this rank in a step."""
    from verl.jetrl.weights import combined, digest

    found: list[str] = []

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        found.extend(digest(getattr(p.grad, "_local_tensor", p.grad)) for p in parameters)

    hook = engine.optimizer.register_step_pre_hook(look)
    step(engine, loss, data)
    hook.remove()
    return combined(found)


def measure(name: str, options: Options) -> dict[str, Any]:
    """Everything of one arm on this rank."""
    from benchmarks.traces import training_times
    from benchmarks.train_layers import unfused

    arm, begun = ARMS[name], time.perf_counter()
    if arm.deferred and options.world == 1:
        return {"skipped": "needs several GPUs"}
    config = compose_arm(arm, options)
    plan = too_large(arm, options, config)
    if plan:
        return {"skipped": plan}
    engine, loss = build(arm, options, config)
    result: dict[str, Any] = {"build_seconds": time.perf_counter() - begun, "steps": {}, "phases": {}, "peak": {}}
    release()  # rank 0 held the whole FP32 model: no part of what a step reserves
    with unfused(arm.saved) if arm.saved else nullcontext():
        begun = time.perf_counter()
        step(engine, loss, batch_of(arm, options, options.lengths[0]))  # compiles kernels
        result["first_step_seconds"] = time.perf_counter() - begun
        for index, length in enumerate(options.lengths if arm.thorough else options.lengths[:1]):
            data = batch_of(arm, options, length)
            if index:
                step(engine, loss, batch_of(arm, options, length, 1))
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            result["steps"][length] = [step(engine, loss, data, whole=True) for _ in range(options.steps)]
            result["phases"][length] = [step(engine, loss, data)]
            result["peak"][length] = peak()
        if arm.thorough:
            data = batch_of(arm, options, options.lengths[0], 2)
            digests = [gradient_digest(engine, loss, data) for _ in range(2)]
            result["same_gradient_bits"] = digests[0] == digests[1]
            if torch.cuda.is_available():
                data = batch_of(arm, options, options.lengths[0])
                result["profile"] = training_times(lambda: step(engine, loss, data, whole=True))
        if options.world > 1 and arm.model != "compiled":
            with Collectives() as collectives:  # last: torch.compile does not work under a dispatch mode
                step(engine, loss, batch_of(arm, options, options.lengths[0]))
            result["collective_bytes"] = collectives.bytes
    return result


def release() -> None:
    """Gives memory that nobody uses back to the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def peak() -> dict[str, int]:
    if not torch.cuda.is_available():
        return {"allocated": 0, "reserved": 0}
    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


def too_large(arm: Arm, options: Options, config) -> str:
    """Why the arm would not fit, by the memory plan of what it runs; "" where it does or the plan does not know the arm."""
    from transformers import AutoConfig

    from verl.jetrl.memory_plan import GIB, PHASES, plan_of

    if arm.model or arm.saved:
        return ""
    planned = plan_of(config, AutoConfig.from_pretrained(options.folder))
    if planned is None:
        return ""
    plan, _ = planned
    worst = max(PHASES, key=lambda phase: plan.total(phase, "trainer"))
    needs = plan.total(worst, "trainer")
    return f"needs {needs / GIB:.0f} of {plan.gpu / GIB:.0f} GiB in {worst}" if needs > plan.gpu else ""


def ceilings(options: Options) -> dict[str, float]:
    """TFLOP/s of the fastest GEMM among the linears of a layer, BF16 (cuBLAS) and FP8."""
    from benchmarks.timing import Clock
    from verl.jetrl.fp8 import ops

    device = device_of()
    clock = Clock(device.split(":")[0], options.quick)
    rates: dict[str, float] = {"bf16_tflop_s": 0.0, "fp8_tflop_s": 0.0}
    M = options.micro_batch
    for N, K in linears(options.shapes):
        x, w = (torch.randn(n, K, device=device).bfloat16() for n in (M, N))
        x_q, w_q = ops.quantize_rows(x), ops.quantize_blocks(w)
        runs = {"bf16_tflop_s": lambda _, x=x, w=w: x @ w.t(), "fp8_tflop_s": lambda _, x=x_q, w=w_q: ops.fprop(x, w)}
        for name, run in runs.items():
            us = clock.graph(f"{name} {N}x{K}", run, calls=4)
            rates[name] = max(rates[name], 2 * M * N * K / us / 1e6)
    return rates


def flop_per_token(shapes: dict[str, Any], length: int) -> tuple[float, float]:
    """Of a log-prob pass, a forward and a backward: those of the linears, and those of head and causal attention.  Only what
    predicts a response needs the head, though not every arm leaves the rest out."""
    layers, q = shapes["num_hidden_layers"], shapes["num_attention_heads"] * shapes["head_dim"]
    of_linears = layers * sum(2 * N * K for N, K in linears(shapes))
    head = 2 * shapes["vocab_size"] * shapes["hidden_size"] * (1 - prompt_of(length) / length)
    attention = layers * 4 * q * length / 2
    return 4 * of_linears, 4 * head + (1 + 1 + 2.5) * attention


# --- processes ------------------------------------------------------------------------------------------------------


def worker(rank: int, options: Options, arms: list[str], port: int) -> None:
    """One rank: the arms in turn, each with an engine of its own; rank 0 writes the file."""
    gpu = torch.cuda.is_available()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(options.world))
    backend = "cpu:gloo,cuda:nccl" if gpu else "cpu:gloo"
    if gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=options.world)
    from verl.jetrl import patching
    from verl.jetrl.trainer import attention, flash, losses  # noqa: F401  the losses register themselves

    patching.require_active("verl")
    attention.register()
    flash.register()
    if rank == 0:
        with update(options) as part:
            part["ceilings"] = ceilings(options)
        release()
    for name in arms:
        late = torch.tensor(time.time() > options.deadline, dtype=torch.int32, device=device_of())
        dist.broadcast(late, 0)
        if late.item():
            break
        mine = measure(name, options)
        release()
        everyone: list[dict] = [{} for _ in range(options.world)]
        dist.all_gather_object(everyone, mine)
        if rank == 0:
            with update(options) as part:
                part["arms"][name] = merged(everyone) | {"command": options.command}
            print(name, json.dumps(summary(part["arms"][name], options.world)), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def merged(ranks: list[dict]) -> dict[str, Any]:
    """Rank 0's measurements, with the largest memory of all ranks and whether all found the same gradients again."""
    result = dict(ranks[0])
    for length, of_rank0 in result.get("peak", {}).items():
        result["peak"][length] = {kind: max(r["peak"][length][kind] for r in ranks) for kind in of_rank0}
    if "same_gradient_bits" in result:
        result["same_gradient_bits"] = all(r["same_gradient_bits"] for r in ranks)
    return json.loads(json.dumps(result))  # lengths become strings, as they are in the file


def summary(arm: dict, world: int) -> dict[str, Any]:
    """For the log."""
    medians = {n: {p: round(median(arm, n, p), 3) for p in (*PHASES, STEP, "grad_norm")} for n in arm.get("steps", {})}
    return {k: v for k, v in arm.items() if k in ("skipped", "same_gradient_bits", "collective_bytes", "peak")} | medians


def median(arm: dict, length: str, phase: str = STEP) -> float:
    """Of the steps in which the host does not wait; of phases, of those in which it does (in older files they are the same)."""
    steps = arm.get("phases", arm["steps"]) if phase in PHASES else arm["steps"]
    return statistics.median(step[phase] for step in steps[length])


@contextmanager
def update(options: Options) -> Iterator[dict[str, Any]]:
    """The part's entry under ``samples``, to be changed; the file is written afterwards, figures and tables made anew."""
    result = json.loads(options.out.read_text()) if options.out.exists() else {}
    samples = result.setdefault("samples", {})
    part = samples.setdefault(options.part, {})
    part |= {key: part.get(key, {}) for key in ("ceilings", "arms")}
    part |= {"micro_batch_tokens": options.micro_batch, "micro_batches": MICRO_BATCHES, "gpus": options.world}
    part["shapes"] = options.shapes
    yield part
    gpu = torch.cuda.is_available()
    run = {
        "command": options.command,
        "device": f"{options.world} x {torch.cuda.get_device_name(0)}" if gpu else "cpu",
        "versions": versions(),
    }
    runs = result.get("runs", {}) | {options.part: run}
    write(options.out, run | {"runs": runs, "samples": samples, "jobs": result.get("jobs", {})})


def write(out: Path, result: dict[str, Any]) -> None:
    """Writes the file, figures and tables made anew."""
    from verl.jetrl.checkpoints import write_atomically

    samples, jobs = result["samples"], result["jobs"]
    result |= {"notes": NOTES, "figures": figures(samples) | job_figures(jobs), "tables": {"train": rows(samples)}}
    write_atomically(out, json.dumps(result, indent=1) + "\n")


def add_jobs(out: Path, folder: Path) -> None:
    """Adds the peaks of the runs in ``folder`` (runs/<recipe>) to the file.  Raises ReportError where there are none."""
    from verl.jetrl.memory_plan import gpus
    from verl.jetrl.report import load_arms

    result = json.loads(out.read_text()) if out.exists() else {"runs": {}, "samples": {}}
    jobs = result.setdefault("jobs", {})
    for arm in load_arms(folder):
        if arm.status.state != "finished" or arm.status.peak_device_gb is None:
            print(f"{folder / arm.name}: left out, it is {arm.status.state} or has no peak_device_gb", file=sys.stderr)
            continue
        root = arm.config.actor_rollout_ref
        settings = {
            "model": Path(root.model.path).name,
            "gpus": gpus(arm.config),
            "checkpointing": root.model.enable_gradient_checkpointing,
            "tokens": root.actor.ppo_max_token_len_per_gpu,
            "gpu_memory_utilization": root.rollout.gpu_memory_utilization,
            "length": root.rollout.max_model_len,
            "eager": root.rollout.enforce_eager,
        }
        arena = root.actor.fsdp_config.arena if root.actor.fsdp_config.precision_flow.linear == "fp8" else None
        name = arm.name + ("" if arena in (None, "replicated") else f", arena={arena}")
        peaks = jobs.setdefault(json.dumps(settings), {})
        peaks[name] = {
            "peak_gib": arm.status.peak_device_gb,
            "device": arm.status.device,
            "steps": arm.status.total_steps,
            "command": arm.status.command,
        }
    write(out, result)


def job_figures(jobs: dict[str, dict[str, dict]]) -> dict[str, float]:
    """Peaks of whole runs against bf16's, see NOTES; of several settings the worst."""
    found: dict[str, float] = {}
    for settings, arms in jobs.items():
        peaks = {name: arm["peak_gib"] for name, arm in arms.items()}
        bf16, replicated, sharded = (peaks.get(name) for name in ("bf16", "jetrl", "jetrl, arena=sharded"))
        new = {}
        if json.loads(settings)["checkpointing"]:
            if bf16 and replicated:
                new["job_peak_checkpointing_minus_bf16"] = replicated - bf16
            if bf16 and sharded:
                new["job_peak_sharded_vs_bf16"] = sharded / bf16
        elif bf16 and replicated:
            new["job_peak_vs_bf16"] = replicated / bf16
        found |= {name: max(value, found.get(name, value)) for name, value in new.items()}
    return found


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"cuda": torch.version.cuda}
    for name in ("torch", "triton", "vllm", "verl", "transformers", "flash-attn-4"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


# --- figures --------------------------------------------------------------------------------------------------------


def rows(samples: dict) -> list[dict[str, Any]]:
    """One row per part, arm and sequence length."""
    table = []
    for part_name, part in samples.items():
        tokens = part["gpus"] * part["micro_batches"] * part["micro_batch_tokens"]
        for name, arm in part["arms"].items():
            for length in arm.get("steps", {}):
                seconds = median(arm, length)
                of_linears, rest = (tokens / part["gpus"] * f for f in flop_per_token(part["shapes"], int(length)))
                rate = (of_linears + rest) / seconds / 1e12
                row = {"part": part_name, "arm": name, "length": int(length), "tokens_per_s": tokens / seconds}
                row |= {phase: median(arm, length, phase) for phase in (*PHASES, "grad_norm")}
                row |= {f"peak_{kind}": nbytes for kind, nbytes in arm["peak"][length].items()}
                if part["ceilings"]:
                    bf16, fp8 = part["ceilings"]["bf16_tflop_s"], part["ceilings"]["fp8_tflop_s"]
                    ideal = of_linears / (fp8 if name.startswith("fp8") else bf16) + rest / bf16
                    row |= {"tflop_s": rate, "share_of_bf16_ceiling": rate / bf16, "share_of_fp8_ceiling": rate / fp8}
                    row["share_of_ideal"] = ideal / 1e12 / seconds
                table.append(row)
    return table


def sides(rates: dict[tuple[str, int], float]) -> dict[int, tuple[float, float, float]]:
    """Of tokens/s by arm and length, by length: the fastest BF16 arm's, fp8's, the fastest's of :data:`FP8_SETTINGS`."""
    found = {}
    for length in sorted({n for _, n in rates}):
        bf16 = max((rate for (arm, n), rate in rates.items() if arm.startswith("bf16") and n == length), default=0.0)
        if bf16 and ("fp8", length) in rates:
            fp8 = rates["fp8", length]
            found[length] = (bf16, fp8, max(rates.get((arm, length), 0.0) for arm in FP8_SETTINGS))
    return found


def figures(samples: dict) -> dict[str, float]:
    """The headline numbers of all parts in the file."""
    found: dict[str, float] = {}
    table = rows(samples)
    for part_name, part in samples.items():
        rates = {(r["arm"], r["length"]): r["tokens_per_s"] for r in table if r["part"] == part_name}
        fastest = sides(rates)
        ratios = {length: fp8 / bf16 for length, (bf16, _, fp8) in fastest.items()}
        if ratios:
            bf16, default, _ = fastest[min(fastest)]
            found[f"train_vs_bf16_{part_name}_default"] = default / bf16
            found[f"train_vs_bf16_{part_name}"] = ratios[min(ratios)]
            found[f"train_vs_bf16_{part_name}_worse"] = min(ratios.values())
            found |= {f"train_vs_bf16_{part_name}_{length}": ratio for length, ratio in ratios.items()}
        shortest = min((n for _, n in rates), default=0)
        checkpointed = [rates.get((f"{name}_checkpointing", shortest), 0.0) for name in ("bf16", "bf16_fused")]
        if any(checkpointed) and ("fp8_checkpointing", shortest) in rates:
            found[f"train_vs_bf16_{part_name}_checkpointing"] = rates["fp8_checkpointing", shortest] / max(checkpointed)
        for other in ("fp8_unfused", "fp8_bf16_saved", "fp8_requantized"):
            if (other, shortest) in rates and ("fp8", shortest) in rates:
                found[f"{other}_vs_fp8_{part_name}"] = rates[other, shortest] / rates["fp8", shortest]
        found |= {f"{name}_{part_name}": rate for name, rate in part["ceilings"].items()}
        gathered = {n: a["collective_bytes"].get("all_gather", 0) for n, a in part["arms"].items() if "collective_bytes" in a}
        as_it_comes = ("bf16", "bf16_fused", "bf16_checkpointing", "bf16_fused_checkpointing")  # all gather the same
        bf16 = next((gathered[n] for n in as_it_comes if gathered.get(n)), None)
        if bf16 and "fp8" in gathered:
            found["gather_bytes_vs_bf16"] = gathered["fp8"] / bf16
    checked = [a["same_gradient_bits"] for p in samples.values() for n, a in p["arms"].items()
               if n.startswith("fp8") and "same_gradient_bits" in a]  # fmt: skip
    if checked:
        found["same_gradient_bits"] = float(all(checked))
    return found


def report(result: dict) -> str:
    """Figures and rows in Markdown, under the commands that measured them."""
    from benchmarks.tables import markdown

    parts = [f"`{run['command']}` on {run['device']}:" for run in result["runs"].values()]
    parts.append(markdown(["figure", "value"], [[k, v] for k, v in result["figures"].items()]))
    parts += [
        profiles(part, of["arms"]) for part, of in result["samples"].items() if any("profile" in a for a in of["arms"].values())
    ]
    shares = [f"share_of_{what}" for what in ("bf16_ceiling", "fp8_ceiling", "ideal")]
    columns = ["part", "arm", "length", "tokens_per_s", *PHASES, "grad_norm", *shares]
    lines = []
    for row in result["tables"]["train"]:
        memory = [f"{row[f'peak_{kind}'] / 2**30:.1f}" for kind in ("allocated", "reserved")]
        lines.append([row.get(c) for c in columns] + memory)
    parts.append(markdown([*columns, "allocated_gib", "reserved_gib"], lines))
    for part, values in result["samples"].items():
        parts += [f"{part} {n}: {a[k]}" for n, a in values["arms"].items() for k in ("skipped", "error") if k in a]
    return "\n\n".join(parts)


def headlines(result: dict) -> str:
    """Both sides at their fastest settings, in Markdown."""
    from benchmarks.tables import markdown

    table, lines = rows(result["samples"]), []
    for part, of in result["samples"].items():
        rates = {(r["arm"], r["length"]): r["tokens_per_s"] for r in table if r["part"] == part}
        for length, (bf16, default, fp8) in sides(rates).items():
            case = f"Qwen3-{part.upper()} shapes, {of['gpus']} GPU{'s' * (of['gpus'] > 1)}, sequences of {length}"
            lines.append([case, bf16, default, fp8, f"{fp8 / bf16:.2f}x"])
    return markdown(
        ["training phase, tokens/s", "BF16, fastest settings", "FP8, default", "FP8, fastest", "FP8 vs BF16"], lines
    )


def profiles(part: str, arms: dict[str, dict]) -> str:
    """Kernel times of one step by kind, arms side by side; streams overlap.  "" where no arm has them.

    The profiler slows the host, so what is left without a kernel is counted of the steps that ran without it.  Left out where
    the profiled step was busy for longer than those lasted: its collectives waited for another GPU's host.
    """
    from benchmarks.tables import markdown
    from benchmarks.traces import IDLE

    times = {}
    for name, arm in arms.items():
        if "profile" in arm:
            times[name] = dict(arm["profile"]["ms_per_step"])
            if "busy_ms_per_step" in arm["profile"]:  # files of before have the profiled step's
                idle = 1e3 * median(arm, next(iter(arm["steps"]))) - arm["profile"]["busy_ms_per_step"]
                times[name][IDLE] = idle if idle > 0 else None
    if not times:
        return ""
    kinds = list(dict.fromkeys(kind for of in times.values() for kind in of))
    rows = [[kind, *(of.get(kind) for of in times.values())] for kind in kinds]
    return f"Kernels of a step, {part}, ms:\n\n" + markdown(["kernels", *times], rows)


# --- command line ---------------------------------------------------------------------------------------------------


def run_part(options: Options, arms: list[str], add: bool) -> None:
    """The arms of a part; those left after one that failed go on in new processes."""
    from verl.jetrl.environment import machine_environment

    wanted = machine_environment("gpu" if torch.cuda.is_available() else "cpu")
    # As verl has it in a run from the first weight update on.
    wanted["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    os.environ.update({name: os.environ.get(name, value) for name, value in wanted.items()})
    save_config(options.folder, options.shapes)
    with update(options) as part:
        part["ceilings"] = {}
        part["arms"] = {k: v for k, v in part["arms"].items() if add and k not in arms}
    left = list(arms)
    while left and time.time() < options.deadline:
        failed = ""
        try:
            mp.spawn(worker, (options, left, free_port()), nprocs=options.world)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            print(error, file=sys.stderr, flush=True)
            failed = str(error).strip().splitlines()[-1]
        with update(options) as part:
            left = [name for name in left if name not in part["arms"]]
            if failed and left:
                part["arms"][left.pop(0)] = {"error": failed, "command": options.command}
        if not failed:
            break
    if left:
        print(f"{options.part}: out of time, not run: {', '.join(left)}", flush=True)


def free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def integers(text: str) -> list[int]:
    """Numbers separated by commas."""
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--parts", help="8b, 4b or both; default: those that the visible GPUs suffice for")
    parser.add_argument("--arms", default=",".join(ARMS), help=f"of {', '.join(ARMS)}")
    parser.add_argument("--add", action="store_true", help="keep the part's other arms of an earlier run in --out")
    parser.add_argument("--lengths", type=integers, default="4096,8192", help="of sequences in tokens, the first for all arms")
    parser.add_argument("--micro-batch", type=int, default=8192, help="tokens of a micro-batch on a GPU; a step has four")
    parser.add_argument("--steps", type=int, default=3, help="timed steps per arm and length")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further arm after so many seconds")
    parser.add_argument("--quick", action="store_true", help="tiny shapes and one timed step: checks the script itself")
    parser.add_argument("--jobs", type=Path, help="only add the peaks of whole runs, a folder such as runs/qwen3-8b")
    parser.add_argument("--docs", action="store_true", help="only write the tables of --out into docs/training.md, README.md")
    args = parser.parse_args()
    if args.docs:
        from benchmarks.tables import fill, result_of

        result = result_of(args.out)
        fill(ROOT / "README.md", {"train_summary": headlines(result)})
        return fill(ROOT / "docs" / "training.md", {"train": report(result)})
    if args.jobs:
        from verl.jetrl.report import ReportError

        try:
            return add_jobs(args.out, args.jobs)
        except ReportError as error:
            parser.error(f"--jobs: {error}")
    gpus = torch.cuda.device_count()
    if not gpus and not args.quick:
        sys.exit("benchmarks.train needs Hopper GPUs; --quick --out FILE checks the script on a CPU")
    arms = args.arms.split(",")
    unknown = [name for name in arms if name not in ARMS]
    if unknown:
        parser.error(f"unknown arms {unknown}; there are {', '.join(ARMS)}")
    parts = args.parts.split(",") if args.parts else [part for part, (world, _) in PARTS.items() if world <= max(gpus, 1)]
    deadline = time.time() + args.seconds
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"unknown parts {unknown}; there are {', '.join(PARTS)}")
    for part in parts:
        world, shapes = PARTS[part]
        if gpus and world > gpus:
            parser.error(f"part {part} needs {world} GPUs, {gpus} are visible")
        shapes = shapes | (TINY if args.quick else {}) | ({"num_hidden_layers": args.layers} if args.layers else {})
        options = Options(
            part=part,
            world=world,
            shapes=shapes,
            lengths=[32, 64] if args.quick else args.lengths,
            micro_batch=128 if args.quick else args.micro_batch,
            steps=1 if args.quick else args.steps,
            folder=Path(f"/tmp/jetrl-bench-train-{os.getpid()}-{part}"),
            out=args.out,
            command=" ".join(["python -m benchmarks.train", *sys.argv[1:]]),
            deadline=deadline,
            quick=args.quick,
        )
        try:
            run_part(options, arms, args.add)
        finally:
            shutil.rmtree(options.folder, ignore_errors=True)
    print(report(json.loads(args.out.read_text())))


if __name__ == "__main__":
    main()
