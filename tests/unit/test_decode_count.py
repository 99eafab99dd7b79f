"""How many tokens come at a time where a device decodes several without the host."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy_core.scheduler import decode_count
from fastdeploy_core.scheduler.decode_count import DecodeCount
from tests.null_engine import EOS, Collector, expected_answers, make_core, make_request, run


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine changes nothing."""
    monkeypatch.setattr(decode_count, "most_at", lambda *step: 1e6)


def make(most: int = 4, **options: Any) -> Any:
    options = {"overlap": False, **options}
    return make_core(null={"decodes_per_step": most}, **options)


def counts(core: Any) -> list[int]:
    return [step.num_decodes for step in core._executor.steps]


def test_a_batch_begins_with_few_and_stays_below_the_time_limit() -> None:
    count = DecodeCount(8)
    assert count.choose(100) == 1  # nothing is known of a step
    count.note(0, 0.0002)
    assert count.choose(100) == 1  # it computed prompts
    seen = []
    for _ in range(5):
        seen.append(count.choose(100))
        count.note(seen[-1], 0.0003 * seen[-1])
    assert seen == [1, 2, 4, 8, 8]
    count.note(8, 8 * 0.001)
    assert count.choose(100) == 3
    count.note(3, 3 * 0.004)
    assert count.choose(100) == 1
    count.note(1, 0.0003)
    assert count.choose(100) == 2 and count.choose(1) == 1


@pytest.mark.parametrize(
    ("milliseconds", "most"),
    [(0.2, 8), (3.1, 8), (4.2, 6), (7, 5), (12, 4), (14, 3), (20, 2), (24, 2), (26, 1), (200, 1)],
)
def test_on_the_host_long_steps_are_several_too(milliseconds: float, most: int) -> None:
    """As many as lose the least: see the module's text."""
    count = DecodeCount(8, on_host=True)
    count.note(0, 1.0)
    for _ in range(6):
        chosen = count.choose(100)
        count.note(chosen, milliseconds / 1e3 * chosen)
    assert count.choose(100) == most and count.choose(1) == 1

    def lost(together: int) -> float:
        """Of an answer of 100 tokens, beside a host's part of 1 ms."""
        return (together - 1) / 2 * milliseconds + 100 / together

    # Rounded down, it loses less than a hundredth of the answer more than the best number in time.
    in_time = [number for number in range(1, 9) if number * milliseconds <= 50] or [1]
    assert most in in_time and lost(most) <= min(map(lost, in_time)) + milliseconds + 1


def test_on_the_host_one_step_that_took_long_says_little_of_the_next() -> None:
    count = DecodeCount(8, on_host=True)
    for _ in range(4):
        count.note(count.choose(100), 0.005 * count.choose(100))
    assert count.choose(100) == 6
    count.note(6, 0.100)
    assert count.choose(100) == 5
    count.note(5, 0.025)
    assert count.choose(100) == 6
    for _ in range(18):  # that many are no chance
        count.note(count.choose(100), 0.03 * count.choose(100))
    assert count.choose(100) == 1


def test_steps_with_prompts_make_a_new_batch() -> None:
    count = DecodeCount(8)
    for _ in range(5):
        count.note(count.choose(100), 0.0002 * count.choose(100))
    assert count.choose(100) == 8
    count.note(0, 0.02)
    assert count.choose(100) == 1
    count.note(1, 0.0015)  # there are more rows now
    assert count.choose(100) == 2


@pytest.mark.usefixtures("patience")
def test_answers_end_where_they_end_alone() -> None:
    core = make(max_num_seqs=4)
    requests = [make_request(f"r{i}", [4 + i, 9, 7], max_tokens=11 + i) for i in range(4)]
    collector = run(core, requests)
    for request in requests:
        assert collector.answers(request.request_id) == expected_answers(request, 128)
        assert collector.reasons[request.request_id] == {0: "length"}
    # The first answer of 11: one token with the prompt's step, then ten; the others go on for a
    # token each.
    assert counts(core) == [1, 1, 2, 4, 3, 1, 1, 1]
    assert core.stats().generation_tokens_total == 11 + 12 + 13 + 14


@pytest.mark.usefixtures("patience")
def test_what_is_computed_behind_a_stop_is_thrown_away() -> None:
    core = make(most=8, prefix_caching=True)
    request = next(
        request
        for seed in range(200)
        if 8 < len(expected_answers(request := make_request("r", [5, 6, seed + 8], max_tokens=40,
            eos=True), 128)[0]) < 14
    )  # fmt: skip
    (expected,) = expected_answers(request, 128)
    assert expected[-1] == EOS
    collector = run(core, [request])
    assert collector.answers("r") == [expected] and collector.reasons["r"] == {0: "stop"}
    assert sum(counts(core)) > len(expected)
    # What the prefix cache keeps of it is right: the same again, and what follows it.
    again = make_request("again", [*request.prompt_token_ids, *expected], max_tokens=12)
    assert run(core, [again]).answers("again") == expected_answers(again, 128)
    core.scheduler.check_idle()


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize(
    "constraint",
    [{"logprobs": 1}, {"min_tokens": 9}, {"n": 2, "seed": 1}, {"presence_penalty": 0.5}],
    ids=str,
)
def test_rows_that_the_host_has_a_say_in_decode_once(constraint: dict[str, Any]) -> None:
    core = make()
    plain = make_request("plain", [4, 5, 6], max_tokens=16)
    special = make_request("special", [7, 8, 9], max_tokens=10, temperature=1.0, **constraint)
    collector = run(core, [plain, special])
    assert collector.answers("plain") == expected_answers(plain, 128)
    found = [(step.rows.seq_ids.size, step.num_decodes) for step in core._executor.steps]
    assert all(number == 1 for rows, number in found if rows > 1)
    assert max(number for _, number in found) > 1  # once the other one has ended


@pytest.mark.usefixtures("patience")
def test_a_request_that_waits_comes_before_further_tokens() -> None:
    core, collector = make(max_num_seqs=2), Collector()
    core.add(make_request("first", [4, 5, 6], max_tokens=30))
    for _ in range(4):
        collector.take(core.step())
    assert counts(core) == [1, 1, 2, 4]
    core.add(make_request("second", [7, 8, 9], max_tokens=30))
    collector.take(core.step())
    step = core._executor.steps[-1]
    assert step.num_decodes == 1 and step.rows.counts.tolist() == [1, 3]
    # A third one cannot start before one of them ends: it keeps nobody from anything.
    core.add(make_request("third", [7, 8, 9], max_tokens=30))
    for _ in range(4):
        collector.take(core.step())
    assert counts(core)[-3:] == [2, 4, 4]


@pytest.mark.usefixtures("patience")
def test_nobody_is_preempted_for_more_tokens_at_a_time() -> None:
    # Two sequences of which each fills half of the pool, to the last token.
    core = make(num_blocks=8, max_num_seqs=2, prefix_caching=False, max_model_len=16)
    requests = [make_request(f"r{i}", [4 + i, 5, 6, 7, 8], max_tokens=11) for i in range(2)]
    collector = run(core, requests)
    assert core.stats().preemptions_total == 0
    for request in requests:
        assert collector.answers(request.request_id) == expected_answers(request, 16)


@pytest.mark.parametrize("options", [{"overlap": True}, {"num_drafts": 2}], ids=str)
def test_it_is_not_for_devices_that_hide_the_host_or_draft(options: dict[str, Any]) -> None:
    core = make(**options)
    run(core, [make_request("r", [4, 5, 6], max_tokens=20)])
    assert set(counts(core)) == {1}


def test_where_steps_are_queued_ahead_a_batch_begins_with_one_decode_per_step() -> None:
    count, found = DecodeCount(4, begins_after=5), []
    for prompts in (False, False, True):
        for _ in range(12):
            count.note(found[-1] if found else 1, 1e-4)
            found.append(count.choose(100))
        if prompts:
            count.note(0, 1e-4)
            assert count.choose(100) == 1
    assert found[:7] == [1, 1, 1, 1, 2, 4, 4] and set(found[7:]) == {4}
