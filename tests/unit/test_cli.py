"""The command line: quick, lazy, one line per error, nothing secret shown."""

from __future__ import annotations

import json
import logging
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fastdeploy_core import __version__, envs
from fastdeploy_core.cli.main import main
from fastdeploy_core.engine.processes.log_format import LineFormatter
from fastdeploy_core.plugins.core_commands import CORE_COMMANDS
from tests.server_process import command, environment, run

HEAVY = ("pydantic", "fastapi", "uvicorn", "numpy", "msgspec", "zmq", "torch", "paddle", "jinja2")


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in CORE_COMMANDS if "." not in name)
    assert main(["plugins", "--help"]) == 0
    text = capsys.readouterr().out
    names = [name.removeprefix("plugins.") for name in CORE_COMMANDS if "." in name]
    assert all(f"  {name} " in text for name in names)


@pytest.mark.parametrize("arguments", [["--help"], ["version"], ["plugins", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom fastdeploy_core.cli.main import main\n"
        f"main({arguments!r})\nprint([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )
    ended = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stderr.strip() == "[]"


@pytest.mark.parametrize("installed", [True, False])
def test_help_says_what_to_do_next(
    installed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: object() if installed and name == "torch" else None
    )
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "fastdeploy serve MODEL_FOLDER" in text
    assert ('pip install "fastdeploy-core[paddle]"' in text) is not installed


@pytest.mark.parametrize("words", [("--help",), ("plugins", "list")])
def test_looking_is_quick(words: tuple[str, ...]) -> None:
    """A command's processor time, with everything that is installed beside the core, is at most
    three times that of an interpreter that can read metadata (here about two). Neither a slow nor a
    busy machine fails it; one library that is imported for nothing does."""

    def seconds(*command_line: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command_line, env=environment(), capture_output=True, check=True)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime

    floor = (sys.executable, "-c", "import importlib.metadata")
    pairs = [(seconds(*command(*words)), seconds(*floor)) for _ in range(6)]
    taken, least = (min(times) for times in zip(*pairs, strict=True))
    assert taken < 3 * least


def test_serve_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    assert "fastdeploy serve" in capsys.readouterr().out


def test_version_in_three_spellings(capsys: pytest.CaptureFixture[str]) -> None:
    for spelling in ("version", "--version", "-v"):
        assert main([spelling]) == 0
        assert capsys.readouterr().out.strip() == f"fastdeploy {__version__}"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["serv"], 1, "did you mean 'serve'"),
        (["serve"], 2, "no model given"),
        (["serve", "/nowhere"], 2, "is not a folder"),
        (["run-batch", "--inptu-file", "x"], 1, "did you mean --input-file?"),
        (["router", "--instnces", "x"], 1, "did you mean --instances?"),
        (["quantize", "x", "--methd", "y"], 1, "did you mean --method?"),
        (["version", "--hlep"], 1, "did you mean --help?"),
    ],
)
def test_mistakes_are_one_line_and_an_exit_code(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    logging.disable(logging.CRITICAL)
    try:
        assert main(arguments) == code
    finally:
        logging.disable(logging.NOTSET)
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1, error
    assert error[0].startswith("fastdeploy: error: ")
    assert words in error[0]


def test_no_command_shows_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: fastdeploy" in capsys.readouterr().out


def test_a_command_of_another_group_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    for asked, found in (("doctor", "plugins doctor"), ("plugins serv", "serve")):
        assert main(asked.split()) == 1
        assert f"did you mean '{found}'?" in capsys.readouterr().err


def test_a_log_line_cannot_be_forged() -> None:
    formatter = LineFormatter("%(levelname)s %(message)s")
    record = logging.LogRecord("x", logging.INFO, "", 0, "a\nERROR \x1b[2Jb\x9b", (), None)
    assert formatter.format(record) == "INFO a\\x0aERROR \\x1b[2Jb\\x9b"


def test_plugins_is_dispatched_lazily() -> None:
    ended = run("plugins", "list", "--json")
    assert ended.returncode == 0, ended.stderr
    assert any(row["name"] == "null" for row in json.loads(ended.stdout)["plugins"])


def test_environment_variables_with_bad_values_are_one_line() -> None:
    ended = subprocess.run(
        command("serve", "/nowhere"),
        env={**environment(), "FD_LOG_LEVEL": "shouting"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert "FD_LOG_LEVEL" in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
    assert os.environ.get("FD_LOG_LEVEL") != "shouting"


def test_the_level_of_the_log_is_that_of_all_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FD_LOG_LEVEL", "info")
    assert main(["serve", "/nowhere", "--log-level", "error"]) == 2
    assert envs.read("FD_LOG_LEVEL") == "error"  # which the engine's process reads
    assert "is not a folder" in capsys.readouterr().err


def test_a_misspelt_variable_is_named_with_the_one_that_is_meant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("FD_API_KEYS", "FD_TP1_SERVICE_PORT", "FD_CUDA_NATIVE"):  # two are others'
        monkeypatch.setenv(name, "1")
    assert main(["serve", "/nowhere"]) == 2
    warned = [line for line in capsys.readouterr().err.splitlines() if "no effect" in line]
    assert len(warned) == 1 and "FD_API_KEYS has no effect; did you mean FD_API_KEY?" in warned[0]


def test_streams_that_a_supervisor_closed_are_open_for_what_is_started(tmp_path: Path) -> None:
    """Else sockets become standard error, and libraries that write there abort."""
    told = tmp_path / "told"
    program = (
        "import subprocess, sys; from fastdeploy_core.cli.main import main; main(['version']); "
        "child = 'import sys; sys.exit(None in (sys.stdin, sys.stdout, sys.stderr))'; "
        "ended = subprocess.call([sys.executable, '-c', child]); "
        "lost = None in (sys.stdout, sys.stderr); "
        "open(sys.argv[1], 'x').write(f'{sys.stdin.read()!r} {lost} {ended}')"
    )
    words = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", program, str(told)]
    assert subprocess.run(words, env=environment(), check=False).returncode == 0
    assert told.read_text() == "'' False 0"


def test_a_machine_without_a_temporary_folder_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A container whose file systems are all read-only, say."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])
    assert main(["serve", "/nowhere"]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert "No usable temporary directory" in said[-1] and "set TMPDIR" in said[-1], said
