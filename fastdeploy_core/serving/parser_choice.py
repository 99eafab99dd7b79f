"""The reasoning and tool parsers that the operator named."""

from __future__ import annotations

from typing import Any

from fastdeploy_core import plugins
from fastdeploy_core.config.server import ServerConfig
from fastdeploy_core.errors import ConfigError, PluginNotFound


def check_parsers(config: ServerConfig) -> None:
    """ConfigError if no plugin provides a named parser; cheap, before a model is loaded."""
    parser_named("reasoning_parser", config.reasoning_parser)
    parser_named("tool_parser", config.tool_call_parser)


def parser_named(kind: str, name: str) -> Any:
    """The parser; None for an empty name."""
    if not name:
        return None
    try:
        return plugins.lookup(kind, name)
    except PluginNotFound as error:
        raise ConfigError(str(error)) from error
