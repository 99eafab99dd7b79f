"""The engine's process that is started before its arguments are known: taken once, or ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fastdeploy_core.cli import serve
from fastdeploy_core.engine.processes import child, early_engine
from fastdeploy_core.errors import ConfigError


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    early_engine.discard()


def test_a_prepared_process_is_taken_once_and_for_its_library() -> None:
    early_engine.prepare("torch")
    (prepared,) = [process for _, process in early_engine._prepared]
    other = early_engine.spawn("paddle")
    taken = early_engine.spawn("torch")
    again = early_engine.spawn("torch")
    assert taken is prepared and len({other.pid, taken.pid, again.pid}) == 3
    early_engine.discard()
    assert taken.poll() is None  # its owner's now
    for process in (other, taken, again):
        child.end(process, 0.0)


def test_one_that_died_is_not_taken() -> None:
    early_engine.prepare("")
    (prepared,) = [process for _, process in early_engine._prepared]
    prepared.kill()
    prepared.wait(10)
    taken = early_engine.spawn("")
    assert taken is not prepared
    child.end(taken, 0.0)


def test_a_command_that_cannot_serve_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    start = early_engine._start
    monkeypatch.setattr(
        early_engine, "_start", lambda library: started.append(start(library)) or started[-1]
    )
    with pytest.raises(ConfigError, match="is not a folder"):
        serve.main([str(tmp_path / "absent")])
    (process,) = started
    assert process.returncode is not None
