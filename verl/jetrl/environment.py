"""Environment variables of a run, set before its first process starts.  Every process of a Ray that the run starts inherits
them; one that runs already is told (:func:`passed_on`)."""

from __future__ import annotations

import os
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

# Names the run in every process it starts, however deep: what is left after a crash can be found by it.
RUN_ID = "JETRL_RUN"
# DeepGEMM compiles a kernel at its first use, in 3 to 5 seconds: whatever runs on a machine shares what was compiled there.
KERNEL_CACHE = ("DG_JIT_CACHE_DIR", str(Path.home() / ".cache" / "vllm" / "deep_gemm"))

_OF_RUN = {RUN_ID, "VERL_FILE_LOGGER_PATH", "TENSORBOARD_DIR", "VLLM_RPC_BASE_PATH", "PYTHONUNBUFFERED"}
_COMMON = {
    "HYDRA_FULL_ERROR": "1",
    "RAY_COLOR_PREFIX": "0",  # a run's output is a file
    "RAY_DEDUP_LOGS": "0",
    "RAY_worker_niceness": "0",  # Ray's default, 15, starves a run beside anything else on the machine
    "RAY_task_events_max_num_task_in_gcs": "10000",  # Ray's record of past tasks: 100,000 take 400 MB
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # what a command prints is its answer
    "VLLM_NO_USAGE_STATS": "1",
}
_MACHINE = {
    "cpu": {
        "VERL_PLATFORM": "cpu",
        "VERL_DISABLE_TRITON_FP8": "1",  # verl's quantizer for the stock FP8 rollout, in plain torch
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        # Trainer and rollout take turns: each may use every core.
        "OMP_NUM_THREADS": str(min(os.cpu_count() or 1, 8)),
        # A thread that spins for its next task takes the core from the side whose turn it is.
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
    },
    "gpu": {
        # vLLM rounds scales up to powers of two on Hopper by default; the format has FP32 scales.
        "VLLM_USE_DEEP_GEMM_E8M0": "0",
        # vLLM chooses its model runner by architecture: pinned, so that all arms and models use one.
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        KERNEL_CACHE[0]: KERNEL_CACHE[1],
    },
}


def run_tmp(run_id: str) -> Path:
    """Folder of the run's sockets and Ray's files.  Short: the paths of sockets must stay under 107 bytes."""
    return Path("/tmp") / f"jetrl-{run_id}"


def make_run_tmp() -> Path:
    """:func:`run_tmp` of this run, made if missing: on the nodes of a Ray that ran before it, nothing else does."""
    folder = run_tmp(os.environ[RUN_ID])
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def socket_of_run(handle: str) -> str:
    """verl's ZeroMQ handle ``ipc:///tmp/NAME`` in this run's folder; as it is outside a run.

    verl tells jobs apart by Ray's job id, which is the same in every run that starts a Ray of its own.  Two such runs on one
    machine would take each other's socket away.
    """
    return f"ipc://{make_run_tmp() / Path(handle).name}" if os.environ.get(RUN_ID) else handle


def machine_environment(machine: str) -> dict[str, str]:
    """What a machine ("cpu" or "gpu") needs set before verl or vLLM is imported."""
    return {**_COMMON, **_MACHINE[machine]}


def environment(machine: str, run_id: str, run_dir: Path, segment: Path) -> dict[str, str]:
    """The environment of a run's first process: what the user set wins over the defaults here."""
    fixed = {
        RUN_ID: run_id,
        "VERL_FILE_LOGGER_PATH": str(segment),
        "TENSORBOARD_DIR": str(run_dir / "tensorboard"),
        # vLLM leaves its sockets behind when it is killed: here they go with the folder.
        "VLLM_RPC_BASE_PATH": str(run_tmp(run_id)),
        "PYTHONUNBUFFERED": "1",
    }
    assert fixed.keys() <= _OF_RUN
    return {**machine_environment(machine), **os.environ, **fixed}


def passed_on() -> dict[str, str]:
    """What this environment says of the run, for the workers of a Ray that ran before it.  Ray's own settings are not: they
    are read when Ray starts."""
    names = {name for name in (*_COMMON, *_MACHINE["cpu"], *_MACHINE["gpu"]) if not name.startswith("RAY_")} | _OF_RUN
    return {name: value for name, value in os.environ.items() if name in names or name.startswith("JETRL_")}


def ray_address(config: DictConfig) -> str | None:
    """The Ray that runs already and that the run joins; None where the run starts one of its own."""
    address = os.environ.get("RAY_ADDRESS") or OmegaConf.select(config, "ray_kwargs.ray_init.address")  # Ray's order
    return None if address == "local" else address
