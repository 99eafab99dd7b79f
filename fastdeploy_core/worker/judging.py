"""Judges the drafts of a step, on every rank alike and without waiting for the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fastdeploy_core.contracts.speculative import NO_DRAFT
from fastdeploy_core.sampling.columns import SamplingPlan
from fastdeploy_core.speculative.verify import DraftLayout, Verdict

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.tensor import Tensor

    from .input_batch import InputBatch
    from .step_rows import StepRows


@dataclass(slots=True)
class RowDrafts:
    """The drafts that R sampled positions decide about; -1: none."""

    ids: np.ndarray  # [R] int64
    on_device: Tensor  # [R] int64
    layout: DraftLayout


class DraftJudge:
    """`refuses_all`: as if every draft were wrong, to measure what drafting costs."""

    def __init__(
        self, device: DeviceBackend, batch: InputBatch, *, refuses_all: bool = False
    ) -> None:
        self._device, self._batch, self.refuses_all = device, batch, refuses_all
        self._layout: tuple[SamplingPlan, DraftLayout] | None = None

    def drafts_of(self, rows: StepRows, plan: SamplingPlan) -> RowDrafts | None:
        """None where no row of the step has drafts."""
        if not rows.num_drafts.any():
            return None
        tokens = self._batch.token_ids
        where = np.minimum(rows.sample_positions, tokens.shape[1] - 1)
        has_draft = plan.depths < rows.num_drafts[rows.sample_rows]
        ids = np.where(has_draft, tokens[plan.slots, where].astype(np.int64), NO_DRAFT)
        if self._layout is None or self._layout[0] is not plan:
            self._layout = (plan, DraftLayout(plan.depths, self._device))
        return RowDrafts(ids, self._device.to_device(ids), self._layout[1])

    def judge(self, drafts: RowDrafts, drawn: Tensor) -> Verdict:
        """Which of them the target would have drawn itself. drawn: [R] int64."""
        if self.refuses_all:
            return drafts.layout.refuse_all(drawn)
        return drafts.layout.judge(drawn, drafts.on_device)
