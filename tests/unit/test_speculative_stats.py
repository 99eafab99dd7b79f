"""How drafts fared, counted once in the scheduler and shown per request, per place and in
metrics."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy_core.engine.output import OutputKind, OutputProcessor
from fastdeploy_core.kvcache import KVCacheManager
from fastdeploy_core.scheduler import BatchScheduler, planner
from fastdeploy_core.scheduler.settings import SchedulerSettings
from fastdeploy_core.serving.metrics import Metrics
from fastdeploy_core.serving.openai.usage import Usage
from fastdeploy_core.types import ModelRunnerOutput, each_delta
from fastdeploy_core.types.engine import EngineHealth, EngineStats
from tests.null_engine import make_request

NUM_DRAFTS = 3


class Script:
    """A scheduler whose workers answer as told: tokens per row, then drafts for the next step."""

    def __init__(self, **settings) -> None:
        self.kv = KVCacheManager(64, 4)
        self.scheduler = BatchScheduler(
            SchedulerSettings(
                max_num_seqs=4,
                max_num_batched_tokens=64,
                max_model_len=64,
                num_speculative_tokens=NUM_DRAFTS,
                adaptive_length=False,
                **settings,
            ),
            self.kv,
        )

    def step(self, tokens: list[list[int]], drafts: list[list[int]]):
        step = self.scheduler.schedule()
        assert step is not None and step.output.max_drafts == NUM_DRAFTS
        padded = [row + [-1] * (NUM_DRAFTS - len(row)) for row in drafts]
        output = ModelRunnerOutput(
            step_id=step.output.step_id,
            token_ids=np.array([t for row in tokens for t in row], dtype=np.int64),
            counts=np.array([len(row) for row in tokens], dtype=np.int64),
            next_drafts=np.array(padded, dtype=np.int64),
        )
        self.scheduler.update(step, output)
        return step, list(each_delta(self.scheduler.take_deltas()))


def test_drafts_are_fed_judged_and_counted() -> None:
    script = Script()
    add = script.scheduler.add
    add(make_request("a", [1, 2, 3], max_tokens=9))
    add(make_request("b", [4, 5], max_tokens=9))
    step, _ = script.step([[10], [20]], [[11, 12, 13], [21]])
    assert step.output.rows.num_drafts.tolist() == [0, 0]
    # a: two of three right; b: its one draft wrong.
    step, deltas = script.step([[11, 12, 99], [77]], [[30, 31], []])
    assert step.output.rows.num_drafts.tolist() == [3, 1]
    assert step.output.rows.draft_token_ids.tolist() == [11, 12, 13, 21]
    assert step.output.rows.starts.tolist() == [3, 2]
    answers = {d.request_id: [t for s in d.sequences for t in s.token_ids] for d in deltas}
    assert {d.request_id for d in deltas} == {"a", "b"} and answers["b"] == [77]
    # a feeds its newest token after what was right, with two drafts; b none.
    step, _ = script.step([[30, 31, 32], [78]], [[], []])
    assert step.output.rows.starts.tolist() == [6, 3]
    assert step.output.rows.num_drafts.tolist() == [2, 0]
    # a has 7 of 9 tokens: nothing was drafted, so one at a time, to its end.
    script.step([[33], [79]], [[34, 35, 36], []])
    step, deltas = script.step([[34], [80]], [[], []])
    assert step.output.rows is None, "one token is left, which no draft can help with"
    stats = EngineStats()
    script.scheduler.fill_stats(stats)
    assert (stats.drafts_total, stats.draft_tokens_total) == (3, 6)
    assert stats.accepted_draft_tokens_total == 4
    assert stats.accepted_drafts_at_total == [2, 2, 0]
    (ending,) = [s for d in deltas for s in d.sequences if s.finish_reason is not None]
    assert (ending.drafts.num_steps, ending.drafts.num_drafts) == (2, 5)
    assert ending.drafts.accepted_at == [2, 2, 0]


def test_drafts_behind_the_end_are_neither_right_nor_wrong() -> None:
    script = Script()
    script.scheduler.add(make_request("a", [1, 2, 3], max_tokens=30, stop_token_ids=[12]))
    script.step([[10]], [[11, 12, 13]])
    _, deltas = script.step([[11, 12, 13, 14]], [[1]])
    (sequence,) = deltas[0].sequences
    assert sequence.token_ids == [11, 12] and sequence.finish_reason.value == "stop"
    assert sequence.drafts.num_drafts == 2 and sequence.drafts.num_accepted == 2
    script.scheduler.check_idle()


def test_the_batch_waits_for_drafts_and_overlaps_without() -> None:
    script = Script()
    script.scheduler.add(make_request("a", [1, 2, 3], max_tokens=30))
    first = script.scheduler.schedule()
    assert first is not None and script.scheduler.schedule() is None
    resting = Script(disable_by_batch_size=0)
    resting.scheduler._policy.choose = lambda num_rows, kind: 0
    resting.scheduler.add(make_request("a", [1, 2, 3], max_tokens=30))
    ahead = [resting.scheduler.schedule() for _ in range(3)]
    assert all(step is not None for step in ahead)
    assert [step.output.max_drafts for step in ahead] == [-1, -1, -1]


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
        "what it has missed may cost it right drafts"
    )
    fresh = Script(lookahead_tokens=3)
    fresh.scheduler.add(make_request("b", [1, 2, 3, 4], max_tokens=60))
    fresh.step([[9]], [[5, 6, 7]])
    step = fresh.scheduler.schedule()
    # Tokens 4 to 7 are fed; the drafter writes three places more.
    assert step.output.rows.counts.tolist() == [4]
    assert sum(len(blocks) for blocks in step.output.new_block_ids.values()) == 2


def answer(step, tokens: list[list[int]], drafts: list[list[int]]) -> ModelRunnerOutput:
    return ModelRunnerOutput(
        step_id=step.output.step_id,
        token_ids=np.array([t for row in tokens for t in row], dtype=np.int64),
        counts=np.array([len(row) for row in tokens], dtype=np.int64),
        num_drafts=step.drafts[None] if step.is_ahead else None,
        next_drafts=np.array(drafts, dtype=np.int64) if drafts else None,
    )


def test_prompts_go_between_steps_whose_results_are_awaited() -> None:
    """Rows that wait lose neither a step nor their drafts to a prompt."""
    scheduler = Script(max_rows_ahead=4, records_drafts=True).scheduler
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=40))
    first = scheduler.schedule()
    scheduler.update(first, answer(first, [[10]], []))
    second = scheduler.schedule()
    ahead = scheduler.schedule()
    assert ahead.is_ahead and ahead.drafts.tolist() == [3]
    scheduler.update(second, answer(second, [[11]], [[12, 13, 14]]))
    scheduler.add(make_request("b", [4, 5], max_tokens=40))
    prompt = scheduler.schedule()
    assert prompt.output.rows.counts.tolist() == [2], "the prompt, and nobody else"
    assert prompt.output.max_drafts == 0
    scheduler.update(ahead, answer(ahead, [[12, 13, 99]], [[20, 21, 22]]))
    scheduler.add(make_request("c", [6, 7], max_tokens=40))
    drafted = scheduler.schedule()
    assert drafted.output.rows.num_drafts.tolist() == [3, 0], "the next prompt waits for its turn"
    assert drafted.output.rows.draft_token_ids.tolist() == [20, 21, 22]
    assert (prompt.asked, drafted.asked) == (0, 3), "results are told apart by what rows were fed"
    scheduler.update(prompt, answer(prompt, [[40]], []))
    last = scheduler.schedule()
    assert last.output.rows.counts.tolist() == [2] and not last.cohort.seqs


@pytest.mark.parametrize("max_rows_ahead", [0, 4])
def test_prompts_take_turns_with_recorded_drafts(max_rows_ahead: int) -> None:
    """Beside prompts drafts would have to be judged operation by operation, those of the host as
    well."""
    scheduler = Script(max_rows_ahead=max_rows_ahead, records_drafts=True).scheduler
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=40))
    for number in range(3):
        step = scheduler.schedule()
        scheduler.update(step, answer(step, [[10 + number]], [[20, 21, 22]] if number else []))
    fed = []
    for number in range(6):
        scheduler.add(make_request(f"b{number}", [4, 5], max_tokens=1))
        step = scheduler.schedule()
        fed.append((int(step.drafts.sum()), step.num_rows))
        rows = [[7]] * step.num_rows
        scheduler.update(step, answer(step, rows, [[30, 31, 32]] * len(rows) if fed[-1][0] else []))
    assert fed[0] == (3, 1) and fed[1][0] == 0 and fed[1][1] > 1, fed
    assert scheduler.num_waiting <= 1


def test_prompts_go_beside_drafts_where_nothing_is_recorded() -> None:
    scheduler = Script().scheduler
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=40))
    for number in range(2):
        step = scheduler.schedule()
        scheduler.update(step, answer(step, [[10 + number]], [[20, 21, 22]]))
    scheduler.add(make_request("b", [4, 5], max_tokens=1))
    step = scheduler.schedule()
    assert (int(step.drafts.sum()), step.num_rows) == (3, 2)


def test_requests_and_usage_show_them() -> None:
    script, processor = Script(), OutputProcessor(None)
    request = make_request("a", [1, 2, 3], max_tokens=5, detokenize=False)
    processor.add(request, kind=OutputKind.FINAL)
    script.scheduler.add(request)
    deltas = script.step([[10]], [[11, 12, 13]])[1]
    deltas += script.step([[11, 99]], [[8, 9]])[1]
    deltas += script.step([[8, 9]], [[]])[1]
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
