"""Which plugins serve a model; resolved once, by the process that starts an engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fastdeploy_core.config.model import read_json
from fastdeploy_core.errors import ConfigError
from fastdeploy_core.models.shapes import read_shapes
from fastdeploy_core.plugins.resolve import resolve

if TYPE_CHECKING:
    from fastdeploy_core.config import EngineConfig
    from fastdeploy_core.contracts.model import ModelShapes
    from fastdeploy_core.plugins.resolve import ResolvedPlugins


def resolve_plugins(config: EngineConfig) -> ResolvedPlugins:
    """Ask the installed plugins who serves the layers of this model and of its draft model."""
    shapes = [read_shapes(config.model.hf_config, config.parallel.tensor_parallel_size)]
    shapes += _draft_shapes(config)
    return resolve(
        config,
        layers=[layer for s in shapes for layer in s.layers],
        moe=[s.moe for s in shapes if s.moe is not None],
    )


def _draft_shapes(config: EngineConfig) -> list[ModelShapes]:
    """The layer shapes of a draft model that --speculative-config names, if it is a whole model.
    The speculative method reports errors of that model."""
    folder = config.speculative.options.get("model") if config.speculative is not None else None
    if not isinstance(folder, str) or not (Path(folder) / "config.json").is_file():
        return []
    try:
        draft = read_json(Path(folder) / "config.json")
        return [read_shapes(draft, config.parallel.tensor_parallel_size)]
    except ConfigError:
        return []
