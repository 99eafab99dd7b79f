"""Logits to tokens, in this order:

    logits processors, logit bias, penalties, masks (allowed ids, bad words, min_tokens, grammar),
    temperature, min_p / top_k / top_p, sampling

A stage that no row of the batch needs is skipped; a batch of plain greedy rows is one argmax. Raw
log-probabilities are of the logits before the first stage, processed ones of those after the last.
The token sampled for a row depends on the row's seed, position and logits only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from . import columns as bits
from .columns import SamplingPlan
from .leniency import Leniency, draft_ranks
from .logprobs import LogprobTensors, gather
from .masks import Histories, OutputTokens, TokenMasks
from .penalties import PenaltyTables
from .processors import ProcessorSet

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.tensor import Tensor


@dataclass(slots=True)
class Sampled:
    """The results of a batch of logits; tensors are still on the device."""

    token_ids: Tensor  # [rows] int64, always a valid id
    peak: Tensor  # [rows] float32; not finite: the model produced NaN or infinity
    possible: Tensor | None = None  # [rows] float32; not finite: every token was forbidden
    logprobs: LogprobTensors | None = None
    errors: dict[int, str] = field(default_factory=dict)  # by row; known on the host already


@dataclass(slots=True)
class SamplingStep:
    """What changes from step to step, per row of the plan."""

    # [rows] int64: the position of the sampled token in its sequence; on the device if the host
    # does not know it
    positions: np.ndarray | Tensor
    num_output: np.ndarray  # [rows] int64: tokens generated before it
    output_tokens: OutputTokens  # by slot; complete whenever the plan has a HOST flag
    # The draft that each row's sampled token is compared with, -1: none. None: no row has a draft
    # before or after it.
    drafts: np.ndarray | None = None  # [rows] int64
    drafts_dev: Tensor | None = None


class Sampler:
    """Owns no state of sequences but references to it; worker/model_runner.py names owners."""

    def __init__(
        self,
        device: DeviceBackend,
        kernels: KernelTable,
        masks: TokenMasks,
        penalties: PenaltyTables,
        processors: ProcessorSet,
        logprobs_mode: str = "raw_logprobs",
        leniency: Leniency | None = None,
    ) -> None:
        self._device, self._xp = device, device.xp
        self._leniency = leniency
        self._masks, self._penalties, self._processors = masks, penalties, processors
        self._mode = logprobs_mode
        self._greedy, self._sample = kernels["greedy"], kernels["sample"]
        self._apply_penalties = kernels["apply_penalties"]
        self._apply_bitmask, self._filter = kernels["apply_bitmask"], kernels["filter_logits"]
        self._log_softmax = kernels["log_softmax"]

    def greedy(self, logits: Tensor) -> Sampled:
        """The likeliest tokens, for rows that need nothing else (plan.is_plain)."""
        token_ids = self._greedy(logits)
        # NaN counts as the largest, so the chosen logit shows whether the row holds one.
        return Sampled(token_ids, self._xp.gather(logits, 1, token_ids.unsqueeze(1)))

    def sample(self, logits: Tensor, plan: SamplingPlan, step: SamplingStep) -> Sampled:
        """logits: [rows, vocabulary] float32, consumed. Rows are those of the plan."""
        xp, flags = self._xp, plan.flags & ~bits.PROMPT_LOGPROBS
        sampled = Sampled(logits, xp.amax(logits, -1))
        values = None
        if flags & bits.LOGPROBS and self._mode.startswith("raw"):
            values = self._values(logits, plan.rows_dev(bits.LOGPROBS), keep=True)
        if flags & (bits.FORBIDS | bits.PENALTY):
            logits = self._constrain(logits, plan, step, sampled)
        processed = flags & bits.LOGPROBS and values is None
        lenient, drafts = self._leniency, step.drafts_dev
        if lenient is not None and drafts is not None and flags & bits.RANDOM:
            ranks = draft_ranks(xp, logits, drafts)
            tokens, logits = self._sample_tokens(logits, plan, step.positions, True)
            sampled.token_ids = lenient.choose(
                xp, tokens, drafts, ranks, logits, plan.is_random_dev()
            )
        else:
            sampled.token_ids, logits = self._sample_tokens(
                logits, plan, step.positions, bool(processed)
            )
        if processed:
            values = self._values(logits, plan.rows_dev(bits.LOGPROBS), keep=False)
        if values is not None:
            rows, index = plan.rows(bits.LOGPROBS), plan.rows_dev(bits.LOGPROBS)
            ids = sampled.token_ids
            ids = ids if index is None else xp.index_select(ids, 0, index)
            sampled.logprobs = gather(
                *(self._device, values, ids, rows, plan.num_logprobs[rows], plan.named(rows))
            )
        if flags & bits.PENALTY and step.drafts is None:
            self.count(plan, sampled.token_ids)
        return sampled

    def count(self, plan: SamplingPlan, token_ids: Tensor, kept: Tensor | None = None) -> None:
        """Count sampled tokens for later penalties. With drafts the caller does so once it knows
        which rows count: kept [rows] bool."""
        index = plan.rows_dev(bits.PENALTY)
        if index is not None:
            token_ids = self._xp.index_select(token_ids, 0, index)
            kept = None if kept is None else self._xp.index_select(kept, 0, index)
        self._penalties.count(plan.first_flat(bits.PENALTY), token_ids, kept)

    def draw_at(self, logits: Tensor, plan: SamplingPlan, positions: Tensor) -> Tensor:
        """[rows] int64: the tokens that each row would sample at these positions ([rows] int64, on
        the device) from these logits, which are consumed; without constraints and penalties."""
        return self._sample_tokens(logits, plan, positions, False)[0]

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """The values that prompt_logprobs report, in the configured mode, without processing."""
        return logits if self._mode.endswith("logits") else self._log_softmax(logits)

    # -- stages -----------------------------------------------------------------------------------

    def _constrain(
        self, logits: Tensor, plan: SamplingPlan, step: SamplingStep, sampled: Sampled
    ) -> Tensor:
        xp, flags = self._xp, plan.flags
        histories = Histories(plan, step.output_tokens, step.drafts)
        if flags & bits.PROCESSOR:
            logits = self._processors.apply(logits, plan, histories, sampled.errors)
        if flags & bits.BIAS:
            where, what = plan.bias()
            xp.index_add_(logits.view(-1), 0, where, what)
        if flags & bits.PENALTY:
            logits = self._on_rows(
                logits,
                plan.rows_dev(bits.PENALTY),
                lambda part: self._apply_penalties(
                    part,
                    plan.column("presence", bits.PENALTY),
                    plan.column("frequency", bits.PENALTY),
                    plan.column("repetition", bits.PENALTY),
                    *self._penalty_rows(plan, step.drafts_dev),
                ),
            )
        may_forbid = bool(flags & (bits.PROCESSOR | bits.BIAS))
        rows, masks, errors = self._masks.build(plan, step.num_output, histories)
        sampled.errors.update(errors)
        if rows is not None and masks is not None:
            index = None if rows.size == plan.num_rows else self._device.to_device(rows)
            mask = self._device.to_device(masks)
            logits = self._on_rows(logits, index, lambda part: self._apply_bitmask(part, mask))
            may_forbid = True
        if may_forbid:
            sampled.possible = xp.amax(logits, -1)
        return logits

    def _penalty_rows(self, plan: SamplingPlan, drafts: Tensor | None) -> tuple[Tensor, Tensor]:
        """Counts and marks of rows with penalties, with the drafts before each row counted in."""
        counts, seen = self._penalties.rows(plan.slots_with(bits.PENALTY))
        if drafts is not None:
            base, holders = plan.pairs_dev(bits.PENALTY)
            if base.shape[0]:
                before = self._xp.index_select(drafts, 0, holders)
                self._penalties.add_drafts(counts, base, before)
        return counts, seen

    def _sample_tokens(
        self, logits: Tensor, plan: SamplingPlan, positions: Tensor | np.ndarray, keep: bool
    ) -> tuple[Tensor, Tensor]:
        """Token ids, and with `keep` the filtered logits that they were sampled from. positions may
        be on the device already."""
        xp = self._xp
        if not plan.flags & bits.RANDOM:
            return self._greedy(logits), logits
        index = plan.rows_dev(bits.RANDOM)
        part = logits if index is None else xp.index_select(logits, 0, index)
        if plan.flags & bits.TEMPERATURE:
            part = part.div_(plan.column("temperature", bits.RANDOM).unsqueeze(1))
        if plan.flags & bits.FILTER:
            part = self._on_rows(
                part,
                plan.filter_rows_dev(),
                lambda rows: self._filter(
                    rows,
                    plan.column("top_k", bits.FILTER),
                    plan.column("top_p", bits.FILTER),
                    plan.column("min_p", bits.FILTER),
                ),
            )
        if isinstance(positions, np.ndarray):
            positions = self._device.to_device(positions)
        where = positions if index is None else xp.index_select(positions, 0, index)
        tokens = self._sample(part, plan.column("seed", bits.RANDOM), where)
        if index is None:
            return tokens, part
        token_ids = self._greedy(logits)
        xp.index_copy_(token_ids, 0, index, tokens)
        if keep:
            xp.index_copy_(logits, 0, index, part)
        return token_ids, logits

    def _values(self, logits: Tensor, index: Tensor | None, *, keep: bool) -> Tensor:
        """The values that the mode reports, for rows that want logprobs. `keep`: later stages may
        overwrite the logits, so the values must not share their memory."""
        part = logits if index is None else self._xp.index_select(logits, 0, index)
        if self._mode.endswith("logits"):
            return part.clone() if keep and index is None else part
        return self._log_softmax(part)

    def _on_rows(
        self, logits: Tensor, index: Tensor | None, change: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Change all rows, or only those of the index."""
        if index is None:
            return change(logits)
        changed = change(self._xp.index_select(logits, 0, index))
        self._xp.index_copy_(logits, 0, index, changed)
        return logits
