"""Hashes of weights: trainer and rollout must hold the same ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from verl.jetrl.checksum import checksum

# The rollout's fused layers and the trainer's layers in them, in row order.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
EMBEDDING = "model.embed_tokens.weight"
PART_OF = {part: (fused, i) for fused, parts in FUSED.items() for i, part in enumerate(parts)}


def digest(tensors: Tensor | Iterable[Tensor]) -> str:
    """Hash of one tensor, or of tensors stacked by rows: their bytes in order, total shape and dtype.

    SHA-256 of bytes in host memory; bytes on a GPU are hashed there (:mod:`verl.jetrl.checksum`).
    """
    parts = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    if parts[0].is_cuda:
        stacked = parts[0].detach().contiguous() if len(parts) == 1 else torch.cat([p.view(torch.uint8) for p in parts])
        if stacked.nbytes % 4 == 0:
            return _sum_text(shape, parts[0].dtype).format(checksum(stacked).item())
    sha = hashlib.sha256(f"{shape} {parts[0].dtype}".encode())
    for part in parts:
        data = part.detach().contiguous().cpu().reshape(-1)
        sha.update(data.view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def digests(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """:func:`digest` of each tensor; those on a GPU wait for the host once, together."""
    found: dict[str, str] = {}
    sums: dict[str, Tensor] = {}
    for name, tensor in named:
        if tensor.is_cuda and tensor.nbytes % 4 == 0:
            found[name] = _sum_text(tuple(tensor.shape), tensor.dtype)
            sums[name] = checksum(tensor.detach().contiguous())
        else:
            found[name] = digest(tensor)
    values = torch.stack(list(sums.values())).tolist() if sums else []
    return found | {name: found[name].format(value) for name, value in zip(sums, values, strict=True)}


def _sum_text(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{shape} {dtype} {{:016x}}"


def combined(digests: Iterable[str]) -> str:
    """One SHA-256 of several, in order."""
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def fused_digests(weights: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Digests under the rollout's names of a stream of the trainer's weights (q, k, v and gate, up fused by rows)."""
    digests: dict[str, str] = {}
    waiting: dict[str, dict[int, Tensor]] = {}  # parts of fused layers; hashed when complete, so that few are held
    for name, tensor in weights:
        layer, _, kind = name.rpartition(".")
        parent, _, last = layer.rpartition(".")
        group, index = PART_OF.get(last, (last, 0))
        fused = ".".join(filter(None, (parent, group, kind)))
        waiting.setdefault(fused, {})[index] = tensor
        if len(waiting[fused]) == len(FUSED.get(group, (group,))):
            digests[fused] = _digest_parts(waiting.pop(fused))
    return digests | {name: _digest_parts(parts) for name, parts in waiting.items()}


def _digest_parts(parts: dict[int, Tensor]) -> str:
    return digest(parts[i] for i in sorted(parts))


def compare(trainer: dict[str, str], rollout: dict[str, str], quantized_by_rollout: bool = False) -> list[str]:
    """Names whose digests differ, or that only one side has; empty when both sides hold the same weights.

    ``quantized_by_rollout``: stock FP8 rollouts hold bytes that the trainer never had; only the tensors that stay BF16
    are compared then.
    """
    names = trainer.keys() | rollout.keys()
    if quantized_by_rollout:
        names = {n for n in names if not n.endswith("_proj.weight") and not n.endswith("_scale_inv")}
    if "lm_head.weight" not in rollout and trainer.get("lm_head.weight") == trainer.get(EMBEDDING):
        names -= {"lm_head.weight"}  # tied to the embedding: one tensor in the rollout
    if not names:
        raise ValueError("no tensor is held by both sides: nothing to compare")
    return sorted(n for n in names if trainer.get(n) != rollout.get(n))
