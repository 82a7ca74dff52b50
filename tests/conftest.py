"""Shared by all tests: where things are, and what a machine without a GPU needs set before verl or vLLM is imported."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent

if not torch.cuda.is_available():
    os.environ.setdefault("VERL_PLATFORM", "cpu")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return ROOT


def pytest_sessionfinish() -> None:
    """Collects what failing weight updates left in cycles now, so that nothing is printed after pytest's last line."""
    gc.collect()
