"""Which plugins serve this model: asked once, by whoever starts an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdeploy_core.models.shapes import read_shapes
from fastdeploy_core.plugins.resolve import resolve

if TYPE_CHECKING:
    from fastdeploy_core.config import EngineConfig
    from fastdeploy_core.plugins.resolve import ResolvedPlugins


def resolve_plugins(config: EngineConfig) -> ResolvedPlugins:
    """Ask the installed plugins who serves the layers that this model has."""
    shapes = read_shapes(config.model.hf_config, config.parallel.tensor_parallel_size)
    return resolve(
        config,
        attention=(shapes.attention,),
        moe=() if shapes.moe is None else (shapes.moe,),
    )
