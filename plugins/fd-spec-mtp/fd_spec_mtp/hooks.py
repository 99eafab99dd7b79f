"""Answers at start-up: what the method needs, or why it cannot run."""

from __future__ import annotations

from pathlib import Path

from fastdeploy_core.contracts import hookimpl
from fastdeploy_core.contracts.base import Requirements
from fastdeploy_core.contracts.speculative import SpeculativeQuestion
from fastdeploy_core.errors import ConfigError

from .layout import COUNT_KEYS, ModuleNames, modules, num_modules
from .options import NGRAM_KEYS, WITH_NGRAM, draft_config, num_model_steps, refusals


@hookimpl
def fd_speculative_requirements(question: SpeculativeQuestion) -> Requirements | None:
    """For method `mtp` only."""
    if question.method != "mtp":
        return None
    found = refusals(question.options, question.num_speculative_tokens)
    steps = num_model_steps(question.options, question.num_speculative_tokens)
    folder = str(question.options.get("model") or question.model_path)
    names: list[ModuleNames] = []
    try:
        count = num_modules(draft_config(question.hf_config, question.options))
        names = modules(question.hf_config, min(count, steps))
        if not count:
            found.append(
                f"config.json of {folder or question.architecture} announces no "
                "multi-token-prediction "
                f"modules ({' or '.join(COUNT_KEYS)} above 0); possible: a checkpoint published "
                "with them, their folder as 'model', or a method without weights such as 'ngram'"
            )
        found += _lacking(folder, names)
    except ConfigError as error:
        found.append(str(error))
    if found:
        return Requirements(refusals=tuple(found))
    hybrid = question.options.get("mtp_strategy") == WITH_NGRAM
    source = "the draft checkpoint" if question.options.get("model") else "the target's checkpoint"
    return Requirements(
        notes=(
            f"mtp: {len(names)} module(s) of {source}, {steps} draft(s) per step"
            + (f", then n-grams up to {question.num_speculative_tokens}" if hybrid else ""),
        ),
        # The modules make the first drafts at the last token that was fed; each further draft is
        # one position later.
        lookahead_tokens=steps - len(names),
        key_lookahead=len(names),
        draft_quantization=str(question.options.get("quantization") or ""),
        continued_by="ngram_match" if hybrid else "",
        continued_options={k: v for k, v in question.options.items() if k in NGRAM_KEYS},
    )


def _lacking(folder: str, names: list[ModuleNames]) -> list[str]:
    """Modules without any tensor in the checkpoint, found before anything is loaded."""
    stored = _stored_names(folder)
    if not stored:
        return []  # random weights, or a folder that loading reports as wrong
    missing = [
        f"{prefix}*"
        for module in names
        for prefix in module.prefixes
        if not any(name.startswith(prefix) for name in stored)
    ]
    if not missing:
        return []
    return [
        f"the checkpoint in {folder} has no weights {', '.join(missing)}; possible: a checkpoint "
        "published with them, their folder as 'model', or a method without weights such as 'ngram'"
    ]


def _as_read(name: str) -> str:
    """A tensor's name as the target's family reads it."""
    return name.replace("ernie.", "model.").replace("model.language_model.", "model.")


def _stored_names(folder: str) -> set[str]:
    """Names of all tensors of a checkpoint, from the headers of its files."""
    from safetensors import SafetensorError, safe_open

    found: set[str] = set()
    for path in sorted(Path(folder).glob("*.safetensors")) if folder else ():
        try:
            with safe_open(path, framework="numpy") as file:
                found.update(map(_as_read, file.keys()))
        except (SafetensorError, OSError):
            return set()  # loading reports what is wrong with the file
    return found
