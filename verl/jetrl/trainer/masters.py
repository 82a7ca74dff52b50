"""The FP32 master weights behind the arena: sharded over the ranks, never gathered for a forward or backward pass.

Each parameter of the Hugging Face model becomes a DTensor sharded by rows, so that verl's optimizer, gradient clipping
and checkpoints see what they see under FSDP2.  FSDP2 itself is told to ignore them: the forward reads the arena, the
backward adds to FP32 accumulators (:mod:`verl.jetrl.trainer.gradients`), and :meth:`Masters.write` rounds the masters into
the arena after an optimizer step: every rank its own rows, whose FP8 bytes the ranks then exchange.  With a
:class:`verl.jetrl.window.Window` those stay where they are until a layer needs them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from verl.jetrl.arena import ROPE, SCALE, TRAINER, Arena, Entry
from verl.jetrl.fp8 import ops
from verl.jetrl.fp8.format import BLOCK, FP8, Quantized
from verl.jetrl.model.autograd import GradientSink
from verl.jetrl.model.decoder import Decoder
from verl.jetrl.model.rope import rope_table
from verl.jetrl.trainer.gradients import Gradients
from verl.jetrl.window import Window, all_gather

TOGETHER = 32  # tensors of an update that are gathered at a time, while the next ones are quantized


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
        arena[ROPE].copy_(rope_table(decoder.config, decoder.config.max_position_embeddings))

    # --- weights --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def quantized(self, entry: Entry) -> Iterator[tuple[Tensor, Tensor | None]]:
        """The tensors of an arena entry from the masters: per part (FP8 bytes, scales), or (BF16, None)."""
        for name, _ in entry.parts:
            if self.mesh.size() == 1 and entry.dtype == FP8:  # FP32 is rounded to BF16 while it is quantized
                yield ops.quantize_blocks(self._here(name).to_local())
                continue
            full_NK = self._here(name).to(torch.bfloat16).full_tensor()
            yield ops.quantize_blocks(full_NK) if entry.dtype == FP8 else (full_NK, None)

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
        on_way, pairs, group = [], [], self.mesh.get_group(self._shards)
        for entry in self.arena.layout.weights:
            pairs += self._write(entry)
            if len(pairs) >= TOGETHER:
                on_way += all_gather(pairs, group)
                pairs = []
        for work in (*on_way, *all_gather(pairs, group)):
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

    def _write(self, entry: Entry) -> Iterator[tuple[Tensor, Tensor]]:
        """Writes this rank's rows of one entry; yields what is left to gather: whole, own rows."""
        if entry.dtype != FP8:
            for name, target in self.arena.parts(entry.name):
                yield from self._round(name, [target])
            return
        arena = self.arena if self.window is None else self.window.home
        scales = arena.parts(f"{entry.name.rpartition('.')[0]}.{SCALE}")
        for (name, target), (_, scale) in zip(arena.parts(entry.name), scales, strict=True):
            if self.window is None:
                yield from self._round(name, [target, scale], BLOCK)
            else:
                _round_into([target, scale], self._here(name).to_local())

    def _round(self, name: str, targets: list[Tensor], block: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """Rounds a parameter into ``targets``, (BF16) or (FP8, scales): this rank its own rows; yields them with the whole.

        One read of the masters and one write of the arena; the gathers need no memory but the arena's.  Where the ranks' rows
        differ in number, or a block of ``block`` rows would straddle two ranks, every rank gathers the BF16 rows and rounds
        them all.
        """
        parameter, ranks = self._here(name), self.mesh.size(self._shards)
        if ranks > 1 and parameter.shape[0] % (ranks * block):
            _round_into(targets, parameter.to(torch.bfloat16).full_tensor())
            return
        mine = [target.chunk(ranks)[self.mesh.get_local_rank(self._shards)] for target in targets] if ranks > 1 else targets
        _round_into(mine, parameter.to_local())
        if ranks > 1:
            yield from zip(targets, mine, strict=True)

    def _here(self, name: str) -> DTensor:
        """A master on the arena's device, wherever offloading left it."""
        return self.parameters[name].detach().to(self.arena.data.device)

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
        for entry in self.arena.layout.weights:
            owner, _, kind = entry.name.rpartition(".")
            attribute = "bias_grad" if kind == "bias" else "main_grad"
            setattr(self.decoder.get_submodule(owner), attribute, sinks.get(entry.name))

    def assign_grads(self) -> None:
        """Hangs each rank's rows of the mean gradients on its parameters: views of the accumulators."""
        for name, rows in self._gradients.reduced():
            parameter = self.parameters[name]
            grad = DTensor.from_local(
                rows, self.mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
            )
            parameter.grad = grad.to(parameter.dtype)


def _round_into(targets: list[Tensor], rows: Tensor) -> None:
    if len(targets) == 1:
        targets[0].copy_(rows)
    else:
        ops.quantize_blocks(rows, Quantized(*targets))
