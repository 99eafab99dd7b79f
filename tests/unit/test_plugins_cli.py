"""`fastdeploy plugins list`, and what stands in for commands that are not installed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from fastdeploy_core.cli import commands
from fastdeploy_core.cli.main import main
from fastdeploy_core.plugins import discovery
from tests.chip_plugin import installed, run


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    yield from installed(tmp_path, monkeypatch)


def test_list_shows_everything_once(capsys, stranger):
    code, out = run(capsys, "list")
    assert code == 0
    rows = [line.split() for line in out.out.splitlines()]
    assert rows[0] == ["name", "kind", "distribution", "version", "status"]
    assert ["chip", "device", "fd-chip", "0.3", "ok"] in rows
    assert sum(r[:2] == ["cpu", "device"] for r in rows) == 1


def test_list_of_one_kind(capsys, stranger):
    _, out = run(capsys, "list", "--kind", "attention")
    assert {line.split()[1] for line in out.out.splitlines()[1:]} == {"attention"}


def test_list_as_json_has_a_stable_form(capsys, stranger):
    _, out = run(capsys, "list", "--json")
    data = json.loads(out.out)
    chip = next(p for p in data["plugins"] if p["distribution"] == "fd-chip")
    assert list(chip) == [
        "name", "kind", "distribution", "version", "group", "target", "status", "reason",
    ]  # fmt: skip
    assert data["problems"] == []


def test_list_says_what_is_wrong(capsys, stranger, monkeypatch):
    monkeypatch.setenv("FD_PLUGINS_DISABLED", "fd-chip,fd-absent")
    code, out = run(capsys, "list")
    assert code == 0 and "disabled" in out.out
    assert "problem: FD_PLUGINS_DISABLED names fd-absent" in out.err


def test_mistakes_of_usage_are_explained(capsys):
    assert main(["plugins"]) == 2
    assert "usage: fastdeploy plugins" in capsys.readouterr().out
    assert main(["plugins", "list", "--kind", "odd"]) == 1
    assert "invalid choice: 'odd'" in capsys.readouterr().err
    assert main(["plugins", "list", "--jsn"]) == 1
    assert "did you mean --json?" in capsys.readouterr().err


def test_list_imports_neither_plugins_nor_heavy_libraries(stranger):
    (stranger / "chip.py").write_text("raise SystemExit('imported')")
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "from fastdeploy_core.cli.main import main\n"
        "main(['plugins', 'list'])\n"
        "heavy = {'torch', 'paddle', 'numpy', 'msgspec', 'pluggy', 'stevedore', 'fastapi', "
        "'chip'}\nsys.exit(str(sorted(heavy & set(sys.modules))) if heavy & set(sys.modules) "
        "else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "fd-chip" in done.stdout


@pytest.mark.parametrize("name", ["doctor", "show", "why"])
def test_inspection_that_is_not_installed_is_answered_with_what_installs_it(
    capsys, monkeypatch, tmp_path, name
):
    monkeypatch.setenv("FD_CACHE_DIR", str(tmp_path))
    others = tuple(e for e in discovery.discover().entries if e.distribution != "fd-tools")
    monkeypatch.setattr(discovery, "discover", lambda: discovery.Inventory(others))
    assert main(["plugins", name]) == 1
    said = capsys.readouterr().err
    assert f"`fastdeploy plugins {name}` is in the distribution fd-tools" in said
    assert "pip install fd-tools" in said
    assert "load each plugin in a child process (pip install fd-tools)" in commands.help_text(
        "plugins"
    )


def test_the_list_of_what_serves_leaves_no_command_out(monkeypatch):
    monkeypatch.setenv("FD_PLUGINS", "fd-cpu")
    named = discovery.discover().named("command", "plugins.why")
    assert [(e.distribution, e.status) for e in named] == [("fd-tools", discovery.OK)]
    monkeypatch.setenv("FD_PLUGINS_DISABLED", "fd-tools")
    named = discovery.discover().named("command", "plugins.why")
    assert [e.status for e in named] == [discovery.DISABLED]
