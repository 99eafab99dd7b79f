"""Fixtures and options of the conformance kit, and one tiny checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

pytest_plugins = ["fastdeploy_testing.pytest_plugin"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2.5-VL of random weights as transformers writes it."""
    from tiny import make

    return make(tmp_path_factory.mktemp("vl") / "tiny")
