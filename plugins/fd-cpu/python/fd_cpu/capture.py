"""Captured work: a native plan if this device's kernels did all of it, else the call itself.

A plan holds the calls of kernels. Work of the tensor library between them would be missing, so it
is detected: by the library's own dispatch, if it offers one (torch), and by checking that a
captured operation made each operand.
"""

from __future__ import annotations

import logging
import weakref
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import CapturedGraph
    from fastdeploy_core.tensor import Tensor, TensorLibrary

    from . import _native
    from .team import Results, Team

logger = logging.getLogger(__name__)

# Calls of torch that compute nothing.
_VIEWS = ("view", "slice", "select", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "transpose")
_HARMLESS = (
    *_VIEWS,
    "lift_fresh",
    "permute",
    "expand",
    "as_strided",
    "alias",
    "detach",
    "empty",
    "split",
    "t",
)


class Capture:
    """One capture() in progress; later the memory that its plan uses."""

    def __init__(self, native: _native.Plan, others: Iterator[Capture]) -> None:
        self.native = native
        self.kept: list[Any] = []
        self.results: Results | None = None  # memory that later results may reuse; None: none
        self.foreign = ""  # what the plan lacks; empty: nothing
        self._own: list[tuple[int, int]] = []  # (begin, end) of memory, sorted
        self._others = list(others)

    def made(self, x: Tensor, *, is_kept: bool = True) -> None:
        """The plan writes this tensor, or the core does between replays."""
        begin = int(x.data_ptr())
        insort(self._own, (begin, begin + _num_bytes(x)))
        if is_kept:
            self.kept.append(x)

    def keep(self, *things: Any) -> None:
        """Keep alive what the plan points to; `results` keep their memory themselves."""
        for thing in things:
            is_own = hasattr(thing, "data_ptr") and self.holds(int(thing.data_ptr()))
            if self.results is None or not is_own:
                self.kept.append(thing)

    def holds(self, where: int) -> bool:
        """Whether the plan writes the memory at this address."""
        at = bisect_right(self._own, (where, 1 << 62)) - 1
        # Buffers may lie within others, so some before are checked, too.
        return any(begin <= where < end for begin, end in self._own[max(0, at - 8) : at + 1])

    def reads(self, *tensors: Tensor | None) -> None:
        """Check operands of an operation; one that no captured operation made is foreign work."""
        for x in tensors:
            if x is None or not x.shape[0]:
                continue
            where = int(x.data_ptr())
            if self.holds(where):
                continue
            before = next((other for other in self._others if other.holds(where)), None)
            if before is None:
                self.foreign = self.foreign or "an operand that no kernel of this device made"
                return
            self.native.follow(before.native)


class NativeGraph:
    """A plan, replayed in one call."""

    is_any_size = True

    def __init__(self, team: Team, capture: Capture) -> None:
        self._native, self.capture = team.native, capture
        self._plans = [capture.native]

    def replay(self) -> None:
        """All threads walk through the plan."""
        self._native.replay(self._plans, 1)


class RepeatedCall:
    """Work that is not only this device's: called again at each replay, with the captured number
    of rows."""

    is_any_size = False

    def __init__(self, run: Callable[[], None], why: str) -> None:
        self.replay = run
        self.why = why


class Capturer:
    """Makes graphs for one device."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._finished: weakref.WeakSet[Capture] = weakref.WeakSet()
        self._said: set[str] = set()

    def replay_times(self, graphs: Sequence[CapturedGraph], times: int) -> None:
        """Replay all graphs `times` times; in one call if all of them are plans."""
        plans = [graph.capture.native for graph in graphs if isinstance(graph, NativeGraph)]
        if len(plans) == len(graphs):
            self._team.native.replay(plans, times)
            return
        for graph in [*graphs] * times:
            graph.replay()

    def capture(self, run: Callable[[], None]) -> NativeGraph | RepeatedCall:
        """Run once; see the module's docstring."""
        from . import _native

        team = self._team
        capture = Capture(_native.Plan(), iter(self._finished))
        team.capture = capture
        team.native.begin(capture.native)
        try:
            with _watch(team.xp, capture):
                run()
        finally:
            team.native.end()
            team.capture = None
        if not len(capture.native):
            capture.foreign = capture.foreign or "no kernel of this device"
        if capture.foreign:
            if capture.foreign not in self._said:  # once for all sizes of steps
                self._said.add(capture.foreign)
                logger.info("captured steps repeat their call: %s is part of it", capture.foreign)
            return RepeatedCall(run, capture.foreign)
        self._finished.add(capture)
        logger.debug("a captured step is a plan of %d operations", len(capture.native))
        return NativeGraph(team, capture)


def _num_bytes(x: Tensor) -> int:
    """Bytes from the first element to the end of the last one."""
    last = sum((int(n) - 1) * int(s) for n, s in zip(x.shape, x.stride(), strict=True))
    return max(0, last + 1) * int(x.element_size())


def _watch(xp: TensorLibrary, capture: Capture) -> AbstractContextManager[Any]:
    """Notes the library's own computations during the capture, if it reports them."""
    if xp.name != "torch":
        return nullcontext()
    from importlib import import_module

    # Of the library that is loaded; this plugin depends on neither.
    mode = import_module("torch.utils._python_dispatch").TorchDispatchMode

    def note(
        self: Any, call: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(call.overloadpacket.__name__)
        if name not in _HARMLESS:
            capture.foreign = capture.foreign or f"torch's {name}"
        return call(*args, **(kwargs or {}))

    class Watch(mode):  # type: ignore[misc, valid-type]
        pass

    # Not in the class statement: torch would wrap it there in something that imports its compiler,
    # which takes a second or more.
    Watch.__torch_dispatch__ = note

    @contextmanager
    def watching() -> Iterator[None]:
        with Watch():
            yield

    return watching()
