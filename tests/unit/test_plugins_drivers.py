"""Drivers by name: what is loaded, what is refused, and what the message says to do."""

from __future__ import annotations

import pytest

from fastdeploy_core import plugins
from fastdeploy_core.contracts.base import CONTRACT, OLDEST_MAJOR
from fastdeploy_core.errors import (
    ContractMismatch,
    PluginConflict,
    PluginLoadError,
    PluginNotFound,
)
from fastdeploy_core.plugins.discovery import build_inventory
from fastdeploy_core.plugins.drivers import _outcomes, check_contract, find, load
from tests.plugin_modules import core_entry, entry, module_writer


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.setenv("FD_PLUGIN_PREFLIGHT", "0")
    _outcomes.clear()
    yield module_writer(tmp_path, monkeypatch)
    _outcomes.clear()


def test_lookup_loads_the_named_driver_only(write, fd_plugins):
    write("lazy_good", "class Driver:\n    contract = (1, 0)\n")
    inventory = fd_plugins(
        entry("device", "good", "lazy_good:Driver"), entry("device", "bad", "nowhere:Driver")
    )
    assert plugins.lookup("device", "good", inventory=inventory).__name__ == "Driver"
    assert plugins.names("device", inventory=inventory) == ["bad", "good"]


def test_nested_attributes_are_reached(write, fd_plugins):
    write("nested", "class A:\n    class B:\n        contract = (1, 0)\n")
    inventory = fd_plugins(entry("device", "b", "nested:A.B"))
    assert plugins.lookup("device", "b", inventory=inventory).__qualname__ == "A.B"


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("device", "cuda", "provided by: fd-cuda (pip install fd-cuda)"),
        ("attention", "cuda_paged", "pip install fd-cuda"),
        ("device", "cpv", "did you mean 'cpu'"),
        ("tool_parser", "x", "installed: none"),
        ("device", "zzzz", "fastdeploy plugins list --kind device"),
    ],
)
def test_missing_driver_says_what_there_is_and_what_to_do(fd_plugins, kind, name, expected):
    inventory = fd_plugins(core_entry("device", "cpu", "a:B"))
    with pytest.raises(PluginNotFound) as caught:
        find(kind, name, inventory)
    assert expected in str(caught.value) and repr(name) in str(caught.value)


def test_unknown_kind_names_the_kinds(fd_plugins):
    with pytest.raises(PluginNotFound, match="quantizer"):
        find("gadget", "x", fd_plugins())


@pytest.mark.parametrize(
    ("choice", "extra", "error", "words"),
    [
        ({"disabled": ("fd-test",)}, [], PluginNotFound, "FD_PLUGINS_DISABLED"),
        ({"allowed": ()}, [], PluginNotFound, "not named by FD_PLUGINS"),
        ({}, [entry("device", "x", "b:B", "fd-other")], PluginConflict, "fd-other 1.0"),
    ],
)
def test_unusable_driver_says_why(choice, extra, error, words):
    inventory = build_inventory([entry("device", "x", "a:A"), *extra], **choice)
    with pytest.raises(error) as caught:
        find("device", "x", inventory)
    assert "fd-test 1.0" in str(caught.value) and words in str(caught.value)


def test_metadata_for_another_contract_is_refused_without_import():
    future = entry("device", "x", "explodes:A", status="other contract", reason="contract 2")
    with pytest.raises(ContractMismatch, match="contract 2"):
        find("device", "x", build_inventory([future]))


@pytest.mark.parametrize(
    "source",
    ["raise RuntimeError('broken')", "import sys; sys.exit('broken')", "import broken_thing"],
)
def test_failing_import_is_one_line_with_the_distribution(write, source):
    write("fails", source)
    with pytest.raises(PluginLoadError) as caught:
        load(entry("device", "x", "fails:Driver"))
    assert "fd-test 1.0" in str(caught.value) and "broken" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_attribute_is_a_load_error(write):
    write("empty_module", "")
    with pytest.raises(PluginLoadError, match="Driver"):
        load(entry("device", "x", "empty_module:Driver"))


@pytest.mark.parametrize("source", ["import time; time.sleep(600)", "import os; os._exit(9)"])
def test_stranger_that_hangs_or_quits_is_met_in_a_child_first(write, monkeypatch, source):
    monkeypatch.setenv("FD_PLUGIN_PREFLIGHT", "1")
    monkeypatch.setenv("FD_PLUGIN_DRIVER_TIMEOUT_S", "1")
    write("deadly", source)
    with pytest.raises(PluginLoadError, match=r"did not finish|exit code 9"):
        load(entry("device", "x", "deadly:Driver"))


def test_contract_is_checked_before_the_import_here(write, monkeypatch):
    monkeypatch.setenv("FD_PLUGIN_PREFLIGHT", "1")
    write("newer", "class Driver:\n    contract = (9, 0)\n")
    with pytest.raises(ContractMismatch, match=r"9\.0"):
        load(entry("device", "x", "newer:Driver"))
    import sys

    assert "newer" not in sys.modules


def test_core_drivers_are_imported_directly(write, monkeypatch):
    monkeypatch.setenv("FD_PLUGIN_PREFLIGHT", "1")
    import fastdeploy_core.plugins.preflight as preflight

    monkeypatch.setattr(preflight, "run", lambda *_, **__: pytest.fail("a child was started"))
    write("own", "class Driver:\n    contract = (1, 0)\n")
    assert load(core_entry("device", "x", "own:Driver"))


@pytest.mark.parametrize(
    ("contract", "words"),
    [
        ((2, 0), "upgrade fastdeploy-core"),
        ((0, 13), "newer release of the plugin"),
        ((0, 1), "newer release of the plugin"),
        (None, "declares no contract"),
        ("1.0", "declares no contract"),
        ((1,), "declares no contract"),
        ((1, "0"), "declares no contract"),
        ([1, 0], "declares no contract"),
    ],
)
def test_driver_for_another_contract_is_refused(contract, words):
    driver = entry("device", "x", "a:A", "fd-plug")
    with pytest.raises(ContractMismatch, match=rf"fd-plug 1\.0.*{words}"):
        check_contract(driver, contract)


@pytest.mark.parametrize(
    ("contract", "verdict"),
    [
        ((3, 4), "served"),
        ((3, 0), "served"),
        ((2, 7), "served"),
        ((3, 9), "warned"),
        ((1, 0), "refused"),
        ((4, 0), "refused"),
    ],
)
def test_majors_n_and_n_minus_one_are_served(monkeypatch, caplog, contract, verdict):
    monkeypatch.setattr("fastdeploy_core.plugins.drivers.CONTRACT", (3, 4))
    monkeypatch.setattr("fastdeploy_core.plugins.drivers.OLDEST_MAJOR", 2)
    driver = entry("device", "x", "a:A")
    if verdict == "refused":
        with pytest.raises(ContractMismatch):
            check_contract(driver, contract)
        return
    check_contract(driver, contract)
    assert ("upgrade fastdeploy-core" in caplog.text) == (verdict == "warned")


def test_oldest_major_is_the_current_one_or_the_one_before():
    assert CONTRACT[0] - 1 <= OLDEST_MAJOR <= CONTRACT[0]


REGISTER = """
from fastdeploy_core.contracts import hookimpl
@hookimpl
def fd_register_tool_parsers():
    return {names}
"""


def test_names_from_a_register_hook_are_found(write, fd_plugins):
    write("registers", REGISTER.format(names="{'extra': 'registered:Parser', 'own': 'x:Y'}"))
    write("registered", "class Parser: pass")
    inventory = fd_plugins(
        entry("hooks", "h", "registers", "fd-reg"), core_entry("tool_parser", "own", "a:B")
    )
    assert plugins.names("tool_parser", inventory=inventory) == ["extra", "own"]
    assert find("tool_parser", "own", inventory).is_core, "a registered name took the core's"
    assert plugins.lookup("tool_parser", "extra", inventory=inventory).__name__ == "Parser"


def test_one_name_registered_twice_belongs_to_nobody(write, fd_plugins):
    for module in ("reg_a", "reg_b"):
        write(module, REGISTER.format(names="{'same': 'x:Y'}"))
    inventory = fd_plugins(
        entry("hooks", "h", "reg_a", "fd-a"), entry("hooks", "h", "reg_b", "fd-b")
    )
    with pytest.raises(PluginNotFound):
        find("tool_parser", "same", inventory)


def test_wrong_type_from_a_register_hook_is_a_complaint(write, fd_plugins):
    write("reg_bad", REGISTER.format(names="['no', 'mapping']"))
    inventory = fd_plugins(entry("hooks", "h", "reg_bad", "fd-bad"))
    assert plugins.names("tool_parser", inventory=inventory) == []
