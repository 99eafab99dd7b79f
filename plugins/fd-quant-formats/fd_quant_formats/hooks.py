"""Which of these quantizer drivers serves a method. Imports no tensor library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fastdeploy_core.contracts.base import Accept, Candidate, Decline
from fastdeploy_core.contracts.hookspecs import hookimpl
from fastdeploy_core.contracts.quantizer import QuantizationQuestion

_SCORE: Final = 10
# Names of FastDeploy 2.x, vLLM and transformers for these drivers.
_ALIASES: Final[dict[str, str]] = {
    "weight_only_int8": "wint8",
    "weight_only_int4": "wint4",
    "tensor_wise_fp8": "wfp8afp8",
}
_DRIVERS: Final = (
    *("wint8", "wint4", "w8a8", "w4a8", "block_wise_fp8", "wfp8afp8", "mix_quant", "mxfp4"),
)
# Options of --quantization besides the method: of all formats that are made while loading, then of
# each one.
_SHARED_OPTIONS: Final = ("lm_head", "modules_to_not_convert", "ignored_layers")
_PARTS: Final = ("dense_quant_type", "moe_quant_type")
_OPTIONS: Final[dict[str, tuple[str, ...]]] = {
    "wint8": ("group_size",),
    "wint4": ("group_size",),
    "w8a8": ("group_size", "activation_scheme"),
    "w4a8": ("group_size", "activation_scheme"),
    "block_wise_fp8": ("weight_block_size", "activation_scheme"),
    "wfp8afp8": ("activation_scheme",),
}
# Methods known elsewhere that are not served here, and what to use instead.
_REFUSED: Final[dict[str, str]] = {
    "w4afp8": "int4 weights with fp8 activations; possible: w4a8, wint4",
    "wfp4afp8": "fp4 weights; possible: wint4, w4a8",
    "nvfp4": "fp4 weights; possible: wint4, wfp8afp8",
    "modelopt": "checkpoints of that tool; possible: compressed-tensors, gptq, awq, fp8",
    "bitsandbytes": "checkpoints of that tool; possible: --quantization wint8 or wint4 on the "
    "original",
    "fbgemm_fp8": "checkpoints of that tool; possible: compressed-tensors, fp8",
    "quark": "checkpoints of that tool; possible: compressed-tensors, gptq, awq, fp8",
}


@hookimpl
def fd_quantizer_for(question: QuantizationQuestion) -> Candidate | None:
    """The driver of that method; a Decline for known methods that are not served."""
    config = question.config
    name = driver_name(question.name, config)
    if name in _REFUSED:
        reason = f"method {question.name!r} is not supported: {_REFUSED[name]}"
        return Candidate(name, Decline(reason))
    if name not in _DRIVERS:
        return None
    if name == "mxfp4" and not config.get("is_quantized"):
        reason = "mxfp4 is read from checkpoints that have it; possible while loading: wint4, w4a8"
        return Candidate(name, Decline(reason))
    if name == "mix_quant" and not any(_part(config, key) for key in _PARTS):
        reason = (
            "mix_quant without dense_quant_type and moe_quant_type leaves everything in full "
            "precision; "
            'name a method for one of them at least, as in {"quantization": "mix_quant", '
            '"dense_quant_type": "wint8", "moe_quant_type": "wint4"}'
        )
        return Candidate(name, Decline(reason))
    note = "from the checkpoint" if config.get("is_quantized") else "while loading"
    details = {"experts": _experts(name, config)}
    options = _options(name, config)
    if name == "mix_quant":
        details["inner"] = ",".join(part for key in _PARTS if (part := _part(config, key)))
    if options:
        details["options"] = ",".join(options)
    return Candidate(name, Accept(_SCORE, note), details)


def driver_name(name: str, config: Mapping[str, Any]) -> str:
    """The driver that FastDeploy 2.x, vLLM or transformers mean by that name."""
    if name == "weight_only":
        name = str(config.get("algo", ""))
    if name == "fp8":
        # transformers' name for both; without a checkpoint, vLLM's name for scales per output or
        # tensor.
        return "block_wise_fp8" if config.get("weight_block_size") else "wfp8afp8"
    return _ALIASES.get(name, name)


def _part(config: Mapping[str, Any], key: str) -> str:
    """The driver of one part of mix_quant; empty for full precision."""
    name = driver_name(str(config.get(key) or ""), config)
    return "" if name == "none" else name


def _options(name: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Options of --quantization besides the method; empty for an unknown method."""
    if name != "mix_quant":
        return _OPTIONS[name] + _SHARED_OPTIONS if name in _OPTIONS else ()
    parts = [part for key in _PARTS if (part := _part(config, key))]
    if any(part not in _OPTIONS for part in parts):
        return ()  # only its plugin knows the options of another method
    return (*_PARTS, *(option for part in parts for option in _OPTIONS[part]), *_SHARED_OPTIONS)


def _experts(name: str, config: Mapping[str, Any]) -> str:
    """Internal formats that the experts may have, for the question to MoE drivers."""
    if name == "mix_quant":
        name = _part(config, "moe_quant_type")
        if not name:
            return ""
    if name == "block_wise_fp8":
        return "block_fp8"
    if name == "mxfp4":
        return ""  # no MoE driver is asked: families have an operation of their own
    is_static = config.get("activation_scheme") == "static"
    return f"{name}_static" if is_static and name in ("w8a8", "w4a8", "wfp8afp8") else name
