"""The demo model, another one of its shape, and what engines are made with."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.server_process import REPOSITORY

MODEL = REPOSITORY / "models" / "ernie-tiny"
ROOM = {
    "dtype": "float32", "max_model_len": 256, "num_gpu_blocks_override": 96, "block_size": 16,
    "max_num_seqs": 8,
}  # fmt: skip
PROMPTS = [list(range(40, 75)), list(range(60, 90)), list(range(100, 117))]


def tensors() -> dict[str, Any]:
    """Of the demo model."""
    found: dict[str, Any] = {}
    for file in sorted(MODEL.glob("*.safetensors")):
        found |= load_file(file)
    return found


def changed(factor: float) -> dict[str, Any]:
    """The same with larger matrices, which answer otherwise."""
    return {name: t * factor if t.ndim > 1 else t for name, t in tensors().items()}


def write(folder: Path, weights: dict[str, Any]) -> Path:
    """A model folder with these weights."""
    folder.mkdir(parents=True)
    for file in MODEL.iterdir():
        if file.is_file() and file.suffix in (".json", ".jinja", ".txt", ".model"):
            shutil.copy(file, folder)
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file(weights, folder / "model.safetensors")
    return folder
