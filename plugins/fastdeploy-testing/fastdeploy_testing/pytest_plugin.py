"""pytest side of the conformance kit: options, fixtures, the capability table at the end.

Load it with `-p fastdeploy_testing.pytest_plugin`, or in a conftest.py with
`pytest_plugins = ["fastdeploy_testing.pytest_plugin"]`. It is no pytest11 entry point, so that
ordinary users' pytest is not touched.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fastdeploy_core.plugins.discovery import PluginEntry

pytest.register_assert_rewrite("fastdeploy_testing.conformance")

_OUTCOMES = pytest.StashKey[dict[str, dict[str, str]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the kit; all start with --fd-."""
    group = parser.getgroup("fastdeploy", "FastDeploy conformance kit")
    group.addoption("--fd-driver", default="", help="name of the driver under test")
    group.addoption("--fd-kind", default="", help="its kind, such as device")
    group.addoption("--fd-device", default="", help="device to run on (default: cpu)")
    group.addoption("--fd-tensor", default="", help="tensor library: torch or paddle")
    group.addoption("--fd-model", default="", help="model folder for drafters, default: a tiny one")
    group.addoption("--fd-report", default="", help="write results as JSON to this file")
    group.addoption(
        "--fd-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="setting of the driver itself, such as the address of a server; may be repeated",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Markers and the place where outcomes are collected."""
    config.addinivalue_line(
        "markers", "capability(name): the declared power that this conformance test is about"
    )
    config.addinivalue_line(
        "markers", "device(name): needs this device driver and its hardware; skipped elsewhere"
    )
    config.stash[_OUTCOMES] = {}


@pytest.fixture(scope="session")
def fd_tensor(request: pytest.FixtureRequest) -> str:
    """Tensor library asked for; empty leaves the choice to the device."""
    return str(
        request.config.getoption("--fd-tensor")
        or request.config.getoption("--tensor", default="")
        or ""
    )


@pytest.fixture(scope="session")
def fd_options(request: pytest.FixtureRequest) -> dict[str, str]:
    """The driver's own settings from --fd-option."""
    options = {}
    for text in request.config.getoption("--fd-option"):
        key, separator, value = text.partition("=")
        if not separator:
            raise pytest.UsageError(f"--fd-option {text!r} is not KEY=VALUE")
        options[key] = value
    return options


@pytest.fixture(scope="class")
def fd_entry(request: pytest.FixtureRequest) -> PluginEntry:
    """The entry point of the driver under test: from the suite's class, else from --fd-driver."""
    from fastdeploy_core.plugins.drivers import find

    suite = request.cls
    kind = suite.kind or request.config.getoption("--fd-kind")
    name = suite.driver_name or request.config.getoption("--fd-driver")
    if not name:
        raise pytest.UsageError("no driver to test: set driver_name in the class, or --fd-driver")
    return find(kind, name)


@pytest.fixture
def fd_plugins() -> Iterator[Any]:
    """Makes inventories with only the given entries; nothing is discovered.

    Call it with PluginEntry objects; it returns an Inventory for the functions of plugins/.
    """
    from fastdeploy_core.plugins.discovery import build_inventory
    from fastdeploy_core.plugins.manager import forget_managers

    def make(*entries: PluginEntry, **choice: Any) -> Any:
        return build_inventory(entries, **choice)

    yield make
    forget_managers()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a two-layer model with random weights; see testing/tiny_model.py."""
    from .tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Record how each test of the kit ended, and why it was skipped."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    suite = getattr(item, "cls", None)
    if suite is None or not hasattr(suite, "driver_name"):
        return
    if call.when != "call" and report.outcome == "passed":
        return
    reason = ""
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = str(report.longrepr[2]).removeprefix("Skipped: ")
    elif report.failed:
        lines = str(call.excinfo.value if call.excinfo else "").strip().splitlines()
        reason = lines[0] if lines else "failed"
    marker = item.get_closest_marker("capability")
    item.config.stash[_OUTCOMES][item.nodeid] = {
        "test": item.name,
        "suite": suite.__name__,
        "capability": marker.args[0] if marker else "",
        "phase": report.when,
        "outcome": report.outcome,
        "reason": reason[:300],
    }


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The capability table, the failures in few lines, and the report file."""
    outcomes = list(config.stash[_OUTCOMES].values())
    path = config.getoption("--fd-report")
    if path:
        report = {
            "driver": config.getoption("--fd-driver"),
            "kind": config.getoption("--fd-kind"),
            "tensor_library": config.getoption("--fd-tensor"),
            "tests": outcomes,
        }
        Path(path).write_text(json.dumps(report, indent=2) + "\n", "utf-8")
    if not outcomes or not config.getoption("--fd-driver"):
        return
    from .summary import capability_table, failure_lines

    driver = str(config.getoption("--fd-driver"))
    terminalreporter.section(f"capabilities of {driver}")
    terminalreporter.write_line(capability_table(outcomes))
    if failures := failure_lines(outcomes, driver):
        terminalreporter.section("failures")
        for line in failures:
            terminalreporter.write_line(line)
