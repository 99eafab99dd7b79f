"""known_plugins.json: what to install for each thing that this repository's distributions add."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

from fastdeploy_core.contracts.base import KINDS

ROOT = Path(__file__).resolve().parents[2]
KNOWN = ROOT / "fastdeploy_core" / "plugins" / "known_plugins.json"
KIND_OF_GROUP = {kind.group: kind.name for kind in KINDS.values()}
NEVER_ASKED_FOR = {"kernels"}  # a device's table, found by the device's name


def test_every_architecture_stands_in_the_table_of_models() -> None:
    folders = [ROOT, *(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))]
    there = {
        name
        for folder in folders
        for name in tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
        .get("entry-points", {})
        .get("fastdeploy.models", {})
    }
    page = (ROOT / "docs" / "reference" / "models.md").read_text("utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    named = {
        n
        for row in rows
        for n in re.findall(
            r"`(\w+For(?:CausalLM|ConditionalGeneration)|PoolingLM)`", row.split("|")[1]
        )
    }
    assert named == there


def test_every_driver_and_command_names_the_distribution_to_install() -> None:
    """No more and no fewer, so that nobody is told to install what is not there."""
    there: dict[str, dict[str, str]] = {}
    for path in ROOT.glob("plugins/*/pyproject.toml"):
        project = tomllib.loads(path.read_text("utf-8"))["project"]
        for group, entries in project.get("entry-points", {}).items():
            kind = KIND_OF_GROUP.get(group, "")
            if kind and kind not in NEVER_ASKED_FOR:
                there.setdefault(kind, {}).update(dict.fromkeys(entries, project["name"]))
    known = json.loads(KNOWN.read_text("utf-8"))
    summaries = known.pop("command summary")
    del known["route"]  # routes are no entry points; the plugin's own test compares them
    assert known == there
    assert set(summaries) == set(known["command"])
