"""Results that kernels write into the host's memory, on a device that posts (PostingDevice)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np

from fastdeploy_core.contracts.device import DeviceBackend, DeviceEvent, PostingDevice
from fastdeploy_core.errors import WorkerError

from .transfers import wait_for

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor

# Pages of a postbox: steps that may be on their way while one is read, and those whose drafts
# nobody has looked at yet; of each decode of a step that are several.
NUM_PAGES = 4
# After a row's results: how many drafts were judged, and how many of them were accepted.
NUM_MORE = 2
# Then a lost device is looked for, which would never write: some 20 ms.
PATIENCE = 500
# Which half of a word the host reads as the number; the other one is the turn.
LOW = 0 if sys.byteorder == "little" else 1


class Postbox:
    """What captured steps write into the host's memory by themselves; `turn` is the device's count.

    A captured step has a number, its turn, which the device counts and the host counts along.
    Results and drafts come to the page of the turn, each number with the turn beside it: when all
    are of that turn they are there, and no copy and no event is queued for them. The results come
    before drafts are made."""

    def __init__(
        self,
        device: DeviceBackend,
        turn: Tensor,
        max_rows: int,
        max_drafts: int,
        max_decodes: int = 1,
    ) -> None:
        assert isinstance(device, PostingDevice)
        self._device, self._turn, self._count = device, turn, -1
        self._num_pages = NUM_PAGES * max_decodes
        self._results, self._results_host = self._box(max_rows, 1 + max_drafts + NUM_MORE)
        self._drafts, self._drafts_host = self._box(max_rows, max(1, max_drafts))
        # As kernels take them.
        self.results, self.drafts = (self._results, turn), (self._drafts, turn)

    def _box(self, rows: int, width: int) -> tuple[Tensor, np.ndarray]:
        assert isinstance(self._device, PostingDevice)
        box, host = self._device.host_box(self._num_pages * rows * width)
        shape = (self._num_pages, rows, width)
        return box.view(list(shape)), host.reshape(shape)

    def begin(self) -> None:
        """A captured step is launched."""
        if self._count < 0:
            self._count = int(self._device.to_host(self._turn)[0])
        self._count += 1

    def forget(self) -> None:
        """A step failed: whether the device has counted it is not known."""
        self._count = -1

    def expect(self, num_rows: int, width: int, num_drafts: int, back: int = 0) -> Posted:
        """What the step launched last, or so many before it, will write: tokens of the rows, and
        drafts if it makes any."""
        turn = self._count - back
        page, tag = turn % self._num_pages, (turn + 2**31) % 2**32 - 2**31
        results = self._results_host[page, :num_rows, : width + NUM_MORE]
        drafts = self._drafts_host[page, :num_rows, :num_drafts]
        return Posted(Arrival(self._device, results, tag), Arrival(self._device, drafts, tag))


class Posted:
    """One step's post."""

    __slots__ = ("drafts", "results")

    def __init__(self, results: Arrival, drafts: Arrival) -> None:
        self.results, self.drafts = results, drafts


class Arrival:
    """A DeviceEvent: these numbers are there. Then `values` holds them."""

    __slots__ = ("_device", "_event", "_num_queries", "_tag", "_words", "values")

    def __init__(self, device: DeviceBackend, words: np.ndarray, tag: int) -> None:
        self._device, self._words, self._tag = device, words, tag
        self._num_queries = 0
        self._event: DeviceEvent | None = None
        self.values: np.ndarray | None = None

    def query(self) -> bool:
        """Whether they are; WorkerError, or what the device says, if they never will be."""
        if self.values is not None:
            return True
        is_over, words = self._is_over(), self._words
        # The last one first: while the host waits, most queries end here.
        if not words.size or words[-1, -1] >> 32 == self._tag:
            halves = words.copy().view(np.int32)  # number and turn of a word are read at once
            if np.count_nonzero(halves[:, 1 - LOW :: 2] == self._tag) == words.size:
                self.values = halves[:, LOW::2].astype(np.int64)
                return True
        if is_over:
            raise WorkerError("a step has ended, and its results are not in the host's memory")
        return False

    def peek(self) -> np.ndarray:
        """What lies there, which may be of another turn."""
        return self._words.view(np.int32)[:, LOW::2]

    def _is_over(self) -> bool:
        """Whether, as far as was looked, everything queued until now has ended; raises what the
        device died of."""
        self._num_queries += 1
        if self._num_queries == PATIENCE:
            self._event = self._device.record_event()
        return self._event is not None and self._event.query()


def arrived(arrival: Arrival) -> np.ndarray:
    """The values, once they are there."""
    wait_for(arrival)
    assert arrival.values is not None
    return arrival.values
