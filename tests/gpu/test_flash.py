"""The trainer's attention on the GPU: against FP64, packed against alone, run to run, and through a Hugging Face model.

Needs package vllm (FlashAttention 3); flash-attn-4 for gradients, whose first call compiles for about 10 s per head_dim.
``python tests/gpu/test_flash.py`` prints speeds, with and without turns in the backward.
"""

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
from fp8_cases import randn, relative  # noqa: E402

from verl.jetrl.rollout.exact_attention import longest_query  # noqa: E402
from verl.jetrl.trainer import flash  # noqa: E402
from verl.jetrl.trainer.flash import flash_attention  # noqa: E402

# q heads, k and v heads, head_dim: Qwen3-8B and Llama-3.1-8B, Qwen2.5-7B, SmolLM2-135M (groups of 3), no groups
HEADS = ((32, 8, 128), (28, 4, 128), (9, 3, 64), (4, 4, 128))
LENGTHS = (300, 1, 129, 700, 64)


def needs(kernel):
    try:
        kernel()
    except ImportError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def forward_installed(seed):
    needs(flash.forward_kernel)


def row(*lengths: int) -> torch.Tensor:
    return torch.cat([torch.arange(n, device="cuda") for n in lengths])[None]


def case(heads: int, kv_heads: int, D: int, lengths=LENGTHS):
    M = sum(lengths)
    q, k, v = randn(M, heads, D), randn(M, kv_heads, D), randn(M, kv_heads, D)
    return [x.requires_grad_() for x in (q, k, v)], flash.cu_seqlens_of(row(*lengths))


def fp64(q, k, v, cu_seqlens, scale=None):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = []
    bounds = cu_seqlens.tolist()
    for a, b in zip(bounds, bounds[1:], strict=False):
        groups = q.shape[1] // k.shape[1]
        qs, ks, vs = q[a:b], k[a:b].repeat_interleave(groups, 1), v[a:b].repeat_interleave(groups, 1)
        scores = torch.einsum("mhd,nhd->hmn", qs, ks) * scale
        mask = torch.ones(b - a, b - a, dtype=torch.bool, device="cuda").triu(1)
        out.append(torch.einsum("hmn,nhd->mhd", scores.masked_fill(mask, -torch.inf).softmax(-1), vs))
    return torch.cat(out)


@pytest.mark.parametrize("sizes", HEADS, ids=str)
def test_forward_against_fp64(sizes):
    (q, k, v), (cu_seqlens, longest) = case(*sizes)
    want = fp64(*(x.detach().double() for x in (q, k, v)), cu_seqlens)
    with torch.no_grad():
        assert relative(flash_attention(q, k, v, cu_seqlens, longest), want) < 4e-3
        other = flash_attention(q, k, v, cu_seqlens, longest, scale=0.2)
    assert relative(other, fp64(*(x.detach().double() for x in (q, k, v)), cu_seqlens, 0.2)) < 4e-3


@pytest.mark.parametrize("sizes", HEADS, ids=str)
def test_gradients_against_fp64(sizes):
    needs(flash.backward_kernel)
    leaves, (cu_seqlens, longest) = case(*sizes)
    o = flash_attention(*leaves, cu_seqlens, longest)
    do = randn(*o.shape)
    got = torch.autograd.grad(o, leaves, do)
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    want = torch.autograd.grad(fp64(*doubles, cu_seqlens), doubles, do.double())
    for name, a, b in zip("qkv", got, want, strict=True):
        assert a.shape == b.shape and a.dtype == torch.bfloat16
        assert relative(a, b) < 1e-2, f"d{name}: {relative(a, b)}"


@pytest.mark.parametrize("sizes", HEADS, ids=str)
def test_a_sequence_has_the_same_bits_packed_and_alone(sizes):
    (q, k, v), (cu_seqlens, longest) = case(*sizes)
    with torch.no_grad():
        packed = flash_attention(q, k, v, cu_seqlens, longest)
        first = 0
        for n in LENGTHS:
            part = slice(first, first + n)
            alone = flash_attention(q[part], k[part], v[part], *flash.cu_seqlens_of(row(n)))
            assert torch.equal(packed[part], alone)
            first += n


@pytest.mark.parametrize("sizes", (*HEADS, (14, 2, 64), (8, 8, 64), (4, 2, 32), (8, 2, 256)), ids=str)
def test_decode_and_chunks_have_the_bits_of_a_prefill(sizes):
    """vLLM's side in exact mode, on a paged cache: single tokens, chunks, and both in one batch."""
    heads, kv_heads, D = sizes
    block, M = 16, 720
    (q, k, v), (cu_seqlens, longest) = case(heads, kv_heads, D, lengths=(M,))
    with torch.no_grad():
        want = flash_attention(q, k, v, cu_seqlens, longest)
        caches = [torch.full((M // block + 7, block, kv_heads, D), torch.nan, device="cuda").bfloat16() for _ in "kv"]
        table = torch.randperm(len(caches[0]), device="cuda")[: M // block].int()
        for cache, x in zip(caches, (k, v), strict=True):
            cache[table.long()] = x.unflatten(0, (-1, block))

        def paged(lengths: list[int], announced: int) -> torch.Tensor:
            ends = torch.tensor(lengths, device="cuda", dtype=torch.int32).cumsum(0).int()
            return flash.forward_kernel()(
                q, *caches, announced, torch.nn.functional.pad(ends, (1, 0)), M, seqused_k=ends, softmax_scale=D**-0.5,
                causal=True, block_table=table.expand(len(lengths), -1).contiguous(), fa_version=3, num_splits=1,
            )  # fmt: skip

        for lengths in ([1] * M, [64] * 11 + [16], [500] + [1] * 120 + [100]):
            assert torch.equal(paged(lengths, longest_query(max(lengths), D)), want), lengths
        if D <= 64:
            assert not torch.equal(paged([1] * M, 1), want), "decode need not be announced as longer than it is"


@pytest.mark.parametrize("sizes", HEADS, ids=str)
def test_the_same_bits_run_to_run(sizes):
    needs(flash.backward_kernel)
    leaves, (cu_seqlens, longest) = case(*sizes, lengths=(1500, 2600, 700, 3392))
    do = randn(*leaves[0].shape)
    runs = []
    for _ in range(5):
        o = flash_attention(*leaves, cu_seqlens, longest)
        runs.append([o, *torch.autograd.grad(o, leaves, do)])
    for run in runs[1:]:
        for a, b in zip(run, runs[0], strict=True):
            assert torch.equal(a, b)


def test_strided_v_as_the_fused_projection_gives_it():
    needs(flash.backward_kernel)
    heads, kv_heads, D = 32, 8, 128
    (q, k, v), (cu_seqlens, longest) = case(heads, kv_heads, D)
    qkv = randn(q.shape[0], (heads + 2 * kv_heads) * D)
    view = qkv[:, -kv_heads * D :].unflatten(1, (kv_heads, D))
    view.copy_(v.detach())
    do = randn(*q.shape)
    results = []
    for value in (v, view.detach().requires_grad_()):
        o = flash_attention(q, k, value, cu_seqlens, longest)
        results.append([o, *torch.autograd.grad(o, (q, k, value), do.transpose(0, 1).contiguous().transpose(0, 1))])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_no_tokens():
    leaves, _ = case(4, 2, 64, lengths=(1,))
    empty = [x[:0].detach().requires_grad_() for x in leaves]
    o = flash_attention(*empty, torch.zeros(1, dtype=torch.int32, device="cuda"), 0)
    o.sum().backward()
    assert o.shape == (0, 4, 64) and empty[1].grad.shape == (0, 2, 64)


@pytest.mark.parametrize("model_type", ("qwen3", "qwen2", "llama"))
def test_a_hugging_face_model(model_type):
    """A packed row through a BF16 model: close to sdpa, each sequence alone, logits and gradients; one read of positions."""
    needs(flash.backward_kernel)
    flash.register()
    sizes = dict(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=200, **({"head_dim": 64} if model_type == "qwen3" else {}),
    )  # fmt: skip
    models = []
    for attention in (flash.NAME, "sdpa"):
        torch.manual_seed(0)
        config = AutoConfig.for_model(model_type, **sizes)
        models.append(AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.bfloat16).cuda())
    lengths = (70, 1, 200)
    ids = torch.randint(0, 200, (1, sum(lengths)), device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = models[0](input_ids=ids, attention_mask=None, position_ids=row(*lengths), use_cache=False).logits
        parts = [models[1](input_ids=part, use_cache=False).logits for part in ids.split(lengths, 1)]
    want = torch.cat(parts, 1)
    assert relative(logits, want) < 2e-2
    for y in (logits, want):
        y.float().square().mean().backward()
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert relative(a.grad, b.grad) < 0.1, name  # both backward passes round to BF16 at other places


def test_compile():
    needs(flash.backward_kernel)
    leaves, (cu_seqlens, longest) = case(8, 2, 128)

    def neighbours(q, k, v):
        return flash_attention(q * 2, k, v, cu_seqlens, longest).sin()

    compiled = torch.compile(neighbours, fullgraph=True)
    do = randn(*leaves[0].shape)
    got, want = ([f(*leaves), *torch.autograd.grad(f(*leaves), leaves, do)] for f in (compiled, neighbours))
    for a, b in zip(got, want, strict=True):
        assert relative(a, b) < 1e-2


def main() -> None:
    for heads, kv_heads, D in HEADS[:3]:
        lengths = (1500, 2600, 700, 3392)
        leaves, (cu_seqlens, longest) = case(heads, kv_heads, D, lengths)
        flops = sum(n * n / 2 for n in lengths) * 4 * heads * D
        times = {}
        for deterministic in (True, False):
            arguments = (cu_seqlens, longest, D**-0.5, deterministic)
            o, lse = torch.ops.jetrl.flash_attention(*(x.detach() for x in leaves), *arguments)
            do = randn(*o.shape)
            call = (do, *(x.detach() for x in leaves), o, lse, *arguments)
            for name, f in (
                ("forward", lambda: torch.ops.jetrl.flash_attention(*call[1:4], *arguments)),  # noqa: B023
                ("backward" + ", in turns" * deterministic, lambda: torch.ops.jetrl.flash_attention_backward(*call)),  # noqa: B023
            ):
                f()
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                for _ in range(10):
                    f()
                end.record()
                end.synchronize()
                times[name] = begin.elapsed_time(end) / 10
        print(
            heads,
            kv_heads,
            D,
            {k: f"{v:.2f} ms, {flops * (2.5 if 'b' in k else 1) / v / 1e9:.0f} TFLOP/s" for k, v in times.items()},
        )


if __name__ == "__main__":
    main()
