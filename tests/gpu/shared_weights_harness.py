"""Trainer and engines of the tests of the shared weights: a small random Qwen3 on the benchmarks' trainer and engines.

Kernels are few, because DeepGEMM compiles each in 3 to 5 s: the engines compute at most 64 tokens at a time, the trainer
rows of 256.  As a script it plays a trainer in a process of its own (``trainer``), or a process that maps the arena
(``attach``), and prints what it saw as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]  # benchmarks; shared_weights_worker, also in the engines' processes

from benchmarks.engines import Engine, Settings  # noqa: E402
from benchmarks.rollout import Trainer, digests, prompts  # noqa: E402
from benchmarks.shapes import QWEN3_8B  # noqa: E402
from verl.jetrl.arena import ENGINE, TRAINER, Arena, ArenaError, Control, layout_of  # noqa: E402
from verl.jetrl.environment import RUN_ID, machine_environment, run_tmp  # noqa: E402
from verl.jetrl.weights import compare  # noqa: E402

LAYERS = 2
VOCABULARY = 8192
SMALL = QWEN3_8B | dict(
    hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
    vocab_size=VOCABULARY, max_position_embeddings=1024,
)  # fmt: skip
ROW = 256  # tokens of a trainer's row, and the longest sequence
PROMPT, RESPONSE = 32, 32  # four such sequences fill a row
MIB = 2**20
BLOCK_TOKENS = 16  # of vLLM's KV cache
BLOCK_BYTES = 2 * BLOCK_TOKENS * SMALL["num_key_value_heads"] * SMALL["head_dim"] * 2 * LAYERS
PATIENCE_S = 240.0  # a start with cold caches compiles kernels
ANSWER = "SHARED_WEIGHTS "  # begins the line of a script that says what it saw
LEARNING_RATE = 5e-5  # moves the log-probs of a step's own responses by more than 1, and keeps the policy near its start
# Mean |delta log p| under which rollout and trainer count as computing with the same weights.  There is little between the
# same bits (1e-6: two log-softmax kernels) and 1e-2: FP8 roundings of this random model turn one flipped BF16 bit of an
# attention output into that.  The same bits need FlashAttention's work unsplit: eager engines do not split the work on
# sequences this short, those with CUDA graphs are asked not to (``splits=1``).  Weights that are one update old must give more
# than STALE times as much as was measured with the right ones, and more than STALE * PARITY.
PARITY, STALE = 1e-3, 20


def environment(run: str) -> dict[str, str]:
    """What trainer and engines need set; what the user set wins, but for what the tests depend on."""
    return {name: os.environ.get(name, value) for name, value in machine_environment("gpu").items()} | {
        RUN_ID: run,
        "VERL_REPLICA_RANK": "0",
        "VLLM_DEEP_GEMM_WARMUP": "skip",
        "VLLM_USE_DEEP_GEMM_E8M0": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }


def settings(model: Path, **changes: Any) -> Settings:
    """Engines of the small model: torch.compile and CUDA graphs unless ``eager``."""
    small = Settings(
        model=model,
        kv_bytes=64 * MIB,
        max_model_len=ROW,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        capture_sizes=[1, 2, 4, 8],
    )
    return replace(small, **changes)


def start(kind: str, options: Settings, env: dict[str, str] | None = None, wait: bool = True) -> Engine:
    return Engine(kind, options, env, wait=wait, patience_s=PATIENCE_S)


def asked(count: int, length: int, seed: int) -> list[list[int]]:
    return prompts(count, length, seed, VOCABULARY)


# --- the trainer ------------------------------------------------------------------------------------------------------


def rows_of(prompt_ids: list[list[int]], responses: list[list[int]]) -> list[list[int]]:
    """Which sequences share a row of at most :data:`ROW` tokens, in order."""
    rows: list[list[int]] = []
    room = 0
    for index, (prompt, response) in enumerate(zip(prompt_ids, responses, strict=True)):
        length = len(prompt) + len(response)
        if not rows or room < length:
            rows.append([])
            room = ROW
        rows[-1].append(index)
        room -= length
    return rows


def next_log_probs(trainer: Trainer, sequences: list[list[int]]) -> list[Tensor]:
    """Of each sequence the FP32 log-probs of its tokens but the first, from one packed row."""
    device = next(trainer.module.parameters()).device
    ids_T = torch.tensor([token for sequence in sequences for token in sequence], device=device)
    positions_T = torch.cat([torch.arange(len(sequence), device=device) for sequence in sequences])
    labels_T = ids_T.roll(-1)
    row = dict(input_ids=ids_T[None], position_ids=positions_T[None], use_cache=False)
    if trainer.masters is None:
        logits_TV = trainer.module(**row).logits[0].float()
        chosen_T = torch.log_softmax(logits_TV, -1).gather(-1, labels_T[:, None])[:, 0]
    else:  # as the FP8 engine does
        from verl.jetrl.trainer.log_probs import log_probs

        hidden_TH = trainer.module.model(**row).last_hidden_state[0]
        temperature_T = torch.ones(len(ids_T), device=device)
        chosen_T = log_probs(hidden_TH, trainer.masters.decoder.lm_head, labels_T, temperature_T, VOCABULARY)[0]
    return [part[:-1] for part in chosen_T.split([len(sequence) for sequence in sequences])]


@torch.no_grad()
def log_probs_of(trainer: Trainer, prompt_ids: list[list[int]], responses: list[list[int]]) -> list[list[float]]:
    """The trainer's log-probs of the responses."""
    trainer.module.eval()
    out: list[list[float]] = []
    for row in rows_of(prompt_ids, responses):
        chosen = next_log_probs(trainer, [prompt_ids[i] + responses[i] for i in row])
        out += [values[len(prompt_ids[i]) - 1 :].tolist() for i, values in zip(row, chosen, strict=True)]
    return out


def optimizer_of(trainer: Trainer) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(trainer.module.parameters()), lr=LEARNING_RATE)


def train(trainer: Trainer, optimizer: torch.optim.Optimizer, prompt_ids: list[list[int]], responses: list[list[int]]) -> float:
    """One optimizer step on one row, without writing the arena; the gradient's norm.  Every second response is discouraged."""
    trainer.module.train()
    masters = trainer.masters
    if masters is None:
        optimizer.zero_grad()
    else:
        masters.zero_grad()
    (row,) = rows_of(prompt_ids, responses)
    chosen = next_log_probs(trainer, [prompt_ids[i] + responses[i] for i in row])
    means = [values[len(prompt_ids[i]) - 1 :].mean() for i, values in zip(row, chosen, strict=True)]
    loss = -sum(mean if index % 2 == 0 else -0.5 * mean for index, mean in enumerate(means))
    loss.backward()
    if masters is not None:
        masters.assign_grads()
    norm = torch.nn.utils.get_total_norm([p.grad for p in trainer.module.parameters()])
    optimizer.step()
    if masters is not None:
        masters.drop_grads()
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


# --- both sides -------------------------------------------------------------------------------------------------------


def gap(a: list[list[float]], b: list[list[float]]) -> float:
    """Mean |difference| of log-probs; NaN where one is NaN."""
    pairs = [(x, y) for rows in zip(a, b, strict=True) for x, y in zip(*rows, strict=True)]
    return (torch.tensor(pairs, dtype=torch.float64) @ torch.tensor([1.0, -1.0], dtype=torch.float64)).abs().mean().item()


def parity(trainer: Trainer, engine: Engine, prompt_ids: list[list[int]], tokens: int) -> float:
    """Mean |delta log p| of freshly sampled responses."""
    _, ids, theirs = engine("generate", prompt_ids, tokens, True)
    return gap(theirs, log_probs_of(trainer, prompt_ids, ids))


def one_by_one(engine: Engine, prompt_ids: list[list[int]], tokens: int) -> list[tuple[list[int], list[float]]]:
    """Greedy (tokens, log-probs), one request at a time: the same batches, so the same bits, each time."""
    answers = []
    for prompt in prompt_ids:
        _, ids, values = engine("generate", [prompt], tokens, True, 0.0)
        answers.append((ids[0], values[0]))
    return answers


def different(trainer: Trainer, engine: Engine) -> list[str]:
    """Names of the weights of which the engine holds other bytes than the masters round to."""
    return compare(digests(trainer), engine("rpc", "jetrl_weight_digests"))


def give(control: Control, to: int) -> None:
    """Hands the lease over, unless that side has it."""
    if control.holder != to:
        control.hand_over(to)


def publish(trainer: Trainer, engine: Engine) -> list[str]:
    """verl's update of a sleeping engine, allocator toggle included; what :func:`different` found in it."""
    from verl.utils.device import set_expandable_segments

    trainer.masters.write()
    set_expandable_segments(False)
    torch.cuda.empty_cache()
    engine("wake", ["weights"])
    found = different(trainer, engine)
    give(trainer.masters.arena.control, ENGINE)
    engine("wake", ["kv_cache"])
    set_expandable_segments(True)
    return found


def fill_free_memory_with_nan(smallest: int = 4 * MIB) -> int:
    """Writes NaN to all free memory of the GPU and frees it again; how many bytes."""
    from verl.utils.device import set_expandable_segments

    set_expandable_segments(False)
    torch.cuda.empty_cache()
    torch.full((1,), torch.nan, dtype=torch.bfloat16, device="cuda")  # the kernel is loaded while there is room
    held, size = [], 2**34
    while size >= smallest:
        try:
            held.append(torch.empty(size // 2, dtype=torch.bfloat16, device="cuda").fill_(torch.nan))
        except torch.OutOfMemoryError:
            size //= 2
    torch.cuda.synchronize()
    filled = sum(tensor.nbytes for tensor in held)
    del held
    torch.cuda.empty_cache()
    return filled


def footprint(engine: Engine) -> dict[str, Any]:
    """What repeated sleeping could eat up: free GPU memory, shared memory, the engine's open files."""
    import psutil

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    processes = [psutil.Process(engine.pid), *psutil.Process(engine.pid).children(recursive=True)]
    return {
        "free": torch.cuda.mem_get_info()[0],
        "shm": set(os.listdir("/dev/shm")),
        "files": {p.pid: p.num_fds() for p in processes},
    }


def init_process_group(folder: Path) -> None:
    store = folder / f"rendezvous-{os.getpid()}"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=0, world_size=1)


# --- as a script ------------------------------------------------------------------------------------------------------


def play_trainer(folder: Path, device: int, engine_gpu: str | None, other_gpu: str | None) -> dict[str, Any]:
    """A trainer and its engine, before and after an update.

    ``engine_gpu``, ``other_gpu``: CUDA_VISIBLE_DEVICES of the engine, and of a process that must not be able to map the
    arena.
    """
    torch.cuda.set_device(device)
    torch.zeros(1, device="cuda")
    init_process_group(folder)
    trainer = Trainer(LAYERS, folder / "model", SMALL)
    trainer.share()
    control = trainer.masters.arena.control
    seen: dict[str, Any] = {"conf": os.environ.get("PYTORCH_CUDA_ALLOC_CONF"), "device": torch.cuda.current_device()}
    give(control, ENGINE)
    env = {"CUDA_VISIBLE_DEVICES": engine_gpu} if engine_gpu else {}
    engine = start("jetrl", settings(folder / "model", eager=True), env)
    try:
        batch = asked(4, PROMPT, 1)
        seen["different"] = [different(trainer, engine)]
        _, ids, theirs = engine("generate", batch, RESPONSE, True)
        seen["gap"] = [gap(theirs, log_probs_of(trainer, batch, ids))]
        engine("sleep")
        give(control, TRAINER)
        train(trainer, optimizer_of(trainer), batch, ids)
        seen["different"].append(publish(trainer, engine))
        seen["gap"].append(parity(trainer, engine, batch, RESPONSE))
        seen["stale"] = gap(theirs, log_probs_of(trainer, batch, ids))
        if other_gpu:
            seen["other"] = as_script(["attach", str(folder)], {"CUDA_VISIBLE_DEVICES": other_gpu})
    finally:
        engine.close()
        trainer.masters.arena.close()
        dist.destroy_process_group()
    return seen


def attach(folder: Path) -> dict[str, Any]:
    """Maps the arena of this run on the first visible GPU."""
    from transformers import AutoConfig

    torch.cuda.set_device(0)
    try:
        arena = Arena.attach(layout_of(AutoConfig.from_pretrained(folder / "model")), torch.device("cuda", 0), 0)
    except ArenaError as error:
        return {"error": str(error)}
    return {"bytes": arena.data.nbytes}


def as_script(arguments: list[str], env: dict[str, str], timeout_s: float = 2 * PATIENCE_S) -> dict[str, Any]:
    """Runs this file in a process of its own; what it saw."""
    command = [sys.executable, __file__, *arguments]
    with tempfile.TemporaryFile("w+", errors="replace") as out:
        process = subprocess.Popen(
            command, env={**os.environ, **env}, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(timeout_s)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        out.seek(0)
        printed = out.read()
    answers = [line for line in printed.splitlines() if line.startswith(ANSWER)]
    if process.returncode or not answers:
        raise RuntimeError(f"{' '.join(command)} ended with exit code {process.returncode}:\n{printed[-12000:]}")
    return json.loads(answers[-1].removeprefix(ANSWER))


def remove_run(run: str) -> None:
    shutil.rmtree(run_tmp(run), ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    trainer = commands.add_parser("trainer")
    trainer.add_argument("folder", type=Path)
    trainer.add_argument("--device", type=int, default=0)
    trainer.add_argument("--engine-gpu")
    trainer.add_argument("--other-gpu")
    commands.add_parser("attach").add_argument("folder", type=Path)
    args = parser.parse_args()
    if args.command == "attach":
        seen = attach(args.folder)
    else:
        seen = play_trainer(args.folder, args.device, args.engine_gpu, args.other_gpu)
    print(f"\n{ANSWER}{json.dumps(seen)}", flush=True)


if __name__ == "__main__":
    main()
