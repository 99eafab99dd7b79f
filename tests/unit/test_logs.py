"""Where log lines go: standard error, FD_LOG_DIR with a file for each process; JSON lines."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastdeploy_core.engine.processes import child
from fastdeploy_core.engine.processes.log_format import DailyFile, handlers
from fastdeploy_core.errors import ConfigError


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FD_LOG_DIR", str(tmp_path / "logs"))


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, restored afterwards."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.setLevel("INFO")
    yield root
    for handler in set(root.handlers) - set(before):
        handler.close()
    root.handlers[:] = before
    root.setLevel(level)


def test_each_process_has_a_file_under_its_name(tmp_path: Path, root: logging.Logger) -> None:
    root.handlers[:] = handlers("fastdeploy-engine")[1:]
    assert list((tmp_path / "logs").iterdir()) == []  # none before its first line
    root.info("first")
    child.name_in_log("engine1")
    root.info("second")
    files = {p.name: p.read_text() for p in (tmp_path / "logs").iterdir()}
    assert set(files) == {"engine.log", "engine1.log"}
    assert "first" in files["engine.log"] and "second" not in files["engine.log"]
    assert "engine1/root: second" in files["engine1.log"]


def test_servers_that_share_a_folder_have_files_of_their_own(
    tmp_path: Path, root: logging.Logger
) -> None:
    """The one that came second would rename the other's file at midnight, over that of the day."""
    program = (
        "import logging, sys\n"
        "from fastdeploy_core.engine.processes.log_format import handlers\n"
        "logging.basicConfig(handlers=handlers()[1:])\n"
        "logging.warning('of another server')\n"
        "print(flush=True)\n"
        "sys.stdin.read()\n"
    )
    words = [sys.executable, "-c", program]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        root.handlers[:] = [*handlers()[1:], *handlers("fastdeploy-engine")[1:]]
        root.info("of this one")
        root.handlers[0].doRollover()  # type: ignore[attr-defined]
        root.info("the next day")
        other.communicate()
    files = {p.name: p.read_text() for p in (tmp_path / "logs").iterdir()}
    assert "of another server" in files.pop("server.log")
    assert "the next day" in files.pop("server.2.log")
    assert "the next day" in files.pop("engine.log")
    ((name, text),) = files.items()
    assert name.startswith("server.2.log.20") and "of this one" in text


def test_a_day_has_a_file_and_old_ones_go(
    tmp_path: Path, root: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FD_LOG_BACKUP_COUNT", "2")
    handler = handlers()[1]
    assert isinstance(handler, DailyFile)
    root.handlers[:] = [handler]
    root.info("today")
    for day in range(1, 5):
        handler.rolloverAt = int(time.time()) - day * 86400  # midnight has passed
        root.info("after midnight")
    names = sorted(p.name for p in (tmp_path / "logs").iterdir())
    assert names[0] == "server.log"
    assert len(names) == 3  # today's and two days'
    assert all(n.startswith("server.log.20") for n in names[1:])


def test_json_lines_have_what_a_collector_asks_for(
    tmp_path: Path, root: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FD_LOG_FORMAT", "json")
    root.handlers[:] = handlers()[1:]
    logging.getLogger("fastdeploy_core.serving.x").info(
        "request %s: %s", "abc", 'a "quote"\n and ü', extra={"request_id": "abc"}
    )
    try:
        raise ValueError("wrong")
    except ValueError:
        root.exception("it failed")
    lines = (tmp_path / "logs" / "server.log").read_text("utf-8").splitlines()
    first, second = map(json.loads, lines)  # two lines for two records, whatever is in them
    assert first["message"] == 'request abc: a "quote"\n and ü'
    assert (first["level"], first["request_id"]) == ("info", "abc")
    assert first["logger"] == "fastdeploy_core.serving.x" and first["process"] == "server"
    assert abs(time.time() - _seconds(first["time"])) < 60
    assert "request_id" not in second and "ValueError: wrong" in second["traceback"]


def _seconds(text: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(text).timestamp()


def test_a_folder_that_cannot_be_made_ends_the_command_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FD_LOG_DIR", str(tmp_path / "file" / "logs"))
    with pytest.raises(ConfigError, match="FD_LOG_DIR"):
        handlers()
    ended = subprocess.run(
        [sys.executable, "-m", "fastdeploy_core.cli.main", "serve", "/nowhere"],
        env={**os.environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert "FD_LOG_DIR" in ended.stderr and len(ended.stderr.splitlines()) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is full")
def test_a_full_disk_costs_lines_and_nothing_else(
    tmp_path: Path, root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    root.handlers[:] = handlers("fastdeploy-engine")
    (tmp_path / "logs" / "engine.log").symlink_to("/dev/full")
    for number in range(3):
        root.info("line %d", number)
    shown = capsys.readouterr().err
    assert all(f"root: line {number}" in shown for number in range(3))
    assert shown.count("No space left on device") == 1 and "Traceback" not in shown, shown
    with contextlib.suppress(OSError):  # as logging.shutdown does
        root.handlers[1].close()
