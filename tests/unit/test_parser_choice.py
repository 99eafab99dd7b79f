"""Which parsers serve where the operator names none: those that are named as the model's type."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from fastdeploy_core.config.server import ServerConfig
from fastdeploy_core.parsers.answer import parser_for, parser_named
from fastdeploy_core.plugins.discovery import build_inventory
from fastdeploy_core.serving import launch
from tests.plugin_modules import entry


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parsers of one type of models, and another."""
    entries = [
        entry("tool_parser", "wise", "nowhere:Tools"),
        entry("tool_parser", "other", "nowhere:Other"),
        entry("reasoning_parser", "wise", "nowhere:Thinking"),
    ]
    inventory = build_inventory(entries)
    monkeypatch.setattr("fastdeploy_core.parsers.answer.discover", lambda: inventory)


def engine(model_type: str) -> Any:
    return SimpleNamespace(model=SimpleNamespace(hf_config={"model_type": model_type}))


def test_a_parser_that_is_named_as_the_models_type_is_chosen() -> None:
    assert parser_for("tool_parser", "", "wise") == "wise"
    assert parser_for("tool_parser", "", "unknown") == ""
    assert parser_for("reasoning_parser", "", "other") == ""  # of the other kind
    assert parser_for("tool_parser", "", "") == ""


def test_a_name_wins_and_none_is_a_name() -> None:
    assert parser_for("tool_parser", "other", "wise") == "other"
    assert parser_for("tool_parser", "none", "wise") == ""
    assert parser_named("tool_parser", "none") is None


def test_the_choice_is_said_once_and_only_where_there_was_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger=launch.logger.name):
        found = launch._with_parsers(ServerConfig(tool_call_parser="other"), engine("wise"))
    assert (found.reasoning_parser, found.tool_call_parser) == ("wise", "other")
    (line,) = caplog.messages
    assert line.startswith("--reasoning-parser wise") and "none" in line
    caplog.clear()
    with caplog.at_level(logging.INFO, logger=launch.logger.name):
        found = launch._with_parsers(ServerConfig(reasoning_parser="none"), engine("unknown"))
    assert (found.reasoning_parser, found.tool_call_parser) == ("", "") and not caplog.messages
