"""The declarations of contracts/ops/, and that every kernel takes what they declare."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from fastdeploy_core.contracts.ops import OPERATIONS, Kernel
from fastdeploy_core.contracts.signature import Role
from fastdeploy_core.reference.kernels import TABLE as REFERENCE
from fastdeploy_testing.conformance.declared import (
    DECLARED,
    DeclaredKernels,
    signature_problem,
)
from fastdeploy_testing.conformance.signatures import meaning, signature, solve


def cells(table: Mapping[str, str | Kernel]) -> Iterator[tuple[str, Any]]:
    """(operation, function) of the cells that are the kernel itself."""
    for operation, cell in table.items():
        kernel = Kernel(cell) if isinstance(cell, str) else cell
        module, _, attribute = kernel.target.partition(":")
        if not kernel.composes and operation in DECLARED:
            yield operation, getattr(importlib.import_module(module), attribute)


def check(table: Mapping[str, str | Kernel]) -> list[str]:
    found = (signature_problem(DECLARED[name], function) for name, function in cells(table))
    return [problem for problem in found if problem]


def test_declarations_are_read() -> None:
    add = OPERATIONS["add_rms_norm"]
    assert (
        str(signature(add))
        == "(x [T, H], residual [T, H], weight [H], eps: float) -> ([T, H], [T, H])"
    )
    rows, cache, slots = signature(OPERATIONS["kv_write"]).arguments
    assert rows.type.is_tuple and cache.type.role is Role.IN_PLACE and slots.type.dtype == "int64"
    assert signature(OPERATIONS["linear"]).arguments[2].is_optional
    assert signature(OPERATIONS["linear_logits"]).results[0].dtype == "float32"


def test_every_operation_says_what_it_means_and_how_its_tensors_look() -> None:
    for operation in DECLARED.values():
        assert meaning(operation) and signature(operation).arguments, operation.name
        assert all(tensor.shape for tensor in signature(operation).results), operation.name


@pytest.mark.parametrize(
    ("shape", "actual", "known", "wrong"),
    [
        ("T H", (3, 4), {}, False),
        ("T H", (3, 4), {"H": 5}, True),
        ("T H", (3,), {}, True),
        ("T 2*I", (3, 8), {"I": 4}, False),
        ("T 2*I", (3, 8), {"I": 5}, True),
        ("B*Q", (12,), {"B": 4}, False),
        ("B M+N", (2, 7), {"M": 3, "N": 4}, False),
        ("B M+N", (2, 6), {"M": 3, "N": 4}, True),
        ("B V/32", (2, 4), {"V": 97}, False),
        ("B V/32", (2, 3), {"V": 97}, True),
        ("... H", (2, 3, 4), {"...": (2, 3)}, False),
        ("... H", (2, 3, 4), {"...": (3, 2)}, True),
        ("1", (1,), {}, False),
        ("1", (2,), {}, True),
    ],
)
def test_shapes_are_compared(
    shape: str, actual: tuple[int, ...], known: dict[str, Any], wrong: bool
) -> None:
    assert bool(solve(tuple(shape.split()), actual, known)) == wrong


def test_an_unknown_size_is_learnt() -> None:
    known: dict[str, Any] = {"B": 4}
    assert solve(("B*Q",), (12,), known) == "" and known["Q"] == 3
    assert "Q=3" in solve(("B", "Q"), (4, 2), known)


def test_the_reference_takes_what_is_declared() -> None:
    assert check(REFERENCE) == []


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
        f"linear takes (x, weight), declared: {signature(OPERATIONS['linear'])}",
        f"rms_norm takes (x, weight, eps, extra), declared: {signature(OPERATIONS['rms_norm'])}",
    ]


def too_few(x, weight):  # type: ignore[no-untyped-def]
    """A linear without bias."""


def too_many(x, weight, eps, extra):  # type: ignore[no-untyped-def]
    """A norm that wants more."""


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (lambda x, w, eps: x[:, 1:], "result 0: shape (3, 7), declared [..., H]"),
        (lambda x, w, eps: None, "result 0: NoneType, not a tensor"),
        (lambda x, w, eps: x.long(), "result 0: dtype int64, declared float32"),
        (lambda x, w, eps: (x, x), "result 0: tuple, not a tensor"),
        (lambda x, w, eps: x.zero_(), "changed its argument x"),
    ],
)
def test_a_call_is_held_to_the_declaration(tensor_library: str, kernel: Any, words: str) -> None:
    from fastdeploy_core.tensor import load

    xp = load(tensor_library)
    table = DeclaredKernels({"rms_norm": kernel})
    with pytest.raises(AssertionError) as raised:
        table["rms_norm"](xp.ones([3, 8]), xp.ones([8]), 1e-5)
    assert words in str(raised.value)


def test_arguments_are_held_to_the_declaration_too(tensor_library: str) -> None:
    from fastdeploy_core.tensor import load

    xp = load(tensor_library)
    table = DeclaredKernels({"rms_norm": lambda x, w, eps: x})
    table["rms_norm"](xp.ones([3, 8]), xp.ones([8]), 1e-5)
    with pytest.raises(AssertionError, match="weight: shape"):
        table["rms_norm"](xp.ones([3, 8]), xp.ones([7]), 1e-5)
    with pytest.raises(AssertionError, match="2 arguments"):
        table["rms_norm"](xp.ones([3, 8]), xp.ones([8]))
