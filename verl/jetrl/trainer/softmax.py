"""Over a whole vocabulary, in as few passes over the logits as there can be: entropy, and the gradient of a log-prob.

Neither has to have the rollout's bits (log-probs do: :mod:`verl.jetrl.trainer.log_probs` calls the sampler's functions), but
each row has the same bits whatever the other rows are.  torch's functions read and write FP32 logits six times for the first
and, with what makes FP32 logits of BF16 ones, seven times for the second.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl.jetrl.vocabulary import MASKED, mask_padding_

BLOCK, WARPS = 8192, 16  # ids at a time; speed only, but for the order of a row's sums
_MASKED = tl.constexpr(MASKED)


@triton.jit
def _entropy_kernel(logits, out, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest, total, weighted = float("-inf"), 0.0, 0.0  # of exp(x - largest), and of x times that
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * V + v, mask=v < V, other=_MASKED)
        new = tl.maximum(largest, tl.max(x, 0))
        e, scale = tl.exp(x - new), tl.exp(largest - new)
        total = total * scale + tl.sum(e, 0)
        weighted = weighted * scale + tl.sum(e * x, 0)
        largest = new
    tl.store(out + row, largest + tl.log(total) - weighted / total)


@triton.jit
def _masked_logits(logits, row, v, V, tokens, temperature):
    """Logits as they are sampled from; ids past the vocabulary have probability 0 as well."""
    x = tl.load(logits + row * V + v, mask=v < V, other=0.0).to(tl.float32) / temperature
    return tl.where(v < tokens, x, _MASKED)


@triton.jit(do_not_specialize_on_alignment=["ids", "temperatures", "scales"])  # views: one number of a row each
def _gradient_kernel(logits, ids, temperatures, scales, V, tokens, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    temperature, scale, chosen = tl.load(temperatures + row), tl.load(scales + row), tl.load(ids + row)
    largest, total = float("-inf"), 0.0
    for start in range(0, V, BLOCK):
        x = _masked_logits(logits, row, start + tl.arange(0, BLOCK), V, tokens, temperature)
        new = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - new) + tl.sum(tl.exp(x - new), 0)
        largest = new
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        p = tl.exp(_masked_logits(logits, row, v, V, tokens, temperature) - largest) / total
        p = tl.where(v == chosen, p - 1.0, p)
        tl.store(logits + row * V + v, (p * scale).to(tl.bfloat16), mask=v < V)


def entropy(logits_MV: Tensor) -> Tensor:
    """FP32 entropies (M,) in nats of contiguous FP32 logits.  A masked id's logit is finite (``vocabulary.MASKED``)."""
    if not logits_MV.is_cuda:
        return torch.logsumexp(logits_MV, -1) - (logits_MV.softmax(-1) * logits_MV).sum(-1)
    M, V = logits_MV.shape
    out_M = torch.empty(M, dtype=torch.float32, device=logits_MV.device)
    if M:
        _entropy_kernel[(M,)](logits_MV, out_M, V, BLOCK=BLOCK, num_warps=WARPS)
    return out_M


def log_prob_gradient_(logits_MV: Tensor, ids_M: Tensor, temperature_M: Tensor, d_log_prob_M: Tensor, tokens: int) -> Tensor:
    """Replaces contiguous BF16 logits by the gradient with respect to them of ``sum(d_log_prob * log_prob(ids))``, in BF16.

    The log-probs are those of FP32 logits whose ids from ``tokens`` on are masked, divided by the temperature; computed in
    FP32.  Args: ids_M: int64.  temperature_M, d_log_prob_M: FP32.
    """
    M, V = logits_MV.shape
    scale_M = -d_log_prob_M / temperature_M  # of (p - 1 at the chosen id)
    if logits_MV.is_cuda:
        if M:
            _gradient_kernel[(M,)](
                logits_MV, ids_M, temperature_M, scale_M, V, min(tokens, V), BLOCK=BLOCK, num_warps=WARPS
            )  # fmt: skip
        return logits_MV
    p_MV = (mask_padding_(logits_MV, tokens).float() / temperature_M[:, None]).softmax(-1)
    p_MV.scatter_add_(-1, ids_M[:, None], p_MV.new_full((), -1.0).expand(M, 1))
    return logits_MV.copy_(p_MV.mul_(scale_M[:, None]))
