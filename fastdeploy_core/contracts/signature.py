"""How operations are declared, and what reads the declarations.

An operation is a method of a Protocol (contracts/ops/). Each tensor among its arguments and results
is `Annotated[Tensor, SHAPE, ...]`: a shape, then perhaps a dtype and a Role. mypy reads the methods
as ordinary types. `Operation` reads shapes and dtypes, for the generated page and for the
conformance kit, which holds every call of a kernel to them.

A shape is a text of dimensions with a space between them. A dimension is
* a name, such as `T`: the same number wherever it stands in one call;
* a name in small letters, within a tuple of tensors: each tensor of the tuple has its own;
* a number; a product `2*I`, a sum `M+N`, or a quotient `V/32`, which is rounded up;
* an int argument's name, such as `n`;
* `...`: any number of dimensions, the same wherever it stands.
Without a dtype an argument has the model's, and a result has that of the first such argument.
"""

from __future__ import annotations

import enum
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

INTEGER: Final = "integer"  # as a dtype: any integer
ANY: Final = "any"  # as a dtype: that of a number format
DTYPES: Final = ("bool", "int32", "int64", "float32", INTEGER, ANY)


class Role(enum.Enum):
    """What an operation does with an argument beyond reading it."""

    IN_PLACE = "in place"  # holds results after the call
    SCRATCH = "may be overwritten"  # holds anything after the call
    PREPARED = "prepared"  # what the cell's `prepare` made of a tensor of that shape


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape and dtype of one tensor, or of each tensor of a tuple."""

    shape: tuple[str, ...]
    dtype: str = ""  # empty: see the module's text
    role: Role | None = None
    is_tuple: bool = False

    def __str__(self) -> str:
        """Such as "tuple of [T, h, d] int64"."""
        parts = ("tuple of" if self.is_tuple else "", f"[{', '.join(self.shape)}]", self.dtype)
        return " ".join(filter(None, parts)) + (f" ({self.role.value})" if self.role else "")


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument: a tensor, or something else by the name of its type."""

    name: str
    type: TensorType | str
    is_optional: bool = False

    def __str__(self) -> str:
        """As a signature shows it."""
        separator = " " if isinstance(self.type, TensorType) else ": "
        return f"{self.name}{separator}{self.type}{' | None' if self.is_optional else ''}"


@dataclass(frozen=True)
class Operation:
    """One named operation. `declaration` is the method of a Protocol; its docstring is the meaning.
    An operation of a number format shares its declaration with those of other formats, so `summary`
    adds what is its own."""

    name: str
    declaration: Callable[..., Any]
    summary: str = ""

    @functools.cached_property
    def arguments(self) -> tuple[Argument, ...]:
        """In the order in which a kernel gets them."""
        hints = typing.get_type_hints(self.declaration, include_extras=True)
        names = list(inspect.signature(self.declaration).parameters)[1:]  # without self
        return tuple(Argument(name, *_read(hints[name])) for name in names)

    @functools.cached_property
    def results(self) -> tuple[TensorType, ...]:
        """What the kernel returns; empty for None. A single one is returned without a tuple."""
        hint = typing.get_type_hints(self.declaration, include_extras=True)["return"]
        if hint is type(None):
            return ()
        if typing.get_origin(hint) is tuple and typing.get_args(hint)[-1] is not Ellipsis:
            return tuple(_tensor(part) for part in typing.get_args(hint))
        return (_tensor(hint),)

    @property
    def meaning(self) -> str:
        """What it computes, in words."""
        words = " ".join((inspect.getdoc(self.declaration) or "").split())
        return f"{words} {self.summary}".strip()

    @property
    def signature(self) -> str:
        """Arguments and results in one line."""
        results = ", ".join(map(str, self.results)) or "None"
        if len(self.results) > 1:
            results = f"({results})"
        return f"({', '.join(map(str, self.arguments))}) -> {results}"


def declared_in(*protocols: type) -> Iterator[Operation]:
    """The operations that Protocols declare, in the order of their text."""
    for protocol in protocols:
        for name, method in vars(protocol).items():
            if inspect.isfunction(method) and not name.startswith("_"):
                yield Operation(name, method)


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
