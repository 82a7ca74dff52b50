"""Log-probs and entropy from hidden states, a few tokens at a time: the logits of a micro-batch never exist as a whole.

The arithmetic is the rollout's.  Logits are BF16 from the shared head, ids past the tokenizer's are masked, and then come
the steps of vLLM's sampler: an FP32 copy, the temperature, the log-softmax at the sampled token.  On a GPU these are
vLLM's own kernels; its CPU sampler runs the same torch functions as here.  A token's bits do not depend on the others.
The backward computes the logits again.  Where only some tokens' log-probs are wanted, as those of responses are, only they
have logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl.jetrl.fp8 import kernels, ops
from verl.jetrl.model.autograd import add_head_gradient, sink
from verl.jetrl.model.decoder import Weight
from verl.jetrl.trainer.softmax import entropy, log_prob_gradient_
from verl.jetrl.vocabulary import mask_padding_

# Logits at a time: 1 GiB in FP32.  In the backward, where BF16 ones do, twice as many: each chunk reads and writes the head's
# whole FP32 gradient.
CHUNK_VALUES = 2**28
MULTIPLE = 128  # tokens at a time are a multiple of this


def chunk_tokens(vocabulary: int) -> int:
    """Tokens whose logits are held at a time."""
    return max(CHUNK_VALUES // vocabulary // MULTIPLE, 1) * MULTIPLE


def widened(logits_MV: Tensor) -> Tensor:
    """Contiguous BF16 logits in FP32."""
    # Triton would compile the kernel again for a number of values that 16 does not divide.
    if not logits_MV.is_cuda or logits_MV.shape[1] % 16:
        return logits_MV.float()
    assert logits_MV.is_contiguous()
    out_MV = torch.empty_like(logits_MV, dtype=torch.float32)
    kernels.widen(logits_MV, out_MV, add=False)
    return out_MV


def scaled_logits(x_MH: Tensor, head_VH: Tensor, temperature_M: Tensor, tokens: int) -> Tensor:
    """FP32 logits (M, V) as the rollout samples from them: ids from ``tokens`` on masked, divided by the temperature."""
    logits_MV = widened(mask_padding_(ops.bf16_gemm_nt(x_MH, head_VH), tokens))
    if logits_MV.is_cuda:
        from vllm.v1.worker.gpu.sample.gumbel import apply_temperature

        rows = torch.arange(len(logits_MV), dtype=torch.int32, device=logits_MV.device)
        apply_temperature(logits_MV, rows, temperature_M.float())
        return logits_MV
    return logits_MV.div_(temperature_M.float()[:, None])


def chosen_log_probs(logits_MV: Tensor, ids_M: Tensor) -> Tensor:
    """FP32 log-probs (M,) of ``ids_M`` under FP32 ``logits_MV``, by the sampler's function."""
    if logits_MV.is_cuda:
        from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

        return compute_token_logprobs(logits_MV, ids_M[:, None])[:, 0]
    return logits_MV.log_softmax(dim=-1, dtype=torch.float32).gather(-1, ids_M[:, None])[:, 0]


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_MH, head, ids_M, temperature_M, tokens, with_entropy):
        ctx.head, ctx.tokens, ctx.with_entropy = head, tokens, with_entropy
        ctx.save_for_backward(x_MH, ids_M, temperature_M)
        return _forward(x_MH, head, ids_M, temperature_M, tokens, with_entropy)

    @staticmethod
    def backward(ctx, d_log_prob_M, d_entropy_M):
        x_MH, ids_M, temperature_M = ctx.saved_tensors
        dx_MH = torch.empty_like(x_MH)
        step = chunk_tokens(ctx.head.weight.shape[0]) * (1 if ctx.with_entropy else 2)
        with sink(ctx.head.main_grad, "head") as main_grad_VH:  # once: the ranks may have other numbers of chunks
            for start in range(0, len(x_MH), step):
                rows = slice(start, start + step)
                temperature = temperature_M[rows].float()
                d_MV = ops.bf16_gemm_nt(x_MH[rows], ctx.head.weight)
                if ctx.with_entropy:
                    d_entropy_MV = _entropy_gradient(mask_padding_(d_MV, ctx.tokens), temperature, d_entropy_M[rows])
                log_prob_gradient_(d_MV, ids_M[rows], temperature, d_log_prob_M[rows], ctx.tokens)
                if ctx.with_entropy:
                    d_MV += d_entropy_MV
                dx_MH[rows] = add_head_gradient(ctx.head, main_grad_VH, d_MV, x_MH[rows])
        return dx_MH, None, None, None, None, None


def _entropy_gradient(logits_MV: Tensor, temperature_M: Tensor, d_entropy_M: Tensor) -> Tensor:
    """FP32 gradient (M, V) of ``sum(d_entropy * entropy)`` with respect to BF16 logits."""
    log_p_MV = (logits_MV.float() / temperature_M[:, None]).log_softmax(-1)
    p_MV = log_p_MV.exp()
    mean_M1 = (p_MV * log_p_MV).sum(-1, keepdim=True)
    return p_MV * (mean_M1 - log_p_MV) * (d_entropy_M / temperature_M)[:, None]


def _forward(
    x_MH: Tensor, head: Weight, ids_M: Tensor, temperature_M: Tensor, tokens: int, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    log_probs, entropies = [], []
    step = chunk_tokens(head.weight.shape[0])
    for start in range(0, max(len(x_MH), 1), step):
        rows = slice(start, start + step)
        logits_MV = scaled_logits(x_MH[rows], head.weight, temperature_M[rows], tokens)
        log_probs.append(chosen_log_probs(logits_MV, ids_M[rows]))
        if with_entropy:
            entropies.append(entropy(logits_MV))
    return torch.cat(log_probs), torch.cat(entropies) if with_entropy else None


class _Rows(torch.autograd.Function):
    """Some rows, each once: their gradients are copied into zeros, where torch would add them up."""

    @staticmethod
    def forward(ctx, x_MH, rows_R):
        ctx.M = len(x_MH)
        ctx.save_for_backward(rows_R)
        return x_MH.index_select(0, rows_R)

    @staticmethod
    def backward(ctx, d_RH):
        return spread(d_RH, *ctx.saved_tensors, ctx.M), None


def rows_of(x_MH: Tensor, rows_R: Tensor) -> Tensor:
    """Rows ``rows_R`` (int64, each at most once) of a matrix, (R, H)."""
    return _Rows.apply(x_MH, rows_R)


def spread(x_R: Tensor, rows_R: Tensor, M: int) -> Tensor:
    """The way back: M rows, 0 where ``rows_R`` has none."""
    return x_R.new_zeros(M, *x_R.shape[1:]).index_copy(0, rows_R, x_R)


def log_probs(
    x_MH: Tensor,
    head: Weight,
    ids_M: Tensor,
    temperature_M: Tensor,
    tokens: int,
    with_entropy: bool = False,
    rows_R: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """FP32 log-probs (M,) of ``ids_M`` and, on request, the entropies (M,) in nats.

    Args: x_MH: BF16 final hidden states.  head: its ``main_grad`` receives the head's gradient.  ids_M: int64.
    temperature_M: FP32.  tokens: ids from here on are padding of the vocabulary and cannot be sampled.  rows_R: int64; the
    tokens whose log-probs are wanted, each once: the others' are 0, and so are their entropies.
    """
    if rows_R is not None:
        x_RH, M = rows_of(x_MH, rows_R), len(x_MH)
        chosen_R, entropy_R = log_probs(x_RH, head, ids_M[rows_R], temperature_M[rows_R], tokens, with_entropy)
        return spread(chosen_R, rows_R, M), None if entropy_R is None else spread(entropy_R, rows_R, M)
    if torch.is_grad_enabled():
        return _LogProbs.apply(x_MH, head, ids_M, temperature_M, tokens, with_entropy)
    return _forward(x_MH, head, ids_M, temperature_M, tokens, with_entropy)
