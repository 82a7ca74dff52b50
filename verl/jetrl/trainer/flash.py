"""Attention of the trainer on a Hopper GPU, in every arm: causal, over packed sequences of any lengths.

Forward: FlashAttention 3 as vLLM ships it, with one split, because then packed prefill, paged decode and chunked prefill
give a token the same bits: trainer and rollout run one kernel.  Backward: flash-attn-4's kernel for SM90, which takes
FlashAttention 3's output and log-sum-exp.  (vLLM's package has no backward, and flash-attn-4's own forward has other bits.)
Both kernels take any head_dim up to 256 that is a multiple of 8 and groups of any size: SmolLM2's 64 and 3 as well.

Selected with ``model.override_config.attn_implementation=jetrl_fa3`` after :func:`register`; it needs
``use_remove_padding=true``, verl's packed (1, T) rows.  Without a GPU use ``jetrl_fp32``
(:mod:`verl.jetrl.trainer.attention`).

Names: M tokens of all sequences together, H heads (of q, or of k and v), D head_dim, B sequences.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from verl.jetrl.fp8.gemm import require_hopper
from verl.jetrl.fp8.registration import register
from verl.jetrl.trainer.staging import to_device

NAME = "jetrl_fa3"
MAX_HEAD_DIM = 256

# flash-attn-4 adds up dQ, and dK and dV of grouped heads, by atomic additions in memory; this makes the blocks take turns,
# so that a step gives the same gradients every time it is run.
DETERMINISTIC = True

_CPU_ERROR = (
    f"attn_implementation={NAME} runs FlashAttention 3 and needs a Hopper GPU; without one set "
    "model.override_config.attn_implementation=jetrl_fp32"
)


# --- the kernels ----------------------------------------------------------------------------------------------------


@functools.cache
def forward_kernel() -> Callable:
    """vLLM's FlashAttention 3.  Raises ImportError where it is not installed or does not run."""
    install = f"attn_implementation={NAME} needs FlashAttention 3 from vLLM: install vllm==0.24.0 (the GPU package)"
    try:
        from vllm import vllm_flash_attn
    except ImportError as error:
        raise ImportError(f"{install}; importing vllm.vllm_flash_attn failed: {error}") from error
    if not vllm_flash_attn.is_fa_version_supported(3):
        raise ImportError(f"{install}; it says: {vllm_flash_attn.fa_version_unsupported_reason(3)}")
    return vllm_flash_attn.flash_attn_varlen_func


@functools.cache
def backward_kernel() -> Callable:
    """flash-attn-4's backward.  Raises ImportError where it is not installed."""
    try:
        from flash_attn.cute.interface import _flash_attn_bwd
    except ImportError as error:
        raise ImportError(
            f"attn_implementation={NAME} needs flash-attn-4's backward to train: install flash-attn-4==4.0.0b19; importing "
            f"flash_attn.cute failed: {error}"
        ) from error
    return _flash_attn_bwd


# --- the operators --------------------------------------------------------------------------------------------------


class _Cuda:
    @staticmethod
    def flash_attention(q, k, v, cu_seqlens, max_seqlen, scale, deterministic):
        if q.shape[0] == 0:
            return _Fake.flash_attention(q, k, v, cu_seqlens, max_seqlen, scale, deterministic)
        return forward_kernel()(
            q, k, v, max_seqlen, cu_seqlens, max_seqlen, cu_seqlens, softmax_scale=scale, causal=True, fa_version=3,
            num_splits=1, return_softmax_lse=True,
        )  # fmt: skip

    @staticmethod
    def flash_attention_backward(do, q, k, v, o, lse, cu_seqlens, max_seqlen, scale, deterministic):
        # v is often a view of the fused projection; the kernel was seen to work with contiguous tensors only.
        do, q, k, v = (x.contiguous() for x in (do, q, k, v))
        if q.shape[0] == 0:
            return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        return backward_kernel()(
            q, k, v, o, do, lse, softmax_scale=scale, causal=True, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens,
            max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen, deterministic=deterministic,
        )[:3]  # fmt: skip


class _Cpu:
    @staticmethod
    def flash_attention(*_):
        raise RuntimeError(_CPU_ERROR)

    flash_attention_backward = flash_attention


class _Fake:
    """Shapes and dtypes of the results; all are contiguous."""

    @staticmethod
    def flash_attention(q, k, v, cu_seqlens, max_seqlen, scale, deterministic):
        return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)

    @staticmethod
    def flash_attention_backward(do, q, k, v, o, lse, cu_seqlens, max_seqlen, scale, deterministic):
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_SCHEMAS = (
    "flash_attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, SymInt max_seqlen, float scale, bool deterministic) "
    "-> (Tensor, Tensor)",
    "flash_attention_backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor cu_seqlens, "
    "SymInt max_seqlen, float scale, bool deterministic) -> (Tensor, Tensor, Tensor)",
)

_library = register(_SCHEMAS, _Cpu, _Cuda, _Fake)
_ops = torch.ops.jetrl


def _save(ctx, inputs, output) -> None:
    q, k, v, cu_seqlens, ctx.max_seqlen, ctx.scale, ctx.deterministic = inputs
    o, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, o, lse, cu_seqlens)


def _backward(ctx, do, _):
    q, k, v, o, lse, cu_seqlens = ctx.saved_tensors
    grads = _ops.flash_attention_backward(
        do.to(torch.bfloat16), q, k, v, o, lse, cu_seqlens, ctx.max_seqlen, ctx.scale, ctx.deterministic
    )
    return *grads, None, None, None, None


torch.library.register_autograd("jetrl::flash_attention", _backward, setup_context=_save, lib=_library)


def flash_attention(
    q_MHD: Tensor, k_MHD: Tensor, v_MHD: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float | None = None
) -> Tensor:
    """Causal grouped-query attention of packed sequences; differentiable in q, k and v.

    Args:
        q_MHD: BF16 (M, heads, D).  k_MHD, v_MHD: BF16 (M, KV heads, D); rows and heads may be strided.  D is a multiple
        of 8, at most 256; heads is any multiple of KV heads.
        cu_seqlens: int32 (B + 1,), where each sequence starts, then M.  max_seqlen: the longest sequence's tokens.
        scale: of the scores; 1/sqrt(D) where None.
    Returns: BF16 (M, heads, D).  A sequence's bits do not depend on the others.
    Raises: ValueError where shapes or dtypes do not fit, RuntimeError without a Hopper GPU, ImportError without the kernels.
    """
    if q_MHD.device.type == "cpu":
        raise RuntimeError(_CPU_ERROR)
    shapes = f"q {tuple(q_MHD.shape)}, k {tuple(k_MHD.shape)}, v {tuple(v_MHD.shape)}"
    if not all(x.dim() == 3 and x.dtype == torch.bfloat16 for x in (q_MHD, k_MHD, v_MHD)):
        raise ValueError(f"flash_attention: want BF16 (tokens, heads, head_dim), got {shapes}, {q_MHD.dtype} {k_MHD.dtype}")
    M, heads, D = q_MHD.shape
    if k_MHD.shape != v_MHD.shape or k_MHD.shape[0] != M or k_MHD.shape[2] != D or heads % k_MHD.shape[1]:
        raise ValueError(f"flash_attention: shapes do not fit: {shapes}")
    if D % 8 or D > MAX_HEAD_DIM:
        raise ValueError(f"flash_attention: head_dim must be a multiple of 8 and at most {MAX_HEAD_DIM}, got {D}")
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype != torch.int32:
        raise ValueError(f"flash_attention: cu_seqlens must be 1-D int32, got {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}")
    if q_MHD.device.type == "cuda":
        require_hopper(q_MHD.device)
    q_MHD, k_MHD, v_MHD = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_MHD, k_MHD, v_MHD))
    return _ops.flash_attention(
        q_MHD, k_MHD, v_MHD, cu_seqlens, max_seqlen, D**-0.5 if scale is None else scale, DETERMINISTIC
    )[0]


# --- sequences of a packed row --------------------------------------------------------------------------------------

# Every layer of a micro-batch gets the same position_ids tensor; the entry goes with the tensor.
_sequences = WeakTensorKeyDictionary()


@torch.compiler.disable
def cu_seqlens_of(position_ids: Tensor) -> tuple[Tensor, int]:
    """Where the sequences of a packed row start: a position of 0 starts one.

    It reads the positions back to the host, once per tensor: later calls with the same, unchanged tensor do not wait.

    Args: position_ids, integer (1, T) or (T,).
    Returns: cu_seqlens int32 (B + 1,) on the same device, and the longest sequence's number of tokens.
    Raises: ValueError for a batch of several rows or positions that do not count up from 0 within each sequence.
    """
    known = _sequences.get(position_ids)
    if known is None or known[0] != _version(position_ids):
        known = _sequences[position_ids] = (_version(position_ids), *_read_sequences(position_ids))
    return known[1:]


def stage_positions(position_ids: Tensor, device: torch.device) -> Tensor:
    """``position_ids`` on ``device``, with their sequences known: what was read on the host is not read back.

    Raises: as :func:`cu_seqlens_of`.
    """
    cu_seqlens, longest = cu_seqlens_of(position_ids)
    staged = to_device(position_ids, device)
    _sequences[staged] = (_version(staged), to_device(cu_seqlens, device), longest)
    return staged


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _read_sequences(position_ids: Tensor) -> tuple[Tensor, int]:
    if position_ids.dim() > 2 or (position_ids.dim() == 2 and position_ids.shape[0] != 1):
        raise ValueError(
            f"{NAME} attends over packed sequences: position_ids must have shape (1, T), got {tuple(position_ids.shape)}. "
            "Padded batches are not supported; set actor_rollout_ref.model.use_remove_padding=true."
        )
    positions = position_ids.detach().reshape(-1).cpu()  # the one wait; what follows is on the host
    T = positions.numel()
    continued = torch.cat((positions.new_zeros(1), positions[:-1] + 1))[:T]
    if not bool(((positions == 0) | (positions == continued)).all()):
        raise ValueError(
            f"{NAME}: the positions of a packed row must count up from 0 within each sequence, got "
            f"{positions[:8].tolist()}... of {T}. Sequence parallelism and position offsets are not supported."
        )
    cu_seqlens = torch.cat(((positions == 0).nonzero().flatten(), positions.new_tensor([T])))
    longest = int(cu_seqlens.diff().max()) if T else 0
    return cu_seqlens.to(torch.int32).to(position_ids.device, non_blocking=True), longest


# --- transformers ---------------------------------------------------------------------------------------------------


def _refuse(attention_mask: Tensor | None, dropout: float, options: dict) -> None:
    if attention_mask is not None:
        raise ValueError(
            f"{NAME} got an attention mask: padded batches are not supported; set "
            "actor_rollout_ref.model.use_remove_padding=true."
        )
    if dropout:
        raise ValueError(f"{NAME} has no dropout; set attention_dropout to 0 in the model's configuration (it is {dropout})")
    for name in ("sliding_window", "softcap", "s_aux"):
        if options.get(name) is not None:
            raise ValueError(f"{NAME} does not support {name} (it is {options[name]}): full causal attention only")
    if options.get("is_causal") is False:
        raise ValueError(f"{NAME} is causal; this model asks for is_causal=False")
    from verl.utils.ulysses import get_ulysses_sequence_parallel_world_size

    if get_ulysses_sequence_parallel_world_size() > 1:
        raise ValueError(f"{NAME} does not support Ulysses sequence parallelism; set ulysses_sequence_parallel_size=1")


def fa3_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer; the sequences come from ``position_ids`` unless the caller gives them.

    Args: query (1, heads, T, D), key and value (1, KV heads, T, D); BF16, or FP32 under a BF16 autocast.
    Returns: (1, T, heads, D) BF16.
    Raises: ValueError for what only a padded or otherwise masked batch needs; as :func:`flash_attention`.
    """
    _refuse(attention_mask, dropout, options)
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise ValueError(
            f"{NAME} attends over one packed row of whole sequences; got query {tuple(query.shape)} and key "
            f"{tuple(key.shape)}. Key-value caches and padded batches are not supported: set "
            "actor_rollout_ref.model.use_remove_padding=true."
        )
    if torch.is_autocast_enabled("cuda"):
        query, key, value = (x.to(torch.get_autocast_dtype("cuda")) for x in (query, key, value))
    if cu_seq_lens_q is None or max_length_q is None:
        if position_ids is None:
            raise ValueError(f"{NAME} needs position_ids (or cu_seq_lens_q and max_length_q) to tell the sequences apart")
        cu_seq_lens_q, max_length_q = cu_seqlens_of(position_ids)
    q_MHD, k_MHD, v_MHD = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    return flash_attention(q_MHD, k_MHD, v_MHD, cu_seq_lens_q, max_length_q, scaling).unsqueeze(0), None


def register() -> None:
    """Makes the name known to transformers.  No 4-D mask is built: packed rows have none, padded ones are refused."""
    AttentionInterface.register(NAME, fa3_attention)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"])
