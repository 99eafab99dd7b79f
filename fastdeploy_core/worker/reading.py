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
        self._unread.append(launched)
        if recorded is not None and launched.rows.num_decodes == 1:
            number = 0 if drafts is None else max(0, launched.max_drafts)
            launched.posted = recorded.expect(launched.rows.slots.size, number)
        if launched.posted is not None:
            launched.event, tensors = launched.posted.results, []
        for _, record in launched.logprob_parts():
            tensors += record.tensors()
        if launched.posted is not None and not tensors:
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
        if launched.rows.num_decodes > 1:
            self._take_several(launched)
        elif not self._take_ahead(launched):
            self._take_any(launched)
        if self._speculation is not None:
            launched.draft_failures = self._speculation.num_failures
        if launched.download is not None:
            launched.download.release()
        launched.is_read = True  # last: another thread may be looking at it without the lock

    def _take_ahead(self, launched: Launched) -> bool:
        """In short what `_take_any` does, for a step that went ahead of results and behind which another
        one has: nobody asks for its drafts. False, and nothing is taken, where more is to be done."""
        rows, together, batch = launched.rows, launched.together, self._batch
        is_steady = self._unread and self._unread[0].rows.is_ahead and not launched.sample_errors
        if not rows.is_ahead or together is None or not is_steady:
            return False
        slots, width, posted = rows.slots, together.width, launched.posted
        if posted is not None:
            values = arrived(posted.results)
            tokens, counts, fed = values[:, :width], values[:, width + 1] + 1, values[:, width]
            is_broken = np.count_nonzero(tokens[:, 0] < 0)
            if self._drafts_before is not None and self._speculation is not None:
                self._speculation.check_kept(self._drafts_before.peek())
            self._drafts_before = posted.drafts
        else:
            assert launched.download is not None
            values = launched.download.arrays[0][: slots.size]
            tokens, is_token = values[:, :width], values >= 0
            counts = np.add.reduce(is_token[:, :width], 1)
            fed, is_broken = self._fed(rows), np.count_nonzero(values < NOT_KEPT)
        if is_broken:
            return False
        launched.counts, launched.fed_ahead = counts, fed
        launched.token_ids = tokens[tokens >= 0]
        if posted is None:
            drafts = is_token[:, width : width + launched.max_drafts]
            self._num_kept[slots] = np.add.reduce(drafts, 1)
        stays = batch.owner[slots] == launched.owners
        if np.count_nonzero(stays) < slots.size:
            slots, tokens, counts = slots[stays], tokens[stays], counts[stays]
        batch.learn_several(slots, tokens, counts)
        return True

    def _fed(self, rows: StepRows) -> np.ndarray:
        """[B] drafts that rows which went ahead were fed, as the step before tells."""
        fed: np.ndarray = np.minimum(rows.num_drafts, self._num_kept[rows.slots])
        return fed

    def _take_several(self, launched: Launched) -> None:
        """Of steps that ran one behind the other. A row is cut before what leads to nothing: it tries that
        place once more, since it may have come to its end before."""
        rows, batch = launched.rows, self._batch
        assert launched.download is not None
        marked = in_order(launched.download.arrays[0], rows)
        is_kept = np.logical_and.accumulate(marked >= 0, 1)
        launched.counts = counts = np.add.reduce(is_kept, 1)
        launched.token_ids = marked[is_kept]
        for row in np.flatnonzero(counts < rows.num_decodes).tolist():
            if not counts[row]:
                launched.errors[row] = MARKS[int(marked[row, 0])]
            batch.forget_newest(int(rows.slots[row]))
        stays = batch.owner[rows.slots] == launched.owners
        batch.learn_several(rows.slots[stays], marked[stays], counts[stays])

    def _take_any(self, launched: Launched) -> None:
        rows, batch, posted = launched.rows, self._batch, launched.posted
        values = None if posted is None else arrived(posted.results)
        if rows.is_ahead:
            fed = self._fed(rows) if values is None else values[:, -NUM_MORE]
            rows.settle(batch.num_known[rows.slots] - 1, fed)
            launched.fed_ahead = rows.num_drafts
        arrays = iter(() if launched.download is None else launched.download.arrays)
        drafts: np.ndarray | None = None
        if posted is not None and values is not None:
            self._take_tokens(launched, values[:, :-NUM_MORE])
            drafts = arrived(posted.drafts) if launched.has_drafts else None
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


def arrived(arrival: Arrival) -> np.ndarray:
    """The values, once they are there."""
    wait_for(arrival)
    assert arrival.values is not None
    return arrival.values
