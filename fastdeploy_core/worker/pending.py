"""A launched step whose tokens the host has not seen yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from fastdeploy_core.sampling.columns import SamplingPlan
from fastdeploy_core.sampling.logprobs import LogprobTensors
from fastdeploy_core.sampling.sampler import Sampled
from fastdeploy_core.types import (
    ModelRunnerOutput,
    ScheduledSequence,
    SequenceOutput,
    TokenLogprobs,
)

from .input_batch import StepRows

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceEvent

# Waiting polls: a blocking wait would hold the interpreter lock on some drivers.
POLL_S = 0.00005


@dataclass(slots=True)
class Launched:
    """What the runner remembers of a step until its tokens are read."""

    step_id: int
    sequences: Sequence[ScheduledSequence]
    rows: StepRows
    owners: np.ndarray  # InputBatch.owner of each row's slot at launch
    plan: SamplingPlan | None = None
    sampled: Sampled | None = None
    prompt_logprobs: list[tuple[int, LogprobTensors]] = field(default_factory=list)  # by batch row
    errors: dict[int, str] = field(default_factory=dict)  # by batch row
    model_s: float = 0.0
    launch_s: float = 0.0
    # Filled when the tokens are read.
    is_read: bool = False
    token_ids: np.ndarray | None = None  # [R]
    num_accepted: np.ndarray | None = None  # [B] drafts that were right; None: there were none
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by sampled position
    prompt_rows: dict[int, list[TokenLogprobs]] = field(default_factory=dict)


class PendingOutput:
    """`wait()` returns the step's ModelRunnerOutput; steps are read in the order of their launch."""

    def __init__(
        self, launched: Launched, read: Callable[[Launched], None], event: DeviceEvent | None
    ) -> None:
        self._launched = launched
        self._read = read
        self._event = event
        self._output: ModelRunnerOutput | None = None

    def wait(self) -> ModelRunnerOutput:
        """Wait for the device, then build the answer. May be called again."""
        if self._output is None:
            began = time.perf_counter()
            while self._event is not None and not self._event.query():
                time.sleep(POLL_S)
            launched = self._launched
            self._read(launched)
            sequences = build_outputs(launched)
            self._output = ModelRunnerOutput(
                step_id=launched.step_id,
                sequences=sequences,
                model_s=launched.model_s,
                execute_s=launched.launch_s + time.perf_counter() - began,
            )
        return self._output


def build_outputs(launched: Launched) -> list[SequenceOutput]:
    """One SequenceOutput per row, in batch order."""
    sequences, rows = launched.sequences, launched.rows
    token_ids = [] if launched.token_ids is None else launched.token_ids.tolist()
    plain = not (launched.errors or launched.logprobs or launched.prompt_rows)
    if plain and rows.is_decode:
        return [
            SequenceOutput(s.seq_id, [token]) for s, token in zip(sequences, token_ids, strict=True)
        ]
    num_samples = np.bincount(rows.sample_rows, minlength=rows.slots.size)
    first = (np.cumsum(num_samples) - num_samples).tolist()
    accepted = launched.num_accepted
    outputs = []
    for row, sequence in enumerate(sequences):
        output = SequenceOutput(sequence.seq_id)
        outputs.append(output)
        if row in launched.errors:
            output.error = launched.errors[row]
            continue
        output.prompt_logprobs = launched.prompt_rows.get(row)
        if not num_samples[row]:
            continue
        count = 1
        if accepted is not None:
            output.num_accepted_drafts = int(accepted[row])
            count += output.num_accepted_drafts
        start = first[row]
        output.token_ids = token_ids[start : start + count]
        if start in launched.logprobs:
            output.logprobs = [launched.logprobs[start + i] for i in range(count)]
    return outputs
