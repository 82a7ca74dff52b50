"""Log-probs from hidden states: the rollout's arithmetic, independent of the chunk, gradients against FP64."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from verl.jetrl.model.decoder import Weight
from verl.jetrl.trainer import log_probs as module
from verl.jetrl.trainer.log_probs import log_probs

M, H, V, TOKENIZER = 37, 64, 400, 390


@pytest.fixture
def case():
    torch.manual_seed(0)
    head = Weight(V, H)
    head.weight = nn.Parameter((torch.randn(V, H) * 0.3).bfloat16(), requires_grad=False)
    head.main_grad = torch.zeros(V, H)
    return torch.randn(M, H).bfloat16(), head, torch.randint(0, TOKENIZER, (M,)), torch.linspace(0.5, 1.5, M)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b).norm() / b.norm()).item()


def exact(x: torch.Tensor, weight: torch.Tensor, temperature: torch.Tensor, ids: torch.Tensor):
    """FP64 log-probs and entropies."""
    log_p = ((x @ weight.t())[:, :TOKENIZER] / temperature.double()[:, None]).log_softmax(-1)
    return log_p.gather(-1, ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def test_as_vllms_cpu_sampler_computes_them(case):
    """vLLM: FP32 logits, padding masked, divided by the temperature, log-softmax over the vocabulary."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.sample.sampler import Sampler

    from verl.jetrl.fp8 import ops

    x, head, ids, temperature = case
    logits = ops.bf16_gemm_nt(x, head.weight)
    logits[..., TOKENIZER:] = float("-inf")  # verl's mask, on the model's output
    logits = Sampler.apply_temperature(logits.to(torch.float32), temperature, all_random=True)
    _, theirs = TopKTopPSampler("processed_logprobs").forward_native(logits, {}, None, None)
    mine, _ = log_probs(x, head, ids, temperature, TOKENIZER)
    assert torch.equal(mine, theirs.gather(-1, ids[:, None])[:, 0])


@pytest.mark.parametrize("rows", [[3], [36, 0, 5], list(range(20))])
def test_a_tokens_bits_do_not_depend_on_the_others(case, rows):
    x, head, ids, temperature = case
    all_of_them = log_probs(x, head, ids, temperature, TOKENIZER, True)
    some = log_probs(x[rows], head, ids[rows], temperature[rows], TOKENIZER, True)
    for a, b in zip(all_of_them, some, strict=True):
        assert torch.equal(a[rows], b)


def test_gradients_and_chunks(case, monkeypatch):
    """One chunk, several chunks and FP64 agree, with gradients and without."""
    x, head, ids, temperature = case
    d_log_prob, d_entropy = torch.randn(M), torch.randn(M)
    found = []
    for multiple in (16, 128):
        monkeypatch.setattr(module, "MULTIPLE", multiple)
        monkeypatch.setattr(module, "CHUNK_VALUES", V * multiple)
        leaf = x.clone().requires_grad_()
        head.main_grad = torch.zeros(V, H)
        chosen, entropy = log_probs(leaf, head, ids, temperature, TOKENIZER, True)
        with torch.no_grad():
            again, entropy_again = log_probs(x, head, ids, temperature, TOKENIZER, True)
        assert torch.equal(chosen, again) and torch.equal(entropy, entropy_again)
        (chosen * d_log_prob + entropy * d_entropy).sum().backward()
        found.append((chosen.detach(), entropy.detach(), leaf.grad, head.main_grad))
    for a, b in zip(found[0][:3], found[1][:3], strict=True):
        assert torch.equal(a, b), "the chunk is invisible"
    leaves = [x.double().requires_grad_(), head.weight.detach().double().requires_grad_()]
    log_p, entropy = exact(*leaves, temperature, ids)
    (log_p * d_log_prob + entropy * d_entropy).sum().backward()
    chosen, mine, dx, dw = found[0]
    assert relative(chosen, log_p.detach()) < 3e-3 and relative(mine, entropy.detach()) < 5e-3  # BF16 logits
    assert relative(dx, leaves[0].grad) < 2e-2 and relative(dw, leaves[1].grad) < 2e-2
    assert dw[TOKENIZER:].abs().max() == 0


def test_kernels_in_the_interpreter():
    """The GPU kernels' own source, run on the CPU by Triton's interpreter."""
    script = str(Path(__file__).parent / "softmax_interpreted.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr


def test_without_entropy(case):
    x, head, ids, temperature = case
    leaf = x.clone().requires_grad_()
    chosen, entropy = log_probs(leaf, head, ids, temperature, TOKENIZER)
    assert entropy is None
    chosen.sum().backward()
    assert leaf.grad.abs().max() > 0


def test_of_some_rows_alone(case):
    """The others' are 0, and give neither the hidden states nor the head a gradient."""
    x, head, ids, temperature = case
    rows = torch.tensor([2, 3, 4, 11, 36])
    d_log_prob, d_entropy, wanted = torch.randn(M), torch.randn(M), torch.zeros(M, dtype=torch.bool)
    wanted[rows] = True
    found = []
    for given in (None, rows):
        leaf = x.clone().requires_grad_()
        head.main_grad = torch.zeros(V, H)
        chosen, entropy = log_probs(leaf, head, ids, temperature, TOKENIZER, True, given)
        ((chosen * d_log_prob + entropy * d_entropy) * wanted).sum().backward()
        found.append((chosen.detach(), entropy.detach(), leaf.grad, head.main_grad))
    everything, some = found
    for a, b in zip(everything[:3], some[:3], strict=True):
        assert torch.equal(a[rows], b[rows]) and b[~wanted].abs().max() == 0
    assert everything[0][~wanted].abs().min() > 0 and some[2][rows].abs().max() > 0
    torch.testing.assert_close(some[3], everything[3], rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        again, nothing = log_probs(x, head, ids, temperature, TOKENIZER, False, rows)
    assert torch.equal(again, some[0]) and nothing is None


def test_no_tokens(case):
    x, head, ids, temperature = case
    chosen, _ = log_probs(x[:0], head, ids[:0], temperature[:0], TOKENIZER)
    assert chosen.shape == (0,)
    chosen, _ = log_probs(x, head, ids, temperature, TOKENIZER, False, ids[:0])
    assert torch.equal(chosen, torch.zeros(M))


def test_the_logits_of_a_micro_batch_never_exist_as_a_whole():
    assert module.chunk_tokens(151936) == 1664 and module.chunk_tokens(10**9) == 128
