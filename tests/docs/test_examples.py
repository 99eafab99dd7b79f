"""Every example runs on the demo model and prints something."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.name)
def test_example_runs(example: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(example)],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.name)
def test_example_is_short_and_says_what_is_learned(example: Path) -> None:
    text = example.read_text()
    assert len(text.splitlines()) <= 75
    assert text.startswith('"""')
