"""What `mtp` answers at start-up: needs, and refusals that say what would work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fd_spec_mtp.hooks import fd_speculative_requirements
from safetensors.numpy import save_file

from fastdeploy_core.contracts.base import Requirements
from fastdeploy_core.contracts.speculative import SpeculativeQuestion

ERNIE = {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
}
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 2,
}
NAMES = {
    "ernie": [
        f"ernie.mtp_{part}.0.weight"
        for part in ("emb_norm", "hidden_norm", "linear_proj", "block.0.x")
    ],
    "deepseek": ["model.layers.3.enorm.weight", "model.layers.4.enorm.weight"],
}


def ask(
    hf_config: dict[str, Any], count: int = 1, folder: Path | str = "", **options: Any
) -> Requirements:
    answer = fd_speculative_requirements(
        SpeculativeQuestion(
            method="mtp",
            num_speculative_tokens=count,
            architecture=hf_config["architectures"][0],
            hf_config=hf_config,
            options=options,
            model_path=str(folder),
        )
    )
    assert answer is not None
    return answer


def save(folder: Path, names: list[str], config: dict[str, Any] | None = None) -> Path:
    folder.mkdir()
    save_file({name: np.zeros(1, np.float32) for name in names}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_other_methods_are_not_ours() -> None:
    question = SpeculativeQuestion("ngram_match", 1, "", {}, {})
    assert fd_speculative_requirements(question) is None


@pytest.mark.parametrize(
    ("config", "count", "options", "layers", "lookahead", "continued_by"),
    [
        (ERNIE, 1, {}, 1, 0, ""),
        (ERNIE, 4, {"quantization": "wint8"}, 1, 3, ""),
        (DEEPSEEK, 1, {}, 1, 0, ""),
        (DEEPSEEK, 5, {"num_model_steps": 5}, 2, 3, ""),
        (ERNIE, 5, {"mtp_strategy": "with_ngram"}, 1, 0, "ngram_match"),
        (
            ERNIE,
            5,
            {"mtp_strategy": "with_ngram", "num_model_steps": 2, "max_ngram_size": 4},
            1,
            1,
            "ngram_match",
        ),
    ],
)
def test_needs(
    config: dict[str, Any],
    count: int,
    options: dict[str, Any],
    layers: int,
    lookahead: int,
    continued_by: str,
) -> None:
    needs = ask(config, count, **options)
    assert not needs.refusals
    assert needs.key_lookahead == layers and needs.lookahead_tokens == lookahead
    assert needs.continued_by == continued_by
    assert needs.draft_quantization == options.get("quantization", "")
    assert set(needs.continued_options) == {k for k in options if "ngram_size" in k}


@pytest.mark.parametrize(
    ("config", "count", "options", "message"),
    [
        (ERNIE, 1, {"max_steps": 3}, "unknown key 'max_steps'; possible: model, quantization"),
        (ERNIE, 1, {"mtp_strategy": "ngram"}, "possible: default, with_ngram"),
        (ERNIE, 2, {"mtp_strategy": "with_ngram", "num_model_steps": 2}, "raise the second"),
        (ERNIE, 3, {"num_model_steps": 1}, "makes fewer drafts than num_speculative_tokens 3"),
        (ERNIE, 3, {"min_ngram_size": 1}, "belongs to mtp_strategy with_ngram"),
        (ERNIE, 1, {"model": "/nowhere"}, "is no folder"),
        (ERNIE, 1, {"model": 7}, "is no folder"),
        ({**ERNIE, "num_nextn_predict_layers": 0}, 1, {}, "announces no multi-token-prediction"),
        ({**ERNIE, "num_nextn_predict_layers": True}, 1, {}, "expected a whole number"),
        (
            {**ERNIE, "architectures": ["LlamaForCausalLM"]},
            1,
            {},
            "possible: DeepseekV3ForCausalLM",
        ),
    ],
)
def test_refusals_say_what_would_work(
    config: dict[str, Any], count: int, options: dict[str, Any], message: str
) -> None:
    (refusal,) = ask(config, count, **options).refusals
    assert message in refusal


@pytest.mark.parametrize("family", ["ernie", "deepseek"])
def test_checkpoint_without_a_module_is_refused_before_it_is_loaded(
    family: str, tmp_path: Path
) -> None:
    config = ERNIE if family == "ernie" else DEEPSEEK
    whole = save(tmp_path / "whole", NAMES[family])
    assert not ask(config, 2, whole).refusals
    lacking = save(tmp_path / "lacking", NAMES[family][:-1])
    (refusal,) = ask(config, 2, lacking).refusals
    missing = "model.mtp_block.0.*" if family == "ernie" else "model.layers.4.*"
    assert f"has no weights {missing}" in refusal
    assert not ask(config, 2, lacking, model=str(whole)).refusals


def test_the_draft_folder_says_how_many_modules_it_has(tmp_path: Path) -> None:
    target = {**DEEPSEEK, "num_nextn_predict_layers": 0}
    draft = save(tmp_path / "draft", NAMES["deepseek"], DEEPSEEK)
    assert ask(target, 3, model=str(draft)).key_lookahead == 2


def test_a_folder_without_a_checkpoint_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    (refusal,) = ask(ERNIE, 1, model=str(tmp_path)).refusals
    assert f"model {str(tmp_path)!r} is no folder of a checkpoint" in refusal


def test_random_weights_need_no_files(tmp_path: Path) -> None:
    assert not ask(ERNIE, 1, tmp_path).refusals
