"""Damaged GGUF files: every one is refused in words or loads, whatever its bytes say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import gguf_mutations
from tests.checkpoints import build
from tests.gguf_files import write_gguf, write_small

ROOT = Path(__file__).resolve().parents[2]
MEMORY = 256 * 1024 * 1024


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    names = ["gguf-experts", "gguf-deepseek"]
    build(folder, names)
    return {
        names[0]: write_gguf(folder / names[0], folder / "experts.gguf", "Q8_0"),
        names[1]: write_gguf(folder / names[1], folder / "deepseek.gguf"),
    }


def outcome(file: Path, folder: Path, seed: int, count: int, library: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    arguments = [gguf_mutations.__file__, str(file), str(folder), str(seed), str(count), library]
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, f"ended with {done.returncode}:\n{done.stderr[-3000:]}"
    found = json.loads(done.stdout.splitlines()[-1])
    print({key: value for key, value in found.items() if key != "wrong"})
    assert not found["wrong"], "\n".join(found["wrong"][:5])
    assert found.get("refused", 0) + found.get("loads", 0) == count
    assert found["refused"] > count / 4
    assert found["grown_bytes"] < MEMORY


def test_a_hundred_damaged_copies_cost_neither_process_nor_memory(
    tmp_path: Path, tensor_library: str
) -> None:
    outcome(write_small(tmp_path / "small.gguf", "Q8_0"), tmp_path, 1, 100, tensor_library)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", ["gguf-experts", "gguf-deepseek"])
def test_a_thousand_damaged_copies(
    models: dict[str, Path], model: str, tmp_path: Path, tensor_library: str
) -> None:
    outcome(models[model], tmp_path, 2, 500, tensor_library)
