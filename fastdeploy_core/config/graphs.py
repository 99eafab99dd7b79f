"""Which steps are captured as graphs: what FastDeploy's and vLLM's arguments mean here. No other
module of the core contains another project's spelling that names a vendor."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fastdeploy_core.errors import ConfigError

from .engine import GraphConfig

logger = logging.getLogger(__name__)

MAX_SIZE = 65536
_TABLE: Final = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
# Options of the two sections that change no answer and nothing here, and why.
_TAKEN = {name: group["reason"] for group in _TABLE.values() for name in group["names"]}
_CAPTURING = ("FULL", "FULL_DECODE_ONLY", "PIECEWISE", "FULL_AND_PIECEWISE")


def read_graphs(v: Mapping[str, Any]) -> GraphConfig:
    """From all arguments with their defaults; ConfigError for contradictions and what cannot be."""
    wanted: list[tuple[str, GraphConfig]] = []
    if v["enforce_eager"]:
        wanted.append(("--enforce-eager", GraphConfig(enabled=False)))
    for name in ("graph_capture_sizes", "cuda_graph_sizes"):
        if v[name] is not None:
            flag, sizes = "--" + name.replace("_", "-"), _sizes(v[name])
            if name == "cuda_graph_sizes" and len(sizes) == 1:
                wanted.append((flag, GraphConfig(max_size=sizes[0])))
            else:
                wanted.append((flag, GraphConfig(sizes=sizes)))
    if v["max_graph_capture_size"] is not None:
        most = GraphConfig(max_size=v["max_graph_capture_size"])
        wanted.append(("--max-graph-capture-size", most))
    for name in ("graph_optimization_config", "compilation_config"):
        if v[name] is not None:
            flag = "--" + name.replace("_", "-")
            wanted.append((flag, _section(flag, v[name])))
    return _combine(wanted)


def _combine(wanted: list[tuple[str, GraphConfig]]) -> GraphConfig:
    """The combined configuration; ConfigError if two arguments contradict each other."""
    empty = GraphConfig()
    said: dict[str, tuple[str, Any]] = {}
    for flag, config in wanted:
        for name in ("enabled", "sizes", "max_size"):
            value = getattr(config, name)
            if value == getattr(empty, name):
                continue
            if name in said and said[name][1] != value:
                raise ConfigError(
                    f"{said[name][0]} and {flag} say different things about captured graphs; give "
                    "one"
                )
            said[name] = (flag, value)
    if "enabled" in said and len(said) > 1:
        other = next(flag for name, (flag, _) in said.items() if name != "enabled")
        raise ConfigError(
            f"{said['enabled'][0]} captures nothing, {other} says what to capture; give one of them"
        )
    return GraphConfig(**{name: value for name, (_, value) in said.items()})


def _section(flag: str, given: Any) -> GraphConfig:
    if not isinstance(given, Mapping):
        given = {"level": given}  # vLLM also takes a number
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key == "use_cudagraph" and isinstance(value, bool):
            values["enabled"] = value
        elif key == "cudagraph_mode" and str(value).upper() in ("NONE", *_CAPTURING):
            values["enabled"] = str(value).upper() != "NONE"
        elif key == "cudagraph_capture_sizes":
            values["sizes"] = _sizes(value) if value is not None else None
        elif key == "max_cudagraph_capture_size":
            values["max_size"] = _sizes([value])[0]
        elif key in _TAKEN:
            logger.warning("%s: %s has no effect: %s", flag, key, _TAKEN[key])
        else:
            known = (
                f"use_cudagraph, cudagraph_capture_sizes, cudagraph_mode (NONE, {_CAPTURING[0]})"
            )
            raise ConfigError(f"{flag}: {key} = {value!r:.60} is unknown; possible: {known}")
    return GraphConfig(**values)


def _sizes(values: Any) -> tuple[int, ...]:
    """Ascending batch sizes."""
    values = values if isinstance(values, list | tuple) else [values]
    found: set[int] = set()
    for value in values:
        text = str(value).strip()
        if isinstance(value, bool) or not text.isdecimal() or not 1 <= int(text) <= MAX_SIZE:
            raise ConfigError(
                f"batch sizes of captured graphs are numbers from 1 to {MAX_SIZE}; "
                f"got {value!r:.40}"
            )
        found.add(int(text))
    if not found:
        raise ConfigError(
            "no batch size is given for captured graphs; --enforce-eager captures none"
        )
    return tuple(sorted(found))
