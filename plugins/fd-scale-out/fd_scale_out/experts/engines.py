"""Engines that share experts: each has requests, attention and KV blocks of its own, and the
experts of every block are divided over the ranks of all (`--data-parallel-size` with
`--enable-expert-parallel`).

A block's experts are a collective of all ranks, so engines take their steps together. Before each
step every rank says how many tokens its engine has, through the host's memory: nobody waits for a
device. Then each block gathers the tokens of all engines, every rank adds what its experts make of
them, and the sum over ranks goes back. An engine without work takes part with no tokens while
another one steps: it computes experts alone. When all are without, each sleeps until one begins.

A captured step has as many rows on every engine: where all engines only decode, each takes the
captured step that is large enough for the largest batch, and one without work takes it with padding
alone. Beside a prompt all compute operation by operation.

When a rank is gone, the next collective of each other rank fails, and engines end; their
supervisors start them again, and they meet in the same folder.
"""

from __future__ import annotations

import select
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastdeploy_core.devices.host_communicator import SharedMemoryCommunicator
from fastdeploy_core.errors import WorkerError

if TYPE_CHECKING:
    from fastdeploy_core.config import ParallelConfig
    from fastdeploy_core.contracts.device import Communicator, DeviceBackend
    from fastdeploy_core.tensor import Tensor

Weights = Callable[[], "tuple[Any, Tensor, Tensor | None]"]  # of a block: what follows x in calls

# Between wakes of an engine that rests: one may come just before it begins to wait.
WAKE_S: Final = 0.002


class Engines:
    """One rank's view of all engines. Calls come from the thread that launches steps, but for
    `is_awaited` and what `watch` starts."""

    def __init__(
        self,
        device: DeviceBackend,
        parallel: ParallelConfig,
        rank: int,
        own_ranks: Communicator | None,
    ) -> None:
        """rank: of this engine's, whose Communicator is own_ranks; None: it is alone. All ranks of
        all engines at the same time; WorkerError: one did not come."""
        self.xp, self.device = device.xp, device
        self.number, self._engine = parallel.data_parallel_size, parallel.data_parallel_rank
        each, folder = parallel.tensor_parallel_size, Path(parallel.meeting_folder)
        place = self._engine * each + rank, parallel.num_ranks
        # Of an engine that was here before.
        (folder / f"rank{place[0]}.sock").unlink(missing_ok=True)
        self._host = SharedMemoryCommunicator(device.xp, *place, folder)
        self.own_ranks: Communicator = own_ranks or SharedMemoryCommunicator(
            device.xp, 0, 1, folder
        )
        self.group = device.communicator(*place, self._new_folder(folder))
        self.blocks: list[Together] = []
        self._sizes: list[int] | None = None  # None: while starting, all engines do the same
        self._resting, self._begun = threading.Event(), threading.Event()
        self._sources = _readable(self._host)

    def _new_folder(self, folder: Path) -> str:
        """One that no rank has used, the same on each."""
        name = tempfile.mkdtemp(dir=folder, prefix="") if not self._host.rank else ""
        letters = np.frombuffer(name.encode().ljust(512), dtype=np.uint8).copy()
        told = self._host.broadcast(self.xp.from_numpy(letters), 0)
        return bytes(self.xp.to_numpy(told)).decode().strip()

    # -- steps ------------------------------------------------------------------------------------

    def agree(self, num_tokens: int, num_rows: int) -> int:
        """Begin a step of so many tokens here, with all engines. num_rows: of the captured step
        that would do it, or 0. Returns those of the one that all engines take, or 0."""
        self._resting.clear()
        own = self.xp.from_numpy(np.array([[num_tokens, num_rows]], dtype=np.int64))
        try:
            told = self.xp.to_numpy(self._host.all_gather(own, 0))
        except WorkerError as error:
            raise self.ended(error) from error
        sizes, rows = told[:: self._host.world_size // self.number].T
        captured = int(rows.max()) if rows[sizes > 0].all() else 0
        self._sizes = [captured] * self.number if captured else sizes.tolist()
        self._begun.set()
        return captured

    def ended(self, error: WorkerError) -> WorkerError:
        """What a collective that failed means."""
        return WorkerError(
            f"engine {self._engine} cannot go on without the experts of the others: {error}"
        )

    def serve_others(self) -> None:
        """The step in which this engine has no tokens: its experts compute the others'."""
        if any(self.sizes(0)):
            with self.xp.no_grad():
                for block in self.blocks:
                    block.serve_others()

    def sizes(self, num_tokens: int) -> list[int]:
        """Tokens of each engine in this step, of which this one has num_tokens."""
        return [num_tokens] * self.number if self._sizes is None else self._sizes

    def gather(self, x: Tensor) -> Tensor:
        """The rows of all engines, engine by engine. x: this one's, the same on its ranks; as many
        as were agreed on, or fewer, which are filled up."""
        ranks, sizes = self.own_ranks, self.sizes(int(x.shape[0]))
        each = -(-max(sizes) // ranks.world_size)  # rows that a rank sends
        if x.shape[0] > sizes[self._engine]:
            raise WorkerError(
                f"a block of experts has {x.shape[0]} tokens in a step of {sizes[self._engine]}"
            )
        first = ranks.rank * each
        part = x[first : first + each]
        if missing := each - int(part.shape[0]):
            nothing = self.xp.zeros([missing, x.shape[1]], dtype=x.dtype, device=x.device)
            part = self.xp.cat([part, nothing], 0)
        rows, room = self.group.all_gather(part, 0), each * ranks.world_size
        if all(size == room for size in sizes):
            return rows
        of_each = [rows[n * room : n * room + size] for n, size in enumerate(sizes) if size]
        return self.xp.cat(of_each, 0)

    def own(self, rows: Tensor, num_tokens: int) -> Tensor:
        """This engine's of what `gather` returned for num_tokens here."""
        first = sum(self.sizes(num_tokens)[: self._engine])
        return rows[first : first + num_tokens]

    # -- resting ----------------------------------------------------------------------------------

    @property
    def is_awaited(self) -> bool:
        """Whether another engine has begun a step that this one has not, or is gone. Ask while no
        step of this one is being begun."""
        if self._sources.poll(0):
            return True
        self._resting.set()
        return False

    def watch(self, wake: Callable[[], None]) -> None:
        """Call `wake`, in a thread, while the engine rests and is awaited."""
        threading.Thread(target=self._watch, args=(wake,), name="fd-engines", daemon=True).start()

    def _watch(self, wake: Callable[[], None]) -> None:
        poll = _readable(self._host)  # one object serves one thread
        while True:
            self._resting.wait()
            poll.poll()
            self._begun.clear()
            if self._resting.is_set():
                wake()
                self._begun.wait(WAKE_S)


class Together:
    """A block's experts, computed for the tokens of all engines; called as DividedExperts says."""

    def __init__(
        self,
        engines: Engines,
        add_own: Callable[..., Tensor],
        exchange: Callable[..., Tensor] | None,
        most_in_place: int,
        weights: Weights,
        dtype: str,
    ) -> None:
        """exchange: for steps in which an engine has more tokens than most_in_place. weights: what
        follows x in calls."""
        self._engines, self._add_own, self._exchange = engines, add_own, exchange
        self._most_in_place, self._weights = most_in_place, weights
        self._dtype = engines.xp.dtype(dtype)

    def __call__(self, x: Tensor, *weights: Any) -> Tensor:
        """The whole result for x, on every rank of this engine."""
        engines, num_tokens = self._engines, int(x.shape[0])
        is_large = max(engines.sizes(num_tokens)) > self._most_in_place
        try:
            if self._exchange is not None and is_large:
                return self._exchange(x, *weights)
            y = self._add_own(engines.gather(x), *weights)
            return engines.own(engines.group.all_reduce(y), num_tokens)
        except WorkerError as error:
            raise engines.ended(error) from error

    def serve_others(self) -> None:
        """Take part without tokens."""
        xp, weights = self._engines.xp, self._weights()
        hidden, device = weights[1].shape[1], self._engines.device.device
        self(xp.zeros([0, hidden], dtype=self._dtype, device=device), *weights)


def _readable(host: SharedMemoryCommunicator) -> select.poll:
    """Polls for ranks that have begun a collective, or are gone."""
    poll = select.poll()
    for one in host.sockets:
        poll.register(one, select.POLLIN)
    return poll
