"""The tensors of a decode step's drafting round, as a worker that captures steps holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fastdeploy_core.contracts.attention import AttentionBatch
from fastdeploy_core.contracts.speculative import DraftBatch
from tests.plugins.mtp_rig import BLOCK, Bench


class CapturableRound:
    """The drafts after a decode step of these sequences, over buffers that stay where they are."""

    def __init__(self, bench: Bench, names: Sequence[str]) -> None:
        self._bench, xp = bench, bench.xp
        ids = [bench.sequences[n].tokens[bench.sequences[n].num_computed] for n in names]
        batch = bench._batch(names, [1] * len(names), bench.num_drafts)
        wide = xp.zeros((len(names), 8), dtype=xp.int32)
        for row, name in enumerate(names):
            blocks = bench.sequences[name].blocks
            wide[row, : len(blocks)] = bench.device.to_device(np.array(blocks, np.int32))
        batch = replace(
            batch,
            block_tables=np.zeros((len(names), 8), np.int32),
            block_tables_dev=wide,
            tokens_per_row=1,
            is_exact=False,
        )
        with xp.no_grad():
            context = bench._context(batch)
            hidden = bench.model.forward(bench._tensor(ids), batch.positions, context)
        self.kept = context.kept
        follow = []
        for row, name in enumerate(names):
            sequence = bench.sequences[name]
            sequence.hidden.append(np.array(bench.device.to_host(hidden[row]), np.float64))
            sequence.num_computed += 1
            follow.append(sequence.tokens[sequence.num_computed])
        self.draft_batch = DraftBatch(
            seq_ids=np.arange(len(names)),
            slots=np.arange(len(names)),
            draws=np.ones(len(names), bool),
            max_drafts=bench.num_drafts,
            attention=batch,
            context=None,
            input_ids=bench._tensor(ids),
            next_token_ids=bench._tensor(follow),
            hidden_states=hidden,
            last=bench._tensor(range(len(names))),
            draw=lambda logits, number: xp.argmax(logits, -1),
            decode=self._decode,
            ends=batch.positions,
        )
        self.draft_batch.context = _Live(self)

    def become(self, other: CapturableRound) -> None:
        """Take over the other's numbers."""
        mine, theirs = self.draft_batch, other.draft_batch
        for name in ("input_ids", "next_token_ids", "hidden_states", "last"):
            getattr(mine, name).copy_(getattr(theirs, name))
        for name in ("seq_lens_dev", "block_tables_dev", "slot_mapping", "positions"):
            getattr(mine.attention, name).copy_(getattr(theirs.attention, name))
        for number, kept in self.kept.items():
            kept.copy_(other.kept[number])

    def _decode(self, positions: Any) -> tuple[AttentionBatch, Any]:
        step, xp = self.draft_batch.attention, self._bench.xp
        block = xp.gather(step.block_tables_dev.to(xp.int64), 1, (positions // BLOCK).unsqueeze(1))
        batch = replace(
            step,
            seq_lens_dev=(positions + 1).to(xp.int32),
            slot_mapping=block.squeeze(1) * BLOCK + positions % BLOCK,
            positions=positions,
        )
        return batch, self._bench._context(batch)


def replayed(bench: Bench, captured: Sequence[str], others: Sequence[str]) -> Any:
    """The drafts of `others` [2, num_drafts], by the captured graph of a round of `captured`. While
    it is captured nothing comes to the host."""
    first = CapturableRound(bench, captured)
    proposal = bench.xp.zeros((len(captured), bench.num_drafts), dtype=bench.xp.int64)
    with bench.xp.no_grad():

        def run() -> None:
            proposal.copy_(bench.drafter.propose(first.draft_batch))

        run()  # to get ready
        copies = bench.device.num_copies
        captured = bench.device.capture(run)
        assert bench.device.num_copies == copies
        proposal.fill_(-7)
        first.become(CapturableRound(bench, others))
        captured.replay()
    return proposal


class _Live:
    """The context of the step, prepared anew whenever its metadata is asked for, as in a
    captured graph."""

    def __init__(self, round_: CapturableRound) -> None:
        self._round = round_

    def __getattr__(self, name: str) -> Any:
        fresh = self._round._bench._context(self._round.draft_batch.attention)
        return self._round.kept if name == "kept" else getattr(fresh, name)
