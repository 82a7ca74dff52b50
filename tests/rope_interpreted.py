"""Run by test_rope.py under TRITON_INTERPRET=1: the kernels of rope.py on the CPU against the reference."""

import torch

from verl.jetrl.fp8 import kernels
from verl.jetrl.model import rope


def same(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal bits; NaN equals NaN."""
    assert got.shape == want.shape and got.dtype == want.dtype, f"{name}: {got.shape} {got.dtype}, want {want.shape}"
    equal = (got == want) & (torch.signbit(got) == torch.signbit(want)) | got.isnan() & want.isnan()
    assert bool(equal.all()), f"{name}: {int((~equal).sum())} of {got.numel()} values differ"


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def close(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    error = (got.double() - want.double()).norm() / want.double().norm()
    assert got.shape == want.shape and got.dtype == want.dtype and error < 1e-3, f"{name}: {error}"


def case(M: int, heads: int, kv_heads: int, D: int, norm: bool) -> None:
    wide = randn(M, (heads + 2 * kv_heads) * D + 24) * torch.exp(2 * torch.randn(M, 1)).bfloat16()
    qkv = wide[:, :-24]
    cos_sin = torch.randn(50, D)
    positions = torch.randint(0, 50, (M,))
    if M > 3:
        positions[2], positions[3] = 50, -1
    weights = (randn(D), randn(D)) if norm else (None, None)
    arguments = (qkv, positions, cos_sin, *weights)
    got = rope._Cuda.qk_norm_rope(*arguments, heads, kv_heads, D, 1e-6)
    want = rope._Cpu.qk_norm_rope(*arguments, heads, kv_heads, D, 1e-6)
    for name, a, b in zip("qk", got, want, strict=True):
        same(f"{name} of {M}x{heads}/{kv_heads}x{D}", a, b)
    if M > 3:
        assert got[0][2:4].isnan().all() and got[0][:2].isfinite().all()
        positions[2:4] = 0
    grads = randn(M, heads, D), randn(M, kv_heads, D), randn(M, kv_heads, D)
    got = rope._Cuda.qk_norm_rope_backward(*grads, qkv if norm else None, *arguments[1:], 1e-6)
    want = rope._Cpu.qk_norm_rope_backward(*grads, qkv if norm else None, *arguments[1:], 1e-6)
    close("d_qkv", got[0], want[0])
    same("dv", got[0][:, -kv_heads * D :], want[0][:, -kv_heads * D :])
    if norm:
        close("d_norm", got[1], want[1])
    else:
        same("d_norm", got[1], want[1])


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    assert not kernels.NATIVE
    for norm in (True, False):
        case(9, 4, 2, 128, norm)
        case(6, 9, 3, 64, norm)
    case(1, 3, 1, 96, True)
    case(5, 2, 1, 6, True)
    case(3, 1, 1, 256, True)
