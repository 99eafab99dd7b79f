"""Bounded groups of layers: a memory of plain numbers behind KVCacheManager says what every token
of random sequences would have read."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from fastdeploy_core.contracts.model import AttentionSpec, Retention
from fastdeploy_core.kvcache import GroupPlan, KVCacheManager, PrefixMatch, bounded_rules

BLOCK = 4
RULES = {
    "window 6": [Retention("window", 6)],
    "window 1": [Retention("window", 1)],
    "chunk 8": [Retention("chunk", 8)],
    "chunk 6": [Retention("chunk", 6)],
    "window 6 + chunk 8 + window 13": [
        Retention("window", 6),
        Retention("chunk", 8),
        Retention("window", 13),
    ],
    "state": [Retention("state")],
    "window 6 + state": [Retention("window", 6), Retention("state")],
}


def make_manager(rules, num_blocks=60, most=14, host=0, **options):
    plans = [GroupPlan(rule, most, most, host) for rule in rules]
    kv = KVCacheManager(num_blocks, BLOCK, model_identity="m", **options)
    kv.add_groups(plans)
    return kv


class Memory:
    """What lies in each slot of each group: the tokens up to and with the one that wrote it."""

    def __init__(self, kv: KVCacheManager) -> None:
        self.kv, self.num_loads = kv, [0] * (1 + len(kv.bounded))
        self.host: list[dict[int, list]] = [{} for _ in self.num_loads]
        self.rules = [Retention("all"), *(group.rule for group in kv.bounded)]
        self.slots: list[dict[tuple[int, int], tuple[int, ...]]] = [{} for _ in self.rules]

    def tables(self, table):
        return [table.blocks, *(own.blocks for own in table.more)]

    def feed(self, table, tokens, start, end):
        """Compute tokens start to end: write each, then read what its query sees. A state is the
        block's only content: it is read for token start - 1, and left for token end - 1. Copies
        come first."""
        copies = self.kv.take_copies()
        for group, own in enumerate((copies, *copies.more)):
            slots, host = self.slots[group], self.host[group]
            for block, to in own.device_to_host:
                host[to] = [slots.get((block, at)) for at in range(BLOCK)]
            for block, to in own.host_to_device:
                slots.update({(to, at): found for at, found in enumerate(host[block])})
            self.num_loads[group] += len(own.host_to_device)
        for rule, slots, blocks in zip(self.rules, self.slots, self.tables(table), strict=True):
            if rule.kind == "state":
                if start:
                    assert slots[blocks[(start - 1) // BLOCK], 0] == tuple(tokens[:start])
                slots[blocks[(end - 1) // BLOCK], 0] = tuple(tokens[:end])
                continue
            for at in range(start, end):
                slots[blocks[at // BLOCK], at % BLOCK] = tuple(tokens[: at + 1])
        for rule, slots, blocks in zip(self.rules, self.slots, self.tables(table), strict=True):
            if rule.kind == "state":
                continue
            for at in range(start, end):
                for key in range(rule.first_needed(at), at + 1):
                    found = slots[blocks[key // BLOCK], key % BLOCK]
                    assert found == tuple(tokens[: key + 1]), (rule, at, key)


def play(kv: KVCacheManager, dice: Random) -> dict[str, Any]:
    """Sequences side by side, with shared beginnings, chunks, refused drafts and preemptions."""
    memory, seen = Memory(kv), {"hits": 0, "preempted": 0}
    texts = [[dice.randrange(9) for _ in range(dice.randrange(9, 40))] for _ in range(3)]
    running: list[list] = []  # [text, table, computed, length of the prompt]
    for _ in range(120):
        if len(running) < 3 and dice.random() < 0.5:
            base = dice.choice(texts)
            text = base[: dice.randrange(4, len(base) + 1)]
            text = text + [dice.randrange(9) for _ in range(dice.randrange(1, 30))]
            texts = [*texts[-5:], text]
            table = kv.new_table()
            match = kv.match(table, text)
            chunk = min(len(text) - match.num_tokens, dice.randrange(1, 17))
            if dice.random() < 0.8:  # else no chunk ends at an anchor
                chunk = kv.cut(table, match.num_tokens, chunk)
            if not kv.has_room(match, match.num_tokens + chunk):
                continue
            kv.start(table, match, match.num_tokens + chunk)
            seen["hits"] += match.num_tokens > 0
            done = match.num_tokens
            end = done + chunk
            memory.feed(table, text, done, end)
            kv.commit(table, text, end)
            kv.let_go(table, end)
            running.append([text, table, end])
            continue
        if not running:
            continue
        state = dice.choice(running)
        text, table, done = state
        if done == len(text) or dice.random() < 0.05:
            seen["preempted"] += done < len(text)
            kv.free(table)
            running.remove(state)
            continue
        end = done + kv.cut(table, done, min(len(text) - done, dice.randrange(1, 17)))
        wrong = 0 if kv._cuts else dice.randrange(4)  # drafts that are refused
        if kv.grow(table, end + wrong) is None:
            kv.free(table)
            running.remove(state)
            seen["preempted"] += 1
            continue
        memory.feed(table, text[:end] + [99] * wrong, done, end + wrong)
        kv.commit(table, text, end)
        kv.let_go(table, end)
        kv.check()
        state[2] = end
    for _, table, _ in running:
        kv.free(table)
    seen["loaded"] = memory.num_loads
    return seen


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("host", [3, 12])
def test_what_comes_back_from_host_memory_is_what_was_there(name: str, host: int) -> None:
    """In every group, few blocks of each on the device: parts of what a prefix needs are there and
    parts in host memory, or nowhere."""
    num_loaded = [0] * (1 + len(RULES[name]))
    for seed in range(20):
        kv = make_manager(RULES[name], 24, 14, host, num_host_blocks=2 * host)
        seen = play(kv, Random(seed))
        num_loaded = [a + b for a, b in zip(num_loaded, seen["loaded"], strict=True)]
        kv.check()
        assert kv.num_used == 0, "a block is leaked"
    reads_others = name != "window 1"  # a query sees itself alone
    assert all(num_loaded) == reads_others, "each group had something in host memory alone"


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("caching", [True, False])
def test_every_token_reads_what_its_query_sees(name: str, caching: bool) -> None:
    seen = {"hits": 0, "preempted": 0}
    for seed in range(25):
        kv = make_manager(RULES[name], enable_prefix_caching=caching)
        played = play(kv, Random(seed))
        for what in seen:
            seen[what] += played[what]
        kv.check()
        assert kv.num_used == 0, "a block is leaked"
    assert seen["preempted"]
    assert bool(seen["hits"]) == caching


def compute(kv, tokens, *, steps=8):
    """A whole prompt in chunks, committed; the table and what was found."""
    table = kv.new_table()
    match = kv.match(table, tokens)
    kv.start(table, match, match.num_tokens)
    for end in [*range(match.num_tokens + steps, len(tokens), steps), len(tokens)]:
        assert kv.grow(table, end) is not None
        kv.commit(table, tokens, end)
        kv.let_go(table, end)
    return table, match


def test_a_state_stays_in_its_block_and_is_kept_where_others_may_resume() -> None:
    kv = make_manager([Retention("state")], num_blocks=400, most=6)
    shared = [1000 + i for i in range(43)]
    hits = []
    for request in range(4):
        tokens = [*shared, *(100 * request + i for i in range(21))]
        table = kv.new_table()
        match = kv.match(table, tokens)
        done = match.num_tokens
        kv.start(table, match, done)
        while done < len(tokens):
            done += kv.cut(table, done, min(30, len(tokens) - done))
            assert kv.grow(table, done) is not None
            kv.commit(table, tokens, done)
            kv.let_go(table, done)
            assert len(table.more[0].held) <= 2
        for end in range(len(tokens) + 1, len(tokens) + 50):  # decodes take no further block
            kv.grow(table, end)
            kv.let_go(table, end)
        assert len(table.more[0].held) == 1 and len(table.more[0].blocks) == len(table.blocks)
        kv.free(table)
        kv.check()
        hits.append(match.num_tokens)
    # The second one leaves the first at token 40, and keeps its state there for the others.
    assert hits == [0, 0, 40, 40]
    assert kv.match(kv.new_table(), tokens).num_tokens == 60  # the end of its prompt


def test_a_state_that_another_sequence_resumed_from_is_left_as_it_is() -> None:
    """Also once the cache has forgotten it."""
    kv = make_manager([Retention("state")])
    tokens = list(range(30))
    table = kv.new_table()
    match = kv.match(table, tokens)
    kv.start(table, match, kv.cut(table, 0, 30))
    kv.commit(table, tokens, 28)
    tables = [kv.new_table() for _ in range(2)]
    for other in tables:
        kv.start(other, kv.match(other, tokens), 28)
    (block,) = table.more[0].held
    assert all(other.more[0].held == [block] for other in tables)
    kv.clear_cache()
    for other in (*tables, table):
        assert kv.grow(other, 30) is not None
    live = [other.more[0].blocks[-1] for other in (*tables, table)]
    assert len(set(live)) == 3 and (block not in live[:2])
    for other in (*tables, table):
        kv.free(other)
    kv.check()
    assert kv.num_used == 0


def test_a_long_prompt_holds_no_more_than_its_window() -> None:
    """400 tokens through a pool of 7 blocks: a window of 9 spans at most 3, each step takes 2."""
    kv = make_manager([Retention("window", 9)], num_blocks=101, most=7)
    table, _ = compute(kv, list(range(400)))
    (own,) = table.more
    assert len(table.blocks) == len(own.blocks) == 100
    assert own.num_gone * BLOCK == 392 and len(own.held) == 2
    assert kv.bounded[0].pool.num_used == 2 and kv.pool.num_used == 100


def test_a_finished_prompt_is_resumed_at_its_end_and_where_others_left_it() -> None:
    kv = make_manager([Retention("window", 9)], num_blocks=400, most=40)
    shared = [1000 + i for i in range(43)]
    hits = []
    for request in range(4):
        tokens = [*shared, *(100 * request + i for i in range(21))]
        table, match = compute(kv, tokens)
        kv.free(table)
        hits.append(match.num_tokens)
    # The first is new. The second finds keys, but the first kept only its own end; it keeps the
    # place where it left the first. From the third on that is found.
    assert hits == [0, 0, 40, 40]
    again = kv.match(kv.new_table(), [*tokens, 7])
    assert again.num_tokens == 64


def test_blocks_of_no_anchor_are_not_findable_and_do_not_push_out_those_that_are() -> None:
    kv = make_manager([Retention("window", 5)], num_blocks=400, most=12)
    table, _ = compute(kv, list(range(200)))
    kv.free(table)
    # Tokens 192 to 195 for a prompt with the same 199 tokens, 196 to 199 for one that goes on.
    assert kv.bounded[0].pool.num_cached == 2
    for number in range(3):
        table, _ = compute(kv, [10_000 * (number + 1) + i for i in range(100)])
        kv.free(table)
    assert kv.match(kv.new_table(), list(range(201))).num_tokens == 200


def test_after_a_failed_step_nothing_is_found() -> None:
    kv = make_manager([Retention("window", 9)])
    tokens = list(range(30))
    table, _ = compute(kv, tokens)
    kv.clear_cache()
    kv.free(table)
    kv.check()
    assert kv.match(kv.new_table(), tokens).num_tokens == 0
    assert kv.bounded[0].pool.num_cached == 0


def test_an_evicted_key_takes_the_bounded_blocks_along() -> None:
    kv = make_manager([Retention("window", 9)], num_blocks=8)
    table, _ = compute(kv, list(range(30)))
    kv.free(table)
    assert kv.bounded[0].pool.num_cached
    other, _ = compute(kv, list(range(100, 130)))  # takes all blocks of the first group
    kv.check()
    held = len(other.more[0].held)
    assert kv.bounded[0].pool.num_cached == 0 and kv.bounded[0].pool.num_used == held


def test_growth_fails_as_a_whole_where_one_group_has_no_room() -> None:
    kv = make_manager([Retention("window", 9)], most=3)
    table = kv.new_table()
    match = PrefixMatch([], 0, 0, 0)
    assert kv.has_room(match, 12) and kv.has_room(match, 100)  # it never holds more than 3
    kv.start(table, match, 12)
    assert kv.grow(table, 13) is None and kv.num_available == 0
    assert len(table.blocks) == 3 and kv.pool.num_used == 3
    kv.let_go(table, 12)
    assert kv.grow(table, 13) == [table.blocks[3], table.more[0].blocks[3]]
    assert table.interleaved()[-2:] == [table.blocks[3], table.more[0].blocks[3]]


def test_groups_follow_from_the_rules_of_the_layers_whatever_their_widths() -> None:
    spec = AttentionSpec("gqa", 4, 2, 16, 16, 0.25, "float32")
    windowed = AttentionSpec("gqa", 4, 2, 16, 16, 0.25, "float32", window=8)
    wider = AttentionSpec("gqa", 8, 2, 32, 32, 0.25, "float32", window=8, sinks=True)
    chunked = AttentionSpec("gqa", 4, 2, 16, 16, 0.25, "float32", chunk=8)
    assert bounded_rules([spec, spec]) == ()
    rules = bounded_rules([windowed, spec, wider, chunked])
    assert rules == (Retention("window", 8), Retention("chunk", 8))


def test_a_long_prompt_that_resumes_is_asked_for_no_more_than_it_ever_holds() -> None:
    """Its window comes out of the pool of the same size that it could hold without the hit."""
    kv = make_manager([Retention("window", 9)], num_blocks=100, most=6)
    table, _ = compute(kv, list(range(60)))
    kv.free(table)
    match = kv.match(kv.new_table(), list(range(300)))
    assert match.num_tokens == 60 and kv.has_room(match, 300)
    (group,) = kv.bounded
    assert group.num_needed(match.entries, 75) == 6
    assert group.num_needed(match.entries, 16) == 2 + 1
