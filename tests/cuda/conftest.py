"""A test on a GPU has the time that it takes to compile its kernels beside other processes."""

from __future__ import annotations

from pathlib import Path

import pytest

COMPILING_S = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests of this folder more time than others have."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(COMPILING_S))
