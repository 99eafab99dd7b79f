"""A prefix cache whose blocks depend on tokens after them, as a drafter's cache entries do."""

from __future__ import annotations

import pytest

from fastdeploy_core.kvcache import KVCacheManager

BLOCK = 4


def make_manager(lookahead: int) -> KVCacheManager:
    return KVCacheManager(16, BLOCK, model_identity="m", key_lookahead=lookahead)


def compute(kv: KVCacheManager, tokens: list[int], num_computed: int) -> None:
    """A sequence that was computed so far, and left."""
    table = kv.new_table()
    kv.start(table, kv.match(table, tokens), num_computed)
    kv.take_copies()
    kv.commit(table, tokens, num_computed)
    kv.free(table)


def hit(kv: KVCacheManager, tokens: list[int]) -> int:
    return kv.match(kv.new_table(), tokens).num_tokens


@pytest.mark.parametrize("lookahead", [0, 1, 2, BLOCK])
def test_hit_needs_equal_tokens_behind_the_block(lookahead: int) -> None:
    kv = make_manager(lookahead)
    compute(kv, list(range(12)), 11)
    for shared in range(13):
        tokens = [*range(shared), *range(100, 120)]
        expected = max(0, min(shared, 11) - lookahead) // BLOCK * BLOCK
        if shared == 12 and lookahead:
            expected = max(0, 12 - lookahead) // BLOCK * BLOCK
        assert hit(kv, tokens) == min(expected, 8), (shared, lookahead)


def test_block_is_remembered_once_its_next_token_is_known() -> None:
    kv = make_manager(1)
    tokens = list(range(8))
    table = kv.new_table()
    kv.start(table, kv.match(table, tokens), 8)
    kv.commit(table, tokens, 8)
    assert hit(kv, [*range(8), 8, 9]) == 4
    kv.commit(table, [*tokens, 8], 8)
    assert hit(kv, [*range(8), 8, 9]) == 8
    assert hit(kv, [*range(8), 7, 9]) == 4
    kv.free(table)
    kv.check()


def test_sequences_that_part_at_a_block_end_keep_their_own_blocks() -> None:
    kv = make_manager(1)
    compute(kv, [*range(4), 50, 51, 52, 53, 54], 9)
    compute(kv, [*range(4), 60, 61, 62, 63, 64], 9)
    first, second = (
        kv.match(kv.new_table(), [*range(4), *rest]).entries
        for rest in ((50, 51, 52, 53, 54), (60, 61, 62, 63, 64))
    )
    assert len(first) == len(second) == 2
    assert not {e.block for e in first} & {e.block for e in second}
