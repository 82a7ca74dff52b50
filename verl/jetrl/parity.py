"""Where do rollout and trainer differ?  Runs prompts through both and names the first operator whose bits do.

    python -m verl.jetrl.parity recipes/tiny/model --prompts 24 --tokens 40 --temperature 0.7
    make parity MODEL=recipes/tiny/model

The engine is vLLM with its real scheduler: prompts of different lengths, prefill in chunks beside decode, prefix cache,
preemption when the KV cache is small.  Every token it computes is looked up among the rows that the trainer computes for the
same sequences, and so are the logits of the whole vocabulary.  Operators are compared without CUDA graphs; ``--compiled``
compares log-probs with compilation and CUDA graphs on.  Exits 1 when anything differs.

``--updates N`` compares before any update, takes N optimizer steps on what was sampled, the engine asleep meanwhile, and
compares once more.  Weights that did not arrive anywhere would compare as equal too: so what was sampled before the updates
must have other log-probs afterwards.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from verl.jetrl.checkpoints import writable, write_atomically

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from verl.jetrl.model.decoder import Decoder
    from verl.jetrl.trainer.masters import Masters

STEP = 0.01  # of its norm, that an update moves each weight by: FP8 weights are certain to change, the policy stays broad
SHAPES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "tie_word_embeddings",
)  # fmt: skip
_WEIGHT = 0x2545F4914F6CDD1D  # odd: multiplying by it and its powers spreads every bit


def row_hashes(rows: Tensor) -> Tensor:
    """A 64-bit hash of each row (M, ...) of 2-byte values, on the CPU."""
    words = rows.detach().reshape(len(rows), -1).contiguous().view(torch.int16).to(torch.int64)
    weights = torch.cumsum(torch.full((words.shape[1],), _WEIGHT, dtype=torch.int64, device=words.device), 0)
    mixed = (words + weights) * (weights ^ (weights >> 31) | 1)
    return ((mixed ^ (mixed >> 29)) * _WEIGHT).sum(1).cpu()


LAST = {"final norm": 10**6, "logits": 10**6 + 1}  # behind all layers


class Recorder:
    """Taps a decoder's operators: per layer and operator, the hash of each row and its position."""

    def __init__(self, body: torch.nn.Module) -> None:
        self.rows: dict[tuple[int, str], dict[int, int]] = {}
        self._modules = [(-1, body), *enumerate(body.layers)]
        for index, module in self._modules:
            module.tap = self._tap(index)

    def _tap(self, index: int) -> Callable[[str, Tensor, Tensor], None]:
        def tap(operator: str, rows: Tensor, positions: Tensor) -> None:
            layer = LAST.get(operator, index)
            seen = self.rows.setdefault((layer, operator), {})
            seen.update(zip(row_hashes(rows).tolist(), positions.tolist(), strict=True))

        return tap

    def take(self) -> dict[tuple[int, str], dict[int, int]]:
        """What was recorded; stops recording."""
        for _, module in self._modules:
            module.tap = None
        return self.rows


class Difference(NamedTuple):
    """Rows of the rollout that the trainer never computed: how many of how many, and the first one's position."""

    layer: int
    operator: str
    rows: int
    of: int
    position: int


def differences(trainer: dict, rollout: dict) -> list[Difference]:
    """One entry per layer and operator in which the rollout has rows of its own, in the order of computation."""
    found = []
    order = list(dict.fromkeys(operator for _, operator in trainer))
    for layer, operator in sorted(rollout, key=lambda key: (key[0], order.index(key[1]))):
        mine, theirs = trainer[layer, operator], rollout[layer, operator]
        own = {h: p for h, p in theirs.items() if h not in mine}
        if own:
            found.append(Difference(layer, operator, len(own), len(theirs), min(own.values())))
    return found


def table(trainer: dict, rollout: dict) -> str:
    """Operators, with the number of rows compared over all layers, and where they first differ."""
    found = differences(trainer, rollout)
    lines = [f"{'operator':40}{'rows':>10}  equal"]
    for operator in dict.fromkeys(operator for _, operator in trainer):
        rows = sum(len(rows) for (_, name), rows in rollout.items() if name == operator)
        first = next((d for d in found if d.operator == operator), None)
        where = (
            "yes"
            if first is None
            else f"NO: {first.rows} of {first.of} rows"
            if first.layer in LAST.values()
            else f"NO: {first.rows} of {first.of} rows, first in layer {first.layer} at position {first.position}"
        )
        lines.append(f"{operator:40}{rows:>10}  {where}")
    return "\n".join(lines)


@torch.no_grad()
def shake(model: nn.Module, norms: float = 0.1, biases: float = 0.1) -> nn.Module:
    """Adds noise to the norms and sets the biases of ``model``: at the ones and zeros that Hugging Face starts with, a lost
    one would not show."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(std=biases)
        elif parameter.dim() == 1:
            parameter.add_(norms * torch.randn_like(parameter))
    return model


def device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def random_weights(config: PretrainedConfig, attention: str) -> nn.Module:
    """The FP32 model of ``config``, the same weights each time, made where they are needed."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with device():
        return shake(AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention), norms=0.3)


def trainer_side(load: Callable[[str], nn.Module]) -> tuple[nn.Module, Decoder, Masters]:
    """The trainer's model, decoder and masters on an arena that the engine maps; its "logits" are the final hidden states.

    ``load(attention)``: the FP32 Hugging Face model with the attention of that name.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from verl.jetrl.arena import Arena, layout_of
    from verl.jetrl.model.decoder import Decoder
    from verl.jetrl.trainer import attention, flash
    from verl.jetrl.trainer.decoder import share_decoder
    from verl.jetrl.trainer.masters import Masters, shard_parameters

    attention.register()
    flash.register()
    here = device()
    backend = "cpu:gloo,cuda:nccl" if here.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    name = flash.NAME if here.type == "cuda" else attention.EXACT
    model = load(name).eval()
    decoder = Decoder(model.config)
    share_decoder(model, decoder, with_head=False)
    shard_parameters(model, init_device_mesh(here.type, (1,)), here)
    arena = Arena.create(layout_of(model.config), here, 0)
    atexit.register(arena.close)
    decoder.bind(arena)
    masters = Masters(model, decoder, arena)
    masters.write()
    return model, decoder, masters


def engine_side(model_path: Path, args: argparse.Namespace) -> Any:
    from vllm import LLM

    from verl.jetrl.rollout import vllm_model, vllm_quant

    limits = {"kv_cache_memory_bytes": args.kv_mb * 2**20} if args.kv_mb else {}
    if not torch.cuda.is_available():
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    return LLM(
        model=str(model_path),
        load_format=vllm_model.LOAD_FORMAT,
        dtype="bfloat16",
        quantization=vllm_quant.METHOD,
        hf_overrides={
            "architectures": [vllm_model.ARCHITECTURE],
            "quantization_config": {"quant_method": vllm_quant.METHOD, "exact": not args.not_exact},
        },
        enforce_eager=not args.compiled,
        enable_chunked_prefill=torch.cuda.is_available(),
        max_model_len=args.prompt + args.tokens,
        max_num_batched_tokens=max(args.batched_tokens, 0 if torch.cuda.is_available() else args.prompt + args.tokens),
        max_num_seqs=args.prompts,
        gpu_memory_utilization=0.3,
        enable_sleep_mode=bool(args.updates) and torch.cuda.is_available(),
        skip_tokenizer_init=args.random,
        logprobs_mode="processed_logprobs",
        worker_extension_cls="verl.jetrl.rollout.worker_extension.JetRLWorkerExtension",
        **limits,
    )


class Sample(NamedTuple):
    """A prompt, the response that the engine sampled, and the log-probs it gave."""

    prompt: list[int]
    response: list[int]
    log_probs_M: Tensor


class Sides(NamedTuple):
    """Trainer and engine on the same arena."""

    model: nn.Module
    decoder: Decoder
    masters: Masters
    engine: Any
    vocabulary: int  # ids from here on are padding


def both_sides(args: argparse.Namespace) -> Sides:
    """Starts both; the engine has the weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from verl.jetrl.arena import ENGINE

    if args.random:
        load = partial(random_weights, AutoConfig.from_pretrained(args.model))
    else:
        pretrained = partial(AutoModelForCausalLM.from_pretrained, args.model, dtype=torch.float32)
        load = lambda attention: pretrained(attn_implementation=attention)  # noqa: E731
    model, decoder, masters = trainer_side(load)
    masters.arena.control.hand_over(ENGINE)
    engine = engine_side(args.model, args)
    vocabulary = model.config.vocab_size if args.random else len(engine.get_tokenizer())
    engine.collective_rpc("monkey_patch_model", kwargs={"vocab_size": vocabulary})
    return Sides(model, decoder, masters, engine, vocabulary)


def prompts_of(args: argparse.Namespace, vocabulary: int) -> list[list[int]]:
    """Random prompts of many lengths; every third begins as the first does."""
    generator = torch.Generator().manual_seed(args.seed)
    lengths = torch.randint(1, args.prompt + 1, (args.prompts,), generator=generator).tolist()
    asked = [torch.randint(vocabulary, (n,), generator=generator).tolist() for n in lengths]
    asked[1::3] = [asked[0][: len(p)] + p[len(asked[0]) :] for p in asked[1::3]]
    return asked


def generate(engine: Any, asked: list[list[int]], args: argparse.Namespace) -> list[Sample]:
    from vllm import SamplingParams

    settings = dict(temperature=args.temperature, max_tokens=args.tokens, ignore_eos=True, logprobs=0)
    params = [SamplingParams(**settings, seed=i, detokenize=not args.random) for i in range(len(asked))]
    samples = []
    for prompt, output in zip(asked, engine.generate([{"prompt_token_ids": p} for p in asked], params), strict=True):
        (answer,) = output.outputs
        response = list(answer.token_ids)
        chosen = [step[token].logprob for step, token in zip(answer.logprobs, response, strict=True)]
        samples.append(Sample(prompt, response, torch.tensor(chosen)))
    return samples


def trainers_log_probs(sides: Sides, sample: Sample, temperature: float) -> Tensor:
    """The trainer's log-probs (M,) of a response.  A recorder also sees the logits of the whole vocabulary, of every token."""
    from verl.jetrl.trainer.log_probs import log_probs

    ids = torch.tensor([sample.prompt + sample.response], device=sides.masters.arena.data.device)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    hidden = sides.model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
    if sides.decoder.model.tap is not None:
        for few in hidden.split(128):
            sides.decoder.head(few)
    start = len(sample.prompt)
    temperatures = torch.full((len(sample.response),), temperature, device=ids.device)
    return log_probs(hidden[start - 1 : -1], sides.decoder.lm_head, ids[0, start:], temperatures, sides.vocabulary)[0]


@torch.no_grad()
def gaps(sides: Sides, samples: list[Sample], temperature: float) -> Tensor:
    """|delta log p| of every sampled token: what the engine gave against what the trainer's weights give now."""
    return torch.cat([(trainers_log_probs(sides, s, temperature).cpu() - s.log_probs_M).abs() for s in samples])


def compare(sides: Sides, asked: list[list[int]], args: argparse.Namespace) -> tuple[dict[str, Any], list[Sample]]:
    """Samples and compares, prints what it finds and returns it, with the samples."""
    record = not args.compiled
    if record:
        sides.engine.collective_rpc("jetrl_record", args=(True,))
    samples = generate(sides.engine, asked, args)
    rollout, trainer, found = {}, {}, []
    if record:
        (rollout,) = sides.engine.collective_rpc("jetrl_record", args=(False,))
        recorder = Recorder(sides.decoder.model)
    gaps_M = gaps(sides, samples, args.temperature)
    if record:
        trainer = recorder.take()
        found = differences(trainer, rollout)
        print(table(trainer, rollout))
    worst = gaps_M.max().item()  # NaN where one is
    print(f"log-probs of {len(gaps_M)} sampled tokens: largest difference {worst:.3e}", flush=True)
    operators = dict.fromkeys(operator for _, operator in trainer)
    rows = {name: sum(len(rows) for (_, of), rows in rollout.items() if of == name) for name in operators}
    stage = {
        "max_abs_dlogp": worst,
        "sampled_tokens": len(gaps_M),
        "mean_log_prob": torch.cat([s.log_probs_M for s in samples]).mean().item(),
        "rows": rows,
        "different_rows": {name: sum(d.rows for d in found if d.operator == name) for name in operators},
        "equal": worst == 0 and not found and all(rows.values()),  # an operator without rows was not compared
    }
    return stage, samples


def update(sides: Sides, samples: list[Sample], temperature: float, seed: int) -> None:
    """One optimizer step on ``samples`` with random advantages while the engine sleeps, from the lease's way to the trainer
    to the engine that has woken with the new weights."""
    from verl.jetrl.arena import ENGINE, TRAINER

    sleeps, control = torch.cuda.is_available(), sides.masters.arena.control  # vLLM's CPU engine has no sleep mode
    if sleeps:
        sides.engine.sleep(level=2)
    control.hand_over(TRAINER)
    train(sides, samples, temperature, seed)
    sides.masters.write()
    gc.collect()
    if sleeps:
        torch.cuda.empty_cache()  # gradients' memory is the KV cache's now
    control.hand_over(ENGINE)
    if sleeps:
        sides.engine.wake_up(tags=["weights"])
        sides.engine.wake_up(tags=["kv_cache"])
    sides.engine.reset_prefix_cache()


def moved(sides: Sides, first: list[Sample], temperature: float, equal: bool) -> dict[str, Any]:
    """How far the updates moved the log-probs of what was ``first`` sampled, printed; not equal where they did not."""
    mean = gaps(sides, first, temperature).mean().item()
    print(f"what was sampled before the updates: log-probs have moved by {mean:.3e} on average", flush=True)
    if not mean > 0:
        print("the updates did not reach the weights that both sides compute with: that those are equal says nothing")
    return {"stale_mean_abs_dlogp": mean, "equal": equal and mean > 0}


def train(sides: Sides, samples: list[Sample], temperature: float, seed: int) -> None:
    """Moves every master by :data:`STEP` of its norm along its gradient, response by response and without optimizer states:
    masters and gradients of 8B weights fill half of a GPU already."""
    advantages = torch.randn(len(samples), generator=torch.Generator().manual_seed(seed)).tolist()
    sides.masters.zero_grad()
    for sample, advantage in zip(samples, advantages, strict=True):
        (-advantage * trainers_log_probs(sides, sample, temperature).sum()).backward()
    sides.masters.assign_grads()
    with torch.no_grad():
        for name, parameter in sides.masters.parameters.items():
            weight, grad = parameter.to_local(), parameter.grad.to_local()
            slope = torch.linalg.vector_norm(grad).item()
            if not 0 < slope < float("inf"):
                raise RuntimeError(f"the gradient of {name} has norm {slope}: no update that changes the weights")
            weight.add_(grad, alpha=-STEP * torch.linalg.vector_norm(weight).item() / slope)
    sides.masters.drop_grads()


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All stages, printed; what ``--json`` gets, after each."""
    sides = both_sides(args)
    asked, config = prompts_of(args, sides.vocabulary), sides.model.config
    outcome: dict[str, Any] = {
        "model_type": config.model_type,
        "shapes": {name: getattr(config, name) for name in SHAPES},
        "settings": {name: value for name, value in vars(args).items() if name not in ("model", "json")},
        "stages": {},
    }

    def stage(updates: int) -> tuple[dict[str, Any], list[Sample]]:
        if args.updates:
            print(f"{updates} updates:", flush=True)
        return compare(sides, asked, args)

    def keep(updates: int, found: dict[str, Any]) -> None:
        outcome["stages"][f"{updates} updates"] = found
        stages = outcome["stages"].values()
        outcome["equal"] = len(stages) == 1 + bool(args.updates) and all(s["equal"] for s in stages)
        if args.json:
            write_atomically(args.json, json.dumps(outcome, indent=1) + "\n")

    found, first = stage(0)
    keep(0, found)
    if args.updates:
        for index in range(args.updates):
            update(sides, generate(sides.engine, asked, args) if index else first, args.temperature, args.seed + index)
        found, _ = stage(args.updates)
        keep(args.updates, found | moved(sides, first, args.temperature, found["equal"]))
    return outcome


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m verl.jetrl.parity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of a Hugging Face checkpoint (Qwen3, Qwen2.5 or Llama)")
    parser.add_argument("--updates", type=int, default=0, help="optimizer steps after which both sides are compared once more")
    parser.add_argument("--random", action="store_true", help="the folder has config.json alone: random weights, no tokenizer")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--prompt", type=int, default=40, help="longest prompt, tokens")
    parser.add_argument("--tokens", type=int, default=40, help="response length")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument(
        "--batched-tokens", type=int, default=64, help="tokens per engine step: small ones cut prompts into chunks"
    )
    parser.add_argument("--kv-mb", type=int, default=0, help="size of the KV cache: a small one preempts (GPU)")
    parser.add_argument("--compiled", action="store_true", help="compilation and CUDA graphs on; compares log-probs only")
    parser.add_argument("--not-exact", action="store_true", help="vLLM's own attention, as without exact mode")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    for option, least in {"prompts": 1, "prompt": 1, "tokens": 1, "batched_tokens": 1, "updates": 0, "kv_mb": 0}.items():
        if getattr(args, option) < least:
            parser.error(f"--{option.replace('_', '-')} {getattr(args, option)}: it must be {least} or more")
    if not 0 < args.temperature < float("inf"):
        parser.error(f"--temperature {args.temperature}: it must be above 0")
    if args.json and (args.json.is_dir() or not writable(args.json.resolve().parent)):
        parser.error(f"--json {args.json} cannot be written")

    from verl.jetrl import preflight
    from verl.jetrl.compose import RecipeError, machine
    from verl.jetrl.environment import RUN_ID, machine_environment, run_tmp

    try:
        here = machine()
    except RecipeError as error:
        parser.error(str(error))
    model, found = preflight.folder(args.model, whole=not args.random)
    if not found:
        found = preflight.decoder(model)
    if not found and args.prompt + args.tokens > model.max_position_embeddings:
        found = [f"--prompt + --tokens exceeds its max_position_embeddings {model.max_position_embeddings}"]
    if found:
        parser.error(f"{args.model}: {'; '.join(found)}")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the arena's files go
    run_id = f"parity-{os.getpid()}"
    os.environ.update({**machine_environment(here), **os.environ, RUN_ID: run_id})
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # this process has a CUDA context
    atexit.register(shutil.rmtree, run_tmp(run_id), ignore_errors=True)
    equal = run(args)["equal"]
    print("equal" if equal else "NOT equal")
    return int(not equal)


if __name__ == "__main__":
    sys.exit(main())
