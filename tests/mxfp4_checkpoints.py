"""gpt-oss with experts in MXFP4, and the numbers that its codes stand for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.checkpoints import build

LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
GROUP = 32


def build_mxfp4(folder: Path) -> tuple[Path, Path]:
    """The quantized checkpoint, with every code and several scales, and its twin in float32."""
    whole = build(folder, ["gpt-oss"]) / "gpt-oss"
    twin, packed = whole.with_name("twin"), whole.with_name("mxfp4")
    shutil.copytree(whole, twin)
    shutil.copytree(whole, packed)
    tensors, rng = load_file(whole / "model.safetensors"), np.random.default_rng(3)
    stored, plain = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = weight.shape
            shape = (experts, outputs, inputs // GROUP)
            blocks = rng.integers(0, 256, (*shape, GROUP // 2)).astype(np.uint8)
            scales = rng.integers(121, 125, shape).astype(np.uint8)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            del stored[name]
            plain[name] = np.ascontiguousarray(_decode(blocks, scales).transpose(0, 2, 1))
    save_file(plain, twin / "model.safetensors", {"format": "pt"})
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    config = json.loads((whole / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (packed / "config.json").write_text(json.dumps(config))
    return packed, twin


def _decode(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[..., inputs] float32; one number after the other, as the format is written down."""
    values = np.zeros((*scales.shape, GROUP), np.float32)
    for nth in range(GROUP):
        code = blocks[..., nth // 2] >> (4 if nth % 2 else 0) & 15
        values[..., nth] = LEVELS[code & 7] * np.where(code & 8, -1, 1)
    values *= np.exp2(scales.astype(np.float32) - 127)[..., None]
    return values.reshape(*scales.shape[:-1], -1)
