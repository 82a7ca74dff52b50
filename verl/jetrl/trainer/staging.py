"""What a forward needs, on its way to the GPU: copies from pinned memory, queued while the GPU computes what came before.

A copy from other memory makes the host wait until the GPU has caught up, and so does whatever reads a number back.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor


def response_rows(batch: TensorDict) -> Tensor | None:
    """Of a packed micro-batch the positions whose next token is one of a response, int64: verl reads no other log-probs.

    A prompt has a token at least, as verl asks too.  None where there are no responses, or padded ones: data for fine-tuning
    has none, and its loss mask may want any token.
    """
    if "responses" not in batch or not batch["responses"].is_nested:
        return None
    offsets, R = batch["responses"].offsets(), len(batch["responses"].values())
    # A response ends where its sequence does.
    shift_B = batch["input_ids"].offsets()[1:] - offsets[1:] - 1
    return torch.arange(R, device=shift_B.device) + shift_B.repeat_interleave(offsets.diff(), output_size=R)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``; the host does not wait for the copy.  Of jagged ones, for those of whole rows: verl's are."""
    if tensor.is_nested and tensor.device != device and tensor._ragged_idx == 1 and tensor.lengths() is None:
        # torch's own copy of a jagged tensor waits for the offsets.  Padding reads the lengths that are kept beside them.
        return torch.nested.nested_tensor_from_jagged(
            to_device(tensor.values(), device),
            to_device(tensor.offsets(), device),
            min_seqlen=tensor._maybe_min_seqlen,
            max_seqlen=tensor._maybe_max_seqlen,
        )
    if tensor.is_nested:
        return tensor.to(device)
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def batch_to_device(batch: TensorDict, device: torch.device) -> TensorDict:
    """A micro-batch with all its tensors on ``device``; what is no tensor is the same object."""
    return batch.apply(lambda tensor: to_device(tensor, device), device=device)


def values_to_device(values: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The same of a model's arguments."""
    return {name: to_device(value, device) if isinstance(value, Tensor) else value for name, value in values.items()}
