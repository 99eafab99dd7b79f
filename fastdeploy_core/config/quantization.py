"""The quantization of a model, read from config.json and the command line into one record.

config.json wins, as in FastDeploy 2.x; a contradicting argument is kept as a note for the start-up
report. The quantizer plugins decide who can serve the method.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fastdeploy_core.errors import ConfigError

from .engine import EngineConfig, ModelConfig

# FastDeploy 2.x: on ERNIE models, wint4 means 4 bits for experts and 8 for everything else.
_ERNIE_WINT4: Final = {
    "quantization": "mix_quant",
    "dense_quant_type": "wint8",
    "moe_quant_type": "wint4",
}
_KV_ONLY: Final = "kvcache"
_OWN_WORDS: Final = (
    "quantization",
    "algo",
    "kv_cache_quant_type",
    "is_quantized",
    "is_moe_quantized",
)


@dataclass(frozen=True, slots=True)
class QuantizationSettings:
    """`method` is empty for full precision; `config` is what a quantizer driver is built from."""

    method: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    kv_format: str = ""  # as the user spelled it; empty: the cache holds the model's dtype
    kv_static: bool = False  # the checkpoint has the cache's scales
    # the checkpoint has cache scales, but another cache format was asked for
    kv_unused: bool = False
    asked: tuple[str, ...] = ()  # the options of `config` that came from --quantization
    notes: tuple[str, ...] = ()


def quantization_of(config: EngineConfig) -> QuantizationSettings:
    """The settings of a whole configuration."""
    return read_quantization(config.model, config.cache.kv_dtype)


def read_quantization(model: ModelConfig, kv_dtype: str = "auto") -> QuantizationSettings:
    """Settings from config.json, else from --quantization; ConfigError for what is malformed."""
    stored = model.hf_config.get("quantization_config") or {}
    if not isinstance(stored, Mapping):
        raise ConfigError(
            f"quantization_config of config.json is a {type(stored).__name__}; expected an object"
        )
    asked = parse_quantization(model.quantization)
    notes: list[str] = []
    if stored:
        config = _of_checkpoint(stored)
        if asked and _method(asked) != _method(config):
            notes.append(
                f"--quantization {_method(asked)} has no effect: the checkpoint is quantized with "
                f"{_method(config)} (config.json)"
            )
        elif len(asked) > 1:
            notes.append(
                f"{', '.join(_options(asked))} of --quantization have no effect: how the "
                "checkpoint is quantized is up to its config.json"
            )
    else:
        config = dict(asked)
        if config == {"quantization": "wint4"} and model.architecture.startswith("Ernie"):
            config = dict(_ERNIE_WINT4)
            notes.append(
                "--quantization wint4 on an ERNIE model: experts in wint4, everything else in "
                "wint8; "
                'all in wint4: --quantization \'{"quantization": "wint4", "group_size": 0}\''
            )
        if config:
            config.setdefault("is_quantized", False)
    declared = _declared_kv(config, stored)
    kv_format, kv_static = declared, bool(declared and stored)
    is_fp8 = declared == "float8_e4m3fn"
    if kv_dtype not in ("", "auto", declared, *(("fp8", "fp8_e4m3") if is_fp8 else ())):
        if kv_static:
            notes.append(
                f"the checkpoint's cache scales ({declared}) are not used: --kv-cache-dtype "
                f"{kv_dtype}"
            )
        kv_format, kv_static = kv_dtype, False
    method = _method(config)
    return QuantizationSettings(
        method="" if method == _KV_ONLY else method,
        config=config,
        kv_format=kv_format,
        kv_static=kv_static,
        kv_unused=bool(declared and stored) and not kv_static,
        asked=() if stored else _options(asked),
        notes=tuple(notes),
    )


def check_options(settings: QuantizationSettings, possible: Sequence[str]) -> None:
    """ConfigError for an option of --quantization that the method does not have."""
    for name in settings.asked:
        if name not in possible:
            near = difflib.get_close_matches(name, possible, n=1)
            hint = f"did you mean {near[0]}?" if near else f"possible: {', '.join(possible)}"
            raise ConfigError(f"quantization {settings.method} has no option {name}; {hint}")


def parse_quantization(text: str, flag: str = "--quantization") -> dict[str, Any]:
    """What `flag` says: a name, or a JSON object with the key "quantization"."""
    text = text.strip()
    if not text.startswith("{"):
        return {"quantization": text} if text else {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{flag} {text!r} is not JSON: {error}") from None
    if not isinstance(value, dict) or not isinstance(value.get("quantization"), str):
        raise ConfigError(
            f'{flag} {text!r} lacks the key "quantization"; expected a name such as wint8, or '
            'JSON such as {"quantization": "wint4", "group_size": 128}'
        )
    return value


def _options(asked: Mapping[str, Any]) -> tuple[str, ...]:
    """The entries of --quantization that concern weights and are not the core's own."""
    return tuple(name for name in asked if name not in _OWN_WORDS)


def _method(config: Mapping[str, Any]) -> str:
    return str(config.get("quantization") or config.get("quant_method") or "")


def _of_checkpoint(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The content of config.json, with `is_quantized` made explicit."""
    config = dict(stored)
    if not _method(config):
        raise ConfigError(
            "quantization_config of config.json names no method; expected the key quantization "
            "(FastDeploy) or quant_method (transformers), found: "
            f"{', '.join(sorted(config)) or 'none'}"
        )
    if "is_quantized" not in config:
        # Checkpoints of FastDeploy that only add cache scales keep full-precision weights.
        only_cache = "kv_cache_quant_type" in config or "is_moe_quantized" in config
        config["is_quantized"] = "quant_method" in config or not only_cache
    return config


def _declared_kv(config: Mapping[str, Any], stored: Mapping[str, Any]) -> str:
    """The cache format that the configuration names, as FastDeploy or compressed-tensors do."""
    declared = str(config.get("kv_cache_quant_type") or "")
    scheme = stored.get("kv_cache_scheme")
    if declared or not isinstance(scheme, Mapping):
        return declared
    bits, kind = scheme.get("num_bits"), scheme.get("type")
    found = {"float": "float8_e4m3fn", "int": "int8"}.get(str(kind)) if bits == 8 else None
    if found is None:
        raise ConfigError(
            f"kv_cache_scheme of config.json asks for {bits} bits of type {kind!r}; possible: "
            "8 bits of type float or int"
        )
    return found
