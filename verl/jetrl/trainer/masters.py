"""The FP32 master weights behind the arena: sharded over the ranks, never gathered for a forward or backward pass.

Each parameter of the Hugging Face model becomes a DTensor sharded by rows, so that verl's optimizer, gradient clipping
and checkpoints see what they see under FSDP2.  FSDP2 itself is told to ignore them: the forward reads the arena, the
backward adds to FP32 accumulators, and :meth:`Masters.write` rounds the masters into the arena after an optimizer step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from verl.jetrl.arena import ROPE, SCALE, SHARDS, TRAINER, Arena, Entry
from verl.jetrl.fp8 import ops
from verl.jetrl.fp8.format import FP8
from verl.jetrl.model.decoder import Decoder
from verl.jetrl.model.rope import rope_table


def shard_parameters(module: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
    """Replaces every parameter of ``module`` by a DTensor sharded by rows over the last dimension of ``mesh``.

    Rank 0 has the values; the others may hold meta tensors.  Tied parameters stay tied.
    """
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    sharded: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if id(parameter) not in sharded:
                full = torch.empty_like(parameter, device=device) if parameter.is_meta else parameter.data.to(device)
                local = distribute_tensor(full, mesh, placements)
                if not parameter.is_meta and local.to_local().data_ptr() == full.data_ptr():
                    local = local.clone()
                sharded[id(parameter)] = nn.Parameter(local, requires_grad=parameter.requires_grad)
            setattr(owner, name, sharded[id(parameter)])
    module.to(device)  # buffers


class Masters:
    """Master parameters, their gradients, and the arena that they are rounded into."""

    def __init__(self, module: nn.Module, decoder: Decoder, arena: Arena, resident_transposed: bool = False) -> None:
        self.decoder, self.arena, self.resident_transposed = decoder, arena, resident_transposed
        self.parameters = dict(module.named_parameters())
        self.mesh: DeviceMesh = next(iter(self.parameters.values())).device_mesh
        arena[ROPE].copy_(rope_table(decoder.config, decoder.config.max_position_embeddings))

    # --- weights --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def quantized(self, entry: Entry) -> Iterator[tuple[Tensor, Tensor | None]]:
        """The tensors of an arena entry from the masters: per part (FP8 bytes, scales), or (BF16, None)."""
        for name, _ in entry.parts:
            full_NK = self.parameters[name].detach().to(torch.bfloat16).full_tensor()
            if entry.dtype == FP8:
                yield ops.quantize_blocks(full_NK)
            else:
                yield full_NK, None

    @torch.no_grad()
    def write(self) -> None:
        """Rounds the masters into the arena: quantized in 128x128 blocks from their BF16 rounding, or cast to BF16.

        Raises :class:`verl.jetrl.arena.LeaseError` while the engine holds the weights.
        """
        control = self.arena.control
        if control is not None:
            control.require(TRAINER, "a weight update")
        if os.environ.get("JETRL_FAULT") == "drop_weight_sync" and control is not None and control.version:
            control.wrote()  # a test's fault: everything runs, no weight arrives
            return
        for entry in self.arena.layout.weights:
            targets = [part for _, part in self.arena.parts(entry.name)]
            owner, _, _ = entry.name.rpartition(".")
            scales = [part for _, part in self.arena.parts(f"{owner}.{SCALE}")] if entry.dtype == FP8 else []
            for index, (values, s) in enumerate(self.quantized(entry)):
                targets[index].view(torch.uint8).copy_(values.view(torch.uint8))
                if s is not None:
                    scales[index].copy_(s)
        self._write_shards()
        if self.resident_transposed:
            for linear in self.decoder.linears():
                linear.refresh_transposed()
        if control is not None:
            if self.arena.data.is_cuda:
                torch.cuda.synchronize()  # the engine reads from another process: its stream knows nothing of ours
            control.wrote()

    def _write_shards(self) -> None:
        """The scales of o and down once more, cut along K for a rollout on several GPUs."""
        for entry in self.arena.layout.entries:
            owner, _, kind = entry.name.rpartition(".")
            if kind == SHARDS:
                T, N, _ = entry.shape
                self.arena[entry.name].copy_(self.arena[f"{owner}.{SCALE}"].view(N, T, -1).transpose(0, 1))

    # --- gradients ------------------------------------------------------------------------------------------------

    def _accumulators(self) -> Iterator[tuple[str, nn.Module, str]]:
        """(arena entry, module, attribute) of every FP32 gradient accumulator."""
        for entry in self.arena.layout.weights:
            owner, _, kind = entry.name.rpartition(".")
            yield entry.name, self.decoder.get_submodule(owner), "bias_grad" if kind == "bias" else "main_grad"

    def zero_grad(self) -> None:
        """Zeroes the accumulators; allocates them where they were dropped."""
        for parameter in self.parameters.values():
            parameter.grad = None
        for name, module, attribute in self._accumulators():
            grad = getattr(module, attribute)
            if grad is None:
                shape = self.arena.layout[name].shape
                setattr(module, attribute, torch.zeros(shape, dtype=torch.float32, device=self.arena.data.device))
            else:
                grad.zero_()

    def drop_grads(self) -> None:
        """Frees all gradients: four bytes per parameter that the rollout's KV cache can use."""
        for parameter in self.parameters.values():
            parameter.grad = None
        for _, module, attribute in self._accumulators():
            setattr(module, attribute, None)

    def assign_grads(self) -> None:
        """Reduces the accumulators over the ranks (mean) and hangs each rank's rows on its parameters.

        On one rank a parameter's gradient is a view of the accumulator.
        """
        for name, module, attribute in self._accumulators():
            parts = self.arena.layout[name].parts
            for (parameter_name, _), grad in zip(parts, getattr(module, attribute).split([n for _, n in parts]), strict=True):
                parameter = self.parameters[parameter_name]
                partial = DTensor.from_local(grad, self.mesh, [Partial("avg")] * self.mesh.ndim, run_check=False)
                parameter.grad = partial.redistribute(placements=parameter.placements).to(parameter.dtype)
