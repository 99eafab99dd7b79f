"""Holds calls of kernels to the declarations of contracts/ops/.

`DeclaredKernels` is a kernel table around another one. Every call through it fails where arguments
or results have another shape or dtype than declared, and where an argument was changed that the
operation only reads. The kit's suites get their kernels so, and so can any test.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fastdeploy_core.contracts.ops import OPERATIONS, QUANTIZED_OPERATIONS
from fastdeploy_core.contracts.signature import ANY, INTEGER, Operation, Role, TensorType
from fastdeploy_core.tensor import namespace

from .signatures import signature, solve

DECLARED = {**OPERATIONS, **QUANTIZED_OPERATIONS}


class DeclaredKernels:
    """A KernelTable whose kernels are held to what the contract declares."""

    def __init__(self, kernels: Any) -> None:
        self.inner = kernels

    def __getitem__(self, operation: str) -> Callable[..., Any]:
        """The kernel; its calls raise AssertionError where they differ from the declaration."""
        kernel = self.inner[operation]
        declared = DECLARED.get(operation)
        return kernel if declared is None else functools.partial(call, declared, kernel)

    def __contains__(self, operation: object) -> bool:
        """Whether there is a kernel for the operation."""
        return operation in self.inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def call(operation: Operation, kernel: Callable[..., Any], *arguments: Any) -> Any:
    """Call the kernel of that operation; AssertionError where the contract is not kept."""
    declared = signature(operation)
    assert len(arguments) == len(declared.arguments), (
        f"{operation.name} is called with {len(arguments)} arguments, declared: {declared}"
    )
    check = _Check(operation)
    before = []
    for argument, value in zip(declared.arguments, arguments, strict=True):
        if isinstance(value, int) and not isinstance(value, bool):
            check.sizes[argument.name] = value
        if isinstance(argument.type, TensorType) and value is not None:
            check.tensors(argument.name, argument.type, value, is_result=False)
            if argument.type.role is None:
                kept = [(x, _host(x)) for x in _tensors(argument.type, value)]
                before.append((argument.name, kept))
    results = kernel(*arguments)
    found = results if len(declared.results) > 1 else (results,)
    if declared.results:
        assert isinstance(found, tuple) and len(found) == len(declared.results), (
            f"{operation.name} returns {type(results).__name__}, declared: {declared}"
        )
    for place, (expected, value) in enumerate(zip(declared.results, found, strict=False)):
        check.tensors(f"result {place}", expected, value, is_result=True)
    for name, tensors in before:
        for x, old in tensors:
            is_same = np.array_equal(_host(x), old, equal_nan=True)
            assert is_same, f"{operation.name} changed its argument {name}, which it only reads"
    return results


def signature_problem(operation: Operation, kernel: Callable[..., Any]) -> str:
    """What keeps a kernel from being called with the declared arguments; "" where nothing does or
    its arguments cannot be seen."""
    try:
        found = inspect.signature(kernel).parameters.values()
    except (TypeError, ValueError):
        return ""
    takes_all = any(p.kind is p.VAR_POSITIONAL for p in found)
    positional = [p for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in positional if p.default is p.empty]
    needed += [p for p in found if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    count = len(signature(operation).arguments)
    if len(needed) <= count and (takes_all or count <= len(positional)):
        return ""
    names = ", ".join(p.name for p in found)
    return f"{operation.name} takes ({names}), declared: {signature(operation)}"


class _Check:
    """Sizes and the dtypes that one call has fixed so far."""

    def __init__(self, operation: Operation) -> None:
        self.sizes: dict[str, Any] = {}
        self._own: dict[int, dict[str, Any]] = {}  # of each tensor of tuples
        self._operation, self._first = operation, ""

    def tensors(self, name: str, expected: TensorType, value: Any, *, is_result: bool) -> None:
        """Shape and dtype of one argument or result."""
        if expected.role is Role.PREPARED:
            return
        for place, x in enumerate(_tensors(expected, value)):
            where = f"{name}[{place}]" if expected.is_tuple else name
            is_tensor = hasattr(x, "shape") and hasattr(x, "dtype")
            assert is_tensor, f"{self._operation.name}, {where}: {type(x).__name__}, not a tensor"
            self._shape(where, place, expected, tuple(map(int, x.shape)))
            self._dtype(where, expected, namespace(x).dtype_name(x.dtype), is_result)

    def _shape(self, name: str, place: int, expected: TensorType, actual: tuple[int, ...]) -> None:
        if not expected.is_tuple:
            problem = solve(expected.shape, actual, self.sizes)
        else:
            known = self.sizes | self._own.setdefault(place, {})
            problem = solve(expected.shape, actual, known)
            for size, number in known.items():
                is_own = size.islower() or size == "..."
                (self._own[place] if is_own else self.sizes)[size] = number
        assert not problem, f"{self._operation.name}, {name}: {problem}"

    def _dtype(self, name: str, expected: TensorType, actual: str, is_result: bool) -> None:
        if not (self._first or expected.dtype):
            self._first = actual
        wanted = expected.dtype or (self._first if is_result else "")
        if wanted == INTEGER:
            is_right = actual.startswith(("int", "uint"))
        else:
            is_right = wanted in ("", ANY, actual)
        assert is_right, f"{self._operation.name}, {name}: dtype {actual}, declared {wanted}"


def _tensors(kind: TensorType, value: Any) -> Iterator[Any]:
    yield from value if kind.is_tuple else (value,)


def _host(x: Any) -> np.ndarray:
    """A copy of a tensor's values, or of its bits where numpy lacks the dtype."""
    return np.array(namespace(x).to_numpy(x))
