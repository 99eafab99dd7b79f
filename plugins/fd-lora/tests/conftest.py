"""Fixtures and options of the conformance kit, and adapters that PEFT has written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

pytest_plugins = ["fastdeploy_testing.pytest_plugin"]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder with a base model of tests/checkpoints.py, its adapters, and PEFT's answers."""
    from peft_adapters import build

    folders: dict[str, Path] = {}

    def of(base: str) -> Path:
        if base not in folders:
            folders[base] = build(tmp_path_factory.mktemp(base), base)
        return folders[base]

    return of
