"""The hash of a tensor's bytes: its definition, what it sees, what it refuses; the Triton kernel under the interpreter."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from verl.jetrl.checksum import checksum

MASK = 2**64 - 1


def by_definition(data: bytes) -> int:
    """SplitMix64's finalizer of each signed 4-byte word plus (its position + 1) golden-ratio steps, summed modulo 2**64."""
    total = 0
    for i, (word,) in enumerate(struct.iter_unpack("<i", data)):
        x = (word + (i + 1) * 0x9E3779B97F4A7C15) & MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        total += x ^ (x >> 31)
    return total & MASK


def of(data: bytes) -> int:
    return checksum(torch.tensor(list(data), dtype=torch.uint8)).item() & MASK


@pytest.mark.parametrize("words", [0, 1, 2, 17, 1000])
def test_against_plain_integers(words):
    for data in (random.Random(words).randbytes(4 * words), bytes(4 * words), b"\xff" * 4 * words):
        assert of(data) == by_definition(data)


def test_splitmix64s_published_numbers():
    """Words of zero give SplitMix64's own stream of seed 0."""
    assert of(bytes(4)) == 0xE220A8397B1DCDAF
    assert of(bytes(8)) == (0xE220A8397B1DCDAF + 0x6E789E6AA1B965F4) & MASK


def test_every_bit_every_place_and_the_length_count():
    data = bytearray(random.Random(1).randbytes(64))
    seen = {of(data)}
    variants = 1
    for i in range(len(data)):
        for bit in range(8):
            data[i] ^= 1 << bit
            seen.add(of(data))
            data[i] ^= 1 << bit
            variants += 1
    words = [bytes(data[i : i + 4]) for i in range(0, 64, 4)]
    for i in range(16):
        for j in range(i):  # two words swapped: a plain sum does not see it
            swapped = words.copy()
            swapped[i], swapped[j] = swapped[j], swapped[i]
            seen.add(of(b"".join(swapped)))
            variants += 1
    for i in range(1, 64):  # rotated
        seen.add(of(data[i:] + data[:i]))
        variants += 1
    for i in range(16):  # cut short, longer by zeros or by itself
        seen |= {of(data[: 4 * i]), of(data + bytes(4 * (i + 1)))}
        variants += 2
    assert len(seen) == variants


def test_it_is_the_bytes_whatever_their_type_or_shape():
    torch.manual_seed(0)
    x = torch.randn(6, 8)
    wanted = checksum(x)
    assert wanted.shape == () and wanted.dtype == torch.int64
    for view in (x.view(torch.uint8), x.view(torch.bfloat16), x.view(torch.float8_e4m3fn), x.view(4, 12), x.view(torch.int64)):
        assert checksum(view) == wanted
    assert checksum(x.requires_grad_()) == wanted and not checksum(x).requires_grad
    zero, nan = torch.zeros(1), torch.full((1,), torch.nan)
    assert checksum(zero) != checksum(-zero), "equal as numbers, not as bytes"
    assert checksum(nan) == checksum(nan.clone())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, dtype=torch.uint8),
        torch.zeros(5, 1).bfloat16(),
        torch.zeros(4, 6).t(),
        torch.zeros(4, 8)[:, :4],
        torch.zeros(8, dtype=torch.uint8)[::2],
    ],
)
def test_what_is_refused(tensor):
    with pytest.raises(ValueError, match="contiguous tensor of whole 4-byte words"):
        checksum(tensor)


def test_the_triton_kernel_under_the_interpreter():
    """A machine without a GPU runs the kernel's own source."""
    script = str(Path(__file__).parent / "checksum_interpreted.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
