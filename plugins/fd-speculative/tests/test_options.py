"""What start-up asks of a method: its options, and whether a draft model fits the target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_core.config.arguments import build_engine_config
from fastdeploy_core.engine.selection import resolve_plugins
from fastdeploy_core.errors import ConfigError, UnsupportedModel

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


def write(folder: Path, vocabulary: dict[str, int] | None = None, **changes: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL | changes))
    if vocabulary is not None:
        tokenizer = {"model": {"type": "BPE", "vocab": vocabulary, "merges": []}}
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write(tmp_path / "target", {"a": 0, "b": 1})


def resolve(target: Path, **speculative: Any) -> Any:
    config = build_engine_config(
        {"model": str(target), "device": "cpu", "speculative_config": speculative}
    )
    return resolve_plugins(config)


def test_methods_are_found_and_state_their_needs(target: Path, tmp_path: Path) -> None:
    assert resolve(target, method="ngram", num_speculative_tokens=3).chosen["speculative"] == (
        "ngram_match"
    )
    assert resolve(target, method="suffix").speculative.lookahead_tokens == 0
    draft = write(tmp_path / "draft", {"a": 0, "b": 1}, num_hidden_layers=1)
    resolved = resolve(target, model=str(draft), num_speculative_tokens=3)
    assert resolved.chosen["speculative"] == "draft_model"
    assert resolved.speculative.lookahead_tokens == 3
    assert resolved.speculative.draft_model == str(draft)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "ngram", "prompt_lookup": 3}, "no option prompt_lookup"),
        ({"method": "ngram", "prompt_lookup_max": 99}, "between 1 and 32"),
        ({"method": "ngram", "mtp_strategy": "default"}, "no option mtp_strategy"),
        ({"method": "suffix", "max_dept": 3}, "did you mean max_depth"),
        ({"method": "draft_model"}, "needs model"),
        (
            {"method": "draft_model", "model": "/nowhere"},
            "no folder with a config.json",
        ),
    ],
)
def test_start_up_refuses_what_a_method_cannot_do(
    target: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(target, **options)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("vocabulary", "changes", "error", "words"),
    [
        ({"a": 0, "b": 1}, {"vocab_size": 140}, ConfigError, "has 140 tokens and the target's 131"),
        ({"a": 1, "b": 0}, {}, ConfigError, "differs from the target's, for example at 'a'"),
        (None, {"max_position_embeddings": 64}, ConfigError, "lower --max-model-len to 64"),
        (None, {"architectures": ["Unheard"]}, UnsupportedModel, "Unheard"),
    ],
)
def test_draft_models_must_fit_the_target(
    target: Path,
    tmp_path: Path,
    vocabulary: dict[str, int] | None,
    changes: dict[str, Any],
    error: type[Exception],
    words: str,
) -> None:
    draft = write(tmp_path / "draft", vocabulary, **changes)
    with pytest.raises(error) as caught:
        resolve(target, method="draft_model", model=str(draft))
    assert words in str(caught.value)
