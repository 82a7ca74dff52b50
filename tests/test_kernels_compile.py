"""Every Triton kernel of the project compiles for a Hopper GPU, to machine code, on a machine without one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from verl.jetrl import checksum
from verl.jetrl.fp8 import kernels
from verl.jetrl.fp8.format import FP8, Quantized
from verl.jetrl.model import rope
from verl.jetrl.trainer import softmax

K, I, HEADS, KV_HEADS, D, V = 512, 256, 4, 2, 64, 4096


@pytest.fixture
def compiled(monkeypatch):
    """What is launched is compiled for an H100 and does not run: its name comes into this list, unless it was there before."""
    hopper = SimpleNamespace(
        get_current_device=lambda: "H100",
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    run, names = JITFunction.run, []
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, warmup, **kwargs: run(self, *args, warmup=True, **kwargs))
    monkeypatch.setattr(triton.runtime.driver, "_active", hopper)  # its own setters ask for a driver to go back to
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_cache_hook = lambda *, fn, **_: names.append(fn.name.rpartition(".")[2])
        yield names
    for module in (kernels, rope, softmax, checksum):
        for kernel in vars(module).values():
            if isinstance(kernel, JITFunction):
                kernel.device_caches.pop("H100", None)


def bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def of_tokens(M: int) -> None:
    """Launches every kernel whose arguments depend on the number of tokens."""
    x, weight, gate_up, dy = bf16(M, K), bf16(K), bf16(M, 2 * I), bf16(M, I)
    for transposed in ("group", "block"):
        rows, _ = kernels.quantize(x, True, transposed)
        kernels.quantize(x, False, transposed)
        kernels.regroup(rows, transposed)
        kernels.silu_mul(gate_up, True, transposed)
        kernels.rms_norm_transposed(x, torch.empty(M), weight, transposed)
    kernels.quantize(x, True, None)
    kernels.silu_mul(gate_up, True, None)
    kernels.silu_mul_bf16(gate_up)
    kernels.silu_mul_backward(gate_up, dy)
    kernels.silu_mul_backward_quantize(gate_up, dy)
    for residual in (None, x):
        kernels.rms_norm(x, weight, 1e-6, residual, fp8=True, bf16=False)
        kernels.rms_norm(x, weight, 1e-6, residual, fp8=False, bf16=True)
        kernels.rms_norm_backward(x, x, torch.empty(M), weight, residual)
    qkv, positions, table = bf16(M, (HEADS + 2 * KV_HEADS) * D), torch.empty(M, dtype=torch.int64), torch.empty(128, D)
    kernels.widen(bf16(M, V), torch.empty(M, V), False)
    dq, dk = bf16(M, HEADS, D), bf16(M, KV_HEADS, D)
    for norm in (None, bf16(D)):
        rope._Cuda.qk_norm_rope(qkv, positions, table, norm, norm, HEADS, KV_HEADS, D, 1e-6)
        rope._Cuda.qk_norm_rope_backward(dq, dk, dk, qkv, positions, table, norm, norm, 1e-6)


def of_weights() -> None:
    """Launches the others."""
    w, q, s = bf16(K, I), torch.empty(K, I, dtype=FP8), torch.empty(K // 128, I // 128)
    for transposed in (False, True):
        kernels.quantize_weight(w, transposed)
        kernels.quantize_weight(w.float(), transposed)
    kernels.quantize_masters([(w.float(), Quantized(q, s))])
    kernels.transpose_bytes(q)
    for add in (False, True):
        kernels.widen(w, w.float(), add)
    logits, numbers = torch.empty(4, V), torch.empty(4)
    softmax._entropy_kernel[(4,)](logits, numbers, V, BLOCK=softmax.BLOCK, num_warps=softmax.WARPS)
    for first in (0, 1):  # views that begin anywhere
        ids, temperatures = torch.empty(5, dtype=torch.int64)[first:], torch.empty(5)[first:]
        softmax._gradient_kernel[(4,)](
            logits.bfloat16(), ids, temperatures, numbers, V, V - 7, BLOCK=softmax.BLOCK, num_warps=softmax.WARPS
        )  # fmt: skip
    constants = dict(STEP=checksum._STEP, MIX_1=checksum._MIX_1, MIX_2=checksum._MIX_2, BLOCK=checksum._BLOCK)
    checksum._checksum_kernel[(4,)](torch.empty(64, dtype=torch.int32), torch.zeros((), dtype=torch.int64), 64, 4, **constants)


def test_every_kernel_compiles(compiled):
    of_tokens(100)
    of_weights()
    known = {
        kernel.__name__
        for module in (kernels, rope, softmax, checksum)
        for kernel in vars(module).values()
        if isinstance(kernel, JITFunction) and kernel.__name__.endswith("_kernel")
    }
    assert set(compiled) == known
    assert compiled.count("_gradient_kernel") == 1


@pytest.mark.parametrize("first, others", ((2, (1, 16, 64)), (100, (97, 112, 1024)), (1030, (1025, 1152, 4100))))
def test_no_kernel_of_its_own_for_a_number_of_tokens(compiled, first, others):
    """Of the tile sizes' three ranges, one number of tokens has all compiled that others need: else a run would compile in its
    first steps, seconds for each."""
    of_tokens(first)
    assert compiled
    compiled.clear()
    for M in others:
        of_tokens(M)
    assert not compiled
