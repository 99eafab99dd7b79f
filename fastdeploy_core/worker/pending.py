"""A launched step whose tokens the host has not seen yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from fastdeploy_core.sampling.columns import SamplingPlan
from fastdeploy_core.sampling.logprobs import LogprobTensors
from fastdeploy_core.types import ModelRunnerOutput, TokenLogprobs

from .staging import Download
from .step_rows import StepRows

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceEvent
    from fastdeploy_core.tensor import Tensor

    from .draft_batch import TargetStep
    from .posting import Posted
    from .step_buffers import DraftsWithResults


@dataclass(slots=True)
class Launched:
    """What the runner remembers of a step until its tokens are read."""

    step_id: int
    rows: StepRows
    owners: np.ndarray  # InputBatch.owner of each row's slot at launch
    plan: SamplingPlan | None = None
    sampled_logprobs: LogprobTensors | None = None
    prompt_logprobs: list[tuple[int, LogprobTensors]] = field(default_factory=list)  # by batch row
    errors: dict[int, str] = field(default_factory=dict)  # by batch row
    sample_errors: dict[int, str] = field(default_factory=dict)  # by sampled position
    max_drafts: int = -1  # SchedulerOutput.max_drafts
    target: TargetStep | None = None  # for drafters; None once they have been asked
    draft_ids: np.ndarray | None = None  # [R] the drafts that were fed, -1: none at that position
    drawn: Tensor | None = None  # [R] on the device
    accepted: Tensor | None = (
        None  # [S] on the device, of rows that sample; None: there were no drafts
    )
    fed_ahead: np.ndarray | None = None  # ModelRunnerOutput.num_drafts
    right_ahead: np.ndarray | None = None  # ModelRunnerOutput.num_right
    together: DraftsWithResults | None = None  # results and drafts in one
    has_drafts: bool = False  # drafts made on the device come to the host, too
    model_s: float = 0.0
    draft_s: float = 0.0
    draft_failures: int = 0
    launch_s: float = 0.0
    # What is on its way to the host; there when the event has happened.
    has_results: bool = False
    download: Download | None = None
    posted: list[Posted] = field(default_factory=list)  # of each decode, in place of a download
    event: DeviceEvent | None = None
    # Filled when the tokens are read.
    is_read: bool = False
    token_ids: np.ndarray | None = None  # [R]
    counts: np.ndarray | None = None  # ModelRunnerOutput.counts, where nothing else is to be told
    num_accepted: np.ndarray | None = None  # [B] drafts that were right; None: there were none
    next_drafts: np.ndarray | None = None  # ModelRunnerOutput.next_drafts
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by sampled position
    prompt_rows: dict[int, list[TokenLogprobs]] = field(default_factory=dict)

    @property
    def concerns_drafters(self) -> bool:
        """Whether drafts were fed or are wanted, or a drafter keeps something for later."""
        rows = self.rows
        return self.max_drafts >= 0 or (not rows.is_decode and bool(rows.num_drafts.any()))

    def fed_drafts(self) -> dict[int, list[int]]:
        """By batch row."""
        found: dict[int, list[int]] = {}
        if self.draft_ids is not None:
            fed = np.flatnonzero(self.draft_ids >= 0)
            rows = self.rows.sample_rows[fed].tolist()
            for row, token in zip(rows, self.draft_ids[fed].tolist(), strict=True):
                found.setdefault(row, []).append(token)
        return found

    def logprob_parts(self) -> Iterator[tuple[int | None, LogprobTensors]]:
        """What is copied behind the tokens: of the drawn ones (None), then of prompts by batch row."""
        if self.sampled_logprobs is not None:
            yield None, self.sampled_logprobs
        yield from self.prompt_logprobs


class PendingOutput:
    """`wait()` returns the step's ModelRunnerOutput; steps are read in the order of their launch."""

    def __init__(self, launched: Launched, read: Callable[[Launched], None]) -> None:
        self._launched = launched
        self._read = read
        self._output: ModelRunnerOutput | None = None

    def wait(self) -> ModelRunnerOutput:
        """Wait for the device, then build the answer. May be called again."""
        if self._output is None:
            began = time.perf_counter()
            launched = self._launched
            self._read(launched)
            self._output = build_output(launched)
            self._output.execute_s = launched.launch_s + time.perf_counter() - began
        return self._output


def build_output(launched: Launched) -> ModelRunnerOutput:
    """The answer, rows in batch order."""
    rows = launched.rows
    token_ids = launched.token_ids
    if token_ids is None:
        token_ids = np.zeros(0, dtype=np.int64)
    output = ModelRunnerOutput(
        step_id=launched.step_id,
        token_ids=token_ids,
        num_drafts=launched.fed_ahead,
        num_right=launched.right_ahead,
        next_drafts=launched.next_drafts,
        model_s=launched.model_s,
        draft_s=launched.draft_s,
        draft_failures=launched.draft_failures,
    )
    if launched.counts is not None:
        output.counts, output.errors = launched.counts, launched.errors
        return output
    if rows.is_decode and not launched.errors and launched.token_ids is not None:
        output.logprobs = {row: [entry] for row, entry in launched.logprobs.items()}
        return output
    num_samples = np.bincount(rows.sample_rows, minlength=rows.slots.size)
    first = np.cumsum(num_samples) - num_samples
    counts = np.minimum(num_samples, 1)
    if launched.num_accepted is not None:
        counts += launched.num_accepted
    counts[list(launched.errors)] = 0
    if launched.token_ids is None:
        counts[:] = 0
    output.errors, output.counts = launched.errors, counts
    for row in np.flatnonzero(counts).tolist() if launched.logprobs else ():
        start = int(first[row])
        if start in launched.logprobs:
            entries = range(start, start + int(counts[row]))
            output.logprobs[row] = [launched.logprobs[entry] for entry in entries]
    output.prompt_logprobs = {
        row: records for row, records in launched.prompt_rows.items() if row not in launched.errors
    }
    nth = np.arange(rows.sample_rows.size) - first[rows.sample_rows]
    output.token_ids = token_ids[(nth < counts[rows.sample_rows])[: token_ids.size]]
    return output
