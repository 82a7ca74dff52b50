"""vLLM's attention in exact mode: each token's output has the bits that the trainer's attention gives.

On a GPU: FlashAttention 3 with one split.  vLLM lets the kernel divide a long sequence among multiprocessors, by the batch,
and adds the pieces; with one split a query's keys are summed in one order, whether it is decoded, prefilled in chunks or
packed with others, and added tile by tile from the first key on; tiles have to be of one length too
(:func:`longest_query`).  Cascade attention, which sums a shared prefix apart, is off.

Without a GPU: :func:`verl.jetrl.trainer.attention.fp64_attention` on the paged cache.  Its sums are taken in FP64, whose
rounding lies far below BF16's, so that the order of additions does not show.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from verl.jetrl.trainer.attention import fp64_attention

# FlashAttention 3 rounds head_dim up to one of these and chooses the number of keys in a tile by it, by whether keys are paged,
# by whether the mask is causal (a batch of single tokens counts as not), and by whether the longest query, together with its
# group of heads, packs into 64 rows.  At 128 and 256 the trainer's packed sequences and vLLM's paged ones get the same tiles.
# At 96 and 192 they never do.  At 64 they do unless the longest query is short.
SAME_TILES, SAME_TILES_IF_LONG = (128, 256), 64
PACKED_ROWS = 64


def same_bits(head_dim: int) -> bool:
    """Whether decode can have prefill's bits on a GPU."""
    rounded = min((size for size in (64, 96, 128, 192, 256) if head_dim <= size), default=head_dim)
    return rounded in (SAME_TILES_IF_LONG, *SAME_TILES)


def longest_query(tokens: int, head_dim: int) -> int:
    """What to tell FlashAttention 3 about a batch whose longest query has ``tokens`` tokens, so that its keys come in the tiles
    of a long prefill."""
    return max(tokens, PACKED_ROWS + 1) if head_dim <= SAME_TILES_IF_LONG else tokens


@functools.cache
def backend(device_type: str) -> type:
    """The attention backend class for ``"cuda"`` or ``"cpu"``."""
    return _one_split() if device_type == "cuda" else _fp64()


def _one_split() -> type:
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionMetadataBuilder

    class OneSplitBuilder(FlashAttentionMetadataBuilder):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.max_num_splits = 1  # what captured graphs are built with

        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            # Before the schedule is made, which depends on the tiles.
            longest = longest_query(common_attn_metadata.max_query_len, self.headdim)
            metadata = super().build(common_prefix_len, common_attn_metadata.replace(max_query_len=longest), fast_build)
            if metadata.max_num_splits != 1:  # a batch too large for a graph; its schedule allowed for splits
                metadata = replace(metadata, max_num_splits=1, scheduler_metadata=None)
            return metadata

        def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
            return False

    class OneSplitBackend(FlashAttentionBackend):
        @staticmethod
        def get_builder_cls() -> type:
            return OneSplitBuilder

    return OneSplitBackend


def _fp64() -> type:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

    class Fp64Impl(CPUAttentionBackendImpl):
        def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
            """key and value (M, KV heads, D), one after the other, into kv_cache (blocks, KV heads, block, 2 D)."""
            slots, size = slot_mapping.long(), kv_cache.shape[2]
            kv_cache[slots // size, :, slots % size] = torch.cat((key, value), -1)[: len(slots)]

        def forward(
            self,
            layer: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            kv_cache: Tensor,
            attn_metadata: Any,
            output: Tensor,
            *_: Any,
            **__: Any,
        ) -> Tensor:
            """query (M, heads, D); ``output`` is filled."""
            if attn_metadata is None:  # vLLM's profiling run
                return output.zero_()
            D, size = query.shape[-1], kv_cache.shape[2]
            starts, lengths = attn_metadata.query_start_loc.tolist(), attn_metadata.seq_lens.tolist()
            out = output.view(output.shape[0], *query.shape[1:])
            for index, (start, stop) in enumerate(zip(starts, starts[1:], strict=False)):
                if start == stop:
                    continue
                length = lengths[index]
                blocks = attn_metadata.block_table[index, : -(-length // size)].long()
                kv = kv_cache[blocks].transpose(1, 2).flatten(0, 1)[:length]
                out[start:stop] = fp64_attention(query[start:stop], kv[..., :D], kv[..., D:], self.scale)
            return output

    class Fp64Backend(CPUAttentionBackend):
        @staticmethod
        def get_impl_cls() -> type:
            return Fp64Impl

    return Fp64Backend
