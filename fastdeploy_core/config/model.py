"""Builds a ModelConfig from a model folder (config.json, generation_config.json) and the arguments.

Reads JSON; plugins/checkpoints.py finds models in other formats. models/shapes.py decides whether
an architecture can be served; loading/loader.py checks whether the weights are complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Literal

from fastdeploy_core.errors import ConfigError, UnsupportedModel

from .engine import ModelConfig

DTYPES: Final = ("float32", "float16", "bfloat16")
_DTYPE_ALIASES: Final = {
    "float": "float32",
    "half": "float16",
    "fp32": "float32",
    "fp16": "float16",
}
_LOAD_FORMATS: Final = ("auto", "safetensors", "dummy")
# What read_model_config may be given: the fields of ModelConfig, and what stands beside them.
MODEL_SETTINGS: Final = frozenset(field.name for field in fields(ModelConfig)) | {
    *("override_generation_config", "hf_overrides", "revision", "download_dir"),
    *("runner", "convert", "pooler_config"),
}
_MAX_JSON_BYTES: Final = 100_000_000  # an index names each tensor of the largest models
_DEFAULT_MAX_MODEL_LEN: Final = 2048


@dataclass(frozen=True, slots=True)
class FoundModel:
    """What a model path leads to. `checkpoint_format`: the driver that reads it; empty: the folder
    holds config.json and *.safetensors."""

    path: Path
    tokenizer_path: Path
    hf_config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    checkpoint_format: str = ""
    # Makes of config.json, with the user's overrides, what the engine shall read.
    adapt: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict


FindModel = Callable[[Path, Mapping[str, Any]], FoundModel]


def find_folder(path: Path, asked: Mapping[str, Any]) -> FoundModel:
    """The model in a folder with config.json; ConfigError if there is none. `asked`: the overrides
    of read_model_config."""
    if not path.is_dir():
        raise ConfigError(
            f"model {str(path)!r} is not a folder on this machine; expected a folder with "
            "config.json, tokenizer.json and *.safetensors, or a name such as "
            "baidu/ERNIE-4.5-0.3B-Paddle, which fd-hub downloads: pip install fd-hub"
        )
    if not (tokenizer := Path(asked.get("tokenizer_path") or path).expanduser()).is_dir():
        raise ConfigError(
            f"--tokenizer {str(tokenizer)!r} is not a folder on this machine; expected a folder "
            "with tokenizer.json"
        )
    own = path / "generation_config.json"
    return FoundModel(
        path, tokenizer, read_json(path / "config.json"), read_json(own) if own.exists() else {}
    )


def read_model_config(
    path: str | Path, overrides: Mapping[str, Any] | None = None, find: FindModel = find_folder
) -> ModelConfig:
    """The validated configuration of the model at a local path.

    `find` looks there: plugins.checkpoints.find_model also knows the formats of plugins.

    `overrides` uses the field names of ModelConfig; a missing or None entry means the default.
    Also: `dtype` may be "auto" (the checkpoint's), `generation_config` is "auto" (the model's own
    file), "none" (or "vllm") or a folder, `override_generation_config` and `hf_overrides` are
    mappings merged into generation_config.json and config.json.
    """
    asked = {k: v for k, v in (overrides or {}).items() if v is not None}
    if unknown := sorted(asked.keys() - MODEL_SETTINGS):
        possible = ", ".join(sorted(MODEL_SETTINGS))
        raise ConfigError(f"unknown model setting {', '.join(unknown)}; possible: {possible}")
    found = find(Path(path).expanduser(), asked)
    hf_config = _flat({**found.hf_config, **asked.get("hf_overrides", {})})
    _check_architectures(hf_config, found.path)
    hf_config = {**found.adapt(hf_config)}
    load_format = asked.get("load_format", "auto")
    if load_format not in _LOAD_FORMATS:
        raise ConfigError(
            f"unknown load format {load_format!r}; possible: {', '.join(_LOAD_FORMATS)}"
        )
    weight_cache = str(asked.get("weight_cache", ""))
    if weight_cache and load_format == "dummy":
        raise ConfigError(
            "--weight-cache keeps the weights of a checkpoint and --load-format dummy has none; "
            "drop one of them"
        )
    dtype_asked = str(asked.get("dtype", "auto"))
    declared = hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32"
    override = asked.get("override_generation_config", {})
    return ModelConfig(
        path=found.path,
        tokenizer_path=found.tokenizer_path,
        served_names=tuple(asked.get("served_names", ())),
        dtype=_dtype(str(declared)) if dtype_asked == "auto" else _dtype(dtype_asked),
        dtype_is_auto=dtype_asked == "auto",
        max_model_len=_max_model_len(hf_config, asked.get("max_model_len")),
        load_format=load_format,
        seed=int(asked.get("seed", 0)),
        quantization=str(asked.get("quantization", "")),
        generation_config={
            **_generation_config(found, str(asked.get("generation_config", "auto"))),
            **({"do_sample": None} if "temperature" in override else {}),
            **override,
        },
        hf_config=hf_config,
        chat_template=asked.get("chat_template"),
        trust_special_tokens=bool(asked.get("trust_special_tokens")),
        weight_cache=weight_cache,
        checkpoint_format=found.checkpoint_format,
    )


def _flat(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a model that takes more than text may hold what concerns its decoder in a
    text_config: the same keys, read as if they stood beside the others, which go before."""
    text = hf_config.get("text_config")
    return {**text, **hf_config} if isinstance(text, Mapping) else {**hf_config}


def fit_dtype(
    model: ModelConfig, device_dtypes: Sequence[str], preferred: str = ""
) -> tuple[ModelConfig, list[str]]:
    """The configuration with a dtype that the device has, and a report line if that changed it.

    An automatic dtype gives way to the one the device prefers. Every dtype that the device lacks
    gives way to float32, which holds all values of the others.
    """
    if preferred and model.dtype_is_auto and preferred != model.dtype:
        line = (
            f"dtype {preferred} instead of the checkpoint's {model.dtype}: the device is faster in "
            f"it; --dtype {model.dtype} takes less memory"
        )
        if model.dtype not in device_dtypes:
            line = (
                f"dtype {preferred} instead of the checkpoint's {model.dtype}: the device lacks it"
            )
        return replace(model, dtype=preferred), [line]
    if model.dtype in device_dtypes:
        return model, []
    possible = ", ".join(device_dtypes) or "none"
    asked = "the checkpoint's " if model.dtype_is_auto else "--dtype "
    if "float32" not in device_dtypes:
        raise UnsupportedModel(
            f"the device cannot compute in {asked}{model.dtype}; possible: {possible}; pass "
            "--dtype with one of them"
        )
    line = f"dtype float32 instead of {asked}{model.dtype}"
    return replace(model, dtype="float32"), [f"{line}: the device computes in {possible}"]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of reasonable size."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ConfigError(
                f"{path} is larger than {_MAX_JSON_BYTES} bytes; is it the right file?"
            )
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path.name} is missing in {path.parent}; is this a model folder?"
        ) from None
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}; expected a JSON object")
    return value


def checkpoint_layout(
    hf_config: Mapping[str, Any], *, force_torch: bool = False
) -> Literal["torch", "paddle"]:
    """Who saved the checkpoint: torch stores a linear weight as [out, in], Paddle as [in, out].

    `torch_dtype` means torch; `dtype` means torch from transformers 4.56.1 on, else Paddle. Both or
    neither is ambiguous and an error, unless `force_torch` (FD_FOR_TORCH_MODEL_FORMAT) decides.
    """
    quantization = hf_config.get("quantization_config")
    if isinstance(quantization, Mapping) and quantization.get("quant_method") == "mxfp4":
        return "torch"  # only torch tools write this format
    if force_torch:
        return "torch"
    has_torch, has_dtype = "torch_dtype" in hf_config, "dtype" in hf_config
    if has_torch != has_dtype:
        if has_torch:
            return "torch"
        version = _version(str(hf_config.get("transformers_version") or ""))
        return "torch" if version > (4, 56, 0) else "paddle"
    raise ConfigError(
        "cannot tell whether the checkpoint is in torch or Paddle layout: config.json has "
        f"{'both torch_dtype and dtype' if has_torch else 'neither torch_dtype nor dtype'}; "
        "expected torch_dtype (torch), dtype with transformers_version above 4.56.0 (torch) or "
        "dtype alone (Paddle); correct config.json or set FD_FOR_TORCH_MODEL_FORMAT=1"
    )


def _version(text: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(part or 0) for part in found.groups()) if found else (0, 0, 0)


def _dtype(text: str) -> str:
    name = text.removeprefix("torch.").removeprefix("paddle.").lower()
    name = _DTYPE_ALIASES.get(name, name)
    if name not in DTYPES:
        raise ConfigError(f"unknown dtype {text!r}; possible: auto, {', '.join(DTYPES)}")
    return name


def _check_architectures(hf_config: Mapping[str, Any], path: Path) -> None:
    names = hf_config.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise ConfigError(
            f"{path / 'config.json'} names no model architecture; expected "
            '"architectures": ["..."] with one name'
        )


def _max_model_len(hf_config: Mapping[str, Any], asked: Any) -> int:
    longest = _longest(hf_config)
    if asked in (None, "auto", -1):
        return longest or _DEFAULT_MAX_MODEL_LEN
    if not isinstance(asked, int) or isinstance(asked, bool) or asked < 1:
        raise ConfigError(f"max_model_len is {asked!r}; expected a positive number of tokens")
    if longest and asked > longest:
        raise ConfigError(
            f"max_model_len {asked} is longer than the model's context; possible: 1 to {longest} "
            "(max_position_embeddings of config.json, extended by its rope scaling)"
        )
    return asked


def _longest(hf_config: Mapping[str, Any]) -> int | None:
    """The context that config.json promises; YaRN and linear scaling extend the trained one."""
    trained = hf_config.get("max_position_embeddings")
    if not isinstance(trained, int) or isinstance(trained, bool) or trained < 1:
        return None
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling")
    if not isinstance(rope, Mapping):
        return trained
    factor = rope.get("factor")
    if not isinstance(factor, int | float) or isinstance(factor, bool) or factor < 1:
        return trained
    kind = rope.get("rope_type", rope.get("type"))
    if kind == "yarn":
        original = rope.get("original_max_position_embeddings")
        return max(trained, int(original * factor)) if isinstance(original, int) else trained
    return int(trained * factor) if kind == "linear" else trained


def _generation_config(found: FoundModel, source: str) -> Mapping[str, Any]:
    if source in ("none", "vllm"):  # vLLM's word for its own defaults instead of the model's
        return {}
    if source != "auto":
        return read_json(Path(source).expanduser() / "generation_config.json")
    return found.generation_config
