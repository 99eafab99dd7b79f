"""Reads --speculative-config: every key of FastDeploy and vLLM is obeyed, or refused with its
reason (speculative.json).

Options of a method stay in `options` under the inside name; the method itself checks them (its
answer to fd_speculative_requirements).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from fastdeploy_core.errors import ConfigError

from .engine import SpeculativeConfig

FLAG: Final = "--speculative-config"
MAX_DRAFTS: Final = 32
LOSSLESS: Final = "lossless"
LOSSY_TOP_P: Final = "lossy_top_p"

_TABLES: Final = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
# Other spellings of a method, with the options that each implies.
METHODS: Final[dict[str, tuple[str, dict[str, Any]]]] = _TABLES["methods"]
NO_METHOD: Final[dict[str, str]] = _TABLES["no_method"]
# vLLM's names of options that have another name here.
OPTIONS: Final[dict[str, str]] = _TABLES["options"]
# Known keys that are not taken: the reason, and the value that asks for what happens anyway.
REFUSED: Final[dict[str, tuple[str, Any]]] = {
    name: (group["reason"], harmless)
    for group in _TABLES["refused"]
    for name, harmless in group["names"].items()
}
_ACCEPTANCE_OF = {"target_match": LOSSLESS, "topp": LOSSY_TOP_P}


def read_speculative(
    given: Mapping[str, Any], tensor_parallel_size: int = 1
) -> SpeculativeConfig | None:
    """The section, or None when nothing was given; ConfigError for what cannot be obeyed."""
    if not given:
        return None
    left = dict(given)
    method, options = _method(left)
    _refuse(left)
    _draft_ranks(left, tensor_parallel_size)
    number = _whole(left, "num_speculative_tokens", 1, 1, MAX_DRAFTS)
    # the model makes this many drafts; num_speculative_tokens is at least that
    if "num_model_steps" in left:
        steps = _whole(left, "num_model_steps", 1, 1, MAX_DRAFTS)
        options["num_model_steps"] = steps
        number = max(number, steps)
    acceptance = _acceptance(left)
    if acceptance == LOSSLESS:
        for key in ("max_candidate_len", "verify_window"):
            if key in left:
                raise ConfigError(
                    f"{FLAG}.{key} belongs to acceptance {LOSSY_TOP_P!r}, which changes the "
                    f"output's distribution and was not asked for; leave it out, or set acceptance"
                )
    settings: dict[str, Any] = {
        "max_candidate_len": _whole(left, "max_candidate_len", 5, 1, 64),
        "verify_window": _whole(left, "verify_window", 2, 1, MAX_DRAFTS),
        "adaptive_length": _flag(left, "adaptive_length", default=True),
        "disable_by_batch_size": _whole(left, "disable_by_batch_size", 0, 0, 1 << 20),
        "benchmark_mode": _flag(left, "benchmark_mode", default=False),
    }
    for key, value in left.items():  # the remaining keys are options of the method
        name = OPTIONS.get(key, key)
        if name in options:
            raise ConfigError(f"{FLAG} sets {name} twice, the second time as {key}")
        options[name] = value
    return SpeculativeConfig(method, number, acceptance, **settings, options=options)


def _method(left: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    method = left.pop("method", None)
    if method is None and left.get("model") in METHODS:
        method = left.pop("model")  # vLLM: model "[ngram]"
    if method is None and isinstance(left.get("model"), str):
        method = "draft_model"
    if not isinstance(method, str) or not method:
        near = difflib.get_close_matches("method", left, n=1)
        unknown = f" and has no key {near[0]}" if near else ""
        raise ConfigError(
            f"{FLAG} needs a method{unknown}, such as {FLAG}.method ngram_match; see: fastdeploy "
            "plugins list --kind speculative"
        )
    if method in NO_METHOD:
        raise ConfigError(
            f"{FLAG}.method {method!r} is not possible: {NO_METHOD[method]}; "
            "see: fastdeploy plugins list --kind speculative"
        )
    name, options = METHODS.get(method, (method, {}))
    return name, dict(options)


def _refuse(left: dict[str, Any]) -> None:
    for key, (reason, harmless) in REFUSED.items():
        if key in left:
            value = left.pop(key)
            if value is not None and value != harmless:
                raise ConfigError(f"{FLAG}.{key} {value!r:.60} is not taken: {reason}")


def _draft_ranks(left: dict[str, Any], tensor_parallel_size: int) -> None:
    asked = left.pop("draft_tensor_parallel_size", None)
    if asked is not None and asked != tensor_parallel_size:
        raise ConfigError(
            f"{FLAG}.draft_tensor_parallel_size {asked!r:.40} is not possible: the draft's layers "
            f"are divided as the target's are; leave it out or give {tensor_parallel_size} "
            "(--tensor-parallel-size)"
        )


def _acceptance(left: dict[str, Any]) -> Literal["lossless", "lossy_top_p"]:
    acceptance = left.pop("acceptance", None)
    strategy = left.pop("verify_strategy", None)
    if strategy is not None:
        name = str(strategy).lower()
        if name == "greedy":
            raise ConfigError(
                f"{FLAG}.verify_strategy {strategy!r:.40} is not possible: it would make every "
                "request greedy; send temperature 0 for that; possible: target_match, topp"
            )
        if name not in _ACCEPTANCE_OF:
            raise ConfigError(
                f"{FLAG}.verify_strategy must be target_match or topp, got {strategy!r:.40}"
            )
        acceptance = acceptance or _ACCEPTANCE_OF[name]
    if acceptance is None or acceptance == LOSSLESS:
        return "lossless"
    if acceptance == LOSSY_TOP_P:
        return "lossy_top_p"
    raise ConfigError(
        f"{FLAG}.acceptance must be {LOSSLESS} or {LOSSY_TOP_P}, got {acceptance!r:.40}"
    )


def _whole(left: dict[str, Any], key: str, default: int, low: int, high: int) -> int:
    value = left.pop(key, None)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{FLAG}.{key} must be between {low} and {high}, got {value!r:.40}")
    return value


def _flag(left: dict[str, Any], key: str, *, default: bool) -> bool:
    value = left.pop(key, None)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ConfigError(f"{FLAG}.{key} must be true or false, got {value!r:.40}")
    return value
