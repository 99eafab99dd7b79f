"""The reasoning and tool parsers that the operator named."""

from __future__ import annotations

from typing import Any

from fastdeploy_core.config.server import ServerConfig
from fastdeploy_core.errors import ConfigError, PluginNotFound
from fastdeploy_core.plugins.drivers import find, lookup_each


def check_parsers(config: ServerConfig) -> None:
    """ConfigError if no plugin provides a named parser; cheap, before a model is loaded."""
    for kind, name in _names(config).items():
        try:
            if name:
                find(kind, name)
        except PluginNotFound as error:
            raise ConfigError(str(error)) from error


def load_parsers(config: ServerConfig) -> tuple[Any, Any]:
    """The reasoning parser and the tool parser; None for one that is not named. The first call
    may take half a second."""
    found = lookup_each(_names(config))
    return found["reasoning_parser"], found["tool_parser"]


def _names(config: ServerConfig) -> dict[str, str]:
    return {"reasoning_parser": config.reasoning_parser, "tool_parser": config.tool_call_parser}
