"""GGUF files of every architecture against transformers, decoded and packed."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
from fd_gguf.checkpoint import GGUFCheckpoint
from fd_gguf.names import sources
from fd_gguf.quantizer import GGUFQuantizer
from fd_gguf.reader import GGUFModel
from fd_gguf.settings import model_config
from safetensors.numpy import load_file, save_file

from fastdeploy_core.config.model import read_model_config
from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_core.contracts.quantizer import LayerSpec
from fastdeploy_core.errors import ConfigError, WeightError
from fastdeploy_core.loading.loader import stored_bytes
from fastdeploy_core.plugins import lookup
from fastdeploy_core.plugins.kernels import build_kernel_table
from fastdeploy_core.reference.device import CpuDevice
from tests.checkpoints import GGUF_VARIANTS, VARIANTS, build, reference
from tests.gguf_files import converted, quantized, write_gguf
from tests.paged import PagedModel, with_quantizer
from tests.tp_rank import run_ranks

PACKED = with_quantizer("gguf")
# GGUF has no key for Qwen2's window, which begins after some of the layers.
NOT_AS_THEY_ARE = ("qwen3-moe", "deepseek", "qwen2-window")
ARCHITECTURES = [name for name in VARIANTS if name not in NOT_AS_THEY_ARE]
ARCHITECTURES += ["gguf-qwen3-moe", "gguf-deepseek"]
KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("checkpoints"), [*ARCHITECTURES, *GGUF_VARIANTS])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FD_CACHE_DIR", str(tmp_path / "cache"))


def error(model: PagedModel, answers: list[dict[str, np.ndarray]]) -> float:
    """The largest difference of any prompt's logits, relative to the largest logit."""
    logits = model.step([(f"prompt{n}", a["prompt"].tolist()) for n, a in enumerate(answers)])
    return max(
        float(np.abs(ours - a["logits"]).max() / np.abs(a["logits"]).max())
        for ours, a in zip(logits, answers, strict=True)
    )


def opened(file: Path, library: str, **overrides: str) -> PagedModel:
    return PagedModel(file, library, dtype="float32", drivers=PACKED, **overrides)


def logits(model: PagedModel) -> np.ndarray:
    """Of a prompt of eight tokens."""
    return model.step([("a", [5, 9, 77, 3, 12, 60, 61, 62])])[0]


@pytest.mark.parametrize("variant", ARCHITECTURES)
def test_every_architecture_has_the_logits_of_the_checkpoint_it_was_made_of(
    checkpoints: Path, variant: str, tensor_library: str, tmp_path: Path
) -> None:
    answers = reference(checkpoints / variant)
    file = write_gguf(checkpoints / variant, tmp_path / "model.gguf")
    assert error(PagedModel(file, tensor_library), answers) < 1e-5
    half = write_gguf(checkpoints / variant, tmp_path / "half.gguf", "F16")
    # Of float16 the last of eleven bits is lost, once per weight.
    assert error(PagedModel(half, tensor_library, dtype="float32"), answers) < 2e-2


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_has_the_logits_of_what_the_gguf_package_makes_of_it(
    checkpoints: Path, kind: str, tensor_library: str, tmp_path: Path
) -> None:
    source = checkpoints / "gguf-wide"
    file = write_gguf(source, tmp_path / "model.gguf", kind)
    folder = decoded(source, tmp_path / "decoded", gguf.GGMLQuantizationType[kind])
    want = logits(PagedModel(folder, tensor_library, dtype="float32"))
    assert np.array_equal(logits(opened(file, tensor_library)), want)
    if kind in ("Q4_0", "Q8_0"):
        packed = opened(file, tensor_library, quantization="gguf")
        assert packed.loaded.builder.unquantized == ["model.embed_tokens"]
        assert np.abs(logits(packed) - want).max() < 2e-5 * np.abs(want).max()


def decoded(source: Path, folder: Path, kind: gguf.GGMLQuantizationType) -> Path:
    """The checkpoint with every matrix as the gguf package reads it back."""
    folder.mkdir()
    weights = load_file(source / "model.safetensors")
    for name, array in weights.items():
        if array.ndim == 2:
            weights[name] = gguf.quants.dequantize(quantized(array, kind), kind).astype(np.float32)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text((source / "config.json").read_text())
    return folder


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_packed_experts_have_the_logits_of_decoded_ones(
    checkpoints: Path, kind: str, tensor_library: str, tmp_path: Path
) -> None:
    file = write_gguf(checkpoints / "gguf-experts", tmp_path / "model.gguf", kind)
    plain, packed = opened(file, tensor_library), opened(file, tensor_library, quantization="gguf")
    assert packed.loaded.weight_bytes < 0.6 * plain.loaded.weight_bytes
    assert packed.loaded.builder.unquantized == ["model.embed_tokens"]
    want, have = logits(plain), logits(packed)
    assert np.abs(want - have).max() < 2e-5 * np.abs(want).max()


def test_two_ranks_divide_packed_matrices(
    checkpoints: Path, tensor_library: str, tmp_path: Path
) -> None:
    file = write_gguf(checkpoints / "gguf-wide", tmp_path / "model.gguf", "Q8_0")
    prompts = {"a": [5, 9, 77, 3, 12, 60, 61, 62]}
    one = opened(file, tensor_library, quantization="gguf").greedy(prompts, 12)
    ranks = run_ranks(file, tensor_library, 2, tmp_path / "group", prompts, 12)
    assert [rank["tokens"] for rank in ranks] == [one, one]


def test_a_layer_of_two_formats_is_decoded(
    checkpoints: Path, tensor_library: str, tmp_path: Path
) -> None:
    types = gguf.GGMLQuantizationType

    def mixed(name: str, array: np.ndarray) -> gguf.GGMLQuantizationType:
        return types.Q8_0 if "attn_v" in name or "ffn_down" in name else types.Q4_0

    source = checkpoints / "gguf-wide"
    file = write_gguf(source, tmp_path / "model.gguf", mixed)
    plain, packed = opened(file, tensor_library), opened(file, tensor_library, quantization="gguf")
    names = {name.rpartition(".")[2] for name in packed.loaded.builder.unquantized}
    assert names == {"embed_tokens", "qkv_proj"}
    want, have = logits(plain), logits(packed)
    assert np.abs(want - have).max() < 2e-5 * np.abs(want).max()


def test_packed_matrices_are_decoded_where_the_device_has_no_kernel_of_its_own(
    checkpoints: Path, tensor_library: str, tmp_path: Path
) -> None:
    file = write_gguf(checkpoints / "gguf-wide", tmp_path / "model.gguf", "Q8_0")
    left = opened(file, tensor_library).loaded.builder.unquantized
    assert {"model.layers.0.self_attn.o_proj", "model.layers.1.mlp.gate_up_proj"} <= set(left)


@pytest.mark.parametrize(("kind", "rounds"), [("Q8_0", True), ("BF16", False)])
def test_a_shared_head_of_few_bits_may_be_rounded(
    checkpoints: Path, kind: str, rounds: bool, tensor_library: str, tmp_path: Path
) -> None:
    types = gguf.GGMLQuantizationType

    def table(name: str, array: np.ndarray) -> gguf.GGMLQuantizationType:
        return types[kind] if "token_embd" in name else types.Q4_0

    file = write_gguf(checkpoints / "gguf-tied", tmp_path / "model.gguf", table)
    config = GGUFCheckpoint(file).config("gguf")["quantization_config"]
    device = CpuDevice(DeviceOptions(tensor_library=tensor_library, num_threads=1))
    find = partial(lookup, "quantizer")
    quantizer = GGUFQuantizer(config, device, build_kernel_table("cpu"), find)
    head = LayerSpec("lm_head", "lm_head", 256, 131, dtype="float32")
    assert (quantizer.supports(head), quantizer.is_stored(head)) == (rounds, not rounds)
    linear = LayerSpec("model.layers.0.self_attn.o_proj", "linear", 256, 256, dtype="float32")
    assert quantizer.supports(linear) and quantizer.is_stored(linear)


def test_another_quantization_rounds_the_decoded_numbers_anew(
    checkpoints: Path, tensor_library: str, tmp_path: Path
) -> None:
    file = write_gguf(checkpoints / "gguf-wide", tmp_path / "model.gguf", "Q8_0")
    drivers = with_quantizer("wint8")
    rounded = PagedModel(
        file, tensor_library, dtype="float32", drivers=drivers, quantization="wint8"
    )
    want, have = logits(opened(file, tensor_library)), logits(rounded)
    assert 1e-6 < np.abs(want - have).max() / np.abs(want).max() < 0.05


@pytest.mark.parametrize("variant", ["gguf-deepseek", "llama", "gguf-wide"])
def test_any_region_of_any_weight_is_that_part_of_the_whole(
    checkpoints: Path,
    variant: str,
    tensor_library: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fd_gguf.weights._CHUNK_BYTES", 4096)  # many chunks
    kind = "Q8_0" if variant == "gguf-wide" else "F32"
    file = write_gguf(checkpoints / variant, tmp_path / "model.gguf", kind)
    device = CpuDevice(DeviceOptions(tensor_library=tensor_library, num_threads=1))
    checkpoint = GGUFCheckpoint(file)
    wants = variant == "gguf-wide"
    tensors = checkpoint.tensors(checkpoint.config(""), device, "float32", lambda name: wants)
    rng, seen = np.random.default_rng(2), 0
    for _, tensor in tensors:
        whole = device.xp.to_numpy(tensor.read())
        assert whole.shape == tensor.shape and stored_bytes(tensor) == whole.nbytes
        for _ in range(4):
            region = []
            for size in tensor.shape:
                start = int(rng.integers(0, size))
                region.append(slice(start, int(rng.integers(start, size)) + 1))
            assert np.array_equal(device.xp.to_numpy(tensor.read(*region)), whole[tuple(region)])
            seen += 1
    assert seen > 100


def test_names_are_those_of_the_checkpoint(checkpoints: Path, tmp_path: Path) -> None:
    for variant in ("ernie-moe", "gguf-deepseek"):
        source = checkpoints / variant
        model = GGUFModel(write_gguf(source, tmp_path / f"{variant}.gguf"))
        ours = {
            s.name.replace("experts.0.", "experts.") for s in sources(model, model_config(model))
        }
        config = json.loads((source / "config.json").read_text())
        architecture = str(model.settings["general.architecture"])
        assert len(converted(source, config, architecture)) == len(model.tensors)
        assert "model.layers.1.mlp.experts.down_proj.weight" in ours
        assert not [name for name in ours if name.startswith(("blk.", "token"))]


def test_blocks_that_predict_further_tokens_are_left_out_in_words(
    checkpoints: Path, tensor_library: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = checkpoints / "gguf-wide"
    whole = write_gguf(source, tmp_path / "whole.gguf")
    # Its second block as the one after the last.
    file = write_gguf(source, tmp_path / "model.gguf", nextn_predict_layers=1)
    with caplog.at_level(logging.INFO):
        model = PagedModel(file, tensor_library)
    assert "11 tensors of blocks after the last are not read" in caplog.text
    assert model.loaded.shapes.num_layers == 1
    assert not np.array_equal(logits(model), logits(PagedModel(whole, tensor_library)))


def test_a_weight_that_is_missing_or_unknown_is_named(
    checkpoints: Path, tensor_library: str, tmp_path: Path
) -> None:
    file = write_gguf(checkpoints / "gguf-wide", tmp_path / "model.gguf")
    data = file.read_bytes()
    file.write_bytes(data.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    with pytest.raises(WeightError, match=r"1 weights that .* does not know: blk.1.ffn_xx.weight"):
        PagedModel(file, tensor_library)


def test_quantize_wants_a_folder(checkpoints: Path, tmp_path: Path) -> None:
    file = write_gguf(checkpoints / "gguf-wide", tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match=r"model.gguf' is not a folder"):
        read_model_config(file, {"quantization": "wint8"})


def test_the_start_up_report_says_what_was_decoded(
    checkpoints: Path, tensor_library: str, tmp_path: Path
) -> None:
    file = write_gguf(checkpoints / "gguf-wide", tmp_path / "model.gguf", "Q8_0")
    report = opened(file, tensor_library).loaded.report
    (line,) = [text for text in report if "leaves them alone" in text]
    assert "layers stay in float32" in line and "o_proj" in line
