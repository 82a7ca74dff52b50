"""Shared by all tests: where things are, and what a machine without a GPU needs set before verl or vLLM is imported."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))  # decoder_cases

if not torch.cuda.is_available():
    os.environ.setdefault("VERL_PLATFORM", "cpu")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return ROOT


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory):
    """A device mesh of this process alone."""
    import torch.distributed as dist

    rendezvous = tmp_path_factory.mktemp("mesh") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def owned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A run of its own for weight arenas in shared memory, and the list of those to close."""
    monkeypatch.setattr("verl.jetrl.environment.run_tmp", lambda run_id: tmp_path / run_id)
    monkeypatch.setenv("JETRL_RUN", f"test-{os.getpid()}")
    arenas: list = []
    yield arenas
    for arena in arenas:
        arena.close()


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory):
    """Checkpoints of :mod:`checkpoint_cases` by one and by two processes: world size to (folder, what the processes held).

    Copy before changing anything.
    """
    import checkpoint_cases

    made = {}
    for world_size in (1, 2):
        folder = tmp_path_factory.mktemp(f"saved-{world_size}")
        checkpoint_cases.ranks(world_size, "save", folder / "checkpoints", folder / "held")
        made[world_size] = folder / "checkpoints", folder / "held"
    return made


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start jobs come first: they take longest, and run beside the others (``make test``)."""
    items.sort(key=lambda item: item.get_closest_marker("job") is None)


def pytest_sessionfinish() -> None:
    """Collects what failing weight updates left in cycles now, so that nothing is printed after pytest's last line."""
    gc.collect()
