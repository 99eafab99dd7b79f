"""Options of the conformance kit; the models and what their libraries say of them; servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pooling_models
import pytest
from server_process import ServerProcess, serving

pytest_plugins = ["fastdeploy_testing.pytest_plugin"]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    pooling_models.build(folder)
    return folder


@pytest.fixture(scope="session")
def answers(models: Path) -> dict[str, Any]:
    return pooling_models.build(models)


@pytest.fixture(scope="session")
def server(models: Path, fd_tensor: str) -> Iterator[Callable[[str], ServerProcess]]:
    """The server of a model, by its name and further arguments; each is started once."""
    started: dict[str, ServerProcess] = {}
    common = ("--tensor-library", fd_tensor or "torch", "--dtype", "float32", "--num-threads", "1")
    sizes = ("--num-gpu-blocks-override", "128", "--block-size", "16", "--max-num-seqs", "8")
    with ExitStack() as stack:

        def of(name: str, *more: str) -> ServerProcess:
            if name not in started:
                asked = serving(models / name, *common, *sizes, *more)
                started[name] = stack.enter_context(asked)
            return started[name]

        yield of
