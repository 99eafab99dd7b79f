"""What the methods need; answered at start-up. Imports no tensor library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastdeploy_core.contracts.base import Requirements
from fastdeploy_core.contracts.hookspecs import hookimpl
from fastdeploy_core.contracts.speculative import SpeculativeQuestion

from .options import DraftModelOptions, NgramOptions, SuffixOptions, check_options

_RECORDS: dict[str, type[NgramOptions | SuffixOptions | DraftModelOptions]] = {
    "ngram_match": NgramOptions,
    "suffix": SuffixOptions,
    "draft_model": DraftModelOptions,
}


@hookimpl
def fd_speculative_requirements(question: SpeculativeQuestion) -> Requirements | None:
    """For the methods of this distribution."""
    if question.method not in _RECORDS:
        return None
    problems, options = check_options(_RECORDS[question.method], question.options)
    if isinstance(options, DraftModelOptions):
        problems = draft_problems(options.model, question)
        if not problems:
            return Requirements(
                lookahead_tokens=question.num_speculative_tokens,
                draft_model=options.model,
                draft_quantization=options.quantization,
            )
    return Requirements(refusals=tuple(problems))


def draft_problems(folder: str, question: SpeculativeQuestion) -> list[str]:
    """The reasons why the folder's model cannot draft for the target."""
    path = Path(folder)
    if not (path / "config.json").is_file():
        return [f"model {folder!r} is no folder with a config.json"]
    try:
        draft = json.loads((path / "config.json").read_text("utf-8"))
    except ValueError as error:
        return [f"config.json of the draft model is not JSON: {error}"]
    size = draft.get("vocab_size")
    if size != question.vocab_size:
        return [
            f"the draft model's vocabulary has {size} tokens and the target's "
            f"{question.vocab_size}; a draft model needs the same vocabulary, such as a smaller "
            "one of the same family"
        ]
    other = _first_difference(_vocabulary(path), _vocabulary(Path(question.model_path)))
    if other:
        return [
            "the draft model's vocabulary differs from the target's, for example at "
            f"{other!r:.60}; a draft model needs the same vocabulary, such as a smaller one of "
            "the same family"
        ]
    longest = draft.get("max_position_embeddings")
    if isinstance(longest, int) and longest < question.max_model_len:
        return [
            f"the draft model's context has {longest} tokens, the target is served with "
            f"{question.max_model_len}; lower --max-model-len to {longest} or take another draft "
            "model"
        ]
    return []


def _vocabulary(folder: Path) -> Mapping[str, Any]:
    """Token to id of tokenizer.json; empty if there is no such file."""
    try:
        model = json.loads((folder / "tokenizer.json").read_text("utf-8"))["model"]
        vocabulary = model["vocab"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return vocabulary if isinstance(vocabulary, dict) else {}


def _first_difference(draft: Mapping[str, Any], target: Mapping[str, Any]) -> str:
    if not draft or not target:
        return ""
    return next((token for token, index in draft.items() if target.get(token) != index), "")
