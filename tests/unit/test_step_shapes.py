"""Every step finds a shape among those that run at start-up, and its tokens find their places
there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdeploy_core.config import (
    BatchConfig,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SpeculativeConfig,
)
from fastdeploy_core.contracts.device import StepBuckets
from fastdeploy_core.errors import WorkerError
from fastdeploy_core.worker.layout import StepShapes
from fastdeploy_core.worker.step import StepRows

BUCKETS = StepBuckets((1, 2, 3), (8, 32, 64), (2, 4, 8), (1, 2, 4))
LONGEST, BLOCK = 100, 16


def shapes(max_drafts: int = 0) -> StepShapes:
    config = EngineConfig(
        model=ModelConfig(Path("none"), Path("none"), max_model_len=LONGEST),
        cache=CacheConfig(block_size=BLOCK),
        batch=BatchConfig(max_num_seqs=6, max_num_batched_tokens=50),
        speculative=SpeculativeConfig("any", max_drafts) if max_drafts else None,
    )
    return StepShapes(config, BUCKETS)


def step(starts: list[int], counts: list[int]) -> StepRows:
    first, size = np.array(starts), np.array(counts)
    rows = np.arange(len(starts))
    none = np.zeros(len(starts), dtype=np.int64)
    return StepRows(rows, first, size, none, none == 0, is_decode=max(counts) == 1)


@st.composite
def steps(draw: st.DrawFn) -> StepRows:
    """Prompts of up to 50 tokens in all, or decodes of up to 6 sequences."""
    if draw(st.booleans()):
        counts = [1] * draw(st.integers(1, 6))
    else:
        counts = draw(st.lists(st.integers(1, 50), min_size=1, max_size=3).filter(
            lambda found: sum(found) <= 50
        ))  # fmt: skip
    return step([draw(st.integers(0, LONGEST - count)) for count in counts], counts)


@settings(max_examples=300, deadline=None)
@given(steps(), st.sampled_from([0, 3]))
def test_no_step_has_a_shape_of_its_own(rows: StepRows, max_drafts: int) -> None:
    possible = shapes(max_drafts)
    shape = possible.find(rows)
    assert shape in {known for known, _, _ in possible}
    assert shape.rows >= rows.slots.size and shape.tokens >= rows.counts.max()
    # The block table reaches as far as the padding of the longest row.
    assert shape.blocks * BLOCK >= rows.starts.max() + shape.tokens


def test_shapes_that_run_at_the_start_are_what_they_say() -> None:
    for possible in (shapes(), shapes(3)):
        listed = list(possible)
        assert len({shape for shape, _, _ in listed}) == len(listed)
        for shape, start, count in listed:
            assert start >= 0 and start + count <= LONGEST
            rows = min(shape.rows, 6)
            assert possible.find(step([start] * rows, [count] * rows)) == shape


def test_tokens_lie_at_the_beginning_of_their_rows() -> None:
    rows = step([3, 0], [2, 5])
    shape = shapes().find(rows)
    assert (shape.rows, shape.tokens) == (2, 8)
    placed = shape.spread(rows, np.arange(1, 8), -1).reshape(2, 8)
    assert placed.tolist() == [[1, 2] + [-1] * 6, [3, 4, 5, 6, 7] + [-1] * 3]
    shaped = replace(rows, shape=shape, sampled=None)
    assert shaped.shape == shape and shaped.positions().tokens.tolist() == [1, 12]
    assert shaped.first_tokens().tolist() == [0, 8]
    assert shaped.read_tokens().tolist() == [1, 12]
    assert shape.pad(np.array([7])).tolist() == [7, 0]


def test_a_step_that_is_too_large_is_refused() -> None:
    with pytest.raises(WorkerError, match="4 rows; the device takes at most 3"):
        shapes().find(step([0] * 4, [5] * 4))
    with pytest.raises(WorkerError, match="70 tokens; the device takes at most 64"):
        shapes().find(step([0], [70]))
