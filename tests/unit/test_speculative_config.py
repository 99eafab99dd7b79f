"""--speculative-config: every known key is obeyed or refused with its reason, before anything
loads."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy_core.config.speculative import REFUSED, read_speculative
from fastdeploy_core.errors import ConfigError


def test_defaults_and_own_options() -> None:
    config = read_speculative({"method": "anything", "model": "/m", "own": {"x": 1}})
    assert config is not None
    assert (config.method, config.num_speculative_tokens) == ("anything", 1)
    assert config.acceptance == "lossless" and config.adaptive_length
    assert config.options == {"model": "/m", "own": {"x": 1}}
    assert read_speculative({}) is None


@pytest.mark.parametrize(
    ("given", "method", "options"),
    [
        (
            {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1},
            "ngram_match",
            {"max_ngram_size": 4, "min_ngram_size": 1},
        ),
        ({"model": "[ngram]"}, "ngram_match", {}),
        ({"method": "ngram_match", "max_ngram_size": 3}, "ngram_match", {"max_ngram_size": 3}),
        (
            {"method": "suffix", "suffix_decoding_max_tree_depth": 9},
            "suffix",
            {"max_depth": 9},
        ),
        (
            {"model": "/draft", "quantization": "x"},
            "draft_model",
            {"model": "/draft", "quantization": "x"},
        ),
        ({"method": "deepseek_mtp"}, "mtp", {}),
        ({"method": "hybrid_mtp_ngram"}, "mtp", {"mtp_strategy": "with_ngram"}),
        ({"method": "mtp", "num_model_steps": 3}, "mtp", {"num_model_steps": 3}),
        ({"method": "mtp", "verify_strategy": "TARGET_MATCH"}, "mtp", {}),
        ({"method": "mtp", "disable_logprobs": False, "revision": None}, "mtp", {}),
        ({"method": "mtp", "draft_tensor_parallel_size": 2}, "mtp", {}),
    ],
)
def test_spellings_of_both_servers(given: dict[str, Any], method: str, options: Any) -> None:
    config = read_speculative(given, tensor_parallel_size=2)
    assert config is not None
    assert (config.method, config.options) == (method, options)


def test_values_reach_the_configuration() -> None:
    config = read_speculative(
        {
            "method": "mtp",
            "num_speculative_tokens": 2,
            "num_model_steps": 4,
            "verify_strategy": "topp",
            "max_candidate_len": 7,
            "verify_window": 1,
            "benchmark_mode": True,
            "adaptive_length": False,
            "disable_by_batch_size": 16,
        }
    )
    assert config is not None
    assert config.num_speculative_tokens == 4, "as many as the model makes at least"
    assert config.acceptance == "lossy_top_p"
    assert (config.max_candidate_len, config.verify_window) == (7, 1)
    assert config.benchmark_mode and not config.adaptive_length
    assert config.disable_by_batch_size == 16


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"num_speculative_tokens": 2}, "needs a method"),
        ({"method": 3}, "needs a method"),
        ({"methd": "mtp"}, "needs a method and has no key methd"),
        ({"method": "x", "num_speculative_tokens": 0}, "between 1 and 32, got 0"),
        ({"method": "x", "num_speculative_tokens": 33}, "between 1 and 32, got 33"),
        ({"method": "x", "num_speculative_tokens": True}, "between 1 and 32"),
        ({"method": "x", "num_speculative_tokens": "3"}, "between 1 and 32"),
        ({"method": "mtp", "num_model_steps": 0}, "num_model_steps must be between"),
        ({"method": "naive"}, "leave --speculative-config out"),
        ({"method": "eagle"}, "possible: eagle3"),
        ({"method": "dspark"}, "possible: dflash, eagle3, mtp"),
        ({"method": "x", "benchmark_mode": 1}, "true or false"),
        ({"method": "x", "acceptance": "lossy"}, "lossless or lossy_top_p"),
        ({"method": "x", "verify_strategy": "greedy"}, "send temperature 0"),
        ({"method": "x", "verify_strategy": "all"}, "target_match or topp"),
        ({"method": "x", "verify_window": 2}, "belongs to acceptance 'lossy_top_p'"),
        ({"method": "x", "draft_tensor_parallel_size": 4}, "divided as the target's are"),
        (
            {"method": "ngram", "prompt_lookup_max": 3, "max_ngram_size": 4},
            "sets max_ngram_size twice",
        ),
        ({"method": "hybrid_mtp_ngram", "mtp_strategy": "default"}, "sets mtp_strategy twice"),
    ],
)
def test_what_cannot_be_obeyed_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_speculative(given)
    assert words in str(caught.value)


@pytest.mark.parametrize("key", REFUSED)
def test_known_keys_that_are_not_taken_say_why(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_speculative({"method": "x", key: "something"})
    assert key in str(caught.value) and REFUSED[key][0] in str(caught.value)
