"""Fixtures and options of the conformance kit, and tiny checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.server_process import ServerProcess

sys.path.insert(0, str(Path(__file__).parent))

pytest_plugins = ["fastdeploy_testing.pytest_plugin"]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's checkpoint of random weights, as transformers writes it."""
    from tiny import make

    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = make(tmp_path_factory.mktemp("vl") / name, name)
        return made[name]

    return of


@pytest.fixture(scope="session")
def folder(checkpoint: Callable[[str], Path]) -> Path:
    """A Qwen2.5-VL."""
    return checkpoint("qwen2_5_vl")


@pytest.fixture(scope="session")
def server(folder: Path, fd_tensor: str) -> Iterator[ServerProcess]:
    """A server of its own process, which takes three pictures and files of the model's folder."""
    from tests.server_process import serving

    with serving(
        folder,
        *("--tensor-library", fd_tensor, "--max-model-len", "512", "--block-size", "16"),
        *("--dtype", "float32", "--num-gpu-blocks-override", "128"),
        *("--limit-mm-per-prompt", '{"image": 3}', "--allowed-local-media-path", str(folder)),
    ) as process:
        yield process
