"""GPU tests: marked ``gpu`` and skipped, with the reason, where there is no Hopper GPU."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # fp8_cases


def why_not() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability[0] != 9:
        return f"{torch.cuda.get_device_name()} has compute capability {capability}, not Hopper's 9.0"
    return None


def pytest_collection_modifyitems(items):
    reason = why_not()
    for item in items:
        if Path(__file__).parent in Path(item.path).parents:
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=f"needs a Hopper GPU: {reason}"))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
