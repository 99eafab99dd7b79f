"""What `eagle3` and `dflash` answer at start-up: needs, and refusals that say what would work."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fd_spec_eagle.hooks import fd_speculative_requirements
from fd_spec_eagle.layout import read_folder
from safetensors.numpy import save_file

from fastdeploy_core.contracts.base import Requirements
from fastdeploy_core.contracts.speculative import SpeculativeQuestion

TARGET = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "vocab_size": 500,
    "num_hidden_layers": 28,
}
SIZES = {"hidden_size": 64, "vocab_size": 500, "num_hidden_layers": 1}
PLAIN = {**SIZES, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 100}
IDS = "eagle_aux_hidden_state_layer_ids"
OWN = {"mask_token_id": 499, "target_layer_ids": [1, 13, 25]}
BLOCKS = {
    **SIZES,
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 5,
    "block_size": 8,
    "dflash_config": OWN,
}


def draft(folder: Path, config: dict[str, Any], *names: str) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    if names:
        tensors = {name: np.zeros(1, np.float32) for name in names}
        save_file(tensors, folder / "model.safetensors")
    return str(folder)


def ask(count: int = 3, method: str = "eagle3", **options: Any) -> Requirements:
    answer = fd_speculative_requirements(
        SpeculativeQuestion(
            method=method,
            num_speculative_tokens=count,
            architecture="Qwen3ForCausalLM",
            hf_config=TARGET,
            options=options,
            vocab_size=500,
        )
    )
    assert answer is not None
    return answer


def test_other_methods_are_not_ours() -> None:
    assert fd_speculative_requirements(SpeculativeQuestion("mtp", 1, "", {}, {})) is None


@pytest.mark.parametrize("count", [1, 5])
def test_needs(count: int, tmp_path: Path) -> None:
    needs = ask(count, model=draft(tmp_path, PLAIN), quantization="wint8")
    assert not needs.refusals and needs.draft_quantization == "wint8"
    assert needs.lookahead_tokens == count - 1 and needs.key_lookahead == 1
    assert "reads layers 2, 14, 25 of the target, 100 of 500 tokens" in needs.notes[0]


@pytest.mark.parametrize(
    ("more", "reads"),
    [
        ({}, (2, 14, 25)),
        ({IDS: [3, 9, 28]}, (3, 9, 28)),
        ({"eagle_config": {IDS: [0, 13, 24]}}, (1, 14, 25)),
        ({IDS: [4, 5, 6, 7], "eagle_config": {IDS: [1]}}, (4, 5, 6, 7)),
    ],
)
def test_layers_that_are_read(more: dict[str, Any], reads: tuple[int, ...], tmp_path: Path) -> None:
    assert read_folder("eagle3", draft(tmp_path, {**PLAIN, **more}), TARGET).reads == reads


def test_speculators_spelling(tmp_path: Path) -> None:
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": SIZES,
        "draft_vocab_size": 100,
        "norm_before_residual": True,
        IDS: [2, 14, 25],
    }
    found = read_folder(
        "eagle3", draft(tmp_path, config, "layers.0.mlp.up_proj.weight", "d2t"), TARGET
    )
    assert found.norm_before_residual and found.draft_vocab_size == 100
    assert found.has("d2t") and not found.has("lm_head.weight")
    assert found.config["hidden_size"] == 64


def test_needs_of_blocks(tmp_path: Path) -> None:
    """After the last token that was fed: the newest one, and the drafts."""
    needs = ask(5, "dflash", model=draft(tmp_path, BLOCKS))
    assert not needs.refusals and needs.lookahead_tokens == 6 and needs.key_lookahead == 0
    assert "reads layers 2, 14, 26 of the target, 500 of 500 tokens" in needs.notes[0]
    (refusal,) = ask(8, "dflash", model=str(tmp_path)).refusals
    assert "blocks of 8 tokens, of which the first is known; possible: 1 to 7" in refusal


def test_speculators_spelling_of_blocks(tmp_path: Path) -> None:
    config = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": {**SIZES, "num_hidden_layers": 2},
        "draft_vocab_size": 100,
        "aux_hidden_state_layer_ids": [2, 14, 28],
        "mask_token_id": 7,
        "block_size": 16,
        "draft_sliding_window": None,
        "draft_block_causal": False,
    }
    found = read_folder("dflash", draft(tmp_path, config), TARGET)
    assert found.reads == (2, 14, 28) and found.has("d2t")
    assert (found.block_size, found.mask_token_id, found.draft_vocab_size) == (16, 7, 100)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (PLAIN, "is for method eagle3, not dflash"),
        ({**SIZES, "architectures": ["Qwen3ForCausalLM"]}, "whole smaller model is method"),
        ({**BLOCKS, "architectures": ["DFlash2DraftModel"]}, "have more parts .* not supported"),
        ({**BLOCKS, "speculators_model_type": "dspark"}, "have more parts .* not supported"),
        ({**BLOCKS, "hidden_size": 32}, "reads hidden states of 32 values, the target's have 64"),
        ({**BLOCKS, "block_size": None}, "has block_size None; expected a number from 2 to 1024"),
        ({**BLOCKS, "dflash_config": {}}, "has mask_token_id None; expected a number"),
        (
            {**BLOCKS, "dflash_config": {**OWN, "target_layer_ids": [1, 28]}},
            r"outputs of blocks \[2, 29\] of a target that has 28",
        ),
        ({**BLOCKS, "dflash_config": {**OWN, "causal": True}}, "causal True, which is not supp"),
        ({**BLOCKS, "dflash_config": {**OWN, "use_swa": True}}, "use_swa True, which is not supp"),
        ({**BLOCKS, "dflash_config": {**OWN, "markov_rank": 8}}, "'markov_rank' in dflash_config"),
        ({**BLOCKS, "fusion_type": "gated"}, "fusion_type 'gated', which is not supported"),
        (
            {**BLOCKS, "layer_types": ["full_attention", "sliding_attention"]},
            "possible: full_attention alone",
        ),
    ],
)
def test_blocks_that_cannot_be_made_are_refused(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (refusal,) = ask(method="dflash", model=draft(tmp_path, config)).refusals
    assert re.search(message, refusal), refusal


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BLOCKS, "is for method dflash, not eagle3"),
        ({**SIZES, "architectures": ["Qwen3ForCausalLM"]}, "whole smaller model is method"),
        ({**SIZES, "architectures": ["EagleLlamaForCausalLM"]}, "possible: an EAGLE-3 checkpoint"),
        ({**PLAIN, "num_hidden_layers": 2}, "has 2 blocks; possible: 1"),
        ({**PLAIN, "vocab_size": 501}, "a vocabulary of 501 tokens, the target one of 500"),
        ({**PLAIN, "draft_vocab_size": 501}, "draft_vocab_size 501; possible: 1 to 500"),
        ({**PLAIN, "draft_vocab_size": "all"}, "draft_vocab_size 'all'; possible: 1 to 500"),
        ({**PLAIN, "hidden_size": 32}, "reads hidden states of 32 values, the target's have 64"),
        ({**PLAIN, IDS: [2, 14, 29]}, r"outputs of blocks \[2, 14, 29\] of a target that has 28"),
        ({**PLAIN, IDS: [0, 14, 25]}, "possible: different numbers from 1 to 28"),
        ({**PLAIN, IDS: [2, 2, 5]}, "possible: different numbers from 1 to 28"),
        ({**PLAIN, "eagle_config": {"use_aux_hidden_state": False}}, "last hidden state alone"),
    ],
)
def test_what_cannot_draft_is_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    (refusal,) = ask(model=draft(tmp_path, config)).refusals
    assert re.search(message, refusal), refusal


def test_options_that_cannot_be_obeyed_are_refused(tmp_path: Path) -> None:
    assert "needs the folder of a checkpoint (EAGLE-3)" in ask().refusals[0]
    assert "is no folder with a config.json" in ask(model=str(tmp_path)).refusals[0]
    folder = draft(tmp_path, PLAIN)
    (refusal,) = ask(model=folder, num_model_steps=2).refusals
    assert refusal == "unknown key 'num_model_steps'; possible: model, quantization"


def test_weights_that_can_carry_code_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    (refusal,) = ask(model=draft(tmp_path, PLAIN)).refusals
    assert "pytorch_model.bin, a format that can carry code" in refusal


def test_a_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x10")
    (refusal,) = ask(model=draft(tmp_path, PLAIN)).refusals
    assert "model.safetensors cannot be read" in refusal and "finish the download" in refusal
