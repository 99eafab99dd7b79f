"""Fixtures and options of the conformance kit, and a server with the page."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.server_process import ServerProcess

sys.path.insert(0, str(Path(__file__).parent))

pytest_plugins = ["fastdeploy_testing.pytest_plugin"]

ROOM = ("--num-gpu-blocks-override", "64", "--max-model-len", "1024", "--device", "cpu")


@pytest.fixture(scope="session")
def server(fd_tensor: str) -> Iterator[ServerProcess]:
    """Its key is "sesame"; a proxy may have it below a path."""
    from tests.server_process import REPOSITORY, serving

    with serving(
        *(REPOSITORY / "models" / "ernie-tiny", *ROOM, "--tensor-library", fd_tensor),
        *("--api-key", "sesame", "--served-model-name", "tiny", "--root-path", "/below"),
    ) as process:
        yield process
