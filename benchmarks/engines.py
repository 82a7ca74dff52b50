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

import torch

from benchmarks import traces

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
    eager: bool = False  # neither torch.compile nor CUDA graphs: starts sooner
    splits: int | None = None  # of FlashAttention's work inside CUDA graphs, at most; vLLM's choice where None
    prefix_cache: bool = False
    statistics: bool = False  # vLLM's counters, for ``metrics``
    exact: bool = False  # jetrl: precision_flow.exact
    extension: str | None = None  # jetrl: another class of worker methods
    traces: Path | None = None  # where ``profile`` leaves its traces


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
        enable_prefix_caching=settings.prefix_cache,
        enable_sleep_mode=True,
        logprobs_mode="processed_logprobs",  # as verl: of FP32 logits; "raw" ones are of BF16 logits, summed in another order
        enforce_eager=settings.eager,
        disable_log_stats=not settings.statistics,
        worker_extension_cls="verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension",
        compilation_config={"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": settings.capture_sizes},
    )
    if not torch.cuda.is_available():
        options |= dict(enable_sleep_mode=False, enforce_eager=True, enable_chunked_prefill=False, compilation_config={})
    if settings.traces is not None:
        options["profiler_config"] = traces.profiler_config(settings.traces)
    if settings.splits is not None:
        options["attention_config"] = {"flash_attn_max_num_splits_for_cuda_graph": settings.splits}
    if kind == "stock_fp8":
        options |= dict(quantization="fp8", hf_overrides={"quantization_config": BLOCK_FP8})
    elif kind == "jetrl":
        from verl.jetrl.rollout import vllm_model, vllm_quant

        options |= dict(
            quantization=vllm_quant.METHOD,
            load_format=vllm_model.LOAD_FORMAT,
            hf_overrides={
                "architectures": [vllm_model.ARCHITECTURE],
                "quantization_config": {"quant_method": vllm_quant.METHOD, "exact": settings.exact},
            },
            worker_extension_cls=settings.extension or "verl.jetrl.rollout.worker_extension.JetRLWorkerExtension",
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
        self.cached: list[int] = []

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
        self.cached = [o.num_cached_tokens for o in outputs]
        ids = [list(o.outputs[0].token_ids) for o in outputs]
        if not logprobs:
            return seconds, ids, []
        values = [
            [step[t].logprob for step, t in zip(o.outputs[0].logprobs, x, strict=True)]
            for o, x in zip(outputs, ids, strict=True)
        ]
        return seconds, ids, values

    def profile(self, prompts: list[list[int]], tokens: int) -> None:
        """Generates, and records some decode steps of it."""
        self.llm.start_profile()
        self.generate(prompts, tokens, False)
        self.llm.stop_profile()

    def sleep(self) -> None:
        self.llm.sleep(level=2)

    def wake(self, tags: list[str]) -> None:
        self.llm.wake_up(tags=tags)
        if "kv_cache" in tags:
            self.llm.reset_prefix_cache()

    def cached_tokens(self) -> list[int]:
        """Per prompt of the last ``generate``, how many of its tokens came from the prefix cache."""
        return self.cached

    def metrics(self) -> dict[str, float]:
        """vLLM's counters and gauges."""
        return {metric.name: metric.value for metric in self.llm.get_metrics() if hasattr(metric, "value")}

    def receive(self) -> None:
        self.llm.collective_rpc("update_weights_from_ipc", kwargs={"use_shm": False})

    def rpc(self, method: str) -> Any:
        return self.llm.collective_rpc(method)[0]

    def started(self) -> float:
        return self.start_seconds


def _serve(kind: str, settings: Settings, environment: dict[str, str], connection: Connection) -> None:
    os.environ.update({"VLLM_WORKER_MULTIPROC_METHOD": "spawn", **environment})
    faulthandler.dump_traceback_later(300, repeat=True)  # an engine that hangs says where
    try:
        worker = _Worker(kind, settings)
        connection.send(("ok", None))
        while True:
            name, args = connection.recv()
            if name == "close":
                break
            try:
                answer = ("ok", getattr(worker, name)(*args))
            except Exception:
                answer = ("error", traceback.format_exc())  # the engine may still be of use
            connection.send(answer)
    except BaseException:
        connection.send(("error", traceback.format_exc()))


class Engine:
    """Starts an engine and calls it; ``call`` sends a request, ``result`` waits for its answer.

    ``wait=False``: the first ``result`` is for the caller to take, so that several engines start at once.  ``patience_s``:
    an answer that takes longer is an error, and ends the engine.
    """

    def __init__(
        self,
        kind: str,
        settings: Settings,
        environment: dict[str, str] | None = None,
        wait: bool = True,
        patience_s: float | None = None,
    ) -> None:
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(kind, settings, environment or {}, theirs))
        self._process.start()
        theirs.close()  # else the end of the process would not be seen
        self.kind, self.patience_s = kind, patience_s
        if wait:
            self.result()

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, name: str, *args: Any) -> None:
        self._connection.send((name, args))

    def result(self) -> Any:
        if not self._connection.poll(self.patience_s):
            self._process.kill()
            raise TimeoutError(f"engine {self.kind} did not answer within {self.patience_s:.0f} s")
        try:
            state, value = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(10)
            raise RuntimeError(f"engine {self.kind} ended with exit code {self._process.exitcode}") from None
        if state == "error":
            raise RuntimeError(f"engine {self.kind} failed:\n{value}")
        return value

    def __call__(self, name: str, *args: Any) -> Any:
        self.call(name, *args)
        return self.result()

    def close(self) -> None:
        """Ends the process; one that has ended, or does not answer, as well."""
        try:
            self._connection.send(("close", ()))
        except OSError:
            pass
        self._process.join(60)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(10)
