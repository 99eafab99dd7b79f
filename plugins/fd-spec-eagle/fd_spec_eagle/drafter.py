"""Driver `eagle3`: drafts from hidden states of several of the target's layers.

The cache entry of position t lies in the cache slot of position t. It is made of the target's
hidden states at t and of the token at t + 1. So after every step of the target, prompt chunks
included, the block runs once over the same tokens with the same attention metadata, and gives the
first draft. Each further draft comes from the block again, one position later, with its own hidden
state in place of the target's. Nothing here waits for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from fastdeploy_core.contracts.small import ExtensibleLM
from fastdeploy_core.contracts.speculative import NO_DRAFT
from fastdeploy_core.errors import CapabilityError

from .block import Eagle3Block, Watched
from .layout import read_folder

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
        target, build = context.model, context.builder
        blocks = getattr(target, "layers", None)
        if not isinstance(target, ExtensibleLM) or not isinstance(blocks, list):
            raise CapabilityError(
                f"method 'eagle3' reads what the target's blocks return; {type(target).__name__} "
                "does not offer them (contracts.small.ExtensibleLM, with a list `layers`); a "
                "method without weights such as 'ngram' works"
            )
        if context.load_weights is None:
            raise CapabilityError(
                "method 'eagle3' has layers of its own and was built without builder and "
                "load_weights (contracts.speculative.DrafterContext)"
            )
        if not context.options.get("quantization"):
            build.quantizer = None  # published drafts are in full precision, whatever the target is
        draft = read_folder(str(context.options.get("model")), context.hf_config)
        self._xp, self._reads = build.xp, draft.reads
        self._block = Eagle3Block(target, build, draft)
        context.load_weights([""])
        for number in self._reads:
            blocks[number - 1] = Watched(blocks[number - 1], number)

    def propose(self, batch: DraftBatch) -> Tensor:
        """[B, max_drafts] int64; NO_DRAFT where no row draws."""
        xp, block = self._xp, self._block
        num_tokens = int(batch.input_ids.shape[0])
        count = batch.max_drafts if batch.draws.any() else 0
        # What a captured step kept may have padding after the step's tokens.
        states = [batch.context.kept[number][:num_tokens] for number in self._reads]
        hidden = block.projection(xp.cat(states, -1))
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
            return self._block.likeliest(normed)
        return batch.draw(self._block.logits(normed), number)
