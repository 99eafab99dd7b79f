"""What the core asks: the checkpoint driver, the hook of the quantizer; hygiene of both drivers."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from fd_gguf.checkpoint import GGUFCheckpoint
from fd_gguf.hooks import fd_quantizer_for
from gguf_files import SMALL_HIDDEN, SMALL_VOCAB, write_small

from fastdeploy_core.contracts.base import Accept, Decline
from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_core.contracts.quantizer import QuantizationQuestion
from fastdeploy_core.errors import ConfigError, WeightError
from fastdeploy_core.plugins import lookup
from fastdeploy_testing.conformance.test_hygiene import HygieneConformance

PRODUCT = "model.layers.0.mlp.gate_proj"


class TestFormatHygiene(HygieneConformance):
    kind, driver_name = "checkpoint_format", "gguf"


class TestQuantizerHygiene(HygieneConformance):
    kind, driver_name = "quantizer", "gguf"


def small(tmp_path: Path, kind: str = "Q8_0") -> Path:
    return write_small(tmp_path / "small.gguf", kind)


def test_matrices_that_can_stay_packed_are_stated_unless_another_format_is_asked_for(
    tmp_path: Path,
) -> None:
    checkpoint = GGUFCheckpoint(small(tmp_path))
    stated = checkpoint.config("")["quantization_config"]
    assert (stated["quant_method"], stated["is_kept"]) == ("gguf", False)
    assert stated["matrices"][PRODUCT] == "wint8"
    assert checkpoint.config("gguf")["quantization_config"] == {**stated, "is_kept": True}
    assert "quantization_config" not in checkpoint.config("wint4")
    plain = GGUFCheckpoint(small(tmp_path, "BF16"))
    assert "quantization_config" not in plain.config("")
    with pytest.raises(ConfigError, match=r"no matrix in a format that can stay packed"):
        plain.config("gguf")


def test_a_folder_stands_for_its_file(tmp_path: Path) -> None:
    file = write_small(tmp_path / "small.GGUF")
    checkpoint = GGUFCheckpoint(tmp_path)
    assert (checkpoint.path, checkpoint.files) == (file, [file])
    file.rename(tmp_path / "m-00002-of-00002.gguf")
    with pytest.raises(WeightError, match=r"has no first part of a GGUF model"):
        GGUFCheckpoint(tmp_path)


@pytest.mark.parametrize("wanted", [True, False])
def test_tensors_come_packed_where_the_model_has_a_place_for_that(
    tmp_path: Path, wanted: bool, fd_tensor: str
) -> None:
    file = small(tmp_path)
    device = lookup("device", "cpu")(DeviceOptions(tensor_library=fd_tensor, num_threads=1))
    checkpoint = GGUFCheckpoint(file)
    config = checkpoint.config("")
    stored = dict(checkpoint.tensors(config, device, "float32", lambda name: wanted))
    assert stored["model.embed_tokens.weight"].shape == (SMALL_VOCAB, SMALL_HIDDEN)
    read = {name: device.to_host(tensor.read()) for name, tensor in stored.items()}
    assert all(read[name].shape == stored[name].shape for name in stored)
    (original,) = (t for t in gguf.GGUFReader(file).tensors if t.name == "blk.0.ffn_gate.weight")
    want = gguf.quants.dequantize(original.data, original.tensor_type)
    weight = read[f"{PRODUCT}.weight"]
    assert (f"{PRODUCT}.weight_scale" in stored) is wanted
    if wanted:
        assert weight.dtype == np.int8
        scale = np.repeat(read[f"{PRODUCT}.weight_scale"].astype(np.float32), 32, axis=1)
        weight = weight.astype(np.float32) * scale
    assert np.array_equal(weight, want)


def test_the_hook_takes_files_and_declines_everything_else() -> None:
    def ask(name: str, **config: object) -> QuantizationQuestion:
        return QuantizationQuestion(name, config, "cpu", "torch")

    matrices = {"model.layers.0.mlp.experts.up_proj": "wint4", PRODUCT: "wint8"}
    taken = fd_quantizer_for(ask("gguf", is_quantized=True, matrices=matrices))
    assert taken is not None and isinstance(taken.verdict, Accept)
    assert taken.details == {"experts": "wint4", "inner": "wint8,wint4"}
    declined = fd_quantizer_for(ask("gguf", is_quantized=False))
    assert declined is not None and isinstance(declined.verdict, Decline)
    assert "the model is none" in declined.verdict.reason
    assert fd_quantizer_for(ask("wint8", is_quantized=True)) is None
