"""Whole models in 2 bits: while loading, from our checkpoints and from the published layout."""

from __future__ import annotations

import json
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fd_quant_wint2 import ccq
from safetensors.numpy import load_file, save_file

from fastdeploy import LLM, SamplingParams
from fastdeploy_core import tensor
from fastdeploy_core.cli.main import main
from fastdeploy_core.contracts.quantizer import LayerSpec, make_quantizer
from fastdeploy_core.errors import FastDeployError
from fastdeploy_core.plugins import lookup
from fastdeploy_testing import tiny_model as tiny

PROMPT = [3, 9, 77, 14, 50, 2, 91, 33]


@pytest.fixture(scope="module")
def library(fd_tensor: str) -> str:
    return fd_tensor or tensor.available()[0]


def wide(folder: Path, num_layers: int, num_experts: int) -> Path:
    """The tiny model with experts wide enough for 2-bit layouts, in all layers but the first."""
    patch = pytest.MonkeyPatch()
    for key in ("hidden_size", "intermediate_size", "moe_intermediate_size"):
        patch.setitem(tiny.CONFIG, key, 128)
    patch.setitem(tiny.CONFIG, "num_hidden_layers", num_layers)
    patch.setitem(tiny.CONFIG, "moe_layer_end_index", num_layers - 1)
    patch.setitem(tiny.CONFIG, "moe_num_experts", num_experts)
    tiny.write_tiny_model(folder)
    patch.undo()
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wide(tmp_path_factory.mktemp("wide") / "model", num_layers=3, num_experts=3)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Searching the best path of every strand of weights takes a while."""
    return wide(tmp_path_factory.mktemp("small") / "model", num_layers=2, num_experts=2)


def tokens(folder: Path, library: str, **more: Any) -> list[int]:
    with LLM(
        folder,
        tensor_library=library,
        skip_tokenizer_init=True,
        max_model_len=64,
        num_gpu_blocks_override=4,
        **more,
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        outputs = llm.generate([PROMPT], params, use_tqdm=False)
        return list(outputs[0].outputs[0].token_ids)


def published(model: Path, folder: Path) -> tuple[Path, Path]:
    """(the layout of ERNIE-4.5-300B-A47B-2Bits, the same weights in full precision)."""
    stored: dict[str, np.ndarray] = {}
    full: dict[str, np.ndarray] = {}
    halves: dict[str, np.ndarray] = {}
    for name, weight in sorted(load_file(model / "model.safetensors").items()):
        theirs = name.replace("model.", "ernie.", 1)
        if not name.endswith("_proj.weight"):
            stored[theirs] = full[name] = weight
            continue
        prefix, _, kind = theirs.removesuffix(".weight").rpartition(".")
        if ".layers.2.mlp.experts." in name:
            if kind == "gate_proj":
                halves[prefix] = weight
                full[name] = weight
                continue
            whole = weight if kind == "down_proj" else np.concatenate((halves[prefix], weight))
            target = f"{prefix}.{'down_proj' if kind == 'down_proj' else 'up_gate_proj'}"
            tensors = ccq.encode(whole)
            tensors["quant_weight"] = tensors.pop("weight")
            stored |= {f"{target}.{k}": np.ascontiguousarray(v) for k, v in tensors.items()}
            meaning = decode(tensors)
            if kind == "up_proj":
                full[name.replace("up_proj", "gate_proj")] = meaning[:128].copy()
                meaning = meaning[128:]
            full[name] = meaning.copy()
            continue
        top = 7 if ".layers.1.mlp.experts." in name else 127
        scale = (np.abs(weight).max(axis=1, keepdims=True) / top).astype(np.float32)
        number = np.round(weight / scale).astype(np.int64)
        full[name] = (number * scale).astype(np.float32)
        stored[f"{theirs}_scale"] = scale
        if top == 7:
            stored[theirs] = (number[:, 0::2] + 8 | number[:, 1::2] + 8 << 4).astype(np.uint8)
        else:
            stored[theirs] = number.astype(np.int8)
    moe = {
        "moe_w4_quant_config": {"quant_type": "wint4", "quant_end_layer": 1},
        "moe_w2_quant_config": {"quant_type": "wint2", "quant_start_layer": 2},
    }
    config = {
        "quantization": "wint2",
        "dense_quant_type": "wint8",
        "moe_quant_type": "w4w2",
        "moe_quant_config": moe,
        "tensor_layout": "plain",
    }
    return (
        write(folder / "published", model, stored, {"quantization_config": config}),
        write(folder / "full", model, full, {}),
    )


def decode(tensors: dict[str, np.ndarray]) -> np.ndarray:
    """[N, K] float32 of one matrix in the published layout."""
    byte = tensors["quant_weight"].astype(np.float32)
    code = np.floor(byte * tensors["code_scale"] + tensors["code_zp"] + np.float32(0.5)).astype(int)
    number = np.stack([((code >> s) & 63) - 32 for s in (9, 6, 3, 0)], 1).reshape(-1, byte.shape[1])
    local = np.stack([tensors["weight_scale"] >> 4, tensors["weight_scale"] & 15], 1)
    local = local.reshape(-1, byte.shape[1]).astype(np.float32).repeat(64, axis=0)
    values = number.astype(np.float32) * (local * tensors["super_scales"].astype(np.float32))
    return np.ascontiguousarray(values.T)


def write(folder: Path, source: Path, weights: dict[str, Any], config: dict[str, Any]) -> Path:
    folder.mkdir()
    base = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**base, **config}))
    save_file(weights, folder / "model.safetensors")
    return folder


def test_published_layout_gives_the_tokens_of_its_own_weights(
    model: Path, library: str, tmp_path: Path
) -> None:
    quantized, full = published(model, tmp_path)
    assert tokens(quantized, library) == tokens(full, library)


def quantized(model: Path, library: str, method: str, output: Path) -> Path:
    arguments = [str(model), "--method", method, "--output", str(output), "--no-progress"]
    assert main(["quantize", *arguments, "--tensor-library", library]) == 0
    return output


@pytest.fixture(scope="module")
def ours(small: Path, library: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized(small, library, "wint2", tmp_path_factory.mktemp("ours") / "q")


@pytest.mark.slow
def test_our_checkpoint_gives_the_tokens_of_rounding_while_loading(
    small: Path, library: str, ours: Path
) -> None:
    assert tokens(ours, library) == tokens(small, library, quantization="wint2")
    name = "model.layers.1.mlp.experts.1.down_proj.weight"
    weights = load_file(next(ours.glob("model-*.safetensors")))
    assert weights[name].shape == (2, 16, 32) and weights[name].dtype == np.int32
    assert weights[f"{name}_signs"].shape == (16,)


def test_ccq_is_made_for_comparison(model: Path, library: str, tmp_path: Path) -> None:
    method = '{"quantization": "wint2", "moe_quant_type": "ccq2"}'
    stored = quantized(model, library, method, tmp_path / "q")
    assert tokens(stored, library) == tokens(model, library, quantization=method)


def test_dummy_weights_of_every_kind_are_loaded(model: Path, library: str) -> None:
    mixed = '{"quantization": "mix_quant", "dense_quant_type": "wint8", "moe_quant_type": "tet3"}'
    for method in ("wint2", "tet2", "tet4", mixed):
        assert len(tokens(model, library, quantization=method, load_format="dummy")) == 8


@pytest.mark.parametrize(
    ("suffix", "value", "words"),
    [
        ("scale", np.float16(0), "weight_scale holds a scale that is zero"),
        ("scale", np.float16(np.nan), "not a finite number"),
        ("block", np.int32(96), "weight_block says"),
        ("block", np.int32(256), "weight_block says"),
        ("signs", np.uint8(255), "weight_signs of joined parts differ"),
    ],
)
def test_damaged_tensors_are_named(
    ours: Path, library: str, tmp_path: Path, suffix: str, value: Any, words: str
) -> None:
    stored = tmp_path / "q"
    shutil.copytree(ours, stored)
    path = next(stored.glob("model-*.safetensors"))
    weights = load_file(path)
    name = f"model.layers.1.mlp.experts.0.up_proj.weight_{suffix}"
    weights[name] = weights[name].copy()
    weights[name].flat[0] = value
    save_file(weights, path)
    with pytest.raises(FastDeployError, match=words):
        tokens(stored, library)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ('{"quantization": "wint2", "moe_quant_type": "w4w2"}', "tet2, ccq2"),
        ('{"quantization": "tet2", "hadamard_block_size": 100}', "power of two"),
        ('{"quantization": "tet2", "seed": -1}', "seed"),
        ("tet5", "tet5"),
    ],
)
def test_wrong_options_are_refused(model: Path, library: str, method: str, words: str) -> None:
    with pytest.raises(FastDeployError, match=words):
        tokens(model, library, quantization=method)


def test_scales_signs_and_codes_of_one_matrix_take_2_bits_and_little_more() -> None:
    """2.003 bits per weight for tet2, 2.08 for CCQ, at the sizes of ERNIE-4.5-300B's experts."""
    config: dict[str, Any] = {"is_quantized": True}
    find = partial(lookup, "quantizer")
    for name, most in (("tet2", 2.006), ("wint2", 2.09)):
        driver: Any = make_quantizer(name, config, _NoDevice(), {}, find)
        for rows, inputs in ((3584, 8192), (8192, 3584)):
            layer = LayerSpec("model.layers.9.mlp.experts.x", "experts", inputs, rows)
            total = sum(
                math.prod(p.shape) * tensor.DTYPE_BYTES[p.dtype]
                for p in driver.parameters(layer).values()
            )
            assert 2 < total * 8 / (rows * inputs) < most


class _NoDevice:
    xp = None
