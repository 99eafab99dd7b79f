"""Every kernel takes the arguments that contracts/ops.py declares for its operation."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from fastdeploy_core.contracts.ops import OPERATIONS, QUANTIZED_OPERATIONS, Kernel
from fastdeploy_core.reference.kernels import TABLE as REFERENCE

DECLARED = {**OPERATIONS, **QUANTIZED_OPERATIONS}


def parameters(declaration: str) -> list[str]:
    """Names of the arguments of "(name [shape] dtype: words, ...) -> ..."."""
    depth, pieces, piece = 0, [], ""
    for character in declaration:
        depth += (character in "([") - (character in ")]")
        if depth == 0:
            break
        if depth == 1 and character == ",":
            pieces.append(piece)
            piece = ""
        elif not (depth == 1 and character == "("):
            piece += character
    names = [re.match(r"\s*(\w+)", text) for text in (*pieces, piece)]
    return [name[1] for name in names if name is not None]


def _target(cell: str | Kernel) -> Any:
    kernel = Kernel(cell) if isinstance(cell, str) else cell
    module, _, attribute = kernel.target.partition(":")
    return kernel, getattr(importlib.import_module(module), attribute)


def cells(table: Mapping[str, str | Kernel]) -> Iterator[tuple[str, Any]]:
    """(operation, function) of the cells that are the kernel itself."""
    for operation, cell in table.items():
        kernel, function = _target(cell)
        if not kernel.composes and operation in DECLARED:
            yield operation, function


def check(table: Mapping[str, str | Kernel]) -> list[str]:
    wrong = []
    for operation, function in cells(table):
        declared = parameters(DECLARED[operation])
        found = list(inspect.signature(function).parameters.values())
        if any(p.kind is p.VAR_POSITIONAL for p in found):
            continue
        needed = [p for p in found if p.default is p.empty and p.kind is not p.KEYWORD_ONLY]
        positional = [p for p in found if p.kind is not p.KEYWORD_ONLY]
        if not len(needed) <= len(declared) <= len(positional):
            wrong.append(f"{operation}{inspect.signature(function)}: declared {declared}")
    return wrong


def test_declarations_are_read() -> None:
    assert parameters(OPERATIONS["linear"]) == ["x", "weight", "bias"]
    assert parameters(OPERATIONS["kv_write"]) == ["rows", "cache", "slot_mapping"]
    assert all(parameters(text) for text in DECLARED.values())


def test_the_reference_takes_what_is_declared() -> None:
    assert check(REFERENCE) == []
    named = {}
    for operation, function in cells(REFERENCE):
        declared = parameters(DECLARED[operation])
        names = list(inspect.signature(function).parameters)[: len(declared)]
        if names != declared:
            named[operation] = (declared, names)
    assert named == {}


@pytest.mark.parametrize("module", ["fd_cuda.kernels", "fd_cpu.kernels"])
def test_kernels_of_plugins_take_what_is_declared(module: str) -> None:
    try:
        table = importlib.import_module(module).TABLE
        for _ in cells(table):
            pass
    except (ImportError, AttributeError) as error:
        pytest.skip(f"{module} cannot be imported here: {error}")
    assert check(table) == []


def test_wrong_kernels_are_found() -> None:
    assert check({"linear": f"{__name__}:too_few", "rms_norm": f"{__name__}:too_many"}) == [
        "linear(x, weight): declared ['x', 'weight', 'bias']",
        "rms_norm(x, weight, eps, extra): declared ['x', 'weight', 'eps']",
    ]


def too_few(x, weight):  # type: ignore[no-untyped-def]
    """A linear without bias."""


def too_many(x, weight, eps, extra):  # type: ignore[no-untyped-def]
    """A norm that wants more."""
