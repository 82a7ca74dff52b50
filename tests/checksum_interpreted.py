"""Run by test_checksum.py under TRITON_INTERPRET=1: the kernel on the CPU against the CPU's own result."""

import torch

from verl.jetrl import checksum as module
from verl.jetrl.checksum import checksum


def by_kernel(words: torch.Tensor, programs: int) -> int:
    out = torch.zeros((), dtype=torch.int64)
    constants = dict(STEP=module._STEP, MIX_1=module._MIX_1, MIX_2=module._MIX_2, BLOCK=module._BLOCK)
    module._checksum_kernel[(programs,)](words, out, len(words), programs, **constants)
    return out.item()


if __name__ == "__main__":
    torch.manual_seed(0)
    assert type(module._checksum_kernel).__name__ == "InterpretedFunction"
    for words in (1, 31, 4096, 4097, 20000):
        data = torch.randint(-(2**31), 2**31, (words,), dtype=torch.int32)
        for programs in (1, 3, 8):
            assert by_kernel(data, programs) == checksum(data).item(), (words, programs)
    assert by_kernel(data.flip(0).contiguous(), 3) != checksum(data).item()
