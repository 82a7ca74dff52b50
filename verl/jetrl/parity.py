"""Where do rollout and trainer differ?  Runs prompts through both and names the first operator whose bits do.

    python -m verl.jetrl.parity recipes/tiny/model --prompts 24 --tokens 40 --temperature 0.7
    make parity MODEL=recipes/tiny/model

The engine is vLLM with its real scheduler: prompts of different lengths, prefill in chunks beside decode, prefix cache,
preemption when the KV cache is small.  Every token it computes is looked up among the rows that the trainer computes for the
same sequences, and so are the logits of the whole vocabulary.  Operators are compared without CUDA graphs; ``--compiled``
compares log-probs with compilation and CUDA graphs on.  Exits 1 when anything differs.
"""

from __future__ import annotations

import argparse
import atexit
import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from verl.jetrl.model.decoder import Decoder
    from verl.jetrl.trainer.masters import Masters

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
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    name = flash.NAME if device.type == "cuda" else attention.EXACT
    model = load(name).eval()
    decoder = Decoder(model.config)
    share_decoder(model, decoder, with_head=False)
    shard_parameters(model, init_device_mesh(device.type, (1,)), device)
    arena = Arena.create(layout_of(model.config), device, 0)
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
        logprobs_mode="processed_logprobs",
        worker_extension_cls="verl.jetrl.rollout.worker_extension.JetRLWorkerExtension",
        **limits,
    )


def compare(args: argparse.Namespace) -> tuple[dict, dict, float, int]:
    """Rows of trainer and rollout, the largest |delta log p|, and how many tokens were sampled."""
    from transformers import AutoModelForCausalLM
    from vllm import SamplingParams

    from verl.jetrl.trainer.log_probs import log_probs

    load = partial(AutoModelForCausalLM.from_pretrained, args.model, dtype=torch.float32)
    model, decoder, masters = trainer_side(lambda name: load(attn_implementation=name))
    engine = engine_side(args.model, args)
    vocabulary = len(engine.get_tokenizer())
    engine.collective_rpc("monkey_patch_model", kwargs={"vocab_size": vocabulary})
    if not args.compiled:
        engine.collective_rpc("jetrl_record", args=(True,))
    generator = torch.Generator().manual_seed(args.seed)
    lengths = torch.randint(1, args.prompt + 1, (args.prompts,), generator=generator).tolist()
    asked = [torch.randint(vocabulary, (n,), generator=generator).tolist() for n in lengths]
    asked[1::3] = [asked[0][: len(p)] + p[len(asked[0]) :] for p in asked[1::3]]  # shared prefixes
    params = [
        SamplingParams(temperature=args.temperature, max_tokens=args.tokens, ignore_eos=True, logprobs=0, seed=i)
        for i in range(len(asked))
    ]
    outputs = engine.generate([{"prompt_token_ids": p} for p in asked], params)
    rollout = {} if args.compiled else engine.collective_rpc("jetrl_record", args=(False,))[0]
    recorder = Recorder(decoder.model)
    worst, sampled = 0.0, 0
    with torch.no_grad():
        for prompt, output in zip(asked, outputs, strict=True):
            response = list(output.outputs[0].token_ids)
            ids = torch.tensor([prompt + response], device=masters.arena.data.device)
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
            hidden = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
            if rollout:
                for few in hidden.split(128):  # the whole vocabulary's, of every position
                    decoder.head(few)
            hidden = hidden[len(prompt) - 1 : -1]
            temperature = torch.full((len(response),), args.temperature, device=ids.device)
            mine, _ = log_probs(hidden, decoder.lm_head, ids[0, len(prompt) :], temperature, vocabulary)
            theirs = torch.tensor([step[t].logprob for step, t in zip(output.outputs[0].logprobs, response, strict=True)])
            worst = max(worst, (mine.cpu() - theirs).abs().max().item())
            sampled += len(response)
    return recorder.take(), rollout, worst, sampled


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m verl.jetrl.parity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of a Hugging Face checkpoint (Qwen3, Qwen2.5 or Llama)")
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
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the arena's files go

    from verl.jetrl.compose import machine
    from verl.jetrl.environment import RUN_ID, machine_environment, run_tmp

    run_id = f"parity-{os.getpid()}"
    os.environ.update({**machine_environment(machine()), **os.environ, RUN_ID: run_id})
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # this process has a CUDA context
    atexit.register(shutil.rmtree, run_tmp(run_id), ignore_errors=True)
    trainer, rollout, worst, sampled = compare(args)
    if rollout:
        print(table(trainer, rollout))
    print(f"log-probs of {sampled} sampled tokens: largest difference {worst:.3e}")
    different = bool(differences(trainer, rollout)) if rollout else False
    print("equal" if worst == 0 and not different else "NOT equal")
    return int(worst != 0 or different)


if __name__ == "__main__":
    sys.exit(main())
