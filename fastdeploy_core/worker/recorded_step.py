"""One recorded decode step: from the state of the slots (device_slots.py) to hidden states, and what may follow.

Behind it stand shorter recordings to choose from. Greedy rows: one draws, judges drafts, writes back and, where
a drafter works on the device, drafts for the next step. Rows that draw at random: one draws and writes back.
Any others: one computes logits, for a sampler that is not recorded. Behind these two one may draft.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from fastdeploy_core.contracts.device import RepeatingDevice
from fastdeploy_core.contracts.small import GreedyLM

from .step_buffers import DraftsWithResults

if TYPE_CHECKING:
    import numpy as np

    from fastdeploy_core.contracts.device import CapturedGraph
    from fastdeploy_core.layers.context import ForwardContext
    from fastdeploy_core.tensor import Tensor

    from .posting import Posted
    from .step_graphs import StepGraphs


class RecordedStep:
    """A decode step of `size` rows with `width` tokens each."""

    def __init__(self, graphs: StepGraphs, size: int, width: int) -> None:
        self.size, self.width = size, width
        self._graphs, self._buffers = graphs, graphs.buffers[width]
        self.attention = self._buffers.batch(size)  # of what the host sees only shapes are right
        self.input_ids = self._buffers.input_ids[: size * width]
        self._forward: CapturedGraph | None = None
        self._head: CapturedGraph | None = None
        self._greedy: CapturedGraph | None = None
        self._random: dict[bool, CapturedGraph] = {}  # by whether rows are filtered
        self._replayed: list[CapturedGraph] = []  # since `replay`
        # What a replay leaves here stays until the next replay of any step.
        self.context: ForwardContext | None = None
        self.hidden: Tensor = None  # [size * width, hidden size]
        self.logits: Tensor = None  # [size * width, vocabulary] float32
        self.drawn: Tensor = None  # [size * width] int64
        self.last: Tensor = None  # [size] int64: where in drawn each row's last kept token stands
        # By whether the greedy tokens are drawn in it, and number of drafts.
        self._drafting: dict[tuple[bool, int], CapturedGraph] = {}
        self._drafts: dict[tuple[bool, int], DraftsWithResults] = {}

    def record(self, beside: CapturedGraph | None) -> CapturedGraph:
        """Run once to get ready, then record; the memory of `beside` is used again."""
        graphs, capture = self._graphs, self._graphs.device.capture
        self.run_once()
        self._forward = capture(self.compute, beside)
        beside = beside or self._forward
        self._head = capture(self.compute_logits, beside)
        self._greedy = capture(self.draw_greedily, beside)
        if graphs.draft_numbers:
            self._forward.replay()  # recording computes nothing, and what runs next needs hidden states
        for number in graphs.draft_numbers:
            self._record_drafts(number, beside, is_greedy=True)
        # What is drawn elsewhere is handed on here.
        self.drawn, self.last = self._buffers.drawn_of(self.size), self._buffers.last[: self.size]
        if graphs.draws is not None:
            for filters in (False, True):
                draw = partial(self.draw_at_random, filters=filters)
                draw()
                self._random[filters] = capture(draw, beside)
        for number in graphs.draft_numbers:
            self._record_drafts(number, beside, is_greedy=False)
        return beside

    def run_once(self) -> None:
        """Whatever is made at first use exists afterwards."""
        for run in (self.compute, self.compute_logits, self.draw_greedily):
            run()

    def _record_drafts(self, number: int, beside: CapturedGraph, *, is_greedy: bool) -> None:
        """`number` drafts, by a drafter on the device: behind the greedy tokens, which are drawn in the same
        recording, or behind what was handed on."""
        graphs, slots, size = self._graphs, self._graphs.slots, self.size
        make = graphs.propose
        assert make is not None
        is_random = graphs.drafts_at_random and not is_greedy

        def run() -> None:
            if is_greedy:
                self.draw_greedily()
            results = self._buffers.results[:size]
            slots.append_history(results)
            # Results stand beside the drafts: a second copy to the host would cost it more.
            proposals = make(self, number, is_random)
            values = slots.keep_drafts(slots.rows[:size], proposals, results, posts=True)
            self._drafts[is_greedy, number] = DraftsWithResults(values, self.width)

        run()
        self._drafting[is_greedy, number] = graphs.device.capture(run, beside)

    def replay(self) -> None:
        """Queue everything up to the hidden states."""
        postbox = self._graphs.slots.postbox
        if postbox is not None:
            postbox.begin()
        self._replayed.clear()
        self._queue(self._forward)

    def repeat(self, times: int) -> None:
        """Queue so many times more what was replayed since `replay`, each time over what the one before left."""
        device, postbox = self._graphs.device, self._graphs.slots.postbox
        if postbox is None and isinstance(device, RepeatingDevice):
            device.replay_times(self._replayed, times)
            return
        for _ in range(times):
            if postbox is not None:
                postbox.begin()
            for graph in self._replayed:
                graph.replay()

    def _queue(self, graph: CapturedGraph | None) -> None:
        assert graph is not None
        graph.replay()
        self._replayed.append(graph)

    def expect(self, num_rows: int, num_drafts: int, num_decodes: int) -> list[Posted]:
        """What the last so many replays tell the host of their rows by themselves, and of the last one's drafts;
        empty: nothing."""
        postbox = self._graphs.slots.postbox
        if postbox is None:
            return []
        earlier = [
            postbox.expect(num_rows, self.width, 0, n) for n in range(num_decodes - 1, 0, -1)
        ]
        return [*earlier, postbox.expect(num_rows, self.width, num_drafts)]

    def replay_head(self, num_rows: int) -> Tensor:
        """Queue the logits of the rows; behind `replay`."""
        self._queue(self._head)
        return self.logits[: num_rows * self.width]

    def replay_greedy(self, num_rows: int) -> Tensor:
        """Queue the likeliest tokens, and their writing back: marked tokens of the rows; behind
        `replay`."""
        self._queue(self._greedy)
        return self._buffers.results_of(num_rows)

    def replay_greedy_and_draft(self, number: int) -> DraftsWithResults:
        """Queue what `replay_greedy` does and then, in the same recording, what `replay_drafts` does."""
        return self._replay_drafts(number, is_greedy=True)

    @property
    def draws_at_random(self) -> bool:
        """Whether replay_random is possible."""
        return bool(self._random)

    def replay_random(self, slots: np.ndarray, *, filters: bool) -> Tensor:
        """replay_greedy for rows of which some draw at random."""
        assert self._graphs.draws is not None
        self._graphs.draws.fill(slots)
        self._queue(self._random[filters])
        return self._buffers.results_of(slots.size)

    def replay_drafts(self, number: int) -> DraftsWithResults:
        """Queue the drafts behind `replay_random` or `write_back`: those of the smallest recorded number, of
        which the slots take no more than is asked."""
        return self._replay_drafts(number, is_greedy=False)

    def _replay_drafts(self, number: int, *, is_greedy: bool) -> DraftsWithResults:
        key = (is_greedy, next(n for n in self._graphs.draft_numbers if n >= number))
        self._queue(self._drafting[key])
        return self._drafts[key]

    def compute(self) -> None:
        """What is recorded first: from slots to hidden states."""
        graphs, slots, batch = self._graphs, self._graphs.slots, self.attention
        graphs.prepare(
            slots.rows[: self.size],
            slots.tables,
            slots.num_computed,
            slots.newest,
            slots.drafts,
            slots.num_drafts,
            slots.room,
            graphs.block_size,
            slots.turn,
            self.input_ids,
            batch.positions,
            batch.slot_mapping,
            batch.seq_lens_dev,
            batch.block_tables_dev,
        )
        self.context = graphs.context(batch)
        self.hidden = graphs.model.forward(self.input_ids, batch.positions, self.context)

    def compute_logits(self) -> None:
        """From hidden states to logits."""
        self.logits = self._graphs.model.compute_logits(self.hidden)

    def draw_greedily(self) -> None:
        """From hidden states to slots."""
        graphs, model = self._graphs, self._graphs.model
        if isinstance(model, GreedyLM):
            drawn, peaks = model.greedy(self.hidden)
        else:
            logits = model.compute_logits(self.hidden)
            drawn = graphs.greedy_kernel(logits)
            peaks = graphs.xp.gather(logits, 1, drawn.unsqueeze(1)).squeeze(1)
        self.drawn, self.last = drawn, self._finish(self.size, drawn, drawn, peaks)

    def draw_at_random(self, *, filters: bool) -> None:
        """From hidden states to slots, as the sampler does it for rows without constraints."""
        graphs, draws = self._graphs, self._graphs.draws
        assert draws is not None
        logits = graphs.model.compute_logits(self.hidden)
        drawn, peaks = draws.draw(logits, self.attention.positions, self.width, filters=filters)
        self._hand_on(drawn, self._finish(self.size, drawn, drawn, peaks))

    def write_back(self, num_rows: int, drawn: Tensor, marked: Tensor) -> Tensor:
        """What a sampler drew that is not recorded, as if `draw_greedily` had: marked tokens of the
        rows. Drafts are made for rows of nobody, too: what other steps have left in their places may
        be no token."""
        self._hand_on(drawn, self._finish(num_rows, drawn, marked, None))
        if num_rows < self.size:
            self.drawn[num_rows * self.width :] = 0
            self.last[num_rows:] = 0
        return self._buffers.results_of(num_rows)

    def _hand_on(self, drawn: Tensor, last: Tensor) -> None:
        """Put what was drawn where recorded drafts look for it, if there are any."""
        if not self._graphs.draft_numbers:
            return
        self.drawn[: drawn.shape[0]].copy_(drawn)
        self.last[: last.shape[0]].copy_(last)

    def _finish(self, num_rows: int, drawn: Tensor, marked: Tensor, peaks: Tensor | None) -> Tensor:
        """The slots take what was drawn, as far as drafts are right, and the results are marked tokens
        for the host, -1 behind each row's last one: where in drawn that stands."""
        graphs, slots = self._graphs, self._graphs.slots
        rows, results = slots.rows[:num_rows], self._buffers.results[:num_rows]
        last = slots.finish(rows, drawn, marked, peaks, results)
        if graphs.kept is not None and self.width == 1:
            graphs.kept.keep(rows, results, slots.num_computed)
        return last
