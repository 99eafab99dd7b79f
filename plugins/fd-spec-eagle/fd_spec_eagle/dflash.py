"""Driver `dflash`: drafts a block at once from hidden states of several of the target's layers.

The cache entry of position t is made of the target's hidden states at t alone. After every step of
the target, prompt chunks included, entries of its tokens are written; then the block that begins
with the newest token, whose own entries the next step overwrites. Nothing here waits for the
device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from fastdeploy_core.contracts.speculative import NO_DRAFT

from .dflash_layers import DFlashLayers
from .target import HiddenStates, draft_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastdeploy_core.contracts.speculative import DraftBatch, DrafterContext
    from fastdeploy_core.tensor import Tensor


class DFlashDrafter:
    """One per rank; all ranks do the same."""

    name = "dflash"
    contract = (1, 5)
    runs_on: Literal["device"] = "device"

    def __init__(self, context: DrafterContext) -> None:
        target, draft, load = draft_of(self.name, context)
        self._xp, self._mask = context.builder.xp, draft.mask_token_id
        # Blocks are of one size, however many of the drafts a step wants.
        self._size = 1 + context.num_speculative_tokens
        self._layers = DFlashLayers(target, context.builder, draft, self._size)
        load([""])
        self._states = HiddenStates(self._xp, target, draft.reads)

    def propose(self, batch: DraftBatch) -> Tensor:
        """[B, max_drafts] int64; NO_DRAFT where no row draws."""
        xp, layers, caches = self._xp, self._layers, batch.context.caches
        rows, count = int(batch.last.shape[0]), batch.max_drafts
        whole = {"dtype": xp.int64, "device": batch.last.device}
        layers.fill(self._states.of(batch), batch.attention, caches)
        if not count or not batch.draws.any():
            return xp.full((rows, count), NO_DRAFT, **whole)
        steps = [batch.decode(batch.ends + number)[0] for number in range(1, 1 + self._size)]
        newest = xp.index_select(batch.next_token_ids, 0, batch.last)
        masks = xp.full((rows, self._size - 1), self._mask, **whole)
        ids = xp.cat((newest.unsqueeze(1), masks), 1).reshape(-1)
        normed = layers.forward(ids, layers.block(steps, caches), count)
        if batch.is_greedy:
            return layers.vocabulary.likeliest(normed).reshape(rows, count)
        logits = layers.vocabulary.logits(normed).reshape(rows, count, -1)
        drawn = [batch.draw(logits[:, number].contiguous(), number) for number in range(count)]
        return xp.stack(drawn, 1)

    def observe(self, seq_id: int, drafted: Sequence[int], accepted: int) -> None:
        """Nothing to learn."""

    def forget(self, seq_id: int) -> None:
        """Only cache entries are kept per sequence, and they are freed with its blocks."""
