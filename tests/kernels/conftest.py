"""Where the kernels run: under Triton's interpreter without a GPU, compiled with one."""

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The interpreter's device, and the compiled kernels' under ``-m gpu``."""
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("a GPU is here: the kernels are compiled")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return torch.device(request.param)
