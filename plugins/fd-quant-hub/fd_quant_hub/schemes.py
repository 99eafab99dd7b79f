"""compressed-tensors configurations: how each layer is stored. No tensor code.

config_groups maps targets (a module class such as "Linear", a module name, or "re:" and a regular
expression) to bits, type and granularity of weights and activations; `ignore` lists exceptions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from fd_quant_formats import names_in

from fastdeploy_core.contracts.quant_formats import FP8_BLOCK
from fastdeploy_core.errors import ConfigError

_CLASS: Final = "Linear"


@dataclass(frozen=True, slots=True)
class Scheme:
    """One config group. `format`: the internal format that it is read into."""

    format: str
    bits: int
    is_packed: bool  # in int32 words (pack-quantized)
    strategy: str  # tensor, channel, group, block
    group_size: int
    is_symmetric: bool
    is_scattered: bool  # the checkpoint has weight_g_idx
    is_static: bool
    targets: tuple[str, ...]


def read_schemes(config: Mapping[str, Any]) -> list[Scheme]:
    """All groups; ConfigError names what cannot be read."""
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ConfigError(
            "compressed-tensors: quantization_config has no config_groups; expected at least one"
        )
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format") not in (None, "", "dense"):
        raise ConfigError(
            f"compressed-tensors: sparsity format {sparsity['format']!r} is not supported; "
            "possible: dense"
        )
    return [
        _scheme(str(name), group, str(group.get("format") or config.get("format") or ""))
        for name, group in groups.items()
        if isinstance(group, Mapping)
    ]


def _scheme(name: str, group: Mapping[str, Any], form: str) -> Scheme:
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, Mapping):
        raise ConfigError(f"compressed-tensors: {name} does not quantize weights")
    if group.get("output_activations"):
        raise ConfigError(f"compressed-tensors: {name} quantizes outputs; possible: inputs only")
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    strategy = str(weights.get("strategy") or "tensor")
    is_symmetric = bool(weights.get("symmetric", True))
    group_size = weights.get("group_size") or 0
    if not isinstance(group_size, int):
        raise ConfigError(f"compressed-tensors: group_size of {name} is {group_size!r}")
    if strategy == "group" and group_size < 1:
        raise ConfigError(f"compressed-tensors: {name} has groups without a group_size")
    is_static = isinstance(inputs, Mapping) and not inputs.get("dynamic", False)
    return Scheme(
        format=_format(name, weights, inputs, is_static),
        bits=int(bits or 0),
        is_packed=kind == "int" and (form == "pack-quantized" or (not form and inputs is None)),
        strategy=strategy,
        group_size=group_size if strategy == "group" else 0,
        is_symmetric=is_symmetric,
        is_scattered=weights.get("actorder") in ("group", True),
        is_static=is_static,
        targets=names_in(group, "targets") or (_CLASS,),
    )


def _format(name: str, weights: Mapping[str, Any], inputs: Any, is_static: bool) -> str:
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    strategy = str(weights.get("strategy") or "tensor")
    asked = f"{kind}{bits} weights per {strategy}"
    if isinstance(inputs, Mapping):
        asked += f", {inputs.get('type', 'int')}{inputs.get('num_bits')} activations"
    possible = "int4 or int8 weights, int8 activations, fp8 weights and activations"
    refusal = ConfigError(f"compressed-tensors: {name} is {asked}; possible: {possible}")
    if kind == "float" and bits == 8:
        if strategy == "block":
            block = weights.get("block_structure")
            if block != [FP8_BLOCK, FP8_BLOCK] or inputs is None or is_static:
                raise refusal
            return "block_fp8"
        if strategy not in ("tensor", "channel"):
            raise refusal
        if inputs is None:
            return "wfp8"
        return "wfp8afp8_static" if is_static else "wfp8afp8"
    if kind != "int" or bits not in (4, 8) or strategy not in ("tensor", "channel", "group"):
        raise refusal
    is_symmetric = bool(weights.get("symmetric", True))
    if inputs is None:
        return f"wint{bits}" + ("" if is_symmetric else "_zp")
    plain = isinstance(inputs, Mapping) and inputs.get("symmetric", True)
    if strategy == "group" or not is_symmetric or not plain or inputs.get("num_bits") != 8:
        raise refusal
    return f"w{bits}a8" + ("_static" if is_static else "")


def matches(name: str, target: str) -> bool:
    """Whether a target matches a module of that name; modules are always linear ones."""
    if target.startswith("re:"):
        try:
            return re.match(target.removeprefix("re:"), name) is not None
        except re.error as error:
            raise ConfigError(
                f"compressed-tensors: {target!r:.80} is no pattern: {error}"
            ) from None
    return target in (name, _CLASS)


def find_scheme(schemes: list[Scheme], name: str) -> Scheme | None:
    """The group of a module: a group that names it takes precedence over one that names its
    class."""
    for scheme in schemes:
        if any(t != _CLASS and matches(name, t) for t in scheme.targets):
            return scheme
    return next((s for s in schemes if _CLASS in s.targets), None)
