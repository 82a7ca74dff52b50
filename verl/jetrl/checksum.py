"""A 64-bit hash of a tensor's bytes on the device they are on: reading them is the whole cost.

Each 4-byte word is mixed with its position (SplitMix64's finalizer) and the results are summed modulo 2**64, so the hash
depends on every bit and every position but not on the order of the sum.  It tells accidental differences apart, with a
chance of 2**-64 of missing one; it is no defence against an attacker.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_PROGRAMS = 1056  # 8 per multiprocessor of an H200
_STEP = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15, as a signed number
_MIX_1 = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
_MIX_2 = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB


@triton.jit
def _shift(x, by: tl.constexpr):
    """A logical shift to the right of a signed number."""
    return (x >> by) & ((1 << (64 - by)) - 1)


@triton.jit
def _checksum_kernel(
    words, out, n, programs,
    STEP: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    total = tl.zeros((BLOCK,), tl.int64)
    for i in range(tl.cdiv((n - 1) // BLOCK + 1 - tl.program_id(0), programs)):
        at = (tl.program_id(0) + i * programs).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        x = tl.load(words + at, mask=inside, other=0).to(tl.int64) + (at + 1) * STEP
        x = (x ^ _shift(x, 30)) * MIX_1
        x = (x ^ _shift(x, 27)) * MIX_2
        total += tl.where(inside, x ^ _shift(x, 31), 0)
    tl.atomic_add(out, tl.sum(total, 0))  # of integers: the order does not matter


def _shift_cpu(x: Tensor, by: int) -> Tensor:
    return (x >> by) & ((1 << (64 - by)) - 1)


def checksum(tensor: Tensor) -> Tensor:
    """The hash of a contiguous tensor as an int64 tensor () on its device; no synchronization with the host.

    Its size in bytes must be a multiple of 4.
    """
    if not tensor.is_contiguous() or tensor.nbytes % 4:
        raise ValueError(f"checksum: want a contiguous tensor of whole 4-byte words, got {tuple(tensor.shape)} {tensor.dtype}")
    words = tensor.detach().reshape(-1).view(torch.uint8).view(torch.int32)
    if not tensor.is_cuda:
        x = words.to(torch.int64) + torch.arange(1, len(words) + 1) * _STEP
        x = (x ^ _shift_cpu(x, 30)) * _MIX_1
        x = (x ^ _shift_cpu(x, 27)) * _MIX_2
        return (x ^ _shift_cpu(x, 31)).sum()
    out = torch.zeros((), dtype=torch.int64, device=tensor.device)
    programs = min(_PROGRAMS, triton.cdiv(len(words), _BLOCK)) or 1
    _checksum_kernel[(programs,)](words, out, len(words), programs, STEP=_STEP, MIX_1=_MIX_1, MIX_2=_MIX_2, BLOCK=_BLOCK)
    return out
