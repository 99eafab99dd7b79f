"""Discovery: metadata only, the operator's choice, duplicates, other contracts."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from fastdeploy_core.contracts.base import CONTRACT, KINDS
from fastdeploy_core.errors import ConfigError
from fastdeploy_core.plugins import discovery
from fastdeploy_core.plugins.discovery import build_inventory, discover
from tests.plugin_modules import core_entry, entry


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """install(name, entry_points=..., requires=...) puts a distribution's metadata on sys.path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("FD_PLUGINS", raising=False)
    monkeypatch.delenv("FD_PLUGINS_DISABLED", raising=False)

    def install(name, entry_points, *, requires=(), version="1.2.3", folder=tmp_path):
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {r}" for r in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        (info / "entry_points.txt").write_text(textwrap.dedent(entry_points))
        discovery.forget()

    yield install
    discovery.forget()


def statuses(inventory, distribution):
    return {(e.kind, e.name): e.status for e in inventory.entries if e.distribution == distribution}


def test_core_registers_like_a_stranger():
    kinds = {e.kind for e in discover({}).entries if e.is_core}
    assert {"device", "attention", "moe", "kernels", "scheduler", "hooks"} <= kinds


def test_entry_points_are_found_with_distribution_and_version(installed):
    installed("fd-one", "[fastdeploy.devices]\none = no_such_module:Device [extra]\n")
    found = [e for e in discover({}).entries if e.distribution == "fd-one"]
    assert [(e.kind, e.name, e.target, e.version, e.status) for e in found] == [
        ("device", "one", "no_such_module:Device", "1.2.3", "ok")
    ]


def test_first_copy_on_the_path_shadows_the_second(installed, tmp_path, monkeypatch):
    second = tmp_path / "later"
    monkeypatch.setattr(sys, "path", [*sys.path, str(second)])
    installed("fd-one", "[fastdeploy.devices]\none = a:B\n")
    installed("fd_one", "[fastdeploy.devices]\none = old:B\n", version="0.9", folder=second)
    found = [e for e in discover({}).entries if e.name == "one"]
    assert [(e.version, e.status) for e in found] == [("1.2.3", "ok")]


@pytest.mark.parametrize(
    ("requires", "status"),
    [
        ("fastdeploy-core>=0.1,<0.2", "ok"),
        ("FastDeploy_Core >= 0.1", "ok"),
        ("fastdeploy-core>=7", "incompatible"),
        ("fastdeploy-core<0.1 ; python_version < '3'", "ok"),
        ("fastdeploy-core (>=7)", "incompatible"),
        ("fastdeploy-core>=7; extra == 'all'", "ok"),
        ("fastdeploy-core=>broken", "incompatible"),
        ("fastdeploy-corset>=7", "ok"),
    ],
)
def test_core_requirement_is_checked_before_any_import(installed, requires, status):
    installed("fd-one", "[fastdeploy.devices]\none = a:B\n", requires=[requires])
    inventory = discover({})
    assert statuses(inventory, "fd-one") == {("device", "one"): status}
    if status != "ok":
        assert any("fd-one 1.2.3" in p for p in inventory.problems)


def test_group_of_a_later_contract_is_named(installed):
    installed("fd-future", "[fastdeploy.devices.v2]\nfuture = a:B\n")
    inventory = discover({})
    assert statuses(inventory, "fd-future") == {("device", "future"): "other contract"}
    assert any("contract 2" in p and "{}.{}".format(*CONTRACT) in p for p in inventory.problems)


def test_unknown_group_under_our_prefix_is_reported(installed):
    installed("fd-typo", "[fastdeploy.device]\nx = a:B\n")
    inventory = discover({})
    assert statuses(inventory, "fd-typo") == {("?", "x"): "unknown group"}
    assert any("fastdeploy.device'" in p and "fastdeploy.devices" in p for p in inventory.problems)


def test_damaged_metadata_hides_nobody_else(installed, tmp_path):
    installed("fd-good", "[fastdeploy.devices]\ngood = a:B\n")
    broken = tmp_path / "broken-1.0.dist-info"
    broken.mkdir()
    (broken / "entry_points.txt").write_text("[fastdeploy.devices]\nbad = a:B\n")  # no METADATA
    discovery.forget()
    inventory = discover({})
    assert statuses(inventory, "fd-good") == {("device", "good"): "ok"}
    assert any("cannot be read" in e.reason for e in inventory.entries)
    assert any(e.is_core for e in inventory.entries)


ENTRIES = [
    core_entry("device", "cpu", "core:Cpu"),
    entry("device", "a", "a:A", "fd-a"),
    entry("device", "b", "b:B", "fd_B"),
]


@pytest.mark.parametrize(
    ("allowed", "disabled", "usable"),
    [
        (None, (), ["a", "b", "cpu"]),
        (("all",), (), ["a", "b", "cpu"]),
        ((), (), ["cpu"]),
        (("fd-a",), (), ["a", "cpu"]),
        (("FD_b",), (), ["b", "cpu"]),
        (None, ("fd-b",), ["a", "cpu"]),
        (("all",), ("fd-a",), ["b", "cpu"]),
        ((), ("fd-a",), ["cpu"]),
    ],
)
def test_operators_choice(allowed, disabled, usable):
    inventory = build_inventory(ENTRIES, allowed=allowed, disabled=disabled)
    assert [e.name for e in inventory.of("device")] == usable
    for e in inventory.of("device", usable=False):
        assert (e.status == "ok") == (e.name in usable)
        assert bool(e.reason) == (e.status != "ok")


def test_wanted_and_unwanted_at_once_is_an_error():
    with pytest.raises(ConfigError, match="fd-a"):
        build_inventory(ENTRIES, allowed=("fd-a", "fd-b"), disabled=("FD.A",))


def test_choice_of_something_absent_is_reported():
    inventory = build_inventory(ENTRIES, allowed=("fd-a", "fd-typo"), disabled=("gone",))
    assert any("fd-typo" in p and "FD_PLUGINS" in p for p in inventory.problems)
    assert any("gone" in p and "FD_PLUGINS_DISABLED" in p for p in inventory.problems)


def test_core_cannot_be_disabled():
    inventory = build_inventory(ENTRIES, disabled=("fastdeploy-core",))
    assert [e.name for e in inventory.of("device")] == ["a", "b", "cpu"]
    assert any("always takes part" in p for p in inventory.problems)


def test_two_strangers_with_one_name_are_both_out():
    twice = [*ENTRIES, entry("device", "a", "z:Z", "fd-z")]
    inventory = build_inventory(twice)
    assert [e.name for e in inventory.of("device")] == ["b", "cpu"]
    problem = next(p for p in inventory.problems if "'a'" in p)
    assert "fd-a" in problem and "fd-z" in problem
    assert [e.name for e in build_inventory(twice, disabled=("fd-z",)).of("device")] == [
        "a",
        "b",
        "cpu",
    ]


def test_nobody_overrides_a_name_of_the_core():
    inventory = build_inventory([*ENTRIES, entry("device", "cpu", "evil:Cpu", "fd-evil")])
    assert [e.target for e in inventory.of("device") if e.name == "cpu"] == ["core:Cpu"]
    assert any("fd-evil" in p and "core's own stays" in p for p in inventory.problems)


def test_kernel_tables_for_one_device_may_come_from_several():
    tables = [entry("kernels", "cpu", "a:T", "fd-a"), core_entry("kernels", "cpu", "core:T")]
    inventory = build_inventory(tables)
    assert len(inventory.of("kernels")) == 2 and not inventory.problems


def test_same_name_in_two_kinds_is_no_duplicate():
    inventory = build_inventory([entry("device", "x", "a:A"), entry("moe", "x", "a:M", "fd-b")])
    assert not inventory.problems


def test_every_kind_has_its_own_group():
    groups = [kind.group for kind in KINDS.values()]
    assert len(set(groups)) == len(groups)
    assert all(g.startswith(discovery.PREFIX) for g in groups)


def test_listing_imports_no_plugin_and_nothing_heavy(installed):
    code = (
        "import sys\n"
        f"sys.path[:] = {sys.path!r}\n"
        "from fastdeploy_core.plugins.discovery import discover\n"
        "discover()\n"
        "print(sorted({'torch', 'paddle', 'numpy', 'msgspec', 'pluggy', 'stevedore', 'pydantic'}"
        " & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
