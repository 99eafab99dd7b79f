"""What a step produced, brought to the host: tokens into the history, errors and log-probabilities to
their rows, grammars advanced.

Copies are started when a step is launched, unless its results come by themselves (posting.py); reading looks at
host memory only, once they are there, so it disturbs nothing that the device does meanwhile.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from fastdeploy_core.sampling import columns as bits
from fastdeploy_core.sampling.logprobs import read

from .multi_step import in_order
from .posting import NUM_MORE
from .staging import Downloads, wait_for
from .step_buffers import DraftsWithResults

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.tensor import Tensor

    from .input_batch import InputBatch
    from .pending import Launched
    from .posting import Arrival
    from .recorded_step import RecordedStep
    from .sequence_state import SequenceState
    from .speculation import Speculation
    from .step_rows import StepRows

NAN = "nan_logits"
FORBIDDEN = "no_possible_token"
NOT_IN_GRAMMAR = "grammar_violation"
# Kernel mark_broken writes these in place of a token; -1 stands behind the last accepted draft.
MARKS = {-2: NAN, -3: FORBIDDEN}
NOT_KEPT = -1


class StepReader:
    """Launched steps whose tokens the host has not seen, in order. `lock` guards the batch."""

    def __init__(
        self,
        device: DeviceBackend,
        batch: InputBatch,
        state: SequenceState | None,
        lock: threading.RLock,
        speculation: Speculation | None = None,
    ) -> None:
        self._device, self._batch, self._state, self._lock = device, batch, state, lock
        self._speculation = speculation
        self._downloads = Downloads(device)
        self._unread: deque[Launched] = deque()
        # By slot: drafts that the newest step which was read has left on the device.
        self._num_kept = np.zeros(batch.max_num_seqs, dtype=np.int64)
        self._drafts_before: Arrival | None = None

    def expect(self, launched: Launched) -> None:
        """A step has sampled; `start` follows. Nobody reads the step before it has started."""
        self._unread.append(launched)

    def start(
        self,
        launched: Launched,
        results: Tensor | None,
        drafts: Tensor | DraftsWithResults | None = None,
        recorded: RecordedStep | None = None,
    ) -> None:
        """Queue the copies of a step that has just been launched, unless all it tells comes by itself.
        `results`: its marked tokens, one per sampled position, -1 behind a row's last accepted one.
        `drafts`: [rows, k] for the next step, made on the device."""
        if isinstance(drafts, DraftsWithResults):
            launched.together, tensors = drafts, [drafts.values]
        else:
            tensors = [x for x in (results, drafts) if x is not None]
        launched.has_drafts, launched.has_results = drafts is not None, results is not None
        if recorded is not None:
            number, rows = 0 if drafts is None else max(0, launched.max_drafts), launched.rows
            launched.posted = recorded.expect(rows.slots.size, number, rows.num_decodes)
        if launched.posted:
            launched.event, tensors = launched.posted[-1].results, []
        for _, record in launched.logprob_parts():
            tensors += record.tensors()
        if launched.posted and not tensors:
            return
        launched.download = self._downloads.start(tensors)
        launched.event = self._device.record_event()

    def clear(self) -> None:
        """Nobody will ask for what is on its way."""
        self._unread.clear()

    def read_all(self) -> None:
        """Every launched step."""
        if self._unread:
            self.read_until(self._unread[-1])

    def read_until(self, last: Launched) -> None:
        """Every step up to `last`, in order of launch."""
        if last.is_read:
            return
        with self._lock:
            while not last.is_read:
                self._read(self._unread.popleft())

    def _read(self, launched: Launched) -> None:
        wait_for(launched.event)
        num_decodes, is_steady = launched.rows.num_decodes, self._is_steady(launched)
        if launched.posted and (is_steady or num_decodes > 1):
            self._take_posted(launched, is_steady=is_steady)
        elif num_decodes > 1:
            self._take_kept(launched)
        elif not (is_steady and self._take_ahead(launched)):
            self._take_any(launched)
        if self._speculation is not None:
            launched.draft_failures = self._speculation.num_failures
        if launched.download is not None:
            launched.download.release()
        launched.is_read = True  # last: another thread may be looking at it without the lock

    def _is_steady(self, launched: Launched) -> bool:
        """Whether the step went ahead of results with drafts, and another one has gone ahead of its own: nobody
        asks for the drafts that it made."""
        goes_on = self._unread and self._unread[0].rows.is_ahead and not launched.sample_errors
        return bool(goes_on and launched.rows.is_ahead and launched.together is not None)

    def _take_posted(self, launched: Launched, *, is_steady: bool) -> None:
        """In short what `_take_any` does, for rows that tell nothing but tokens, of one decode or several. A row
        is cut before what means nothing, and fails if it has not come to its end before."""
        rows, posted, speculation = launched.rows, launched.posted, self._speculation
        pages = [arrived(post.results) for post in posted]
        width = pages[0].shape[1] - NUM_MORE
        for page in pages:
            if launched.errors or np.count_nonzero(page[:, 0] < 0):
                _cut(launched, page)
        tokens = pages[0][:, :width]
        if len(pages) > 1:
            tokens = np.concatenate([page[:, :width] for page in pages], 1)
        right = np.stack([page[:, width + 1] for page in pages])
        launched.token_ids, launched.counts = tokens[tokens >= 0], np.add.reduce(right + 1, 0)
        if rows.is_ahead:
            launched.fed_ahead = np.stack([page[:, width] for page in pages])
            launched.right_ahead = right
        for page in pages:
            self._learn_rows(launched, page[:, :width], page[:, width + 1] + 1)
        if speculation is None or not launched.concerns_drafters:
            return
        if is_steady:
            if self._drafts_before is not None:
                speculation.check_kept(self._drafts_before.peek())
            self._drafts_before = posted[-1].drafts
            return
        drafts = arrived(posted[-1].drafts) if launched.has_drafts else None
        launched.next_drafts = speculation.collect(launched, drafts)

    def _take_ahead(self, launched: Launched) -> bool:
        """The same for a step that is steady and posts nothing. False, and nothing is taken, where more is to be
        done."""
        rows, together = launched.rows, launched.together
        assert launched.download is not None and together is not None
        slots, width = rows.slots, together.width
        values = launched.download.arrays[0][: slots.size]
        if np.count_nonzero(values < NOT_KEPT):
            return False
        tokens, is_token = values[:, :width], values >= 0
        launched.counts = counts = np.add.reduce(is_token[:, :width], 1)
        launched.fed_ahead = self._fed(rows)[None]
        launched.token_ids = tokens[tokens >= 0]
        drafts = is_token[:, width : width + launched.max_drafts]
        self._num_kept[slots] = np.add.reduce(drafts, 1)
        self._learn_rows(launched, tokens, counts)
        return True

    def _learn_rows(self, launched: Launched, tokens: np.ndarray, counts: np.ndarray) -> None:
        """The host learns the first `counts` tokens of each row whose slot has not changed hands."""
        batch, slots = self._batch, launched.rows.slots
        stays = batch.owner[slots] == launched.owners
        if np.count_nonzero(stays) < slots.size:
            slots, tokens, counts = slots[stays], tokens[stays], counts[stays]
        batch.learn_several(slots, tokens, counts)

    def _fed(self, rows: StepRows) -> np.ndarray:
        """[B] drafts that rows which went ahead were fed, as the step before tells."""
        fed: np.ndarray = np.minimum(rows.num_drafts, self._num_kept[rows.slots])
        return fed

    def _take_kept(self, launched: Launched) -> None:
        """`_take_posted` where results are kept on the device."""
        rows = launched.rows
        assert launched.download is not None
        marked = in_order(launched.download.arrays[0], rows)
        is_kept = np.logical_and.accumulate(marked >= 0, 1)
        launched.counts = counts = np.add.reduce(is_kept, 1)
        launched.token_ids = marked[is_kept]
        for row in np.flatnonzero(counts < rows.num_decodes).tolist():
            launched.errors[row] = MARKS[int(marked[row, counts[row]])]
        self._learn_rows(launched, marked, counts)

    def _take_any(self, launched: Launched) -> None:
        rows, batch, posted = launched.rows, self._batch, launched.posted
        values = arrived(posted[0].results) if posted else None
        if rows.is_ahead:
            fed = self._fed(rows) if values is None else values[:, -NUM_MORE]
            rows.settle(batch.num_known[rows.slots] - 1, fed)
            launched.fed_ahead = rows.num_drafts[None]
        arrays = iter(() if launched.download is None else launched.download.arrays)
        drafts: np.ndarray | None = None
        if values is not None:
            self._take_tokens(launched, values[:, :-NUM_MORE])
            drafts = arrived(posted[0].drafts) if launched.has_drafts else None
        elif launched.together is not None:
            width, values = launched.together.width, next(arrays)[: rows.slots.size]
            drafts = values[:, width : width + launched.max_drafts]
            self._take_tokens(launched, values[:, :width].copy())
        else:
            if launched.has_results:
                self._take_tokens(launched, next(arrays).copy())
            if launched.has_drafts:
                drafts = next(arrays)
        if drafts is not None or rows.is_ahead:
            self._num_kept[rows.slots] = 0 if drafts is None else (drafts >= 0).sum(1)
        if self._speculation is not None and launched.concerns_drafters:
            began = time.perf_counter()
            launched.next_drafts = self._speculation.collect(launched, drafts)
            launched.draft_s += time.perf_counter() - began
        for row, records in launched.logprob_parts():
            found = read(records, arrays)
            if row is None:
                launched.logprobs = dict(zip(records.rows.tolist(), found, strict=True))
                continue
            if not all(math.isfinite(value) for record in found for value in record.logprobs):
                launched.errors[row] = NAN
            launched.prompt_rows.setdefault(row, []).extend(found)

    def _take_tokens(self, launched: Launched, marked: np.ndarray) -> None:
        rows, plan, batch = launched.rows, launched.plan, self._batch
        assert plan is not None
        marked = marked.reshape(-1)[: plan.num_rows]  # behind these: padding of the step
        has_marks = np.count_nonzero(marked < 0) > 0
        ids = launched.token_ids = np.maximum(marked, 0) if has_marks else marked
        is_kept: np.ndarray | None = None
        if not rows.is_decode and (rows.is_ahead or rows.num_drafts.any()):
            is_kept = marked != NOT_KEPT
        is_broken = has_marks and bool(marked.min() < NOT_KEPT)
        if self._state is not None and (launched.sample_errors or is_broken):
            is_kept = self._find_broken_rows(launched, marked, is_kept)
        # A slot may have changed hands since the launch.
        valid = batch.owner[rows.slots] == launched.owners
        if not rows.is_decode:
            valid = valid[rows.sample_rows]
        if rows.is_ahead:  # a sequence may have come to its end with the step before
            valid &= rows.sample_positions <= batch.max_model_len
        if is_kept is not None:
            valid = valid & is_kept
            counts = np.bincount(rows.sample_rows[is_kept], minlength=rows.slots.size)
            launched.num_accepted = np.maximum(counts - 1, 0)
        self._learn(launched, ids, valid)
        if is_kept is not None and not self._unread:
            # Rows are in order, so the position of the last accepted one stays.
            batch.newest[plan.slots[valid]] = rows.sample_positions[valid]

    def _find_broken_rows(
        self, launched: Launched, marked: np.ndarray, is_kept: np.ndarray | None
    ) -> np.ndarray | None:
        """Rows that cannot go on get their error. Behind an accepted draft it may not matter, since the
        sequence may have ended before: the row is cut there, and tries that place once more if not."""
        assert launched.plan is not None
        sample_rows, depths = launched.rows.sample_rows, launched.plan.depths
        broken = {**launched.sample_errors}
        for code, error in MARKS.items():
            broken.update((place, error) for place in np.flatnonzero(marked == code).tolist())
        for place, error in sorted(broken.items()):
            if is_kept is not None and not is_kept[place]:
                continue
            if not depths[place]:
                launched.errors[int(sample_rows[place])] = error
                continue
            assert is_kept is not None, "a row has several places only with drafts"
            is_kept[place:] &= sample_rows[place:] != sample_rows[place]
            self._batch.forget_newest(int(launched.plan.slots[place]))
        return is_kept

    def _learn(self, launched: Launched, ids: np.ndarray, valid: np.ndarray) -> None:
        """Write tokens into the history of sequences that are still here, and advance grammars."""
        rows, plan = launched.rows, launched.plan
        assert plan is not None
        slots, positions = plan.slots, rows.sample_positions
        if np.count_nonzero(valid) < valid.size:
            slots, positions, ids = slots[valid], positions[valid], ids[valid]
        self._batch.learn(slots, positions, ids)
        if plan.flags & bits.GRAMMAR and self._state is not None:
            sample_rows = rows.sample_rows[valid].tolist()
            for row, slot, token in zip(sample_rows, slots.tolist(), ids.tolist(), strict=True):
                if row not in launched.errors and not self._state.advance(slot, token):
                    launched.errors[row] = NOT_IN_GRAMMAR


def _cut(launched: Launched, page: np.ndarray) -> None:
    """Rows whose token means nothing have come to an error, and give nothing from here on."""
    for row in np.flatnonzero(page[:, 0] < 0).tolist():
        launched.errors.setdefault(row, MARKS.get(int(page[row, 0]), NAN))
    rows = list(launched.errors)
    page[rows, :-NUM_MORE], page[rows, -2], page[rows, -1] = NOT_KEPT, 0, -1


def arrived(arrival: Arrival) -> np.ndarray:
    """The values, once they are there."""
    wait_for(arrival)
    assert arrival.values is not None
    return arrival.values
