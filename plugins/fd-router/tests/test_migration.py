"""What a transcript takes down, and for which requests there is one."""

from __future__ import annotations

import json

import pytest
from fd_router.asked import read_request
from fd_router.events import frame, parsed
from fd_router.instances import InstanceFailed
from fd_router.migration import Transcript

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def _transcript(path: str = COMPLETIONS, **fields: object) -> Transcript | None:
    body = json.dumps({"prompt": "p", "stream": True, **fields}).encode()
    return Transcript.of(read_request(path, {}, body))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 1, "seed": 3, "temperature": 0.7, "stop": ["x"], "logit_bias": {"3": 5}},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "tools": [], "logprobs": None},
        {"echo": False, "response_format": None, "prompt": [1, 2, 3]},
    ],
)
def test_streams_that_can_be_carried_on(fields: dict) -> None:
    assert _transcript(**fields) is not None


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": False},
        {"n": 2},
        {"logprobs": 0},  # those of the tokens themselves
        {"thinking_token_budget": 0},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -1},
        {"response_format": {"type": "json_object"}},
        {"guided_regex": "a+"},
        {"echo": True},
        {"prompt": ["one", "two"]},
        {"prompt": [[1], [2]]},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"max_tokens": "many"},
        {"stream_options": 3},
    ],
)
def test_streams_that_cannot(fields: dict) -> None:
    assert _transcript(**fields) is None


def _piece(text: str, tokens: list[int], **more: object) -> dict:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
    choice |= {"token_ids": tokens, "completion_token_ids": tokens, **more}
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "choices": [choice]}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32-be"])
@pytest.mark.parametrize("fields", [{}, {"return_token_ids": None}, {"return_token_ids": False}])
def test_instances_are_asked_for_token_ids(encoding: str, fields: dict[str, object]) -> None:
    """Whatever the body is written in, and however it ends."""
    asked = {"prompt": "\u00fc } \U0001f600", "stream": True, **fields}
    body = (json.dumps(asked, ensure_ascii=False) + " \n").encode(encoding)
    transcript = Transcript.of(read_request(COMPLETIONS, {}, body))
    assert transcript is not None
    assert json.loads(transcript.body(body)) == {**asked, "return_token_ids": True}


def _detokenized(transcript: Transcript, pieces: dict[int, bytes]) -> int:
    """The tokens that a continuation keeps, by a tokenizer of these pieces; -1: none do."""
    for count, *bodies in transcript.seams():
        texts = [
            b"".join(pieces[token] for token in json.loads(body)["tokens"]).decode(
                "utf-8", "replace"
            )
            for body in bodies
        ]
        if transcript.fits(count, *texts):
            return count
    return -1


def test_ids_of_the_router_are_not_shown() -> None:
    transcript = _transcript()
    shown = transcript.take(frame(_piece("Hi", [5], prompt_token_ids=[1])) + frame(_piece("", [6])))
    (event,) = parsed(shown)  # without ids there would be no second chunk, as it has no text
    assert event["choices"][0] == {
        "index": 0,
        "text": "Hi",
        "logprobs": None,
        "finish_reason": None,
    }


def test_half_a_character_is_generated_again() -> None:
    """The first byte of a character was sampled, and its text cannot have been shown."""
    pieces = {1: b"p", 5: b"a", 6: "é".encode()[:1], 7: "é".encode()[1:]}
    transcript = _transcript(max_tokens=10, min_tokens=4)
    transcript.take(frame(_piece("a", [5], prompt_token_ids=[1])) + frame(_piece("", [6])))
    assert _detokenized(transcript, pieces) == 1
    rest = json.loads(transcript.rest())
    assert rest["prompt_token_ids"] == [1, 5]
    assert (rest["max_tokens"], rest["min_tokens"]) == (9, 3)
    transcript.begin_rest()
    shown = transcript.take_rest(frame(_piece("é", [6, 7], finish_reason="stop")))
    (event,) = parsed(shown)
    assert event["id"] == "cmpl-1"
    assert event["choices"][0]["text"] == "é"
    assert transcript.ended


def test_client_that_saw_ids_gets_no_others_in_their_place() -> None:
    pieces = {1: b"p", 5: b"a", 6: "é".encode()[:1]}
    transcript = _transcript(return_token_ids=True)
    transcript.take(frame(_piece("a", [5], prompt_token_ids=[1])) + frame(_piece("", [6])))
    assert _detokenized(transcript, pieces) == -1


def test_thinking_and_tool_calls_are_not_carried_on() -> None:
    transcript = _transcript(CHAT, messages=[])
    delta = {"reasoning_content": "hm", "completion_token_ids": [5]}
    event = {"id": "1", "choices": [{"index": 0, "delta": delta, "token_ids": [5]}]}
    transcript.take(frame({"prompt_token_ids": [1], **event}))
    assert not transcript.movable


def test_usage_counts_the_whole_answer() -> None:
    transcript = _transcript(stream_options={"include_usage": True}, max_tokens=3)
    transcript.take(frame(_piece("ab", [5, 6], prompt_token_ids=[1])))
    assert transcript.fits(2, "p", "pab")
    assert transcript.left == 1
    transcript.begin_rest()
    end = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4, "more": 1}
    shown = transcript.take_rest(
        frame(_piece("c", [7], finish_reason="length")) + frame({"choices": [], "usage": end})
    )
    assert parsed(shown)[-1]["usage"] == {
        **{"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4},
        "more": 1,
    }


def test_only_what_was_lost_of_an_end_is_sent() -> None:
    transcript = _transcript(stream_options={"include_usage": True})
    transcript.take(frame(_piece("a", [5], prompt_token_ids=[1], finish_reason="stop")))
    assert transcript.ended
    (usage,) = parsed(transcript.end())
    assert usage["usage"] == {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    assert transcript.end() == b""
    whole = _transcript(stream_options={"include_usage": True})
    whole.take(frame(_piece("a", [5], prompt_token_ids=[1], finish_reason="stop")))
    whole.take(frame({"id": "cmpl-1", "choices": [], "usage": {"prompt_tokens": 1}}))
    assert whole.end() == b""


def test_events_after_which_an_instance_has_failed() -> None:
    for events in (b"data: nonsense\n\n", b"data: [1]\n\n", frame({"error": {"code": 500}})):
        with pytest.raises(InstanceFailed):
            _transcript().take(events)
    for event in ({"choices": 3}, {"choices": ["x"]}, {"choices": [{"delta": None, "text": 5}]}):
        transcript = _transcript()
        transcript.take(frame(_piece("a", [5], prompt_token_ids=[1])))
        with pytest.raises(InstanceFailed, match="unknown form"):
            transcript.take(frame(event))
        assert not transcript.movable
    # A deadline that passed is the request's own end.
    assert _transcript().take(frame({"error": {"code": 504}}))
