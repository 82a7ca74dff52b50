"""Rollout speed, weight update and mismatch of the three arms, engine by engine, in one run on one Hopper GPU.

    python -m benchmarks.rollout                       # Qwen3-8B shapes, random weights -> rollout, sync, mismatch .json
    python -m benchmarks.rollout --layers 2 --quick    # checks the script itself
    python -m benchmarks.rollout --arms jetrl_exact --add    # adds an arm to the results of before
    python -m benchmarks.rollout --model models/SmolLM2-135M-Instruct    # mismatch of a pretrained model, added to the results
    python -m benchmarks.rollout --docs                      # writes their tables into docs/rollout.md and README.md

This process plays the trainer: it holds FP32 masters, under FSDP2 for the stock arms and behind the weight arena for
jetrl, and no optimizer states.  Each engine runs in a process of its own, with the same KV cache, batch limits, CUDA-graph
sizes and sleep mode.  Stock weight updates go through verl's own export, bucketed CUDA IPC and (FP8) re-quantization.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import traceback
import types
from contextlib import closing
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from benchmarks.engines import ZMQ_HANDLE, Engine, Settings
from benchmarks.shapes import QWEN3_8B, linears, save_config
from benchmarks.tables import fill, markdown, result_of
from benchmarks.traces import PREFILL, STEPS, kernel_times
from verl.jetrl.environment import KERNEL_CACHE
from verl.jetrl.preflight import stock_fp8_problems

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
GB = 2**30
CASES = {"64": (64, 256, 512), "256": (256, 256, 512), "2k": (64, 2048, 2048)}
ARMS = ("bf16", "stock_fp8", "jetrl", "jetrl_exact")
NOTES = {
    "engines": "vLLM with torch.compile, full and piecewise CUDA graphs, no prefix cache; the same KV-cache bytes for all; "
    "GEMM kernels compiled beforehand.",
    "stock_fp8": "vLLM's block FP8 (128x128, FP32 scales: VLLM_USE_DEEP_GEMM_E8M0=0) with its DeepGEMM kernels.",
    "publish_seconds": "from the end of optimizer.step, device synchronized, until the engine's weights are the new ones and "
    "both sides' version says so; the hash is due every verify_weights_every updates, and counted for its share of them "
    "(with _hashed, in full). Stock: export, transfer, re-quantization (for FP8).",
    "ready_seconds": "the same start, until the engine can schedule a request: wake-up of weights and KV cache included.",
    "weight_bytes_vs_one_copy": "FP8 and BF16 weight bytes that trainer and engine hold on the GPU, the largest transposed "
    "layer's scratch included, over one FP8 copy with scales plus the BF16 rest.",
    "jetrl_resident": "without hash; transposed weights stay on the GPU (fsdp_config.resident_transposed) and are made anew.",
    "exact": "precision_flow.exact: one split of attention in the rollout; everything else as in jetrl.",
    "mismatch": "mean |log p(rollout) - log p(trainer)| of the sampled tokens, same weights, no update in between; trainers "
    "use the same FlashAttention; FP32 log-softmax.",
}


class Trainer:
    """FP32 masters, of random weights or a checkpoint's; first as verl's FSDP2 trainer has them, then behind an arena."""

    def __init__(self, layers: int, folder: Path, shapes: dict[str, Any] = QWEN3_8B, pretrained: bool = False) -> None:
        from verl.jetrl.trainer import flash

        flash.register()
        self.mesh = init_device_mesh("cuda", (1,))
        self.module = self._pretrained(folder) if pretrained else self._random(layers, folder, shapes)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
        for layer in self.module.model.layers:
            fully_shard(layer, mesh=self.mesh, mp_policy=policy, reshard_after_forward=True)
        fully_shard(self.module, mesh=self.mesh, mp_policy=policy)
        self.masters: Any = None

    def _pretrained(self, folder: Path) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="jetrl_fa3").cuda()

    def _random(self, layers: int, folder: Path, shapes: dict[str, Any]) -> torch.nn.Module:
        config = save_config(folder, shapes | {"num_hidden_layers": layers})
        torch.manual_seed(0)
        with torch.device("cuda"):
            module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="jetrl_fa3")
        with torch.no_grad():
            for name, parameter in module.named_parameters():  # norms of ones hide a lost weight
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
        return module

    def share(self) -> None:
        """The same masters behind the shared decoder and an arena."""
        from verl.jetrl.arena import Arena, layout_of
        from verl.jetrl.model.decoder import Decoder
        from verl.jetrl.trainer.decoder import share_decoder
        from verl.jetrl.trainer.masters import Masters

        self.module.reshard()  # after a forward FSDP2's root still has its BF16 copies in place of the masters
        values = dict(self.module.named_parameters())
        config = self.module.config
        del self.module
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="jetrl_fa3")
        for name, value in values.items():
            owner, _, kind = name.rpartition(".")
            setattr(module.get_submodule(owner), kind, value)
        if config.tie_word_embeddings:
            module.lm_head.weight = module.model.embed_tokens.weight
        decoder = Decoder(module.config)
        share_decoder(module, decoder)
        self.module = module
        gc.collect()
        torch.cuda.empty_cache()
        layout = layout_of(module.config)
        arena = Arena.create(layout, next(iter(values.values())).device, 0)
        decoder.bind(arena)
        self.masters = Masters(module, decoder, arena)
        self.masters.write()

    def export(self):
        """verl's stream of weights for the rollout, by verl's own code."""
        from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

        lora = types.SimpleNamespace(get=lambda key, default=None: default)
        stub = types.SimpleNamespace(
            module=self.module,
            _uses_fsdp2_cpu_offload_policy=False,
            _is_offload_param=False,
            _qat_enabled=False,
            model_config=types.SimpleNamespace(lora=lora, hf_config=self.module.config),
            engine_config=types.SimpleNamespace(mixed_precision=None),
        )
        return FSDPEngine.get_per_tensor_param(stub, base_sync_done=True)[0]

    @torch.no_grad()
    def log_probs(self, prompts: list[list[int]], responses: list[list[int]]) -> list[list[float]]:
        """FP32 log-probs of the responses, one packed sequence per response."""
        self.module.eval()
        out = []
        for prompt, response in zip(prompts, responses, strict=True):
            ids = torch.tensor([prompt + response], device="cuda")
            positions = torch.arange(ids.shape[1], device="cuda")[None]
            out.append(self._chosen(ids, positions, slice(len(prompt) - 1, -1), ids[0, len(prompt) :]).tolist())
        return out

    def _chosen(self, ids: Tensor, positions: Tensor, rows: slice, labels: Tensor) -> Tensor:
        """FP32 log-probs of ``labels``; behind the arena by the FP8 engine's function."""
        if self.masters is None:
            logits = self.module(input_ids=ids, position_ids=positions, use_cache=False).logits[0, rows].float()
            return torch.log_softmax(logits, -1).gather(-1, labels[:, None])[:, 0]
        from verl.jetrl.trainer.log_probs import log_probs

        hidden = self.module.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state[0, rows]
        head = self.masters.decoder.lm_head
        return log_probs(hidden, head, labels, torch.ones(len(labels), device=ids.device), head.weight.shape[0])[0]


def send_stock(trainer: Trainer, engine: Engine) -> float:
    """Seconds of verl's own weight update; the engine's weights are awake."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    torch.cuda.synchronize()
    started = time.perf_counter()
    engine.call("receive")
    asyncio.run(BucketedWeightSender(zmq_handle=ZMQ_HANDLE, bucket_size_mb=2048).async_send_weights(trainer.export()))
    engine.result()
    return time.perf_counter() - started


def update_stock(trainer: Trainer, engine: Engine) -> tuple[float, float]:
    """(publish, ready) seconds, from a sleeping engine to one that can serve."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    started = time.perf_counter()
    engine("wake", ["weights"])
    publish = send_stock(trainer, engine)
    torch.cuda.empty_cache()
    engine("wake", ["kv_cache"])
    return publish, time.perf_counter() - started


def update_jetrl(trainer: Trainer, engine: Engine, hashed: bool) -> tuple[float, float]:
    """(publish, ready) seconds; ``hashed``: both sides also hash every tensor and compare."""
    from verl.jetrl.arena import ENGINE, TRAINER

    control = trainer.masters.arena.control
    torch.cuda.synchronize()
    if control.holder == ENGINE:
        control.hand_over(TRAINER)
    started = time.perf_counter()
    trainer.masters.write()
    if hashed:
        engine.call("rpc", "jetrl_weight_digests")
        mine = digests(trainer)
        theirs = engine.result()
        different = [name for name in mine if mine[name] != theirs.get(name)]
        if different or len(mine) != len(theirs):
            raise RuntimeError(f"the engine's weights are not the trainer's: {different[:3]}")
    control.hand_over(ENGINE)
    publish = time.perf_counter() - started
    engine("wake", ["weights"])
    engine("wake", ["kv_cache"])
    return publish, time.perf_counter() - started


def digests(trainer: Trainer) -> dict[str, str]:
    """Hashes of what the masters round to, under the engine's names."""
    from verl.jetrl import weights
    from verl.jetrl.trainer.engine import JetRLEngine

    stub = types.SimpleNamespace(masters=trainer.masters, flow=types.SimpleNamespace(fp8=True))
    return weights.digests(JetRLEngine.rollout_weights(stub))


def prompts(count: int, length: int, seed: int, vocabulary: int = 150000) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (count, length), generator=generator).tolist()


THINGS = (
    "a lighthouse", "a market", "an old train", "the first snow", "a chess club", "a river", "two bakers", "a long winter",
    "a lost letter", "the night shift", "a garden", "a violin", "a bridge", "a ferry", "a library", "an island",
)  # fmt: skip


def texts(folder: Path) -> list[list[int]]:
    """Token ids of prompts that ask a pretrained model for long answers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = [[{"role": "user", "content": f"Write a long and detailed story about {thing}."}] for thing in THINGS]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in asked]


def mismatch(trainer: Trainer, engine: Engine, quick: bool, asked: list[list[int]]) -> dict[str, Any]:
    """|delta log p| of responses of 1K tokens (or 64)."""
    asked, tokens = (asked[:4], 64) if quick else (asked, 1024)
    _, ids, theirs = engine("generate", asked, tokens, True)
    mine = trainer.log_probs(asked, ids)
    delta = (torch.tensor(theirs, dtype=torch.float64) - torch.tensor(mine, dtype=torch.float64)).abs()
    return {
        "mean": delta.mean().item(),
        "max": delta.max().item(),
        "by_response": delta.mean(1).tolist(),
        "tokens": delta.numel(),
    }


def measure(
    arm: str, trainer: Trainer, settings: Settings, layers: int, quick: bool, samples: dict, asked: list[list[int]] | None
) -> None:
    """All measurements of one engine, into ``samples``; with ``asked`` (prompts of a pretrained model) mismatch alone."""
    begun = time.perf_counter()
    ours = arm.startswith("jetrl")
    traces = Path(tempfile.mkdtemp(prefix="jetrl-traces-"))
    options = replace(settings, exact=arm == "jetrl_exact", traces=traces)
    with closing(Engine("jetrl" if ours else arm, options, {"VLLM_USE_DEEP_GEMM_E8M0": "0"})) as engine:
        _measure(arm, engine, begun, trainer, quick, samples, asked)
        if not asked:
            count, length, tokens = CASES["2k"]
            try:
                engine("profile", prompts(count, length + tokens // 2, 9), 2 * (PREFILL + STEPS))
                samples.setdefault("profile", {})[arm] = kernel_times(traces, layers)
            except (RuntimeError, ValueError) as error:  # minutes of measurements are not lost for it
                print(f"{arm}: no profile: {error}", flush=True)
    shutil.rmtree(traces)
    print(f"{arm}: {time.perf_counter() - begun:.0f} s", flush=True)


def _measure(
    arm: str, engine: Engine, begun: float, trainer: Trainer, quick: bool, samples: dict, asked: list[list[int]] | None
) -> None:
    ours = arm.startswith("jetrl")
    samples["start_seconds"][arm] = time.perf_counter() - begun
    repeats = 1 if asked else 2 if quick else 5 if ours else 3  # stock's takes seconds
    engine("sleep")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for index in range(repeats):
        if index:
            engine("sleep")
        update = update_jetrl(trainer, engine, False) if ours else update_stock(trainer, engine)
        samples["update"].setdefault(arm, []).append(update)
    samples["update_extra_bytes"][arm] = torch.cuda.max_memory_allocated() - before
    if arm == "jetrl" and not asked:
        for _ in range(repeats):
            engine("sleep")
            samples["update"].setdefault("jetrl_hashed", []).append(update_jetrl(trainer, engine, True))
        samples["resident_bytes"] = resident(trainer, True)
        for _ in range(repeats):
            engine("sleep")
            samples["update"].setdefault("jetrl_resident", []).append(update_jetrl(trainer, engine, False))
        resident(trainer, False)
    samples["mismatch"][arm] = mismatch(trainer, engine, quick, asked or prompts(64, 128, 7))
    if asked:
        return
    for case, (count, length, tokens) in CASES.items():
        if quick:
            length, tokens = length // 8, tokens // 16
        engine("generate", prompts(count, length, 0), 16, False)  # warm-up: kernels of this batch size
        for run in range(1 if quick or case == "2k" else 3):
            seconds, ids, _ = engine("generate", prompts(count, length, 1 + run), tokens, False)
            made = sum(map(len, ids))
            samples["rollout"].setdefault(arm, {}).setdefault(case, []).append({"seconds": seconds, "tokens": made})
            print(f"{arm:10} {case:4} {made / seconds:9.0f} tokens/s", flush=True)


def rate(samples: dict, arm: str, case: str) -> float:
    """Tokens per second of a case, the median of its runs."""
    return statistics.median(run["tokens"] / run["seconds"] for run in samples["rollout"][arm][case])


def weight_bytes(trainer: Trainer) -> dict[str, int]:
    """Bytes of weights on the GPU, read from the allocator."""
    layout = trainer.masters.arena.layout
    masters = sum(p.to_local().nbytes for p in {id(p): p for p in trainer.masters.parameters.values()}.values())
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # of the stock arms' forward: no weights
    held = torch.cuda.memory_allocated() - masters
    largest = max((part for linear in trainer.masters.decoder.linears() for part in linear.parts), key=lambda p: p.q.nbytes)
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    from verl.jetrl.fp8 import ops

    scratch = ops.with_transposed(largest).q_t
    peak = torch.cuda.max_memory_allocated() - base
    del scratch
    return {"one_copy": layout.bytes_of("fp8") + layout.bytes_of("bf16"), "held": held, "scratch": peak}


def resident(trainer: Trainer, on: bool) -> int:
    """Switches to transposed weights that stay on the GPU, or back; the bytes that they take."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    trainer.masters.resident_transposed = on
    for linear in trainer.masters.decoder.linears():
        if on:
            linear.refresh_transposed()
        else:
            linear.transposed = None
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() - before


def compile_kernels(settings: Settings) -> None:
    """Compiles DeepGEMM's kernels for all engines, so that none does while it is measured."""
    from verl.jetrl.fp8 import precompile

    head = QWEN3_8B["vocab_size"], QWEN3_8B["hidden_size"]
    jobs = precompile.jobs_of(linears(QWEN3_8B), head, settings.max_num_batched_tokens, settings.max_num_seqs)
    begun = time.perf_counter()
    precompile.precompile(jobs, torch.device("cuda", 0))
    print(f"kernels compiled in {time.perf_counter() - begun:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollout", description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--quick", action="store_true", help="short prompts and few repeats: checks the script itself")
    parser.add_argument("--model", type=Path, help="a checkpoint: its mismatch alone, added to mismatch.json and exact.json")
    parser.add_argument("--docs", action="store_true", help="only write the tables of --out into the documentation")
    parser.add_argument("--add", action="store_true", help="keep the other arms' samples of an earlier run on the same device")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.docs:
        for name in ("rollout", "sync", "mismatch"):
            result_of(args.out / f"{name}.json")
        for page in (ROOT / "docs" / "rollout.md", ROOT / "README.md"):
            fill(page, report(args.out))
        return
    arms, raw = args.arms.split(","), args.out / "rollout_samples.json"
    if unknown := [arm for arm in arms if arm not in ARMS]:
        parser.error(f"unknown arms {unknown}; there are {', '.join(ARMS)}")
    if args.model and not (args.model / "config.json").is_file():
        parser.error(f"--model {args.model}: no config.json in it, so it is not a Hugging Face checkpoint")
    earlier = result_of(raw) if args.add else {}
    if not torch.cuda.is_available():
        sys.exit("benchmarks.rollout needs a Hopper GPU")
    os.environ.setdefault("JETRL_RUN", f"bench-{os.getpid()}")
    os.environ["VERL_REPLICA_RANK"] = "0"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    os.environ.setdefault(*KERNEL_CACHE)
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method="tcp://127.0.0.1:29533", rank=0, world_size=1)
    args.out.mkdir(parents=True, exist_ok=True)
    kv_bytes = (4 if args.quick or args.model else 38) * GB
    settings = Settings(model=args.model or Path("/tmp/jetrl-bench-model"), kv_bytes=kv_bytes, max_model_len=4352)
    asked = None
    if args.model:
        asked = texts(args.model)
        arms = arms_of(AutoConfig.from_pretrained(args.model), arms)
        # As much as 16 prompts need: fewer kernels to compile, fewer graphs to capture.
        few = {"max_num_seqs": 16, "max_num_batched_tokens": 1024, "capture_sizes": [1, 2, 4, 8, 16]}
        settings = replace(settings, max_model_len=2048, **few)
    provenance = {"device": str(torch.cuda.get_device_properties(0).uuid), "layers": args.layers, "quick": args.quick}
    command = " ".join(["python -m benchmarks.rollout", *sys.argv[1:]])
    samples: dict[str, Any] = {k: {} for k in ("start_seconds", "update", "update_extra_bytes", "mismatch", "rollout")}
    recipe = OmegaConf.load(ROOT / "recipes" / "qwen3-8b" / "base.yaml")
    samples |= {"commands": [], "run_on": provenance, "verify_weights_every": recipe.jetrl.verify_weights_every}
    if args.add:
        samples |= earlier
        if samples["run_on"] != provenance:
            parser.error(f"--add: {raw} is of {samples['run_on']}, this run of {provenance}")
    samples["commands"].append(command)
    if not args.model:
        compile_kernels(settings)
    trainer = Trainer(args.layers, settings.model, pretrained=bool(args.model))
    failed = []
    for arm in arms:
        if arm.startswith("jetrl") and trainer.masters is None:
            trainer.share()
            samples["weight_bytes"] = weight_bytes(trainer)
        trial = copy.deepcopy(samples)
        try:
            measure(arm, trainer, settings, args.layers, args.quick, trial, asked)
        except Exception:  # the other arms are measured all the same; of this one nothing is kept
            traceback.print_exc()
            failed.append(arm)
            continue
        samples = trial
        if args.model:
            add_model(args, command, samples["mismatch"])
            continue
        raw.write_text(json.dumps(samples))
        write(args, samples)
    if trainer.masters is not None:
        trainer.masters.arena.close()
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; --arms {','.join(failed)} --add measures them again")


def arms_of(model: PretrainedConfig, arms: list[str]) -> list[str]:
    """Those of ``arms`` that can run ``model``."""
    wrong = stock_fp8_problems(model) if "stock_fp8" in arms else []
    if wrong:
        print(f"stock_fp8 left out: {wrong[0]}", flush=True)
    return [arm for arm in arms if arm != "stock_fp8" or not wrong]


def figures_of(samples: dict) -> dict[str, dict[str, float]]:
    """The figures of each result file, of the arms measured so far.  An engine's first update compiles and is left out."""
    have = [arm for arm in ARMS if arm in samples["rollout"]]
    rollout = {f"tokens_per_s_{arm}_{case}": rate(samples, arm, case) for arm in have for case in CASES}
    sync: dict[str, float] = {}
    gap = {f"mean_abs_dlogp_{'mixed' if arm == 'stock_fp8' else arm}": samples["mismatch"][arm]["mean"] for arm in have}
    if "jetrl" in have:
        for other, name in (("bf16", "vs_bf16"), ("stock_fp8", "vs_stock_fp8")):
            if other in have:
                rollout |= {f"{name}_{case}": rate(samples, "jetrl", case) / rate(samples, other, case) for case in CASES}
        seconds = {
            arm: [statistics.median(u[i] for u in settled(runs)) for i in (0, 1)] for arm, runs in samples["update"].items()
        }
        plain, hashed, every = seconds["jetrl"], seconds["jetrl_hashed"], samples["verify_weights_every"]
        hash_seconds = max(hashed[0] - plain[0], 0.0) / every if every else 0.0
        ours = [seconds + hash_seconds for seconds in plain]
        for index, name in enumerate(("publish", "ready")):
            sync[f"{name}_seconds"] = ours[index]
            sync |= {f"{name}_seconds_without_hash": plain[index], f"{name}_seconds_hashed": hashed[index]}
            for other in [arm for arm in have if not arm.startswith("jetrl")]:
                sync[f"{name}_seconds_{other}"] = seconds[other][index]
                sync[f"{name}_vs_{other}"] = seconds[other][index] / ours[index]
                sync[f"{name}_vs_{other}_hashed"] = seconds[other][index] / hashed[index]
        held = samples["weight_bytes"]
        sync["weight_bytes_vs_one_copy"] = (held["held"] + held["scratch"]) / held["one_copy"]
        if "resident_bytes" in samples:  # instead of the scratch
            sync["weight_bytes_vs_one_copy_resident"] = (held["held"] + samples["resident_bytes"]) / held["one_copy"]
            sync["publish_seconds_resident"] = seconds["jetrl_resident"][0]
    exact: dict[str, float] = {}
    if "jetrl_exact" in have:
        exact["max_abs_dlogp_qwen3_8b"] = samples["mismatch"]["jetrl_exact"]["max"]
        if "jetrl" in have:
            exact |= {f"generate_vs_default_{c}": rate(samples, "jetrl_exact", c) / rate(samples, "jetrl", c) for c in CASES}
    return {"exact": exact, "rollout": rollout, "sync": sync, "mismatch": gap}


def settled(updates: list) -> list:
    """Without the first update, unless it is the only one."""
    return updates[1:] or updates


KEPT = {
    "exact": ("rollout", "mismatch"),
    "rollout": ("rollout", "start_seconds", "profile"),
    "sync": ("update", "update_extra_bytes", "weight_bytes", "resident_bytes", "verify_weights_every"),
    "mismatch": ("mismatch",),
}


def provenance_of(command: str) -> dict[str, Any]:
    return {
        "command": command,
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU",
        "versions": {name: metadata.version(name) for name in ("torch", "triton", "vllm", "verl", "transformers")},
    }


def stored(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {"models": {}, "figures": {}}


EXACT_PARTS = ("cost", "gates", "jobs")  # what benchmarks.exact adds to exact.json: one entry, or several by name


def figures_of_parts(result: dict[str, Any]) -> dict[str, float]:
    """The figures that benchmarks.exact's entries in ``result`` have."""
    cost, gates, jobs = (result.get(part, {}) for part in EXACT_PARTS)
    return {key: value for entry in (cost, *gates.values(), *jobs.values()) for key, value in entry.get("figures", {}).items()}


def write(args: argparse.Namespace, samples: dict) -> None:
    """The result files of the arms so far, and their figures; what they hold of pretrained models stays."""
    common = provenance_of("; ".join(samples["commands"])) | {
        "notes": NOTES,
        "shapes": QWEN3_8B | {"num_hidden_layers": args.layers},
    }
    for name, figures in figures_of(samples).items():
        if not figures:
            continue
        earlier = stored(args.out / f"{name}.json")
        models = earlier.get("models", {})
        result = common | {"samples": {k: samples[k] for k in KEPT[name] if k in samples}, "figures": figures}
        result["models"] = models
        result |= {part: earlier[part] for part in EXACT_PARTS if part in earlier}
        figures |= figures_of_parts(earlier)
        for model, part in models.items():
            figures |= figures_of_model(model, part["samples"])[name]
        (args.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        print(name, *(f"  {key:36} {value:.6g}" for key, value in figures.items()), sep="\n")


def figures_of_model(model: str, gaps: dict[str, Any]) -> dict[str, dict[str, float]]:
    """A pretrained model's figures in mismatch.json and exact.json."""
    end = model.lower().replace("-", "_").replace(".", "_")
    return {
        "mismatch": {
            f"mean_abs_dlogp_{'mixed' if arm == 'stock_fp8' else arm}_{end}": gap["mean"] for arm, gap in gaps.items()
        },
        "exact": {f"max_abs_dlogp_{end}": gaps["jetrl_exact"]["max"]} if "jetrl_exact" in gaps else {},
    }


def add_model(args: argparse.Namespace, command: str, gaps: dict[str, Any]) -> None:
    """Adds a pretrained model's mismatch to the result files."""
    for name, figures in figures_of_model(args.model.name, gaps).items():
        if figures:
            result = stored(args.out / f"{name}.json")
            result.setdefault("models", {})[args.model.name] = provenance_of(command) | {"samples": gaps}
            result["figures"] |= figures
            (args.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
            print(name, *(f"  {key:36} {value:.6g}" for key, value in figures.items()), sep="\n")


BARS = {
    "vs_bf16_64": 1.25,
    "vs_bf16_256": 1.25,
    "vs_bf16_2k": 1.25,
    "vs_stock_fp8_64": 1.05,
    "vs_stock_fp8_256": 1.05,
    "publish_vs_stock_fp8": 20,
    "ready_vs_stock_fp8": 3,
}  # fmt: skip  of figures that must be at least so much
LIMITS = {"publish_seconds": 0.1, "weight_bytes_vs_one_copy": 1.05}  # of those that must be at most


def report(folder: Path) -> dict[str, str]:
    """The tables of docs/rollout.md and README.md by name, in Markdown."""
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    found = {name: found[name] for name in ("rollout", "sync", "mismatch", "exact") if name in found}
    figures = {key: value for result in found.values() for key, value in result["figures"].items()}
    shapes, first = found["rollout"]["shapes"], found["rollout"]
    token = 2 * shapes["num_hidden_layers"] * shapes["num_key_value_heads"] * shapes["head_dim"] * 2
    copy = json.loads((RESULTS / "ops.json").read_text())["figures"]["copy_tb_s"] * 1e12
    arms = [arm for arm in ARMS if f"tokens_per_s_{arm}_64" in figures]
    speed, steps = [], []
    for case, (count, length, tokens) in CASES.items():
        rates = [figures[f"tokens_per_s_{arm}_{case}"] for arm in arms]
        ours = figures[f"tokens_per_s_jetrl_{case}"]
        speed.append(
            [f"{count} prompts, {length} in, {tokens} out", *(round(r) for r in rates)]
            + [f"{ours / figures[f'tokens_per_s_{arm}_{case}']:.2f}x" for arm in ("bf16", "stock_fp8")]
        )
        steps.append(
            [case, *(f"{count / r * 1e3:.1f}" for r in rates), f"{count * (length + tokens / 2) * token / copy * 1e3:.1f}"]
        )
    profile = {arm: p["ms_per_step"] for arm, p in first["samples"].get("profile", {}).items()}
    kinds = list(dict.fromkeys(kind for times in profile.values() for kind in times))
    where = [[kind, *(f"{times.get(kind, 0.0):.2f}" for times in profile.values())] for kind in kinds]
    updates = found["sync"]["samples"]["update"]
    publish = [
        [
            arm,
            *(f"{statistics.median(u[i] for u in settled(runs)):.3f}" for i in (0, 1)),
            f"{runs[0][0]:.3f}",
            len(settled(runs)),
        ]
        for arm, runs in updates.items()
    ]
    gaps = {"Qwen3-8B shapes, random weights": found["mismatch"]["samples"]["mismatch"]}
    gaps |= {model: part["samples"] for model, part in found["mismatch"].get("models", {}).items()}
    rows = []
    for key, value in figures.items():
        if key in BARS or key in LIMITS:
            met = value >= BARS[key] if key in BARS else value <= LIMITS[key]
            bar = f"at least {BARS[key]}" if key in BARS else f"at most {LIMITS[key]}"
            rows.append([key, float(value), bar, "yes" if met else "**no**"])
            if f"{key}_hashed" in figures:  # as if every update were hashed
                rows.append([f"{key}_hashed", float(figures[f"{key}_hashed"]), None, None])
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    return {
        "rollout": markdown(["tokens/s", *arms, "jetrl vs bf16", "vs stock_fp8"], speed),
        "steps": markdown(["case", *(f"{arm}, ms" for arm in arms), "KV cache read once, ms"], steps),
        **({"profile": markdown(["ms per step", *profile], where)} if profile else {}),
        "update": markdown(["arm", "publish, s", "ready, s", "first publish, s", "updates"], publish),
        "mismatch": markdown(
            ["model", "arm", "mean \\|Δ log p\\|", "max", "tokens"],
            [[model, arm, g["mean"], g["max"], g["tokens"]] for model, arms in gaps.items() for arm, g in arms.items()],
        ),
        "rollout figures": markdown(["figure", "value", "bar", "met"], rows),
        "rollout run": f"`{first['command']}` on one {first['device']}; {versions}.",
    }


if __name__ == "__main__":
    main()
