"""gpt-oss with experts in MXFP4 gives what the numbers that its codes stand for give."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fastdeploy_core.errors import WeightError
from tests.mxfp4_checkpoints import build_mxfp4
from tests.paged import PagedModel, with_quantizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The quantized checkpoint, and its twin in float32."""
    return build_mxfp4(tmp_path_factory.mktemp("gpt-oss"))


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
