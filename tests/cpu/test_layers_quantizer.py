"""The quantizer seam: a linear layer asks, online and with a checkpoint that is quantized
already."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fastdeploy_core.contracts.quant_formats import PackedWeight
from fastdeploy_core.contracts.quantizer import LayerSpec, ParameterSpec
from fastdeploy_core.plugins.kernels import ChosenKernels
from tests.checkpoints import build, reference
from tests.paged import PagedModel, load_driver, with_quantizer


class Int8:
    """Eight bits per weight, one scale for each output."""

    name = "int8"
    contract = (1, 0)
    asked: list[LayerSpec]

    def __init__(self, config: Mapping[str, Any], device: Any, kernels: Any) -> None:
        self.xp, self.linear = device.xp, kernels["linear"]
        self.asked = []
        self.stored = config["is_quantized"]
        Int8.last = self

    def supports(self, layer: LayerSpec) -> bool:
        self.asked.append(layer)
        return layer.role == "linear" and not layer.name.endswith("o_proj")

    def joins(self, layer: LayerSpec) -> bool:
        return not layer.name.endswith("gate_up_proj")

    def is_stored(self, layer: LayerSpec) -> bool:
        return self.stored

    def parameters(self, layer: LayerSpec) -> dict[str, ParameterSpec]:
        weight, scale = (layer.out_features, layer.in_features), (layer.out_features,)
        rows = 1 if layer.parallel == "row" else 0
        return {
            "qweight": ParameterSpec(weight, "int8", rows),
            "scale": ParameterSpec(scale, "float32", None if rows else 0),
        }

    def quantize(self, layer: LayerSpec, weight: Any) -> dict[str, Any]:
        assert tuple(weight.shape) == (layer.out_features, layer.in_features)
        quantized, scale = int8(self.xp.to_numpy(weight))
        return {"qweight": self.xp.from_numpy(quantized), "scale": self.xp.from_numpy(scale)}

    def prepare(self, layer: LayerSpec, tensors: dict[str, Any]) -> Any:
        assert tuple(tensors["qweight"].shape) == (layer.out_features, layer.in_features)
        return tensors["qweight"].to(self.xp.float32) * tensors["scale"].unsqueeze(-1)

    def apply(self, layer: LayerSpec, prepared: Any, x: Any, bias: Any) -> Any:
        return self.linear(x, prepared, bias)

    def dequantize(self, layer: LayerSpec, tensors: dict[str, Any]) -> Any:
        return self.prepare(layer, tensors)


def int8(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scale = (np.abs(weight).max(axis=1) / 127).astype(np.float32)
    return np.round(weight / scale[:, None]).astype(np.int8), scale


def drivers(kind: str, name: str) -> Any:
    return Int8 if kind == "quantizer" else load_driver(kind, name)


def is_quantized(name: str) -> bool:
    kinds = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")
    return name.endswith(tuple(f"{kind}.weight" for kind in kinds))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("checkpoints"), ["llama"]) / "llama"


def copy(checkpoint: Path, target: Path, config: dict[str, Any], weights: dict[str, Any]) -> Path:
    target.mkdir()
    stored = json.loads((checkpoint / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**stored, **config}))
    save_file(weights, target / "model.safetensors")
    return target


def test_weights_are_quantized_while_they_are_loaded(
    checkpoint: Path, tensor_library: str, tmp_path: Path
) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    rounded = dict(weights)
    for name in filter(is_quantized, weights):
        quantized, scale = int8(weights[name])
        rounded[name] = (quantized * scale[:, None]).astype(np.float32)
    prompt = reference(checkpoint)[1]["prompt"].tolist()
    expected = PagedModel(copy(checkpoint, tmp_path / "r", {}, rounded), tensor_library)
    model = PagedModel(checkpoint, tensor_library, drivers=drivers, quantization="int8")
    ours, theirs = model.step([("a", prompt)])[0], expected.step([("a", prompt)])[0]
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())
    assert not np.allclose(theirs, reference(checkpoint)[1]["logits"], atol=1e-4)
    assert [line for line in model.loaded.report if "o_proj" in line]  # what stayed is reported


def test_a_quantized_checkpoint_gives_the_same_logits(
    checkpoint: Path, tensor_library: str, tmp_path: Path
) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    stored: dict[str, np.ndarray] = {}
    for name, weight in weights.items():
        if is_quantized(name):
            prefix = name.removesuffix("weight")
            stored[f"{prefix}qweight"], stored[f"{prefix}scale"] = int8(weight)
        else:
            stored[name] = weight
    config = {"quantization_config": {"quant_method": "int8"}}
    quantized = copy(checkpoint, tmp_path / "q", config, stored)
    prompt = reference(checkpoint)[1]["prompt"].tolist()
    online = PagedModel(checkpoint, tensor_library, drivers=drivers, quantization="int8")
    offline = PagedModel(quantized, tensor_library, drivers=drivers)
    np.testing.assert_array_equal(online.step([("a", prompt)])[0], offline.step([("a", prompt)])[0])
    kinds = {(spec.name.rsplit(".", 1)[-1], spec.parallel) for spec in Int8.last.asked}
    assert ("qkv_proj", "column") in kinds
    assert any(
        [part.name.rpartition(".")[2] for part in spec.parts] == ["q_proj", "k_proj", "v_proj"]
        for spec in Int8.last.asked
    )
    assert ("down_proj", "row") in kinds


def test_cell_does_the_norm_and_the_activation_before_it(
    checkpoint: Path, tensor_library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each but the first norm, which adds nothing, and the last one, after which is no packed
    product."""
    prompt = reference(checkpoint)[1]["prompt"].tolist()
    asked: dict[str, Any] = {"drivers": with_quantizer("w8a8"), "quantization": "w8a8"}
    expected = PagedModel(checkpoint, tensor_library, **asked).step([("a", prompt)])[0]
    calls: Counter[str] = Counter()

    def behind(self: ChosenKernels, operation: str, before: str) -> Any:
        assert operation == "linear_w8a8"
        kernel = self[before]

        def run(*arguments: Any) -> Any:
            *own, weight = arguments
            assert isinstance(weight, PackedWeight)
            calls[before] += 1
            return kernel(*own)

        return run

    monkeypatch.setattr(ChosenKernels, "behind", behind)
    model = PagedModel(checkpoint, tensor_library, **asked)
    np.testing.assert_array_equal(model.step([("a", prompt)])[0], expected)
    num_layers = len(model.loaded.model.layers)
    assert calls == {"add_rms_norm": 2 * num_layers - 1, "silu_and_mul": num_layers}
