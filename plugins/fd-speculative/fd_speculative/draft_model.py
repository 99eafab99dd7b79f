"""`draft_model`: a smaller model of the same vocabulary drafts, one token per step of its own.

After the target's step it is fed the same tokens, which keeps its cache complete. Then it continues
alone from the token just sampled. It samples with the target's random numbers, so likely tokens
agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from fastdeploy_core.contracts.small import GreedyLM
from fastdeploy_core.contracts.speculative import DraftBatch, DrafterContext
from fastdeploy_core.errors import ConfigError

from .options import DraftModelOptions, read_options

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor


class DraftModel:
    """Owns the draft model. Its caches lie in the target's pool and use the same block tables."""

    name = "draft_model"
    contract = (1, 0)
    runs_on: Literal["device"] = "device"

    def __init__(self, context: DrafterContext) -> None:
        options = read_options(DraftModelOptions, context.options)
        if context.load_model is None or context.device is None:
            raise ConfigError("a draft model needs a worker that loads models")
        self._xp = context.device.xp
        self._model = context.load_model(options.model, options.quantization)

    def propose(self, batch: DraftBatch) -> Tensor:
        """One pass over the tokens that the target was fed, then one step per draft."""
        xp, model = self._xp, self._model
        model.forward(batch.input_ids, batch.attention.positions, batch.context)
        select = xp.index_select
        ids = select(batch.next_token_ids, 0, batch.last)
        drafts = []
        for step in range(batch.max_drafts):
            attention, context = batch.decode(batch.ends + (1 + step))
            hidden = model.forward(ids, attention.positions, context)
            if batch.is_greedy and isinstance(model, GreedyLM):
                ids = model.greedy(hidden)[0]
            else:
                ids = batch.draw(model.compute_logits(hidden), step)
            drafts.append(ids.unsqueeze(1))
        if drafts:
            return xp.cat(drafts, 1)
        return xp.zeros((int(ids.shape[0]), 0), dtype=xp.int64, device=ids.device)

    def observe(self, seq_id: int, drafted: Sequence[int], accepted: int) -> None:
        """Drafters on the device are not told."""

    def forget(self, seq_id: int) -> None:
        """The cache lies in blocks that this drafter does not own."""
