"""Memory in use on this machine's GPUs by all processes together: trainer and vLLM, their CUDA contexts and graphs.

torch counts what one process allocated; what decides whether a job fits is what the driver says.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from verl.jetrl.memory_plan import GIB


def _handles() -> list:
    """NVML's handles of the GPUs of ``CUDA_VISIBLE_DEVICES``, of all without it."""
    import pynvml

    pynvml.nvmlInit()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    named = range(pynvml.nvmlDeviceGetCount()) if visible is None else [name for name in visible.split(",") if name]

    def handle(name: int | str) -> object:
        by_number = str(name).isdecimal()
        return pynvml.nvmlDeviceGetHandleByIndex(int(name)) if by_number else pynvml.nvmlDeviceGetHandleByUUID(name)

    return [handle(name) for name in named]


def meter() -> Callable[[], float]:
    """A function that gives the GiB in use on the fullest GPU of ``CUDA_VISIBLE_DEVICES`` (of all without it), from NVML.

    Takes about a millisecond and no memory on the GPU.  Raises ImportError without package nvidia-ml-py, and pynvml.NVMLError
    where there is no driver or a GPU is named that does not exist.
    """
    import pynvml

    handles = _handles()
    return lambda: max(pynvml.nvmlDeviceGetMemoryInfo(h).used for h in handles) / GIB


def meter_by_process() -> Callable[[], tuple[float, dict[int, float]]]:
    """As :func:`meter`: GiB in use on those GPUs together, and of it by process id.

    A process whose memory the driver does not tell is left out; in some containers that is every one.
    """
    import pynvml

    handles = _handles()

    def measure() -> tuple[float, dict[int, float]]:
        total, by_process = 0.0, {}
        for h in handles:
            total += pynvml.nvmlDeviceGetMemoryInfo(h).used / GIB
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(h):
                if process.usedGpuMemory is not None:
                    by_process[process.pid] = by_process.get(process.pid, 0.0) + process.usedGpuMemory / GIB
        return total, by_process

    return measure
