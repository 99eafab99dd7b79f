"""Random lives of an engine: whatever happens, tokens are the predicted ones and no block is
lost."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdeploy_core.scheduler import decode_count
from fastdeploy_core.types import Request, RequestStatus, branch_id
from tests.engine_lives import MAX_MODEL_LEN, POISON, Life, check_step, make_life
from tests.null_engine import Collector, expected_answers, make_core


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """Thousands of injected failures need not be logged."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(autouse=True, scope="module")
def patience() -> Iterator[None]:
    """How many tokens come at a time must not depend on this machine's pace."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_count, "most_at", lambda *step: 1e6)
        yield


def live(life: Life) -> tuple[Any, Collector, set[str]]:
    """Play a life to its end."""
    core = make_core(**life.options)
    collector, aborted = Collector(), set()
    events = list(life.events)
    for step in range(3000):
        while events and events[0].step <= step:
            event = events.pop(0)
            if event.request is not None:
                core.add(event.request)
                continue
            if event.abort not in collector.finished:
                aborted.add(event.abort)
            core.abort([event.abort])
        if not events and not core.has_work():
            break
        num_steps = len(core._executor.steps)
        collector.take(core.step())
        if len(core._executor.steps) > num_steps:
            check_step(core)
    assert not core.has_work(), "the engine stalled"
    core.scheduler.check_idle()
    return core, collector, aborted


def assert_answers(collector: Collector, request: Request, aborted: set[str]) -> None:
    """All tokens of every branch, but for those that were ended before."""
    name, expected = request.request_id, expected_answers(request, MAX_MODEL_LEN)
    answers = collector.answers(name)
    for index, reason in collector.reasons[name].items():
        if reason == "abort":
            assert branch_id(name, index) in aborted
            expected[index] = expected[index][: len(answers[index])]
    assert answers == expected


many = settings(max_examples=120, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32)


@many
@given(seeds)
def test_every_request_gets_the_predicted_tokens_and_no_block_is_lost(seed):
    life = make_life(seed)
    core, collector, aborted = live(life)
    for event in life.events:
        request = event.request
        if request is None:
            continue
        name, expected = request.request_id, expected_answers(request, MAX_MODEL_LEN)
        if name in aborted:
            answers = collector.tokens.get(name, {})
            assert all(tokens == expected[i][: len(tokens)] for i, tokens in answers.items())
            continue
        assert name in collector.finished
        assert_answers(collector, request, aborted)
        assert set(collector.reasons[name]) == set(range(request.sampling.n))
        found = collector.first[name].prompt_logprobs
        if request.sampling.prompt_logprobs is not None:
            assert [row.token_ids[0] for row in found[1:]] == request.prompt_token_ids[1:]
    assert core.stats().requests_finished_total.get("error", 0) == 0


@many
@given(seeds)
def test_a_request_that_breaks_its_step_fails_alone(seed):
    life = make_life(seed, poisonous=True)
    _, collector, aborted = live(life)
    for event in life.events:
        request = event.request
        if request is None or request.request_id in aborted:
            continue
        name = request.request_id
        runs = request.sampling.max_tokens > 0 or request.sampling.prompt_logprobs is not None
        if request.prompt_token_ids[-1] == POISON and runs:
            assert collector.errors[name] == "FastDeployError"
        else:
            assert_answers(collector, request, aborted)


@many
@given(seeds)
def test_first_come_is_first_served_within_a_tenant(seed):
    """But a prompt that would have to be split lets shorter ones pass while another one is split.
    Admissions are compared: first tokens may come in another order, when prompts differ in
    length."""
    life = make_life(seed)
    life.options |= {
        "policy": "fcfs",
        "long_prefill_token_threshold": 0,
        "max_num_partial_prefills": 1,
    }
    life.events = [event for event in life.events if event.request is not None]
    core = make_core(**life.options)
    events, states = list(life.events), []
    for step in range(3000):
        while events and events[0].step <= step:
            request = events.pop(0).request
            core.add(request)
            if request.request_id in core.scheduler.roster.requests:
                states.append(core.scheduler.roster.requests[request.request_id])
        if not events and not core.has_work():
            break
        core.step()
    for tenant in ("", "a", "b"):
        own = [state for state in states if state.tenant == tenant and state.admission >= 0]
        for state, later in itertools.combinations(own, 2):
            sizes = [len(s.request.prompt_token_ids) for s in (state, later)]
            assert state.admission < later.admission or sizes[0] > sizes[1]
    assert all(seq.status is RequestStatus.FINISHED for state in states for seq in state.sequences)
