"""What a worker does once, before it serves: steps of made-up sequences."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from fastdeploy_core.config import EngineConfig
from fastdeploy_core.types import BatchRows, NewSequence, SamplingParams, SchedulerOutput

from .graph_sizes import prompt_ladder

if TYPE_CHECKING:
    from .layout import StepShape, StepShapes
    from .model_runner import ModelRunner

logger = logging.getLogger(__name__)
_GREEDY = SamplingParams(temperature=0.0)


def _made_up(
    config: EngineConfig,
    step_id: int,
    tables: Sequence[list[int]],
    counts: Sequence[int],
    sampling: SamplingParams,
    finished: list[int],
    start: int = 0,
) -> SchedulerOutput:
    """A step of new sequences: so many tokens each after `start` cached ones, in these blocks."""
    first = step_id * config.batch.max_num_seqs
    new = [
        NewSequence(
            seq_id=first + number,
            token_ids=[0] * (start + count),
            num_prompt_tokens=start + count,
            block_ids=blocks,
            sampling=sampling,
            seed=number,
        )
        for number, (blocks, count) in enumerate(zip(tables, counts, strict=True))
    ]
    rows = BatchRows.of([n.seq_id for n in new], [start] * len(new), counts)
    return SchedulerOutput(step_id=step_id, new_sequences=new, rows=rows, finished_seq_ids=finished)


def dummy_step(
    config: EngineConfig, step_id: int, lengths: Sequence[int], finished: list[int], room: int = 0
) -> SchedulerOutput:
    """A step of new sequences of so many tokens each, in blocks from 0 on for `room` more."""
    ends = [0, *accumulate(-(-(length + room) // config.cache.block_size) for length in lengths)]
    tables = [list(range(first, last)) for first, last in pairwise(ends)]
    widest = SamplingParams(top_p=0.9, top_k=50, seed=0, logprobs=1)
    step = _made_up(config, step_id, tables, lengths, widest, finished)
    if config.speculative is not None:
        step.max_drafts = config.speculative.num_speculative_tokens
    return step


def drafted_step(config: EngineConfig, before: SchedulerOutput, num_drafts: int) -> SchedulerOutput:
    """The sequences that are new in `before`, of one token each, go on with so many drafts each."""
    ids = [new.seq_id for new in before.new_sequences]
    fed = [num_drafts] * len(ids)
    rows = BatchRows.of(ids, [1] * len(ids), [1 + num_drafts] * len(ids), num_drafts=fed)
    return SchedulerOutput(step_id=before.step_id + 1, rows=rows, max_drafts=before.max_drafts)


def unlike_steps(config: EngineConfig, before: SchedulerOutput) -> list[SchedulerOutput]:
    """Prompts beside ever more rows of one token, and two to eight tokens alone or beside a prompt,
    since kernels are specialized for such numbers. Rows write over each other: nobody reads it."""
    batch, size, steps = config.batch, config.cache.block_size, [before]
    most = min(batch.max_num_batched_tokens, config.model.max_model_len)
    wanted = [(tokens, 1, tokens // 2) for tokens in (4, 16, 32, *prompt_ladder(most))]
    wanted += [(n, n, 1) for n in (2, 4, 8)] + [(32, n, 2) for n in (2, 4, 8)]
    for tokens, width, rows in (step for step in wanted if step[0] <= most):
        lengths = [width] * (min(rows, batch.max_num_seqs) - 1)
        lengths.append(tokens - sum(lengths))
        tables = [list(range(-(-length // size))) for length in lengths]
        ended, number = [n.seq_id for n in steps[-1].new_sequences], before.step_id + len(steps) + 1
        steps.append(_made_up(config, number, tables, lengths, _GREEDY, ended))
    return steps[1:]


def warm_up(runner: ModelRunner, config: EngineConfig, shapes: StepShapes, num_blocks: int) -> None:
    """Run every shape that a step can have once, so that a device that compiles for each does so
    now. Afterwards the sequences are gone."""
    began = time.perf_counter()
    step_id, finished = 0, list[int]()
    for shape, start, count in shapes:
        step = shaped_step(config, step_id, shape, start, count, num_blocks, finished)
        runner.launch(step).wait()
        finished = [n.seq_id for n in step.new_sequences]
        step_id += 1
    nobody = BatchRows.of([], [], [])
    runner.launch(SchedulerOutput(step_id=step_id, rows=nobody, finished_seq_ids=finished)).wait()
    logger.info("warm-up: %d shapes in %.1f s", step_id, time.perf_counter() - began)


def shaped_step(
    config: EngineConfig,
    step_id: int,
    shape: StepShape,
    start: int,
    count: int,
    num_blocks: int,
    finished: list[int],
) -> SchedulerOutput:
    """A step that is padded to the shape: `count` tokens after `start` cached ones in each row.
    Rows may write over each other, since nobody needs what they write."""
    size, most = config.cache.block_size, min(shape.rows, config.batch.max_num_seqs)
    blocks = [i % num_blocks for i in range(-(-(start + count) // size))]
    of_rows = [blocks] * most, [count] * most
    return _made_up(config, step_id, *of_rows, _GREEDY, finished, start)


def largest_padded_step(
    config: EngineConfig, shapes: StepShapes
) -> tuple[list[SchedulerOutput], int]:
    """The rectangle with most tokens, then the widest sampling; and blocks for them."""
    shape, start, count = max(shapes, key=lambda s: (s[0].rows * s[0].tokens, s[0].blocks))
    num_blocks = -(-(start + count) // config.cache.block_size)
    steps = [shaped_step(config, 0, shape, start, count, num_blocks, [])]
    rows = min(config.batch.max_num_seqs, max(s.rows for s, _, _ in shapes))
    steps.append(dummy_step(config, 1, [1] * rows, [n.seq_id for n in steps[0].new_sequences]))
    return steps, max(num_blocks, rows)
