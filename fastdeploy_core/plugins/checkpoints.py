"""Where a model is: which driver reads a path that is no folder with config.json and
*.safetensors, and which fetches a model that is named instead.

A checkpoint format is found by the suffix of its files, which is its entry point's name: no other
driver is imported, and one that is missing is known by the file alone. FD_MODEL_SOURCE names what
fetches. Both are asked once, before anything else; what they answer is a local path.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fastdeploy_core import envs
from fastdeploy_core.config.model import FoundModel, find_folder
from fastdeploy_core.errors import (
    ConfigError,
    FastDeployError,
    PluginError,
    PluginLoadError,
    PluginNotFound,
)

from .discovery import Inventory, PluginEntry, discover
from .drivers import find, load
from .known import providers
from .manager import call_with_limit
from .preflight_child import describe

if TYPE_CHECKING:
    from fastdeploy_core.contracts.small import CheckpointFormat, ModelSource, PoolingLM

logger = logging.getLogger(__name__)

_KIND: Final = "checkpoint_format"
# Models that are made to be pooled; others are where --runner or --convert says so.
_POOLED: Final = re.compile(r"(Classification|RewardModel)$")
_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def find_model(
    path: Path, asked: Mapping[str, Any], inventory: Inventory | None = None
) -> FoundModel:
    """The model that a path means, in a format of the core or of an installed plugin.

    `asked`: the overrides of config.model.read_model_config. PluginNotFound names the distribution
    to install; what a driver says of a damaged file is passed on.
    """
    found = _in_its_format(path, asked, inventory)
    return replace(found, adapt=partial(_adapted, found, asked, inventory))


def _adapted(
    found: FoundModel,
    asked: Mapping[str, Any],
    inventory: Inventory | None,
    hf_config: Mapping[str, Any],
) -> Mapping[str, Any]:
    """config.json for the family PoolingLM where prompts are pooled, else as it is."""
    runner, convert = asked.get("runner", "auto"), asked.get("convert", "auto")
    own = hf_config["architectures"][0]
    is_for_it = (found.path / "modules.json").is_file() or _POOLED.search(own)
    generates = convert == "none" or (convert == "auto" and not is_for_it)
    if runner == "generate" or (runner == "auto" and generates):
        if convert not in ("auto", "none") or asked.get("pooler_config"):
            raise ConfigError("--convert and --pooler-config are for --runner pooling alone")
        return hf_config
    family: type[PoolingLM] = _load(find("model", "PoolingLM", inventory))
    return family.adapt(found.path, found.tokenizer_path, hf_config, asked)


def _in_its_format(path: Path, asked: Mapping[str, Any], inventory: Inventory | None) -> FoundModel:
    load_format = str(asked.get("load_format") or "auto")
    revision, where = str(asked.get("revision") or ""), (asked.get("download_dir"), inventory)
    given, path = path, _fetched(path, revision, *where)
    if asked.get("tokenizer_path"):
        tokenizer = Path(asked["tokenizer_path"]).expanduser()
        its = revision if tokenizer == given else ""  # a revision belongs to one repository
        asked = {**asked, "tokenizer_path": _fetched(tokenizer, its, *where)}
    has_weights = load_format != "auto" or any(path.glob("*.safetensors"))
    if has_weights and (path / "config.json").is_file():
        return find_folder(path, asked)  # before the plugins' metadata is read: it takes 20 ms
    inventory = discover() if inventory is None else inventory
    possible = {e.name for e in inventory.of(_KIND, usable=False)} | set(providers(_KIND))
    name = _format_of(path, possible)
    if not name and path.is_file():
        raise ConfigError(
            f"model {str(path)!r} is a file; expected a folder with config.json, tokenizer.json "
            f"and *.safetensors, or a file of one of these formats: {', '.join(sorted(possible))}"
        )
    if not name:
        return find_folder(path, asked)
    if load_format == "safetensors":
        raise ConfigError(
            f"{path} is a {name} checkpoint and --load-format says safetensors; leave the flag "
            "out, or pass a folder with *.safetensors"
        )
    try:
        entry = find(_KIND, name, inventory)
    except PluginNotFound as error:
        raise PluginNotFound(f"{path} is a {name} checkpoint: {error}") from None
    driver: type[CheckpointFormat] = _load(entry)
    try:
        return _read(name, driver(path), asked)
    except FastDeployError:
        raise
    except Exception as error:
        raise PluginError(
            f"checkpoint format {name!r} of {entry.origin} failed on {path}: {describe(error)}; "
            "see: fastdeploy plugins doctor"
        ) from error


def _fetched(path: Path, revision: str, folder: str | None, inventory: Inventory | None) -> Path:
    """The path itself, unless it can only be a name and something installed fetches those."""
    if path.exists() or not _NAME.fullmatch(str(path)):
        if revision:
            logger.info("%s is a path: --revision %s chooses nothing", path, revision)
        return path
    inventory = discover() if inventory is None else inventory
    if not inventory.of("model_source", usable=False):
        return path  # who looks there says that it is no folder, and what to install
    return fetch(str(path), revision, folder, inventory)


def fetch(
    model: str, revision: str, folder: str | None, inventory: Inventory | None = None
) -> Path:
    """The local folder of a model that is named, from the source that FD_MODEL_SOURCE names.

    `revision`: branch, tag or commit, empty for the default. `folder`: where downloads are kept
    instead of FD_MODEL_CACHE.
    """
    source = "modelscope" if envs.VLLM_USE_MODELSCOPE else envs.FD_MODEL_SOURCE
    entry = find("model_source", source, inventory)
    driver: type[ModelSource] = _load(entry)
    kept = folder or envs.FD_MODEL_CACHE
    try:
        return driver().fetch(model, revision, Path(kept).expanduser() if kept else None)
    except FastDeployError:
        raise
    except Exception as error:
        raise PluginError(
            f"model source {source!r} of {entry.origin} failed on {model}: {describe(error)}; "
            "see: fastdeploy plugins doctor"
        ) from error


def _load(entry: PluginEntry) -> Any:
    """Import the driver in this process, with a time limit. A child process that imports it first
    (preflight.py) would make every start slower, and could save no model: this one needs it."""
    limit_s = envs.read("FD_PLUGIN_DRIVER_TIMEOUT_S")
    try:
        return call_with_limit(lambda: load(entry, preflight=False), limit_s)
    except TimeoutError:
        raise PluginLoadError(
            f"{entry.kind.replace('_', ' ')} {entry.name!r} of {entry.origin} failed to load: its "
            f"import did not finish within {limit_s:g} s; see: fastdeploy plugins doctor"
        ) from None


def _format_of(path: Path, possible: set[str]) -> str:
    """The one of the possible formats whose files are there; empty: none."""
    if path.is_dir():
        suffixes = {_suffix(file) for file in path.glob("*")}
    else:
        suffixes = {_suffix(path)} if path.is_file() else set()
    found = sorted(suffixes & possible)
    if len(found) > 1:
        raise ConfigError(
            f"{path} holds checkpoints in several formats: {', '.join(found)}; pass the path of a "
            "file, or a folder with one of them"
        )
    return found[0] if found else ""


def _suffix(file: Path) -> str:
    return file.suffix.lower().removeprefix(".")


def _read(name: str, checkpoint: CheckpointFormat, asked: Mapping[str, Any]) -> FoundModel:
    hf_config = checkpoint.config(str(asked.get("quantization") or ""))
    tokenizer = asked.get("tokenizer_path")
    if tokenizer:
        tokenizer_path = Path(tokenizer).expanduser()
    else:
        tokenizer_path = checkpoint.tokenizer_folder(_cache())
    return FoundModel(
        checkpoint.path, tokenizer_path, hf_config, checkpoint.generation_config(), name
    )


def _cache() -> Path:
    try:
        return Path(envs.FD_CACHE_DIR).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"FD_CACHE_DIR {envs.FD_CACHE_DIR!r} leads nowhere: this user has no home; set it to a "
            "folder"
        ) from None
