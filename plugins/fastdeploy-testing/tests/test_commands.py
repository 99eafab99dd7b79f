"""`fastdeploy plugins new` and `fastdeploy plugins check`: what they write and what they run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

import fastdeploy_testing.conformance as kit
from fastdeploy_core.cli.main import main
from fastdeploy_core.contracts.base import CONTRACT, DISTRIBUTION, KINDS
from fastdeploy_core.contracts.ops import OPERATIONS
from fastdeploy_core.errors import ConfigError, PluginNotFound
from fastdeploy_core.plugins.discovery import HOOKS, PluginEntry
from fastdeploy_testing import check
from fastdeploy_testing.check import device_of, kind_of, suites
from fastdeploy_testing.generate import sampled_tokens
from fastdeploy_testing.new import TEMPLATE_FOLDER, create, driver_name


def entry(kind: str, name: str, target: str, distribution: str = "fd-test") -> PluginEntry:
    group = "fastdeploy.hooks" if kind == HOOKS else KINDS[kind].group
    return PluginEntry(kind, name, group, target, distribution, "1.0")


def core_entry(kind: str, name: str, target: str) -> PluginEntry:
    return entry(kind, name, target, DISTRIBUTION)


def test_new_fills_in_every_name(tmp_path):
    folder = create("fd-acme7", tmp_path)
    files = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert {"pyproject.toml", "README.md", "src/fd_acme7/device.py", "src/fd_acme7/py.typed",
            "tests/test_conformance.py"} <= files  # fmt: skip
    text = "".join(p.read_text() for p in folder.rglob("*") if p.is_file())
    assert "mychip" not in text.lower() and "__CORE_REQUIREMENT__" not in text
    assert "fastdeploy-core>=0.1,<0.2" in text and "class Acme7Device" in text
    assert f"contract = {CONTRACT}" in text, "a new plugin is written for today's contract"


def test_new_drafter_has_its_distributions_name(tmp_path):
    folder = create("fd-spec-acme", tmp_path, "drafter")
    files = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert {"src/fd_spec_acme/drafter.py", "src/fd_spec_acme/hooks.py"} <= files
    text = "".join(p.read_text() for p in folder.rglob("*") if p.is_file())
    assert "mydraft" not in text.lower() and "class AcmeDrafter" in text
    assert f"contract = {CONTRACT}" in text
    assert 'acme = "fd_spec_acme.drafter:AcmeDrafter"' in text and 'name = "fd-spec-acme"' in text


def test_new_quantizer_has_its_distributions_name(tmp_path):
    folder = create("fd-quant-acme", tmp_path, "quantizer")
    text = "".join(p.read_text() for p in folder.rglob("*") if p.is_file())
    assert "myformat" not in text.lower() and "class AcmeQuantizer" in text
    assert 'acme = "fd_quant_acme.quantizer:AcmeQuantizer"' in text
    assert f"contract = {CONTRACT}" in text


@pytest.mark.parametrize("name", ["mychip", "fd-", "fd-My", "fd-a b", "../fd-x", "fd-x/y", "fd_x"])
def test_new_refuses_odd_names(name):
    with pytest.raises(ConfigError, match="fd-mychip"):
        driver_name(name)


def test_new_does_not_touch_what_exists(tmp_path):
    create("fd-one", tmp_path)
    with pytest.raises(ConfigError, match="exists already"):
        create("fd-one", tmp_path)


@pytest.mark.parametrize(
    ("kind", "most"),
    [
        *(("device", 140), ("drafter", 140), ("quantizer", 110), ("tool_parser", 90)),
        *(("launcher", 90), ("scheduler", 260), ("kv_store", 90), ("grammar", 110)),
        *(("reasoning_parser", 80), ("logits_processor", 90), ("checkpoint_format", 130)),
        *(("attention", 140), ("moe", 100), ("command", 50), ("kernels", 50)),
    ],
)
def test_templates_are_short(kind, most):
    folder = TEMPLATE_FOLDER / kind
    assert sum(len(p.read_text().splitlines()) for p in folder.rglob("*.py")) < most


def test_kind_to_check_follows_from_the_name(fd_plugins):
    inventory = fd_plugins(
        core_entry("device", "cpu", "a:B"),
        core_entry("kernels", "cpu", "a:T"),
        entry("hooks", "cpu", "a"),
        entry("moe", "two", "a:B"),
        entry("attention", "two", "a:B"),
    )
    assert kind_of(inventory, "cpu") == "device"
    with pytest.raises(ConfigError, match="--kind"):
        kind_of(inventory, "two")
    with pytest.raises(PluginNotFound, match=r"no driver 'twi'; did you mean two\?"):
        kind_of(inventory, "twi")


def test_a_distribution_with_one_device_is_known_by_it(fd_plugins):
    inventory = fd_plugins(core_entry("device", "cpu", "a:B"), entry("device", "mychip", "b:C"))
    distribution = inventory.entries[-1].distribution
    assert device_of(inventory, distribution) == "mychip"
    assert device_of(inventory, "mychip") == device_of(inventory, "x") == ""


@pytest.mark.parametrize(
    ("asked", "device"),
    [
        (("flash", "--kind", "attention"), "chip"),
        (("flash", "--kind", "attention", "--device", "cpu"), "cpu"),
        (("fd-chip",), "chip"),
        (("wint8",), None),  # of a distribution with several: the kit's default
    ],
)
def test_a_driver_is_checked_on_the_device_of_its_distribution(
    fd_plugins, monkeypatch, asked, device
):
    inventory = fd_plugins(
        core_entry("device", "cpu", "a:B"),
        core_entry("device", "other", "a:B"),
        core_entry("quantizer", "wint8", "a:B"),
        entry("device", "chip", "c:D", "fd-chip"),
        entry("attention", "flash", "c:D", "fd-chip"),
    )
    commands = []
    monkeypatch.setattr(check, "discover", lambda: inventory)
    monkeypatch.setattr(subprocess, "call", lambda command: commands.append(command) or 0)
    assert check.main(asked) == 0
    given = dict(zip(commands[0], commands[0][1:], strict=False))
    assert given.get("--fd-device") == device


def test_every_suite_of_the_kit_is_run_for_some_kind():
    there = {p.stem for p in Path(kit.__file__).parent.glob("test_*.py")}
    run_for = {name.rpartition(".")[2] for kind in KINDS for name in suites(kind)}
    assert there == run_for


def test_examine_compares_every_operation_with_the_reference(capsys, fd_tensor):
    assert main(["plugins", "examine", "cpu", "--json", "--tensor-library", fd_tensor]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows[0][0] == "operations" and f"of {len(OPERATIONS)} " in rows[0][2]
    assert ["collective", True, "two ranks agree"] in rows
    assert not [row for row in rows if row[2] == "not examined"]
    assert main(["plugins", "examine", "nowhere"]) == 1
    assert "nowhere" in capsys.readouterr().err


def test_generation_does_not_ask_for_a_grammar(monkeypatch):
    """Two installed grammars would make a start ask which; no kit of another kind needs one."""
    orders = []

    def child(command, *, input, **_):
        orders.append(json.loads(input))
        said = "Traceback\n  deep inside\nConfigError: no room"
        return subprocess.CompletedProcess(command, 1, "", said)

    monkeypatch.setattr(subprocess, "run", child)
    with pytest.raises(AssertionError) as error:
        sampled_tokens(Path("m"), [[1]], [{}], device="cpu")
    assert orders[0]["args"]["guided_decoding_backend"] == "off"
    assert orders[0]["args"]["device"] == "cpu"
    first, *rest = str(error.value).splitlines()
    assert first == "generation failed: ConfigError: no room", "what the summary shows"
    assert "  deep inside" in rest
