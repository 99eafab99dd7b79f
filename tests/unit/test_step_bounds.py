"""The scheduler plans with the most that a row can have been fed; the worker knows the true
number."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdeploy_core.engine.settings import make_settings
from fastdeploy_core.kvcache import KVCacheManager
from fastdeploy_core.scheduler import BatchScheduler, ScheduledStep, decode_count, planner
from fastdeploy_core.types import ModelRunnerOutput, Request
from fastdeploy_testing.fakes import NullWorker
from tests.null_engine import Collector, expected_answers, make_config, make_request

MAX_MODEL_LEN, NUM_DRAFTS, DEPTH = 60, 3, 2


@pytest.fixture(autouse=True, scope="module")
def patience() -> Iterator[None]:
    """How many tokens come at a time must not depend on this machine's pace."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_count, "most_at", lambda *step: 1e6)
        yield


class Late:
    """A scheduler and a worker that does a step at once; results come when somebody asks."""

    def __init__(self, random: Random, *, num_blocks: int, captures: bool, several: bool) -> None:
        """Every step asks for a random number of drafts."""
        config = make_config(
            num_blocks=num_blocks, num_drafts=NUM_DRAFTS, max_model_len=MAX_MODEL_LEN
        )
        self.worker = NullWorker(config)
        limits = make_settings(config, self.worker.load())
        device = msgspec.structs.replace(
            limits.device,
            captures_drafts=captures,
            captures_drafting=captures,
            max_decodes=3 if several else 1,
        )
        self.worker.initialize_cache(num_blocks)
        self.scheduler = BatchScheduler(
            replace(limits, batch=replace(limits.batch, overlap=False), device=device),
            KVCacheManager(num_blocks, config.cache.block_size),
            clock=lambda: 0.0,
        )
        self.scheduler._policy.choose = lambda rows, kind: random.choice([0, 1, NUM_DRAFTS])
        self.in_flight: deque[tuple[ScheduledStep, ModelRunnerOutput]] = deque()
        self.fed: dict[int, int] = {}  # tokens that each sequence was fed and has kept
        self.collector = Collector()
        self.most_fed = self.num_late = 0  # drafts of one step; checks with results on their way

    def launch(self) -> bool:
        """Queue a step if one can be planned."""
        step = self.scheduler.schedule()
        if step is None:
            return False
        output = self.worker.launch(step.output).wait()
        self.in_flight.append((step, output))
        rows = self.worker._rows
        for row, seq_id in enumerate(rows.seq_ids.tolist()):
            known = len(self.worker._sequences[seq_id].tokens)
            end = int(rows.starts[row] + rows.counts[row])
            self.fed[seq_id] = known - 1 if rows.samples[row] else end
        if output.num_drafts is not None:
            self.most_fed = max(self.most_fed, int(output.num_drafts.max()))
        return True

    def land(self) -> None:
        """Take in the oldest results."""
        self.scheduler.update(*self.in_flight.popleft())
        self.collector.take(self.scheduler.take_deltas())

    def check(self) -> None:
        """The column `computed` against what was fed."""
        for seq in self.scheduler.roster.running:
            fed = self.fed[seq.seq_id]
            assert seq.num_computed >= fed, "more was fed than the scheduler thinks possible"
            if not self.in_flight:
                assert seq.num_computed == fed
            self.num_late += seq.num_computed > fed


def live(seed: int) -> tuple[Late, list[Request], set[str]]:
    """Random requests come and go; results come now at once, now a step later."""
    random = Random(seed)
    late = Late(
        random,
        num_blocks=random.choice([15, 18, 64]),
        captures=random.random() < 0.5,
        several=random.random() < 0.5,
    )
    scheduler, waiting, requests, aborted = late.scheduler, [], [], set()
    for number in range(random.randrange(1, 9)):
        prompt = [random.randrange(4, 63) for _ in range(random.randrange(1, 30))]
        sampled = {"temperature": 1.0, "seed": number} if random.random() < 0.5 else {}
        waiting.append(
            make_request(
                f"r{number}",
                prompt,
                max_tokens=random.randrange(1, 30),
                eos=random.random() < 0.3,
                n=random.choice([1, 1, 2]) if sampled else 1,
                **sampled,
            )
        )
    for _ in range(2000):
        if waiting and random.random() < 0.2:
            requests.append(waiting.pop())
            scheduler.add(requests[-1])
        elif requests and random.random() < 0.02:
            aborted.add(random.choice(requests).request_id)
            scheduler.abort(aborted)
        running = scheduler.roster.running
        if running and random.random() < 0.02:
            scheduler.roster.preempt(random.choice(running))
        while len(late.in_flight) < DEPTH and late.launch():
            late.check()
            if random.random() < 0.2:
                break
        for _ in range(random.choice([1, 1, 1, 2])):
            if late.in_flight:
                late.land()
                late.check()
        if not waiting and not scheduler.has_work() and not late.in_flight:
            return late, requests, aborted
    raise AssertionError("it did not come to an end")


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_what_counts_as_computed_is_never_less_than_was_fed(seed: int) -> None:
    late, requests, aborted = live(seed)
    for request in requests:
        if request.request_id not in aborted:
            answers = late.collector.answers(request.request_id)
            assert answers == expected_answers(request, MAX_MODEL_LEN)
    late.scheduler.check_idle()


def test_these_lives_hold_what_the_bounds_are_about() -> None:
    """Drafts are refused, results are late, and sequences are preempted."""
    lives = [live(seed)[0] for seed in range(30)]
    assert max(late.most_fed for late in lives) == NUM_DRAFTS
    assert sum(late.num_late for late in lives) > 100
    assert sum(late.scheduler.roster.num_preemptions_total for late in lives) > 10


@pytest.mark.parametrize("captures", [False, True])
def test_a_row_without_blocks_for_its_drafts_gets_its_token(
    captures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The senior takes the last free block in the step in which the junior could use one."""
    monkeypatch.setattr(planner, "BLOCKS_AHEAD", 0)
    late = Late(Random(0), num_blocks=3, captures=captures, several=False)
    late.scheduler._policy.choose = lambda rows, kind: NUM_DRAFTS
    later = int(captures)  # nothing is drafted after prompts then: one more token before
    requests = [
        make_request("senior", [5, 6, 7, 8][later:], max_tokens=2 + later),
        make_request("junior", [9, 10, 11][later:], max_tokens=3 + later),
    ]
    for request in requests:
        late.scheduler.add(request)
    for _ in range(1 + later):
        assert late.launch()
        late.land()
    assert late.launch()
    step, output = late.in_flight[0]
    assert step.output.rows.num_drafts[1] > 0 and list(step.output.new_block_ids) == [0]
    assert output.num_drafts[0, 1] == 0 and output.counts[1] == 1
    late.land()
    while late.launch():
        late.land()
        late.check()
    assert [late.collector.answers(r.request_id) for r in requests] == [
        expected_answers(r, MAX_MODEL_LEN) for r in requests
    ]
    assert late.scheduler.roster.num_preemptions_total == 0
