"""The container, its number formats, settings and tokenizers. No tensor library."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from fd_gguf.blocks import FORMATS, split_q4_0, split_q8_0, to_bfloat16
from fd_gguf.reader import GGUFFile, GGUFModel, find_gguf
from gguf_files import SMALL_HIDDEN, SMALL_VOCAB, write_small

from fastdeploy_core.config import ModelConfig
from fastdeploy_core.config.model import read_model_config
from fastdeploy_core.errors import ConfigError, UnsupportedModel, WeightError
from fastdeploy_core.plugins.checkpoints import find_model

TYPES = gguf.GGMLQuantizationType


def configure(path: Path, overrides: dict[str, Any] | None = None) -> ModelConfig:
    return read_model_config(path, overrides, find_model)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FD_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


# -- number formats -------------------------------------------------------------------------------


@pytest.mark.parametrize("number", FORMATS, ids=lambda n: FORMATS[n].name)
def test_every_format_is_decoded_bit_for_bit_as_the_gguf_package_does(number: int) -> None:
    ours = FORMATS[number]
    kind = TYPES(number)
    assert kind.name == ours.name
    assert gguf.GGML_QUANT_SIZES[kind] == (ours.values, ours.nbytes)
    width = ours.nbytes * (6 if ours.values > 1 else 96)
    # Any bytes at all, so infinite and undefined scales are among them.
    raw = np.random.default_rng(number).integers(0, 256, (40, width), dtype=np.uint8)
    with np.errstate(all="ignore"):
        theirs = gguf.quants.dequantize(raw, kind).astype(np.float32)
        decoded = ours.decode(raw)
    same = theirs.view(np.uint32) == decoded.view(np.uint32)
    assert (same | (np.isnan(theirs) & np.isnan(decoded))).all()
    assert np.isfinite(theirs).mean() > 0.5


@pytest.mark.parametrize(("split", "kind"), [(split_q8_0, TYPES.Q8_0), (split_q4_0, TYPES.Q4_0)])
def test_packed_numbers_times_scales_are_the_same_numbers(
    split: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]], kind: TYPES
) -> None:
    weight = np.random.default_rng(5).standard_normal((9, 96)).astype(np.float32)
    weight[2, 32:64] = 0  # a block of zeros, whose scale is 0 in the file
    raw = gguf.quants.quantize(weight, kind)
    numbers, scales = split(raw)
    if kind == TYPES.Q4_0:
        numbers = np.stack((numbers & 15, numbers >> 4), -1).reshape(9, 96).astype(np.int32) - 8
    assert (scales != 0).all()
    product = numbers.astype(np.float32) * np.repeat(scales.astype(np.float32), 32, axis=1)
    assert np.array_equal(product, gguf.quants.dequantize(raw, kind))


def test_bfloat16_rounds_to_nearest_even() -> None:
    exact = np.array([1.0, -2.5, 0.0, np.inf], np.float32)
    assert np.array_equal(to_bfloat16(exact).astype(np.uint32) << 16, exact.view(np.uint32))
    halfway = np.array([0x3F808000, 0x3F818000, 0x3F808001], np.uint32).view(np.float32)
    assert to_bfloat16(halfway).tolist() == [0x3F80, 0x3F82, 0x3F81]
    assert np.isnan(
        (to_bfloat16(np.array([np.nan], np.float32)).astype(np.uint32) << 16).view("<f4")
    )


# -- container ------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_small(tmp_path / "model.gguf")


def test_settings_and_tensors_are_those_of_the_gguf_package(model: Path) -> None:
    ours, theirs = GGUFFile(model), gguf.GGUFReader(model)
    assert {t.name for t in theirs.tensors} == ours.tensors.keys()
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert np.array_equal(
            mine.format.decode(mine.rows(0, mine.num_rows)).reshape(mine.shape), tensor.data
        )
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            value, want = ours.settings[key], field.contents()
            assert value.tolist() == want if isinstance(value, np.ndarray) else value == want


def patch(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert data.count(old) == 1, (old, data.count(old))
    path.write_bytes(data.replace(old, new))


def entry(name: str, dims: tuple[int, ...], kind: int = 0) -> bytes:
    """A row of the tensor table as far as its type; dims innermost first."""
    head = struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(dims))
    return head + struct.pack(f"<{len(dims)}QI", *dims, kind)


Q = entry("blk.0.attn_q.weight", (SMALL_HIDDEN, 64))


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (entry("blk.0.attn_q.weight", (SMALL_HIDDEN, 64), 16), "tensor blk.0.attn_q.weight .* "
            "IQ2_XXS"),
        (entry("blk.0.attn_q.weight", (SMALL_HIDDEN, 64), 77), "tensor blk.0.attn_q.weight .* "
            "number 77"),
        (entry("blk.0.attn_q.weight", (1 << 62, 64)),
            "blk.0.attn_q.weight of shape .* ends at byte"),
        (entry("blk.0.attn_q.weight", (SMALL_HIDDEN, 65)),
            "tensor blk.0.attn_k.weight .* overlaps"),
        (entry("blk.0.attn_q.weight", (0, 64)), "tensor blk.0.attn_q.weight has shape"),
        (entry("blk.0.attn_q.weight", (100, 64), 2), "Q4_0 comes in rows of 32"),
        (entry("blk.0.attn_k.weight", (SMALL_HIDDEN, 64)),
            "tensor blk.0.attn_k.weight occurs twice"),
        (Q[:27] + struct.pack("<I", 9) + Q[31:], "has 9 dimensions"),
    ],
)  # fmt: skip
def test_a_damaged_tensor_table_names_file_and_tensor(
    model: Path, new: bytes, message: str
) -> None:
    patch(model, Q, new)
    with pytest.raises(WeightError, match=message) as caught:
        GGUFFile(model)
    assert str(model) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: b"GGML" + d[4:], "is no GGUF file"),
        (lambda d: d[:4] + struct.pack("<I", 1) + d[8:], "version 1"),
        (lambda d: d[:4] + struct.pack(">I", 3) + d[8:], "big-endian"),
        (lambda d: d[:8] + struct.pack("<Q", 1 << 60) + d[16:], "the number of tensors"),
        (lambda d: d[:16] + struct.pack("<Q", 199_999) + d[24:], "damaged"),
        (lambda d: d[:24] + struct.pack("<Q", 1 << 40) + d[32:], "the length of the name"),
        (lambda d: d[:40], "damaged"),
        (lambda d: d[:-1000], "ends at byte"),
        (lambda d: b"GGUF", "damaged"),
    ],
)
def test_a_damaged_header_is_explained(
    model: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    model.write_bytes(change(model.read_bytes()))
    with pytest.raises(WeightError, match=message):
        GGUFFile(model)


def test_an_empty_file_and_a_text_are_no_models(tmp_path: Path) -> None:
    for number, data in enumerate((b"", b"GG", b"hello, this is text")):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(data)
        with pytest.raises(WeightError, match="is no GGUF file"):
            configure(path)


def test_parts_of_a_split_model_are_found_and_missing_ones_named(model: Path) -> None:
    folder = model.parent / "split"
    folder.mkdir()
    first = folder / "m-00001-of-00002.gguf"
    first.write_bytes(model.read_bytes())
    with pytest.raises(WeightError, match=r"1 of 2 parts.*m-00002-of-00002.gguf"):
        GGUFModel(first)
    with pytest.raises(WeightError, match=r"part 2 of a split model; pass m-00001"):
        GGUFModel(folder / "m-00002-of-00002.gguf")
    writer = gguf.GGUFWriter(folder / "m-00002-of-00002.gguf", "qwen2")
    writer.add_tensor("more.weight", np.ones((2, 3), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = GGUFModel(first)
    assert len(found.tensors) == 15 and found.tensors["more.weight"].shape == (2, 3)
    assert find_gguf(folder) == first


def test_a_folder_with_one_model_is_that_model_and_with_two_an_error(model: Path) -> None:
    assert find_gguf(model.parent) == model
    assert configure(model.parent).path == model
    write_small(model.parent / "other.gguf")
    with pytest.raises(WeightError, match=r"2 GGUF models: model.gguf, other.gguf"):
        configure(model.parent)


# -- settings -------------------------------------------------------------------------------------


def test_settings_become_a_config(model: Path) -> None:
    config = configure(model)
    assert config.architecture == "Qwen2ForCausalLM"
    assert config.hf_config["num_key_value_heads"] == 2
    assert config.hf_config["vocab_size"] == SMALL_VOCAB
    assert config.hf_config["tie_word_embeddings"] is True
    assert (config.dtype, config.max_model_len) == ("float32", 128)
    assert config.generation_config == {"eos_token_id": [2]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": 2}, "block_count asks for 2 blocks, the file has tensors of 1"),
        ({"block_count": 4_000_000_000}, "block_count asks for 4000000000"),
        ({"embedding_length": 65}, r"tensor token_embd.weight has shape \[40, 64\]"),
        ({"attention.head_count": 5}, "tensor blk.0.attn_q.weight has shape"),
        ({"attention.head_count_kv": [1, 2]}, r"attention.head_count_kv is \[1, 2\]"),
        ({"attention.head_count": "many"}, "attention.head_count is 'many'"),
        ({"attention.key_length": 1 << 31}, "tensor blk.0.attn_q.weight has shape"),
        ({"feed_forward_length": 97}, "tensor blk.0.ffn_gate.weight has shape"),
        ({"rope.dimension_count": 8}, "of which 8 are rotated"),
        ({"rope.scaling.type": "longrope"}, "rope scaling 'longrope'"),
        ({"rope.scaling.type": "yarn"}, "rope.scaling.original_context_length"),
        ({"rope.freq_base": float("nan")}, "rope.freq_base is nan"),
        ({"context_length": 1 << 25}, "context_length is 33554432; expected at most"),
        ({"attention.sliding_window": 64}, "sets attention.sliding_window, which this qwen2"),
        ({"final_logit_softcapping": 30.0}, "sets final_logit_softcapping"),
    ],
)
def test_settings_that_do_not_fit_the_tensors_are_named(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        configure(write_small(tmp_path / "bad.gguf", **changes))


def test_a_window_as_long_as_the_context_is_none(tmp_path: Path) -> None:
    file = write_small(tmp_path / "model.gguf", **{"attention.sliding_window": 128})
    assert configure(file).max_model_len == 128


def test_a_load_format_that_the_file_has_not_is_an_error(model: Path) -> None:
    with pytest.raises(
        ConfigError, match="is a gguf checkpoint and --load-format says safetensors"
    ):
        configure(model, {"load_format": "safetensors"})


def test_an_unknown_architecture_lists_the_known_ones(model: Path) -> None:
    data = model.read_bytes().replace(b"qwen2", b"mamba")
    model.write_bytes(data)
    with pytest.raises(UnsupportedModel, match="'mamba'; possible as GGUF: ernie4_5, ernie4_5-moe"):
        configure(model)
