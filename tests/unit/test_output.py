"""From token ids to outputs: text, stop strings, logprobs, finish reasons, n answers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdeploy_core.engine.output import OutputProcessor
from fastdeploy_core.tokenizer import Tokenizer
from fastdeploy_core.types import (
    FinishReason,
    Logprob,
    Request,
    RequestOutput,
    RequestOutputDelta,
    SamplingParams,
    SequenceDelta,
    TokenDeltas,
    TokenLogprobs,
    branch_id,
    split_branch_id,
)
from tests import tokenizer_files

EOS = 1


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tokenizer_files.write(tmp_path_factory.mktemp("tokenizer"), "byte_level")
    return Tokenizer.load(folder)


def make_request(**sampling: Any) -> Request:
    return Request(
        request_id="r",
        prompt_token_ids=[5, 6],
        sampling=SamplingParams(max_tokens=None, **sampling),
        eos_token_ids=[EOS],
        arrival_time_s=7.0,
    )


def feed(
    processor: OutputProcessor,
    ids: Sequence[int],
    cuts: Sequence[int] = (),
    finish: FinishReason | None = FinishReason.STOP,
    stop_reason: int | None = None,
) -> tuple[list[RequestOutput], list[str]]:
    """Send one sequence's tokens, cut into deltas; returns the outputs and the aborts."""
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    pieces = [list(ids[a:b]) for a, b in itertools.pairwise(edges)] or [[]]
    outputs, aborts = [], []
    for i, piece in enumerate(pieces):
        last = i == len(pieces) - 1
        part = SequenceDelta(
            token_ids=piece,
            finish_reason=finish if last else None,
            stop_reason=stop_reason if last else None,
        )
        output, ids_to_abort = processor.process(
            RequestOutputDelta(
                request_id="r", position=i, sequences=[part], finished=last and finish is not None
            )
        )
        aborts += ids_to_abort
        if output is not None:
            outputs.append(output)
    return outputs, aborts


def joined(outputs: list[RequestOutput]) -> tuple[str, list[int], str | None, Any]:
    answers = [answer for output in outputs for answer in output.outputs]
    return (
        "".join(answer.text for answer in answers),
        [token_id for answer in answers for token_id in answer.token_ids],
        answers[-1].finish_reason,
        answers[-1].stop_reason,
    )


@settings(max_examples=150, deadline=None)
@given(
    text=st.text("ab 你😀.", max_size=30),
    stops=st.lists(st.text("ab 你😀", min_size=1, max_size=3), max_size=3),
    cuts=st.lists(st.integers(0, 60), max_size=6),
    include=st.booleans(),
    min_tokens=st.integers(0, 4),
)
def test_deltas_snapshots_and_finals_agree_for_every_way_of_cutting(
    tokenizer: Tokenizer,
    text: str,
    stops: list[str],
    cuts: list[int],
    include: bool,
    min_tokens: int,
) -> None:
    ids = [*tokenizer.encode(text), EOS]
    request = make_request(stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens)
    results = []
    for is_whole in (False, True):
        for how in ((), cuts, range(len(ids))):
            processor = OutputProcessor(tokenizer)
            processor.add(request, is_whole=is_whole)
            outputs, _ = feed(processor, ids, how)
            assert len(processor) == 0
            results.append(joined(outputs[-1:] if is_whole else outputs))
            assert outputs[-1].finished
    assert all(result == results[0] for result in results)
    shown, token_ids, finish_reason, stop_reason = results[0]
    assert finish_reason == "stop"
    assert text.startswith(shown) and ids[: len(token_ids)] == token_ids
    if stop_reason is None:
        assert shown == text and token_ids == ids
    else:
        # Within min_tokens a stop string is let through, so it may be in the text then.
        if min_tokens == 0:
            assert shown.count(stop_reason) == (1 if include else 0)
        assert not include or shown.endswith(stop_reason)
        assert text.startswith(shown if include else shown + stop_reason)


def test_a_stop_string_aborts_the_request_in_the_engine(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    processor.add(make_request(stop="lo"))
    outputs, aborts = feed(processor, tokenizer.encode("hello world"), range(99), finish=None)
    assert joined(outputs)[0] == "hel"
    assert joined(outputs)[2:] == ("stop", "lo")
    assert aborts == ["r"]
    late = RequestOutputDelta(request_id="r", position=99, sequences=[SequenceDelta()])
    assert processor.process(late) == (None, [])


def test_the_end_token_is_kept_as_id_and_not_shown(tokenizer: Tokenizer) -> None:
    word = tokenizer.encode("hello")
    stop_id = tokenizer.encode("!")[0]
    for include, shown in ((False, "hello"), (True, "hello!")):
        processor = OutputProcessor(tokenizer)
        processor.add(make_request(stop_token_ids=[stop_id], include_stop_str_in_output=include))
        outputs, aborts = feed(processor, [*word, stop_id], stop_reason=stop_id)
        assert joined(outputs) == (shown, [*word, stop_id], "stop", stop_id)
        assert aborts == []


def test_a_grammars_end_keeps_its_last_token(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    processor.add(make_request())
    outputs, _ = feed(processor, tokenizer.encode('{"a": 1}'))
    assert joined(outputs)[0] == '{"a": 1}'


def test_held_back_text_is_released_at_the_length_limit(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    processor.add(make_request(stop=["hello world!"]))
    outputs, _ = feed(
        processor, tokenizer.encode("hello world"), range(99), finish=FinishReason.LENGTH
    )
    assert joined(outputs)[0] == "hello world"
    assert joined(outputs)[2:] == ("length", None)


def test_an_incomplete_character_at_the_end_is_shown_as_such(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    processor.add(make_request())
    ids = tokenizer.encode("a🦀")[:-1]
    outputs, _ = feed(processor, ids, range(99), finish=FinishReason.LENGTH)
    assert joined(outputs)[0] == "a\ufffd"


def test_logprobs_have_vllms_shape(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello there", add_special_tokens=False)[:2]
    entries = [
        TokenLogprobs([ids[0], 7, 8], [-0.5, -0.1, -0.9], 2),
        TokenLogprobs([ids[1], ids[1], 9], [-0.25, -0.25, -2.0], 1),
    ]
    prompt = [None, TokenLogprobs([6, 9], [-3.0, -1.0], 4)]
    for is_whole in (False, True):
        processor = OutputProcessor(tokenizer)
        processor.add(make_request(logprobs=2, prompt_logprobs=1), is_whole=is_whole)
        part = SequenceDelta(token_ids=ids, logprobs=entries, finish_reason=FinishReason.LENGTH)
        output, _ = processor.process(
            RequestOutputDelta(
                request_id="r", sequences=[part], prompt_logprobs=prompt, finished=True
            )
        )
        assert output is not None
        answer = output.outputs[0]
        assert answer.cumulative_logprob == pytest.approx(-0.75)
        assert answer.logprobs == [
            {
                ids[0]: Logprob(-0.5, 2, tokenizer.token_text(ids[0])),
                7: Logprob(-0.1, 1, tokenizer.token_text(7)),
                8: Logprob(-0.9, 2, tokenizer.token_text(8)),
            },
            {
                ids[1]: Logprob(-0.25, 1, tokenizer.token_text(ids[1])),
                9: Logprob(-2.0, 2, tokenizer.token_text(9)),
            },
        ]
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        assert output.prompt_logprobs[1] is not None
        assert output.prompt_logprobs[1][6].rank == 4


def test_the_text_of_a_token_is_that_of_the_characters_it_completes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🦀b", add_special_tokens=False)
    assert len(ids) == 5, "the character has three tokens"
    other = tokenizer.encode("x", add_special_tokens=False)[0]
    entries = [TokenLogprobs([token, other], [-0.5, -0.9], 1) for token in ids]
    for detokenize in (True, False):
        processor = OutputProcessor(tokenizer)
        request = make_request(logprobs=1, prompt_logprobs=1, detokenize=detokenize)
        request.prompt_token_ids = ids[:1] + ids[1:2]
        processor.add(request)
        prompt = [None, entries[1]]
        outputs = []
        for position, (token, entry) in enumerate(zip(ids, entries, strict=True)):
            part = SequenceDelta(token_ids=[token], logprobs=[entry])
            delta = RequestOutputDelta(request_id="r", position=position, sequences=[part])
            delta.prompt_logprobs = prompt if position == 0 else None
            outputs.append(processor.process(delta)[0])
        texts = [output.outputs[0].logprobs[0] for output in outputs]
        shown = [
            [text[token].decoded_token for token in (own, other)]
            for text, own in zip(texts, ids, strict=True)
        ]
        if detokenize:
            assert [own for own, _ in shown] == ["a", "", "", "🦀", "b"]
            assert {alternative for _, alternative in shown} == {"x"}
            assert outputs[0].prompt_logprobs[1][ids[1]].decoded_token == ""
        else:
            assert shown == [[None, None]] * 5


def test_without_logprobs_there_are_none(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    processor.add(make_request(), is_whole=True)
    outputs, _ = feed(processor, [9, EOS])
    assert outputs[0].outputs[0].logprobs is None
    assert outputs[0].outputs[0].cumulative_logprob is None


def test_n_answers_end_independently(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    processor.add(make_request(n=2, stop="lo"), "the prompt", is_whole=True)
    hello, there = tokenizer.encode("hello"), tokenizer.encode(" there")
    both = [SequenceDelta(index=1, token_ids=hello), SequenceDelta(index=0, token_ids=there)]
    first = RequestOutputDelta(request_id="r", sequences=both, num_cached_tokens=3, queue_s=0.5)
    assert processor.process(first) == (None, [branch_id("r", 1)])
    # Sequence 1 has met its stop string; what the engine still sends for it is dropped.
    more = [
        SequenceDelta(index=1, token_ids=there),
        SequenceDelta(index=0, token_ids=[EOS], finish_reason=FinishReason.STOP),
    ]
    output, aborts = processor.process(
        RequestOutputDelta(request_id="r", position=1, sequences=more)
    )
    assert output is not None and output.finished
    assert aborts == ["r"]
    assert [answer.text for answer in output.outputs] == [" there", "hel"]
    assert [answer.stop_reason for answer in output.outputs] == [None, "lo"]
    assert output.prompt == "the prompt"
    assert output.num_cached_tokens == 3
    assert output.metrics.queue_s == 0.5
    times = output.metrics
    assert times.arrival_time == 7.0
    assert times.first_token_time and times.last_token_time and times.finished_time
    assert times.first_token_time <= times.last_token_time <= times.finished_time


def test_repeated_deltas_are_ignored(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    processor.add(make_request())
    delta = RequestOutputDelta(request_id="r", sequences=[SequenceDelta(token_ids=[70])])
    assert processor.process(delta)[0] is not None
    assert processor.process(delta) == (None, [])


def test_an_error_ends_every_answer_and_keeps_what_there_is(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    processor.add(make_request(n=2), is_whole=True)
    ids = tokenizer.encode("hi")
    processor.process(RequestOutputDelta(request_id="r", sequences=[SequenceDelta(token_ids=ids)]))
    output, aborts = processor.process(
        RequestOutputDelta(
            request_id="r", position=1, finished=True, error="nan", error_type="WorkerError"
        )
    )
    assert output is not None and output.finished and aborts == []
    assert [answer.finish_reason for answer in output.outputs] == ["error", "error"]
    assert output.outputs[0].text == "hi"
    assert (output.error, output.error_type) == ("nan", "WorkerError")
    assert len(processor) == 0


def test_without_a_tokenizer_there_are_only_ids() -> None:
    processor = OutputProcessor(None)
    processor.add(make_request(logprobs=0), is_whole=True)
    part = SequenceDelta(
        token_ids=[3],
        logprobs=[TokenLogprobs([3], [-1.0], 1)],
        finish_reason=FinishReason.LENGTH,
    )
    output, _ = processor.process(
        RequestOutputDelta(request_id="r", sequences=[part], finished=True)
    )
    assert output is not None
    assert output.outputs[0].text == ""
    assert output.outputs[0].logprobs == [{3: Logprob(-1.0, 1, None)}]


def test_removed_requests_are_forgotten(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    processor.add(make_request())
    processor.remove("r")
    processor.remove("r")
    assert len(processor) == 0


def test_a_branch_that_a_stop_string_ends_is_named_while_others_go_on(
    tokenizer: Tokenizer,
) -> None:
    processor = OutputProcessor(tokenizer)
    processor.add(make_request(n=2, stop="lo"))
    stopping, other = tokenizer.encode("hello"), tokenizer.encode("world")
    first = [SequenceDelta(index=0, token_ids=other), SequenceDelta(index=1, token_ids=stopping)]
    output, aborts = processor.process(RequestOutputDelta(request_id="r", sequences=first))
    assert output is not None and not output.finished
    assert aborts == [branch_id("r", 1)] and split_branch_id(aborts[0]) == ("r", 1)
    # The engine's own word on it comes later, and the rest of what it had generated till then.
    late = [
        SequenceDelta(index=0, token_ids=other),
        SequenceDelta(index=1, token_ids=other, finish_reason=FinishReason.ABORT),
    ]
    output, aborts = processor.process(
        RequestOutputDelta(request_id="r", position=1, sequences=late)
    )
    assert output is not None and [part.index for part in output.outputs] == [0]
    assert aborts == [] and split_branch_id("r") == ("r", None)


@pytest.mark.parametrize("has_counts", [False, True])
def test_tokens_in_columns_are_kept_for_who_waits_for_the_end_and_shown_to_others(
    tokenizer: Tokenizer, has_counts: bool
) -> None:
    processor = OutputProcessor(tokenizer)
    ids = tokenizer.encode("hello world")
    wholes = {"a": True, "b": False, "c": True}
    for name, is_whole in wholes.items():
        stop = "wor" if name == "c" else None
        request = make_request(stop=stop)
        request.request_id = name
        processor.add(request, is_whole=is_whole)
    shown: dict[str, str] = {}
    pieces = [ids[:1], ids[1:4], ids[4:]] if has_counts else [[token] for token in ids]
    for position, piece in enumerate(pieces):
        counts = [len(piece)] * 3 if has_counts else None
        tokens = TokenDeltas(list(wholes), [position] * 3, [1] * 3, piece * 3, counts)
        others = processor.collect(tokens)
        assert [delta.request_id for delta in others] == ["b", "c"]
        for delta in others:
            output, _ = processor.process(delta)
            if output is not None:
                text = output.outputs[0].text
                shown[delta.request_id] = shown.get(delta.request_id, "") + text
    end = SequenceDelta(token_ids=[EOS], finish_reason=FinishReason.STOP)
    last = RequestOutputDelta(request_id="a", position=len(pieces), sequences=[end], finished=True)
    output, _ = processor.process(last)
    assert output is not None and output.outputs[0].text == "hello world" == shown["b"]
    assert output.outputs[0].token_ids == [*ids, EOS] and output.metrics.last_token_time
    assert shown["c"] == "hello "
