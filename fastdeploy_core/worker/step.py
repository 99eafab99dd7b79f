"""Plain records of a step on one rank: its rows, and what is kept until results are read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from fastdeploy_core.sampling.columns import SamplingPlan
from fastdeploy_core.sampling.logprobs import LogprobTensors
from fastdeploy_core.types import ModelRunnerOutput

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionBatch
    from fastdeploy_core.contracts.device import DeviceEvent
    from fastdeploy_core.layers.context import ForwardContext
    from fastdeploy_core.memory.postbox import Posted
    from fastdeploy_core.memory.transfers import Download
    from fastdeploy_core.tensor import Tensor

    from .graphs import CapturedPrompt
    from .layout import StepShape


@dataclass(slots=True)
class StepRows:
    """The rows of one step as arrays, in batch order; B rows, T tokens.

    Counts of a row that decodes are the most that there can be (BatchRows); in a step that is laid
    out on the host they are exact.
    """

    slots: np.ndarray  # [B] int64
    starts: np.ndarray  # [B] int64: tokens in the cache before this step
    counts: np.ndarray  # [B] int64: tokens fed, in all decodes
    num_drafts: np.ndarray  # [B] int64: the last tokens fed, each time, are unverified drafts
    samples: np.ndarray  # [B] bool: whether the row samples
    is_decode: bool  # every row is fed its newest token and drafts of it, and samples
    width: int = 1  # 1 + the most drafts of a row
    num_decodes: int = 1  # see SchedulerOutput
    shape: StepShape | None = None  # what the step is padded to, if it is; T is then of that
    sampled: SampledPositions | None = None  # see `positions`
    placed: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None  # see `place` of layout
    offsets: np.ndarray | None = None  # see `cuts`

    @property
    def seq_lens(self) -> np.ndarray:
        """[B] int64."""
        ends: np.ndarray = self.starts + self.counts
        return ends

    def cuts(self) -> np.ndarray:
        """[B + 1] int64: where each row's tokens begin among all that are fed, and their end."""
        if self.offsets is None:
            self.offsets = np.zeros(self.slots.size + 1, dtype=np.int64)
            np.cumsum(self.counts, out=self.offsets[1:])
        return self.offsets

    def first_tokens(self) -> np.ndarray:
        """[B] which of the T tokens each row begins with."""
        if self.shape is not None:
            return np.arange(self.slots.size) * self.shape.tokens
        return self.cuts()[:-1]

    def read_tokens(self) -> np.ndarray | None:
        """[n] int64, as ForwardContext.rows: tokens that are sampled after, at least one number;
        None: they are all of the T tokens. In a padded step always, and n goes with the shape."""
        if self.is_decode and self.width == 1 and self.shape is None:
            return None
        tokens = self.positions().tokens
        size = max(1, tokens.size)
        if self.shape is not None:
            size = self.shape.rows * (self.shape.tokens if self.num_drafts.any() else 1)
        return tokens if tokens.size == size else padded(tokens, size)

    def positions(self) -> SampledPositions:
        """Where tokens are sampled, R of them: after the last token that is no draft of each row
        that samples, and after each of its drafts."""
        if self.sampled is None and self.width == 1 and self.samples.all():
            rows = np.arange(self.slots.size)
            self.sampled = SampledPositions(rows, self.first_tokens() + self.counts - 1, rows * 0)
        elif self.sampled is None:
            num = np.where(self.samples, self.num_drafts + 1, 0)
            rows = np.repeat(np.arange(self.slots.size), num)
            nth = np.arange(rows.size) - (np.cumsum(num) - num)[rows]
            last = self.counts - 1 - self.num_drafts  # within each row
            tokens = (self.first_tokens() + last)[rows] + nth
            self.sampled = SampledPositions(rows, tokens, nth)
        return self.sampled

    def sample_positions(self) -> np.ndarray:
        """[R] int64: where the sampled tokens will stand in their sequences."""
        where = self.positions()
        ends = self.seq_lens - self.num_drafts
        stand: np.ndarray = ends[where.rows] + where.nth
        return stand


@dataclass(slots=True)
class SampledPositions:
    """R positions of a step, row by row."""

    rows: np.ndarray  # [R] int64: batch row
    tokens: np.ndarray  # [R] int64: which of the T tokens the logits come from
    nth: np.ndarray  # [R] int64: drafts of the row before the position


@dataclass(slots=True)
class TargetStep:
    """The target's forward pass as it was run, for T tokens; for drafters."""

    attention: AttentionBatch
    context: ForwardContext  # of a captured graph: that of the capture
    input_ids: Tensor  # [T]
    hidden: Tensor  # [T, hidden], or of context.rows alone
    captured: CapturedPrompt | None = None  # in which a drafter's part was captured, too


@dataclass(slots=True)
class Sampling:
    """How a step was sampled, until its results are read."""

    plan: SamplingPlan
    # Found on the host before the tokens were there, by sampled position.
    errors: dict[int, str] | None = None
    logprobs: LogprobTensors | None = None
    token_ids: Tensor | None = None  # [R] on the device, always valid ids
    accepted: Tensor | None = None  # [rows that sample] on the device; None: there were no drafts


@dataclass(slots=True)
class StepTimes:
    """Seconds, as in ModelRunnerOutput."""

    model_s: float = 0.0
    draft_s: float = 0.0
    launch_s: float = 0.0


@dataclass(slots=True)
class Arriving:
    """What is on its way from the device to the host; there when `event` has happened."""

    event: DeviceEvent | None = None
    # Of a captured graph on a device that posts, one of each decode; else copies are queued: of
    # marked tokens, of drafts for the next step, of log-probabilities.
    posted: list[Posted] = field(default_factory=list)
    download: Download | None = None
    num_columns: int = 0  # of marked tokens, [sampling rows, num_columns]; 0: nothing was sampled
    has_drafts: bool = False
    is_joined: bool = False  # the drafts are further columns of the tokens


@dataclass(slots=True)
class Launched:
    """A step from its launch until its results are read."""

    step_id: int
    rows: StepRows
    version: int  # of the slots at launch; see Slots.stays
    max_drafts: int = -1  # SchedulerOutput.max_drafts
    errors: dict[int, str] = field(default_factory=dict)  # by batch row, known at launch
    fed: np.ndarray | None = None  # [B] drafts of each row, where the host knows them
    sampling: Sampling | None = None  # None: no row samples
    prompt_logprobs: list[tuple[int, LogprobTensors]] = field(default_factory=list)  # by batch row
    pooled: Tensor | None = None  # [R, width] float32, of a family that pools prompts
    target: TargetStep | None = None  # for drafters; None once they have been asked
    arriving: Arriving = field(default_factory=Arriving)
    results: ModelRunnerOutput | None = None  # once they are read
    times: StepTimes = field(default_factory=StepTimes)

    @property
    def concerns_drafters(self) -> bool:
        """Whether drafts were fed or are wanted, or a drafter keeps something for later."""
        return self.max_drafts >= 0 or self.rows.width > 1


def padded(tokens: np.ndarray, size: int) -> np.ndarray:
    """[size] int64: the tokens, zeros after them."""
    found = np.zeros(size, dtype=np.int64)
    found[: tokens.size] = tokens
    return found
