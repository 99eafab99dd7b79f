"""What the tests of the kit share."""

from __future__ import annotations

import pytest

from fastdeploy_core import tensor


@pytest.fixture(scope="session")
def tensor_library(fd_tensor: str) -> str:
    """Name of the tensor library of this run: --fd-tensor, else whichever is installed."""
    return fd_tensor or tensor.available()[0]
