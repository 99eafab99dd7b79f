"""Answers at start-up: what the method needs, or why it cannot run."""

from __future__ import annotations

from fastdeploy_core.contracts import hookimpl
from fastdeploy_core.contracts.base import Requirements
from fastdeploy_core.contracts.speculative import SpeculativeQuestion
from fastdeploy_core.errors import ConfigError

from .layout import read_folder

KEYS = ("model", "quantization")


@hookimpl
def fd_speculative_requirements(question: SpeculativeQuestion) -> Requirements | None:
    """For method `eagle3` only."""
    if question.method != "eagle3":
        return None
    found = [
        f"unknown key {key!r}; possible: {', '.join(KEYS)}"
        for key in question.options
        if key not in KEYS
    ]
    folder = question.options.get("model")
    if not isinstance(folder, str) or not folder:
        found.append(
            f"model is {folder!r:.80}; method eagle3 needs the folder of an EAGLE-3 checkpoint "
            "that was trained for the target"
        )
        return Requirements(refusals=tuple(found))
    try:
        draft = read_folder(folder, question.hf_config)
    except ConfigError as error:
        found.append(str(error))
    if found:
        return Requirements(refusals=tuple(found))
    steps, layers = question.num_speculative_tokens, ", ".join(map(str, draft.reads))
    return Requirements(
        notes=(
            f"eagle3: reads layers {layers} of the target, {draft.draft_vocab_size} of "
            f"{question.vocab_size} tokens can be drafted, {steps} draft(s) per step",
        ),
        # The first draft is made at the last token that was fed; each further one a position later.
        lookahead_tokens=steps - 1,
        key_lookahead=1,  # an entry of its cache is made of the token after it
        draft_quantization=str(question.options.get("quantization") or ""),
    )
