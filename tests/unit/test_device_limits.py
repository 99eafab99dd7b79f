"""Limits of a device that the batch scheduler has to keep, on the fake device."""

from __future__ import annotations

import pytest

from fastdeploy_core.errors import ConfigError
from fastdeploy_core.types import BatchRows
from tests.null_engine import expected_answers, make_core, make_request, run


def rows_of(core) -> list[BatchRows]:
    """The rows of every step, those of steps that only go on included."""
    found: list[BatchRows] = []
    for step in core._executor.steps:
        found.append(found[-1].next() if step.rows is None else step.rows)
    return found


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return [(7 * i + 11 * seed) % 60 + 4 for i in range(num_tokens)]


def test_device_that_cannot_continue_prompts_gets_them_whole() -> None:
    core = make_core(
        null={"chunked_prefill": False}, max_num_batched_tokens=40, max_model_len=40, overlap=False
    )
    requests = [make_request(f"r{i}", prompt(25, i), max_tokens=2) for i in range(3)]
    collector = run(core, requests)
    firsts = [c for r in rows_of(core) for s, c in zip(r.starts, r.counts, strict=True) if s == 0]
    assert firsts == [25] * 3
    assert all(collector.answers(r.request_id) == expected_answers(r, 40) for r in requests)


def test_device_that_cannot_continue_prompts_needs_steps_as_long_as_one() -> None:
    with pytest.raises(ConfigError, match="where the device can do it"):
        make_core(null={"chunked_prefill": False}, max_num_batched_tokens=32, max_model_len=128)


def test_steps_are_no_larger_than_the_device_takes() -> None:
    limits = {"max_step_tokens": 12, "max_step_rows": 2}
    core = make_core(null=limits, max_num_batched_tokens=32, overlap=False)
    requests = [make_request(f"r{i}", prompt(30, i), max_tokens=3) for i in range(4)]
    collector = run(core, requests)
    assert max(int(rows.counts.sum()) for rows in rows_of(core)) == 12
    assert max(rows.seq_ids.size for rows in rows_of(core)) == 2
    assert all(collector.answers(r.request_id) == expected_answers(r) for r in requests)
