"""q/k norm and rotary embedding on the CPU: against Hugging Face and FP64, invariance, layouts, compile, errors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from verl.jetrl.model.rope import ROPE_TYPES, qk_norm_rope, rope_table

LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=5e5,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
YARN = dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=32768)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def config_of(model_type: str = "llama", heads: int = 8, kv_heads: int = 2, head_dim: int = 128, **rope: object):
    rope = rope or dict(rope_type="default", rope_theta=1e6)
    return AutoConfig.for_model(
        model_type,
        hidden_size=heads * head_dim,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters=rope,
    )


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def case(M=20, heads=8, kv_heads=2, head_dim=128, norm=True, positions=512):
    """qkv, positions in any order, table, sizes, norm weights: the function's arguments."""
    qkv = randn(M, (heads + 2 * kv_heads) * head_dim)
    table = rope_table(config_of(heads=heads, kv_heads=kv_heads, head_dim=head_dim), positions)
    weights = (1 + 0.3 * torch.randn(2, head_dim)).bfloat16().unbind(0) if norm else (None, None)
    return qkv, torch.randint(0, positions, (M,)), table, heads, kv_heads, head_dim, *weights


def formula(qkv, positions, table, heads, kv_heads, head_dim, q_norm=None, k_norm=None, eps=1e-6):
    """The same in the inputs' dtype with no rounding in between."""
    x = qkv.unflatten(1, (-1, head_dim))
    q, k, v = x.split((heads, kv_heads, kv_heads), 1)
    cos, sin = table[positions][:, None].to(qkv.dtype).chunk(2, -1)
    out = []
    for y, weight in ((q, q_norm), (k, k_norm)):
        if weight is not None:
            y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight
        y1, y2 = y.chunk(2, -1)
        out.append(torch.cat((y1 * cos - y2 * sin, y2 * cos + y1 * sin), -1))
    return *out, v


@pytest.mark.parametrize("rope", (dict(rope_type="default", rope_theta=1e4), LLAMA3, YARN), ids=lambda r: r["rope_type"])
@pytest.mark.parametrize("model_type", ("llama", "qwen2", "qwen3"))
def test_the_table_is_hugging_faces(rope, model_type):
    config = config_of(model_type, **rope)
    table = rope_table(config, 3000)
    assert table.shape == (3000, 128) and table.dtype == torch.float32 and table.device.type == "cpu"
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=torch.float32), torch.arange(3000)[None])
    for got, want in zip(table.chunk(2, -1), (cos, sin), strict=True):
        assert torch.allclose(got, want[0, :, :64], atol=3e-4)  # Hugging Face's angles are rounded to FP32
    with torch.device("meta"):
        assert torch.equal(rope_table(config, 3000), table)


def test_the_table_is_exact():
    table = rope_table(config_of(), 100_000)
    frequency = LlamaRotaryEmbedding(config_of()).inv_freq[1].item()
    for position in (0, 1, 99_999):
        angle = torch.tensor(position * frequency, dtype=torch.float64)
        assert table[position, 1] == angle.cos().float() and table[position, 65] == angle.sin().float()


@pytest.mark.parametrize("rope_type", ("dynamic", "longrope"))
def test_rope_types_that_depend_on_the_batch_are_refused(rope_type):
    factors = [1.0] * 64
    config = config_of(
        rope_type=rope_type,
        rope_theta=1e4,
        factor=2.0,
        short_factor=factors,
        long_factor=factors,
        original_max_position_embeddings=4096,
    )
    with pytest.raises(ValueError, match=f"{rope_type}.*{ROPE_TYPES[0]}"):
        rope_table(config, 10)


def test_a_partial_rotation_is_refused():
    with pytest.raises(ValueError, match="partial_rotary_factor"):
        rope_table(config_of(**LLAMA3, partial_rotary_factor=0.5), 10)


@pytest.mark.parametrize("head_dim", (64, 128, 96))
@pytest.mark.parametrize("norm", (True, False))
def test_against_hugging_face(head_dim, norm):
    qkv, positions, table, heads, kv_heads, D, *weights = case(head_dim=head_dim, norm=norm)
    q, k, v = qk_norm_rope(qkv, positions, table, heads, kv_heads, D, *weights)
    assert q.shape == (20, heads, D) and k.shape == v.shape == (20, kv_heads, D)
    assert q.dtype == k.dtype == torch.bfloat16 and q.is_contiguous() and k.is_contiguous()
    x = qkv.float().unflatten(1, (-1, D))
    if norm:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        x = torch.cat((x[:, :heads] * weights[0].float(), x[:, heads:] * weights[1].float()), 1)
    config = config_of(heads=heads, kv_heads=kv_heads, head_dim=D)
    cos, sin = LlamaRotaryEmbedding(config)(x, positions[None])
    want_q, want_k = apply_rotary_pos_emb(x[None, :, :heads], x[None, :, heads : heads + kv_heads], cos, sin, unsqueeze_dim=2)
    assert relative(q, want_q[0]) < 4e-3 and relative(k, want_k[0]) < 4e-3  # two or three roundings to BF16
    assert torch.equal(v, qkv.unflatten(1, (-1, D))[:, heads + kv_heads :])
    assert v.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()


@pytest.mark.parametrize("sizes", ((8, 2, 128), (9, 3, 64)), ids=str)
@pytest.mark.parametrize("norm", (True, False))
def test_gradients_against_fp64(sizes, norm):
    qkv, positions, table, *_, q_norm, k_norm = case(33, *sizes, norm=norm)
    leaves = [qkv.requires_grad_(), *((w.float().requires_grad_() for w in (q_norm, k_norm)) if norm else ())]
    outputs = qk_norm_rope(leaves[0], positions, table, *sizes, *leaves[1:])
    # as attention returns them: some transposed
    grads = [randn(*outputs[0].shape), *(randn(n, m, d).transpose(0, 1) for m, n, d in (o.shape for o in outputs[1:]))]
    got = torch.autograd.grad(outputs, leaves, grads)
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    want_outputs = formula(doubles[0], positions, table, *sizes, *doubles[1:])
    want = torch.autograd.grad(want_outputs, doubles, [g.double() for g in grads])
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and relative(a, b) < 4e-3
    assert got[0].dtype == torch.bfloat16 and all(g.dtype == torch.float32 for g in got[1:])
    assert torch.equal(got[0].unflatten(1, (-1, sizes[2]))[:, sizes[0] + sizes[1] :], grads[2])


def test_bf16_weights_get_bf16_gradients_and_one_output_is_enough():
    qkv, *rest, q_norm, k_norm = case()
    q, _, _ = qk_norm_rope(qkv, *rest, q_norm.requires_grad_(), k_norm.requires_grad_())
    q.float().sum().backward()
    assert q_norm.grad.dtype == torch.bfloat16 and q_norm.grad.abs().sum() > 0 and not k_norm.grad.any()


@pytest.mark.parametrize("norm", (True, False))
def test_a_tokens_bits_do_not_depend_on_the_others(norm):
    qkv, positions, table, *rest = case(64, norm=norm)
    full = qk_norm_rope(qkv, positions, table, *rest)
    for rows in (torch.tensor([7]), torch.randperm(64)[:33], torch.arange(63, -1, -1)):
        part = qk_norm_rope(qkv[rows], positions[rows].int(), table, *rest)
        for a, b in zip(part, full, strict=True):
            assert torch.equal(a, b[rows])


def test_strided_rows():
    qkv, *rest = case(16)
    wide = torch.full((16, qkv.shape[1] + 40), torch.nan, dtype=torch.bfloat16)
    view = wide[:, 8:-32].copy_(qkv).detach().requires_grad_()
    outputs = qk_norm_rope(view, *rest)
    for a, b in zip(outputs, qk_norm_rope(qkv, *rest), strict=True):
        assert torch.equal(a, b)
    grads = [randn(*o.shape) for o in outputs]
    (strided,) = torch.autograd.grad(outputs, view, grads)
    (plain,) = torch.autograd.grad(qk_norm_rope(qkv.requires_grad_(), *rest), qkv, grads)
    assert torch.equal(strided, plain)
    columns = qkv.detach().t().contiguous().t()  # rows that are not contiguous at all
    assert torch.equal(qk_norm_rope(columns, *rest)[0], outputs[0])


@pytest.mark.parametrize("M", (0, 1))
@pytest.mark.parametrize("norm", (True, False))
def test_none_and_one_token(M, norm):
    qkv, *rest = case(M, norm=norm)
    outputs = qk_norm_rope(qkv.requires_grad_(), *rest)
    torch.autograd.backward(outputs, [torch.ones_like(o) for o in outputs])
    assert [o.shape[0] for o in outputs] == [M] * 3 and qkv.grad.shape == qkv.shape


def test_positions_outside_the_table_are_nan():
    qkv, positions, table, *rest = case()
    positions[3], positions[4] = 512, -1
    q, k, _ = qk_norm_rope(qkv, positions, table, *rest)
    bad = torch.zeros(20, dtype=torch.bool).index_fill(0, torch.tensor([3, 4]), True)
    assert q[bad].isnan().all() and k[bad].isnan().all() and q[~bad].isfinite().all()


@pytest.mark.parametrize(
    "change, message",
    (
        (dict(qkv_MN=torch.zeros(20, 1536)), "BF16"),
        (dict(qkv_MN=randn(1, 20, 1536)), "2-D"),
        (dict(heads=9), "1536 features"),
        (dict(head_dim=127), "even"),
        (dict(head_dim=512), "at most 256"),
        (dict(positions_M=torch.zeros(1, 20, dtype=torch.long)), "1-D"),
        (dict(positions_M=torch.zeros(20)), "int64 or int32"),
        (dict(positions_M=torch.zeros(19, dtype=torch.long)), "19 positions for 20"),
        (dict(cos_sin_PD=torch.zeros(10, 64)), "rope_table"),
        (dict(cos_sin_PD=torch.zeros(10, 128).bfloat16()), "rope_table"),
        (dict(cos_sin_PD=torch.zeros(10, 128, device="meta")), "meta"),
        (dict(q_norm_D=None), "both norm weights"),
        (dict(q_norm_D=torch.ones(64)), "shape"),
    ),
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_errors(change, message):
    names = ("qkv_MN", "positions_M", "cos_sin_PD", "heads", "kv_heads", "head_dim", "q_norm_D", "k_norm_D")
    arguments = dict(zip(names, case(), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        qk_norm_rope(**arguments)


def test_checkpointing_gives_the_same_gradients():
    qkv, *rest = case()
    grads = []
    for through in (lambda x: qk_norm_rope(x, *rest), lambda x: checkpoint(qk_norm_rope, x, *rest, use_reentrant=False)):
        x = qkv.detach().requires_grad_()
        q, k, v = through(x)
        (q.float().square().sum() + k.float().sum() + v.float().square().sum()).backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("grad", (True, False))
def test_compiles_to_one_graph(grad):
    qkv, *rest = case()
    compiled = torch.compile(lambda x: [y * 2 for y in qk_norm_rope(x, *rest)], fullgraph=True, backend="aot_eager")
    x = qkv.requires_grad_(grad)
    got, want = compiled(x), [y * 2 for y in qk_norm_rope(x, *rest)]
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    if grad:
        grads = [randn(*y.shape) for y in want]
        assert torch.equal(*(torch.autograd.grad(y, x, grads)[0] for y in (got, want)))


def test_without_gradients_a_compiler_sees_the_operator_alone():
    qkv, *rest = case()
    graphs = []

    def backend(graph, _):
        graphs.append({str(node.target) for node in graph.graph.nodes if node.op == "call_function"})
        return graph

    weights = [w.requires_grad_() for w in rest[-2:]]  # as in a model that is loaded for inference
    with torch.no_grad():
        torch.compile(lambda x: qk_norm_rope(x, *rest[:-2], *weights), fullgraph=True, backend=backend)(qkv)
    assert len(graphs) == 1 and any("jetrl.qk_norm_rope" in target for target in graphs[0])
    assert not any("autograd" in target for target in graphs[0])


@pytest.mark.parametrize("norm", (True, False))
def test_operators(norm):
    """Schema, fake implementation and results of the operators agree."""
    qkv, positions, table, heads, kv_heads, D, *weights = case(5, norm=norm)
    checks = ("test_schema", "test_faketensor")
    arguments = (qkv, positions, table, *weights)
    torch.library.opcheck(torch.ops.jetrl.qk_norm_rope, (*arguments, heads, kv_heads, D, 1e-6), test_utils=checks)
    grads = randn(5, heads, D), randn(5, kv_heads, D), randn(5, kv_heads, D)
    torch.library.opcheck(torch.ops.jetrl.qk_norm_rope_backward, (*grads, *arguments, 1e-6), test_utils=checks)


def test_kernels_in_the_interpreter():
    """The GPU kernels' own source, run on the CPU by Triton's interpreter: the forward gives the reference's bits."""
    root = Path(__file__).parent.parent
    env = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    script = str(Path(__file__).parent / "rope_interpreted.py")
    done = subprocess.run([sys.executable, script], env=env, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
