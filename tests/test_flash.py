"""The trainer's GPU attention as far as the CPU goes: sequences of a packed row, the seam to transformers and verl, errors.

tests/gpu/test_flash.py runs the kernels.
"""

import gc

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM
from verl.models.transformers.monkey_patch import apply_monkey_patch

from verl.jetrl.trainer import flash


def row(*lengths: int) -> torch.Tensor:
    return torch.cat([torch.arange(n) for n in lengths])[None]


def test_sequences_of_a_packed_row():
    for lengths in ((5,), (1,), (3, 1, 4), (1, 1, 1)):
        for positions in (row(*lengths), row(*lengths).int(), row(*lengths)[0]):
            cu_seqlens, longest = flash.cu_seqlens_of(positions)
            assert cu_seqlens.dtype == torch.int32 and longest == max(lengths)
            assert cu_seqlens.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    cu_seqlens, longest = flash.cu_seqlens_of(torch.empty(1, 0, dtype=torch.long))
    assert cu_seqlens.tolist() == [0] and longest == 0


def test_a_micro_batch_is_read_once(monkeypatch):
    reads = []
    read = flash._read_sequences
    monkeypatch.setattr(flash, "_read_sequences", lambda p: reads.append(1) or read(p))
    before = len(flash._sequences)
    positions, other = row(3, 2), row(3, 2)
    first = flash.cu_seqlens_of(positions)
    for _ in range(36):
        assert flash.cu_seqlens_of(positions)[0] is first[0]
    flash.cu_seqlens_of(other)
    flash.cu_seqlens_of(positions)
    assert len(reads) == 2
    positions.copy_(row(1, 4))  # the same object with other positions
    assert flash.cu_seqlens_of(positions)[0].tolist() == [0, 1, 5] and len(reads) == 3
    with torch.inference_mode():
        assert flash.cu_seqlens_of(row(2))[1] == 2
    del positions, other
    gc.collect()
    assert len(flash._sequences) == before


def test_staged_positions_are_not_read_back(monkeypatch):
    positions = row(3, 1, 4)
    staged = flash.stage_positions(positions, torch.device("meta"))
    assert staged.is_meta and staged.shape == positions.shape
    monkeypatch.setattr(flash, "_read_sequences", lambda _: pytest.fail("read back"))
    cu_seqlens, longest = flash.cu_seqlens_of(staged)
    assert cu_seqlens.is_meta and cu_seqlens.shape == (4,) and longest == 4
    assert flash.stage_positions(positions, positions.device) is positions
    assert flash.cu_seqlens_of(positions)[0].tolist() == [0, 3, 4, 8]


@pytest.mark.parametrize(
    "positions, message",
    (
        (torch.stack((torch.arange(4), torch.arange(4))), "use_remove_padding"),
        (torch.arange(4)[None] + 1, "count up from 0"),
        (torch.tensor([[0, 1, 3]]), "count up from 0"),
        (torch.tensor([[2, 3, 0, 1]]), "count up from 0"),  # a slice of a sequence-parallel row
        (torch.zeros(4, 1, 3, dtype=torch.long), "shape"),
    ),
)
def test_positions_that_are_no_packed_row(positions, message):
    with pytest.raises(ValueError, match=message):
        flash.cu_seqlens_of(positions)


def qkv(device: str, M: int = 6, heads: int = 4, kv_heads: int = 2, D: int = 16, dtype=torch.bfloat16):
    return [torch.randn(M, h, D, dtype=dtype, device=device) for h in (heads, kv_heads, kv_heads)]


def test_the_cpu_is_refused_with_the_name_of_its_own_attention():
    cu_seqlens = torch.tensor([0, 6], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="jetrl_fp32"):
        flash.flash_attention(*qkv("cpu"), cu_seqlens, 6)
    with pytest.raises(RuntimeError, match="jetrl_fp32"):
        torch.ops.jetrl.flash_attention(*qkv("cpu"), cu_seqlens, 6, 0.25, True)
    with pytest.raises(RuntimeError, match="jetrl_fp32"):
        q, k, v = (x.transpose(0, 1)[None] for x in qkv("cpu"))
        flash.fa3_attention(None, q, k, v, None, position_ids=row(6))


def test_wrong_arguments():
    cu_seqlens = torch.zeros(2, dtype=torch.int32, device="meta")
    q, k, v = qkv("meta")
    for arguments, message in (
        (qkv("meta", dtype=torch.float32), "BF16"),
        ((q[0], k, v), "BF16"),
        ((q, k[:5], v), "do not fit"),
        (qkv("meta", heads=3), "do not fit"),
        (qkv("meta", D=20), "multiple of 8"),
        (qkv("meta", D=264), "at most 256"),
    ):
        with pytest.raises(ValueError, match=message):
            flash.flash_attention(*arguments, cu_seqlens, 6)
    with pytest.raises(ValueError, match="int32"):
        flash.flash_attention(q, k, v, cu_seqlens.long(), 6)


def test_missing_kernels_are_named():
    if torch.cuda.is_available():
        pytest.skip("the kernels may be installed here")
    with pytest.raises(ImportError, match="vllm==0.24.0"):
        flash.forward_kernel()
    with pytest.raises(ImportError, match="flash-attn-4"):
        flash.backward_kernel()


def test_shapes_of_results_and_gradients():
    """The fake implementations and the autograd formula, on the meta device."""
    leaves = [x.requires_grad_() for x in qkv("meta")]
    o = flash.flash_attention(*leaves, torch.zeros(2, dtype=torch.int32, device="meta"), 6)
    assert o.shape == (6, 4, 16) and o.dtype == torch.bfloat16 and o.requires_grad
    o.sum().backward()
    for x in leaves:
        assert x.grad.shape == x.shape and x.grad.dtype == torch.bfloat16
    _, lse = torch.ops.jetrl.flash_attention(*leaves, torch.zeros(2, dtype=torch.int32, device="meta"), 6, 0.25, True)
    assert lse.shape == (4, 6) and lse.dtype == torch.float32 and not lse.requires_grad


def reference(q, k, v, cu_seqlens, max_seqlen, scale=None):
    """What :func:`flash.flash_attention` computes, per sequence."""
    assert cu_seqlens.dtype == torch.int32 and max_seqlen == int(cu_seqlens.diff().max())
    out = []
    for a, b in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False):
        s = (x[a:b].transpose(0, 1).float() for x in (q, k, v))
        out.append(F.scaled_dot_product_attention(*s, is_causal=True, scale=scale, enable_gqa=True).transpose(0, 1))
    return torch.cat(out).to(q.dtype)


SIZES = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=50
)


def model_of(model_type: str, attention: str):
    torch.manual_seed(0)
    extra = {"head_dim": 16} if model_type == "qwen3" else {}
    config = AutoConfig.for_model(model_type, **SIZES, **extra)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


@pytest.mark.parametrize("model_type", ("qwen3", "qwen2", "llama"))
def test_transformers_and_verl_pass_the_positions(model_type, monkeypatch):
    """A packed row through a model that verl patched gives each sequence what it gets alone under "sdpa", in one read."""
    flash.register()
    monkeypatch.setattr(flash, "flash_attention", reference)
    reads = []
    read = flash._read_sequences
    monkeypatch.setattr(flash, "_read_sequences", lambda p: reads.append(1) or read(p))
    model, alone = model_of(model_type, flash.NAME), model_of(model_type, "sdpa")
    apply_monkey_patch(model, use_remove_padding=True)
    assert model.config._attn_implementation == flash.NAME
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    lengths = (7, 1, 4)
    ids = torch.randint(0, 50, (1, sum(lengths)))
    # as verl's prepare_model_inputs with use_remove_padding
    logits = model(input_ids=ids, attention_mask=None, position_ids=row(*lengths), use_cache=False).logits
    logits.float().square().sum().backward()  # recomputes every layer
    assert len(reads) == 1
    first = 0
    for n in lengths:
        want = alone(input_ids=ids[:, first : first + n], use_cache=False).logits
        assert torch.allclose(logits[:, first : first + n], want, atol=1e-5)
        first += n


def test_a_padded_batch_is_refused(monkeypatch):
    flash.register()
    monkeypatch.setattr(flash, "flash_attention", reference)
    model = model_of("llama", flash.NAME)
    ids, mask = torch.zeros(2, 5, dtype=torch.long), torch.ones(2, 5, dtype=torch.long)
    with pytest.raises(ValueError, match="use_remove_padding"):
        model(input_ids=ids, use_cache=False)
    mask[1, 3:] = 0
    with pytest.raises(ValueError, match="use_remove_padding"):
        model(input_ids=ids, attention_mask=mask, use_cache=False)
    with pytest.raises(ValueError, match="use_remove_padding"):
        model(input_ids=ids[:1], attention_mask=mask[1:], use_cache=False)


@pytest.mark.parametrize(
    "options, message",
    (
        (dict(dropout=0.1), "attention_dropout"),
        (dict(sliding_window=128), "sliding_window"),
        (dict(softcap=30.0), "softcap"),
        (dict(is_causal=False), "causal"),
        (dict(), "position_ids"),
    ),
)
def test_what_the_kernel_does_not_do(options, message):
    q, k, v = (x.transpose(0, 1)[None] for x in qkv("cpu"))
    with pytest.raises(ValueError, match=message):
        flash.fa3_attention(None, q, k, v, None, **options)


def test_sequence_parallelism_is_refused(monkeypatch):
    monkeypatch.setattr("verl.utils.ulysses.get_ulysses_sequence_parallel_world_size", lambda *_: 2)
    q, k, v = (x.transpose(0, 1)[None] for x in qkv("cpu"))
    with pytest.raises(ValueError, match="ulysses_sequence_parallel_size=1"):
        flash.fa3_attention(None, q, k, v, None, position_ids=row(6))
