"""What a layer needs of the past, beside the mask that defines it."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_core.contracts.model import (
    ATTENTION_FEATURES,
    LAYER_FEATURES,
    AttentionSpec,
    IndexSpec,
    StateSpec,
)
from fastdeploy_core.errors import ConfigError

PLAIN = AttentionSpec("gqa", 4, 2, 16, 16, 0.25, "float32")
STATE = StateSpec("space", 2, 2, 8, 8, (16, 16), 4, "float32")
# A value of every field that asks for something, beside the word that a driver must declare.
ASKED = {
    "window": 8,
    "chunk": 8,
    "sinks": True,
    "softcap": 30.0,
    "index": IndexSpec(4, 64, 16),
    "offsets": True,
}


def sees(spec: AttentionSpec, query: int, key: int) -> bool:
    """Whether the query at that position attends to the key (transformers, masking_utils.py)."""
    if spec.window and key <= query - spec.window:
        return False
    if spec.chunk and key // spec.chunk != query // spec.chunk:
        return False
    return key <= query


@given(
    st.integers(0, 60),
    st.one_of(
        st.just(PLAIN),
        st.integers(1, 20).map(lambda n: replace(PLAIN, window=n)),
        st.integers(1, 20).map(lambda n: replace(PLAIN, chunk=n)),
    ),
)
def test_first_needed_is_the_oldest_key_that_a_later_query_sees(
    num_tokens: int, spec: AttentionSpec
) -> None:
    later = range(num_tokens, num_tokens + 45)
    seen = [key for key in range(num_tokens + 1) if any(sees(spec, q, key) for q in later)]
    assert spec.retention.first_needed(num_tokens) == seen[0]


def test_a_state_is_held_in_the_newest_entry() -> None:
    assert [STATE.retention.first_needed(n) for n in (0, 1, 2, 70)] == [0, 0, 1, 69]
    assert STATE.needs == {"space"} and STATE.needs <= LAYER_FEATURES


@pytest.mark.parametrize("name", sorted(ASKED))
def test_what_a_layer_asks_is_among_its_needs(name: str) -> None:
    assert replace(PLAIN, **{name: ASKED[name]}).needs == {name}


def test_every_word_is_a_field_and_plain_attention_needs_none() -> None:
    assert PLAIN.needs == frozenset() and PLAIN.retention.kind == "all"
    assert set(ASKED) == ATTENTION_FEATURES <= {field.name for field in fields(PLAIN)}


@pytest.mark.parametrize("change", [{"window": -1}, {"softcap": -1.0}, {"window": 4, "chunk": 4}])
def test_impossible_layers_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="possible"):
        replace(PLAIN, **change)
