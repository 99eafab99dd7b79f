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
from fastdeploy_core.plugins import lookup
from fastdeploy_core.plugins.report import table
from fastdeploy_testing.conformance.mutants import FEWEST, _array, _is_tensor, _tensor

# Methods that return an object with a Protocol of its own: its methods have mutants, too.
MADE: Final = {("grammar", "matcher"): "fastdeploy_core.contracts.small:GrammarMatcher"}
# Protocols that say more of a kind's methods than its own.
CLOSER: Final = {"speculative": "fastdeploy_core.contracts.speculative:HostDrafter"}
# Kinds whose drivers are classes of methods that a test calls in its own process.
KINDS_WITH_MUTANTS: Final = (
    *("scheduler", "kv_store", "reasoning_parser", "tool_parser", "logits_processor"),
    *("grammar", "attention", "moe", "quantizer", "speculative", "kv_transport"),
)
# Of these a call with the same arguments gives the same result: a fault that changes an argument
# which this driver does not use is none.
PURE: Final = ("attention", "moe", "quantizer")
# Fixtures of tests whose drivers run in another process, where they have no faults.
ELSEWHERE: Final = frozenset({"engine"})
# Mutants that do what the contract asks for, with the reason; a method alone: all of it.
EQUIVALENT: Final = {
    ("grammar", "fill_mask: is done twice"): "the mask is written whole",
    ("kv_store", "put: is done twice"): "the second time it puts the same",
    ("kv_transport", "fileno: its result is one more"): (
        "the next descriptor is often the same transport's, and wakes at the same moments"
    ),
    ("logits_processor", "apply: output_token_ids has its last twice"): "it belongs to no row",
    ("logits_processor", "remove: is done twice"): "nothing is left to forget",
    ("logits_processor", "validate: is done twice"): "it only looks",
    ("scheduler", "abort: request_ids is in the other order"): "each is aborted for itself",
    ("scheduler", "loads: gives what the call before gave"): "a report may be seen a little later",
    ("scheduler", "put_results: is done twice"): "deltas that come again are dropped",
    ("scheduler", "put_results: outputs has its last twice"): "deltas that come again are dropped",
    ("scheduler", "report_load: is done twice"): "the newest report counts",
    ("quantizer", "quantize: weight is overwritten"): "whoever asked drops it",
    ("speculative", "forget: is done twice"): "the engine may say so twice",
    ("speculative", "observe"): "what a drafter learns from it is its own affair",
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
    found = [m for protocol in protocols_of(kind) for m in _of_protocol(protocol, kind in PURE)]
    for (owner, _), protocol in MADE.items():
        found += list(_of_protocol(protocol)) if owner == kind else []
    named = {m.name: m for m in found}  # the closer Protocol's, where both have a method
    return [m for m in named.values() if not {(kind, m.name), (kind, m.method)} & EQUIVALENT.keys()]


def protocols_of(kind: str) -> list[str]:
    """The kind's, and the one that says more."""
    return [KINDS[kind].protocol, *([CLOSER[kind]] if kind in CLOSER else [])]


def _of_protocol(protocol: str, is_pure: bool = False) -> Iterator[Mutant]:
    for name, method in protocol_methods(protocol).items():
        signature = inspect.signature(method)
        parameters = list(signature.parameters.values())[1:]
        yield from _of_result(name, str(signature.return_annotation), is_pure)
        for place, parameter in enumerate(parameters):
            for words, change in _changes_of(str(parameter.annotation)).items():
                mutant = Mutant(name, f"{parameter.name} {words}", _same)
                with_argument = _with_argument_compared if is_pure else _with_argument
                mutant.instead = functools.partial(with_argument, mutant, place, change)
                yield mutant
            if is_pure and "Tensor" in str(parameter.annotation):
                mutant = Mutant(name, f"{parameter.name} is overwritten", _same)
                mutant.instead = functools.partial(_overwriting, mutant, place)
                yield mutant


def protocol_methods(protocol: str) -> dict[str, Any]:
    """Public methods of "module:Class" but `close`, which every suite's fixtures call."""
    module, _, name = protocol.partition(":")
    return {
        name: value
        for name, value in vars(getattr(importlib.import_module(module), name)).items()
        if inspect.isfunction(value) and not name.startswith("_") and name != "close"
    }


def _of_result(name: str, annotation: str, is_pure: bool) -> Iterator[Mutant]:
    neutral: Any = {"bool": True, "int": 0}.get(annotation)
    if annotation.startswith("list["):
        neutral = []
    if annotation in ("None", "bool", "int") or neutral == []:
        left_out = Mutant(name, "is left out", _same, differs=not is_pure)
        left_out.instead = functools.partial(
            _with_result if is_pure else _left_out, left_out, lambda _: neutral
        )
        yield left_out
    if annotation == "None":
        twice = Mutant(name, "is done twice", lambda call, *given: (call(*given), call(*given))[1])
        twice.differs = True
        yield twice
        return
    mutant = Mutant(name, "gives what the call before gave", _same)
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
    mutant.differs |= last is not result and _values(last) != _values(result)
    return last


def _left_out(mutant: Mutant, make: Callable[[Any], Any], *_: Any) -> Any:
    return make(None)


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


def _with_argument_compared(
    mutant: Mutant, place: int, change: Callable[[Any], Any], call: Callable[..., Any], *given: Any
) -> Any:
    changed = list(given)
    if place >= len(changed) or changed[place] is None:
        return call(*given)
    changed[place] = change(changed[place])
    right = _values(call(*given))
    wrong = call(*changed)
    mutant.differs |= _values(wrong) != right
    return wrong


def _overwriting(mutant: Mutant, place: int, call: Callable[..., Any], *given: Any) -> Any:
    result = call(*given)
    for x in _tensors(given[place]) if place < len(given) else ():
        if x.shape[0] and not any(x is y for y in _tensors(result)):
            mutant.differs = True
            x.copy_(x * 0 + 3)
    return result


def _tensors(x: Any) -> list[Any]:
    """Tensors of a value, in a tuple or a dict, too."""
    parts = list(x.values()) if isinstance(x, dict) else x if isinstance(x, tuple) else [x]
    return [part for part in parts if _is_tensor(part)]


def _values(x: Any) -> Any:
    """Something that compares as the value does."""
    if isinstance(x, dict):
        return {key: _values(value) for key, value in x.items()}
    if isinstance(x, (tuple, list)):
        return [_values(part) for part in x]
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return [_values(getattr(x, field.name)) for field in dataclasses.fields(x)]
    if isinstance(x, np.ndarray):
        return (x.tobytes(), x.shape)
    return (_array(x).tobytes(), tuple(x.shape)) if _is_tensor(x) else x


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
        return _tensor(change(_array(x)), x) if _is_tensor(x) and x.shape[0] else x

    return changed


def _without_last_row(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x[-1] = 0
    return x


_TENSORS: Final[Changes] = {
    "is half as large": _rows(lambda x: x / 2),
    "is shifted by a row": _rows(lambda x: np.roll(x, 1, 0)),
    "is shifted by a column": _rows(lambda x: np.roll(x, 1, -1)),
    "lacks its last row": _rows(_without_last_row),
}
_TUPLES: Final[Changes] = {
    f"has a last one that {words}": lambda x, change=change: (*x[:-1], change(x[-1]))
    for words, change in _TENSORS.items()
} | {"is in the other order": lambda x: x[::-1]}
_SHAPES: Final[Changes] = {
    "has a last one that is a row longer": lambda x: (*x[:-1], (x[-1][0] + 1, *x[-1][1:])),
    "has a last one that is narrower": lambda x: (*x[:-1], (*x[-1][:-1], x[-1][-1] - 1)),
    "is in the other order": lambda x: x[::-1],
}
_NAMED: Final[Changes] = {
    "lacks its last": lambda x: dict(list(x.items())[:-1]),
    "has another name": lambda x: {f"{name}_": value for name, value in x.items()},
}
_NAMED_TENSORS: Final[Changes] = _NAMED | {
    f"has a first one that {words}": lambda x, change=change: (
        x | {name: change(x[name]) for name in list(x)[:1]}
    )
    for words, change in _TENSORS.items()
}
_SPECS: Final[Changes] = _NAMED | {
    "has a first one of another shape": lambda x: (
        x
        | {
            name: dataclasses.replace(x[name], shape=(x[name].shape[0] + 1, *x[name].shape[1:]))
            for name in list(x)[:1]
        }
    ),
    "has a first one of another dtype": lambda x: (
        x | {name: dataclasses.replace(x[name], dtype="int32") for name in list(x)[:1]}
    ),
}
_DRAFTS: Final[Changes] = {
    "lacks its last": lambda x: x[:-1],
    "has its last twice": lambda x: [*x, *x[-1:]],
    "has a draft too many": lambda x: [[*row, *[1] * 9] for row in x],
    "has ids beyond the vocabulary": lambda x: [[token + 10_000 for token in row] for row in x],
    "has ids below 0": lambda x: [[-1 - token for token in row] for row in x],
    "has ids of numpy": lambda x: [[np.int64(token) for token in row] for row in x],
    "has None for a row without drafts": lambda x: [row or None for row in x],
    "is one list": lambda x: [token for row in x for token in row],
    "has a draft for every row": lambda x: [row or [1] for row in x],
}


def _in_batch(change: Callable[[Any], None]) -> Callable[[Any], Any]:
    """A changed copy of a step's batch, the host's numbers and the device's alike."""

    def changed(batch: Any) -> Any:
        batch = dataclasses.replace(
            batch, seq_lens=batch.seq_lens.copy(), block_tables=batch.block_tables.copy()
        )
        change(batch)
        for name in ("seq_lens", "block_tables"):
            twin = getattr(batch, f"{name}_dev")
            if twin.shape[0]:
                setattr(batch, f"{name}_dev", _tensor(getattr(batch, name), twin))
        return batch

    return changed


def _shorter(batch: Any) -> None:
    batch.seq_lens -= batch.seq_lens > np.diff(batch.cu_seqlens_q)


def _rolled(axis: int) -> Callable[[Any], None]:
    return lambda batch: setattr(batch, "block_tables", np.roll(batch.block_tables, 1, axis))


_BATCHES: Final[Changes] = {
    "has rows that lack a token": _in_batch(_shorter),
    "has tables shifted by a row": _in_batch(_rolled(0)),
    "has tables shifted by a column": _in_batch(_rolled(1)),
}


def _replacing(**changes: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A changed copy of a record; what a change does not fit stays."""
    return lambda x: dataclasses.replace(
        x, **{name: change(getattr(x, name)) for name, change in changes.items()}
    )


_PLANS: Final[Changes] = {
    "has its targets in the other order": _replacing(target_blocks=lambda x: list(x)[::-1]),
    "has its sources in the other order": _replacing(source_blocks=lambda x: list(x)[::-1]),
    "has the next sources": _replacing(source_blocks=lambda x: [block + 1 for block in x]),
    "lacks its last block": _replacing(
        source_blocks=lambda x: list(x)[:-1], target_blocks=lambda x: list(x)[:-1]
    ),
    "has the next number": _replacing(transfer_id=lambda x: x + 1),
    "has no end": _replacing(deadline_s=lambda x: 1e6),
}
_EVENTS: Final[Changes] = {
    "lacks its last": lambda x: x[:-1],
    "lacks its first": lambda x: x[1:],
    "has its last twice": lambda x: [*x, *x[-1:]],
    "has half the bytes": lambda x: [_replacing(num_bytes=lambda n: n // 2)(e) for e in x],
    "names another peer": lambda x: [_replacing(peer=lambda name: name + "?")(e) for e in x],
    "has notes without their last byte": lambda x: [
        _replacing(note=lambda n: n[:-1])(e) for e in x
    ],
    "has no reasons": lambda x: [_replacing(reason=lambda _: "")(e) for e in x],
    "never tells to try again": lambda x: [_replacing(retryable=lambda _: False)(e) for e in x],
}


# By the beginning of an annotation; the first that fits.
_BY_TYPE: Final[dict[str, Changes]] = {
    "list[list[int]]": _DRAFTS,
    "list[TransferEvent]": _EVENTS,
    "list[": _LISTS,
    "Sequence[": _LISTS,
    "tuple[tuple[": _SHAPES,
    "tuple[Tensor": _TUPLES,
    "dict[str, Tensor": _NAMED_TENSORS,
    "dict[str, ParameterSpec": _SPECS,
    "Tensor": _TENSORS,
    "AttentionBatch": _BATCHES,
    "TransferPlan": _PLANS,
    "ParsedDelta": _PARTS,
}


def _changes_of(annotation: str) -> Changes:
    """What can be wrong with a value of that type."""
    for begin, changes in _BY_TYPE.items():
        if annotation.startswith(begin):
            return changes
    if annotation == "bool":
        return {"is the opposite": lambda x: not x}
    if annotation == "int":
        return {"is one more": lambda x: x + 1, "is one less": lambda x: x - 1}
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
        if fixturedef.argname == "device" and request.cls.kind in KINDS_WITH_MUTANTS:
            # Suites that ask for the best driver have no fixture for its class.
            name = request.cls.driver_name or request.config.getoption("--fd-driver")
            self._begin(request.cls.kind, lookup(request.cls.kind, name))
        if fixturedef.argname == "driver":
            self._begin(request.cls.kind, value)
            if hasattr(request.cls, "patience_s"):
                request.cls.patience_s = PATIENCE_S
        return value

    def _begin(self, kind: str, driver: Any) -> None:
        if kind in KINDS_WITH_MUTANTS and not self.kind:
            self.kind, self.mutants = kind, mutants_of(kind)
            self.living = list(self.mutants)
        if self.kind and kind == self.kind and inspect.isclass(driver):
            self._wrap(driver, *protocols_of(kind))

    def _wrap(self, driver: type, *protocols: str) -> None:
        if driver in self._wrapped:
            return
        self._wrapped.add(driver)
        for name in dict.fromkeys(n for p in protocols for n in protocol_methods(p)):
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
        is_here = ELSEWHERE.isdisjoint(getattr(item, "fixturenames", ()))
        if is_here and all(report.outcome == "passed" for report in reports) and self.living:
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
