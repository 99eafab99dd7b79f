"""Every fenced block in the documents is true: Python runs, TOML and YAML parse, commands parse.

A Python block that needs a server, hardware or a model runs as far as its imports and definitions;
the demo model is at hand. A block marked `no-run` in its info string is skipped and must say why
there.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from fastdeploy_core.config.argument_values import BY_SPELLING, NEGATIVE
from fastdeploy_core.config.other_flags import OTHER_FLAGS
from fastdeploy_core.plugins.core_commands import CORE_COMMANDS
from fastdeploy_core.plugins.known import providers

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^( *)```(\w+)([^\n]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
EXECUTED = {"docs/how-to/new-accelerator.md"}  # word for word, by tests/vendors
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


class Block(NamedTuple):
    page: str
    language: str
    info: str
    text: str


def _blocks() -> list[Block]:
    found = []
    for page in PAGES:
        for indent, language, info, text in FENCE.findall(page.read_text()):
            lines = [line.removeprefix(indent) for line in text.splitlines()]
            name = page.relative_to(ROOT).as_posix()
            found.append(Block(name, language, info.strip(), "\n".join(lines)))
    return found


def _of(*languages: str) -> list:
    chosen = [b for b in _blocks() if b.language in languages and b.page not in EXECUTED]
    return [pytest.param(b, id=f"{b.page}:{number}") for number, b in enumerate(chosen)]


@pytest.mark.parametrize("block", _of("python"))
def test_python_runs(block: Block, tmp_path: Path, tensor_library: str) -> None:
    if block.page.startswith("docs/reference/"):
        compile(block.text, block.page, "exec")  # signatures
        return
    if block.info.startswith("no-run"):
        assert len(block.info) > len("no-run: "), "say why it cannot run"
        compile(block.text, block.page, "exec")
        return
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", block.text],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("block", _of("toml"))
def test_toml_parses(block: Block) -> None:
    assert tomllib.loads(block.text)


@pytest.mark.parametrize("block", _of("yaml"))
def test_yaml_names_arguments(block: Block) -> None:
    for name in yaml.safe_load(block.text):
        assert name.replace("-", "_") in BY_SPELLING, f"{block.page}: no argument {name}"


@pytest.mark.parametrize("block", _of("json"))
def test_json_parses(block: Block) -> None:
    json.loads(block.text)


def _command_lines(text: str) -> list[str]:
    """Lines joined until their quotes close."""
    lines: list[str] = []
    for line in text.replace("\\\n", " ").splitlines():
        if lines and lines[-1].count("'") % 2:
            lines[-1] += "\n" + line
        else:
            lines.append(line)
    return lines


def _assert_flags_are_in_help(words: list[str]) -> None:
    """Each flag of `fastdeploy COMMAND [SUBCOMMAND] ...` is one that its --help names."""
    flags = [w.split("=")[0].split(".")[0] for w in words if w.startswith("--")]
    if not flags:
        return
    path = words[:2] if words[0] in ("bench", "plugins", "tokenizer") else words[:1]
    path = [word for word in path if word not in flags]
    done = subprocess.run(
        [sys.executable, "-m", "fastdeploy_core.cli.main", *path, "--help"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    for flag in flags:
        assert flag in done.stdout, f"fastdeploy {' '.join(path)} has no {flag}"


@pytest.mark.parametrize("block", _of("bash"))
def test_commands_exist(block: Block) -> None:
    for line in _command_lines(block.text):
        words = shlex.split(line, comments=True)
        for at, word in enumerate(words[:-1]):
            if Path(word).name != "fastdeploy":
                continue
            name = words[at + 1] if words[at + 1] != "plugins" else f"plugins.{words[at + 2]}"
            there = name in CORE_COMMANDS or name in providers("command")
            assert there, f"{block.page}: no command {name}"
            if words[at + 1] == "serve":
                for flag in (w for w in words[at + 2 :] if w.startswith("--")):
                    name = flag.removeprefix("--").split("=")[0].split(".")[0].replace("-", "_")
                    known = {*BY_SPELLING, *NEGATIVE, *OTHER_FLAGS, "config"}
                    assert name in known or name.removeprefix("no_") in known, flag
            else:
                _assert_flags_are_in_help(words[at + 1 :])
        for word in words:
            if word.endswith(".py") and "/" in word:
                assert (ROOT / word).exists(), f"{block.page}: no file {word}"
