"""An adapter's folder, as PEFT writes it: adapter_config.json and adapter_model.safetensors.

Whatever would change the model otherwise than by B(A x) is refused by its key: an adapter whose
half is left out answers plausibly and wrongly. Nothing that can carry code is read.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fastdeploy_core.config import EngineConfig
from fastdeploy_core.errors import InvalidRequest, WeightError
from fastdeploy_core.loading.weights import SafetensorsFile
from fastdeploy_core.types import SequenceExtras

CONFIG_NAME: Final = "adapter_config.json"
WEIGHTS_NAME: Final = "adapter_model.safetensors"
MAX_CONFIG_BYTES: Final = 1_000_000
MAX_NAME_CHARS: Final = 256
_PREFIX: Final = "base_model.model."
_KEY: Final = re.compile(r"(?P<module>.+)\.lora_(?P<half>A|B)\.weight")
# Routed experts: one by one, or all of a block in one parameter. PEFT wraps parameters of one
# module into each other.
_EXPERTS: Final = re.compile(r"(?P<block>.*\.experts)(?P<rest>\..+)?")
_WRAPPED: Final = ".base_layer"
GATE_UP, DOWN = "gate_up_proj", "down_proj"

# Keys of adapter_config.json that say how it was trained or where it belongs, or are used here.
_KNOWN: Final = frozenset(
    {
        *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path"),
        *("revision", "inference_mode", "r", "target_modules", "exclude_modules", "lora_alpha"),
        *("lora_dropout", "bias", "use_rslora", "init_lora_weights", "layers_to_transform"),
        *("layers_pattern", "rank_pattern", "alpha_pattern", "megatron_core", "loftq_config"),
        *("eva_config", "runtime_config", "qalora_group_size", "ensure_weight_tying"),
        *("lora_ga_config", "corda_config", "target_parameters"),
    }
)
_REASONS: Final = {
    "use_dora": "DoRA scales the whole weight, not only what is added to it",
    "modules_to_save": "whole layers are replaced, which would need a copy of them per adapter",
    "fan_in_fan_out": "its matrices are stored transposed",
    "lora_bias": "a bias is added to what the adapter adds",
    "layer_replication": "it runs layers of the model several times",
    "alora_invocation_tokens": "it works on a part of the tokens only (aLoRA)",
    "trainable_token_indices": "it replaces embeddings of tokens",
}
# Ways to begin that change the base's weights, too, unless PEFT converted the adapter.
_CHANGE_BASE: Final = ("pissa", "olora", "corda", "lora_ga")


@dataclass(frozen=True, slots=True)
class AdapterModule:
    """What an adapter adds to one linear layer, or to one parameter of all experts of a block."""

    rank: int
    scale: float
    in_features: int
    out_features: int
    parameter: str = ""  # of all experts; empty: a linear layer, or one expert's
    num_experts: int = 0


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """A folder that was read and checked, but for its numbers."""

    path: Path
    digest: str  # of both files
    modules: Mapping[str, AdapterModule]  # by the module's path in the base model

    @property
    def rank(self) -> int:
        """The largest."""
        return max(module.rank for module in self.modules.values())

    @property
    def changes_experts(self) -> bool:
        """Whether routed experts are among the modules."""
        return any(_EXPERTS.fullmatch(name) for name in self.modules)

    def weights(self, device: Any) -> dict[tuple[str, str], Any]:
        """Stored tensors by module and half: "A" [rank, inputs] or "B" [outputs, rank]. Of all
        experts, "A" [experts * rank, inputs], and "B" [outputs, rank * experts]."""
        file = SafetensorsFile(self.path / WEIGHTS_NAME, device)
        return {_split(self.path, name): tensor for name, tensor in file.tensors()}


def adapter_extras(name: str, path: str, config: EngineConfig) -> SequenceExtras:
    """What a request brings for the adapter in this folder. InvalidRequest: it cannot be used, or
    adapters are not served."""
    if config.lora is None:
        raise InvalidRequest("this engine serves no adapters; start it with --enable-lora")
    if not name or len(name) > MAX_NAME_CHARS or "@" in name or not name.isprintable():
        raise InvalidRequest(
            f"an adapter's name has 1 to {MAX_NAME_CHARS} characters and no @; got {name!r:.80}"
        )
    if name in config.model.served_names or name == config.model.path.name:
        raise InvalidRequest(f"{name!r:.80} is the name of the model itself; choose another one")
    found = read_folder(Path(path).expanduser())
    if found.rank > config.lora.max_lora_rank:
        raise InvalidRequest(
            f"the adapter in {path} has rank {found.rank}; possible: up to --max-lora-rank "
            f"{config.lora.max_lora_rank}"
        )
    return SequenceExtras(adapter=f"{name}@{found.digest}", adapter_path=str(found.path))


def read_folder(path: Path) -> AdapterFolder:
    """The adapter in a folder. InvalidRequest says what is wrong with it."""
    try:
        path = path.resolve(strict=True)
        stats = [(path / name).stat() for name in (CONFIG_NAME, WEIGHTS_NAME)]
    except OSError as error:
        raise InvalidRequest(_missing(path, error)) from None
    return _read(path, *((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in stats))


def _missing(path: Path, error: OSError) -> str:
    found = sorted(p.name for p in path.glob("adapter_model.*")) if path.is_dir() else []
    hint = "" if not found else f"; there is {', '.join(found)}, of which only safetensors are read"
    return (
        f"no adapter in {path}: {error.strerror}; expected a folder with {CONFIG_NAME} and "
        f"{WEIGHTS_NAME}, as PEFT writes it{hint}"
    )


@functools.lru_cache(256)
def _read(path: Path, *_: tuple[int, int, int]) -> AdapterFolder:
    """Read once for the times, sizes and inodes of its two files."""
    digest = hashlib.sha256()
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        with (path / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    config = _read_config(path / CONFIG_NAME)
    try:
        stored = SafetensorsFile(path / WEIGHTS_NAME, None)  # type: ignore[arg-type]
    except WeightError as error:
        raise InvalidRequest(str(error)) from None
    halves: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, tensor in stored.tensors():
        module, half = _split(path, name)
        if half in halves.setdefault(module, {}) or len(tensor.shape) != 2:
            raise InvalidRequest(f"{path}: {name} comes twice, or is no matrix: {tensor.shape}")
        halves[module][half] = tensor.shape
    if not halves:
        raise InvalidRequest(f"the adapter in {path} changes no layer")
    modules = {name: _module(path, name, halves, config) for name in halves}
    return AdapterFolder(path, digest.hexdigest()[:16], modules)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ValueError("it is too large")
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is no object")
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path} is not an adapter's configuration: {error}") from None
    if config.get("peft_type") != "LORA":
        raise InvalidRequest(
            f"{path} has peft_type {config.get('peft_type')!r:.40}; possible: LORA"
        )
    for key, value in config.items():
        if value and key not in _KNOWN:
            reason = _REASONS.get(key, "this version does not know it")
            raise InvalidRequest(f"{path} has {key}, which is not served: {reason}")
    if config.get("bias", "none") != "none":
        raise InvalidRequest(
            f"{path} has bias {config['bias']!r:.40}, which is not served: biases of the base are "
            'replaced; train with bias "none"'
        )
    begin = str(config.get("init_lora_weights", "")).lower()
    if begin.startswith(_CHANGE_BASE):
        raise InvalidRequest(
            f"{path} has init_lora_weights {begin!r:.40}, which changes the base's weights, too; "
            "save it with path_initial_model_for_weight_conversion, which makes it a plain adapter"
        )
    return config


def _split(path: Path, name: str) -> tuple[str, str]:
    """The module's path in the base model, and "A" or "B"."""
    found = _KEY.fullmatch(name.removeprefix(_PREFIX))
    if found is None:
        raise InvalidRequest(
            f"{path} has a tensor {name!r:.200}, which is not served; possible: "
            f"{_PREFIX}MODULE.lora_A.weight and .lora_B.weight"
        )
    return found["module"], found["half"]


def stacked_block(name: str) -> str:
    """Of a module whose parameters hold all experts of a block: its name without what PEFT wraps
    around it; else empty."""
    while name.endswith(_WRAPPED):
        name = name.removesuffix(_WRAPPED)
    found = _EXPERTS.fullmatch(name)
    return name if found is not None and found["rest"] is None else ""


def _module(
    path: Path,
    name: str,
    all_halves: Mapping[str, Mapping[str, tuple[int, ...]]],
    config: Mapping[str, Any],
) -> AdapterModule:
    a, b = (all_halves[name].get(half) for half in ("A", "B"))
    block = stacked_block(name)
    parameter = _parameter(path, name, all_halves, config) if block else ""
    full_name = f"{block}.{parameter}" if block else name
    rank = _of(path, full_name, config, "rank_pattern", "r")
    count = a[0] // max(1, int(rank)) if block and a is not None else 0
    rows = rank * (count or 1)
    if a is None or b is None or a[0] != rows or b[1] != rows:
        raise InvalidRequest(
            f"{path}: {name} has lora_A {a} and lora_B {b}; {CONFIG_NAME} says rank {rank:g}, so "
            "that they must be [rank, inputs] and [outputs, rank]"
            + (", with the rank of all experts" if block else "")
        )
    alpha = _of(path, full_name, config, "alpha_pattern", "lora_alpha")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return AdapterModule(int(rank), scale, a[1], b[0], parameter, count)


def _parameter(
    path: Path,
    name: str,
    all_halves: Mapping[str, Mapping[str, tuple[int, ...]]],
    config: Mapping[str, Any],
) -> str:
    """Which parameter of all experts a module of PEFT is for. One that is wrapped by another one's
    module does not say; its sizes do: down's inputs are half of gate_up's outputs."""
    block = stacked_block(name)
    given = [str(target) for target in config.get("target_parameters") or []]
    found = {
        parameter
        for parameter in (GATE_UP, DOWN)
        if any(f".{block}.{parameter}".endswith(f".{target}") for target in given)
    }
    modules = [other for other in all_halves if stacked_block(other) == block]
    if len(found) == 1 and len(modules) == 1:
        return found.pop()
    if len(found) == 2 and len(modules) == 2:
        other = next(module for module in modules if module != name)
        try:
            own, wrapped = (
                (all_halves[module]["A"][1], all_halves[module]["B"][0]) for module in (name, other)
            )
        except KeyError:
            own = wrapped = (0, 1)
        if own == (wrapped[1], 2 * wrapped[0]):
            return GATE_UP
        if wrapped == (own[1], 2 * own[0]):
            return DOWN
    raise InvalidRequest(
        f"{path}: {name} is for all experts of a block; {CONFIG_NAME} has target_parameters "
        f"{given}, and the sizes of {', '.join(modules)} do not tell which one it is; possible: "
        f"{block}.{GATE_UP} and .{DOWN}"
    )


def _of(path: Path, name: str, config: Mapping[str, Any], patterns: str, default: str) -> float:
    """A number of one module: that of the first pattern which fits its name, as PEFT reads them."""
    value = config.get(default)
    given = config.get(patterns) or {}
    try:
        for pattern, own in given.items():
            if re.match(rf"(.*\.)?({pattern})$", name):
                value = own
                break
    except (AttributeError, re.error) as error:
        raise InvalidRequest(f"{path / CONFIG_NAME} has a wrong {patterns}: {error}") from None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    number = float(value) if is_number and value is not None else math.nan
    if not (math.isfinite(number) and number > 0):
        raise InvalidRequest(
            f"{path / CONFIG_NAME} has {default} {value!r:.40} for {name}; expected a number above "
            "0"
        )
    return number
