"""Environment variables: one row each, read late, bad values refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fastdeploy_core import envs
from fastdeploy_core.errors import ConfigError

CORE = Path(envs.__file__).parent


def test_defaults_when_nothing_is_set():
    assert envs.read("FD_PLUGINS", {}) is None
    assert envs.read("FD_PLUGINS_DISABLED", {}) == ()
    assert envs.read("FD_TRACE_PLUGINS", {}) is False
    assert envs.read("FD_LOG_LEVEL", {}) == "info"


def test_empty_list_of_plugins_is_not_the_same_as_none():
    assert envs.read("FD_PLUGINS", {"FD_PLUGINS": ""}) == ()
    assert envs.read("FD_PLUGINS", {"FD_PLUGINS": " fd-a, fd-b ,"}) == ("fd-a", "fd-b")
    assert envs.read("FD_PLUGINS_DISABLED", {"FD_PLUGINS_DISABLED": "  "}) == ()


@pytest.mark.parametrize("text", ["1", "true", "YES", "on"])
def test_yes_in_any_spelling(text):
    assert envs.read("FD_TRACE_PLUGINS", {"FD_TRACE_PLUGINS": text}) is True


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("FD_TRACE_PLUGINS", "maybe"),
        ("FD_LOG_LEVEL", "loud"),
        ("FD_PLUGIN_HOOK_TIMEOUT_S", "ten"),
        ("FD_PLUGIN_HOOK_TIMEOUT_S", "-1"),
        ("FD_PLUGIN_HOOK_TIMEOUT_S", "nan"),
        ("FD_PLUGIN_DRIVER_TIMEOUT_S", "inf"),
    ],
)
def test_bad_value_raises_and_names_variable_and_value(name, text):
    with pytest.raises(ConfigError, match=name) as caught:
        envs.read(name, {name: text})
    assert text in str(caught.value)


def test_attribute_reads_the_environment_now(monkeypatch):
    monkeypatch.setenv("FD_LOG_LEVEL", "debug")
    assert envs.FD_LOG_LEVEL == "debug"
    monkeypatch.delenv("FD_LOG_LEVEL")
    assert envs.FD_LOG_LEVEL == "info"
    with pytest.raises(AttributeError):
        _ = envs.FD_NO_SUCH_THING


def test_every_row_is_documented_and_its_default_is_its_own():
    for name, variable in envs.VARIABLES.items():
        assert name == variable.name
        assert name.startswith(("FD_", "VLLM_"))
        assert len(variable.doc) > 20 and variable.type


def test_no_other_file_reads_a_setting_from_the_environment():
    """Whoever needs a variable adds a row; then the documentation is complete."""
    pattern = re.compile(r"(environ(\.get)?[\[(]|getenv\()\s*[\"']FD_")
    found = [
        str(path.relative_to(CORE))
        for path in CORE.rglob("*.py")
        if path.name != "envs.py" and pattern.search(path.read_text("utf-8"))
    ]
    assert not found, f"use fastdeploy_core.envs in {found}"
