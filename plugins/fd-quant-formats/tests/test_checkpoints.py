"""Checkpoints of FastDeploy 2.x, by Paddle's own packing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fd_quant_formats import interleaved
from paged import PagedModel, with_quantizer
from safetensors.numpy import load_file, save_file

from fastdeploy_core import tensor
from fastdeploy_testing.tiny_model import CONFIG, write_tiny_model

PROMPT = [3, 9, 77, 14, 50, 2, 91, 33, 64, 8, 120]


def logits(folder: Path, library: str, driver: str = "") -> np.ndarray:
    more = {"drivers": with_quantizer(driver)} if driver else {}
    return PagedModel(folder, library, **more).step([("a", PROMPT)])[0]


def near(a: np.ndarray, b: np.ndarray, tolerance: float) -> None:
    np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max())


def write(folder: Path, source: Path, weights: dict[str, Any], config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    base = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**base, **config}))
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("bits", [4, 8])
def test_interleaved_layout_is_paddles_own(bits: int, tensor_library: str) -> None:
    if tensor_library != "paddle":
        pytest.skip("Paddle's own packing is asked on the Paddle run")
    import paddle
    from paddle.nn.quant import weight_quantize

    rng, top = np.random.default_rng(bits), (1 << (bits - 1)) - 1
    for inputs, outputs in ((64, 16), (192, 64), (256, 128)):
        weight = rng.integers(-top, top + 1, (inputs, outputs)).astype(np.float32)
        weight[0] = top  # so that every scale is one
        half = paddle.to_tensor(weight).astype("float16")
        stored, scale = weight_quantize(half, algo=f"weight_only_int{bits}", arch=80)
        assert np.all(scale.numpy() == 1)
        xp = tensor.load("paddle")
        got = interleaved.plain_rows(stored, bits, inputs)
        values = xp.to_numpy(got).astype(np.int64) - (1 << (bits - 1))
        assert np.array_equal(values, weight.T)


def interleave(values: np.ndarray, bits: int) -> np.ndarray:
    """[N, K] signed to the stored bytes: the steps of interleaved.py, forward, written as loops."""
    rows, count = values.shape
    unsigned = (values + (1 << (bits - 1))).astype(np.uint8)
    group, per_register, together = 128 // bits, 32 // bits, 16 // bits
    permuted = np.empty_like(unsigned)
    for k in range(count):
        place = k % group
        source = 8 * (place % per_register // 2) + place % 2 + 2 * (place // per_register)
        permuted[:, k] = unsigned[:, k - place + source]
    flat = []
    for first in range(0, rows, together):
        for tile in range(0, count, 64):
            for row in range(first, first + together):
                flat.extend(permuted[row, tile : tile + 64].tolist())
    order = [0, 2, 1, 3] if bits == 8 else [0, 2, 4, 6, 1, 3, 5, 7]
    shuffled = [flat[n + o] for n in range(0, len(flat), len(order)) for o in order]
    if bits == 8:
        return np.array(shuffled, np.uint8).view(np.int8).reshape(rows, count)
    pairs = np.array(shuffled, np.uint8).reshape(-1, 2)
    return (pairs[:, 0] | pairs[:, 1] << 4).view(np.int8).reshape(rows // 2, count)


def model_of_sixty_fours(folder: Path) -> Path:
    """The tiny model in sizes that layouts by 32 and 64 need."""
    before = dict(CONFIG)
    try:
        CONFIG.update(hidden_size=64, intermediate_size=64, moe_intermediate_size=64)
        return write_tiny_model(folder)
    finally:
        CONFIG.update(before)


@pytest.mark.parametrize(("method", "bits"), [("wint8", 8), ("wint4", 4)])
def test_checkpoint_of_fastdeploy_2(
    method: str, bits: int, tensor_library: str, tmp_path: Path
) -> None:
    """Names, joined projections and layout as FastDeploy 2.x stores them."""
    source = model_of_sixty_fours(tmp_path / "m")
    top = (1 << (bits - 1)) - 1
    weights = load_file(source / "model.safetensors")
    stored: dict[str, np.ndarray] = {}
    expected: dict[str, np.ndarray] = {}
    joined: dict[str, list[np.ndarray]] = {}
    for name in sorted(
        weights, key=lambda n: ("q_proj k_proj v_proj gate_proj up_proj".find(n.split(".")[-2]), n)
    ):
        if not name.endswith("_proj.weight"):
            stored[name] = expected[name] = weights[name]
            continue
        scale = np.abs(weights[name]).max(axis=1) / top
        q = np.round(weights[name] / scale[:, None]).astype(np.int64)
        expected[name] = (q * scale[:, None]).astype(np.float32)
        short = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
        short |= {"gate_proj": "up_gate_proj", "up_proj": "up_gate_proj"}
        prefix, _, kind = name.removesuffix(".weight").rpartition(".")
        target = f"{prefix}.{short.get(kind, kind)}"
        joined.setdefault(f"{target}.quant_weight", []).append(q)
        joined.setdefault(f"{target}.weight_scale", []).append(scale.astype(np.float32))
    for name, parts in joined.items():
        whole = np.concatenate(parts)
        stored[name] = interleave(whole, bits) if name.endswith("quant_weight") else whole
    config = {"quantization_config": {"quantization": method, "is_quantized": True}}
    quantized = write(tmp_path / "q", source, stored, config)
    full = write(tmp_path / "full", source, expected, {})
    near(logits(quantized, tensor_library, method), logits(full, tensor_library), 1e-5)
