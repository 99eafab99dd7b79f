"""What a published EAGLE-3 folder says: its sizes, the target's layers that it reads, its tensors.

Two spellings of config.json are published. SafeAILab, SpecForge and vLLM have the keys of a Llama
model beside `draft_vocab_size`. Speculators has the model's keys in `transformer_layer_config`.
Imports no tensor library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fastdeploy_core.errors import ConfigError

# Words of an architecture or of speculators_model_type that say what else a folder may be.
_BLOCKS: Final = ("dflash", "dspark")


@dataclass(frozen=True, slots=True)
class Eagle3Folder:
    """One checkpoint, as the drafter builds it."""

    config: Mapping[str, Any]  # its block's sizes, under the keys of a Llama model
    # Blocks of the target whose outputs are read, counted from 1: 1 is what the first one returns.
    reads: tuple[int, ...]
    target_hidden_size: int
    draft_vocab_size: int
    norm_before_residual: bool  # the residual stream begins after hidden_norm, not before it
    names: frozenset[str]  # of its tensors, shortened; empty: there are no files (random weights)

    def has(self, name: str) -> bool:
        """Whether the checkpoint has this tensor; of one without files: has everything of its
        own."""
        return not self.names or name in self.names


def shortened(name: str) -> str:
    """A tensor's name as the drafter reads it."""
    return name.removeprefix("model.").replace("midlayer.", "layers.0.")


def read_folder(folder: str, hf_config: Mapping[str, Any]) -> Eagle3Folder:
    """hf_config: the target's config.json. ConfigError: this is no EAGLE-3 checkpoint for it."""
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise ConfigError(f"model {folder!r:.200} is no folder with a config.json")
    try:
        given = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"config.json of the draft in {folder} is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"config.json of the draft in {folder} is no object")
    _check_kind(folder, given)
    nested = given.get("transformer_layer_config")
    config = {**given, **nested} if isinstance(nested, dict) else given
    if config.get("num_hidden_layers", 1) != 1:
        raise ConfigError(
            f"the EAGLE-3 draft in {folder} has {config['num_hidden_layers']!r:.40} blocks; "
            "possible: 1"
        )
    vocab, hidden = config.get("vocab_size"), config.get("hidden_size")
    read, draft_vocab = given.get("target_hidden_size") or hidden, given.get("draft_vocab_size")
    target_vocab, target_hidden, num_layers = (
        _size_of_target(hf_config, key)
        for key in ("vocab_size", "hidden_size", "num_hidden_layers")
    )
    draft_vocab = draft_vocab or vocab
    if vocab != target_vocab:
        raise ConfigError(
            f"the EAGLE-3 draft in {folder} has a vocabulary of {vocab!r:.40} tokens, the target "
            f"one of {target_vocab}; a draft works with the target that it was trained for"
        )
    if read != target_hidden:
        raise ConfigError(
            f"the EAGLE-3 draft in {folder} reads hidden states of {read!r:.40} values, the "
            f"target's have {target_hidden}; a draft works with the target that it was trained for"
        )
    if not isinstance(draft_vocab, int) or not 1 <= draft_vocab <= target_vocab:
        raise ConfigError(
            f"the EAGLE-3 draft in {folder} has draft_vocab_size {draft_vocab!r:.40}; possible: 1 "
            f"to {target_vocab}"
        )
    return Eagle3Folder(
        config={**config, "architectures": ["EAGLE-3 draft"]},
        reads=_reads(folder, given, num_layers),
        target_hidden_size=target_hidden,
        draft_vocab_size=draft_vocab,
        norm_before_residual=bool(given.get("norm_before_residual")),
        names=_names(path),
    )


def _size_of_target(hf_config: Mapping[str, Any], key: str) -> int:
    """Of a family with pictures the decoder's."""
    text = hf_config.get("text_config")
    value = hf_config.get(key) or (text.get(key) if isinstance(text, Mapping) else None)
    if not isinstance(value, int):
        raise ConfigError(f"config.json of the target has {key} {value!r:.40}; expected a number")
    return value


def _check_kind(folder: str, config: Mapping[str, Any]) -> None:
    architecture = str((config.get("architectures") or ["?"])[0])
    words = f"{architecture} {config.get('speculators_model_type') or ''}".lower()
    found = [word for word in _BLOCKS if word in words or f"{word}_config" in config]
    if found:
        raise ConfigError(
            f"the draft in {folder} is a {architecture}, which makes a block of drafts at once "
            f"({found[0]}); that is not supported; possible: an EAGLE-3 checkpoint, or method mtp"
        )
    if "eagle3" not in words.replace("-", ""):
        raise ConfigError(
            f"the draft in {folder} is a {architecture}; possible: an EAGLE-3 checkpoint, such as "
            "LlamaForCausalLMEagle3 or Eagle3Speculator; a whole smaller model is method "
            "draft_model"
        )
    own = config.get("eagle_config")
    if isinstance(own, dict) and own.get("use_aux_hidden_state") is False:
        raise ConfigError(
            f"the draft in {folder} reads the target's last hidden state alone "
            "(use_aux_hidden_state false); possible: a draft that reads three layers'"
        )


def _reads(folder: str, config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Number n stands for what block n, counted from 0, is given: so n blocks come before it. In
    `eagle_config` (SpecForge, ModelOpt, SGLang) the number is of the block that returns it."""
    own, key = config.get("eagle_config"), "eagle_aux_hidden_state_layer_ids"
    numbers: Any = config.get(key)
    if not numbers and isinstance(own, dict) and isinstance(own.get(key), list):
        numbers = [number + 1 if isinstance(number, int) else number for number in own[key]]
    numbers = numbers or [2, num_layers // 2, num_layers - 3]
    valid = isinstance(numbers, list) and all(
        isinstance(number, int) and 1 <= number <= num_layers for number in numbers
    )
    if not valid or len(set(numbers)) != len(numbers):
        raise ConfigError(
            f"the EAGLE-3 draft in {folder} reads layers {numbers!r:.80} of a target that has "
            f"{num_layers}; possible: different numbers from 1 to {num_layers} ({key}; without "
            "it, layers 2, half of all, and the third before the last)"
        )
    return tuple(numbers)


def _names(folder: Path) -> frozenset[str]:
    """Names of all tensors, from the headers of the files."""
    from safetensors import SafetensorError, safe_open

    found: set[str] = set()
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="numpy") as file:
                found.update(map(shortened, file.keys()))
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} cannot be read: {error}; finish the download") from None
    unsafe = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
    if unsafe and not found:
        raise ConfigError(
            f"the draft in {folder} has its weights in {unsafe[0]}, a format that can carry code; "
            "only *.safetensors files are read; convert them with the library that wrote them"
        )
    return frozenset(found)
