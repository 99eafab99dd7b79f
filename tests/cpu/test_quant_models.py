"""Whole models in every format: while loading and from checkpoints, experts, latent attention,
ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fd_calibrate.run import QuantizeOptions, quantize
from safetensors.numpy import load_file, save_file

from fastdeploy_core.config import DeviceConfig, EngineConfig
from fastdeploy_core.config.model import read_model_config
from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_core.errors import ConfigError, WeightError
from fastdeploy_core.loading.loader import load_model
from fastdeploy_core.models.shapes import read_shapes
from fastdeploy_core.plugins.kernels import build_kernel_table
from fastdeploy_core.plugins.resolve import resolve
from fastdeploy_testing.tiny_model import CONFIG, write_tiny_model
from tests.checkpoints import build
from tests.paged import PagedModel, with_quantizer
from tests.tp_rank import run_ranks

METHODS = ("wint8", "wint4", "w8a8", "w4a8", "wfp8afp8", "mix_quant")
MIX = '{"quantization": "mix_quant", "dense_quant_type": "wint8", "moe_quant_type": "w4a8"}'
GROUPS = '{"quantization": "wint4", "group_size": 8}'
PROMPT = [3, 9, 77, 14, 50, 2, 91, 33, 64, 8, 120]
# Largest distance of logits from full precision, relative to their size.
FAR = {"wint8": 0.03, "w8a8": 0.05, "wfp8afp8": 0.25, "wint4": 0.6, "w4a8": 0.6, "mix_quant": 0.5}


def spelled(method: str) -> str:
    return MIX if method == "mix_quant" else method


def wide(folder: Path) -> Path:
    """The tiny model with experts in whole blocks of 128."""
    before = dict(CONFIG)
    try:
        CONFIG.update(hidden_size=128, intermediate_size=160, moe_intermediate_size=128)
        return write_tiny_model(folder)
    finally:
        CONFIG.update(before)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("families"), ["deepseek"]) / "deepseek"


def logits(
    folder: Path, library: str, method: str = "", asked: str = "", **more: Any
) -> np.ndarray:
    drivers = {"drivers": with_quantizer(method)} if method else {}
    model = PagedModel(folder, library, quantization=asked, **drivers, **more)
    first = model.step([("a", PROMPT)])[0]
    return np.concatenate([first, model.step([("a", [5])])[0]])


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.sqrt(((a - b) ** 2).mean() / (b**2).mean()))


def write(model: Path, method: str, output: Path, library: str, **more: Any) -> Path:
    options = QuantizeOptions(
        model, spelled(method), output, tensor_library=library, show_progress=False, **more
    )
    quantize(options)
    return output


@pytest.mark.parametrize("method", ["mix_quant", "w8a8"])
def test_a_worker_loads_what_was_resolved_and_looks_no_driver_up(
    method: str, tiny_model: Path, tensor_library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(
        model=read_model_config(tiny_model, {"quantization": spelled(method)}),
        device=DeviceConfig(device="cpu", tensor_library=tensor_library),
    )
    shapes = read_shapes(config.model.hf_config)
    assert shapes.moe is not None
    resolved = resolve(config, layers=shapes.layers, moe=(shapes.moe,))

    def discover() -> Any:
        raise AssertionError("a worker asked what is installed")

    for module in ("discovery", "drivers", "kernels", "manager", "resolve", "resolved"):
        monkeypatch.setattr(f"fastdeploy_core.plugins.{module}.discover", discover)
    device = resolved.load("device")(DeviceOptions(tensor_library=tensor_library))
    kernels = build_kernel_table("cpu", {"tensor_library": tensor_library}, resolved=resolved)
    loaded = load_model(config, device, kernels, 0, 1, None, resolved.load)
    assert loaded.builder.quantizer is not None and loaded.builder.quantizer.name == method
    assert loaded.builder.head_quantizer() is not None


def test_experts_alone_beside_a_tied_head(
    tiny_model: Path, tensor_library: str, tmp_path: Path
) -> None:
    folder = tmp_path / "tied"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    asked = '{"quantization": "mix_quant", "moe_quant_type": "wint8"}'
    online = logits(folder, tensor_library, "mix_quant", asked)
    assert 1e-5 < distance(online, logits(folder, tensor_library)) < FAR["wint8"]
    stored = write(folder, asked, tmp_path / "q", tensor_library)
    np.testing.assert_array_equal(online, logits(stored, tensor_library, "mix_quant"))


@pytest.mark.parametrize(
    ("method", "option", "words"),
    [
        ("wint8", '"lm_head": "maybe"', "true, false"),
        ("wint8", '"ignored_layers": "lm_head"', "a list of names"),
        ("block_wise_fp8", '"weight_block_size": 3', r"possible: \[128, 128\]"),
    ],
)
def test_options_of_the_wrong_kind_are_refused(
    method: str, option: str, words: str, tiny_model: Path, tensor_library: str
) -> None:
    asked = f'{{"quantization": "{method}", {option}}}'
    with pytest.raises(ConfigError, match=words):
        logits(tiny_model, tensor_library, method, asked)


@pytest.mark.parametrize("method", METHODS)
def test_checkpoint_that_we_write_gives_the_same_logits(
    method: str, tiny_model: Path, tensor_library: str, tmp_path: Path
) -> None:
    online = logits(tiny_model, tensor_library, method, _all(method))
    stored = write(tiny_model, _all(method), tmp_path / "q", tensor_library)
    offline = logits(stored, tensor_library, method)
    np.testing.assert_array_equal(online, offline)
    far = distance(online, logits(tiny_model, tensor_library))
    assert 1e-5 < far < FAR[method], far
    config = json.loads((stored / "config.json").read_text())["quantization_config"]
    assert config["quantization"] == method and config["is_quantized"]


def _all(method: str) -> str:
    """wint4 everywhere, where the name alone would mean FastDeploy 2.x's mix."""
    return '{"quantization": "wint4", "group_size": 0}' if method == "wint4" else spelled(method)


def test_block_fp8_is_written_as_transformers_reads_it(tensor_library: str, tmp_path: Path) -> None:
    model = wide(tmp_path / "m")
    online = logits(model, tensor_library, "block_wise_fp8", "block_wise_fp8")
    stored = write(model, "block_wise_fp8", tmp_path / "q", tensor_library)
    np.testing.assert_array_equal(online, logits(stored, tensor_library, "block_wise_fp8"))
    config = json.loads((stored / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "fp8" and config["weight_block_size"] == [128, 128]
    index = json.loads((stored / "model.safetensors.index.json").read_text())["weight_map"]
    assert "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv" in index
    assert "model.layers.0.self_attn.k_proj.weight_scale_inv" in index


def test_groups_are_kept_in_checkpoints(
    tiny_model: Path, tensor_library: str, tmp_path: Path
) -> None:
    stored = write(tiny_model, GROUPS, tmp_path / "q", tensor_library)
    weights = load_file(next(stored.glob("model-*.safetensors")))
    name = "model.layers.1.mlp.experts.2.gate_proj.weight"
    assert weights[name].shape == (24, 16) and weights[f"{name}_scale"].shape == (24, 4)
    online = logits(tiny_model, tensor_library, "wint4", GROUPS)
    np.testing.assert_array_equal(online, logits(stored, tensor_library, "wint4"))


def test_latent_attention_takes_its_up_projection_out_of_a_quantized_checkpoint(
    deepseek: Path, tensor_library: str, tmp_path: Path
) -> None:
    """DeepSeek V3's checkpoints have kv_b_proj in fp8; absorbed, it is computed in full
    precision."""
    stored = write(deepseek, "wint8", tmp_path / "q", tensor_library)
    config = json.loads((stored / "config.json").read_text())
    left = config["quantization_config"]["modules_to_not_convert"]
    assert any(name.endswith("kv_b_proj") for name in left)
    weights = load_file(next(stored.glob("model-*.safetensors")))
    rounded, quantized = dict(weights), dict(weights)
    for name in [n for n in weights if n.endswith("kv_b_proj.weight")]:
        scale = np.abs(weights[name]).max(axis=1, keepdims=True) / 127
        quantized[name] = np.round(weights[name] / scale).astype(np.int8)
        quantized[f"{name}_scale"] = scale.astype(np.float32)
        rounded[name] = quantized[name] * quantized[f"{name}_scale"]
    expected = copy(tmp_path / "rounded", config, rounded)
    config["quantization_config"]["modules_to_not_convert"] = [
        name for name in left if "kv_b_proj" not in name
    ]
    found = copy(tmp_path / "quantized", config, quantized)
    a, b = (logits(folder, tensor_library, "wint8") for folder in (expected, found))
    np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(a).max())
    assert not np.allclose(a, logits(stored, tensor_library, "wint8"), atol=1e-4)


def copy(folder: Path, config: dict[str, Any], weights: dict[str, np.ndarray]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


def test_two_ranks_equal_one(tiny_model: Path, tensor_library: str, tmp_path: Path) -> None:
    """Packed numbers, groups and experts are cut as the whole layer would be."""
    asked = '{"quantization": "wint4", "group_size": 4}'
    stored = write(tiny_model, asked, tmp_path / "q", tensor_library)
    whole = PagedModel(stored, tensor_library, drivers=with_quantizer("wint4"))
    expected = whole.step([("a", PROMPT)])[0][-1]
    ranks = run_ranks(stored, tensor_library, 2, tmp_path / "group", {"0": PROMPT}, 4)
    for rank in ranks:
        near = np.abs(np.array(rank["logits"]) - expected).max() / np.abs(expected).max()
        assert near < 1e-4
    assert ranks[0]["tokens"] == ranks[1]["tokens"]


def test_head_is_quantized_only_where_asked(
    tiny_model: Path, tensor_library: str, tmp_path: Path
) -> None:
    source = tiny_model
    asked = '{"quantization": "wint8", "lm_head": true}'
    drivers = with_quantizer("wint8")
    plain = PagedModel(source, tensor_library, drivers=drivers, quantization="wint8")
    headed = PagedModel(source, tensor_library, drivers=drivers, quantization=asked)
    assert headed.loaded.weight_bytes < plain.loaded.weight_bytes
    assert "lm_head" in plain.loaded.report[-1] and "lm_head" not in headed.loaded.report[-1]
    a, b = (model.step([("a", PROMPT)])[0] for model in (plain, headed))
    assert 0 < distance(b, a) < 0.02


def test_dummy_weights_are_made_quantized(tiny_model: Path, tensor_library: str) -> None:
    """Nothing is rounded, and no full-precision weight exists."""
    for method in (*METHODS, "wint4"):
        a = logits(tiny_model, tensor_library, method, spelled(method), load_format="dummy")
        b = logits(tiny_model, tensor_library, method, spelled(method), load_format="dummy")
        assert np.isfinite(a).all() and np.array_equal(a, b) and a.std() > 0


def test_weights_take_what_their_bits_say(tensor_library: str, tmp_path: Path) -> None:
    model = wide(tmp_path / "m")
    full = PagedModel(model, tensor_library).loaded.weight_bytes
    held = {}
    for method, bits in (("wint8", 8), ("wint4", 4), ("w4a8", 4), ("block_wise_fp8", 8)):
        drivers = with_quantizer(method)
        paged = PagedModel(model, tensor_library, drivers=drivers, quantization=_all(method))
        held[method] = (bits, paged.loaded.weight_bytes)
    weights = load_file(model / "model.safetensors")
    rounded = sum(w.size for n, w in weights.items() if n.endswith("_proj.weight"))
    for method, (bits, size) in held.items():
        saved = full - size
        assert saved == pytest.approx(rounded * (32 - bits) / 8, rel=0.02), method


# -- what must be refused -------------------------------------------------------------------------


@pytest.fixture
def stored(tiny_model: Path, tensor_library: str, tmp_path: Path) -> Path:
    return write(tiny_model, "wint8", tmp_path / "stored", tensor_library)


def damage(stored: Path, change: Any) -> None:
    path = next(stored.glob("model-*.safetensors"))
    weights = load_file(path)
    change(weights)
    save_file(weights, path)
    index = json.loads((stored / "model.safetensors.index.json").read_text())
    index["weight_map"] = dict.fromkeys(weights, path.name)
    (stored / "model.safetensors.index.json").write_text(json.dumps(index))


SCALE = "model.layers.0.self_attn.q_proj.weight_scale"
EXPERT = "model.layers.1.mlp.experts.2.down_proj.weight_scale"


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
@pytest.mark.parametrize("name", [SCALE, EXPERT])
def test_scale_that_is_no_number_names_its_tensor(
    stored: Path, tensor_library: str, name: str, value: float
) -> None:
    def change(weights: dict[str, np.ndarray]) -> None:
        weights[name] = weights[name].copy()
        weights[name][1] = value

    damage(stored, change)
    where = "qkv_proj" if "self_attn" in name else "experts.down_proj"
    with pytest.raises(WeightError, match=rf"{where}.*scale"):
        logits(stored, tensor_library, "wint8")


def test_missing_scale_is_named(stored: Path, tensor_library: str) -> None:
    damage(stored, lambda weights: weights.pop(SCALE))
    with pytest.raises(WeightError, match=SCALE):
        logits(stored, tensor_library, "wint8")


def test_other_shape_is_named(stored: Path, tensor_library: str) -> None:
    def change(weights: dict[str, np.ndarray]) -> None:
        weights[SCALE] = weights[SCALE][:-1].copy()

    damage(stored, change)
    with pytest.raises(WeightError, match=rf"{SCALE} has shape"):
        logits(stored, tensor_library, "wint8")


def test_other_dtype_is_named(stored: Path, tensor_library: str) -> None:
    def change(weights: dict[str, np.ndarray]) -> None:
        name = SCALE.removesuffix("_scale")
        weights[name] = weights[name].astype(np.float32)

    damage(stored, change)
    with pytest.raises(WeightError, match=r"stored as float32.*asks for int8"):
        logits(stored, tensor_library, "wint8")


def test_truncated_file_is_named(stored: Path, tensor_library: str) -> None:
    path = next(stored.glob("model-*.safetensors"))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WeightError, match="model-00001-of-00001"):
        logits(stored, tensor_library, "wint8")


def test_full_precision_weights_under_a_quantized_config_are_named(
    tiny_model: Path, stored: Path, tensor_library: str, tmp_path: Path
) -> None:
    config = json.loads((stored / "config.json").read_text())
    wrong = copy(tmp_path / "wrong", config, load_file(tiny_model / "model.safetensors"))
    with pytest.raises(WeightError, match="stored as float32"):
        logits(wrong, tensor_library, "wint8")


def test_group_that_does_not_divide_names_the_layer(tiny_model: Path, tensor_library: str) -> None:
    asked = '{"quantization": "wint4", "group_size": 20}'
    with pytest.raises(
        ConfigError, match=r"group_size 20 does not divide the 32 inputs of .*qkv_proj"
    ):
        logits(tiny_model, tensor_library, "wint4", asked)


def test_experts_cut_inside_a_block_are_refused(tiny_model: Path, tensor_library: str) -> None:
    with pytest.raises(ConfigError, match=r"block_wise_fp8: .*experts\.gate_up_proj.*block of 128"):
        logits(tiny_model, tensor_library, "block_wise_fp8", "block_wise_fp8")


def test_static_activations_need_calibration(tiny_model: Path, tensor_library: str) -> None:
    asked = '{"quantization": "w8a8", "activation_scheme": "static"}'
    with pytest.raises(ConfigError, match="fastdeploy quantize"):
        logits(tiny_model, tensor_library, "w8a8", asked)
