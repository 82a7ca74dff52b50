"""A CPU platform for verl, registered with its ``PlatformRegistry`` as "cpu".

verl has no CPU platform of its own.  Ray sees logical GPUs (``ray.init(num_gpus=N)``), so placement is untouched; tensors
live on the CPU and weights travel through POSIX shared memory instead of CUDA IPC.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import ModuleType
from typing import Any

import psutil
import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


class CpuDeviceModule(ModuleType):
    """What verl calls on "the device module" (``torch.cuda`` elsewhere): torch.cpu, and CUDA's memory calls as no-ops."""

    def __init__(self) -> None:
        super().__init__("verl_jetrl_cpu_device")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    # verl asks is_available() before it seeds or measures an accelerator: there is none.
    def is_available(self) -> bool:
        return False

    def get_device_name(self, *_: Any) -> str:
        return "cpu"

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: Any) -> None:
        torch.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def _nothing(self, *_: Any, **__: Any) -> int:
        return 0

    empty_cache = ipc_collect = set_device = synchronize = reset_peak_memory_stats = _nothing
    memory_allocated = memory_reserved = _nothing

    def max_memory_allocated(self, *_: Any) -> int:
        """Peak resident memory of this process in bytes: what stands for device memory here."""
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    max_memory_reserved = max_memory_allocated


_DEVICE_MODULE = CpuDeviceModule()


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """The CPU as verl's device; selected with ``VERL_PLATFORM=cpu``."""

    device_name = property(lambda self: "cpu")
    vendor_name = property(lambda self: "cpu")
    device_module = property(lambda self: _DEVICE_MODULE)

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # never detected by itself: a machine with a GPU must not fall back silently

    # verl moves tensors with .to(current_device()); an integer would mean accelerator 0.
    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: Any) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "JETRL_CPU_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        return {}

    @contextmanager
    def nvtx_range(self, msg: str):
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def cudart(self) -> None:
        return None
