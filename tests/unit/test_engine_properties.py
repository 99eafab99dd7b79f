"""Random lives of an engine: whatever happens, tokens are the predicted ones and no block is
lost."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdeploy_core.scheduler import decode_count
from fastdeploy_core.types import Request, RequestStatus, branch_id
from tests.null_engine import Collector, expected_answers, make_core, make_request

MAX_MODEL_LEN = 60
POISON = 63  # a prompt that ends with it makes its step fail


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


@dataclass
class Event:
    """At `step`, a request arrives, or one that arrived is aborted, or one of its branches."""

    step: int
    request: Request | None = None
    abort: str = ""


@dataclass
class Life:
    """An engine's settings and what happens to it."""

    options: dict[str, Any]
    events: list[Event] = field(default_factory=list)


def make_random_request(random: Random, index: int, poisonous: bool) -> Request:
    prompt = [(i * 5) % 50 + 4 for i in range(random.randrange(21))]
    prompt += [random.randrange(4, 63) for _ in range(random.randrange(1, 13))]
    if poisonous and random.random() < 0.15:
        prompt[-1] = POISON
    n = random.choice([1, 1, 1, 2, 4])
    sampling: dict[str, Any] = {}
    if n > 1 or random.random() < 0.5:
        sampling = {"temperature": 1.0, "seed": random.randrange(100)}
    if random.random() < 0.1:
        sampling["prompt_logprobs"] = 0
    return make_request(
        f"r{index}",
        prompt,
        max_tokens=random.randrange(25),
        eos=random.random() < 0.5,
        n=n,
        tenant=random.choice(["", "", "a", "b"]),
        priority=random.randrange(3),
        cache_salt=random.choice(["", "", "salt"]),
        **sampling,
    )


def make_life(seed: int, poisonous: bool = False) -> Life:
    """A life by number. (Drawing every choice from hypothesis would cost far more than living
    it.)"""
    random = Random(seed)
    chunked = random.random() < 0.7
    null = {
        "mixed_batches": random.random() < 0.8,
        "max_prefills_per_step": random.choice([None, None, 1]),
        "block_sharing": random.random() < 0.8,
        "decodes_per_step": random.choice([1, 4]),
    }
    life = Life(
        {
            "null": null,
            "overlap": random.random() < 0.6,
            "prefix_caching": random.random() < 0.7,
            "output_caching": random.random() < 0.7,
            "enable_chunked_prefill": chunked,
            "max_num_partial_prefills": random.choice([1, 1, 3]),
            "long_prefill_token_threshold": random.choice([0, 7]),
            "max_num_batched_tokens": random.choice([8, 13, 64]) if chunked else MAX_MODEL_LEN,
            "max_num_seqs": random.choice([1, 3, 8]),
            "num_blocks": random.choice([15, 20, 64]),
            "host_blocks": random.choice([0, 1, 30]),
            "num_drafts": random.choice([0, 0, 2]),
            "policy": random.choice(["fcfs", "priority"]),
            "max_model_len": MAX_MODEL_LEN,
        }
    )
    if poisonous:
        life.options["faults"] = ({"kind": "raise", "token": POISON},)
    for index in range(random.randrange(1, 12)):
        step = random.randrange(31)
        request = make_random_request(random, index, poisonous)
        life.events.append(Event(step, request))
        if request.sampling.n > 1 and random.random() < 0.3:
            branch = branch_id(f"r{index}", random.randrange(request.sampling.n))
            life.events.append(Event(step + random.randrange(40), abort=branch))
        if random.random() < 0.25:
            life.events.append(Event(step + random.randrange(40), abort=f"r{index}"))
    life.events.sort(key=lambda event: event.step)
    return life


def check_step(core) -> None:
    """Nothing writes into a block that another sequence reads; the budget is kept."""
    batch = core.scheduler
    step = core._executor.steps[-1]
    num_tokens = step.rows.counts.sum() // step.num_decodes  # at once
    assert 0 < num_tokens <= batch.settings.batch.max_num_batched_tokens
    assert step.rows.seq_ids.size <= batch.settings.batch.max_num_seqs
    tables = {
        seq.seq_id: seq.table.blocks
        for request in batch._roster.requests.values()
        for seq in request.sequences
        if seq.table.blocks
    }
    size = batch.kv.block_size
    for seq_id, (start, count) in core._executor.worker.written.items():
        blocks = tables.get(seq_id)
        if blocks is None:
            continue  # it ended or was preempted with this very step's results
        first, last = start // size, (start + count - 1) // size
        written = set(blocks[first : last + 1])
        assert len(written) == last - first + 1
        for other, held in tables.items():
            assert other == seq_id or not written & set(held), "a written block is shared"
    batch.kv.check()


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
    """Admissions are compared: first tokens may come in another order, when prompts differ in
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
            if request.request_id in core.scheduler._roster.requests:
                states.append(core.scheduler._roster.requests[request.request_id])
        if not events and not core.has_work():
            break
        core.step()
    for tenant in ("", "a", "b"):
        order = [
            state.admission for state in states if state.tenant == tenant and state.admission >= 0
        ]
        assert order == sorted(order)
    assert all(seq.status is RequestStatus.FINISHED for state in states for seq in state.sequences)
