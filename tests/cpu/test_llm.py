"""The offline API on the reference device with random weights: what comes out is the model's."""

from __future__ import annotations

import gc
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastdeploy import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from fastdeploy_core.errors import InvalidRequest
from fastdeploy_core.worker.results import PendingOutput
from tests.llm_models import write_model

PROMPTS = ["hello", "The quick brown", "你好", "x " * 40, "def main():"]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, tensor_library: str) -> Iterator[LLM]:
    folder: Path = write_model(tmp_path_factory.mktemp("model"))
    with LLM(
        folder,
        device="cpu",
        tensor_library=tensor_library,
        load_format="dummy",
        dtype="float32",
        max_num_seqs=4,
        max_num_batched_tokens=48,
        block_size=16,
        num_gpu_blocks_override=64,
        guided_decoding_disable_any_whitespace=True,
    ) as made:
        yield made


def generate(llm: LLM, *args: Any, **kwargs: Any) -> list[RequestOutput]:
    outputs = llm.generate(*args, use_tqdm=False, **kwargs)
    assert isinstance(outputs, list)
    return outputs


def test_a_batch_gives_each_prompt_what_it_gets_alone(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    alone = [generate(llm, prompt, params)[0].outputs[0] for prompt in PROMPTS]
    together = [output.outputs[0] for output in generate(llm, PROMPTS, params)]
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    assert [answer.text for answer in together] == [answer.text for answer in alone]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_device_does_not_wait_until_every_prompt_is_given(
    llm: LLM, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step's worth is enough to begin with, but where priorities decide who is first: others
    are only built then. The prompts are longer than steps are, and known, so that the engine has
    none left in between."""
    engine = llm._engine
    assert engine is not None
    calls, told = {"b": llm._build, "a": engine.add, "s": engine.begin, "t": engine.step}, ""
    prompts = [f"{n} {'word ' * 30}" for n in range(9)]
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    alone = [generate(llm, prompt, params)[0].outputs[0].token_ids for prompt in prompts]

    def heard(sign: str, call: Any) -> Any:
        def hear(*arguments: Any) -> Any:
            nonlocal told
            told += sign
            return call(*arguments)

        return hear

    for sign, call in calls.items():
        monkeypatch.setattr(llm if sign == "b" else engine, call.__name__, heard(sign, call))
    object.__setattr__(llm.config.batch, "policy", policy)
    try:
        outputs = generate(llm, prompts, params)
    finally:
        object.__setattr__(llm.config.batch, "policy", "fcfs")
    assert [output.outputs[0].token_ids for output in outputs] == alone
    before = told[: told.index("t" if policy == "priority" else "s")]
    given = before.count("a")
    assert given == 9 if policy == "priority" else 1 <= given < 9
    assert before.count("b") == given
    assert told.count("b") == told.count("a") == 9


def test_a_prompt_that_is_refused_after_others_have_begun_ends_the_call(llm: LLM) -> None:
    prompts: list[Any] = [f"{n} {'word ' * 30}" for n in range(9)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    steps = llm.get_metrics()["steps_total"]
    with pytest.raises(InvalidRequest, match="out of vocabulary"):
        generate(llm, [*prompts, [5, 10**6]], params)
    metrics = llm.get_metrics()
    assert metrics["steps_total"] > steps
    assert metrics["num_requests"] == metrics["num_blocks_used"] == 0
    assert gc.isenabled()


def test_who_turns_collections_off_while_reading_a_stream_keeps_them_off(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    stream = iter(llm.generate(PROMPTS, params, stream=True))
    next(stream)
    assert gc.isenabled()
    gc.disable()
    try:
        assert len([gc.isenabled() for _ in stream]) > len(PROMPTS)
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises, as in a terminal; what runs in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("stream", [False, True])
def test_ctrl_c_while_blocks_are_given_loses_none(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """As in a notebook, whose user goes on with the same LLM."""
    engine = llm._engine
    assert engine is not None
    manager, pressed = type(engine._core.scheduler.kv), 0
    give = manager.start

    def strike(self: Any, *given: Any, **named: Any) -> Any:
        nonlocal pressed
        pressed += 1
        found = give(self, *given, **named)
        if pressed == 3:
            signal.raise_signal(signal.SIGINT)  # before the caller knows of the blocks
        return found

    monkeypatch.setattr(manager, "start", strike)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        list(llm.generate(PROMPTS, params, use_tqdm=False, stream=stream))
    assert signal.getsignal(signal.SIGINT) is handler
    metrics = llm.get_metrics()
    assert metrics["num_requests"] == metrics["num_blocks_used"] == 0
    engine._core.scheduler.check_idle()
    assert len(generate(llm, PROMPTS, params)) == len(PROMPTS)


@pytest.mark.usefixtures("interruptible")
def test_a_second_ctrl_c_does_not_wait(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device may hang."""
    after = []

    def hang(*_: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        after.append("first")
        signal.raise_signal(signal.SIGINT)
        after.append("second")

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(LLM, "_step", hang)
        generate(llm, "hello", SamplingParams(max_tokens=2))
    assert after == ["first"]
    llm._settle(llm._live_engine())


def test_what_a_lost_device_was_asked_for_is_done() -> None:
    """Whoever waits hears what happened; whoever only asks whether it has, hears nothing."""

    def query() -> bool:
        raise RuntimeError("an illegal memory access was encountered")

    arriving = SimpleNamespace(event=SimpleNamespace(query=query))
    launched: Any = SimpleNamespace(results=None, arriving=arriving)
    assert PendingOutput(launched, lambda launched: None).done()


def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(llm: LLM) -> None:
    params = SamplingParams(seed=3, max_tokens=12, ignore_eos=True)
    alone = generate(llm, "hello", params)[0].outputs[0].token_ids
    crowd = [params, *[SamplingParams(max_tokens=9, ignore_eos=True)] * 4]
    assert generate(llm, ["hello", *PROMPTS[1:]], crowd)[0].outputs[0].token_ids == alone


def test_streamed_text_equals_the_whole(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    whole = generate(llm, PROMPTS, params)
    texts = dict.fromkeys(PROMPTS, "")
    for piece in llm.generate(PROMPTS, params, stream=True):
        texts[str(piece.prompt)] += "".join(answer.text for answer in piece.outputs)
    assert texts == {output.prompt: output.outputs[0].text for output in whole}


def test_logprobs_are_those_of_a_distribution(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=4, logprobs=5, prompt_logprobs=2, ignore_eos=True
    )
    (output,) = generate(llm, "hello world", params)
    answer = output.outputs[0]
    assert answer.logprobs is not None
    for token_id, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert entry[token_id].rank == 1  # greedy takes the most likely
        values = [logprob.logprob for logprob in entry.values()]
        assert values == sorted(values, reverse=True)
        assert all(value <= 0 for value in values)
    assert answer.cumulative_logprob == pytest.approx(
        sum(e[t].logprob for t, e in zip(answer.token_ids, answer.logprobs, strict=True))
    )
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    for token_id, entry in zip(
        output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
    ):
        assert entry is not None and token_id in entry


def test_named_tokens_have_the_log_probabilities_that_they_have_among_others(llm: LLM) -> None:
    rest: dict[str, Any] = {"temperature": 0, "max_tokens": 1, "ignore_eos": True}
    (likely,) = generate(llm, "hello", SamplingParams(**rest, logprobs=20))
    assert likely.outputs[0].logprobs is not None
    (expected,) = likely.outputs[0].logprobs
    first, *others = expected
    rare = next(token for token in range(100) if token not in expected)
    asked = [rare, *others[5:9], others[5]]
    (named,) = generate(llm, "hello", SamplingParams(**rest, logprob_token_ids=asked))
    assert named.outputs[0].logprobs is not None
    (found,) = named.outputs[0].logprobs
    assert list(found) == [first, rare, *others[5:9]]
    for token in (first, *others[5:9]):
        assert found[token].logprob == pytest.approx(expected[token].logprob, abs=1e-6)
    assert found[rare].logprob <= min(entry.logprob for entry in expected.values())
    assert found[first].rank == 1 and found[rare].rank is None


def test_structured_outputs_follow_their_schema(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2]}},
        "required": ["ok", "n"],
        "additionalProperties": False,
    }
    params = [
        SamplingParams(
            max_tokens=40, seed=1, structured_outputs=StructuredOutputsParams(json=schema)
        ),
        SamplingParams(
            max_tokens=9, structured_outputs=StructuredOutputsParams(choice=["yes", "no"])
        ),
        SamplingParams(max_tokens=9, structured_outputs=StructuredOutputsParams(regex="[ab]{3}")),
        SamplingParams(max_tokens=9, ignore_eos=True),
    ]
    outputs = [output.outputs[0] for output in generate(llm, ["x"] * 4, params)]
    value = json.loads(outputs[0].text)
    assert isinstance(value["ok"], bool) and value["n"] in (1, 2)
    assert outputs[1].text in ("yes", "no")
    assert len(outputs[2].text) == 3 and set(outputs[2].text) <= {"a", "b"}
    assert [answer.finish_reason for answer in outputs] == ["stop", "stop", "stop", "length"]


def test_a_finished_grammar_ends_the_answer_below_min_tokens(llm: LLM) -> None:
    asked = StructuredOutputsParams(choice=["yes", "no"])
    params = SamplingParams(max_tokens=40, min_tokens=30, seed=1, structured_outputs=asked)
    (output,) = llm.generate(["x"], params, use_tqdm=False)
    answer = output.outputs[0]
    assert (answer.text in ("yes", "no"), answer.finish_reason) == (True, "stop")
    ends = set(llm.get_tokenizer().eos_token_ids)
    assert sum(token in ends for token in answer.token_ids) == 1


def test_a_hopeless_grammar_leaves_nothing_behind(llm: LLM) -> None:
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(regex="((("))
    with pytest.raises(InvalidRequest):
        generate(llm, ["good", "bad"], [SamplingParams(), bad])
    assert llm.get_metrics()["num_requests"] == 0


def test_bad_words_and_allowed_tokens_hold(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    first = generate(llm, "hello", greedy)[0].outputs[0]
    word = llm.get_tokenizer().token_text(first.token_ids[0])
    if word.strip():
        banned = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, bad_words=[word])
        assert word not in generate(llm, "hello", banned)[0].outputs[0].text
    only = SamplingParams(max_tokens=12, ignore_eos=True, allowed_token_ids=[70, 71])
    assert set(generate(llm, "hello", only)[0].outputs[0].token_ids) <= {70, 71}


def test_chat_with_parsers_splits_thinking_and_calls(tmp_path: Path, tensor_library: str) -> None:
    # A grammar makes the random model say exactly this.
    call = '{"name":"look","arguments":{"x":1}}'
    spoken = f"<think>\nhm\n</think>\n\nI look.\n<tool_call>{call}</tool_call>"
    with LLM(
        write_model(tmp_path),
        device="cpu",
        tensor_library=tensor_library,
        load_format="dummy",
        dtype="float32",
        num_gpu_blocks_override=32,
        reasoning_parser="qwen3",
        tool_call_parser="hermes",
    ) as llm:
        params = SamplingParams(
            max_tokens=200, structured_outputs=StructuredOutputsParams(choice=[spoken])
        )
        tools = [{"type": "function", "function": {"name": "look"}}]
        talk = [{"role": "user", "content": "look x up"}]
        (output,) = llm.chat(talk, params, use_tqdm=False, tools=tools)
        answer = output.outputs[0]
        assert (answer.text, answer.reasoning_content) == ("I look.", "hm")
        assert answer.tool_calls is not None
        assert answer.tool_calls[0]["function"] == {"name": "look", "arguments": '{"x": 1}'}
        pieces = [p.outputs[0] for p in llm.chat(talk, params, tools=tools, stream=True)]
        assert "".join(piece.text for piece in pieces) == "I look."
        assert "".join(piece.reasoning_content or "" for piece in pieces) == "hm"
        calls = [call for piece in pieces for call in piece.tool_calls or []]
        assert [call["function"].get("name") for call in calls if "id" in call] == ["look"]
        assert "".join(call["function"]["arguments"] for call in calls) == '{"x": 1}'
        assert len(calls) > 1
        # Without tools a call is text.
        (output,) = llm.chat(talk, params, use_tqdm=False)
        assert output.outputs[0].tool_calls is None
        assert "<tool_call>" in output.outputs[0].text
