import os

import pytest
import torch
from hypothesis import settings

if (
    not torch.cuda.is_available()
):  # kernels are tested in Triton's interpreter; said before its first import
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("fast", max_examples=25, deadline=None, derandomize=True)
settings.load_profile("fast")


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)
    torch.compiler.reset()  # torch gives up on a function after eight recompilations


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
