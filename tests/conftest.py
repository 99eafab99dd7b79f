"""Options, markers and fixtures of the whole suite."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastdeploy_core import tensor


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tensor",
        default="",
        choices=["", *tensor.LIBRARIES],
        help="tensor library to run on (default: torch if it is installed, else paddle)",
    )
    parser.addoption(
        "--device",
        action="append",
        default=[],
        metavar="NAME",
        help="this machine has the hardware of that device driver: run tests marked device(NAME)",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    present = set(config.getoption("--device"))
    for item in items:
        missing = {m.args[0] for m in item.iter_markers("device")} - present
        if missing:
            names = ", ".join(sorted(missing))
            reason = f"needs the hardware of device {names}; where it is, add --device {names}"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def tensor_library(request: pytest.FixtureRequest) -> str:
    """The one tensor library of this run, by name; get it with tensor.load(name)."""
    name = request.config.getoption("--tensor") or tensor.available()[0]
    if name not in tensor.available():
        pytest.fail(f"tensor library {name!r} is not installed")
    return name


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of every architecture; modules that need a few have a fixture of
    that name."""
    from tests.checkpoints import build  # only where it is asked for

    return build(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(autouse=True)
def _handlers_of_commands_end_with_the_test() -> Iterator[None]:
    """A command that a test runs in this process logs to the stream that pytest closes after it."""
    root = logging.getLogger()
    before = root.handlers[:]
    yield
    for handler in root.handlers[:]:
        if type(handler) is logging.StreamHandler and handler not in before:
            root.removeHandler(handler)
