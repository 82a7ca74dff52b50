"""Log-softmax of the trainer in FP32.

Why: without flash-attn's cross-entropy verl takes the log-softmax in the logits' dtype, BF16.  Its rounding (about 1e-2 per
    log-prob) buries the difference between rollout and trainer that this project is about; vLLM takes it in FP32.
What it replaces: ``logprobs_from_logits_v2``, the fallback of verl's ``logprobs_from_logits``, in all arms.
Upstream: none; with flash-attn installed upstream computes in FP32 already.
Remove when: upstream's fallback computes in FP32.
"""

import torch
from torch import Tensor

from verl.jetrl.patching import Patch


def build(original):
    def logprobs_from_logits_v2(logits: Tensor, labels: Tensor) -> Tensor:
        """FP32 log-probs of ``labels`` (...,) under ``logits`` (..., V)."""
        scores = logits.float()
        chosen = scores.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        return chosen - torch.logsumexp(scores, dim=-1)

    return logprobs_from_logits_v2


PATCH = Patch(
    name="verl_fp32_log_probs",
    scope="verl",
    target="verl.utils.torch_functional:logprobs_from_logits_v2",
    source_sha256="1074be97faf338ae07d3c2351db0752714541a17e0616a785ee65b6fc14ea262",
    build=build,
)
