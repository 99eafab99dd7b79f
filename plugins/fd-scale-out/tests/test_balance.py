"""Which of several engines gets a request: known beginnings, loads, several front ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fd_scale_out.balance import SEQUENCE_TOKENS, Balance, Placement
from null_engine import make_config, make_request

from fastdeploy_core.config import CacheConfig, EngineConfig, ParallelConfig

BLOCK = 4


def config_of(num_engines: int = 2, **cache: bool) -> EngineConfig:
    return replace(
        make_config(),
        parallel=ParallelConfig(data_parallel_size=num_engines),
        cache=CacheConfig(block_size=BLOCK, **cache),
    )


def place(
    balance: Balance, prompt: list[int], *engines: int, n: int = 1, salt: str = ""
) -> Placement:
    request = make_request("r", prompt, n=n, temperature=1.0)
    request.cache_salt = salt
    return balance.place(request, balance.hashes(request), engines or (0, 1))


def tokens(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def test_equal_engines_take_turns() -> None:
    balance = Balance(config_of(3))
    chosen = []
    for number in range(6):
        placement = place(balance, tokens(100 * number, 8), 0, 1, 2)
        chosen.append(placement.engine)
        balance.ended(placement)
    assert chosen == [0, 1, 2, 0, 1, 2]


def test_a_prompt_goes_where_its_beginning_was_sent() -> None:
    balance = Balance(config_of())
    first, other = place(balance, tokens(0, 40)), place(balance, tokens(500, 40))
    assert first.engine != other.engine
    for placement in (first, other):
        balance.ended(placement)
    for turn in range(3):
        again = place(balance, [*tokens(0, 40), turn, 7])
        assert (again.engine, again.num_waiting) == (first.engine, 2)
        balance.ended(again)
        again = place(balance, [*tokens(500, 20), *[turn] * 20])
        assert (again.engine, again.num_waiting) == (other.engine, 20)
        balance.ended(again)


def test_a_busy_owner_loses_a_prompt_that_another_would_answer_sooner() -> None:
    balance = Balance(config_of())
    owner = place(balance, tokens(0, 40), 0)
    balance.ended(owner)
    held = [place(balance, tokens(1000 * n, 8), 0) for n in range(1, 3)]
    # 2 sequences and 16 tokens wait before it there: more than the 40 tokens it would save
    assert balance.load(0) == 2 * SEQUENCE_TOKENS + 16
    assert place(balance, tokens(0, 40)).engine == 1
    for placement in held:
        balance.ended(placement)
    assert balance.load(0) == 0
    # now both know it, and engine 1 still answers the one above
    assert place(balance, tokens(0, 40)).engine == 0


def test_load_ends_with_what_made_it() -> None:
    balance = Balance(config_of())
    placement = place(balance, tokens(0, 10), 1, n=3)
    assert (balance.load(0), balance.load(1)) == (0, 10 + 3 * SEQUENCE_TOKENS)
    balance.first_token(placement)
    assert balance.load(1) == 3 * SEQUENCE_TOKENS
    balance.ended(placement)
    assert balance.load(1) == 0
    early = place(balance, tokens(0, 10), 1)  # ended before its first token
    balance.ended(early)
    assert balance.load(1) == 0


@pytest.mark.parametrize("change", ["salt", "cache"])
def test_a_beginning_counts_only_where_the_engine_would_find_it(change: str) -> None:
    balance = Balance(config_of(enable_prefix_caching=change != "cache"))
    balance.ended(place(balance, tokens(0, 40), 1))
    again = place(balance, tokens(0, 40), 1, salt="other" if change == "salt" else "")
    assert again.num_waiting == 40


def test_the_cache_of_an_engine_that_ended_is_forgotten() -> None:
    balance = Balance(config_of())
    for engine in (0, 1):
        balance.ended(place(balance, tokens(0, 40), engine))
    balance.forget(1)
    waits = []
    for engine in (0, 1):
        waits.append(place(balance, tokens(0, 40), engine))
    assert [wait.num_waiting for wait in waits] == [1, 40]


def test_newer_blocks_take_the_slots_of_older_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fd_scale_out.balance.NUM_SLOTS", 256)
    balance = Balance(config_of())
    balance.ended(place(balance, tokens(0, 8), 0))
    for start in range(10**6, 10**6 + 80 * 400, 400):
        balance.ended(place(balance, tokens(start, 400), 0))
    # A prompt that is not found any more is placed all the same. One whose blocks have taken each
    # other's slots is found by its last block.
    assert place(balance, tokens(0, 8), 0).num_waiting == 8
    assert place(balance, tokens(start, 400), 0).num_waiting == 1


def test_front_ends_see_each_others_load_and_beginnings(tmp_path: Path) -> None:
    config, path = config_of(), tmp_path / "balance"
    Balance.create(config, 2, path)
    first, second = Balance(config, 0, path), Balance(config, 1, path)
    placement = place(first, tokens(0, 40), 1)
    assert second.load(1) == first.load(1) == 40 + SEQUENCE_TOKENS
    assert place(second, tokens(500, 40)).engine == 0
    first.ended(placement)
    assert second.load(1) == 0
    assert place(second, tokens(0, 42)).num_waiting == 2  # where the first one sent it
    assert second.load(1) > 0
    # a front end that is started again has nothing in flight; the other one's stays
    place(first, tokens(900, 10), 0)
    assert first.load(0) == 40 + 10 + 2 * SEQUENCE_TOKENS
    Balance(config, 1, path)
    assert first.load(0) == 10 + SEQUENCE_TOKENS
    assert first.load(1) == 0
