"""Streaming text equals decoding everything at once, for every style and any tokens."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdeploy_core.tokenizer import IncrementalDetokenizer, Tokenizer, decoder_steps
from tests import tokenizer_files

TEXT = st.text(
    alphabet=st.one_of(
        st.sampled_from("ab helot .'"),
        st.sampled_from("你好北京😀🚀👩‍👧🇨🇳½€ßé"),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=40,
)


@functools.cache
def tokenizer(style: str) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return Tokenizer.load(tokenizer_files.write(Path(folder), style))


def stream(of: Tokenizer, ids: list[int], **options: object) -> list[str]:
    detokenizer = IncrementalDetokenizer(of, **options)  # type: ignore[arg-type]
    return [*(detokenizer.push([token_id]) for token_id in ids), detokenizer.finish()]


@pytest.mark.parametrize("style", tokenizer_files.STYLES)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_tokens_in_any_pieces_equal_the_whole(style: str, data: st.DataObject) -> None:
    of = tokenizer(style)
    ids = data.draw(st.lists(st.integers(0, of.vocab_size + 3), max_size=30))
    skip = data.draw(st.booleans())
    whole = of.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(of, ids, skip_special_tokens=skip)) == whole
    cut = data.draw(st.integers(0, len(ids)))
    detokenizer = IncrementalDetokenizer(of, skip_special_tokens=skip)
    pieces = detokenizer.push(ids[:cut]) + detokenizer.push(ids[cut:]) + detokenizer.finish()
    assert pieces == whole


@pytest.mark.parametrize("style", ["byte_level", "byte_level_with_bos", "byte_fallback"])
@settings(max_examples=150, deadline=None)
@given(text=TEXT)
def test_real_text_streams_without_replacement_characters(style: str, text: str) -> None:
    of = tokenizer(style)
    ids = of.encode(text, add_special_tokens=False)
    pieces = stream(of, ids)
    assert "".join(pieces) == of.decode(ids, skip_special_tokens=True)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=150, deadline=None)
@given(text=TEXT, data=st.data())
def test_only_a_truly_incomplete_end_gives_a_replacement_character(
    text: str, data: st.DataObject
) -> None:
    of = tokenizer("byte_level")
    ids = of.encode(text.replace("\ufffd", ""), add_special_tokens=False)
    ids = ids[: data.draw(st.integers(0, len(ids)))]
    *pieces, last = stream(of, ids)
    assert not any("\ufffd" in piece for piece in pieces)
    whole = b"".join(of.token_bytes(token_id) for token_id in ids)
    assert ("\ufffd" in last) == (whole.decode("utf-8", "ignore").encode() != whole)


@pytest.mark.parametrize("style", ["byte_level", "byte_fallback", "metaspace"])
@settings(max_examples=80, deadline=None)
@given(prompt=TEXT, answer=TEXT)
def test_an_answer_continues_its_prompt(style: str, prompt: str, answer: str) -> None:
    of = tokenizer(style)
    before = of.encode(prompt, add_special_tokens=False)
    ids = of.encode(answer, add_special_tokens=False)
    shown = "".join(stream(of, ids, prompt_token_ids=before))
    if of.decode(before, skip_special_tokens=True).strip():
        whole = of.decode([*before, *ids], skip_special_tokens=True)
        assert whole == of.decode(before, skip_special_tokens=True) + shown


def test_a_character_begun_in_the_prompt_is_completed_in_the_answer() -> None:
    for style in ("byte_level", "byte_fallback"):
        of = tokenizer(style)
        ids = of.encode("a🦀b", add_special_tokens=False)
        cut = next(i for i, t in enumerate(ids) if len(of.token_bytes(t)) == 1 and i > 1)
        shown = "".join(stream(of, ids[cut + 1 :], prompt_token_ids=ids[: cut + 1]))
        assert shown == "🦀b"


def test_an_emoji_over_several_tokens_appears_with_its_last_byte() -> None:
    of = tokenizer("byte_level")
    *first, last = of.encode("🦀", add_special_tokens=False)
    assert len(first) > 1
    assert stream(of, [*first, last]) == [*("" for _ in first), "🦀", ""]


def test_spaces_are_stripped_from_the_end_only_when_it_is_the_end() -> None:
    settings_ = [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 2}]
    steps = decoder_steps.make_steps(settings_)
    pieces = [decoder_steps.push(steps, [token]) for token in ("  a", "  ", "b ", "  ")]
    assert "".join(pieces) + decoder_steps.finish(steps) == " a  b "


def test_visible_special_tokens_are_shown() -> None:
    of = tokenizer("byte_level")
    end, user = of.token_to_id("<|end|>"), of.token_to_id("<|user|>")
    assert end is not None and user is not None
    ids = [end, *of.encode("hi"), user]
    assert "".join(stream(of, ids)) == "hi"
    assert "".join(stream(of, ids, visible_token_ids=frozenset({end}))) == "<|end|>hi"
    assert "".join(stream(of, ids, skip_special_tokens=False)) == "<|end|>hi<|user|>"
