"""Micro-batches on their way to a device, as far as that goes without one: meta tensors stand for the GPU's."""

import torch
from tensordict import NonTensorStack, TensorDict
from verl.utils import tensordict_utils as tu

from verl.jetrl.trainer.staging import batch_to_device, response_rows, values_to_device

META = torch.device("meta")


def jagged(*lengths: int, dim: int | None = None) -> torch.Tensor:
    rows = [torch.arange(n) for n in lengths] if dim is None else [torch.zeros(3, n) for n in lengths]
    if dim is None:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(torch.cat(rows, -1), offsets, jagged_dim=dim)


def test_a_batch_moves_as_a_whole():
    """What torch's own copy gives, lengths for padding included, and what is no tensor stays."""
    batch = TensorDict(
        {
            "ids": jagged(3, 5, 1),
            "wide": jagged(3, 5, 1, dim=2),
            "dense": torch.zeros(3, 2),
            "names": NonTensorStack("p", "q", "r"),
        },
        batch_size=3,
    )
    tu.assign_non_tensor(batch, temperature=0.7, flag=None)
    got, wanted = batch_to_device(batch, META), batch.to(META)
    assert set(got.keys()) == set(wanted.keys()) == set(batch.keys()) and got.device == META and got.batch_size == (3,)
    for name in ("ids", "wide"):
        assert got[name].is_nested and got[name].values().is_meta and got[name].offsets().is_meta
        assert got[name].values().shape == wanted[name].values().shape and got[name].dtype == wanted[name].dtype
        assert got[name]._maybe_max_seqlen == wanted[name]._maybe_max_seqlen
        assert got[name]._maybe_min_seqlen == wanted[name]._maybe_min_seqlen
    assert got["ids"]._maybe_max_seqlen == 5 and got["dense"].is_meta
    assert got["names"] == ["p", "q", "r"] and got["temperature"] == 0.7 and tu.get_non_tensor_data(got, "flag", 1) is None
    assert got.to(META) is got  # verl's own move of it copies nothing


def test_response_rows_are_those_that_verl_reads():
    from verl.workers.utils.padding import no_padding_2_padding, response_from_nested

    prompts, responses = (2, 1, 7, 3), (3, 5, 0, 4)
    lengths = [p + r for p, r in zip(prompts, responses, strict=True)]
    batch = TensorDict(
        {"input_ids": jagged(*lengths), "prompts": jagged(*prompts), "responses": jagged(*responses)}, batch_size=4
    )
    rows = response_rows(batch)
    values = torch.arange(1.0, sum(lengths) + 1)
    padded = no_padding_2_padding(values, batch)
    assert torch.equal(values[rows], torch.cat([row[:n] for row, n in zip(padded, responses, strict=True)]))
    nested = torch.nested.nested_tensor_from_jagged(values, batch["input_ids"].offsets())
    assert torch.equal(values[rows], response_from_nested(nested, batch["responses"]).values())
    assert response_rows(batch.select("input_ids")) is None, "data for fine-tuning: any token may be learned"


def test_what_is_there_already_is_not_copied():
    batch = TensorDict({"ids": jagged(3, 5), "dense": torch.zeros(2, 2)}, batch_size=2)
    got = batch_to_device(batch, torch.device("cpu"))
    assert got["ids"].values().data_ptr() == batch["ids"].values().data_ptr() and got["dense"] is batch["dense"]
    ids = torch.arange(3)
    moved = values_to_device({"input_ids": ids, "attention_mask": None, "use_cache": False}, META)
    assert moved["input_ids"].is_meta and moved["attention_mask"] is None and moved["use_cache"] is False
