"""The decoder of Qwen3, Qwen2.5 and Llama on the fork's operators: the one definition that trainer and vLLM run.

Both sides build :class:`Decoder` on the meta device and bind it to a weight arena, whose tensors have the names of its
parameters.  Attention is not in it: the caller passes ``attend``, which takes (tokens, heads, head_dim) tensors.  The
residual stream travels as a pair (x, residual) whose sum is taken, and rounded to BF16 once, by the next norm's kernel.

Without gradients (rollout, log-prob pass) each step is one operator.  With gradients the same operators run inside the
autograd functions of :mod:`verl.jetrl.model.autograd`, so both give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from verl.jetrl.arena import ROPE, SCALE, SHARDS, Arena, biases, has_qk_norm, head_dim, quantized_parts
from verl.jetrl.fp8 import ops
from verl.jetrl.fp8.format import FP8, Quantized, groups
from verl.jetrl.model import autograd
from verl.jetrl.model.rope import qk_norm_rope

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Tap = Callable[[str, Tensor, Tensor], None]


def _call(layer: nn.Module, *args: Any) -> tuple[Tensor, Tensor]:
    return layer(*args)


def _parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


class Weight(nn.Module):
    """A BF16 vector or matrix: a norm's weight, the embedding, the head.

    ``main_grad``: FP32 accumulator of the trainer, or the sink of one that is sharded; None elsewhere.
    """

    main_grad: Tensor | autograd.GradientSink | None = None

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = _parameter(*shape)


class Fp8Linear(nn.Module):
    """A fused linear layer: ``weight`` (N, K) FP8, block scales of its parts, BF16 ``bias`` (N,) or None.

    ``main_grad`` (N, K) and ``bias_grad`` (N,): FP32 accumulators of the trainer, or their sinks.  ``transposed``: per part
    the bytes for dgrad, kept (then whoever writes the arena refreshes them) or, when None, made for each use.  ``ensure``
    brings the weights where they are not there at all times, and is called before each use (:mod:`verl.jetrl.window`).

    The rollout may run a slice of the layer, as views: ``columns`` = (rank, T) computes the rank's share of every part's
    rows; ``shard`` = (rank, T, scales) multiplies the rank's share of K, and ``reduce`` adds the ranks' results.
    """

    main_grad: Tensor | autograd.GradientSink | None = None
    bias_grad: Tensor | autograd.GradientSink | None = None
    transposed: list[Tensor] | None = None
    ensure: Callable[[], None] | None = None
    columns: tuple[int, int] | None = None
    shard: tuple[int, int, Tensor] | None = None
    reduce: Callable[[Tensor], Tensor] | None = None

    def __init__(self, rows: list[int], K: int, bias: bool = False) -> None:
        super().__init__()
        self.rows, self.K = rows, K
        self.weight = _parameter(sum(rows), K, dtype=FP8)
        self.register_parameter(SCALE, _parameter(sum(groups(n) for n in rows), groups(K), dtype=torch.float32))
        self.register_parameter("bias", _parameter(sum(rows)) if bias else None)

    @property
    def parts(self) -> list[Quantized]:
        """The separately quantized parts; one where the blocks line up."""
        if self.ensure is not None:
            self.ensure()
        scale = getattr(self, SCALE)
        if self.columns is not None:
            blocks = [groups(n) for n in self.rows]
            return [
                Quantized(self._share(w), self._share(s))
                for w, s in zip(self.weight.split(self.rows), scale.split(blocks), strict=True)
            ]
        if self.shard is not None:
            rank, T, scales = self.shard
            width = self.K // T
            return [Quantized(self.weight[:, rank * width : (rank + 1) * width], scales)]
        return quantized_parts(self.weight, scale, self.rows)

    def _share(self, x: Tensor) -> Tensor:
        """The rank's share of a part's rows."""
        rank, T = self.columns
        n = x.shape[0] // T
        return x[rank * n : (rank + 1) * n]

    @property
    def part_rows(self) -> list[int]:
        """Rows of each of :attr:`parts`."""
        return [part.q.shape[0] for part in self.parts]

    def refresh_transposed(self) -> None:
        """Makes :attr:`transposed` anew from the arena's bytes."""
        self.transposed = [ops.with_transposed(part).q_t for part in self.parts]

    def transposed_part(self, index: int) -> Quantized:
        part = self.parts[index]
        q_t = ops.with_transposed(part).q_t if self.transposed is None else self.transposed[index]
        return Quantized(q_t, part.s.t())

    def fprop(self, x: Quantized) -> Tensor:
        """``x @ weight.T + bias`` (M, N) in BF16."""
        outputs = [ops.fprop(x, part) for part in self.parts]
        y_MN = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
        if self.reduce is not None:
            y_MN = self.reduce(y_MN)
        if self.bias is None:
            return y_MN
        return y_MN + (self.bias if self.columns is None else torch.cat([self._share(b) for b in self.bias.split(self.rows)]))


class Attention(nn.Module):
    """Parameters of the attention block."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        D, H = head_dim(config), config.hidden_size
        self.heads, self.kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, D
        qkv_bias, o_bias = biases(config)
        self.qkv_proj = Fp8Linear([self.heads * D, self.kv_heads * D, self.kv_heads * D], H, qkv_bias)
        self.o_proj = Fp8Linear([H], self.heads * D, o_bias)
        self.q_norm = Weight(D) if has_qk_norm(config) else None
        self.k_norm = Weight(D) if has_qk_norm(config) else None


class Mlp(nn.Module):
    """Parameters of the MLP block."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        H, I = config.hidden_size, config.intermediate_size
        self.gate_up_proj = Fp8Linear([I, I], H)
        self.down_proj = Fp8Linear([H], I)


class DecoderLayer(nn.Module):
    """Attention block and MLP block.  ``tap(operator, rows, positions)``, when set, sees every operator's output."""

    tap: Tap | None = None

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.input_layernorm = Weight(config.hidden_size)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Weight(config.hidden_size)
        self.mlp = Mlp(config)

    def forward(
        self, x_MH: Tensor, residual_MH: Tensor | None, positions_M: Tensor, rope: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """(x, residual) to (x, residual); ``residual`` is None in the first layer."""
        a = self.self_attn
        qkv_MN, h_MH = norm_linear(x_MH, residual_MH, self.input_layernorm, a.qkv_proj, self.eps)
        q_norm, k_norm = (None, None) if a.q_norm is None else (_leaf(a.q_norm), _leaf(a.k_norm))
        q, k, v = qk_norm_rope(qkv_MN, positions_M, rope, a.heads, a.kv_heads, a.head_dim, q_norm, k_norm, self.eps)
        attended = attend(q, k, v)
        y_MH = linear(attended, a.o_proj)
        out_MH, residual_MH = swiglu_mlp(y_MH, h_MH, self.post_attention_layernorm, self.mlp, self.eps)
        if self.tap is not None:
            outputs = {"norm, qkv": qkv_MN, "q norm, RoPE": q, "k norm, RoPE": k, "attention": attended, "o": y_MH}
            for operator, rows in {**outputs, "residual, norm, gate, up, SiLU, down": out_MH}.items():
                self.tap(operator, rows, positions_M)
        return out_MH, residual_MH

    def linears(self) -> list[Fp8Linear]:
        return [module for module in self.modules() if isinstance(module, Fp8Linear)]


class Body(nn.Module):
    """Embedding, layers and final norm; ``rope``: the table of :func:`verl.jetrl.model.rope.rope_table`, set by ``bind``."""

    rope: Tensor | None = None
    tap: Tap | None = None

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.embed_tokens = Weight(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = Weight(config.hidden_size)

    def run(self, ids_M: Tensor, positions_M: Tensor, attends: Sequence[Attend], call: Callable = _call) -> Tensor:
        """Final hidden states (M, H) BF16 of M tokens; ``attends``: one per layer; ``call(layer, *args)`` runs a layer."""
        x, residual = embed(ids_M, self.embed_tokens), None
        if self.tap is not None:
            self.tap("embedding", x, positions_M)
        for layer, attend in zip(self.layers, attends, strict=True):
            x, residual = call(layer, x, residual, positions_M, self.rope, attend)
        x = final_norm(x, residual, self.norm, self.eps)
        if self.tap is not None:
            self.tap("final norm", x, positions_M)
        return x


class Decoder(nn.Module):
    """The whole model but its attention; parameter names are the arena's."""

    body_class: type[Body] = Body

    def __init__(self, config: PretrainedConfig, **body: Any) -> None:
        super().__init__()
        _check(config)
        self.config = config
        self.model = self.body_class(**body) if body else self.body_class(config)
        tied = config.tie_word_embeddings
        self.lm_head = self.model.embed_tokens if tied else Weight(config.vocab_size, config.hidden_size)

    def bind(self, arena: Arena, *others: Arena) -> None:
        """Makes every parameter a view of the arena, or of the last of ``others`` that has it too."""
        own, bound = dict(self.named_parameters()), set()
        for name, tensor in chain(arena, *others):
            if name not in own:
                raise ValueError(f"the arena has {name}, the model does not")
            expected = own[name]
            if expected.shape != tensor.shape or expected.dtype != tensor.dtype:
                raise ValueError(
                    f"{name}: the arena has {tuple(tensor.shape)} {tensor.dtype}, the model {tuple(expected.shape)} "
                    f"{expected.dtype}"
                )
            owner, _, kind = name.rpartition(".")
            setattr(self.get_submodule(owner), kind, nn.Parameter(tensor, requires_grad=False))
            bound.add(name)
        if left := own.keys() - bound:
            raise ValueError(f"the arena lacks {sorted(left)}")
        self.model.rope = arena[ROPE]

    def slice(self, rank: int, T: int, reduce: Callable[[Tensor], Tensor], arena: Arena) -> None:
        """Makes a bound decoder the share of GPU ``rank`` of a rollout on T GPUs: heads and the MLP's columns are divided,
        ``reduce`` adds the ranks' partial sums.  Embedding, norms and head stay whole."""
        for index, layer in enumerate(self.model.layers):
            layer.self_attn.heads //= T
            layer.self_attn.kv_heads //= T
            for parent, fused in (("self_attn", "o_proj"), ("mlp", "down_proj")):
                proj = getattr(getattr(layer, parent), fused)
                proj.shard = rank, T, arena[f"model.layers.{index}.{parent}.{fused}.{SHARDS}"][rank]
                proj.reduce = reduce
            layer.self_attn.qkv_proj.columns = layer.mlp.gate_up_proj.columns = rank, T

    def linears(self) -> list[Fp8Linear]:
        return [linear for layer in self.model.layers for linear in layer.linears()]

    def head(self, x_MH: Tensor) -> Tensor:
        """Logits (M, V) in BF16."""
        logits = autograd.head(x_MH, self.lm_head) if torch.is_grad_enabled() else ops.bf16_gemm_nt(x_MH, self.lm_head.weight)
        if self.model.tap is not None:
            self.model.tap("logits", logits, torch.full((len(logits),), -1))  # whose they are is not known here
        return logits


def _check(config: PretrainedConfig) -> None:
    """Refuses what the decoder does not compute."""
    from verl.jetrl.precision import SUPPORTED_MODELS

    wrong = []
    if config.model_type not in SUPPORTED_MODELS:
        wrong.append(f"model_type={config.model_type!r} (supported: {', '.join(SUPPORTED_MODELS)})")
    elif config.hidden_act != "silu":
        wrong.append(f"hidden_act={config.hidden_act!r}")
    if getattr(config, "mlp_bias", False):
        wrong.append("mlp_bias=true")
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        wrong.append("sliding-window attention layers")
    if wrong:
        raise ValueError(f"the FP8 decoder does not support {'; '.join(wrong)}")
    heads, of = config.num_attention_heads, config.num_key_value_heads
    if heads < 1 or of < 1 or heads % of:
        raise ValueError(f"{heads} attention heads do not divide among {of} key-value heads")


def _leaf(norm: Weight) -> Tensor:
    """The weight as an autograd leaf whose gradient goes to ``main_grad``; as it is where no gradient is taken."""
    return autograd.leaf(norm) if torch.is_grad_enabled() else norm.weight


def norm_linear(x_MH: Tensor, residual_MH: Tensor | None, norm: Weight, proj: Fp8Linear, eps: float) -> tuple[Tensor, Tensor]:
    """``(proj(rms_norm(h)), h)`` of ``h = x + residual``."""
    if torch.is_grad_enabled():
        return autograd.norm_linear(x_MH, residual_MH, norm, proj, eps)
    x, kept = ops.rms_norm_quantize(x_MH, norm.weight, eps, residual_MH)
    return proj.fprop(x), kept.h


def linear(x_MK: Tensor, proj: Fp8Linear) -> Tensor:
    """``proj(x)``."""
    return autograd.linear(x_MK, proj) if torch.is_grad_enabled() else proj.fprop(ops.quantize_rows(x_MK))


def swiglu_mlp(x_MH: Tensor, residual_MH: Tensor, norm: Weight, mlp: Mlp, eps: float) -> tuple[Tensor, Tensor]:
    """``(down(silu(gate) * up), h)`` of ``h = x + residual`` and ``gate, up = gate_up(rms_norm(h))``."""
    if torch.is_grad_enabled():
        return autograd.swiglu_mlp(x_MH, residual_MH, norm, mlp, eps)
    x, kept = ops.rms_norm_quantize(x_MH, norm.weight, eps, residual_MH)
    act = ops.silu_mul_quantize(mlp.gate_up_proj.fprop(x))
    return mlp.down_proj.fprop(act), kept.h


def final_norm(x_MH: Tensor, residual_MH: Tensor, norm: Weight, eps: float) -> Tensor:
    """``rms_norm(x + residual)`` in BF16."""
    if torch.is_grad_enabled():
        return autograd.final_norm(x_MH, residual_MH, norm, eps)
    return ops.rms_norm(x_MH, norm.weight, eps, residual_MH)[0]


def embed(ids_M: Tensor, table: Weight) -> Tensor:
    """Rows of the embedding (M, H)."""
    return autograd.embed(ids_M, table) if torch.is_grad_enabled() else nn.functional.embedding(ids_M, table.weight)
