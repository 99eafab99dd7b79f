"""Fixtures and options of the conformance kit; the library that tests run on."""

import pytest

from fastdeploy_core import tensor

pytest_plugins = ["fastdeploy_testing.pytest_plugin"]


@pytest.fixture(scope="session")
def tensor_library(fd_tensor: str) -> str:
    return fd_tensor or tensor.available()[0]
