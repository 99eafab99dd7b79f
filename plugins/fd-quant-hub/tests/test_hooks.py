"""Which checkpoints are read, and what is said of those that are not; no tensor library."""

from __future__ import annotations

from pathlib import Path

import pytest
from fd_quant_hub.hooks import fd_quantizer_for
from fd_quant_hub.schemes import matches

from fastdeploy_core.config import EngineConfig, ModelConfig
from fastdeploy_core.config.quantization import read_quantization
from fastdeploy_core.contracts.base import Accept, Decline
from fastdeploy_core.contracts.moe import MoESpec, RoutingSpec
from fastdeploy_core.contracts.quant_formats import FORMATS
from fastdeploy_core.contracts.quantizer import QuantizationQuestion
from fastdeploy_core.errors import ConfigError
from fastdeploy_core.plugins.resolve import resolve

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
W4A16 = {"weights": {"num_bits": 4, "strategy": "channel"}}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}


def answer(asked="", **stored):
    hf_config = {"architectures": ["LlamaForCausalLM"]}
    if stored:
        hf_config["quantization_config"] = stored
    settings = read_quantization(
        ModelConfig(Path(), Path(), quantization=asked, hf_config=hf_config)
    )
    return fd_quantizer_for(QuantizationQuestion(settings.method, settings.config, "cpu", "torch"))


@pytest.mark.parametrize(
    ("config", "driver", "experts"),
    [
        (GPTQ, "gptq", "wint4"),
        ({**GPTQ, "quant_method": "gptq_marlin"}, "gptq", "wint4"),
        ({**GPTQ, "sym": False, "bits": 8}, "gptq", "wint8_zp"),
        (AWQ, "awq", "wint4_zp"),
        ({"quant_method": "awq_marlin", "w_bit": 4}, "awq", "wint4_zp"),
        (
            {"quant_method": "compressed_tensors", "config_groups": {"a": W4A16}},
            "compressed-tensors",
            "wint4",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": W4A16, "b": {"weights": FP8}},
            },
            "compressed-tensors",
            "wint4,wfp8",
        ),
    ],
)
def test_who_reads_a_checkpoint_and_what_its_experts_are(config, driver, experts):
    found = answer(**config)
    assert found.name == driver and isinstance(found.verdict, Accept)
    assert found.details["experts"] == experts
    assert set(experts.split(",")) <= set(FORMATS)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**GPTQ, "bits": 3}, "possible: 4, 8"),
        ({"quant_method": "gptq"}, "bits None"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "gptq_v2"),
        ({**AWQ, "version": "gemv"}, "gemm"),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
    ],
)
def test_what_cannot_be_read_says_what_can(config, words):
    verdict = answer(**config).verdict
    assert isinstance(verdict, Decline) and words in verdict.reason


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ({"targets": 3}, "targets of the quantization is 3; expected a list"),
        (
            {"weights": {"num_bits": 4, "strategy": "group", "group_size": "x"}},
            "group_size of a is 'x'",
        ),
        ({"weights": {"num_bits": 4, "strategy": "rows"}}, "int4 weights per rows"),
        (
            {
                "weights": {
                    "num_bits": 8,
                    "type": "float",
                    "strategy": "block",
                    "block_structure": 1,
                }
            },
            "block",
        ),
    ],
)
def test_config_groups_of_the_wrong_kind_are_named(group, words):
    group = {"weights": {"num_bits": 4, "strategy": "channel"}, **group}
    verdict = answer(quant_method="compressed-tensors", config_groups={"a": group}).verdict
    assert isinstance(verdict, Decline) and words in verdict.reason


def test_a_target_that_is_no_pattern_is_named():
    with pytest.raises(ConfigError, match="no pattern"):
        matches("model.layers.0.mlp", "re:(")


def test_checkpoint_formats_are_not_made_while_loading():
    verdict = answer("gptq").verdict
    assert isinstance(verdict, Decline) and "fastdeploy quantize" in verdict.reason


def test_experts_of_a_mix_have_the_format_of_their_part(tmp_path):
    """mix_quant names its parts by method; the MoE driver is asked about a format."""
    stored = {"quantization": "mix_quant", "dense_quant_type": "wint8", "moe_quant_type": "gptq"}
    hf_config = {"quantization_config": {**stored, "bits": 4, "is_quantized": True}}
    config = EngineConfig(ModelConfig(tmp_path, tmp_path, hf_config=hf_config))
    spec = MoESpec(RoutingSpec(4, 2), 64, 64, "float32")
    resolved = resolve(config, moe=[spec])
    assert {"mix_quant", "wint8", "gptq"} <= set(resolved.names("quantizer"))
    (decision,) = [d for d in resolved.decisions if d.kind == "moe"]
    assert "wint4" in decision.question and "gptq" not in decision.question


@pytest.mark.parametrize("method", ["wint8", "fp8", "wint2"])
def test_other_methods_are_left_to_others(method):
    assert answer(method) is None and answer(quant_method=method) is None
