"""gpt-oss with experts in MXFP4 gives what the numbers that its codes stand for give."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fastdeploy_core.errors import WeightError
from tests.checkpoints import build
from tests.paged import PagedModel, with_quantizer

LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
GROUP = 32


def decode(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[..., inputs] float32; one number after the other, as the format is written down."""
    values = np.zeros((*scales.shape, GROUP), np.float32)
    for nth in range(GROUP):
        code = blocks[..., nth // 2] >> (4 if nth % 2 else 0) & 15
        values[..., nth] = LEVELS[code & 7] * np.where(code & 8, -1, 1)
    values *= np.exp2(scales.astype(np.float32) - 127)[..., None]
    return values.reshape(*scales.shape[:-1], -1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The quantized checkpoint, with every code and several scales, and its twin in float32."""
    whole = build(tmp_path_factory.mktemp("gpt-oss"), ["gpt-oss"]) / "gpt-oss"
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
            plain[name] = np.ascontiguousarray(decode(blocks, scales).transpose(0, 2, 1))
    save_file(plain, twin / "model.safetensors", {"format": "pt"})
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    config = json.loads((whole / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (packed / "config.json").write_text(json.dumps(config))
    return packed, twin


def test_it_is_read_as_the_numbers_that_it_stands_for(
    folders: tuple[Path, Path], tensor_library: str
) -> None:
    prompts = {"a": [5, 9, 33], "b": list(range(10, 60))}
    packed, twin = (
        PagedModel(folders[0], tensor_library, drivers=with_quantizer("mxfp4")),
        PagedModel(folders[1], tensor_library),
    )
    ours, theirs = (model.step([*prompts.items()]) for model in (packed, twin))
    for mine, wanted in zip(ours, theirs, strict=True):
        assert np.abs(wanted).max() > 1 and np.array_equal(mine, wanted)


def test_a_scale_that_is_no_number_is_a_damaged_checkpoint(
    folders: tuple[Path, Path], tensor_library: str, tmp_path: Path
) -> None:
    shutil.copytree(folders[0], tmp_path / "damaged")
    path = tmp_path / "damaged" / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("down_proj_scales"))
    tensors[name][1, 2, 0] = 255
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(WeightError, match=f"{name}.*not a number"):
        PagedModel(tmp_path / "damaged", tensor_library, drivers=with_quantizer("mxfp4"))
