"""How drafts fared, counted once in the scheduler and shown per request, per place and in
metrics."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy_core.config import BatchConfig, SpeculativeConfig
from fastdeploy_core.engine.output import OutputProcessor
from fastdeploy_core.kvcache import KVCacheManager
from fastdeploy_core.scheduler import BatchScheduler, planner
from fastdeploy_core.scheduler.settings import SchedulerSettings
from fastdeploy_core.serving.metrics import Metrics
from fastdeploy_core.serving.openai.usage import Usage
from fastdeploy_core.types import ModelRunnerOutput, each_delta
from fastdeploy_core.types.engine import EngineHealth, EngineStats
from tests.null_engine import make_request, worker_info

NUM_DRAFTS = 3


class Script:
    """A scheduler whose workers answer as told: tokens per row, of which those after the first are
    accepted drafts, and how many drafts each row was fed."""

    def __init__(self, lookahead_tokens: int = 0, budget: int = 64, **limits) -> None:
        self.kv = KVCacheManager(64, 4)
        self.scheduler = BatchScheduler(
            SchedulerSettings(
                64,
                BatchConfig(max_num_seqs=4, max_num_batched_tokens=budget, overlap=False),
                worker_info(**limits),
                SpeculativeConfig("ngram", NUM_DRAFTS, adaptive_length=False),
                lookahead_tokens,
            ),
            self.kv,
        )

    def step(self, tokens: list[list[int]], fed: list[int]):
        step = self.scheduler.schedule()
        assert step is not None and step.output.max_drafts == NUM_DRAFTS
        self.scheduler.update(step, answer(step, tokens, fed))
        return step, list(each_delta(self.scheduler.take_deltas()))


def answer(step, tokens: list[list[int]], fed: list[int]) -> ModelRunnerOutput:
    counts = np.array([len(row) for row in tokens], dtype=np.int64)
    return ModelRunnerOutput(
        step_id=step.output.step_id,
        token_ids=np.array([t for row in tokens for t in row], dtype=np.int64),
        counts=counts,
        num_drafts=np.array([fed], dtype=np.int64) if any(fed) else None,
        num_accepted=np.maximum(counts - 1, 0)[None] if any(fed) else None,
    )


def test_drafts_are_fed_verified_and_counted() -> None:
    script = Script()
    add = script.scheduler.add
    add(make_request("a", [1, 2, 3], max_tokens=9))
    add(make_request("b", [4, 5], max_tokens=9))
    step, _ = script.step([[10], [20]], [0, 0])
    assert step.output.rows.num_drafts.tolist() == [0, 0]
    # The workers hold up to three for each. a: two of three accepted; b: its only one refused.
    step, deltas = script.step([[11, 12, 99], [77]], [3, 1])
    assert step.output.rows.num_drafts.tolist() == [3, 3]
    assert step.output.rows.starts.tolist() == [3, 2]
    answers = {d.request_id: [t for s in d.sequences for t in s.token_ids] for d in deltas}
    assert {d.request_id for d in deltas} == {"a", "b"} and answers["b"] == [77]
    # a feeds its newest token after what was accepted, with two drafts; b none.
    step, _ = script.step([[30, 31, 32], [78]], [2, 0])
    assert step.output.rows.starts.tolist() == [6, 3]
    # a has 7 of 9 tokens: one draft may help it, and then none.
    step, _ = script.step([[33], [79]], [0, 0])
    assert step.output.rows.num_drafts.tolist() == [1, 3]
    step, deltas = script.step([[34], [80]], [0, 0])
    assert step.output.rows.num_drafts.tolist() == [0, 3]
    stats = script.scheduler.stats()
    assert (stats.drafts_total, stats.draft_tokens_total) == (3, 6)
    assert stats.accepted_draft_tokens_total == 4
    assert stats.accepted_drafts_at_total == [2, 2, 0]
    (ending,) = [s for d in deltas for s in d.sequences if s.finish_reason is not None]
    assert (ending.drafts.num_steps, ending.drafts.num_drafts) == (2, 5)
    assert ending.drafts.accepted_at == [2, 2, 0]


def test_drafts_after_the_end_are_neither_accepted_nor_refused() -> None:
    script = Script()
    script.scheduler.add(make_request("a", [1, 2, 3], max_tokens=30, stop_token_ids=[12]))
    script.step([[10]], [0])
    _, deltas = script.step([[11, 12, 13, 14]], [3])
    (sequence,) = deltas[0].sequences
    assert sequence.token_ids == [11, 12] and sequence.finish_reason.value == "stop"
    assert sequence.drafts.num_drafts == 2 and sequence.drafts.num_accepted == 2
    script.scheduler.check_idle()


def test_steps_are_planned_with_upper_bounds_while_results_are_on_their_way() -> None:
    script = Script()
    scheduler = script.scheduler
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=30))
    steps = [scheduler.schedule() for _ in range(3)]
    assert [step.output.rows.starts.tolist() for step in steps] == [[0], [3], [7]]
    assert [step.output.rows.counts.tolist() for step in steps] == [[3], [4], [4]]
    (seq,) = scheduler.roster.running
    assert seq.num_computed == 11
    scheduler.update(steps[0], answer(steps[0], [[10]], [0]))
    scheduler.update(steps[1], answer(steps[1], [[11, 12]], [2]))
    assert seq.num_computed == 9, "two of the four tokens of step 1 were none"
    scheduler.update(steps[2], answer(steps[2], [[13]], [0]))
    assert seq.num_computed == 6 and seq.token_ids == [1, 2, 3, 10, 11, 12, 13]


def test_a_sequence_is_not_fed_beyond_the_least_that_it_may_have() -> None:
    """Each step on its way gives it one token for certain."""
    scheduler = Script().scheduler
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=3))
    steps = [scheduler.schedule() for _ in range(4)]
    assert [step is None for step in steps] == [False, False, False, True]


def test_no_drafts_are_wanted_where_the_policy_wants_none() -> None:
    resting = Script()
    resting.scheduler._policy.choose = lambda num_rows, kind: 0
    resting.scheduler.add(make_request("a", [1, 2, 3], max_tokens=30))
    ahead = [resting.scheduler.schedule() for _ in range(3)]
    assert [step.output.max_drafts for step in ahead] == [-1, -1, -1]
    assert [step.drafts.sum() for step in ahead] == [0, 0, 0]


def test_drafters_with_a_cache_rest_and_miss_what_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "BLOCKS_AHEAD", 0)  # blocks are counted
    script = Script(lookahead_tokens=3)
    scheduler = script.scheduler
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=60))
    scheduler._policy.choose = lambda num_rows, kind: 0
    asked = []
    for token in range(40):
        step = scheduler.schedule()
        asked.append(step.output.max_drafts)
        scheduler.update(
            step, ModelRunnerOutput(step_id=step.output.step_id, token_ids=np.array([20 + token]))
        )
    assert set(asked) == {-1}, "nor do prompts fill the drafter's cache"
    scheduler._policy.choose = lambda num_rows, kind: 3
    assert scheduler.schedule().output.max_drafts == 3, (
        "what it has missed may cost it accepted drafts"
    )
    fresh = Script(lookahead_tokens=3)
    fresh.scheduler.add(make_request("b", [1, 2, 3, 4], max_tokens=60))
    fresh.step([[9]], [0])
    step = fresh.scheduler.schedule()
    # Tokens 4 to 7 are fed; the drafter writes three places more.
    assert step.output.rows.counts.tolist() == [4]
    assert sum(len(blocks) for blocks in step.output.new_block_ids.values()) == 2


@pytest.mark.parametrize("captures_drafting", [False, True])
def test_prompts_take_turns_with_captured_drafts(captures_drafting: bool) -> None:
    """Beside prompts drafts would have to be verified operation by operation. Prompts that come in
    every step let drafts be made and fed in between."""
    script = Script(captures_drafts=True, captures_drafting=captures_drafting)
    scheduler = script.scheduler
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=40))
    for number in range(3):
        step = scheduler.schedule()
        scheduler.update(step, answer(step, [[10 + number]], [int(step.drafts.sum())]))
    fed = []
    for number in range(6):
        scheduler.add(make_request(f"b{number}", [4, 5], max_tokens=1))
        step = scheduler.schedule()
        fed.append((int(step.drafts.sum()), step.num_rows))
        rows = [[7]] * step.num_rows
        drafts = [*step.drafts.tolist(), *[0] * len(step.rows)]
        scheduler.update(step, answer(step, rows, drafts))
        prompts_draft = step.output.max_drafts > 0 or not step.rows
        assert prompts_draft or captures_drafting, "drafting after prompts is what costs"
    assert fed[0] == (3, 1) and fed[1][0] == 0 and fed[1][1] > 1, fed
    assert [drafts for drafts, _ in fed] == [
        3,
        0,
        *([0, 3, 0, 0] if captures_drafting else [3, 0] * 2),
    ]
    assert scheduler.stats().num_waiting <= 2


def test_prompts_go_beside_drafts_where_nothing_is_captured() -> None:
    scheduler = Script().scheduler
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=40))
    for number in range(2):
        step = scheduler.schedule()
        scheduler.update(step, answer(step, [[10 + number]], [int(step.drafts.sum())]))
    scheduler.add(make_request("b", [4, 5], max_tokens=1))
    step = scheduler.schedule()
    assert (int(step.drafts.sum()), step.num_rows) == (3, 2)


def test_nothing_is_planned_of_drafts_that_nobody_made() -> None:
    """Beside prompts no drafts are fed, and none are made there where drafting is captured."""
    scheduler = Script(captures_drafts=True, captures_drafting=True).scheduler
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=40))
    prompt, first, drafted = (scheduler.schedule() for _ in range(3))
    assert prompt.output.max_drafts == 0
    assert (first.drafts.tolist(), drafted.drafts.tolist()) == ([0], [3])
    scheduler.add(make_request("b", [4, 5], max_tokens=40))
    fed = scheduler.schedule()
    assert fed.drafts.tolist() == [3] and fed.num_rows == 1, "the prompt waits for its turn"
    beside = scheduler.schedule()
    assert beside.output.rows.counts.tolist() == [1, 2] and beside.output.max_drafts == 0
    assert (fed.asked, beside.asked) == (3, 0), "results are told apart by what rows were fed"
    after = scheduler.schedule()
    assert after.num_rows == 2 and after.drafts.tolist() == [0, 0]


def test_requests_and_usage_show_them() -> None:
    script, processor = Script(), OutputProcessor(None)
    request = make_request("a", [1, 2, 3], max_tokens=5, detokenize=False)
    processor.add(request, is_whole=True)
    script.scheduler.add(request)
    deltas = script.step([[10]], [0])[1]
    deltas += script.step([[11, 99]], [3])[1]
    deltas += script.step([[8, 9]], [1])[1]
    (output,) = [o for o, _ in map(processor.process, deltas) if o is not None and o.finished]
    found = output.metrics.speculate_metrics
    assert output.outputs[0].token_ids == [10, 11, 99, 8, 9]
    assert (found.accepted_tokens, found.rejected_tokens) == (2, 2)
    assert found.accept_ratio == 0.5 and found.average_accept_length == 2.0
    assert found.accepted_tokens_per_head == [2, 0, 0]
    assert found.accept_ratio_per_head == [1.0, 0.0, 0.0]
    usage = Usage(3)
    usage.add(output)
    assert usage.render()["completion_tokens_details"] == {
        "accepted_prediction_tokens": 2,
        "rejected_prediction_tokens": 2,
    }


def test_metrics_have_a_series_per_place() -> None:
    stats = EngineStats(
        drafts_total=10,
        draft_tokens_total=30,
        accepted_draft_tokens_total=12,
        accepted_drafts_at_total=[8, 3, 1],
        draft_failures_total=2,
        draft_s=1.5,
    )
    text = Metrics("m").render(stats, EngineHealth(alive=True, ready=True), None).decode()
    prefix, label = "fastdeploy:spec_decode_", 'model_name="m"'
    for line in (
        f"{prefix}num_drafts_total{{{label}}} 10.0",
        f"{prefix}num_draft_tokens_total{{{label}}} 30.0",
        f"{prefix}num_accepted_tokens_total{{{label}}} 12.0",
        f'{prefix}num_accepted_tokens_per_pos_total{{{label},position="0"}} 8.0',
        f'{prefix}num_accepted_tokens_per_pos_total{{{label},position="2"}} 1.0',
        f"{prefix}draft_acceptance_rate{{{label}}} 0.4",
        f"{prefix}drafter_failures_total{{{label}}} 2.0",
        f"fastdeploy:engine_draft_seconds_total{{{label}}} 1.5",
    ):
        assert line in text, line


@pytest.mark.parametrize(("budget", "num_drafts"), [(64, 3), (12, 2), (8, 1), (7, 0)])
def test_no_more_captured_drafts_are_made_than_the_budget_holds(
    budget: int, num_drafts: int
) -> None:
    """All drafts that were made are fed, or none: of four rows with three each, 16 tokens."""
    scheduler = Script(budget=budget, captures_drafts=True, captures_drafting=True).scheduler
    for name in "abcd":
        scheduler.add(make_request(name, [1], max_tokens=9))
    fed = []
    for _ in range(3):
        step = scheduler.schedule()
        assert step is not None
        fed.append(step.output.rows.num_drafts.tolist() if step.output.rows else [0] * 4)
        scheduler.update(step, answer(step, [[5]] * 4, fed[-1]))
    assert fed == [[0] * 4, [0] * 4, [num_drafts] * 4]
