"""The FP8 weights with ``fsdp_config.arena=sharded``: own rows at home, two layers in a window, streamed to the engine.

Each trainer process keeps its own rows of the FP8 weights and scales (*home*).  The arena has :data:`SLOTS` places for a
whole layer, in the layout that the decoder reads without sharding too: the parameters of layer i are views of place
``i % SLOTS``, and :meth:`Window.ensure` gathers the layer there before it runs.  While it runs, the next one in the direction
of travel is gathered into the other place.

Every rank must gather the same layers in the same order.  What is gathered follows from the calls of ``ensure`` alone: a
layer's first use after another layer's.  Forward passes run the layers in order; autograd runs one graph in one order, a layer
that activation checkpointing computes again next to its own backward; verl gives every rank the same number of micro-batches
(:mod:`verl.jetrl.trainer.gradients` rests on the same, and its reductions fall between the same gathers on each rank).

A place is written to again only after everything that read it: the gather waits for the work that the current stream holds when
it is issued, and nothing saved for a backward is a view of a place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from verl.jetrl.arena import SLOTS, TRAINER, Arena, layer_of, rows_of

NAN = 0xFF  # every byte of a NaN, in FP8 and in FP32


def all_gather(pairs: Sequence[tuple[Tensor, Tensor]], group: dist.ProcessGroup) -> list[dist.Work]:
    """Starts all-gathers of (whole, this rank's rows), which may be a part of whole; on a GPU all in one launch."""
    if not pairs:
        return []
    pairs = [(_bytes(whole), _bytes(own)) for whole, own in pairs]
    if pairs[0][0].is_cuda:
        with dist._coalescing_manager(group, async_ops=True) as together:
            for whole, own in pairs:
                dist.all_gather_into_tensor(whole, own, group=group)
        return together.works
    return [dist.all_gather_into_tensor(whole, own, group=group, async_op=True) for whole, own in pairs]


def _bytes(x: Tensor) -> Tensor:
    """As bytes: collectives do not know FP8, and NCCL's coalesced ones want one type for all tensors."""
    return x.view(torch.uint8)


class Window:
    """A trainer process's home rows and the places of an arena with ``layout.slots``.

    Raises ValueError where the ranks' rows are no whole blocks, see :func:`verl.jetrl.arena.rows_of`.
    """

    def __init__(self, arena: Arena, mesh: DeviceMesh) -> None:
        self.arena, self.group = arena, mesh.get_group(mesh.ndim - 1)
        self.home = Arena.private(rows_of(arena.layout, mesh.size(mesh.ndim - 1)), arena.data.device)
        self._pairs: list[list[tuple[Tensor, Tensor]]] = []  # of each layer: whole, own rows
        for entry in self.home.layout.entries:
            layer = layer_of(entry.name)
            self._pairs += [[] for _ in range(layer + 1 - len(self._pairs))]
            parts = zip(arena.parts(entry.name), self.home.parts(entry.name), strict=True)
            # .data: a place is written to while views of the same memory, norms and RoPE table, are saved for a backward.
            self._pairs[layer] += [(whole.data, own) for (_, whole), (_, own) in parts]
        self._held: list[int | None] = [None] * SLOTS
        self._on_way: list[list[dist.Work]] = [[] for _ in range(SLOTS)]
        self._last = -1
        self.updates = 0

    @property
    def layers(self) -> int:
        return len(self._pairs)

    def ensure(self, layer: int) -> None:
        """Returns with ``layer`` in its place, on a GPU in the current stream's order, and its neighbour on the way."""
        if layer == self._last:
            return
        # From the first layer there is only up, from the last one only down.
        step = 1 if layer == 0 or self._last < layer < self.layers - 1 else -1
        self._last = layer
        self._gather(layer)
        self._arrive(layer % SLOTS)
        if 0 <= layer + step < self.layers:
            self._gather(layer + step)

    def _gather(self, layer: int) -> None:
        slot = layer % SLOTS
        if self._held[slot] != layer:
            self._arrive(slot)
            self._held[slot] = layer
            self._on_way[slot] = all_gather(self._pairs[layer], self.group)

    def _arrive(self, slot: int) -> None:
        for work in self._on_way[slot]:
            work.wait()  # on a GPU: the stream waits, not this thread
        self._on_way[slot] = []

    def forget(self) -> None:
        """What the places hold is old: the home rows are about to be written."""
        for slot in range(SLOTS):
            self._arrive(slot)
        self._held, self._last = [None] * SLOTS, -1

    def send(self, update: int, watch: Callable[[], None] | None = None) -> None:
        """Streams all layers to the engine of this GPU, which calls :func:`receive` for the same ``update``; all ranks at once.

        The next layer is gathered while the engine copies this one.  ``watch`` and errors: those of
        :meth:`verl.jetrl.arena.Control.wait`.
        """
        control = self.arena.control
        control.require(TRAINER, "a weight update")
        for layer in range(self.layers):
            if layer >= SLOTS:
                control.wait("taken", layer - SLOTS, update, watch)
            self._gather(layer)
            self._arrive(layer % SLOTS)
            _finish(self.arena.data)  # the engine reads from another process: its stream knows nothing of ours
            control.signal("ready", layer, update)
        for layer in range(max(0, self.layers - SLOTS), self.layers):
            control.wait("taken", layer, update, watch)
        self._last = -1


@torch.inference_mode()
def receive(arena: Arena, own: Arena, update: int) -> None:
    """The engine's side: copies every layer from ``arena``, the trainer's, into ``own`` (:func:`verl.jetrl.arena.linears_of`).

    A layer that does not come is NaN, not an old one.  Raises :class:`verl.jetrl.arena.WeightSyncError`.
    """
    control = arena.control
    control.serve(0)
    own.data.fill_(NAN)
    layers: dict[int, list[str]] = {}
    for entry in own.layout.linears:
        layers.setdefault(layer_of(entry.name), []).append(entry.name)
    for layer, names in layers.items():
        control.wait("ready", layer, update)
        for name in names:
            own[name].copy_(arena[name])
        _finish(own.data)
        control.signal("taken", layer, update)
    own.cut_scales()
    _finish(own.data)
    control.serve(control.version)


def _finish(data: Tensor) -> None:
    """Waits until the current stream's work is done."""
    if data.is_cuda:
        torch.cuda.current_stream(data.device).synchronize()
