"""The method's own keys of --speculative-config, checked once in the parent process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

WITH_NGRAM: Final = "with_ngram"
STRATEGIES: Final = ("default", WITH_NGRAM)
NGRAM_KEYS: Final = ("max_ngram_size", "min_ngram_size")
KEYS: Final = ("model", "quantization", "mtp_strategy", "num_model_steps", *NGRAM_KEYS)


def num_model_steps(options: Mapping[str, Any], num_speculative_tokens: int) -> int:
    """How many drafts of a step the modules make; with `with_ngram`, n-grams make the rest."""
    default = 1 if options.get("mtp_strategy") == WITH_NGRAM else num_speculative_tokens
    return int(options.get("num_model_steps") or default)


def draft_config(hf_config: Mapping[str, Any], options: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json of the folder that option `model` names, if it has one, else the target's."""
    if options.get("model"):
        stated = Path(str(options["model"])) / "config.json"
        if stated.is_file():
            value = json.loads(stated.read_text(encoding="utf-8"))
            return value if isinstance(value, dict) else hf_config
    return hf_config


def refusals(options: Mapping[str, Any], num_speculative_tokens: int) -> list[str]:
    """What is wrong with the options, each with what would work."""
    found = [
        f"unknown key {key!r}; possible: {', '.join(KEYS)}" for key in options if key not in KEYS
    ]
    strategy = options.get("mtp_strategy", "default")
    if strategy not in STRATEGIES:
        found.append(f"mtp_strategy is {strategy!r:.40}; possible: {', '.join(STRATEGIES)}")
        return found
    steps = num_model_steps(options, num_speculative_tokens)
    if strategy == WITH_NGRAM:
        if steps >= num_speculative_tokens:
            found.append(
                "mtp_strategy with_ngram leaves n-grams nothing to draft: num_model_steps "
                f"{steps}, "
                f"num_speculative_tokens {num_speculative_tokens}; raise the second or leave "
                "mtp_strategy out"
            )
    else:
        if steps < num_speculative_tokens:
            found.append(
                f"num_model_steps {steps} makes fewer drafts than num_speculative_tokens "
                f"{num_speculative_tokens}; leave num_model_steps out, or let n-grams make the "
                "rest with mtp_strategy with_ngram"
            )
        found += [
            f"{key} belongs to mtp_strategy with_ngram, which was not asked for; leave it out or "
            "set it"
            for key in NGRAM_KEYS
            if key in options
        ]
    folder = options.get("model")
    if folder is not None and not (isinstance(folder, str) and _holds_a_checkpoint(Path(folder))):
        found.append(
            f"model {folder!r:.200} is no folder of a checkpoint; give one with the draft's "
            "weights, or leave it out to take those of the target's own checkpoint"
        )
    return found


def _holds_a_checkpoint(folder: Path) -> bool:
    """Whether the folder has weights; random weights need only a config.json."""
    return (folder / "config.json").is_file() or any(folder.glob("*.safetensors"))
