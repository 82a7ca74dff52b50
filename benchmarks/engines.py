"""One vLLM engine in a process of its own, driven from the benchmark's process (which plays the trainer)."""

from __future__ import annotations

import faulthandler
import os
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

BLOCK_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
ZMQ_HANDLE = "ipc:///tmp/rl-colocate-zmq-0-replica-0-rank-0.sock"


@dataclass(frozen=True)
class Settings:
    """What all engines of a run share."""

    model: Path
    kv_bytes: int
    max_model_len: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    capture_sizes: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64, 128, 192, 256])


def _options(kind: str, settings: Settings) -> dict[str, Any]:
    options: dict[str, Any] = dict(
        model=str(settings.model),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        load_format="dummy",
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        kv_cache_memory_bytes=settings.kv_bytes,
        gpu_memory_utilization=0.3,
        enable_prefix_caching=False,
        enable_sleep_mode=True,
        disable_log_stats=True,
        worker_extension_cls="verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension",
        compilation_config={"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": settings.capture_sizes},
    )
    if kind == "stock_fp8":
        options |= dict(quantization="fp8", hf_overrides={"quantization_config": BLOCK_FP8})
    elif kind == "jetrl":
        from verl.jetrl.rollout import vllm_model, vllm_quant

        options |= dict(
            quantization=vllm_quant.METHOD,
            load_format=vllm_model.LOAD_FORMAT,
            hf_overrides={
                "architectures": [vllm_model.ARCHITECTURE],
                "quantization_config": {"quant_method": vllm_quant.METHOD},
            },
            worker_extension_cls="verl.jetrl.rollout.worker_extension.JetRLWorkerExtension",
        )
    return options


class _Worker:
    """The methods that the parent may call, in the engine's process."""

    def __init__(self, kind: str, settings: Settings) -> None:
        if kind == "stock_fp8":
            os.environ["VERL_VLLM_FP8_QUANT_ENABLED"] = "1"
            from verl.utils.vllm.vllm_quant_utils import apply_vllm_quant_patches

            apply_vllm_quant_patches()
        from vllm import LLM

        started = time.perf_counter()
        self.llm = LLM(**_options(kind, settings))
        self.start_seconds = time.perf_counter() - started

    def generate(
        self, prompts: list[list[int]], tokens: int, logprobs: bool, temperature: float = 1.0
    ) -> tuple[float, list[list[int]], list[list[float]]]:
        """Seconds, sampled tokens and their log-probs."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=temperature,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0 if logprobs else None,
            seed=None,
        )
        started = time.perf_counter()
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - started
        ids = [list(o.outputs[0].token_ids) for o in outputs]
        if not logprobs:
            return seconds, ids, []
        values = [
            [step[t].logprob for step, t in zip(o.outputs[0].logprobs, x, strict=True)]
            for o, x in zip(outputs, ids, strict=True)
        ]
        return seconds, ids, values

    def sleep(self) -> None:
        self.llm.sleep(level=2)

    def wake(self, tags: list[str]) -> None:
        self.llm.wake_up(tags=tags)
        if "kv_cache" in tags:
            self.llm.reset_prefix_cache()

    def receive(self) -> None:
        self.llm.collective_rpc("update_weights_from_ipc", kwargs={"use_shm": False})

    def rpc(self, method: str) -> Any:
        return self.llm.collective_rpc(method)[0]

    def started(self) -> float:
        return self.start_seconds


def _serve(kind: str, settings: Settings, environment: dict[str, str], connection: Connection) -> None:
    os.environ.update({"VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn", **environment})
    faulthandler.dump_traceback_later(300, repeat=True)  # an engine that hangs says where
    try:
        worker = _Worker(kind, settings)
        connection.send(("ok", None))
        while True:
            name, args = connection.recv()
            if name == "close":
                break
            connection.send(("ok", getattr(worker, name)(*args)))
    except BaseException:
        connection.send(("error", traceback.format_exc()))


class Engine:
    """Starts an engine and calls it; ``call`` sends a request, ``result`` waits for its answer."""

    def __init__(self, kind: str, settings: Settings, environment: dict[str, str] | None = None) -> None:
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(kind, settings, environment or {}, theirs))
        self._process.start()
        self.kind = kind
        self.result()

    def call(self, name: str, *args: Any) -> None:
        self._connection.send((name, args))

    def result(self) -> Any:
        state, value = self._connection.recv()
        if state == "error":
            raise RuntimeError(f"engine {self.kind} failed:\n{value}")
        return value

    def __call__(self, name: str, *args: Any) -> Any:
        self.call(name, *args)
        return self.result()

    def close(self) -> None:
        self._connection.send(("close", ()))
        self._process.join(60)
        if self._process.is_alive():
            self._process.kill()
