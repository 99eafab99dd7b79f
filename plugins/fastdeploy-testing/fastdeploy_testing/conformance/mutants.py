"""Does the kit bite? Wrong kernels, generated from the declarations, of which it must fail all.

    pytest -p fastdeploy_testing.pytest_plugin -p fastdeploy_testing.conformance.mutants \
        --pyargs fastdeploy_testing.conformance.test_ops --fd-driver cpu --fd-kind kernels

A mutant is the reference's kernel with one fault: a result of another dtype, off by one, without
its last row, of the call before; an argument that is ignored, shifted, rounded to bfloat16, or
overwritten; a fixed eps. Each test of the suite that passes is run again for every living mutant of
the operations that it calls. What no test fails lives on, and fails the session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pytest

from fastdeploy_core.contracts.signature import Argument, Operation, Role, TensorType
from fastdeploy_core.plugins.report import table
from fastdeploy_core.tensor import namespace
from fastdeploy_testing.conformance.declared import DECLARED, DeclaredKernels
from fastdeploy_testing.conformance.signatures import signature

Change = Callable[[np.ndarray], np.ndarray]
FEWEST: Final = 8  # mutants of an operation
# Mutants that compute what the contract asks for, with the reason.
EQUIVALENT: Final = {
    ("greedy", "logits is half as large"): "the order stays",
    ("finish_decode", "peaks is half as large"): "only whether it is finite counts",
    ("mark_broken", "peaks is half as large"): "only whether it is finite counts",
    ("mark_broken", "possible is half as large"): "only whether it is finite counts",
}


class BrokenMutantError(BaseException):
    """The change itself failed: a fault of this file, which must not pass for a mutant's."""


@dataclass
class Mutant:
    """One wrong kernel. `before` changes the arguments, `after` gets the arguments as they were
    given, copies of their values from before the call, and the results."""

    name: str
    before: Callable[[list[Any]], None] | None = None
    after: Callable[[list[Any], list[Any], list[Any]], None] | None = None
    state: dict[Any, Any] = field(default_factory=dict)  # of one test

    def __call__(self, operation: Operation, kernel: Callable[..., Any], *given: Any) -> Any:
        """The kernel's results with the fault."""
        arguments, old = list(given), [_copies(x) for x in given]
        self._change(self.before, arguments)
        results = kernel(*arguments)
        found = list(results) if len(signature(operation).results) > 1 else [results]
        self._change(self.after, list(given), old, found)
        return tuple(found) if len(signature(operation).results) > 1 else found[0]

    def _change(self, change: Callable[..., None] | None, *lists: list[Any]) -> None:
        try:
            if change is not None:
                change(*lists)
        except Exception as error:
            raise BrokenMutantError(f"{self.name}: {error!r}") from error


def mutants_of(operation: Operation) -> list[Mutant]:
    """Generated from what the operation declares."""
    found: list[Mutant] = []
    for place, argument in enumerate(signature(operation).arguments):
        found += _of_argument(place, argument)
    for place, result in enumerate(signature(operation).results):
        # A format that rounds activations has no NaN to keep.
        keeps_nan = signature(operation).arguments[0].name in ("x", "q") and not operation.summary
        found += _of_result(place, result, keeps_nan)
    return [m for m in found if (operation.name, m.name) not in EQUIVALENT]


def _of_argument(place: int, argument: Argument) -> Iterator[Mutant]:
    name = argument.name

    def given(value: Any) -> Callable[[list[Any]], None]:
        return lambda arguments: arguments.__setitem__(place, value)

    if argument.is_optional:
        yield Mutant(f"{name} is left out", given(None))
    if argument.type == "float":
        for eps in (0.0, 1e-6, 1e-5, 0.3):
            yield Mutant(f"{name} is always {eps:g}", given(eps))
    elif argument.type in ("int", "bool"):

        def other(arguments: list[Any]) -> None:
            value = arguments[place]
            arguments[place] = not value if argument.type == "bool" else value + 1

        yield Mutant(f"{name} is another", other)
    if not isinstance(argument.type, TensorType):
        return
    for index in (0, -1) if argument.type.is_tuple else (None,):
        which = name if index is None else f"{name}[{index}]"
        if argument.type.role is Role.IN_PLACE:
            yield from _of_written(place, index, which)
        else:
            yield from _of_read(place, index, which, argument.type)


def _of_read(place: int, index: int | None, name: str, kind: TensorType) -> Iterator[Mutant]:
    # The last slot is the padding slot: what it holds means nothing.
    last = slice(-2, -1) if kind.shape[0] == "S" else slice(-1, None)
    changes: dict[str, Change] = {
        "is ignored": np.zeros_like,
        "lacks its last row": lambda x: _set(x, last, 0),
    }
    if kind.shape != ("1",):
        changes["is shifted by a row"] = lambda x: np.roll(x, 1, 0)
    if len(kind.shape) > 1 and kind.shape[-1] != "1":
        changes["lacks its last column"] = lambda x: _set(x, (..., slice(-1, None)), 0)
        changes["is shifted by a column"] = lambda x: np.roll(x, 1, -1)
    if kind.dtype == "bool":
        changes["is off by one"] = np.logical_not
    elif kind.dtype in ("", "float32"):
        changes["is rounded to bfloat16"] = _to_bfloat16
        changes["is half as large"] = lambda x: x / 2
    else:
        changes["is off by one"] = lambda x: x + 1
    for words, change in changes.items():

        def before(arguments: list[Any], change: Change = change) -> None:
            if arguments[place] is not None:
                arguments[place] = _replaced(arguments[place], index, change)

        yield Mutant(f"{name} {words}", before)
    if kind.role is None:

        def scribble(given: list[Any], old: list[Any], results: list[Any]) -> None:
            if given[place] is not None:
                _write(_at(given[place], index), lambda x: x * 0)

        yield Mutant(f"{name} is overwritten", after=scribble)


def _of_written(place: int, index: int | None, name: str) -> Iterator[Mutant]:
    def spoil(new: np.ndarray, old: np.ndarray, words: str) -> np.ndarray:
        rows = np.flatnonzero((new != old).reshape(len(new), -1).any(-1))
        if words == "is not written":
            return old
        if words == "lacks the last row that is written":
            return _set(new, rows[-1:], old[rows[-1:]])
        if words == "is written one row too far":
            return np.roll(new, 1, 0)
        if words == "is off by one where it is written":
            return np.where(new != old, new + 1, new)
        return _set(new, (0,) * new.ndim, new.reshape(-1)[0] + 1) if new.size else new

    for words in (
        "is not written",
        "lacks the last row that is written",
        "is written one row too far",
        "is off by one where it is written",
        "has another first element",
    ):

        def after(given: list[Any], old: list[Any], results: list[Any], words: str = words) -> None:
            before = old[place] if index is None else old[place][index]
            _write(_at(given[place], index), lambda new: spoil(new, before, words))

        if not (words == "is written one row too far" and name == "turn"):
            yield Mutant(f"{name} {words}", after=after)


def _of_result(place: int, kind: TensorType, keeps_nan: bool) -> Iterator[Mutant]:
    changes: dict[str, Change] = {
        "is a tenth too large": lambda x: x * 1.1,
        "lacks its last row": lambda x: _set(x, slice(-1, None), 0),
        "is shifted by a row": lambda x: np.roll(x, 1, 0),
    }
    if len(kind.shape) > 1:
        changes["lacks its last column"] = lambda x: _set(x, (..., slice(-1, None)), 0)
        changes["is shifted by a column"] = lambda x: np.roll(x, 1, -1)
    if kind.dtype.startswith("int"):
        changes["is off by one"] = lambda x: x + 1
        del changes["is a tenth too large"]
    if keeps_nan and not kind.dtype.startswith("int"):
        changes["has 0 for NaN"] = lambda x: np.where(np.isnan(x), 0, x)
    for index in (0, -1) if kind.is_tuple else (None,):
        name = f"result {place}" if index is None else f"result {place}[{index}]"
        for words, change in changes.items():

            def after(
                given: list[Any],
                old: list[Any],
                results: list[Any],
                change: Change = change,
                index: int | None = index,
            ) -> None:
                results[place] = _replaced(results[place], index, change)

            yield Mutant(f"{name} {words}", after=after)

        def recast(
            given: list[Any], old: list[Any], results: list[Any], index: int | None = index
        ) -> None:
            results[place] = _recast(results[place], index)

        yield Mutant(f"{name} has another dtype", after=recast)
    yield _stale(place)


def _stale(place: int) -> Mutant:
    """Returns what the last call for arguments of these shapes returned."""
    mutant = Mutant(f"result {place} is that of the call before")

    def after(given: list[Any], old: list[Any], results: list[Any]) -> None:
        shapes = [[p.shape for p in _parts(x)] for x in (*old, _copies(results[place]))]
        last = mutant.state.get(str(shapes))
        mutant.state[str(shapes)] = results[place]
        results[place] = results[place] if last is None else last

    mutant.after = after
    return mutant


# -- tensors of either library, as numpy arrays ---------------------------------------------------


def _is_tensor(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _array(x: Any) -> np.ndarray:
    xp = namespace(x)
    is_half = xp.dtype_name(x.dtype) in ("bfloat16", "float16")
    return np.array(xp.to_numpy(x.float() if is_half else x))


def _tensor(array: np.ndarray, like: Any) -> Any:
    made = namespace(like).from_numpy(np.ascontiguousarray(array))
    return made.to(like.dtype)


def _copies(x: Any) -> Any:
    """Values of a tensor or of a tuple of tensors; None of anything else."""
    if isinstance(x, tuple):
        return [_copies(part) for part in x]
    return _array(x) if _is_tensor(x) else None


def _parts(x: Any) -> list[Any]:
    return [p for p in (x if isinstance(x, list) else [x]) if p is not None]


def _at(x: Any, index: int | None) -> Any:
    return x if index is None else x[index]


def _replaced(x: Any, index: int | None, change: Change) -> Any:
    """A changed copy of a tensor, or of one tensor of a tuple."""
    if index is not None:
        parts = list(x)
        parts[index] = _replaced(parts[index], None, change)
        return tuple(parts)
    array = _array(x)
    return _tensor(change(array).astype(array.dtype), x)


def _write(x: Any, change: Change) -> None:
    array = _array(x)
    x.copy_(_tensor(change(array).astype(array.dtype), x))


def _recast(x: Any, index: int | None) -> Any:
    if index is not None:
        parts = list(x)
        parts[index] = _recast(parts[index], None)
        return tuple(parts)
    xp = namespace(x)
    other = {"float32": "float16", "int64": "int32", "int32": "int64"}
    return x.to(xp.dtype(other.get(xp.dtype_name(x.dtype), "float32")))


def _set(x: np.ndarray, place: Any, value: Any) -> np.ndarray:
    changed = x.copy()
    changed[place] = value
    return changed


def _to_bfloat16(x: np.ndarray) -> np.ndarray:
    bits = x.astype("float32").view("uint32")
    return (bits + 0x8000 & np.uint32(0xFFFF0000)).view("float32")


# -- the session ----------------------------------------------------------------------------------


class Spoilt:
    """A kernel table that notes what is called, and in which one operation is a mutant."""

    def __init__(self, kernels: Any, operation: str = "", mutant: Mutant | None = None) -> None:
        self.called: set[str] = set()
        self._kernels, self._operation, self._mutant = kernels, operation, mutant

    def __getitem__(self, operation: str) -> Callable[..., Any]:
        """The kernel, or the mutant."""
        self.called.add(operation)
        kernel = self._kernels[operation]
        if self._mutant is None or operation != self._operation:
            return kernel
        mutant, declared = self._mutant, DECLARED[operation]
        return lambda *given: mutant(declared, kernel, *given)

    def __contains__(self, operation: object) -> bool:
        """As the table."""
        return operation in self._kernels

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)


class Hunt:
    """Runs the suite's tests on mutants. A pytest plugin."""

    def __init__(self) -> None:
        self.living = {o.name: mutants_of(o) for o in DECLARED.values()}
        self.made = {name: len(mutants) for name, mutants in self.living.items()}
        self.seen: set[str] = set()
        self.errors: list[str] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Any:
        """After a test has passed: the same for every living mutant of what it called."""
        names = pyfuncitem._fixtureinfo.argnames
        arguments = {name: pyfuncitem.funcargs[name] for name in names}
        kernels = arguments.get("kernels")
        if kernels is None:
            return (yield)
        inner = getattr(kernels, "inner", kernels)
        hold = DeclaredKernels if isinstance(kernels, DeclaredKernels) else lambda spoilt: spoilt
        notes = Spoilt(inner)
        pyfuncitem.funcargs["kernels"] = hold(notes)
        result = yield
        for operation in sorted(notes.called & self.living.keys()):
            self.seen.add(operation)
            for mutant in list(self.living[operation]):
                spoilt = hold(Spoilt(inner, operation, mutant))
                if self._fails(pyfuncitem.obj, arguments | {"kernels": spoilt}, mutant):
                    self.living[operation].remove(mutant)
        return result

    def _fails(self, test: Any, arguments: dict[str, Any], mutant: Mutant) -> bool:
        mutant.state.clear()
        try:
            test(**arguments)
        except pytest.skip.Exception:
            return False
        except BrokenMutantError as error:
            self.errors.append(str(error))
            return False
        except (Exception, pytest.fail.Exception):
            return True
        return False

    def rows(self) -> list[tuple[str, int, int, str]]:
        """(operation, mutants, killed, names of those that live) of every operation that a test
        called."""
        return [
            (o, self.made[o], self.made[o] - len(living), "; ".join(m.name for m in living))
            for o, living in self.living.items()
            if o in self.seen
        ]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The score of every operation."""
        rows = self.rows()
        terminalreporter.section("mutants")
        terminalreporter.write_line(table(("operation", "mutants", "killed", "alive"), rows))
        made, killed = sum(row[1] for row in rows), sum(row[2] for row in rows)
        terminalreporter.write_line(
            f"{killed} of {made} mutants of {len(rows)} operations killed"
            + (f", {len(self.errors)} could not be made: {self.errors[0]}" if self.errors else "")
        )

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A mutant that lives fails the session, and so does an operation with few mutants."""
        rows = self.rows()
        is_weak = any(alive or made < FEWEST for _, made, _, alive in rows)
        if is_weak or self.errors or not rows:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_configure(config: pytest.Config) -> None:
    """Take part in the session."""
    config.pluginmanager.register(Hunt(), "fastdeploy-mutants")
