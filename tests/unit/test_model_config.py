"""config/model.py: a ModelConfig from a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_core.config.model import (
    checkpoint_layout,
    fit_dtype,
    read_model_config,
)
from fastdeploy_core.errors import ConfigError, UnsupportedModel

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 4096,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path)
    return tmp_path


def write(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))


def test_defaults_come_from_the_checkpoint(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"top_p": 0.8}')
    config = read_model_config(folder)
    assert config.dtype == "bfloat16"
    assert config.dtype_is_auto
    assert config.max_model_len == 4096
    assert config.generation_config == {"top_p": 0.8}
    assert config.tokenizer_path == folder
    assert config.architecture == "LlamaForCausalLM"


def test_overrides_win(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"top_p": 0.8, "top_k": 3}')
    config = read_model_config(
        folder,
        {
            "dtype": "half",
            "max_model_len": 100,
            "override_generation_config": {"top_k": 5},
            "hf_overrides": {"rope_theta": 7.0},
            "seed": 3,
        },
    )
    assert (config.dtype, config.dtype_is_auto) == ("float16", False)
    assert (config.max_model_len, config.seed) == (100, 3)
    assert config.generation_config == {"top_p": 0.8, "top_k": 5}
    assert config.hf_config["rope_theta"] == 7.0


def test_generation_config_can_be_left_out(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"top_p": 0.8}')
    assert read_model_config(folder, {"generation_config": "none"}).generation_config == {}


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 4096}, 16384),
        ({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 512}, 4096),
        ({"type": "linear", "factor": 2.0}, 8192),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512}, 4096),
        ({"rope_type": "default"}, 4096),
    ],
)
def test_rope_scaling_extends_the_context(folder: Path, rope: dict[str, Any], longest: int) -> None:
    write(folder, rope_scaling=rope)
    assert read_model_config(folder).max_model_len == longest


def test_a_context_beyond_the_model_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"4097 is longer.*possible: 1 to 4096"):
        read_model_config(folder, {"max_model_len": 4097})


@pytest.mark.parametrize("value", [0, -5, True, "many"])
def test_a_context_that_is_no_length_is_refused(folder: Path, value: object) -> None:
    with pytest.raises(ConfigError, match="max_model_len"):
        read_model_config(folder, {"max_model_len": value})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "expected a JSON object"),
        ("{}", "names no model architecture"),
        ('{"architectures": "x"}', "names no model architecture"),
        ("[" * 100_000, "cannot be read as JSON"),
        ('{"architectures": ["A"], "dtype": "int3"}', "unknown dtype 'int3'"),
    ],
)
def test_a_broken_config_is_explained(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_model_config(tmp_path)


def test_a_folder_that_is_none_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        read_model_config(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        read_model_config(tmp_path)


def test_an_unknown_setting_is_refused(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"unknown model setting max_len; possible: .*max_model_len"
    ):
        read_model_config(folder, {"max_len": 4})


def test_an_automatic_dtype_gives_way_to_the_device(folder: Path) -> None:
    config, report = fit_dtype(read_model_config(folder), ("float32",))
    assert config.dtype == "float32"
    assert report == [
        "dtype float32 instead of the checkpoint's bfloat16: the device computes in float32"
    ]
    kept, nothing = fit_dtype(read_model_config(folder), ("float32", "bfloat16"))
    assert (kept.dtype, nothing) == ("bfloat16", [])
    faster, why = fit_dtype(read_model_config(folder), ("float32", "bfloat16"), "float32")
    assert faster.dtype == "float32" and "--dtype bfloat16" in why[0]
    asked = read_model_config(folder, {"dtype": "bfloat16"})
    assert fit_dtype(asked, ("float32", "bfloat16"), "float32") == (asked, [])


def test_a_dtype_that_was_asked_for_gives_way_to_float32_with_a_line(folder: Path) -> None:
    """float32 holds every value of the others; a device without it cannot stand in."""
    asked = read_model_config(folder, {"dtype": "float16"})
    config, report = fit_dtype(asked, ("float32", "bfloat16"))
    assert config.dtype == "float32"
    assert report == [
        "dtype float32 instead of --dtype float16: the device computes in float32, bfloat16"
    ]
    with pytest.raises(UnsupportedModel, match=r"--dtype float16; possible: bfloat16"):
        fit_dtype(asked, ("bfloat16",))


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        ({"torch_dtype": "bfloat16"}, "torch"),
        ({"torch_dtype": "bfloat16", "transformers_version": "4.40.0"}, "torch"),
        ({"dtype": "bfloat16", "transformers_version": "4.56.1"}, "torch"),
        ({"dtype": "bfloat16", "transformers_version": "5.0.0rc1"}, "torch"),
        ({"dtype": "bfloat16", "transformers_version": "4.56.0"}, "paddle"),
        ({"dtype": "bfloat16", "transformers_version": "4.9.2"}, "paddle"),
        ({"dtype": "bfloat16"}, "paddle"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "torch"),
    ],
)
def test_layout_is_told_from_config(config: dict[str, Any], layout: str) -> None:
    assert checkpoint_layout(config) == layout


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "neither torch_dtype nor dtype"),
        ({"torch_dtype": "float16", "dtype": "float16"}, "both torch_dtype and dtype"),
    ],
)
def test_an_ambiguous_layout_is_an_error_unless_forced(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        checkpoint_layout(config)
    assert checkpoint_layout(config, force_torch=True) == "torch"
