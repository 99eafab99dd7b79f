"""docs/how-to/new-accelerator.md, word for word, in an environment of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "new-accelerator.md"
MOST_LINES = 120


def blocks() -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def place(panels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like the repository's top, and a virtual environment in it."""
    folder = tmp_path_factory.mktemp("newcomer")
    (folder / "models").symlink_to(ROOT / "models")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    site = next((folder / "venv").glob("lib/python*/site-packages"))
    paths = [sysconfig.get_path("purelib"), *(p for p in sys.path if "site-packages" in p)]
    (site / "libraries.pth").write_text("\n".join(dict.fromkeys(paths)) + "\n")
    script = folder / "venv" / "bin" / "fastdeploy"
    script.write_text('#!/bin/sh\nexec python -m fastdeploy_core.cli.main "$@"\n')
    script.chmod(0o755)
    return folder


def environment(place: Path) -> dict[str, str]:
    dropped = ("FD_", "SIM_", "CUSTOM_DEVICE_ROOT", "PYTEST")
    kept = {n: v for n, v in os.environ.items() if not n.startswith(dropped)}
    plugins = ("fd-accelerator", "fd-quant-formats", "fd-simdevice", "fastdeploy-testing")
    packages = [ROOT, *(ROOT / "plugins" / name for name in plugins)]
    return kept | {
        "PATH": f"{place / 'venv' / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, packages)),
        "OMP_NUM_THREADS": "1",
        # The newcomer has a network; this test has not.
        "PIP_NO_DEPS": "1",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        "FD_PLUGINS": "fd-acme,fastdeploy-testing",
    }


@pytest.mark.slow
def test_the_page_runs_as_it_is_written(place: Path) -> None:
    script = "set -e\n" + "\n".join(f"echo '=== {n}'\n{text}" for n, text in enumerate(blocks()))
    done = subprocess.run(
        ["bash", "-c", script], cwd=place, env=environment(place), capture_output=True, text=True,
        timeout=550, check=False,
    )  # fmt: skip
    said = done.stdout
    assert done.returncode == 0, said[-3000:] + done.stderr[-3000:]
    assert "['acme']" in said
    assert re.search(r"winner: acme", said)
    assert "run on the device alone" in said and "two ranks agree" in said
    assert "Beijing" in said
    assert re.search(r"\d+ passed", said) and not re.search(r"[1-9]\d* failed", said)
    package = place / "fd-acme" / "src" / "fd_acme"
    lines = sum(len(p.read_text().splitlines()) for p in package.glob("*.py"))
    assert lines < MOST_LINES, f"{lines} lines"
    print(f"fd-acme: {lines} lines")


def test_the_page_changes_nothing_in_the_core() -> None:
    """Its commands write into the new plugin's folder only."""
    text = "\n".join(blocks())
    assert set(re.findall(r"cat > (\S+?)/", text)) == {"fd-acme"}
    assert shutil.which("bash")
