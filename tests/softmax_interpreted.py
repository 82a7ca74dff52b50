"""Run by test_log_probs.py under TRITON_INTERPRET=1: the kernels over the vocabulary against torch's functions."""

import torch

from verl.jetrl.trainer import softmax as module
from verl.jetrl.vocabulary import mask_padding_

M = 5


def entropies(V: int, block: int) -> None:
    logits, out = mask_padding_(3 * torch.randn(M, V), V - 3), torch.empty(M)
    logits[1] = mask_padding_(torch.zeros(V), V - 3)  # uniform
    logits[2, 7] = 200.0  # certain
    module._entropy_kernel[(M,)](logits, out, V, BLOCK=block)
    assert torch.allclose(out, module.entropy(logits), rtol=1e-5, atol=1e-5), (V, block, out, module.entropy(logits))


def gradients(V: int, block: int) -> None:
    logits = (3 * torch.randn(M, V)).bfloat16()
    ids, temperature, d_log_prob = torch.randint(0, V - 3, (M,)), torch.linspace(0.5, 1.5, M), torch.randn(M)
    want = module.log_prob_gradient_(logits.clone(), ids, temperature, d_log_prob, V - 3)
    module._gradient_kernel[(M,)](logits, ids, temperature, -d_log_prob / temperature, V, V - 3, BLOCK=block)
    assert torch.allclose(logits.float(), want.float(), rtol=1e-2, atol=1e-6), (V, block)
    assert logits[:, -3:].abs().max() == 0 and logits.abs().max() > 0.1


if __name__ == "__main__":
    torch.manual_seed(0)
    assert type(module._entropy_kernel).__name__ == "InterpretedFunction"
    for V, block in ((40, 64), (128, 64), (300, 128)):
        entropies(V, block)
        gradients(V, block)
