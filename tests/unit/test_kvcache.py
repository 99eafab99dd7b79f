"""Blocks, prefix cache, host tier and sizing: the bookkeeping of the KV cache."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fastdeploy_core.config import BatchConfig, CacheConfig
from fastdeploy_core.errors import OutOfBlocks, ResourceError
from fastdeploy_core.kvcache import (
    BlockPool,
    CacheEntry,
    HostTier,
    KVCacheManager,
    plan_cache,
)
from fastdeploy_core.types import EmbeddedSpan, SequenceExtras
from fastdeploy_core.types.worker import LayerGroup, WorkerInfo


def make_manager(num_blocks=8, block_size=4, **options):
    return KVCacheManager(num_blocks, block_size, model_identity="m", **options)


def compute(kv, tokens, salt=""):
    """A sequence that was matched, started, computed in one step and committed."""
    table = kv.new_table(salt)
    match = kv.match(table, tokens)
    kv.start(table, match, len(tokens))
    kv.take_copies()
    kv.commit(table, tokens, len(tokens))
    return table, match


def test_allocate_takes_empty_blocks_before_cached_ones():
    pool = BlockPool(3)
    (first,) = pool.allocate(1)
    pool.mark_cached(first)
    pool.on_evict = lambda block, is_intact: None
    pool.release([first])
    assert first not in pool.allocate(2)
    assert pool.allocate(1) == [first]


def test_what_came_back_last_goes_out_first_and_in_the_same_order():
    pool = BlockPool(8)
    kept, blocks = pool.allocate(1), pool.allocate(3)
    pool.release(reversed(blocks))
    assert pool.allocate(4) == [*blocks, 4]
    pool.release(kept)
    assert pool.allocate(2) == [*kept, 5]


def test_allocate_without_room_changes_nothing():
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(OutOfBlocks, match=r"2 blocks were asked for and 1 of 2"):
        pool.allocate(2)
    assert pool.num_available == 1


def test_least_recently_released_cached_block_is_evicted_first():
    pool = BlockPool(3)
    evicted = []
    pool.on_evict = lambda block, is_intact: evicted.append(block)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.mark_cached(block)
    pool.release([blocks[1]])
    pool.release([blocks[0], blocks[2]])
    pool.allocate(2)
    assert evicted == [blocks[1], blocks[0]]


def test_double_release_is_noticed():
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


def test_quarantined_block_is_not_reused_before_it_is_released():
    pool = BlockPool(2)
    held = pool.allocate(1)
    pool.quarantine(held)
    pool.release(held)
    assert pool.num_available == 1 and pool.num_quarantined == 1
    assert held[0] not in pool.allocate(1)
    pool.check()
    pool.release_quarantine(held)
    assert pool.allocate(1) == held
    pool.release_quarantine([0, 1])  # not withheld: ignored
    pool.check()


def test_quarantine_of_a_cached_block_takes_it_out_of_the_cache():
    kv = make_manager()
    table, _ = compute(kv, list(range(8)))
    kv.quarantine([table.blocks[0]])
    kv.free(table)
    assert kv.match(kv.new_table(), list(range(8))).num_tokens == 0
    kv.release_quarantine([0, 1])
    kv.check()
    assert kv.pool.num_available == 8


def test_prefix_of_an_earlier_sequence_is_shared_while_both_run():
    kv = make_manager()
    first, _ = compute(kv, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    second, match = compute(kv, [1, 2, 3, 4, 5, 6, 7, 8, 10, 11])
    assert match.num_tokens == 8
    assert second.blocks[:2] == first.blocks[:2] and second.blocks[2] != first.blocks[2]
    assert kv.pool.references(first.blocks[0]) == 2


def test_fully_matched_prompt_recomputes_its_last_block():
    kv = make_manager()
    table, _ = compute(kv, list(range(8)))
    kv.free(table)
    assert kv.match(kv.new_table(), list(range(8))).num_tokens == 4
    assert kv.match(kv.new_table(), [*range(8), 99]).num_tokens == 8


def test_another_salt_finds_nothing():
    kv = make_manager()
    table, _ = compute(kv, list(range(8)), salt="a")
    kv.free(table)
    assert kv.match(kv.new_table("b"), [*range(8), 1]).num_tokens == 0
    assert kv.match(kv.new_table("a"), [*range(8), 1]).num_tokens == 8


IMAGE = b"a" * 32


@pytest.mark.parametrize(
    "other",
    [
        None,
        SequenceExtras(adapter="legal@2"),
        SequenceExtras(embeddings=[EmbeddedSpan(2, 4, b"b" * 32)]),
        SequenceExtras(embeddings=[EmbeddedSpan(2, 4, IMAGE, 1)]),
        SequenceExtras(embeddings=[EmbeddedSpan(1, 4, IMAGE)]),
        SequenceExtras(embeddings=[EmbeddedSpan(2, 1, IMAGE)]),
        SequenceExtras(adapter="legal@1", embeddings=[EmbeddedSpan(2, 4, IMAGE)]),
    ],
)
@pytest.mark.parametrize("first", [0, 1])
def test_adapters_and_embedded_items_are_part_of_a_blocks_identity(other, first):
    """Equal ids do not mean equal keys and values there."""
    tokens, kv = list(range(8)), make_manager()
    image = SequenceExtras(embeddings=[EmbeddedSpan(2, 4, IMAGE)])
    own = (image, SequenceExtras(adapter="legal@1"))
    table = kv.new_table("s", own[first])
    kv.start(table, kv.match(table, tokens), 8)
    kv.commit(table, tokens, 8)
    kv.free(table)
    assert kv.match(kv.new_table("s", other), [*tokens, 1]).num_tokens == 0
    assert kv.match(kv.new_table("s", own[first]), [*tokens, 1]).num_tokens == 8


def test_blocks_before_an_embedded_item_are_shared_with_those_who_lack_it():
    tokens, kv = list(range(12)), make_manager()
    compute(kv, tokens)
    extras = SequenceExtras(embeddings=[EmbeddedSpan(5, 2, IMAGE)])
    assert kv.match(kv.new_table("", extras), [*tokens, 1]).num_tokens == 4


def test_forced_collision_does_not_mix_adapters_or_items():
    tokens, kv = list(range(8)), make_manager(hash_function=lambda data: b"same")
    compute(kv, tokens)
    image = SequenceExtras(embeddings=[EmbeddedSpan(0, 8, IMAGE)])
    for extras in (SequenceExtras(adapter="a"), image):
        assert kv.match(kv.new_table("", extras), [*tokens, 1]).num_tokens == 0


def test_another_model_has_other_keys():
    tables = [KVCacheManager(2, 4, model_identity=name).new_table() for name in ("m1", "m2")]
    assert tables[0].root != tables[1].root


def test_identity_and_salt_cannot_be_shifted_into_each_other():
    first = KVCacheManager(2, 4, model_identity="ab").new_table("c")
    second = KVCacheManager(2, 4, model_identity="a").new_table("bc")
    assert first.root != second.root


def test_forced_collisions_never_share_a_block():
    """Every key equal: only the comparison of tokens, salt and parent is left."""
    kv = make_manager(16, hash_function=lambda data: b"same")
    first, _ = compute(kv, [1, 2, 3, 4, 5])
    assert kv.match(kv.new_table(), [1, 2, 3, 9, 5]).num_tokens == 0
    assert kv.match(kv.new_table("salt"), [1, 2, 3, 4, 5]).num_tokens == 0
    # The second block has the same key and the same tokens as the first, and another parent.
    assert kv.match(kv.new_table(), [1, 2, 3, 4, 1, 2, 3, 4, 5]).num_tokens == 4
    second, _ = compute(kv, [9, 9, 9, 9, 9])
    assert kv.match(kv.new_table(), [9, 9, 9, 9, 9]).num_tokens == 0
    assert kv.match(kv.new_table(), [1, 2, 3, 4, 7]).num_tokens == 4
    kv.free(first)
    kv.free(second)
    kv.check()


def test_same_tokens_behind_another_prefix_do_not_match():
    kv = make_manager()
    compute(kv, [1, 1, 1, 1, 5, 5, 5, 5, 0])
    assert kv.match(kv.new_table(), [2, 2, 2, 2, 5, 5, 5, 5, 0]).num_tokens == 0


def test_two_sequences_computing_the_same_prefix_leave_one_cached_copy():
    kv = make_manager()
    tokens = list(range(8))
    tables = [kv.new_table() for _ in range(2)]
    for table in tables:
        kv.start(table, kv.match(table, tokens), 8)
    for table in tables:
        kv.commit(table, tokens, 8)
    for table in tables:
        kv.free(table)
    assert kv.pool.num_cached == 2
    kv.check()


def test_commit_after_the_parent_was_replaced_keeps_the_chain_consistent():
    """The first sequence's blocks stand for both; once they are evicted, the second one's later
    blocks have no reachable parent and are simply not cached."""
    kv = make_manager(6)
    tokens = list(range(12))
    first, second = kv.new_table(), kv.new_table()
    for table in (first, second):
        kv.start(table, kv.match(table, tokens), 4)
    for table in (first, second):
        kv.commit(table, tokens, 4)
    kv.free(first)
    kv.grow(second, 8)
    blocks = kv.pool.allocate(kv.pool.num_available)  # evicts the canonical first block
    kv.commit(second, tokens, 8)
    assert kv.match(kv.new_table(), tokens).num_tokens == 0
    kv.pool.release(blocks)
    kv.free(second)
    kv.check()


def test_evicted_block_comes_back_from_host_memory():
    kv = make_manager(2, num_host_blocks=4)
    tokens = list(range(9))
    table = kv.new_table()
    kv.start(table, kv.match(table, tokens), 8)
    kv.commit(table, tokens, 8)
    old = table.blocks.copy()
    kv.free(table)
    blocks = kv.pool.allocate(2)  # evicts both
    saved = kv.take_copies()
    assert sorted(source for source, _ in saved.device_to_host) == sorted(old)
    kv.pool.release(blocks)
    again = kv.new_table()
    match = kv.match(again, tokens)
    assert match.num_tokens == match.num_host_tokens == 8 and match.num_blocks_taken == 2
    kv.start(again, match, 8)
    loaded = kv.take_copies()
    host_of = dict(saved.device_to_host)
    assert [source for source, _ in loaded.host_to_device] == [host_of[b] for b in old]
    assert [target for _, target in loaded.host_to_device] == again.blocks
    kv.free(again)
    kv.check()


def test_block_with_a_host_copy_is_not_saved_again():
    kv = make_manager(1, num_host_blocks=2)
    tokens = list(range(5))
    for expected in (1, 0):
        table = kv.new_table()
        match = kv.match(table, tokens)
        kv.start(table, match, 4)
        kv.take_copies()
        kv.commit(table, tokens, 4)
        kv.free(table)
        kv.pool.release(kv.pool.allocate(1))
        assert len(kv.take_copies().device_to_host) == expected


def test_host_block_that_is_being_loaded_is_not_overwritten_in_the_same_step():
    """Saves come before loads: with one host block, the save has to be left out."""
    kv = make_manager(2, num_host_blocks=1)
    wanted, other = list(range(5)), [9, 9, 9, 9, 9]
    compute_and_free(kv, wanted)
    kv.pool.release(kv.pool.allocate(2))  # wanted goes to the host
    kv.take_copies()
    compute_and_free(kv, other)
    hog = kv.pool.allocate(1)
    table = kv.new_table()
    kv.start(table, kv.match(table, wanted), 4)  # evicts other, while wanted is loaded
    copies = kv.take_copies()
    assert len(copies.host_to_device) == 1 and not copies.device_to_host
    kv.pool.release(hog)
    kv.free(table)
    kv.check()


def test_a_host_block_that_is_given_up_before_its_copy_is_written_by_its_next_owner_alone():
    host = HostTier(1)
    first, second = (CacheEntry(key, None, ("", ""), b"") for key in (b"1", b"2"))
    host.save(first, 5)
    host.forget(first)
    host.save(second, 6)
    assert host.take_copies() == ([(6, 0)], [])
    host.check()


def compute_and_free(kv, tokens):
    table, _ = compute(kv, tokens[:4])
    kv.free(table)


def test_fork_shares_full_blocks_and_copies_the_partial_one():
    kv = make_manager()
    tokens = list(range(10))
    leader, _ = compute(kv, tokens)
    source, partial = kv.hold(leader, 10), leader.blocks[2]
    follower = kv.new_table()
    assert kv.fork(source, follower)
    assert follower.blocks[:2] == leader.blocks[:2] and follower.blocks[2] != leader.blocks[2]
    assert kv.pool.references(leader.blocks[2]) == 2
    kv.drop(source)
    # The partial block is read by this step's copy: it must not be free before that is taken.
    kv.free(leader)
    assert kv.pool.references(partial) == 1
    assert kv.take_copies().device_to_device == [(partial, follower.blocks[2])]
    assert kv.pool.references(partial) == 0
    kv.free(follower)
    kv.check()


def test_clear_cache_forgets_device_and_host():
    kv = make_manager(2, num_host_blocks=2)
    compute_and_free(kv, list(range(5)))
    kv.pool.release(kv.pool.allocate(2))
    compute_and_free(kv, [7, 7, 7, 7, 7])
    kv.clear_cache()
    assert not kv.take_copies().device_to_host
    for tokens in (list(range(5)), [7] * 5):
        assert kv.match(kv.new_table(), tokens).num_tokens == 0
    kv.check()


def info(available, bytes_per_block=1000, **limits):
    return WorkerInfo(
        num_layers=1,
        vocab_size=8,
        max_model_len=64,
        bytes_per_block=bytes_per_block,
        available_bytes=available,
        block_size=16,
        **limits,
    )


def test_pool_is_sized_from_the_tightest_rank():
    plan = plan_cache([info(9000), info(7999)], CacheConfig(), BatchConfig(), 64)
    assert plan.num_blocks == 7


def test_too_little_memory_is_explained_with_the_arithmetic():
    with pytest.raises(ResourceError) as caught:
        plan_cache([info(3999)], CacheConfig(), BatchConfig(), 64)
    text = str(caught.value)
    assert "4 blocks of 16 tokens = 4 x 1000 = 4000 bytes; 3999 bytes" in text
    assert "enough for 3 blocks" in text and "--max-model-len to 48" in text


def test_memory_set_by_the_operator_counts_instead_of_the_profile():
    cache = CacheConfig(kv_cache_memory_bytes=5000)
    assert plan_cache([info(0)], cache, BatchConfig(), 64).num_blocks == 5


def test_override_smaller_than_the_context_is_reported_not_refused():
    plan = plan_cache([info(0)], CacheConfig(num_blocks_override=2), BatchConfig(), 64)
    assert plan.num_blocks == 2
    assert any("at most 32 tokens" in line for line in plan.report)


@pytest.mark.parametrize("limit", ["host_tier", "block_sharing"])
def test_host_tier_that_is_not_possible_is_turned_off_with_a_reason(limit):
    cache = CacheConfig(swap_space_bytes=10_000)
    assert plan_cache([info(9000)], cache, BatchConfig(), 64).num_host_blocks == 10
    plan = plan_cache([info(9000, **{limit: False})], cache, BatchConfig(), 64)
    assert plan.num_host_blocks == 0
    assert any("host KV tier off" in line for line in plan.report)


def grouped(available, *, first=1000, window=500):
    """Layers that need every token, and others with a window of 20."""
    return info(available, first, bounded=[LayerGroup("window", 20, window)])


SMALL_BATCH = BatchConfig(max_num_seqs=2, max_num_batched_tokens=16)


def test_a_bounded_group_gets_what_all_sequences_hold_and_the_others_the_rest():
    """Blocks of 16, sequences of 160: a window of 20 touches 2 blocks, of which it holds 2 more at
    their ends; a step of 16 tokens is one block, twice with overlap."""
    plan = plan_cache([grouped(100_000)], CacheConfig(), SMALL_BATCH, 160)
    (group,) = plan.bounded
    assert group.most_blocks == 4 + 2 + 1
    needed = 2 * 4 + 2 + 7
    assert group.num_blocks == 2 * needed  # as much again for prefixes, 8.5 of 100 KB
    assert plan.num_blocks == (100_000 - 2 * needed * 500) // 1000
    assert any("34 blocks of 16 tokens for layers with a window of 20" in x for x in plan.report)


def test_prefixes_of_bounded_groups_get_no_more_than_is_left_over():
    tight = 17 * 500 + 10 * 1000  # what two windows and one whole sequence need
    plan = plan_cache([grouped(tight)], CacheConfig(), SMALL_BATCH, 160)
    assert plan.num_blocks == 10 and plan.bounded[0].num_blocks == 17
    with pytest.raises(ResourceError) as caught:
        plan_cache([grouped(tight - 1)], CacheConfig(), SMALL_BATCH, 160)
    text = str(caught.value)
    assert "10 x 1000 = 10000 bytes" in text and f"{tight - 1} bytes are left" in text
    assert "layers with a window of 20 tokens take 8500 for all sequences" in text
    assert "lower --max-num-seqs" in text


@pytest.mark.parametrize("num_blocks", [None, 40])
def test_without_a_prefix_cache_bounded_groups_hold_what_sequences_need(num_blocks):
    """A state stays where it is, so each sequence has one; two more are in reserve."""
    worker = info(100_000, 1000, bounded=[LayerGroup("window", 20, 500), LayerGroup("state", 0, 9)])
    cache = CacheConfig(enable_prefix_caching=False, num_blocks_override=num_blocks)
    plan = plan_cache([worker], cache, SMALL_BATCH, 160)
    assert [group.num_blocks for group in plan.bounded] == [17, 2 + 2]
    assert [group.most_blocks for group in plan.bounded] == [7, 1]
    plan = plan_cache([worker], replace(cache, enable_prefix_caching=True), SMALL_BATCH, 160)
    assert [group.num_blocks for group in plan.bounded] == [2 * 17, 2 * (2 * 2 + 2)]


def test_a_short_sequence_bounds_what_a_window_holds():
    plan = plan_cache([grouped(100_000)], CacheConfig(), SMALL_BATCH, 32)
    assert plan.bounded[0].most_blocks == 2
    assert plan.bounded[0].num_blocks == 2 * 4  # two sequences of two blocks, and prefixes


def test_without_layers_that_need_every_token_blocks_are_numbers():
    plan = plan_cache([grouped(8_500, first=0)], CacheConfig(), SMALL_BATCH, 160)
    assert plan.num_blocks == 2 * 2 * 10 and plan.bounded[0].num_blocks == 17
    with pytest.raises(ResourceError, match="window of 20 tokens take 8500"):
        plan_cache([grouped(8_499, first=0)], CacheConfig(), SMALL_BATCH, 160)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_each_group_gets_the_same_share_of_its_blocks_in_host_memory(num_ranks):
    cache = CacheConfig(swap_space_bytes=50_000 * num_ranks)
    plan = plan_cache([grouped(100_000)] * num_ranks, cache, SMALL_BATCH, 160)
    assert (plan.num_blocks, plan.bounded[0].num_blocks) == (83, 34)
    # A block and a window of two come first; 48 of 100 KB are left for both.
    assert (plan.num_host_blocks, plan.bounded[0].num_host_blocks) == (1 + 39, 2 + 16)
    assert "40 blocks, 18 for layers with a window of 20 tokens (" in plan.report[-1]


def test_host_memory_that_holds_no_window_is_refused_with_what_would():
    least = 1_000 + 2 * 500
    cache = CacheConfig(swap_space_bytes=least - 1)
    with pytest.raises(ResourceError, match=f"at its end, {least} bytes: .* is {least - 1} bytes"):
        plan_cache([grouped(100_000)], cache, SMALL_BATCH, 160)
    plan = plan_cache([grouped(100_000)], CacheConfig(swap_space_bytes=least), SMALL_BATCH, 160)
    assert (plan.num_host_blocks, plan.bounded[0].num_host_blocks) == (1, 2)


def test_blocks_of_no_layer_take_no_host_memory():
    cache = CacheConfig(swap_space_bytes=4_250)
    plan = plan_cache([grouped(8_500, first=0)], cache, SMALL_BATCH, 160)
    assert (plan.num_host_blocks, plan.bounded[0].num_host_blocks) == (1 + 15, 2 + 6)
