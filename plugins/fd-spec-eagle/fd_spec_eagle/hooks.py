"""Answers at start-up: what the method needs, or why it cannot run."""

from __future__ import annotations

from fastdeploy_core.contracts import hookimpl
from fastdeploy_core.contracts.base import Requirements
from fastdeploy_core.contracts.speculative import SpeculativeQuestion
from fastdeploy_core.errors import ConfigError

from .layout import TITLES, read_folder

KEYS = ("model", "quantization")


@hookimpl
def fd_speculative_requirements(question: SpeculativeQuestion) -> Requirements | None:
    """For methods `eagle3` and `dflash`."""
    method, steps = question.method, question.num_speculative_tokens
    if method not in TITLES:
        return None
    found = [
        f"unknown key {key!r}; possible: {', '.join(KEYS)}"
        for key in question.options
        if key not in KEYS
    ]
    folder = question.options.get("model")
    if not isinstance(folder, str) or not folder:
        found.append(
            f"model is {folder!r:.80}; method {method} needs the folder of a checkpoint "
            f"({TITLES[method]}) that was trained for the target"
        )
        return Requirements(refusals=tuple(found))
    try:
        draft = read_folder(method, folder, question.hf_config)
        if draft.block_size and steps >= draft.block_size:
            found.append(
                f"num_speculative_tokens is {steps}, and the DFlash draft in {folder} makes blocks "
                f"of {draft.block_size} tokens, of which the first is known; possible: 1 to "
                f"{draft.block_size - 1}"
            )
    except ConfigError as error:
        found.append(str(error))
    if found:
        return Requirements(refusals=tuple(found))
    layers, is_block = ", ".join(map(str, draft.reads)), draft.block_size > 0
    return Requirements(
        notes=(
            f"{method}: reads layers {layers} of the target, {draft.draft_vocab_size} of "
            f"{question.vocab_size} tokens can be drafted, {steps} draft(s) per step",
        ),
        # EAGLE-3: the first draft is made at the last token that was fed; each further one a
        # position later. DFlash: a block lies after that token.
        lookahead_tokens=steps + 1 if is_block else steps - 1,
        # EAGLE-3: an entry of its cache is made of the token after it.
        key_lookahead=0 if is_block else 1,
        draft_quantization=str(question.options.get("quantization") or ""),
    )
