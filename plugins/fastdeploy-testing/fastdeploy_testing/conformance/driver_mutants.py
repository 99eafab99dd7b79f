"""Does the kit bite? Drivers with one fault each, generated from their Protocol, of which it must
fail all.

    cd fd-mycalls; pytest -p fastdeploy_testing.conformance.driver_mutants

A mutant is the driver with one method that is left out or done twice, whose result is that of the
call before, lacks a part, comes in another order or is another number, or which gets another
argument. Each test that passes is run again, with fresh fixtures, for every living mutant. What no
test fails lives on, and fails the session. mutants.py does the same for kernels.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pytest
from _pytest.runner import runtestprotocol

from fastdeploy_core.contracts.base import KINDS
from fastdeploy_core.plugins.report import table
from fastdeploy_testing.conformance.mutants import FEWEST, _array, _is_tensor, _tensor

# Methods that return an object with a Protocol of its own: its methods have mutants, too.
MADE: Final = {("grammar", "matcher"): "fastdeploy_core.contracts.small:GrammarMatcher"}
# Kinds whose drivers are classes of methods that a test calls in its own process. KV transports
# are, too, but each of their tests starts a process, which a hunt would do a thousand times.
KINDS_WITH_MUTANTS: Final = (
    *("scheduler", "kv_store", "reasoning_parser", "tool_parser", "logits_processor"),
    "grammar",
)
# Mutants that do what the contract asks for, with the reason.
EQUIVALENT: Final = {
    ("grammar", "fill_mask: is done twice"): "the mask is written whole",
    ("kv_store", "put: is done twice"): "the second time it puts the same",
    ("logits_processor", "apply: output_token_ids has its last twice"): "it belongs to no row",
    ("logits_processor", "remove: is done twice"): "nothing is left to forget",
    ("logits_processor", "validate: is done twice"): "it only looks",
    ("scheduler", "abort: request_ids is in the other order"): "each is aborted for itself",
    ("scheduler", "loads: gives what the call before gave"): "a report may be seen a little later",
    ("scheduler", "put_results: is done twice"): "deltas that come again are dropped",
    ("scheduler", "put_results: outputs has its last twice"): "deltas that come again are dropped",
    ("scheduler", "report_load: is done twice"): "the newest report counts",
    ("reasoning_parser", "finish: its result has content without spaces around it"): (
        "white space in front of the end of a text may go"
    ),
    ("tool_parser", "finish: its result has content without spaces around it"): (
        "so may that of a call that is cut off"
    ),
}
_LEAST_S, _TIMES = 2.0, 4  # a test may take, or so many times what it took with the right driver
PATIENCE_S: Final = 1.0  # what suites wait for something that must come


class HangError(BaseException):
    """A mutant takes much longer than the right driver: the test would fail in the end."""


@dataclass(eq=False)
class Mutant:
    """One fault of one method. `instead` gets the method, bound, and its arguments."""

    method: str
    words: str
    instead: Callable[..., Any]
    last: dict[int, Any] = field(default_factory=dict)  # results, by object
    # Whether some call gave something else than the right driver's would have: a parser that finds
    # no calls cannot number them wrongly.
    differs: bool = False

    @property
    def name(self) -> str:
        """What is shown."""
        return f"{self.method}: {self.words}"


def mutants_of(kind: str) -> list[Mutant]:
    """Generated from the Protocol of the kind, and of what its drivers make."""
    found = list(_of_protocol(KINDS[kind].protocol))
    for (owner, _), protocol in MADE.items():
        found += list(_of_protocol(protocol)) if owner == kind else []
    return [m for m in found if (kind, m.name) not in EQUIVALENT]


def _of_protocol(protocol: str) -> Iterator[Mutant]:
    for name, method in protocol_methods(protocol).items():
        signature = inspect.signature(method)
        parameters = list(signature.parameters.values())[1:]
        yield from _of_result(name, str(signature.return_annotation))
        for place, parameter in enumerate(parameters):
            for words, change in _changes_of(str(parameter.annotation)).items():
                mutant = Mutant(name, f"{parameter.name} {words}", _same)
                mutant.instead = functools.partial(_with_argument, mutant, place, change)
                yield mutant


def protocol_methods(protocol: str) -> dict[str, Any]:
    """Public methods of "module:Class" but `close`, which every suite's fixtures call."""
    module, _, name = protocol.partition(":")
    return {
        name: value
        for name, value in vars(getattr(importlib.import_module(module), name)).items()
        if inspect.isfunction(value) and not name.startswith("_") and name != "close"
    }


def _of_result(name: str, annotation: str) -> Iterator[Mutant]:
    neutral: Any = {"bool": True, "int": 0}.get(annotation)
    if annotation.startswith("list["):
        neutral = []
    if annotation in ("None", "bool", "int") or neutral == []:
        left_out = Mutant(name, "is left out", lambda call, *given: neutral, differs=True)
        yield left_out
    if annotation == "None":
        twice = Mutant(name, "is done twice", lambda call, *given: (call(*given), call(*given))[1])
        twice.differs = True
        yield twice
        return
    mutant = Mutant(name, "gives what the call before gave", _same, differs=True)
    mutant.instead = functools.partial(_stale, mutant)
    yield mutant
    for words, change in _changes_of(annotation).items():
        mutant = Mutant(name, f"its result {words}", _same)
        mutant.instead = functools.partial(_with_result, mutant, change)
        yield mutant


def _same(call: Callable[..., Any], *given: Any) -> Any:
    return call(*given)


def _stale(mutant: Mutant, call: Callable[..., Any], *given: Any) -> Any:
    result = call(*given)
    owner = id(getattr(call, "__self__", None))
    last = mutant.last.get(owner, result)
    mutant.last[owner] = result
    return last


def _with_result(
    mutant: Mutant, change: Callable[[Any], Any], call: Callable[..., Any], *given: Any
) -> Any:
    right = call(*given)
    before = _values(right)  # the change may happen in place
    wrong = change(right)
    mutant.differs |= _values(wrong) != before
    return wrong


def _with_argument(
    mutant: Mutant, place: int, change: Callable[[Any], Any], call: Callable[..., Any], *given: Any
) -> Any:
    changed = list(given)
    if place < len(changed):
        before = _values(changed[place])
        changed[place] = change(changed[place])
        mutant.differs |= _values(changed[place]) != before
    return call(*changed)


def _values(x: Any) -> Any:
    """Something that compares as the value does."""
    return (_array(x).tobytes(), x.shape) if _is_tensor(x) else x


Changes = dict[str, Callable[[Any], Any]]
_LISTS: Final[Changes] = {
    "lacks its last": lambda x: x[:-1],
    "lacks its first": lambda x: x[1:],
    "is in the other order": lambda x: x[::-1],
    "has its last twice": lambda x: [*x, *x[-1:]],
}
_PARTS: Final[Changes] = {
    "has no content": lambda x: dataclasses.replace(x, content=""),
    "has no reasoning": lambda x: dataclasses.replace(x, reasoning=""),
    "has content without its last character": lambda x: dataclasses.replace(
        x, content=x.content[:-1]
    ),
    "has content without spaces around it": lambda x: dataclasses.replace(
        x, content=x.content.strip()
    ),
    "has content and reasoning swapped": lambda x: dataclasses.replace(
        x, content=x.reasoning, reasoning=x.content
    ),
    "has no calls": lambda x: dataclasses.replace(x, tool_calls=[]),
    "has arguments without their last character": lambda x: dataclasses.replace(
        x, tool_calls=[dataclasses.replace(c, arguments=c.arguments[:-1]) for c in x.tool_calls]
    ),
    "has calls with the next number": lambda x: dataclasses.replace(
        x, tool_calls=[dataclasses.replace(c, index=c.index + 1) for c in x.tool_calls]
    ),
    "has calls without their names": lambda x: dataclasses.replace(
        x, tool_calls=[dataclasses.replace(c, name=None) for c in x.tool_calls]
    ),
    "has everything twice": lambda x: dataclasses.replace(
        x, content=x.content * 2, reasoning=x.reasoning * 2
    ),
}


def _rows(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Any], Any]:
    def changed(x: Any) -> Any:
        return _tensor(change(_array(x)), x) if _is_tensor(x) else x

    return changed


_TENSORS: Final[Changes] = {
    "is half as large": _rows(lambda x: x / 2),
    "is shifted by a row": _rows(lambda x: np.roll(x, 1, 0)),
    "is shifted by a column": _rows(lambda x: np.roll(x, 1, -1)),
    "lacks its last row": _rows(lambda x: np.where(np.arange(len(x))[:, None] < len(x) - 1, x, 0)),
}


def _changes_of(annotation: str) -> Changes:
    """What can be wrong with a value of that type."""
    if annotation.startswith(("list[", "Sequence[")):
        return _LISTS
    if annotation == "bool":
        return {"is the opposite": lambda x: not x}
    if annotation == "int":
        return {"is one more": lambda x: x + 1, "is one less": lambda x: x - 1}
    if annotation == "ParsedDelta":
        return _PARTS
    if annotation == "Tensor":
        return _TENSORS
    if annotation == "bytes":
        return {"lacks its last byte": lambda x: x[:-1]}
    if annotation == "np.ndarray":
        return {"is another array": lambda x: np.array(x), "is of zeros": lambda x: x * 0}
    return {}


RIGHT: Final = Mutant("", "no fault", _same)


class Hunt:
    """Runs the suite's tests on mutants. A pytest plugin."""

    def __init__(self) -> None:
        self.kind = ""
        self.mutants: list[Mutant] = []
        self.living: list[Mutant] = []
        self._current: Mutant | None = None
        self._wrapped: set[type] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Any:
        """Once the driver's class is there, its methods ask which mutant they are."""
        value = yield
        if fixturedef.argname == "driver":
            self._begin(request.cls.kind, value)
            if hasattr(request.cls, "patience_s"):
                request.cls.patience_s = PATIENCE_S
        return value

    def _begin(self, kind: str, driver: Any) -> None:
        if kind in KINDS_WITH_MUTANTS and not self.kind:
            self.kind, self.mutants = kind, mutants_of(kind)
            self.living = list(self.mutants)
        if kind == self.kind and inspect.isclass(driver):
            self._wrap(driver, KINDS[kind].protocol)

    def _wrap(self, driver: type, protocol: str) -> None:
        if driver in self._wrapped:
            return
        self._wrapped.add(driver)
        for name in protocol_methods(protocol):
            setattr(driver, name, self._asking(name, getattr(driver, name)))

    def _asking(self, name: str, method: Any) -> Any:
        @functools.wraps(method)
        def asking(this: Any, *given: Any, **named: Any) -> Any:
            call = functools.partial(method, this, **named)
            call.__self__ = this  # type: ignore[attr-defined]
            mutant = self._current
            is_it = mutant is not None and mutant.method == name
            result = mutant.instead(call, *given) if mutant and is_it else call(*given)
            if (self.kind, name) in MADE:
                self._wrap(type(result), MADE[self.kind, name])
            return result

        return asking

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """The test as it stands, and once more for every mutant that lives."""
        started = time.monotonic()
        reports = self._run(item)
        limit_s = max(_LEAST_S, _TIMES * (time.monotonic() - started))
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        if all(report.outcome == "passed" for report in reports) and self.living:
            if self._fails(item, RIGHT, limit_s):
                raise RuntimeError(f"{item.nodeid} fails when it is run again, without a fault")
            for mutant in list(self.living):
                if self._fails(item, mutant, limit_s):
                    self.living.remove(mutant)
        item.session._setupstate.teardown_exact(nextitem)
        return True

    def _run(self, item: pytest.Item) -> Sequence[pytest.TestReport]:
        if hasattr(item, "_initrequest"):
            item._initrequest()
        # As if a test of the same class came next: fixtures of the class stay.
        nextitem: Any = item.parent
        return runtestprotocol(item, nextitem=nextitem, log=False)

    def _fails(self, item: pytest.Item, mutant: Mutant, limit_s: float) -> bool:
        def ring(*_: Any) -> None:
            raise HangError(f"takes more than {limit_s:.1f} s")

        mutant.last.clear()
        self._current = mutant
        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            # One that is skipped looks at nothing, where it looked at the right driver.
            return any(report.outcome != "passed" for report in self._run(item))
        except HangError:
            return True
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            self._current = None

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The score of every method."""
        if not self.kind:
            return
        rows: list[tuple[str, int, int, str]] = []
        for method in dict.fromkeys(m.method for m in self.mutants):
            own = [m for m in self.counted() if m.method == method]
            alive = [m.words for m in own if m in self.living]
            rows.append((method, len(own), len(own) - len(alive), "; ".join(alive)))
        terminalreporter.section("mutants")
        terminalreporter.write_line(table(("method", "mutants", "killed", "alive"), rows))
        made, killed = sum(row[1] for row in rows), sum(row[2] for row in rows)
        terminalreporter.write_line(
            f"{killed} of {made} mutants of kind {self.kind} killed; "
            f"{len(self.mutants) - made} more are no other than this driver"
        )

    def counted(self) -> list[Mutant]:
        """Those that are another driver than the right one."""
        return [m for m in self.mutants if m.differs or m not in self.living]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A mutant that lives fails the session, and so does a kind with few of them."""
        counted = self.counted()
        if len(counted) < FEWEST or any(m in self.living for m in counted):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_configure(config: pytest.Config) -> None:
    """Take part in the session."""
    config.pluginmanager.register(Hunt(), "fastdeploy-driver-mutants")
