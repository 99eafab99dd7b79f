"""Which steps are captured as graphs: FastDeploy's and vLLM's spellings of the arguments,
and their meaning here. No other file of the core contains another project's spelling that names a
vendor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastdeploy_core.errors import ConfigError

from .argument_table import Argument, group, row
from .engine import GraphConfig

MAX_SIZE = 65536
_COMPILER = "models are run as they are written, no compiler rewrites them"
_PREFILL = (
    "decode steps and steps with prompts are both captured, each as one graph; only the batch "
    "sizes of decode steps can be chosen"
)
_ALWAYS = (
    "captured graphs share one memory, cover the whole model, and are warmed up as they need it"
)

GRAPH_ROWS: tuple[Argument, ...] = group(
    "graph capture",
    "engine",
    row("enforce_eager", "bool", False, "run every step operation by operation, record none"),
    row(
        "graph_capture_sizes",
        "ints",
        None,
        "batch sizes for which decode steps are captured; smaller batches are padded; default: 1, "
        "2, 4, then steps of 8, 16 and 32 up to --max-num-seqs",
        aliases=("cudagraph_capture_sizes",),
    ),
    row(
        "max_graph_capture_size",
        "int",
        None,
        "largest batch size for which decode steps are captured; default: --max-num-seqs, at most "
        "512",
        aliases=("max_cudagraph_capture_size",),
        low=1,
        high=MAX_SIZE,
    ),
    row(
        "cuda_graph_sizes",
        "ints",
        None,
        "as vLLM had it: one number is --max-graph-capture-size, several are --graph-capture-sizes",
    ),
    row(
        "graph_optimization_config",
        "json",
        None,
        "FastDeploy's section: use_cudagraph and cudagraph_capture_sizes",
    ),
    row(
        "compilation_config",
        "json",
        None,
        "vLLM's section: cudagraph_mode, cudagraph_capture_sizes, max_cudagraph_capture_size",
        short=("-cc",),
    ),
)

# Options of the two sections that change nothing here: the values they may have, and why only
# these.
_FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "graph_opt_level": ((0,), _COMPILER),
    "sot_warmup_sizes": (([],), _COMPILER),
    "cudagraph_splitting_ops": (([],), _COMPILER),
    "splitting_ops": (([],), _COMPILER),
    "level": ((0,), _COMPILER),
    "mode": ((0, "NONE"), _COMPILER),
    "backend": (("", "eager"), _COMPILER),
    "use_inductor": ((False,), _COMPILER),
    "cudagraph_only_prefill": ((False,), _PREFILL),
    "cudagraph_capture_sizes_prefill": (([],), _PREFILL),
    "full_cuda_graph": ((True,), _ALWAYS),
    "use_unique_memory_pool": ((True,), _ALWAYS),
    "cudagraph_num_of_warmups": ((1,), _ALWAYS),
    "cudagraph_copy_inputs": ((False,), _ALWAYS),
}
_MODES = {"NONE": False, "FULL": True, "FULL_DECODE_ONLY": True}


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
        elif key == "cudagraph_mode" and str(value).upper() in _MODES:
            values["enabled"] = _MODES[str(value).upper()]
        elif key == "cudagraph_capture_sizes":
            values["sizes"] = _sizes(value) if value is not None else None
        elif key == "max_cudagraph_capture_size":
            values["max_size"] = _sizes([value])[0]
        elif key in _FIXED and value in _FIXED[key][0]:
            continue
        else:
            raise ConfigError(f"{flag}: {key} = {value!r:.60} is not possible: {_why(key)}")
    return GraphConfig(**values)


def _why(key: str) -> str:
    if key == "cudagraph_mode":
        return f"{_PREFILL}; possible: {', '.join(_MODES)}"
    if key in _FIXED:
        allowed, reason = _FIXED[key]
        return f"{reason}; possible: {', '.join(map(repr, allowed))}"
    options = ["use_cudagraph", "cudagraph_capture_sizes", "cudagraph_mode"]
    return f"unknown, or an option of a compiler that is not used; possible: {', '.join(options)}"


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
