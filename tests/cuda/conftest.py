"""Settings of the tests on a GPU: kernels are chosen by rule, since shapes of tests are not worth
measuring; and a test has the time that it takes to compile its kernels beside other processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("FD_CUDA_TUNE", "0")

COMPILING_S = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests of this folder more time than others have."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(COMPILING_S))
