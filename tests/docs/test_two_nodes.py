"""The tutorial of two nodes, word for word, where this machine lets a user make namespaces."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "tutorials" / "two-nodes.md").read_text("utf-8")
(SHELL,) = re.findall(r"^    (unshare .*) bash$", PAGE, re.MULTILINE)
BLOCKS = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
NETWORK = BLOCKS[0]


@pytest.fixture
def namespaces() -> list[str]:
    """The words that begin a shell with a network of its own."""
    for tool in ("ip", "curl", "unshare"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    words = [*SHELL.split(), "bash", "-e", "-o", "pipefail", "-c"]
    tried = subprocess.run(
        [*words, NETWORK], capture_output=True, text=True, timeout=30, check=False
    )
    if tried.returncode:
        pytest.skip(f"this machine does not let a user make namespaces: {tried.stderr[-200:]}")
    return words


def test_word_for_word(namespaces: list[str], tmp_path: Path) -> None:
    pytest.importorskip("fd_router", reason="needs fd-router")
    program = tmp_path / "fastdeploy"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m fastdeploy_core.cli.main "$@"\n')
    program.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FD_")}
    environment = {
        **kept,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(tmp_path),
    }
    script = "\n".join(f"echo '<{n}>'\n{block}" for n, block in enumerate(BLOCKS))
    done = subprocess.run(
        [*namespaces, script],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    logs = "\n".join(path.read_text()[-1500:] for path in tmp_path.rglob("*.log"))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs}"
    parts = re.split(r"<\d>\n", done.stdout)[1:]
    assert '"instances": 2' in parts[1]
    assert int(parts[2]) > 300
    assert parts[3].count("data: [DONE]") == 8, parts[3]
    assert "no client saw an error" in parts[3]
    moved = re.findall(r'migrations_total\{instance="10\.9\.0\.2:8180"\} (\d+)', parts[3])
    assert moved, parts[3]
    assert int(moved[0]) >= 1, "no stream ran on the node that died"
    assert parts[4].count("data: [DONE]") == 3
    assert '"instances": 1' in parts[4]
    assert "both ended well" in parts[5]
