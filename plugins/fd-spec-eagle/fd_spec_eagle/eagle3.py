"""Driver `eagle3`: drafts from hidden states of several of the target's layers.

The cache entry of position t lies in the cache slot of position t. It is made of the target's
hidden states at t and of the token at t + 1. So after every step of the target, prompt chunks
included, the block runs once over the same tokens with the same attention metadata, and gives the
first draft. Each further draft comes from the block again, one position later, with its own hidden
state in place of the target's. Nothing here waits for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from fastdeploy_core.contracts.speculative import NO_DRAFT

from .eagle3_layers import Eagle3Block
from .target import HiddenStates, draft_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastdeploy_core.contracts.speculative import DraftBatch, DrafterContext
    from fastdeploy_core.tensor import Tensor


class Eagle3Drafter:
    """One per rank; all ranks do the same."""

    name = "eagle3"
    contract = (1, 5)
    runs_on: Literal["device"] = "device"

    def __init__(self, context: DrafterContext) -> None:
        target, draft, load = draft_of(self.name, context)
        self._xp = context.builder.xp
        self._block = Eagle3Block(target, context.builder, draft)
        load([""])
        self._states = HiddenStates(self._xp, target, draft.reads)

    def propose(self, batch: DraftBatch) -> Tensor:
        """[B, max_drafts] int64; NO_DRAFT where no row draws."""
        xp, block = self._xp, self._block
        count = batch.max_drafts if batch.draws.any() else 0
        hidden = block.projection(self._states.of(batch))
        attention, context, where = batch.attention, batch.context, batch.ends
        ids, rows = batch.next_token_ids, batch.last
        drafts: list[Tensor] = []
        for number in range(max(1, count)):
            if number:
                where, ids, rows = where + 1, drafts[-1], None
                attention, context = batch.decode(where)
            normed, hidden = block.forward(ids, hidden, attention.positions, context, rows)
            if count:
                drafts.append(self._draft(batch, normed, number))
        if not drafts:
            shape = (int(batch.last.shape[0]), batch.max_drafts)
            return xp.zeros(shape, dtype=xp.int64, device=batch.last.device) + NO_DRAFT
        return xp.stack(drafts, 1)

    def observe(self, seq_id: int, drafted: Sequence[int], accepted: int) -> None:
        """Nothing to learn."""

    def forget(self, seq_id: int) -> None:
        """Only cache entries are kept per sequence, and they are freed with its blocks."""

    def _draft(self, batch: DraftBatch, normed: Tensor, number: int) -> Tensor:
        """[B] int64: draft `number` of each row."""
        if batch.is_greedy:
            return self._block.vocabulary.likeliest(normed)
        return batch.draw(self._block.vocabulary.logits(normed), number)
