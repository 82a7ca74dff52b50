"""Shapes and inputs shared by the GPU tests."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.jetrl.fp8 import format as ref

# model: {layer: (output features, input features)}, fused as in the rollout
MODELS = {
    "Qwen3-8B": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)},
    "Qwen2.5-7B": {"qkv": (4608, 3584), "o": (3584, 3584), "gate_up": (37888, 3584), "down": (3584, 18944)},
    "Llama-3.1-8B": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
    "Qwen3-0.6B": {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)},
    "SmolLM2-135M": {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)},
}
SHAPES = sorted({shape for layers in MODELS.values() for shape in layers.values()})
HIDDEN = sorted({layers["qkv"][1] for layers in MODELS.values()})
INTERMEDIATE = sorted({layers["down"][1] for layers in MODELS.values()})
WIDTHS = sorted({width for shape in SHAPES for width in shape})
VOCABULARIES = ((151936, 4096), (152064, 3584), (128256, 4096), (151936, 1024))


def randn(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def adversarial(M: int, K: int) -> Tensor:
    """Zeros, NaN, infinities, subnormals, huge values, -0 and a wide spread of magnitudes."""
    x = torch.randn(M, K, device="cuda") * torch.exp(3 * torch.randn(M, K, device="cuda"))
    for row, change in enumerate((0.0, 2.0**-118, 2.0**-130, 2.0**110)):
        if row < M:
            x[row] *= change
    if M > 6:
        x[4, 3], x[5, 200], x[5, 5] = torch.nan, torch.inf, -torch.inf
        x[6, :128] = -0.0
    return x.bfloat16()


def same(got: Tensor, want: Tensor) -> None:
    """Equal bits; NaN equals NaN."""
    assert got.shape == want.shape and got.dtype == want.dtype, (got.shape, got.dtype, want.shape, want.dtype)
    if got.dtype == ref.FP8:
        equal = got.view(torch.uint8) == want.view(torch.uint8)
    else:
        equal = (got == want) & (torch.signbit(got) == torch.signbit(want)) | got.isnan() & want.isnan()
    assert bool(equal.all()), f"{int((~equal).sum())} of {got.numel()} values differ"


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()
