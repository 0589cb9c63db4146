"""Without a GPU the kernels run under Triton's interpreter, chosen before triton is imported."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The interpreter's device, and the compiled kernels' under ``-m gpu``."""
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("a GPU is here: the kernels are compiled")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return torch.device(request.param)
