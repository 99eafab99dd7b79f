"""How operations are declared, and what reads the declarations.

An operation is a method of a Protocol (contracts/ops/). Each tensor among its arguments and results
is `Annotated[Tensor, SHAPE, ...]`: a shape, then perhaps a dtype and a Role. mypy reads the methods
as ordinary types. The conformance kit reads shapes and dtypes, too, and holds every call of a
kernel to them (fastdeploy_testing/conformance/signatures.py).

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
import inspect
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


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument: a tensor, or something else by the name of its type."""

    name: str
    type: TensorType | str
    is_optional: bool = False


@dataclass(frozen=True)
class Operation:
    """One named operation. `declaration` is the method of a Protocol; its docstring is the meaning.
    An operation of a number format shares its declaration with those of other formats, so `summary`
    adds what is its own."""

    name: str
    declaration: Callable[..., Any]
    summary: str = ""


def declared_in(*protocols: type) -> Iterator[Operation]:
    """The operations that Protocols declare, in the order of their text."""
    for protocol in protocols:
        for name, method in vars(protocol).items():
            if inspect.isfunction(method) and not name.startswith("_"):
                yield Operation(name, method)
