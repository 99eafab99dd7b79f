"""Reads the declarations of contracts/ops/: contracts/signature.py says how they are written."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from dataclasses import dataclass
from typing import Any

from fastdeploy_core.contracts.signature import DTYPES, Argument, Operation, Role, TensorType


@dataclass(frozen=True, slots=True)
class Signature:
    """Arguments in the order in which a kernel gets them, and what it returns: nothing for None; a
    single result is returned without a tuple."""

    arguments: tuple[Argument, ...]
    results: tuple[TensorType, ...]

    def __str__(self) -> str:
        """In one line."""
        results = ", ".join(map(_tensor_words, self.results)) or "None"
        if len(self.results) > 1:
            results = f"({results})"
        return f"({', '.join(map(_argument_words, self.arguments))}) -> {results}"


@functools.cache
def signature(operation: Operation) -> Signature:
    """Of the method that declares an operation. TypeError where a tensor's annotation is none."""
    hints = typing.get_type_hints(operation.declaration, include_extras=True)
    names = list(inspect.signature(operation.declaration).parameters)[1:]  # without self
    returned = hints["return"]
    if returned is type(None):
        results: tuple[TensorType, ...] = ()
    elif typing.get_origin(returned) is tuple and typing.get_args(returned)[-1] is not Ellipsis:
        results = tuple(_tensor(part) for part in typing.get_args(returned))
    else:
        results = (_tensor(returned),)
    return Signature(tuple(Argument(name, *_read(hints[name])) for name in names), results)


def meaning(operation: Operation) -> str:
    """What it computes, in words."""
    words = " ".join((inspect.getdoc(operation.declaration) or "").split())
    return f"{words} {operation.summary}".strip()


def _tensor_words(tensor: TensorType) -> str:
    """Such as "tuple of [T, H, d] int64"."""
    parts = ("tuple of" if tensor.is_tuple else "", f"[{', '.join(tensor.shape)}]", tensor.dtype)
    return " ".join(filter(None, parts)) + (f" ({tensor.role.value})" if tensor.role else "")


def _argument_words(argument: Argument) -> str:
    kind = argument.type
    words = f" {_tensor_words(kind)}" if isinstance(kind, TensorType) else f": {kind}"
    return f"{argument.name}{words}{' | None' if argument.is_optional else ''}"


def _read(hint: Any) -> tuple[TensorType | str, bool]:
    """(type, whether it may be None) of one annotation."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        parts = [part for part in typing.get_args(hint) if part is not type(None)]
        return _read(parts[0])[0], True
    if typing.get_origin(hint) in (typing.Annotated, tuple) and _is_tensor(hint):
        return _tensor(hint), False
    return getattr(hint, "__name__", str(hint)), False


def _is_tensor(hint: Any) -> bool:
    inner = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint
    return typing.get_origin(inner) is typing.Annotated


def _tensor(hint: Any) -> TensorType:
    is_tuple = typing.get_origin(hint) is tuple
    shape, *rest = (typing.get_args(hint)[0] if is_tuple else hint).__metadata__
    dtype = next((part for part in rest if isinstance(part, str)), "")
    role = next((part for part in rest if isinstance(part, Role)), None)
    if (dtype and dtype not in DTYPES) or len(rest) > bool(dtype) + bool(role):
        raise TypeError(f"cannot read {rest}: a dtype of {', '.join(DTYPES)}, then a Role")
    return TensorType(tuple(shape.split()), dtype, role, is_tuple)


def solve(shape: tuple[str, ...], actual: tuple[int, ...], known: dict[str, Any]) -> str:
    """Hold a tensor's shape to a declared one; `known` sizes by name, to which new ones are added.
    Returns what is wrong, or "". A dimension of several unknown names is not checked."""
    sizes = list(actual)
    names = list(shape)
    if "..." in names:
        place = names.index("...")
        count = len(sizes) - len(names) + 1
        leading = tuple(sizes[place : place + max(0, count)])
        if count < 0 or known.setdefault("...", leading) != leading:
            return f"shape {actual}, declared [{', '.join(shape)}] with ... = {known.get('...')}"
        names[place : place + 1] = map(str, leading)
    if len(names) != len(sizes):
        return f"shape {actual}, declared [{', '.join(shape)}]"
    for name, size in zip(names, sizes, strict=True):
        expected = _expected(name, size, known)
        if expected is not None and expected != size:
            where = ", ".join(f"{k}={v}" for k, v in known.items())
            return f"shape {actual}, declared [{', '.join(shape)}] with {where}"
    return ""


def _expected(text: str, size: int, known: dict[str, Any]) -> int | None:
    """What a dimension must be; None where its names are unknown. Learns one unknown name."""
    if text.isidentifier():
        return int(known.setdefault(text, size))
    for sign in "+*/":
        left, found, right = text.partition(sign)
        if not found:
            continue
        a, b = (int(n) if n.isdigit() else known.get(n) for n in (left, right))
        if a is not None and b is not None:
            return int({"+": a + b, "*": a * b, "/": -(-a // b) if b else 0}[sign])
        factor = a or b
        if sign == "*" and factor and size % factor == 0:
            known[right if a is not None else left] = size // factor
        return None
    return int(text)
