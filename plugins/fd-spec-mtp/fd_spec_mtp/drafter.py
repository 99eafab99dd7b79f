"""Driver `mtp`: drafts from the target's hidden states through its multi-token-prediction modules.

A module's cache entry of position t lies in the cache slot of position t. It is computed from the
target's hidden state at t and the token at t + 1. So after every step of the target, prompt chunks
included, the modules run once over the same tokens with the same attention metadata. That pass
gives the first draft. Further drafts come from the next modules at the same position, then from the
last module again, one position later each time. Nothing here waits for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from fastdeploy_core.contracts.small import ExtensibleLM
from fastdeploy_core.contracts.speculative import NO_DRAFT
from fastdeploy_core.errors import CapabilityError

from .layout import modules, num_modules
from .module import MTPModule, Pictures
from .options import draft_config, num_model_steps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastdeploy_core.contracts.speculative import DraftBatch, DrafterContext
    from fastdeploy_core.tensor import Tensor


class MTPDrafter:
    """One per rank; all ranks do the same."""

    name = "mtp"
    contract = (1, 0)
    runs_on: Literal["device"] = "device"

    def __init__(self, context: DrafterContext) -> None:
        target, build = context.model, context.builder
        if not isinstance(target, ExtensibleLM):
            raise CapabilityError(
                f"method 'mtp' continues the target's blocks; {type(target).__name__} does not "
                "offer them (contracts.small.ExtensibleLM); a method without weights such as "
                "'ngram' works"
            )
        if context.load_weights is None:
            raise CapabilityError(
                "method 'mtp' has layers of its own and was built without builder and load_weights "
                "(contracts.speculative.DrafterContext); it drafts on the device only"
            )
        # Select rows of a tensor by their numbers: the same operation as an embedding lookup.
        self._xp, self._rows = build.xp, build.kernels["embedding"]
        config = draft_config(context.hf_config, context.options)
        steps = num_model_steps(context.options, context.num_speculative_tokens)
        names = modules(context.hf_config, min(num_modules(config), steps))
        hidden_size = int(context.hf_config["hidden_size"])
        num_layers = int(context.hf_config["num_hidden_layers"])
        self._modules = [
            MTPModule(
                target,
                build,
                module,
                num_layers + number,
                hidden_size=hidden_size,
                vocab_size=context.vocab_size,
                eps=float(context.hf_config.get("rms_norm_eps", 1e-6)),
            )
            for number, module in enumerate(names)
        ]
        self._max_steps = steps
        context.load_weights([prefix for module in names for prefix in module.prefixes])

    def propose(self, batch: DraftBatch) -> Tensor:
        """[B, max_drafts] int64; NO_DRAFT after the modules' own number of steps."""
        xp = self._xp
        count = min(batch.max_drafts, self._max_steps) if batch.draws.any() else 0
        positions, hidden = batch.attention.positions, batch.hidden_states
        next_ids, newest = batch.next_token_ids, hidden
        drafts: list[Tensor] = []
        pictures, embedded = None, batch.context.embedded
        if embedded is not None:
            pictures = Pictures.of(xp, embedded, hidden)
            ends = batch.attention.cu_seqlens_q_dev[1:].to(xp.int64) - 1
        for number, module in enumerate(self._modules):
            if number:
                next_ids = self._shifted(next_ids, batch.last, drafts[-1])
            pictures = None if pictures is None else pictures.next(ends)
            hidden = module.forward(next_ids, hidden, positions, batch.context, pictures)
            if number + 1 == len(self._modules) and number >= count:
                break  # the module's cache is complete and its draft is not needed
            newest = self._rows(batch.last, hidden)
            drafts.append(self._draft(batch, module, newest, number))
        last = self._modules[-1]
        if len(drafts) < count:
            where = batch.ends
        while len(drafts) < count:
            where = where + 1
            attention, context = batch.decode(where)
            newest = last.forward(drafts[-1], newest, attention.positions, context)
            drafts.append(self._draft(batch, last, newest, len(drafts)))
        made, device = drafts[:count], batch.last.device
        if count < batch.max_drafts:
            none = xp.full(batch.last.shape, NO_DRAFT, dtype=xp.int64, device=device)
            made += [none] * (batch.max_drafts - count)
        if len(made) == 1:
            return made[0].unsqueeze(1)
        if not made:
            return xp.zeros((batch.last.shape[0], 0), dtype=xp.int64, device=device)
        return xp.stack(made, 1)

    def observe(self, seq_id: int, drafted: Sequence[int], accepted: int) -> None:
        """Nothing to learn."""

    def forget(self, seq_id: int) -> None:
        """Only cache entries are kept per sequence, and they are freed with its blocks."""

    def _draft(self, batch: DraftBatch, module: MTPModule, hidden: Tensor, number: int) -> Tensor:
        """[B] int64: draft `number` of each row."""
        # After the last draft that is wanted, it only stands in for a token that is not known yet.
        if batch.is_greedy or number >= batch.max_drafts:
            return module.likeliest(hidden)
        return batch.draw(module.logits(hidden), number)

    def _shifted(self, ids: Tensor, last: Tensor, guess: Tensor) -> Tensor:
        """For the next module every token of a row moves forward by one place. A draft takes the
        last place; if it is rejected, this module's cache entry there stays slightly wrong."""
        moved = self._xp.cat((ids[1:], ids[-1:]))
        return self._xp.index_copy_(moved, 0, last, guess)
