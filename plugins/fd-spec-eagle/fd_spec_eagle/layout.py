"""What a published folder says of a draft that reads several of the target's layers: its sizes,
those layers, its tensors.

Two spellings of config.json are published for each method. SafeAILab, SpecForge, z-lab and vLLM
have the keys of a Llama or Qwen3 model beside the draft's own. Speculators has the model's keys in
`transformer_layer_config`. Imports no tensor library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fastdeploy_core.errors import ConfigError

TITLES: Final = {"eagle3": "EAGLE-3", "dflash": "DFlash"}  # by method
# Keys of dflash_config, or beside it, with the values that leave a DFlash checkpoint what
# dflash_layers.py computes; others would draft something else.
_PLAIN: Final[dict[str, tuple[Any, ...]]] = {
    "attention_sink_bias": (False,),
    "causal": (False,),
    "draft_block_causal": (False,),
    "draft_sliding_window": (),
    "fusion_type": ("linear",),
    "logit_scale": (1, 1.0),
    "swa_layer_pattern": (),
    "use_aux_hidden_state": (True,),
    "use_swa": (False,),
}
_OF_BLOCKS: Final = ("block_size", "mask_token_id", "target_layer_ids", "swa_window_size")


@dataclass(frozen=True, slots=True)
class DraftFolder:
    """One checkpoint, as the drafter builds it."""

    config: Mapping[str, Any]  # sizes of its blocks, under the keys of a Llama or Qwen3 model
    # Blocks of the target whose outputs are read, counted from 1: 1 is what the first one returns.
    reads: tuple[int, ...]
    target_hidden_size: int
    draft_vocab_size: int
    names: frozenset[str]  # of its tensors, shortened; empty: there are no files (random weights)
    # Of EAGLE-3: the residual stream begins after hidden_norm, not before it.
    norm_before_residual: bool = False
    # Of DFlash: tokens of a block, the known one in front included, and what stands for the others.
    block_size: int = 0
    mask_token_id: int = 0

    def has(self, name: str) -> bool:
        """Whether the checkpoint has this part of a vocabulary of its own; one without files has
        all of them if its size differs from the target's."""
        return name in self.names if self.names else self.has_vocabulary

    @property
    def has_vocabulary(self) -> bool:
        """Whether fewer tokens can be drafted than the target has."""
        return bool(self.draft_vocab_size != self.config["vocab_size"])


def shortened(name: str) -> str:
    """A tensor's name as the drafter reads it."""
    return name.removeprefix("model.").replace("midlayer.", "layers.0.")


def read_folder(method: str, folder: str, hf_config: Mapping[str, Any]) -> DraftFolder:
    """hf_config: the target's config.json. ConfigError: this is no checkpoint of the method for
    that target."""
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise ConfigError(f"model {folder!r:.200} is no folder with a config.json")
    try:
        given = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"config.json of the draft in {folder} is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"config.json of the draft in {folder} is no object")
    title = f"{TITLES[method]} draft in {folder}"
    _check_kind(method, folder, given)
    nested = given.get("transformer_layer_config")
    config = {**given, **nested} if isinstance(nested, dict) else given
    vocab, hidden = config.get("vocab_size"), config.get("hidden_size")
    read, draft_vocab = given.get("target_hidden_size") or hidden, given.get("draft_vocab_size")
    target_vocab, target_hidden, num_layers = (
        _size_of_target(hf_config, key)
        for key in ("vocab_size", "hidden_size", "num_hidden_layers")
    )
    draft_vocab = draft_vocab or vocab
    if vocab != target_vocab:
        raise ConfigError(
            f"the {title} has a vocabulary of {vocab!r:.40} tokens, the target "
            f"one of {target_vocab}; a draft works with the target that it was trained for"
        )
    if read != target_hidden:
        raise ConfigError(
            f"the {title} reads hidden states of {read!r:.40} values, the "
            f"target's have {target_hidden}; a draft works with the target that it was trained for"
        )
    if not isinstance(draft_vocab, int) or not 1 <= draft_vocab <= target_vocab:
        raise ConfigError(
            f"the {title} has draft_vocab_size {draft_vocab!r:.40}; possible: 1 to {target_vocab}"
        )
    own: dict[str, int] = {}
    if method == "dflash":
        numbers, own = _of_dflash(title, config, target_vocab)
    else:
        numbers = _of_eagle3(title, config, num_layers)
    return DraftFolder(
        config={**config, "architectures": [f"{TITLES[method]} draft"]},
        reads=_reads(title, numbers, num_layers),
        target_hidden_size=target_hidden,
        draft_vocab_size=draft_vocab,
        norm_before_residual=bool(given.get("norm_before_residual")),
        names=_names(path),
        **own,
    )


def _size_of_target(hf_config: Mapping[str, Any], key: str) -> int:
    """Of a family with pictures the decoder's."""
    text = hf_config.get("text_config")
    value = hf_config.get(key) or (text.get(key) if isinstance(text, Mapping) else None)
    if not isinstance(value, int):
        raise ConfigError(f"config.json of the target has {key} {value!r:.40}; expected a number")
    return value


def _check_kind(method: str, folder: str, config: Mapping[str, Any]) -> None:
    architecture = str((config.get("architectures") or ["?"])[0])
    words = f"{architecture} {config.get('speculators_model_type') or ''}".lower()
    kind = "eagle3" if "eagle3" in words.replace("-", "") else ""
    if "dflash" in words or "dflash_config" in config:
        kind = "dflash"
    if "dflash2" in words or "dspark" in words or "dspark_config" in config:
        raise ConfigError(
            f"the draft in {folder} is a {architecture}, whose blocks have more parts than a first "
            "DFlash's; that is not supported; possible: a DFlash or EAGLE-3 checkpoint, or method "
            "mtp"
        )
    if kind and kind != method:
        raise ConfigError(
            f"the draft in {folder} is a {architecture}, which is for method {kind}, not {method}"
        )
    if not kind:
        raise ConfigError(
            f"the draft in {folder} is a {architecture}; possible: an EAGLE-3 checkpoint, such as "
            "LlamaForCausalLMEagle3 or Eagle3Speculator, for method eagle3; a DFlashDraftModel for "
            "method dflash; a whole smaller model is method draft_model"
        )


def _of_eagle3(title: str, config: Mapping[str, Any], num_layers: int) -> Any:
    """The layers that it reads. Number n stands for what block n, counted from 0, is given: so n
    blocks come before it. In `eagle_config` (SpecForge, ModelOpt, SGLang) the number is of the
    block that returns it."""
    own, key = config.get("eagle_config"), "eagle_aux_hidden_state_layer_ids"
    if isinstance(own, dict) and own.get("use_aux_hidden_state") is False:
        raise ConfigError(
            f"the {title} reads the target's last hidden state alone "
            "(use_aux_hidden_state false); possible: a draft that reads three layers'"
        )
    if config.get("num_hidden_layers", 1) != 1:
        raise ConfigError(
            f"the {title} has {config['num_hidden_layers']!r:.40} blocks; possible: 1"
        )
    numbers: Any = config.get(key)
    if not numbers and isinstance(own, dict):
        numbers = _one_more(own.get(key))
    return numbers or [2, num_layers // 2, num_layers - 3]


def _of_dflash(
    title: str, config: Mapping[str, Any], vocab_size: int
) -> tuple[Any, dict[str, int]]:
    """The layers that it reads, and the fields that only it has. `target_layer_ids` (z-lab,
    SGLang) counts the block that returns what is read, `aux_hidden_state_layer_ids` (Speculators)
    the block that is given it."""
    own = config.get("dflash_config")
    both = {**config, **(own if isinstance(own, dict) else {})}
    for key, plain in _PLAIN.items():
        if both.get(key) is not None and both[key] not in plain:
            raise ConfigError(f"the {title} has {key} {both[key]!r:.80}, which is not supported")
    unknown = [key for key in own or () if key not in _PLAIN and key not in _OF_BLOCKS]
    if unknown:
        raise ConfigError(
            f"the {title} has {unknown[0]!r:.80} in dflash_config, which is not known"
        )
    kinds = both.get("layer_types")
    if kinds and set(kinds) != {"full_attention"}:
        raise ConfigError(
            f"the {title} has layer_types {kinds!r:.80}; possible: full_attention alone"
        )
    found: dict[str, int] = {}
    for key, least, limit in (("block_size", 2, 1025), ("mask_token_id", 0, vocab_size)):
        value = both.get(key)
        if not isinstance(value, int) or not least <= value < limit:
            raise ConfigError(
                f"the {title} has {key} {value!r:.40}; expected a number from {least} to "
                f"{limit - 1}"
            )
        found[key] = value
    return both.get("aux_hidden_state_layer_ids") or _one_more(both.get("target_layer_ids")), found


def _one_more(numbers: Any) -> Any:
    if not isinstance(numbers, list):
        return numbers
    return [number + 1 if isinstance(number, int) else number for number in numbers]


def _reads(title: str, numbers: Any, num_layers: int) -> tuple[int, ...]:
    """numbers: of blocks, counted from 1, that return what is read."""
    valid = isinstance(numbers, list) and all(
        isinstance(number, int) and 1 <= number <= num_layers for number in numbers
    )
    if not valid or not numbers or len(set(numbers)) != len(numbers):
        raise ConfigError(
            f"the {title} reads the outputs of blocks {numbers!r:.80} of a target that has "
            f"{num_layers}; possible: different numbers from 1 to {num_layers}, as a list in "
            "config.json"
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
