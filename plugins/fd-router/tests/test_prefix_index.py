"""The prefix index against a plain model of it."""

from __future__ import annotations

import pytest
from fd_router.cached.prefix_index import PrefixIndex, chained_keys
from hypothesis import given
from hypothesis import strategies as st

# Few bytes and short blocks, so that prefixes are shared often.
PROMPTS = st.lists(st.sampled_from(b"ab"), max_size=12).map(bytes)


def test_equal_keys_mean_equal_beginnings() -> None:
    one, other = chained_keys(b"aaaabbbbcc", 4), chained_keys(b"aaaacccc", 4)
    assert len(one) == len(other) == 2  # the rest of a block has no key
    assert one[0] == other[0]
    assert one[1] != other[1]
    # The second block alone is equal, what is before it is not.
    assert chained_keys(b"xxxxbbbb", 4)[1] != one[1]
    assert chained_keys(b"aaaa", 4, salt=b"another model") != one[:1]
    assert chained_keys(b"aaaabbbbcc", 4, most=1) == one[:1]
    with pytest.raises(ValueError, match="at least one byte"):
        chained_keys(b"a", 0)


@given(st.lists(st.tuples(st.sampled_from("xyz"), PROMPTS), max_size=30), PROMPTS)
def test_index_finds_the_longest_recorded_prefix(sent: list[tuple[str, bytes]], asked: bytes):
    index = PrefixIndex(1000)
    for instance, prompt in sent:
        index.record(instance, chained_keys(prompt, 2))

    def common(instance: str) -> int:
        lengths = [0]
        for name, prompt in sent:
            blocks = 0
            while (
                name == instance
                and (end := 2 * blocks + 2) <= min(len(asked), len(prompt))
                and asked[:end] == prompt[:end]
            ):
                blocks += 1
            lengths.append(blocks)
        return max(lengths)

    keys = chained_keys(asked, 2)
    want = {name: common(name) for name in "xyz"}
    assert {name: index.cached_blocks(name, keys) for name in "xyz"} == want
    most = max(want.values())
    assert index.owners(keys) == ({n for n, c in want.items() if c == most} if most else set())


@given(st.lists(PROMPTS, min_size=1, max_size=40), st.integers(1, 8))
def test_eviction_keeps_beginnings_and_the_limit(prompts: list[bytes], limit: int) -> None:
    """Whatever is evicted: a block is held only together with all before it."""
    index = PrefixIndex(limit)
    for prompt in prompts:
        keys = chained_keys(prompt, 2)
        index.record("x", keys)
        assert index.num_blocks("x") <= limit
        # The newest prompt is held as far as the limit allows.
        assert index.cached_blocks("x", keys) == min(limit, len(keys))
    for prompt in prompts:
        keys = chained_keys(prompt, 2)
        held = [bool(index.owners([key])) for key in keys]
        assert held == sorted(held, reverse=True)


def test_forgotten_instance_owns_nothing() -> None:
    index = PrefixIndex()
    keys = chained_keys(b"aabb", 2)
    index.record("x", keys)
    index.record("y", keys[:1])
    index.forget("x")
    assert index.cached_blocks("x", keys) == 0
    assert index.owners(keys) == {"y"}
    index.forget("y")
    assert not index.owners(keys)
    assert not index._holders  # nothing is left behind
