"""The batch scheduler's decisions, one at a time, on an engine core with the fake device."""

from __future__ import annotations

import time

import msgspec
import pytest

from fastdeploy_core.engine.core import MAX_IDLE_PLANS
from fastdeploy_core.errors import ConfigError, InvalidRequest, RequestTooLong
from fastdeploy_core.scheduler import roster
from fastdeploy_core.types import (
    EmbeddedSpan,
    SamplingParams,
    SequenceExtras,
    branch_id,
    each_delta,
)
from fastdeploy_core.types.sampling import sequence_seed
from fastdeploy_testing.fakes import NullModel
from tests.null_engine import (
    EOS,
    VOCAB_SIZE,
    Collector,
    expected_answers,
    make_core,
    make_request,
    run,
)


def steps_of(core):
    return core._executor.steps


def rows(step):
    found = step.rows
    columns = (found.seq_ids, found.starts, found.counts)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def prompt(num_tokens, seed=0):
    return [(7 * i + 11 * seed + i * seed) % 60 + 4 for i in range(num_tokens)]


def test_long_prompt_is_chunked_by_the_budget_and_mixed_with_decodes():
    core = make_core(max_num_batched_tokens=16, max_num_seqs=4, overlap=False)
    core.add(make_request("short", prompt(4), max_tokens=8))
    core.step()
    core.add(make_request("long", prompt(40, 1), max_tokens=2))
    for _ in range(4):
        core.step()
    assert rows(steps_of(core)[1]) == [(0, 4, 1), (1, 0, 15)]
    assert rows(steps_of(core)[2]) == [(0, 5, 1), (1, 15, 15)]
    assert rows(steps_of(core)[3]) == [(0, 6, 1), (1, 30, 10)]
    assert [bool(s.rows.samples[1]) for s in steps_of(core)[1:4]] == [False, False, True]


def test_without_chunked_prefill_a_prompt_runs_whole_or_waits():
    core = make_core(
        enable_chunked_prefill=False, max_num_batched_tokens=40, max_model_len=40, overlap=False
    )
    run(core, [make_request(f"r{i}", prompt(25, i), max_tokens=2) for i in range(3)])
    for step in steps_of(core):
        assert all(n == 25 for _, start, n in rows(step) if start == 0)


def test_what_was_preempted_is_recomputed_whole_without_chunked_prefill():
    core = make_core(
        enable_chunked_prefill=False,
        max_num_batched_tokens=16,
        max_model_len=16,
        num_blocks=6,
        max_num_seqs=3,
    )
    requests = [make_request(f"r{i}", prompt(7, i), max_tokens=9) for i in range(3)]
    collector = run(core, requests)
    assert core.stats().preemptions_total > 0
    for request in requests:
        assert collector.answers(request.request_id) == expected_answers(request, 16)
    begun = [(new, step) for step in steps_of(core) for new in step.new_sequences]
    assert any(len(new.token_ids) > new.num_prompt_tokens for new, _ in begun)
    for new, step in begun:
        row = step.rows.seq_ids.tolist().index(new.seq_id)
        assert step.rows.starts[row] + step.rows.counts[row] == len(new.token_ids)


def test_chunks_without_chunked_prefill_cannot_be_needed():
    with pytest.raises(ConfigError, match="without chunked prefill a prompt runs in one step"):
        make_core(enable_chunked_prefill=False, max_num_batched_tokens=16, max_model_len=17)


@pytest.mark.parametrize("overlap", [False, True])
def test_blocks_held_for_forks_are_given_up_when_nothing_else_can_run(overlap):
    core = make_core(num_blocks=3, max_model_len=12, overlap=overlap)
    request = make_request("r", prompt(11), max_tokens=1, n=3, temperature=1.0, seed=3)
    assert run(core, [request]).answers("r") == expected_answers(request)


def test_at_most_max_num_partial_prefills_are_unfinished():
    core = make_core(
        max_num_batched_tokens=16,
        max_num_partial_prefills=2,
        max_long_partial_prefills=1,
        long_prefill_token_threshold=6,
        overlap=False,
    )
    requests = [make_request(f"r{i}", prompt(30, i), max_tokens=1) for i in range(3)]
    requests.append(make_request("short", prompt(5, 9), max_tokens=1))
    collector = run(core, requests)
    # One long prompt at a time, at most 6 tokens of it; the short one overtakes the waiting ones.
    assert collector.order[0] == "short"
    assert all(n <= 6 for step in steps_of(core) for _, _, n in rows(step))
    assert collector.order[1:] == ["r0", "r1", "r2"]


def test_mixed_batches_off_keeps_prefills_and_decodes_apart():
    core = make_core(null={"mixed_batches": False}, max_num_batched_tokens=16)
    requests = [make_request(f"r{i}", prompt(10 + i, i), max_tokens=6) for i in range(5)]
    collector = run(core, requests)
    assert all(collector.answers(r.request_id) == expected_answers(r) for r in requests)
    known = {}
    for step in steps_of(core):
        known |= {new.seq_id: len(new.token_ids) for new in step.new_sequences}
        is_prefill = {start < known[seq_id] for seq_id, start, _ in rows(step)}
        assert len(is_prefill) == 1


def test_max_prefills_per_step_is_respected():
    core = make_core(null={"max_prefills_per_step": 1})
    run(core, [make_request(f"r{i}", prompt(5, i), max_tokens=3) for i in range(4)])
    assert all(len(step.new_sequences) <= 1 for step in steps_of(core))


def test_device_without_block_sharing_gets_no_shared_blocks():
    core = make_core(null={"block_sharing": False}, num_blocks=64)
    request = make_request("r", prompt(9), max_tokens=4, n=3, temperature=1.0, seed=5)
    collector = run(core, [request, make_request("s", prompt(9), max_tokens=4)])
    assert collector.answers("r") == expected_answers(request)
    assert not any(step.copies.device_to_device for step in steps_of(core))
    used = [
        block
        for step in steps_of(core)[:1]
        for new in step.new_sequences
        for block in new.block_ids
    ]
    assert len(used) == len(set(used))
    assert any("prefix cache off" in line for line in core.info.report)


def test_answers_to_one_prompt_share_its_computation():
    core = make_core(prefix_caching=False, overlap=False)
    request = make_request("r", prompt(10), max_tokens=5, n=4, temperature=1.0, seed=1)
    collector = run(core, [request])
    assert collector.answers("r") == expected_answers(request)
    fed = [n for step in steps_of(core) for _, start, n in rows(step) if start < 10]
    assert sorted(fed) == [1, 1, 1, 10]
    copies = [pair for step in steps_of(core) for pair in step.copies.device_to_device]
    assert len(copies) == 3


def test_different_answers_have_different_seeds():
    assert len({sequence_seed(seed, index) for seed in range(50) for index in range(16)}) == 800


def test_tenants_share_service_whatever_their_load():
    core = make_core(max_num_seqs=1, overlap=False)
    flood = [make_request(f"a{i}", prompt(8, i), tenant="a", max_tokens=4) for i in range(20)]
    collector = Collector()
    for request in flood:
        core.add(request)
    for _ in range(6):
        collector.take(core.step())
    for i in range(3):
        core.add(make_request(f"b{i}", prompt(8, 50 + i), tenant="b", max_tokens=4))
    while core.has_work():
        collector.take(core.step())
    order = collector.finished
    assert order.index("b0") <= 3 and order.index("b2") <= 8
    assert [name for name in order if name[0] == "a"] == [r.request_id for r in flood]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_tenant_that_runs_nothing_gets_a_place_of_the_one_that_runs_most(overlap):
    core = make_core(overlap=overlap, prefix_caching=False, max_num_seqs=4, num_blocks=128)
    crowd = [make_request(f"a{i}", prompt(8, i), tenant="a", max_tokens=60) for i in range(6)]
    one = make_request("b", prompt(12, 50), tenant="b", max_tokens=4)
    collector = Collector()
    for request in crowd:
        core.add(request)
    for _ in range(8):
        collector.take(core.step())
    before = core.stats().preemptions_total
    core.add(one)
    for _ in range(16):
        collector.take(core.step())
    assert collector.finished == ["b"] and core.stats().preemptions_total - before == 1
    while core.has_work():
        collector.take(core.step())
    for request in (*crowd, one):
        assert collector.answers(request.request_id) == expected_answers(request)
    core.scheduler.check_idle()
    assert not core.scheduler.roster.arrived.running


def test_places_change_their_tenant_now_and_then_and_the_last_one_never(monkeypatch):
    monkeypatch.setattr(roster, "YIELD_EVERY_S", 1000.0)
    core = make_core(max_num_seqs=3)
    for i, name in enumerate("aaaaabbcc"):
        core.add(make_request(f"{name}{i}", prompt(8, i), tenant=name, max_tokens=90))
        core.step()
    running = core.scheduler.roster.running
    assert sorted(seq.request.tenant for seq in running) == ["a", "a", "b"]
    monkeypatch.setattr(core.scheduler.roster, "_yields_s", 0.0)
    for _ in range(8):
        core.step()
        monkeypatch.setattr(core.scheduler.roster, "_yields_s", 0.0)
    assert sorted(seq.request.tenant for seq in running) == ["a", "b", "c"]
    assert core.stats().preemptions_total == 2


def test_idle_tenant_saves_up_no_service():
    core = make_core(max_num_seqs=1, overlap=False)
    for i in range(4):
        run(core, [make_request(f"warm{i}", prompt(8, i), tenant="a", max_tokens=8)])
    both = [
        make_request(f"{t}{i}", prompt(8, i), tenant=t, max_tokens=4)
        for i in range(4)
        for t in "ba"
    ]
    collector = run(core, both)
    assert {name[0] for name in collector.finished[:3]} == {"a", "b"}


def test_priority_policy_runs_smaller_priorities_first():
    core = make_core(policy="priority", max_num_seqs=1)
    requests = [
        make_request(f"p{p}-{i}", prompt(5, i), priority=p) for i in range(2) for p in (2, 0, 1)
    ]
    assert run(core, requests).order == ["p0-0", "p0-1", "p1-0", "p1-1", "p2-0", "p2-1"]


def test_priority_is_ignored_by_first_come_first_served():
    core = make_core(max_num_seqs=1)
    requests = [make_request(f"r{i}", prompt(5, i), priority=-i) for i in range(4)]
    assert run(core, requests).order == ["r0", "r1", "r2", "r3"]


def test_the_newest_is_preempted_and_the_oldest_never():
    core = make_core(num_blocks=12, max_num_seqs=4, prefix_caching=False)
    requests = [make_request(f"r{i}", prompt(8, i), max_tokens=24) for i in range(4)]
    collector = run(core, requests)
    assert core.stats().preemptions_total > 0
    restarted = [new.seq_id for step in steps_of(core) for new in step.new_sequences]
    assert restarted.count(0) == 1 and restarted.count(3) > 1
    assert collector.finished == ["r0", "r1", "r2", "r3"]
    for request in requests:
        assert collector.answers(request.request_id) == expected_answers(request)


def test_low_priority_is_preempted_for_high_priority():
    core = make_core(policy="priority", num_blocks=9, prefix_caching=False, overlap=False)
    core.add(make_request("low", prompt(8), priority=5, max_tokens=20))
    collector = Collector()
    collector.take(core.step())
    core.add(make_request("high", prompt(8, 1), priority=0, max_tokens=20))
    while core.has_work():
        collector.take(core.step())
    restarted = [new.seq_id for step in steps_of(core) for new in step.new_sequences]
    assert restarted.count(0) > 1 and restarted.count(1) == 1


@pytest.mark.parametrize(("policy", "expected"), [("priority", "urgent"), ("fcfs", "low")])
def test_preempted_request_waits_for_one_of_higher_priority_that_has_just_come(policy, expected):
    core = make_core(policy=policy, num_blocks=6, prefix_caching=False, overlap=False)
    core.add(make_request("high", prompt(8), priority=0, max_tokens=14))
    core.add(make_request("low", prompt(8, 1), priority=9, max_tokens=8))
    collector = Collector()
    while not core.stats().preemptions_total:
        collector.take(core.step())
    core.add(make_request("urgent", prompt(12, 2), priority=1, max_tokens=4))
    while core.has_work():
        collector.take(core.step())
    assert collector.finished[:2] == ["high", expected]


def test_free_blocks_are_what_a_new_request_could_get():
    core = make_core(num_blocks=40, max_num_batched_tokens=16, max_num_seqs=2, overlap=False)
    batch = core.scheduler
    assert batch.roster.num_free_blocks == 40
    core.add(make_request("chunked", prompt(32), max_tokens=4))  # 8 blocks and one for its answer
    assert batch.roster.num_free_blocks == 31
    core.step()  # half of the prompt has its blocks, the other half is promised
    assert batch.kv.pool.num_available == 36 and batch.roster.num_free_blocks == 32
    for name in "ab":
        core.add(make_request(name, prompt(5, 1), max_tokens=4))
    assert batch.roster.num_free_blocks == 28
    core.add(make_request("long", prompt(127, 2), max_tokens=1))
    assert batch.roster.num_free_blocks == 0
    while core.has_work():
        core.step()
    assert batch.kv.pool.num_cached and batch.roster.num_free_blocks == 40


def test_preempted_sequence_finds_its_blocks_in_host_memory():
    core = make_core(num_blocks=12, max_num_seqs=4, host_blocks=32)
    requests = [make_request(f"r{i}", prompt(8, i), max_tokens=24) for i in range(4)]
    collector = run(core, requests)
    assert core.stats().preemptions_total > 0 and core.stats().host_hit_tokens_total > 0
    for request in requests:
        assert collector.answers(request.request_id) == expected_answers(request)


def test_output_tokens_are_cached_for_the_next_turn():
    first = make_request("a", prompt(8), max_tokens=9)
    for output_caching, expected in ((True, 16), (False, 8)):
        core = make_core(output_caching=output_caching)
        answer = run(core, [first]).answers("a")[0]
        follow_up = make_request("b", [*prompt(8), *answer, 5])
        assert run(core, [follow_up]).first["b"].num_cached_tokens == expected


def test_prompt_that_can_never_fit_is_refused_with_the_arithmetic():
    core = make_core(num_blocks=4, max_model_len=100)
    with pytest.raises(RequestTooLong, match=r"16 tokens and needs 5 KV blocks.*pool has 4 blocks"):
        core.add(make_request("r", prompt(16)))
    core.add(make_request("ok", prompt(15)))
    with pytest.raises(
        RequestTooLong, match=r"the prompt has 100 tokens; the model's context is 100"
    ):
        make_core(max_model_len=100).add(make_request("r", prompt(100)))
    assert core.stats().requests_rejected_total == {"RequestTooLong": 1}


def test_answer_that_outgrows_the_pool_ends_with_length():
    core = make_core(num_blocks=4, max_model_len=100)
    collector = run(core, [make_request("r", prompt(10), max_tokens=50)])
    assert len(collector.answers("r")[0]) == 6 and collector.reasons["r"] == {0: "length"}


def test_withheld_blocks_fail_the_request_instead_of_stalling_it():
    core = make_core(num_blocks=8)
    core.scheduler.kv.quarantine(range(6))
    collector = run(core, [make_request("r", prompt(20), max_tokens=4)])
    assert collector.errors == {"r": "OutOfBlocks"}
    core.scheduler.kv.release_quarantine(range(6))
    assert run(core, [make_request("s", prompt(20), max_tokens=4)]).finished == ["s"]


@pytest.mark.parametrize("overlap", [False, True])
def test_max_tokens_zero_is_answered_without_a_token(overlap):
    core = make_core(overlap=overlap)
    plain = make_request("plain", prompt(6), max_tokens=0)
    scored = make_request("scored", prompt(6, 1), max_tokens=0, prompt_logprobs=1)
    collector = run(core, [plain, scored])
    assert collector.reasons == {"plain": {0: "length"}, "scored": {0: "length"}}
    assert collector.answers("scored") == [[]]
    assert len(collector.first["scored"].prompt_logprobs) == 6


@pytest.mark.parametrize("chunk", [5, 32])
@pytest.mark.parametrize("num_blocks", [64, 10])
def test_prompt_logprobs_cover_the_prompt_once(chunk, num_blocks):
    core = make_core(max_num_batched_tokens=max(8, chunk), num_blocks=num_blocks, max_num_seqs=4)
    run(core, [make_request("warm", prompt(17), max_tokens=1)])
    requests = [
        make_request(f"r{i}", prompt(17), prompt_logprobs=0, max_tokens=8) for i in range(3)
    ]
    collector = run(core, requests)
    for request in requests:
        found = collector.first[request.request_id].prompt_logprobs
        assert found[0] is None
        assert [row.token_ids[0] for row in found[1:]] == prompt(17)[1:]


def stop_at(tokens, position):
    """A token of the answer that does not occur before."""
    while tokens[position] in tokens[:position]:
        position += 1
    return tokens[position], position


def test_stop_token_ends_the_answer_and_is_named():
    tokens = NullModel(VOCAB_SIZE).expected(prompt(5), 20, SamplingParams(temperature=0.0))
    stop, position = stop_at(tokens, 4)
    core = make_core()
    core.add(make_request("r", prompt(5), max_tokens=20, stop_token_ids=[stop]))
    deltas = []
    while core.has_work():
        deltas += each_delta(core.step())
    last = deltas[-1].sequences[0]
    assert last.finish_reason == "stop" and last.stop_reason == stop
    assert sum(len(d.sequences[0].token_ids) for d in deltas) == position + 1
    core.scheduler.check_idle()


def test_eos_stops_unless_it_is_ignored_or_too_early():
    tokens = NullModel(VOCAB_SIZE).expected(prompt(5), 20, SamplingParams(temperature=0.0))
    eos, position = stop_at(tokens, 2)

    def answer(**sampling):
        core = make_core()
        request = make_request("r", prompt(5), max_tokens=20, **sampling)
        request.eos_token_ids = [eos]
        return run(core, [request])

    assert answer().answers("r") == [tokens[: position + 1]]
    assert answer(ignore_eos=True).answers("r") == [tokens]
    assert len(answer(min_tokens=15).answers("r")[0]) >= 15


@pytest.mark.parametrize("overlap", [False, True])
def test_abort_frees_blocks_at_every_moment(overlap):
    for moment in range(8):
        core = make_core(overlap=overlap, max_num_batched_tokens=8)
        core.add(make_request("gone", prompt(20), n=2, temperature=1.0, max_tokens=30))
        core.add(make_request("stays", prompt(6, 1), max_tokens=4))
        collector = Collector()
        for _ in range(moment):
            collector.take(core.step())
        core.abort(["gone", "unknown"])
        core.abort(["gone"])
        late = Collector()
        late._positions = collector._positions
        while core.has_work():
            late.take(core.step())
        assert "gone" not in late.order
        core.scheduler.check_idle()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_branch_can_end_while_the_others_go_on(overlap):
    request = make_request("r", prompt(10), max_tokens=20, n=3, temperature=1.0, seed=3)
    core = make_core(overlap=overlap, prefix_caching=False, block_size=64)
    core.add(request)
    collector = Collector()
    for _ in range(6):
        collector.take(core.step())
    assert core.stats().num_blocks_used == 3
    core.abort([branch_id("r", 1), branch_id("r", 1), branch_id("r", 9), branch_id("x", 0)])
    for _ in range(3):
        collector.take(core.step())
    assert core.stats().num_running == core.stats().num_blocks_used == 2
    while core.has_work():
        collector.take(core.step())
    expected = expected_answers(request)
    first, ended, third = collector.answers("r")
    assert [first, third] == [expected[0], expected[2]]
    assert len(ended) < 10 and ended == expected[1][: len(ended)]
    assert collector.reasons["r"] == {0: "length", 1: "abort", 2: "length"}
    core.scheduler.check_idle()


@pytest.mark.parametrize("overlap", [False, True])
def test_the_last_branch_to_end_ends_the_request(overlap):
    core = make_core(overlap=overlap)
    core.add(make_request("r", prompt(10), max_tokens=20, n=2, temperature=1.0, seed=3))
    collector = Collector()
    for _ in range(4):
        collector.take(core.step())
    core.abort([branch_id("r", 0)])
    core.abort([branch_id("r", 1)])
    while core.has_work():
        collector.take(core.step())
    assert collector.finished == ["r"] and collector.reasons["r"] == {0: "abort", 1: "abort"}
    core.scheduler.check_idle()


def test_deadline_ends_a_request_with_an_error():
    core = make_core()
    now = [0.0]
    core.scheduler._clock = lambda: now[0]
    core.add(make_request("r", prompt(5), max_tokens=100, deadline_s=5.0))
    core.add(make_request("s", prompt(5, 1), max_tokens=20, deadline_s=50.0))
    collector = Collector()
    collector.take(core.step())
    now[0] = 6.0
    while core.has_work():
        collector.take(core.step())
    assert collector.errors == {"r": "RequestTimeout"}
    assert collector.reasons["s"] == {0: "length"}
    core.scheduler.check_idle()


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_drafts_change_nothing_but_the_number_of_steps(num_drafts):
    requests = [make_request(f"r{i}", prompt(6, i), max_tokens=20, eos=True) for i in range(4)]
    plain = make_core(overlap=False)
    run(plain, requests)
    core = make_core(num_drafts=num_drafts)
    core.scheduler._policy.choose = lambda num_rows, kind: num_drafts
    collector = run(core, requests)
    for request in requests:
        assert collector.answers(request.request_id) == expected_answers(request)
    stats = core.stats()
    assert stats.steps_total < plain.stats().steps_total
    assert 0 < stats.accepted_draft_tokens_total < stats.draft_tokens_total


def test_overlap_queues_the_next_step_before_the_last_one_is_taken():
    core = make_core(overlap=True)
    core.add(make_request("r", prompt(5), max_tokens=6))
    core.step()
    assert len(steps_of(core)) == 2
    assert rows(steps_of(core)[1]) == [(0, 5, 1)]
    assert steps_of(core)[1].new_sequences == []
    while core.has_work():
        core.step()
    # max_tokens is known in advance: no step is wasted.
    assert len(steps_of(core)) == 6


@pytest.mark.parametrize("overlap", [False, True])
def test_a_batch_that_stays_the_same_is_not_described_again(overlap):
    core = make_core(overlap=overlap, max_num_seqs=4)
    requests = [make_request(f"r{i}", prompt(5, i), max_tokens=8 + 4 * (i == 3)) for i in range(4)]
    collector = run(core, requests)
    assert all(collector.answers(r.request_id) == expected_answers(r) for r in requests)
    # The first step, and the one in which three of them have ended.
    assert len(steps_of(core)) == 12 and core._executor.num_explicit == 2


def test_tokens_of_a_steady_batch_come_in_columns():
    core = make_core()
    for i in range(3):
        core.add(make_request(f"r{i}", prompt(5, i), max_tokens=8))
    core.add(make_request("scored", prompt(5, 3), max_tokens=8, logprobs=0))
    core.step()
    (tokens, single) = core.step()
    assert tokens.request_ids == ["r0", "r1", "r2"] and tokens.positions == [1, 1, 1]
    assert single.request_id == "scored" and single.sequences[0].logprobs is not None
    while core.has_work():
        core.step()


def test_token_scheduled_beyond_an_unforeseen_end_is_dropped():
    tokens = NullModel(VOCAB_SIZE).expected(prompt(5), 20, SamplingParams(temperature=0.0))
    eos, position = stop_at(tokens, 3)
    core = make_core(overlap=True)
    request = make_request("r", prompt(5), max_tokens=20)
    request.eos_token_ids = [eos]
    collector = run(core, [request])
    assert collector.answers("r") == [tokens[: position + 1]]
    assert len(steps_of(core)) == position + 2


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ({"max_num_batched_tokens": 4}, "smaller than max_num_seqs"),
        ({"enable_chunked_prefill": False}, "without chunked prefill"),
    ],
)
def test_settings_that_cannot_work_are_refused(batch, reason):
    with pytest.raises(ConfigError, match=reason):
        make_core(**batch)


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (make_request("r", []), "prompt"),
        (make_request("r", [VOCAB_SIZE]), "prompt"),
        (make_request("r", [-1]), "prompt"),
        (make_request("r", [5], stop_token_ids=[VOCAB_SIZE]), "stop_token_ids"),
        (make_request("r", [5], logprobs=21), "logprobs"),
        (make_request("r", [5], logprobs=-1), "logprobs"),
    ],
)
def test_invalid_request_is_refused_and_changes_nothing(request_, param):
    core = make_core()
    with pytest.raises(InvalidRequest) as caught:
        core.add(request_)
    assert caught.value.param == param
    assert not core.has_work()
    run(core, [make_request("ok", [5])])


@pytest.mark.parametrize("overlap", [False, True])
def test_newer_attempt_takes_the_place_of_the_one_that_runs(overlap):
    core = make_core(overlap=overlap)
    older = make_request("r", [5, 6, 7], max_tokens=6, ignore_eos=True)
    core.add(older)
    core.step()
    newer = msgspec.structs.replace(older, attempt=1)
    found = run(core, [newer])
    assert found.answers("r") == expected_answers(newer)
    assert found.first["r"].attempt == 1
    core.add(newer)
    for request in (older, newer):
        with pytest.raises(InvalidRequest, match="duplicate request id"):
            core.add(request)


def test_duplicate_id_is_refused_while_the_first_is_unfinished():
    core = make_core()
    core.add(make_request("r", [5, 6]))
    with pytest.raises(InvalidRequest, match="duplicate request id"):
        core.add(make_request("r", [5, 6]))
    while core.has_work():
        core.step()
    run(core, [make_request("r", [5, 6])])


@pytest.mark.parametrize(
    ("extras", "needs"),
    [
        (SequenceExtras(adapter="legal@1"), "adapter"),
        (SequenceExtras(embeddings=[EmbeddedSpan(0, 2, b"a" * 32)]), "embeddings"),
        (SequenceExtras(positions=bytes(48)), "positions"),
        (SequenceExtras(position_offset=-3), "positions"),
        (SequenceExtras(pooling="last"), "pooling"),
    ],
)
def test_what_no_worker_serves_is_refused(extras, needs):
    core = make_core()
    request = msgspec.structs.replace(make_request("a", prompt(4)), extras=extras)
    with pytest.raises(InvalidRequest, match=needs):
        core.add(request)
    assert not core.has_work()
    core.add(msgspec.structs.replace(request, extras=SequenceExtras()))


def test_request_that_waits_for_remote_kv_lets_the_engine_sleep_and_others_run():
    core = make_core(max_num_seqs=1)
    core.add(make_request("held", prompt(4), max_tokens=2))
    core.scheduler.hold("held")
    assert not core.has_work() and core.stats().num_waiting == 0
    for _ in range(2 * MAX_IDLE_PLANS):
        assert core.step() == []  # an engine that is woken for nothing gives up no request
    assert core.scheduler.num_requests == 1
    other = make_request("other", prompt(5, 1), max_tokens=3)
    core.add(other)
    collector = Collector()
    while core.has_work():
        collector.take(core.step())
    assert collector.answers("other") == expected_answers(other, 16)
    assert core.scheduler.num_requests == 1 and not core.has_work()
    core.scheduler.release("held")
    collector = run(core, [])
    held = make_request("held", prompt(4), max_tokens=2)
    assert collector.answers("held") == expected_answers(held, 16)
    core.scheduler.release("held")  # it has ended: nothing to do
    core.scheduler.check_idle()


@pytest.mark.parametrize("num_samples", [1, 3])
def test_request_that_waits_for_remote_kv_can_be_aborted(num_samples):
    core = make_core()
    core.add(make_request("held", prompt(4), max_tokens=2, n=num_samples, temperature=0.5))
    core.scheduler.hold("held")
    core.abort(["held"])
    assert core.scheduler.num_requests == core.scheduler.num_held == 0 and not core.has_work()
    core.scheduler.check_idle()


def test_request_that_waits_for_remote_kv_ends_with_its_deadline():
    core = make_core()
    request = make_request("held", prompt(4), max_tokens=2)
    core.add(msgspec.structs.replace(request, deadline_s=0.01))
    core.scheduler.hold("held")
    assert not core.has_work()
    time.sleep(0.02)
    assert core.has_work()
    deltas = [delta for _ in range(3) for delta in each_delta(core.step())]
    assert [delta.error_type for delta in deltas] == ["RequestTimeout"] and not core.has_work()


def test_eos_constant_is_in_the_vocabulary():
    assert EOS < VOCAB_SIZE
