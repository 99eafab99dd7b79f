"""Hygiene of a driver's distribution: what can be checked without running the driver."""

from __future__ import annotations

import importlib.metadata
import inspect
from typing import TYPE_CHECKING, Any

import pytest

from fastdeploy_core.contracts.base import DISTRIBUTION, KINDS

from .base import Conformance

if TYPE_CHECKING:
    from fastdeploy_core.plugins.discovery import PluginEntry


class HygieneConformance(Conformance):
    """Metadata, names, imports."""

    def test_module_imports_in_a_fresh_process(self, fd_entry: PluginEntry) -> None:
        from fastdeploy_core.plugins.preflight import Job, run

        outcome = run([Job(fd_entry.target, limit_s=120)])[0]
        assert not outcome.error, outcome.error

    def test_module_imports_twice(self, fd_entry: PluginEntry) -> None:
        from fastdeploy_core.plugins.drivers import load

        assert load(fd_entry) is load(fd_entry)

    def test_name_is_the_entry_points_name(self, fd_entry: PluginEntry, driver: Any) -> None:
        if not KINDS[fd_entry.kind].versioned:
            pytest.skip(f"{fd_entry.kind} drivers carry no name of their own")
        assert driver.name == fd_entry.name

    def test_contract_is_one_that_this_core_serves(
        self, fd_entry: PluginEntry, driver: Any
    ) -> None:
        from fastdeploy_core.plugins.drivers import check_contract

        if not KINDS[fd_entry.kind].versioned:
            pytest.skip(f"{fd_entry.kind} drivers carry no contract version")
        check_contract(fd_entry, driver.contract)

    def test_every_method_of_the_protocol_is_there(
        self, fd_entry: PluginEntry, driver: Any
    ) -> None:
        protocol = load_protocol(fd_entry.kind)
        if protocol is None or not inspect.isclass(driver):
            pytest.skip(f"{fd_entry.kind} has no protocol class")
        problems = []
        for name, wanted in methods(protocol).items():
            method = getattr(driver, name, None)
            if not callable(method):
                problems.append(f"{name}() is missing")
            else:
                problems += signature_problems(name, wanted, method)
        assert not problems, "; ".join(problems)

    def test_hook_modules_import_no_tensor_library(self, fd_entry: PluginEntry) -> None:
        import subprocess
        import sys

        from fastdeploy_core.plugins.discovery import HOOKS, discover

        modules = [
            e.module for e in discover().of(HOOKS) if e.distribution == fd_entry.distribution
        ]
        if not modules:
            pytest.skip(f"{fd_entry.distribution} has no hook module")
        code = (
            "import importlib, sys\n"
            f"sys.path[:] = {sys.path!r}\n"
            f"[importlib.import_module(m) for m in {modules!r}]\n"
            "sys.exit(', '.join({'torch', 'paddle'} & set(sys.modules)) or 0)\n"
        )
        result = subprocess.run(  # noqa: S603 - our own interpreter
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
        )
        assert result.returncode == 0, f"importing the hook module imports {result.stderr.strip()}"

    def test_distribution_requires_the_core_with_an_upper_bound(
        self, fd_entry: PluginEntry
    ) -> None:
        if fd_entry.distribution == DISTRIBUTION:
            pytest.skip("this is the core itself")
        from packaging.requirements import Requirement

        wanted = [Requirement(r) for r in importlib.metadata.requires(fd_entry.distribution) or []]
        core = [r for r in wanted if r.name.lower().replace("_", "-") == DISTRIBUTION]
        assert core, f"{fd_entry.distribution} does not depend on {DISTRIBUTION}"
        operators = {s.operator for r in core for s in r.specifier}
        assert operators & {"<", "<=", "==", "~="}, f"no upper bound in {core[0]}"

    def test_distribution_is_typed_and_documented(self, fd_entry: PluginEntry) -> None:
        files = importlib.metadata.files(fd_entry.distribution) or []
        if not files:
            pytest.skip("the distribution lists no files")
        metadata = importlib.metadata.metadata(fd_entry.distribution)
        if any(f.name.endswith(".pth") for f in files):
            pytest.skip("an editable installation; its files lie elsewhere")
        assert any(f.name == "py.typed" for f in files), "py.typed is missing"
        assert metadata.json.get("description"), "the README is not in the metadata"


def load_protocol(kind: str) -> Any:
    """The Protocol class of a kind; None where there is none."""
    import importlib

    module, _, name = KINDS[kind].protocol.partition(":")
    return getattr(importlib.import_module(module), name) if name else None


def methods(protocol: Any) -> dict[str, Any]:
    """Public methods that a protocol defines."""
    return {
        name: value
        for name, value in vars(protocol).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }


def signature_problems(name: str, wanted: Any, method: Any) -> list[str]:
    """Whether a method can be called like the protocol's."""
    try:
        have = inspect.signature(method).parameters
    except (TypeError, ValueError):
        return []
    problems = []
    positional = [p for n, p in have.items() if n != "self"]
    expected = [p for n, p in inspect.signature(wanted).parameters.items() if n != "self"]
    takes_all = any(p.kind is p.VAR_POSITIONAL for p in positional)
    for index, parameter in enumerate(expected):
        if takes_all:
            break
        if index >= len(positional):
            problems.append(f"{name}() does not take {parameter.name!r}")
        elif positional[index].name != parameter.name:
            problems.append(
                f"{name}() calls parameter {index + 1} {positional[index].name!r}, "
                f"the contract {parameter.name!r}"
            )
    for extra in positional[len(expected) :]:
        if extra.default is extra.empty and extra.kind in (
            extra.POSITIONAL_ONLY,
            extra.POSITIONAL_OR_KEYWORD,
            extra.KEYWORD_ONLY,
        ):
            problems.append(f"{name}() wants {extra.name!r}, which the core does not give")
    return problems


class TestHygiene(HygieneConformance):
    """Run by `fastdeploy plugins check`."""
