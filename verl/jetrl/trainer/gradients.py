"""FP32 weight gradients of the shared decoder: whole on one rank, sharded by rows over several.

On one rank a backward adds straight into the accumulator of a weight.  On several each rank keeps the accumulators of its
own rows only.  A backward then opens the weight's :class:`ShardedGradient`, writes the whole matrix that it gets, and closes
it: the ranks' mean is reduce-scattered while the next layer's backward runs, and added to the accumulator later.

Every rank must open the same gradients in the same order, whatever its tokens: autograd runs one graph in one order, and
verl gives every rank the same number of micro-batches (``prepare_micro_batches(same_micro_num_in_dp=True)``; in 0.9.1
``rearrange_micro_batches`` takes the largest number over the ranks, fixed sizes cut equal shares of the batch).  So a
gradient is opened once per use of the weight in the graph, not once per chunk of tokens.  A layer that is computed again
(activation checkpointing) still runs one backward.

Deferred (verl's ``use_no_sync_for_gradient_accumulation``), every rank keeps whole accumulators as one alone does, and the
ranks' means are taken once, before the optimizer's step: less traffic for more memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from verl.jetrl.arena import Layout

ALIGN = 64  # FP32 numbers: 256 bytes, what the weight gradient's kernels want of an address
LAYERS = 2  # whose whole gradients may be on their way at a time


def own_rows(n: int, rank: int, ranks: int) -> slice:
    """The rows of ``n`` that DTensor's ``Shard(0)`` gives to ``rank``: torch.chunk's, so the last ranks may have fewer."""
    chunk = -(-n // ranks)
    return slice(min(rank * chunk, n), min((rank + 1) * chunk, n))


def matrix_values(rows: list[int], K: int, ranks: int) -> int:
    """FP32 numbers that the whole gradient of a weight takes on its way to ``ranks`` ranks."""
    padded = [-(-n // ranks) * ranks for n in rows]
    whole = sum(rows) * K
    return -(-(whole if padded == rows else whole + sum(padded) * K) // ALIGN) * ALIGN


def transient_values(layout: Layout, ranks: int) -> int:
    """FP32 numbers of all whole gradients that exist at a time: of ``LAYERS`` layers, or of the largest matrix."""
    sizes = {e.name: matrix_values([n for _, n in e.parts], e.shape[1], ranks) for e in layout.weights if len(e.shape) == 2}
    layer = sum(size for name, size in sizes.items() if name.startswith("model.layers.0."))
    return max(LAYERS * layer, *sizes.values())


def reduce_rows(whole_NK: Tensor, group: dist.ProcessGroup) -> tuple[dist.Work, Tensor]:
    """Starts the ranks' mean of a matrix whose rows they share equally; a view of this rank's rows, which it replaces."""
    mine = whole_NK.chunk(dist.get_world_size(group))[dist.get_rank(group)]
    return dist.reduce_scatter_tensor(mine, whole_NK, op=dist.ReduceOp.AVG, group=group, async_op=True), mine


class Reducer:
    """Memory for whole gradients, handed out in a ring, and their reductions on the way."""

    def __init__(self, group: dist.ProcessGroup, values: int, device: torch.device) -> None:
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self.values, self.device = values, device
        self._ring: Tensor | None = None
        self._next, self._open = 0, False
        self._on_way: deque[tuple[int, int, list[tuple[dist.Work, Tensor, Tensor]]]] = deque()

    def take(self, values: int) -> Tensor:
        """Memory with anything in it; what was on its way from there has arrived."""
        if self._open:
            raise RuntimeError("two weight gradients are open at a time: close one before the next")
        self._open = True
        if self._ring is None:
            self._ring = torch.empty(self.values, dtype=torch.float32, device=self.device)
        start = self._next if self._next + values <= self.values else 0
        self._next = end = start + values
        while any(start < other_end and other_start < end for other_start, other_end, _ in self._on_way):
            self._arrive()
        return self._ring[start:end]

    def start(self, memory: Tensor, pieces: list[tuple[Tensor, Tensor]]) -> None:
        """Starts the reduction of ``pieces`` that lie in taken ``memory``: whole (rows padded to the ranks), accumulator."""
        works, self._open = [], False
        for whole, accumulator in pieces:
            work, mine = reduce_rows(whole, self.group)
            works.append((work, mine[: len(accumulator)], accumulator))
        at = memory.storage_offset()
        self._on_way.append((at, at + memory.numel(), works))

    def _arrive(self) -> None:
        _, _, works = self._on_way.popleft()
        for work, mine, accumulator in works:
            work.wait()  # on a GPU: the stream waits, not this thread
            accumulator.add_(mine)

    def finish(self) -> None:
        """Waits for all, in order, and frees the memory."""
        while self._on_way:
            self._arrive()
        self._ring, self._next = None, 0


class ShardedGradient:
    """The sink of one weight matrix: ``with sink.opened() as grad_NK`` gives the FP32 matrix of one backward's gradient."""

    def __init__(self, reducer: Reducer, rows: list[int], K: int) -> None:
        self._reducer, self._rows, self._K = reducer, rows, K
        self._values = matrix_values(rows, K, reducer.ranks)
        shares = [own_rows(n, reducer.rank, reducer.ranks) for n in rows]
        self.own = [torch.zeros(s.stop - s.start, K, dtype=torch.float32, device=reducer.device) for s in shares]

    @contextmanager
    def opened(self, zeroed: bool = True) -> Iterator[Tensor]:
        """See :class:`verl.jetrl.model.autograd.GradientSink`.  After an error in the block nothing is reduced."""
        memory, pieces = self._reducer.take(self._values), []
        whole_NK = memory[: sum(self._rows) * self._K].view(-1, self._K)
        try:
            yield whole_NK.zero_() if zeroed else whole_NK
            pieces = list(zip(self._padded(memory), self.own, strict=True))
        finally:
            self._reducer.start(memory, pieces)

    def _padded(self, memory: Tensor) -> Iterator[Tensor]:
        """The parts, each of as many rows for every rank: where they lie, or, unequal ones, copied behind them."""
        whole, rest = memory.split([sum(self._rows) * self._K, memory.numel() - sum(self._rows) * self._K])
        parts = whole.view(-1, self._K).split(self._rows)
        padded = [-(-n // self._reducer.ranks) * self._reducer.ranks for n in self._rows]
        if padded == self._rows:
            yield from parts
            return
        start = 0
        for part, n in zip(parts, padded, strict=True):
            copy = rest[start : start + n * self._K].view(n, self._K)
            copy[: len(part)].copy_(part)  # what the rows behind it sum up to belongs to no rank
            start += n * self._K
            yield copy


class Gradients:
    """Accumulators of all weights.  ``sinks``: by arena entry, what a backward adds to: a tensor, or a sharded gradient.

    Vectors (norms, biases) are whole on every rank, and reduced once: all together they are smaller than one matrix.
    ``deferred``: so are matrices.
    """

    def __init__(self, layout: Layout, mesh: DeviceMesh, device: torch.device, deferred: bool = False) -> None:
        self._mesh, self._layout = mesh, layout
        # The replicas last, so that those of a shard have the same bits whatever the order of the other sums.
        self._groups = [mesh.get_group(dim) for dim in reversed(range(mesh.ndim)) if mesh.size(dim) > 1]
        self._rank, self._ranks = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
        self._reducer, self._deferred = None, deferred and self._ranks > 1
        if self._ranks > 1 and not deferred:
            self._reducer = Reducer(mesh.get_group(mesh.ndim - 1), transient_values(layout, self._ranks), device)
        vectors = {e.name: e.shape[0] for e in layout.weights if len(e.shape) == 1}
        self._vectors = torch.zeros(sum(vectors.values()), dtype=torch.float32, device=device)
        self.sinks: dict[str, Tensor | ShardedGradient] = dict(
            zip(vectors, self._vectors.split(list(vectors.values())), strict=True)
        )
        for entry in layout.weights:
            if len(entry.shape) == 1:
                continue
            if self._reducer is None:
                self.sinks[entry.name] = torch.zeros(entry.shape, dtype=torch.float32, device=device)
            else:
                self.sinks[entry.name] = ShardedGradient(self._reducer, [n for _, n in entry.parts], entry.shape[1])

    def _accumulators(self) -> Iterator[Tensor]:
        """Every matrix's."""
        for sink in self.sinks.values():
            if isinstance(sink, ShardedGradient):
                yield from sink.own
            elif sink.dim() == 2:
                yield sink

    def finish(self) -> None:
        """Waits for what is on its way; before the accumulators are dropped too, whose memory would be written to later."""
        if self._reducer is not None:
            self._reducer.finish()

    def zero_(self) -> None:
        self.finish()
        for tensor in (self._vectors, *self._accumulators()):
            tensor.zero_()

    def reduced(self) -> Iterator[tuple[str, Tensor]]:
        """Waits for what is on its way; then parameters' names with this rank's rows of the mean over all ranks: views of the
        accumulators."""
        self.finish()
        for group in self._groups:
            dist.all_reduce(self._vectors, op=dist.ReduceOp.AVG, group=group)
        own = list(self._own_rows())
        if self._deferred:
            self._scatter()
        if self._mesh.ndim > 1 and self._mesh.size(0) > 1:  # HSDP: the replicas of a shard saw other tokens
            replicas, matrices = self._mesh.get_group(0), [rows for _, rows in own if rows.dim() == 2]
            for work in [dist.all_reduce(m, op=dist.ReduceOp.AVG, group=replicas, async_op=True) for m in matrices]:
                work.wait()
        yield from own

    def _parts(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters' names with their whole accumulators."""
        for entry in self._layout.weights:
            if not isinstance(sink := self.sinks[entry.name], ShardedGradient):
                yield from zip((name for name, _ in entry.parts), sink.split([n for _, n in entry.parts]), strict=True)

    def _own_rows(self) -> Iterator[tuple[str, Tensor]]:
        for entry in self._layout.weights:
            if isinstance(sink := self.sinks[entry.name], ShardedGradient):
                yield from zip((name for name, _ in entry.parts), sink.own, strict=True)
        for name, grad in self._parts():
            yield name, grad[own_rows(len(grad), self._rank, self._ranks)]

    def _scatter(self) -> None:
        """Replaces this rank's rows of every whole matrix by the ranks' mean; the others' are of no use afterwards."""
        group, works = self._mesh.get_group(self._mesh.ndim - 1), []
        for _, grad_NK in self._parts():
            if grad_NK.dim() == 1:
                continue
            if missing := -len(grad_NK) % self._ranks:
                padded = torch.nn.functional.pad(grad_NK, (0, 0, 0, missing))
                work, mine = reduce_rows(padded, group)
                work.wait()
                rows = grad_NK[own_rows(len(grad_NK), self._rank, self._ranks)]
                rows.copy_(mine[: len(rows)])
            else:
                works.append(reduce_rows(grad_NK, group)[0])
        for work in works:
            work.wait()
