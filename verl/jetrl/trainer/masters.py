"""The FP32 master weights behind the arena: sharded over the ranks, never gathered for a forward or backward pass.

Each parameter of the Hugging Face model becomes a DTensor sharded by rows, so that verl's optimizer, gradient clipping
and checkpoints see what they see under FSDP2.  FSDP2 itself is told to ignore them: the forward reads the arena, the
backward adds to FP32 accumulators (:mod:`verl.jetrl.trainer.gradients`), and :meth:`Masters.write` rounds the masters into
the arena after an optimizer step: every rank its own rows, whose FP8 bytes the ranks then exchange.  With a
:class:`verl.jetrl.window.Window` those stay where they are until a layer needs them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from verl.jetrl.arena import ROPE, TRAINER, Arena, Entry, scale_of
from verl.jetrl.fp8 import ops
from verl.jetrl.fp8.format import BLOCK, FP8, Quantized, groups
from verl.jetrl.model.autograd import GradientSink
from verl.jetrl.model.decoder import Decoder
from verl.jetrl.model.rope import rope_table
from verl.jetrl.trainer.gradients import Gradients
from verl.jetrl.window import Window, all_gather

TOGETHER = 64  # tensors of an update that are gathered at a time, while the next ones are quantized


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


@dataclass(frozen=True)
class _Rounding:
    """A parameter's way into the arena: its rows are rounded into ``into``, (BF16) or (FP8, scales), and then gathered.

    ``into``: this rank's rows of the parameter.  ``gathered``: (whole, this rank's rows), straight in the arena, so that a
    gather needs no memory of its own.  ``all_rows``: where the ranks' rows differ in number, or a block of rows would straddle
    two ranks, every rank gathers the BF16 rows and rounds them all.
    """

    name: str
    into: list[Tensor]
    gathered: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    all_rows: bool = False


class Masters:
    """Master parameters, their gradients, and the arena that they are rounded into.

    An arena with slots gets a window, which the decoder's layers ask for their weights.  ``deferred``: gradients are reduced
    once, before the optimizer's step.
    """

    def __init__(
        self, module: nn.Module, decoder: Decoder, arena: Arena, resident_transposed: bool = False, deferred: bool = False
    ) -> None:
        self.decoder, self.arena = decoder, arena
        self.resident_transposed, self.deferred = resident_transposed, deferred
        self.parameters = dict(module.named_parameters())
        self.mesh: DeviceMesh = next(iter(self.parameters.values())).device_mesh
        self._shards = self.mesh.ndim - 1  # the mesh's dimension over which rows are sharded
        self._gradients: Gradients | None = None
        self.window = Window(arena, self.mesh) if arena.layout.slots else None
        if self.window is not None:
            for index, layer in enumerate(decoder.model.layers):
                for linear in layer.linears():
                    linear.ensure = partial(self.window.ensure, index)
        self._roundings = list(self._plan())
        arena[ROPE].copy_(rope_table(decoder.config, decoder.config.max_position_embeddings))

    # --- weights --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def quantized(self, entry: Entry) -> tuple[Tensor, Tensor | None]:
        """What an arena entry must hold, from the masters: (FP8 bytes, scales), or (BF16, None)."""
        rows = [n for _, n in entry.parts]
        whole = torch.empty(entry.shape, dtype=entry.dtype, device=self.arena.data.device)
        masters = [self._rows(name) if self.mesh.size() == 1 else self._gathered(name) for name, _ in entry.parts]
        if entry.dtype != FP8:
            for part, master in zip(whole.split(rows), masters, strict=True):
                part.copy_(master)
            return whole, None
        scales = torch.empty(self.arena.layout[scale_of(entry)].shape, dtype=torch.float32, device=whole.device)
        parts = zip(whole.split(rows), scales.split([groups(n) for n in rows]), strict=True)
        ops.quantize_masters([(master, Quantized(*part)) for master, part in zip(masters, parts, strict=True)])
        return whole, scales

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
        if self.window is not None:
            self.window.forget()
        on_way, group = [], self.mesh.get_group(self._shards)
        for first in range(0, len(self._roundings), TOGETHER):
            some = self._roundings[first : first + TOGETHER]
            self._round(some)
            gathered = [pair for rounding in some for pair in rounding.gathered]
            on_way += all_gather(gathered, group)
        for work in on_way:
            work.wait()
        self.arena.cut_scales()
        if self.resident_transposed:
            for linear in self.decoder.linears():
                linear.refresh_transposed()
        if control is not None:
            if self.arena.data.is_cuda:
                # The engine reads from another process: its stream knows nothing of ours.
                torch.cuda.synchronize(self.arena.data.device)
            control.wrote()

    def _plan(self) -> Iterator[_Rounding]:
        """Where each parameter goes: names and views, made once and not in every update."""
        ranks, rank = self.mesh.size(self._shards), self.mesh.get_local_rank(self._shards)
        for entry in self.arena.layout.weights:
            fp8 = entry.dtype == FP8
            home = fp8 and self.window is not None  # own rows stay where they are
            arena = self.window.home if home else self.arena
            targets = [[whole] for _, whole in arena.parts(entry.name)]
            if fp8:
                scales = arena.parts(scale_of(entry))
                targets = [[*whole, scale] for whole, (_, scale) in zip(targets, scales, strict=True)]
            for (name, _), whole in zip(entry.parts, targets, strict=True):
                if home or ranks == 1:
                    yield _Rounding(name, whole)
                elif self.parameters[name].shape[0] % (ranks * (BLOCK if fp8 else 1)):
                    yield _Rounding(name, whole, all_rows=True)
                else:
                    own = [x.chunk(ranks)[rank] for x in whole]
                    yield _Rounding(name, own, gathered=list(zip(whole, own, strict=True)))

    def _round(self, roundings: Sequence[_Rounding]) -> None:
        """One read of the masters and one write of the arena."""
        together = []
        for rounding in roundings:
            rows = self._gathered(rounding.name) if rounding.all_rows else self._rows(rounding.name)
            if len(rounding.into) == 1:
                rounding.into[0].copy_(rows)
            elif rounding.all_rows or self.parameters[rounding.name].device != rows.device:
                ops.quantize_blocks(rows, Quantized(*rounding.into))  # a copy: not held until the others have come
            else:
                together.append((rows, Quantized(*rounding.into)))
        ops.quantize_masters(together)

    def _rows(self, name: str) -> Tensor:
        """This rank's rows of a master on the arena's device, wherever offloading left them."""
        return self.parameters[name].to_local().to(self.arena.data.device)

    def _gathered(self, name: str) -> Tensor:
        """All ranks' rows of a master, in BF16."""
        return self.parameters[name].detach().to(self.arena.data.device).to(torch.bfloat16).full_tensor()

    # --- gradients ------------------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Zeroes the accumulators; allocates them where they were dropped."""
        for parameter in self.parameters.values():
            parameter.grad = None
        if self._gradients is None:
            self._gradients = Gradients(self.arena.layout, self.mesh, self.arena.data.device, self.deferred)
            self._attach(self._gradients.sinks)
        else:
            self._gradients.zero_()

    def allocate_grads(self) -> None:
        """Zeroed accumulators where there are none; gradients so far are kept."""
        if self._gradients is None:
            self.zero_grad()

    def drop_grads(self) -> None:
        """Frees all gradients: memory that the rollout's KV cache can use."""
        for parameter in self.parameters.values():
            parameter.grad = None
        if self._gradients is not None:
            self._gradients.finish()
        self._gradients = None
        self._attach({})

    def _attach(self, sinks: Mapping[str, Tensor | GradientSink]) -> None:
        """Gives the decoder's layers what their backward adds to."""
        for name, layer, attribute in self._adders:
            setattr(layer, attribute, sinks.get(name))

    @cached_property
    def _adders(self) -> list[tuple[str, nn.Module, str]]:
        """By arena entry the layer whose backward has its gradient, and the attribute that the layer adds to."""
        owners = [(entry.name, *entry.name.rpartition(".")[::2]) for entry in self.arena.layout.weights]
        attributes = {"bias": "bias_grad"}
        return [(name, self.decoder.get_submodule(owner), attributes.get(kind, "main_grad")) for name, owner, kind in owners]

    def assign_grads(self) -> None:
        """Hangs each rank's rows of the mean gradients on its parameters: views of the accumulators."""
        for name, rows in self._gradients.reduced():
            parameter = self.parameters[name]
            grad = DTensor.from_local(
                rows, self.mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
            )
            parameter.grad = grad.to(parameter.dtype)
