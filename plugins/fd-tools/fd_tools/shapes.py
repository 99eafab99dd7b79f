"""What operations are called with, as `serve --capture-shapes FILE` notes it and `plugins shapes`
reads it.

A call is a list of its arguments: a tensor's shape and dtype, a number, a routing, or the name of
anything else. Values of tensors are not kept. A step that replays a captured graph calls no
operation: its shapes are noted once, when it is recorded.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fastdeploy_core.contracts.moe import RoutingSpec
from fastdeploy_core.errors import ConfigError
from fastdeploy_core.tensor import namespace

if TYPE_CHECKING:
    from fastdeploy_core.plugins.kernels import ChosenKernels

WRITE_S = 1.0  # between two versions of the file


class TensorShape(msgspec.Struct, frozen=True, tag="tensor"):
    """A tensor."""

    shape: tuple[int, ...]
    dtype: str


class Several(msgspec.Struct, frozen=True, tag="tuple"):
    """Tensors that are handed over together."""

    parts: tuple[TensorShape, ...]


class Routing(msgspec.Struct, frozen=True, tag="routing"):
    """The routing of experts."""

    spec: RoutingSpec


class Plain(msgspec.Struct, frozen=True, tag="value"):
    """A number, a switch, or None."""

    value: bool | int | float | None


class Other(msgspec.Struct, frozen=True, tag="other"):
    """What only its own device can make, such as a weight in a layout of its own."""

    kind: str


Argument = TensorShape | Several | Routing | Plain | Other


class Call(msgspec.Struct, frozen=True):
    """So many calls of one operation with the same shapes."""

    operation: str
    arguments: tuple[Argument, ...]
    calls: int


def _argument(x: Any) -> Argument:
    if x is None or isinstance(x, bool | int | float):
        return Plain(x)
    if isinstance(x, RoutingSpec):
        return Routing(x)
    if isinstance(x, tuple) and all(hasattr(part, "shape") for part in x):
        parts = [found for part in x if isinstance(found := _argument(part), TensorShape)]
        if len(parts) == len(x):
            return Several(tuple(parts))
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        try:
            return TensorShape(tuple(x.shape), namespace(x).dtype_name(x.dtype))
        except (TypeError, KeyError):
            pass
    return Other(type(x).__name__)


class Notes:
    """Counts calls, and writes them into a file every second: an engine process has no end at
    which it could do so."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._counts: Counter[tuple[str, tuple[Argument, ...]]] = Counter()
        self._num_written = 0
        threading.Thread(target=self._keep_writing, name="fd-shapes", daemon=True).start()

    def around(self, operation: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its calls counted."""

        @functools.wraps(function)
        def counted(*arguments: Any) -> Any:
            self._counts[operation, tuple(map(_argument, arguments))] += 1
            return function(*arguments)

        return counted

    def _keep_writing(self) -> None:
        while True:
            time.sleep(WRITE_S)
            counts = dict(self._counts)
            if (num_calls := sum(counts.values())) != self._num_written:
                self._num_written = num_calls
                self._write(counts)

    def _write(self, counts: dict[tuple[str, tuple[Argument, ...]], int]) -> None:
        calls = [Call(name, given, count) for (name, given), count in counts.items()]
        part = self._path.with_name(self._path.name + ".part")
        part.write_bytes(msgspec.json.format(msgspec.json.encode(calls)))
        part.replace(self._path)


def capture(path: str, table: ChosenKernels) -> None:
    """Note the calls of every operation of the table from now on. ConfigError if the file's folder
    cannot be written."""
    target = Path(path).absolute()
    try:
        target.write_text("[]\n")
    except OSError as error:
        raise ConfigError(f"--capture-shapes {path}: {error}") from error
    notes = Notes(target)
    for operation, function in list(table.functions.items()):
        table.functions[operation] = notes.around(operation, function)


def read(path: Path) -> list[Call]:
    """The calls of a file; ConfigError if it is none of ours."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Call])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read as captured shapes: {error}; "
            "a server writes such a file with: fastdeploy serve MODEL --capture-shapes FILE"
        ) from error
