"""The hash of a tensor on the GPU is the CPU's."""

import pytest
import torch

from verl.jetrl.checksum import checksum
from verl.jetrl.weights import digest


@pytest.mark.parametrize("words", [0, 1, 31, 4096, 4097, 1056 * 4096, 1056 * 4096 + 5, 3 * 1056 * 4096 + 4095])
def test_gpu_is_the_cpus(words):
    data = torch.randint(-(2**31), 2**31, (words,), dtype=torch.int32, device="cuda")
    assert checksum(data).item() == checksum(data.cpu()).item()


def test_types_and_offsets():
    data = torch.randn(1 << 16, device="cuda")
    for view in (data.to(torch.float8_e4m3fn), data.bfloat16(), data, data.view(256, 256), data[1:], data[3:-4]):
        assert checksum(view).item() == checksum(view.cpu()).item()


def test_more_than_2_gib_of_words():
    """Positions beyond 2**31."""
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of GPU memory")
    data = torch.zeros(2**31 + 4096, dtype=torch.int32, device="cuda")
    before = checksum(data).item()
    data[-1] = 1
    after = checksum(data).item()
    data[-1], data[-2] = 0, 1
    assert len({before, after, checksum(data).item()}) == 3
    assert checksum(data[:4096]).item() == checksum(data[:4096].cpu()).item()


def test_a_flipped_bit_shows_in_the_digest_of_weights():
    weight = torch.randn(577, 576, device="cuda").bfloat16()
    before = digest(weight)
    assert before == digest([weight[:100], weight[100:]])
    weight.view(torch.uint8)[400, 3] ^= 16
    assert digest(weight) != before
