"""Shapes that a real server was asked for, noted and replayed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import httpx
import pytest
from fd_tools.shapes import TensorShape, read
from server_process import REPOSITORY, serving
from server_support import wait_for

from fastdeploy_core.errors import ConfigError
from fastdeploy_core.tensor import available

DEMO = REPOSITORY / "models" / "ernie-tiny"
LIBRARY = available()[0]


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a prompt of eleven tokens and three decode steps."""
    path = tmp_path_factory.mktemp("shapes") / "shapes.json"
    words = ("--device", "cpu", "--tensor-library", LIBRARY, "--capture-shapes", str(path))
    with serving(DEMO, *words) as server:
        body = {"prompt": list(range(5, 16)), "max_tokens": 4, "ignore_eos": True}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()

        # one prompt, then three steps for the tokens after the first
        wait_for(lambda: (c := rows(path))[11] >= 1 and c[1] >= 3, "the shapes of the request")
    return path


def rows(path: Path) -> Counter[int]:
    """How often the first norm saw so many rows."""
    found = Counter[int]()
    for call in read(path):
        first = call.arguments[0]
        if call.operation == "rms_norm" and isinstance(first, TensorShape):
            found[first.shape[0]] += call.calls
    return found


def test_shapes_are_those_of_prompt_and_steps(captured: Path) -> None:
    config = json.loads((DEMO / "config.json").read_text())
    assert 1 <= rows(captured)[11] <= config["num_hidden_layers"], "at most one of each layer"
    widths = {
        call.arguments[1].shape
        for call in read(captured)
        if call.operation == "rms_norm" and isinstance(call.arguments[1], TensorShape)
    }
    assert widths == {(config["hidden_size"],)}


def test_calls_are_replayed_and_shown(captured: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "fastdeploy_core.cli.main", "plugins", "shapes",
         str(captured), "--tensor-library", LIBRARY, "--operation", "rms_norm"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines[0].split()[0] == "operation"
    assert any(line.startswith("rms_norm") and "11x" in line for line in lines), done.stdout
    assert any(line.endswith("on device cpu") for line in lines)
    assert "not replayed" not in done.stdout


def test_what_is_no_such_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"a": 1}')
    with pytest.raises(ConfigError, match="--capture-shapes FILE"):
        read(tmp_path / "x.json")
