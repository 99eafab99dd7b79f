"""What steps produced, brought to the host in the order of their launch: one queue, one record.

A step's results come from one of two sources. Kernels of captured steps write them into the host's
memory by themselves on a device that posts (PostingDevice); elsewhere copies are queued when a step
is launched. Reading looks at host memory only, once the results are there, so it disturbs nothing
that the device does meanwhile.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from fastdeploy_core.memory.postbox import NUM_MORE, Arrival, arrived
from fastdeploy_core.memory.transfers import Downloads, wait_for
from fastdeploy_core.sampling import columns as bits
from fastdeploy_core.sampling.logprobs import read
from fastdeploy_core.types import ModelRunnerOutput, TokenLogprobs

from .step import Arriving, Launched, StepRows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.sampling.logprobs import LogprobTensors
    from fastdeploy_core.sampling.state import SamplingState
    from fastdeploy_core.tensor import Tensor

    from .drafting import Drafting
    from .slots import Slots

NAN = "nan_logits"
FORBIDDEN = "no_possible_token"
NOT_IN_GRAMMAR = "grammar_violation"
# Kernel mark_broken writes these in place of a token; the last one stands for what the host had
# found out before the tokens were there, which Sampling.errors names.
FOUND_BEFORE = -4
MARKS = {-2: NAN, -3: FORBIDDEN}
NOT_KEPT = -1  # after a row's last kept token

NO_TOKENS = np.zeros(0, dtype=np.int64)
# What rows tell beside tokens.
TELLS_MORE = bits.GRAMMAR | bits.LOGPROBS | bits.PROMPT_LOGPROBS


class Results:
    """Launched steps whose tokens the host has not seen. `lock` guards the slots."""

    def __init__(
        self,
        device: DeviceBackend,
        slots: Slots,
        state: SamplingState | None,
        lock: threading.RLock,
        drafting: Drafting | None = None,
    ) -> None:
        self._slots, self._state, self._lock = slots, state, lock
        self._device, self._drafting = device, drafting
        self._downloads = Downloads(device)
        self.unread: deque[Launched] = deque()  # from sampling on; `publish` follows
        # By slot: drafts that the newest step which was read has left on the device.
        self._num_left = np.zeros(slots.max_num_seqs, dtype=np.int64)
        # A step that was read while its drafts were still on their way.
        self._awaited: tuple[Launched, ModelRunnerOutput, Arrival] | None = None

    def publish(self, launched: Launched, tokens: Tensor | None, drafts: Tensor | None) -> None:
        """Queue the copies of a step that has just been launched, unless all it tells comes by
        itself. tokens: marked ones, [sampling rows, columns], -1 after a row's last kept one, or
        [sampling rows]. drafts: [B, n], for the next step, or the same tensor as the tokens with n
        further columns."""
        arriving = launched.arriving
        arriving.has_drafts, arriving.is_joined = drafts is not None, drafts is tokens
        tensors: list[Tensor] = []
        if arriving.posted:
            arriving.event = arriving.posted[-1].results
        elif tokens is not None:
            arriving.num_columns = 1 if launched.rows.num_decodes > 1 else launched.rows.width
            tensors.append(tokens)
        if not arriving.posted and drafts is not None and not arriving.is_joined:
            tensors.append(drafts)
        for _, record in self._logprob_parts(launched):
            tensors += record.tensors()
        tensors += [] if launched.pooled is None else [launched.pooled]
        if tensors or not arriving.posted:
            arriving.download = self._downloads.start(tensors)
            arriving.event = self._device.record_event()

    def clear(self) -> None:
        """Nobody will ask for what is on its way."""
        self.unread.clear()
        self._awaited = None

    def read_all(self) -> None:
        """Every launched step, and the drafts of the last one."""
        with self._lock:
            while self.unread:
                self._read(self.unread.popleft())
            self._take_awaited()

    def coming(self, rows: StepRows, *, reads_all: bool) -> np.ndarray:
        """[B] tokens that launched steps give each of these rows and the host has not seen. Those
        steps are read first with `reads_all`, or if one of them was fed drafts."""
        if reads_all or any(step.rows.width > 1 for step in self.unread):
            self.read_all()
        coming = np.zeros(self._num_left.size, dtype=np.int64)
        for step in self.unread:
            coming[step.rows.slots] += step.rows.samples * step.rows.num_decodes
        return np.asarray(coming[rows.slots])

    def read_until(self, last: Launched) -> None:
        """Every step up to `last`, in order of launch."""
        with self._lock:
            while last.results is None:
                self._read(self.unread.popleft())

    # -- one step ---------------------------------------------------------------------------------

    def _read(self, launched: Launched) -> None:
        arriving, rows = launched.arriving, launched.rows
        wait_for(arriving.event)
        if self._awaited is not None and not self._outdates(launched):
            self._take_awaited()
        concerns_drafters = self._drafting is not None and launched.concerns_drafters
        if not concerns_drafters and self._take_single(launched):
            return
        arrays = iter(() if arriving.download is None else arriving.download.arrays)
        pages: np.ndarray | None = None
        fed = accepted = NO_TOKENS
        drafts: Arrival | np.ndarray | None = None
        if arriving.posted:
            pages, fed, accepted = self._posted(arriving)
            drafts = arriving.posted[-1].drafts if arriving.has_drafts else None
        elif arriving.num_columns:
            pages, fed, drafts = self._copied(launched, arrays)
        elif arriving.has_drafts:
            drafts = next(arrays)
        found = ModelRunnerOutput(
            step_id=launched.step_id,
            token_ids=NO_TOKENS,
            counts=rows.slots * 0 if pages is None else None,
            errors={**launched.errors},
        )
        logprobs = self._read_logprobs(launched, found, arrays)
        if launched.pooled is not None:
            vectors = zip(rows.positions().rows.tolist(), next(arrays), strict=True)
            found.pooled = {row: vector.tobytes() for row, vector in vectors}
        if pages is not None:
            counts = self._take_tokens(launched, found, pages, accepted)
            self._name_logprobs(launched, found, logprobs)
        self._num_left[rows.slots] = 0
        if self._drafting is not None and launched.concerns_drafters:
            if pages is not None and rows.width > 1:
                found.num_drafts, found.num_accepted = fed, np.maximum(counts - 1, 0)
                self._drafting.observe(launched, found)
            if isinstance(drafts, Arrival):
                self._awaited = (launched, found, drafts)
            else:
                self._take_drafts(launched, found, drafts)
            found.draft_failures = self._drafting.guard.num_failures
        if arriving.download is not None:
            arriving.download.release()
        for row in found.errors:
            found.prompt_logprobs.pop(row, None)
        if rows.is_decode and rows.width == rows.num_decodes == 1 and not found.errors:
            found.counts = None
        launched.results = found  # last: another thread may be looking at it without the lock

    def _take_single(self, launched: Launched) -> bool:
        """All of it in short for the step that is nearly every one: each row gave a token and
        nothing else. False, and nothing is taken, where there is more to it."""
        rows, arriving, sampling = launched.rows, launched.arriving, launched.sampling
        if rows.num_decodes > 1 or launched.errors or sampling is None:
            return False
        tells_more = sampling.plan.flags & TELLS_MORE or launched.pooled is not None
        if tells_more or not (rows.is_decode or rows.samples.all()):
            return False
        if arriving.posted:
            tokens = arrived(arriving.posted[0].results)[:, 0]
        elif arriving.num_columns:
            assert arriving.download is not None
            tokens = arriving.download.arrays[0].reshape(-1)[: rows.slots.size].copy()
        else:
            return False
        if np.count_nonzero(tokens < 0):
            return False
        self._slots.learn_one(rows.slots, launched.version, tokens)
        self._num_left[rows.slots] = 0
        if arriving.download is not None:
            arriving.download.release()
        launched.results = ModelRunnerOutput(step_id=launched.step_id, token_ids=tokens)
        return True

    @staticmethod
    def _posted(arriving: Arriving) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[B, num_decodes, columns] marked tokens, and [num_decodes, B] drafts that were judged and
        those of them that were accepted; each on its own, since they are looked at many times."""
        pages = [arrived(post.results) for post in arriving.posted]
        size, columns = pages[0].shape
        tokens = np.empty((size, len(pages), columns - NUM_MORE), dtype=np.int64)
        fed, accepted = more = np.empty((NUM_MORE, len(pages), size), dtype=np.int64)
        for nth, page in enumerate(pages):
            tokens[:, nth], more[:, nth] = page[:, :-NUM_MORE], page[:, -NUM_MORE:].T
        return tokens, fed, accepted

    def _copied(
        self, launched: Launched, arrays: Iterator[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """The same of rows that sample, and [B, n] drafts for the next step."""
        rows, arriving, values = launched.rows, launched.arriving, next(arrays)
        size, columns = rows.slots.size, arriving.num_columns
        if rows.num_decodes > 1:  # kernel keep_results: in the column of its position
            nth = rows.starts[:, None] + np.arange(1, 1 + rows.num_decodes)
            values = np.take_along_axis(values[:size], nth % values.shape[1], 1)
            pages = values[:, :, None]
        else:
            table = values.reshape([-1, columns]) if values.ndim == 1 else values
            num_sampling = size if rows.is_decode else int(np.count_nonzero(rows.samples))
            pages = table[:num_sampling, None, :columns].copy()
        drafts: np.ndarray | None = None
        if arriving.has_drafts:
            drafts = values[:size, columns:] if arriving.is_joined else next(arrays)[:size]
        fed = self._num_left[rows.slots] if launched.fed is None else launched.fed
        return pages, np.minimum(fed, columns - 1)[None], drafts

    def _take_tokens(
        self, launched: Launched, found: ModelRunnerOutput, pages: np.ndarray, accepted: np.ndarray
    ) -> np.ndarray:
        """Write tokens into the history of sequences that are still here, and advance grammars. A
        row is cut before what means nothing, and fails if nothing of it is left. accepted: drafts
        of each decode, or empty. Returns how many tokens each decode gave, [num_decodes, B]."""
        rows, slots = launched.rows, launched.rows.slots
        own = None if rows.is_decode or rows.samples.all() else np.flatnonzero(rows.samples)
        if own is not None:
            slots = slots[own]
        sampling, state = launched.sampling, self._state
        assert sampling is not None
        has_grammars = state is not None and bool(sampling.plan.flags & bits.GRAMMAR)
        is_odd = has_grammars or bool(found.errors) or np.count_nonzero(pages[:, :, 0] < 0)
        for page in pages.transpose(1, 0, 2) if is_odd else ():
            if found.errors or np.count_nonzero(page[:, 0] < 0):
                self._cut_broken(launched, found, page, own)
            if has_grammars:
                self._advance_grammars(launched, found, page, own)
        is_kept = pages >= 0
        is_counted = accepted.size and not is_odd
        by_decode: np.ndarray = accepted + 1 if is_counted else np.add.reduce(is_kept, 2).T
        counts = by_decode[0] if rows.num_decodes == 1 else np.add.reduce(by_decode, 0)
        found.token_ids = pages[is_kept]
        self._slots.learn(slots, launched.version, found.token_ids, counts)
        if own is not None:
            given, by_decode = by_decode, np.zeros((1, rows.slots.size), dtype=np.int64)
            by_decode[:, own] = given
            counts = by_decode[0]
        found.counts = counts
        return by_decode

    @staticmethod
    def _cut_broken(
        launched: Launched, found: ModelRunnerOutput, page: np.ndarray, own: np.ndarray | None
    ) -> None:
        """Rows whose token means nothing have come to an error, and give nothing from here on."""
        sampling = launched.sampling
        assert sampling is not None
        for number in np.flatnonzero(page[:, 0] < 0).tolist():
            row, mark = number if own is None else int(own[number]), int(page[number, 0])
            if mark == FOUND_BEFORE and sampling.errors is not None:
                where = launched.rows.positions()
                place = int(np.flatnonzero((where.rows == row) & (where.nth == 0))[0])
                found.errors.setdefault(row, sampling.errors[place])
            else:
                found.errors.setdefault(row, MARKS.get(mark, NAN))
        numbers = np.array(list(found.errors), dtype=np.int64)
        if own is not None:
            numbers = np.flatnonzero(np.isin(own, numbers))
        page[numbers] = NOT_KEPT

    def _advance_grammars(
        self, launched: Launched, found: ModelRunnerOutput, page: np.ndarray, own: np.ndarray | None
    ) -> None:
        assert self._state is not None
        slots = launched.rows.slots if own is None else launched.rows.slots[own]
        stays = self._slots.stays(slots, launched.version)
        for number in range(slots.size) if stays is None else np.flatnonzero(stays).tolist():
            for nth, token in enumerate(page[number].tolist()):
                if token >= 0 and not self._state.advance(int(slots[number]), token):
                    row = number if own is None else int(own[number])
                    found.errors[row] = NOT_IN_GRAMMAR
                    page[number, nth:] = NOT_KEPT
                    break

    # -- drafts -----------------------------------------------------------------------------------

    def _take_drafts(
        self, launched: Launched, found: ModelRunnerOutput, drafts: np.ndarray | None
    ) -> None:
        assert self._drafting is not None
        began = time.perf_counter()
        slots = launched.rows.slots
        self._num_left[slots] = 0 if drafts is None else np.add.reduce(drafts >= 0, 1)
        self._drafting.collect(launched, found, drafts)
        launched.times.draft_s += time.perf_counter() - began

    def _outdates(self, launched: Launched) -> bool:
        """Whether the step was fed the awaited drafts on the device, and left new ones for the same
        rows: then nobody asks for the old ones."""
        assert self._awaited is not None and self._drafting is not None
        before, _, arrival = self._awaited
        arriving, is_same = launched.arriving, launched.rows.slots is before.rows.slots
        if not (is_same and launched.fed is None and arriving.posted and arriving.has_drafts):
            return False
        self._drafting.check(arrival.peek())
        self._awaited = None
        return True

    def _take_awaited(self) -> None:
        """Drafts that were still on their way when the step that made them was read."""
        if self._awaited is not None:
            launched, found, arrival = self._awaited
            self._awaited = None
            self._take_drafts(launched, found, arrived(arrival))

    # -- log-probabilities ------------------------------------------------------------------------

    @staticmethod
    def _logprob_parts(launched: Launched) -> Sequence[tuple[int | None, LogprobTensors]]:
        """What is copied after tokens and drafts: sampled tokens' (None), then prompts' by row."""
        if launched.sampling is None or launched.sampling.logprobs is None:
            return launched.prompt_logprobs
        return [(None, launched.sampling.logprobs), *launched.prompt_logprobs]

    def _read_logprobs(
        self, launched: Launched, found: ModelRunnerOutput, arrays: Iterator[np.ndarray]
    ) -> dict[int, TokenLogprobs]:
        """Those of prompts go to their rows; returned are those of sampled tokens, by position."""
        sampled: dict[int, TokenLogprobs] = {}
        for row, records in self._logprob_parts(launched):
            entries = read(records, arrays)
            if row is None:
                sampled = dict(zip(records.rows.tolist(), entries, strict=True))
                continue
            if not all(math.isfinite(value) for entry in entries for value in entry.logprobs):
                found.errors[row] = NAN
            found.prompt_logprobs.setdefault(row, []).extend(entries)
        return sampled

    @staticmethod
    def _name_logprobs(
        launched: Launched, found: ModelRunnerOutput, entries: dict[int, TokenLogprobs]
    ) -> None:
        """Entries by sampled position become those of each row's kept tokens."""
        if not entries or found.counts is None:
            return
        where = launched.rows.positions()
        first = dict(
            zip(where.rows[::-1].tolist(), range(where.rows.size - 1, -1, -1), strict=True)
        )
        for row, count in enumerate(found.counts.tolist()):
            if count and first[row] in entries:
                found.logprobs[row] = [entries[first[row] + nth] for nth in range(count)]


class PendingOutput:
    """`wait()` returns the step's ModelRunnerOutput; steps are read in order of launch."""

    def __init__(self, launched: Launched, read: Callable[[Launched], None]) -> None:
        self._launched, self._read = launched, read
        self._wait_s: float | None = None

    def done(self) -> bool:
        """Whether `wait` would not wait."""
        event = self._launched.arriving.event
        with suppress(Exception):  # of a lost device, which `wait` names
            return self._launched.results is not None or event is None or event.query()
        return True

    def wait(self) -> ModelRunnerOutput:
        """Wait for the device. May be called again."""
        began, launched, times = time.perf_counter(), self._launched, self._launched.times
        if launched.results is None:
            self._read(launched)
        found = launched.results
        assert found is not None, "the step was read"
        if self._wait_s is None:
            self._wait_s = time.perf_counter() - began
        found.model_s, found.draft_s = times.model_s, times.draft_s
        found.execute_s = times.launch_s + self._wait_s
        return found
