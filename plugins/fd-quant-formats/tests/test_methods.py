"""What config.json and --quantization mean, and which driver answers; no tensor library."""

from __future__ import annotations

from pathlib import Path

import pytest
from fd_quant_formats.hooks import fd_quantizer_for

from fastdeploy_core.config import ModelConfig
from fastdeploy_core.config.quantization import (
    check_options,
    parse_quantization,
    read_quantization,
)
from fastdeploy_core.contracts.base import Accept, Decline
from fastdeploy_core.contracts.kv_formats import KV_FORMATS, kv_format
from fastdeploy_core.contracts.quant_formats import FORMATS
from fastdeploy_core.contracts.quantizer import QuantizationQuestion
from fastdeploy_core.errors import ConfigError


def model(asked="", architecture="LlamaForCausalLM", **quantization_config):
    hf_config = {"architectures": [architecture]}
    if quantization_config:
        hf_config["quantization_config"] = quantization_config
    return ModelConfig(Path(), Path(), quantization=asked, hf_config=hf_config)


def answer(asked="", **stored):
    settings = read_quantization(model(asked, **stored))
    question = QuantizationQuestion(settings.method, settings.config, "cpu", "torch")
    return fd_quantizer_for(question)


def test_full_precision_asks_for_nothing():
    settings = read_quantization(model())
    assert (settings.method, settings.kv_format, settings.notes) == ("", "", ())


@pytest.mark.parametrize("name", ["wint8", "wint4", "w8a8", "w4a8", "block_wise_fp8", "wfp8afp8"])
def test_methods_while_loading(name):
    settings = read_quantization(model(name))
    assert settings.method == name and settings.config["is_quantized"] is False
    verdict = answer(name)
    assert verdict.name == name and isinstance(verdict.verdict, Accept)


def test_wint4_of_ernie_is_a_mix_as_in_fastdeploy_2():
    settings = read_quantization(model("wint4", "Ernie4_5_MoeForCausalLM"))
    assert settings.method == "mix_quant" and "wint8" in settings.notes[0]
    assert settings.config["dense_quant_type"] == "wint8"
    assert settings.config["moe_quant_type"] == "wint4"
    plain = read_quantization(
        model('{"quantization": "wint4", "group_size": 0}', "Ernie4_5_MoeForCausalLM")
    )
    assert plain.method == "wint4" and not plain.notes


def test_a_mix_of_nothing_is_refused():
    for asked in ('"moe_quant_type": "none"', '"dense_quant_typ": "wint8"'):
        verdict = answer(f'{{"quantization": "mix_quant", {asked}}}').verdict
        assert isinstance(verdict, Decline) and "dense_quant_type" in verdict.reason


def test_config_json_wins_and_the_other_is_noted():
    stored = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    settings = read_quantization(model("wint4", **stored))
    assert settings.method == "fp8" and "wint4 has no effect" in settings.notes[0]
    settings = read_quantization(model('{"quantization": "fp8", "lm_head": true}', **stored))
    assert "lm_head of --quantization" in settings.notes[0] and not settings.asked
    assert not read_quantization(model("fp8", **stored)).notes


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ('"wint4", "grup_size": 64', "no option grup_size; did you mean group_size"),
        ('"wint8", "bits": 8', "no option bits; possible: group_size, lm_head"),
        ('"mix_quant", "moe_quant_type": "w4a8", "dense_type": "wint8"', "dense_quant_type"),
    ],
)
def test_an_option_that_no_method_has_is_refused(asked, words):
    asked = f'{{"quantization": {asked}}}'
    details = answer(asked).details
    with pytest.raises(ConfigError, match=words):
        check_options(read_quantization(model(asked)), details["options"].split(","))


def test_options_that_a_method_has_are_taken():
    asked = (
        '{"quantization": "mix_quant", "moe_quant_type": "wint4", '
        '"group_size": 64, "lm_head": true}'
    )
    possible = answer(asked).details["options"].split(",")
    check_options(read_quantization(model(asked)), possible)
    strangers = answer('{"quantization": "mix_quant", "moe_quant_type": "tet3", "seed": 1}')
    assert "options" not in strangers.details


@pytest.mark.parametrize("text", ["{", "{}", '{"quantization": 4}', '["wint4"]{'])
def test_malformed_json_is_refused(text):
    if text.startswith("["):
        assert parse_quantization(text) == {"quantization": text}  # a name that nobody knows
        return
    with pytest.raises(ConfigError, match="--quantization"):
        parse_quantization(text)


def test_checkpoint_without_method_is_refused():
    with pytest.raises(ConfigError, match="names no method"):
        read_quantization(model(bits=4))


@pytest.mark.parametrize(
    ("config", "stored"),
    [
        ({"quant_method": "gptq", "bits": 4}, True),
        ({"quantization": "wint8"}, True),
        ({"quantization": "wint8", "is_quantized": False}, False),
        ({"quantization": "mix_quant", "is_moe_quantized": True}, False),
        ({"quantization": "wint8", "kv_cache_quant_type": "int8"}, False),
    ],
)
def test_whether_weights_are_stored_quantized(config, stored):
    assert read_quantization(model(**config)).config["is_quantized"] is stored


def test_cache_formats_and_where_their_scales_come_from():
    plain = read_quantization(model(), "fp8")
    assert (plain.kv_format, plain.kv_static) == ("fp8", False)
    stored = model(quantization="kvcache", kv_cache_quant_type="float8_e4m3fn")
    settings = read_quantization(stored)
    assert settings.method == ""  # weights are in full precision
    assert (settings.kv_format, settings.kv_static) == ("float8_e4m3fn", True)
    assert read_quantization(stored, "fp8").kv_static
    other = read_quantization(stored, "int8")
    assert (other.kv_format, other.kv_static, other.kv_unused) == ("int8", False, True)
    assert "not used" in other.notes[0]


def test_cache_scheme_of_compressed_tensors():
    scheme = {"num_bits": 8, "type": "float"}
    settings = read_quantization(
        model(quant_method="compressed-tensors", kv_cache_scheme=scheme, config_groups={})
    )
    assert (settings.kv_format, settings.kv_static) == ("float8_e4m3fn", True)
    with pytest.raises(ConfigError, match="4 bits"):
        read_quantization(
            model(quant_method="compressed-tensors", kv_cache_scheme={"num_bits": 4, "type": "int"})
        )


def test_unknown_cache_format_names_the_possible_ones():
    with pytest.raises(ConfigError, match="int4_zp"):
        kv_format("int3")
    assert kv_format("auto") is None and kv_format("int4") is KV_FORMATS["int4_zp"]


@pytest.mark.parametrize(
    ("config", "driver", "experts"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "block_wise_fp8", "block_fp8"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "wfp8afp8", "wfp8afp8_static"),
        ({"quantization": "weight_only", "algo": "weight_only_int4"}, "wint4", "wint4"),
        ({"quantization": "mix_quant", "moe_quant_type": "w4a8"}, "mix_quant", "w4a8"),
        ({"quantization": "mix_quant", "dense_quant_type": "wint8"}, "mix_quant", ""),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, "mxfp4", ""),
    ],
)
def test_who_reads_a_checkpoint_and_what_its_experts_are(config, driver, experts):
    found = answer(**config)
    assert found.name == driver and isinstance(found.verdict, Accept)
    assert found.details["experts"] == experts
    assert not experts or experts in FORMATS


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "bitsandbytes"}, "wint8"),
        ({"asked": "mxfp4"}, "possible while loading: wint4"),
    ],
)
def test_what_cannot_be_read_says_what_can(config, words):
    verdict = answer(**config).verdict
    assert isinstance(verdict, Decline) and words in verdict.reason


def test_strangers_are_left_to_plugins():
    for method in ("wint2", "gptq", "awq", "compressed-tensors", "fp3"):
        assert answer(method) is None and answer(quant_method=method, bits=4) is None
