"""Entropy and the gradient of a log-prob on the GPU, at real vocabularies: values of FP64, bits that no other row changes."""

import pytest
import torch
from fp8_cases import VOCABULARIES, relative

from verl.jetrl.trainer.log_probs import widened
from verl.jetrl.trainer.softmax import entropy, log_prob_gradient_
from verl.jetrl.vocabulary import mask_padding_

M = 130
SIZES = sorted({V for V, _ in VOCABULARIES} | {49152, 512, 77})


@pytest.mark.parametrize("V", SIZES)
def test_logits_in_fp32(V):
    logits = torch.randn(M, V, device="cuda").bfloat16()
    got = widened(logits)
    assert got.dtype == torch.float32 and torch.equal(got, logits.float())


@pytest.mark.parametrize("V", SIZES)
def test_entropy(V):
    logits = mask_padding_(3 * torch.randn(M, V, device="cuda"), V - 7)
    got = entropy(logits)
    p = logits.double().softmax(-1)
    want = -(p * p.clamp_min(1e-300).log()).sum(-1)
    assert relative(got, want) < 1e-5
    assert torch.equal(entropy(logits[5:6].contiguous()), got[5:6])


@pytest.mark.parametrize("V", SIZES)
def test_log_prob_gradient(V):
    logits = (3 * torch.randn(M, V, device="cuda")).bfloat16()
    ids = torch.randint(0, V - 7, (M,), device="cuda")
    temperature, d_log_prob = torch.linspace(0.5, 1.5, M, device="cuda"), torch.randn(M, device="cuda")
    leaf = logits.double().requires_grad_()
    log_p = (mask_padding_(leaf.clone(), V - 7) / temperature.double()[:, None]).log_softmax(-1)
    (log_p.gather(-1, ids[:, None])[:, 0] * d_log_prob).sum().backward()
    got = log_prob_gradient_(logits.clone(), ids, temperature, d_log_prob, V - 7)
    assert got.dtype == torch.bfloat16 and relative(got, leaf.grad) < 3e-3  # BF16's rounding
    assert got[:, -7:].abs().max() == 0
    again = log_prob_gradient_(logits[5:6].clone(), ids[5:6], temperature[5:6], d_log_prob[5:6], V - 7)
    assert torch.equal(again, got[5:6])
