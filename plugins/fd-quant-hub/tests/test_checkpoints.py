"""Checkpoints of other tools: compressed-tensors' own files, GPTQ and AWQ by their published
packing."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compressed_checkpoint import SCHEMES, WEIGHT_ONLY, compress
from paged import PagedModel, with_quantizer
from public_writers import WRITERS, rewrite
from safetensors.numpy import load_file, save_file

from fastdeploy_core import tensor
from fastdeploy_core.errors import ConfigError, WeightError
from fastdeploy_testing.tiny_model import CONFIG, write_tiny_model

PROMPT = [3, 9, 77, 14, 50, 2, 91, 33, 64, 8, 120]
GROUP = 8


def logits(folder: Path, library: str, driver: str = "") -> np.ndarray:
    more = {"drivers": with_quantizer(driver)} if driver else {}
    return PagedModel(folder, library, **more).step([("a", PROMPT)])[0]


def near(a: np.ndarray, b: np.ndarray, tolerance: float) -> None:
    np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max())


@pytest.fixture(scope="module")
def library(fd_tensor: str) -> str:
    return fd_tensor or tensor.available()[0]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def model_of_sixty_fours(folder: Path) -> Path:
    """The tiny model in sizes that layouts by 32 and 64 need."""
    before = dict(CONFIG)
    try:
        CONFIG.update(hidden_size=64, intermediate_size=64, moe_intermediate_size=64)
        return write_tiny_model(folder)
    finally:
        CONFIG.update(before)


# -- compressed-tensors ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compressed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    return compress(tiny_model, tmp_path_factory.mktemp("compressed"))


@pytest.mark.parametrize("name", SCHEMES)
def test_compressed_tensors_agrees_with_its_own_dequantization(
    name: str, compressed: Path, library: str
) -> None:
    got = logits(compressed / name, library, "compressed-tensors")
    expected = logits(compressed / name / "expected", library)
    if name in WEIGHT_ONLY:
        near(got, expected, 1e-5)
    else:  # activations are rounded too
        distance = np.sqrt(((got - expected) ** 2).mean() / (expected**2).mean())
        assert 1e-4 < distance < 0.25


def test_compressed_tensors_names_groups_it_cannot_join(compressed: Path, library: str) -> None:
    folder = compressed / "w8-channel"
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"] += ["re:.*layers.0.self_attn.k_proj"]
    overrides = {"hf_overrides": {"quantization_config": config["quantization_config"]}}
    with pytest.raises(ConfigError, match=r"k_proj in full precision but not .*q_proj"):
        PagedModel(folder, library, drivers=with_quantizer("compressed-tensors"), **overrides)


# -- GPTQ and AWQ ---------------------------------------------------------------------------------


def pack_down(values: np.ndarray, bits: int) -> np.ndarray:
    """[K, N] to [K * bits / 32, N] int32: rows of inputs, lowest bits first."""
    per_word = 32 // bits
    words = np.zeros((values.shape[0] // per_word, values.shape[1]), np.uint32)
    for k in range(values.shape[0]):
        words[k // per_word] |= values[k].astype(np.uint32) << np.uint32(bits * (k % per_word))
    return words.view(np.int32)


def pack_across(values: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """[R, N] to [R, N * bits / 32] int32; place p of a word holds column order[p]."""
    per_word = 32 // bits
    order = order or tuple(range(per_word))
    words = np.zeros((values.shape[0], values.shape[1] // per_word), np.uint32)
    for word in range(words.shape[1]):
        for place, column in enumerate(order):
            part = values[:, word * per_word + column].astype(np.uint32)
            words[:, word] |= part << np.uint32(bits * place)
    return words.view(np.int32)


def rounded(
    weight: np.ndarray, bits: int, groups: np.ndarray, *, symmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(q [K, N], zero [G, N], scale [G, N] float16, meaning [N, K]) by the group of each input."""
    w, top = weight.T, (1 << bits) - 1
    num_groups = int(groups.max()) + 1
    scale = np.zeros((num_groups, w.shape[1]), np.float16)
    zero = np.zeros((num_groups, w.shape[1]), np.int64)
    for g in range(num_groups):
        rows = w[groups == g]
        if symmetric:
            scale[g] = np.abs(rows).max(axis=0) / ((top - 1) / 2)
            zero[g] = (top + 1) // 2
        else:
            low, high = np.minimum(rows.min(axis=0), 0), np.maximum(rows.max(axis=0), 0)
            scale[g] = (high - low) / top
            zero[g] = np.clip(np.round(-low / scale[g].astype(np.float32)), 1, top)
    wide = scale.astype(np.float32)[groups]
    q = np.clip(np.round(w / wide) + zero[groups], 0, top).astype(np.int64)
    return q, zero, scale, ((q - zero[groups]) * wide).T.astype(np.float32)


def write(folder: Path, source: Path, weights: dict[str, Any], config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    base = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**base, **config}))
    save_file(weights, folder / "model.safetensors")
    return folder


def convert(source: Path, folder: Path, one: Any, config: dict[str, Any]) -> tuple[Path, Path]:
    """(quantized checkpoint, the same in full precision); one(weight) -> (tensors, meaning)."""
    stored: dict[str, np.ndarray] = {}
    expected: dict[str, np.ndarray] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = expected[name] = weight
            continue
        tensors, meaning = one(name, weight)
        expected[name] = np.ascontiguousarray(meaning)
        prefix = name.removesuffix("weight")
        stored |= {prefix + suffix: np.ascontiguousarray(t) for suffix, t in tensors.items()}
    quantized = write(folder / "q", source, stored, {"quantization_config": config})
    return quantized, write(folder / "full", source, expected, {})


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq(
    bits: int, symmetric: bool, version: str, tiny_model: Path, library: str, tmp_path: Path
) -> None:
    offset = 1 if version == "gptq" else 0

    def one(name: str, weight: np.ndarray) -> Any:
        groups = np.arange(weight.shape[1]) // GROUP
        q, zero, scale, meaning = rounded(weight, bits, groups, symmetric=symmetric)
        return {
            "qweight": pack_down(q, bits),
            "qzeros": pack_across(zero - offset, bits),
            "scales": scale,
            "g_idx": groups.astype(np.int32),
        }, meaning

    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": symmetric}
    config |= {"checkpoint_format": version, "desc_act": False}
    quantized, full = convert(tiny_model, tmp_path, one, config)
    near(logits(quantized, library, "gptq"), logits(full, library), 1e-5)


def test_gptq_act_order(tiny_model: Path, library: str, tmp_path: Path) -> None:
    """q, k and v may each have an order of their own; experts are refused."""

    def one(name: str, weight: np.ndarray) -> Any:
        groups = np.arange(weight.shape[1]) // GROUP
        if ".experts." not in name:
            groups = np.random.default_rng(len(name) + ord(name[27])).permutation(groups)
        q, zero, scale, meaning = rounded(weight, 4, groups, symmetric=True)
        return {
            "qweight": pack_down(q, 4),
            "qzeros": pack_across(zero - 1, 4),
            "scales": scale,
            "g_idx": groups.astype(np.int32),
        }, meaning

    config = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": True}
    quantized, full = convert(tiny_model, tmp_path, one, config)
    near(logits(quantized, library, "gptq"), logits(full, library), 1e-5)
    weights = load_file(quantized / "model.safetensors")
    name = "model.layers.1.mlp.experts.0.up_proj.g_idx"
    weights[name] = weights[name][::-1].copy()
    save_file(weights, quantized / "model.safetensors")
    with pytest.raises(ConfigError, match="act-order"):
        logits(quantized, library, "gptq")


def test_gptq_that_is_not_as_symmetric_as_it_says(
    tiny_model: Path, library: str, tmp_path: Path
) -> None:
    def one(name: str, weight: np.ndarray) -> Any:
        groups = np.arange(weight.shape[1]) // GROUP
        q, zero, scale, meaning = rounded(weight, 4, groups, symmetric=False)
        qzeros = pack_across(zero - 1, 4)
        return {"qweight": pack_down(q, 4), "qzeros": qzeros, "scales": scale}, meaning

    config = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True}
    quantized, _ = convert(tiny_model, tmp_path, one, config)
    with pytest.raises(WeightError, match=r"qzeros is not all 8"):
        logits(quantized, library, "gptq")


def test_awq(tiny_model: Path, library: str, tmp_path: Path) -> None:
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def one(name: str, weight: np.ndarray) -> Any:
        groups = np.arange(weight.shape[1]) // GROUP
        q, zero, scale, meaning = rounded(weight, 4, groups, symmetric=False)
        return {
            "qweight": pack_across(q, 4, order),
            "qzeros": pack_across(zero, 4, order),
            "scales": scale,
        }, meaning

    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True}
    quantized, full = convert(tiny_model, tmp_path, one, {**config, "version": "gemm"})
    near(logits(quantized, library, "awq"), logits(full, library), 1e-5)


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("value", [0, np.nan])
def test_scale_that_is_no_number_names_its_tensor(
    method: str, value: float, tiny_model: Path, library: str, tmp_path: Path
) -> None:
    def one(name: str, weight: np.ndarray) -> Any:
        groups = np.arange(weight.shape[1]) // GROUP
        q, zero, scale, meaning = rounded(weight, 4, groups, symmetric=False)
        if ".layers.1.mlp.experts.2.down_proj" in name:
            scale[-1, 3] = value
        offset = 1 if method == "gptq" else 0
        packed = pack_down(q, 4) if method == "gptq" else pack_across(q, 4)
        qzeros = pack_across(zero - offset, 4)
        return {"qweight": packed, "qzeros": qzeros, "scales": scale}, meaning

    config = {"quant_method": method, "bits": 4, "group_size": GROUP, "sym": False}
    quantized, _ = convert(tiny_model, tmp_path, one, {**config, "zero_point": True})
    with pytest.raises(
        WeightError, match=r"layers\.1\.mlp\.experts\.down_proj\.scales holds a scale"
    ):
        logits(quantized, library, method)


@pytest.mark.parametrize("name", WRITERS)
def test_public_writers_agree_with_their_own_dequantization(
    name: str, library: str, tmp_path: Path
) -> None:
    package, bits = WRITERS[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed (pip install --no-deps auto-gptq autoawq)")
    source = model_of_sixty_fours(tmp_path / "m")
    written = rewrite(name, source, tmp_path)
    got = logits(written, library, name.partition("-")[0])
    expected = logits(written / "expected", library)
    # Their layers give the weights in half precision.
    near(got, expected, 2e-3 if bits == 8 else 4e-3)
