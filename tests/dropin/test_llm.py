"""The offline API on the fake device: forms of input, order, streaming, and nothing left behind."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastdeploy import LLM, RequestOutput, SamplingParams
from fastdeploy_core.errors import ConfigError, InvalidRequest, RequestTooLong
from fastdeploy_core.tokenizer import Tokenizer
from fastdeploy_testing.fakes import NullModel
from tests.llm_models import VOCAB_SIZE, write_model

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
TALK = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, device="null", max_num_seqs=4, block_size=16) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "llm" in request.fixturenames:
        llm = request.getfixturevalue("llm")
        stats = llm.get_metrics()
        assert stats["num_requests"] == 0
        assert stats["num_blocks_used"] == 0
        assert not llm._batches and not len(llm._processor)


def expected(llm: LLM, prompt: str | list[int], params: SamplingParams = GREEDY) -> list[int]:
    ids = llm.get_tokenizer().encode(prompt) if isinstance(prompt, str) else prompt
    return NullModel(VOCAB_SIZE).expected(ids, params.max_tokens or 0, params)


def generate(llm: LLM, *args: Any, **kwargs: Any) -> list[RequestOutput]:
    outputs = llm.generate(*args, use_tqdm=False, **kwargs)
    assert isinstance(outputs, list)
    return outputs


def test_a_prompt_gives_the_models_tokens_and_their_text(llm: LLM) -> None:
    (output,) = generate(llm, "hello world", GREEDY)
    tokenizer = llm.get_tokenizer()
    answer = output.outputs[0]
    assert output.prompt == "hello world"
    assert output.prompt_token_ids == tokenizer.encode("hello world")
    assert answer.token_ids == expected(llm, "hello world")
    assert answer.text == tokenizer.decode(answer.token_ids, skip_special_tokens=True)
    assert (answer.finish_reason, answer.stop_reason) == ("length", None)
    assert output.finished and output.request_id


def test_every_form_of_prompt_means_the_same(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("hello")
    forms: list[Any] = ["hello", ids, {"prompt": "hello"}, {"prompt_token_ids": ids}]
    for form in forms:
        (output,) = generate(llm, form, GREEDY)
        assert output.prompt_token_ids == ids
        assert output.outputs[0].token_ids == expected(llm, ids)
    together = generate(llm, forms, GREEDY)
    assert {tuple(output.outputs[0].token_ids) for output in together} == {
        tuple(expected(llm, ids))
    }
    assert generate(llm, [], GREEDY) == []


def test_the_originals_programs_read_the_one_answer(llm: LLM) -> None:
    """Its `outputs` is an answer, and template switches come fourth."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    given: Any = {"prompt": "hello", "multimodal_data": {}}
    for output in generate(llm, [given], params):
        answer: Any = output.outputs
        assert answer.token_ids == answer[0].token_ids == expected(llm, "hello")
        assert (answer.text, answer.reasoning_content) == (answer[0].text, None)
        assert copy.deepcopy(output) == output and not hasattr(answer, "send_idx")
    switched: Any = llm.chat(TALK, GREEDY, False, {"enable_thinking": False}, "{{enable_thinking}}")
    assert switched[0].prompt == "False"
    pieces: list[Any] = [output.outputs for output in llm.generate("hello", params, stream=True)]
    assert "".join(piece.text for piece in pieces) == answer.text


def test_order_is_kept_and_parameters_are_each_prompts_own(llm: LLM) -> None:
    prompts = [f"prompt {i} " * (1 + i % 3) for i in range(11)]
    params = [
        SamplingParams(temperature=0, max_tokens=1 + (7 * i) % 5, ignore_eos=True)
        for i in range(11)
    ]
    outputs = generate(llm, prompts, params)
    assert [output.prompt for output in outputs] == prompts
    for output, prompt, param in zip(outputs, prompts, params, strict=True):
        assert output.outputs[0].token_ids == expected(llm, prompt, param)


def test_lists_must_have_one_entry_for_each_prompt(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="sampling_params has 1 entries for 2 prompts"):
        generate(llm, ["a", "b"], [GREEDY])
    with pytest.raises(InvalidRequest, match="priority has 3 entries"):
        generate(llm, ["a", "b"], GREEDY, priority=[1, 2, 3])
    assert len(generate(llm, ["a", "b"], GREEDY, priority=[1, 2])) == 2


@pytest.mark.parametrize(
    "bad",
    [
        "",
        [],
        {"prompt": ""},
        {"prompt_token_ids": "hello"},
        {"text": "x"},
        {},
        7,
        [VOCAB_SIZE],
        [-1],
        "x " * 300,
        ["a", "b"],
        None,
    ],
)
def test_one_bad_prompt_leaves_nothing_behind(llm: LLM, bad: Any) -> None:
    with pytest.raises(InvalidRequest):
        generate(llm, ["good", bad, "good"], GREEDY)
    assert generate(llm, "good", GREEDY)[0].outputs[0].token_ids == expected(llm, "good")


@pytest.mark.parametrize("bad", [7, None])
def test_prompts_of_another_type_are_refused(llm: LLM, bad: Any) -> None:
    with pytest.raises(InvalidRequest, match="prompts must be text, token ids, or a list of them"):
        generate(llm, bad, GREEDY)


def test_a_prompt_that_is_too_long_says_so(llm: LLM) -> None:
    with pytest.raises(RequestTooLong, match="maximum context length is 256 tokens"):
        generate(llm, [[5] * 256], GREEDY)


def test_parameters_of_another_type_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="must be SamplingParams, got dict"):
        generate(llm, "a", {"temperature": 0})


def test_without_parameters_the_models_defaults_count(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (folder / "generation_config.json").write_text(
        json.dumps({"do_sample": False, "max_new_tokens": 3, "eos_token_id": 1})
    )
    with LLM(model=str(folder), device="null") as llm:
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.max_tokens) == (0.0, 3)
        (output,) = generate(llm, "hello")
        assert output.outputs[0].token_ids == expected(llm, "hello", params)


def test_max_tokens_none_goes_to_the_end_of_the_context(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    (output,) = generate(llm, [[5] * 200], params)
    assert len(output.outputs[0].token_ids) == 56
    assert output.outputs[0].finish_reason == "length"


def test_a_seed_gives_the_same_tokens_and_none_gives_others(llm: LLM) -> None:
    seeded = SamplingParams(seed=11, max_tokens=8, ignore_eos=True)
    free = SamplingParams(max_tokens=8, ignore_eos=True)
    outputs = generate(llm, ["x"] * 4, [seeded, seeded, free, free])
    a, b, c, d = (tuple(output.outputs[0].token_ids) for output in outputs)
    assert a == b
    assert len({a, c, d}) == 3


def test_n_answers_come_in_order(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=4, ignore_eos=True)
    (output,) = generate(llm, "hello", params)
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 3


def test_logprobs_cover_every_token(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, ignore_eos=True)
    answer = generate(llm, "hello", params)[0].outputs[0]
    assert answer.logprobs is not None and answer.cumulative_logprob is not None
    assert len(answer.logprobs) == 3
    for token_id, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert next(iter(entry)) == token_id
        alone, shown = llm.get_tokenizer().token_text(token_id), entry[token_id].decoded_token
        part_of_a_character = "\ufffd" in alone
        assert shown == alone or (part_of_a_character and "\ufffd" not in shown)


def test_a_stop_string_ends_the_answer(llm: LLM) -> None:
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    text = generate(llm, "hello", long)[0].outputs[0].text
    stop = text[10:13]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=["never!", stop])
    answer = generate(llm, "hello", params)[0].outputs[0]
    assert answer.text == text[: text.index(stop)]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert len(answer.token_ids) < 40


def test_streams_join_to_the_whole_answer(llm: LLM) -> None:
    prompts = ["hello", "world and more"]
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=0, ignore_eos=True)
    whole = {output.prompt: output.outputs[0] for output in generate(llm, prompts, params)}
    texts = dict.fromkeys(prompts, "")
    tokens: dict[str, list[int]] = {prompt: [] for prompt in prompts}
    finished = []
    for piece in llm.generate(prompts, params, stream=True):
        assert piece.prompt is not None
        for answer in piece.outputs:
            texts[piece.prompt] += answer.text
            tokens[piece.prompt] += answer.token_ids
            assert answer.logprobs is not None
            assert len(answer.logprobs) == len(answer.token_ids)
        if piece.finished:
            finished.append(piece.prompt)
    assert sorted(finished) == sorted(prompts)
    assert texts == {prompt: whole[prompt].text for prompt in prompts}
    assert tokens == {prompt: whole[prompt].token_ids for prompt in prompts}


def test_a_stream_that_is_left_frees_the_engine(llm: LLM) -> None:
    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    stream = iter(llm.generate(["a", "b"], long, stream=True))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert llm.get_metrics()["num_requests"] == 0


def test_a_bad_stream_is_refused_before_it_is_read(llm: LLM) -> None:
    with pytest.raises(InvalidRequest):
        llm.generate(["a", ""], GREEDY, stream=True)


def test_two_streams_and_a_call_can_interleave(llm: LLM) -> None:
    first = iter(llm.generate("one", GREEDY, stream=True))
    second = iter(llm.generate("two", GREEDY, stream=True))
    got: dict[str, list[int]] = {"one": [], "two": []}
    for _ in range(2):
        for name, stream in (("one", first), ("two", second)):
            got[name] += next(stream).outputs[0].token_ids
    assert generate(llm, "three", GREEDY)[0].outputs[0].token_ids == expected(llm, "three")
    for name, stream in (("one", first), ("two", second)):
        got[name] += [t for piece in stream for t in piece.outputs[0].token_ids]
    assert got == {name: expected(llm, name) for name in got}


def test_chat_renders_the_template_and_adds_no_second_bos(llm: LLM) -> None:
    (output,) = llm.chat(TALK, GREEDY, use_tqdm=False)
    assert output.prompt == "<s><|user|>hello<|end|><|assistant|>"
    assert output.prompt_token_ids.count(0) == 1
    assert output.outputs[0].token_ids == expected(llm, output.prompt_token_ids)


def test_chat_takes_one_or_many_conversations(llm: LLM) -> None:
    other = [{"role": "user", "content": "bye"}]
    both = llm.chat([TALK, other], [GREEDY, GREEDY], use_tqdm=False)
    assert [output.prompt for output in both] == [
        llm.chat(talk, GREEDY, use_tqdm=False)[0].prompt for talk in (TALK, other)
    ]


def test_one_bad_conversation_leaves_nothing_behind(llm: LLM) -> None:
    for bad in ([], [{"role": "user", "content": 3}], [{"content": "x"}], "hello"):
        with pytest.raises(InvalidRequest):
            llm.chat([TALK, bad], GREEDY, use_tqdm=False)
    for bad in ("hello", [], {"role": "user"}):
        with pytest.raises(InvalidRequest):
            llm.chat(bad, GREEDY, use_tqdm=False)


def test_chat_options_reach_the_template(llm: LLM) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    shown = llm.chat(TALK, GREEDY, use_tqdm=False, tools=tools)[0].prompt
    assert shown is not None and '{"name": "f"}' in shown
    begun = [*TALK, {"role": "assistant", "content": "I am"}]
    shown = llm.chat(begun, GREEDY, use_tqdm=False, continue_final_message=True)[0].prompt
    assert shown is not None and shown.endswith("<|assistant|>I am")
    shown = llm.chat(TALK, GREEDY, use_tqdm=False, add_generation_prompt=False)[0].prompt
    assert shown is not None and shown.endswith("<|end|>")
    mine = "{{ messages[0].content }}{{ enable_thinking }}"
    shown = llm.chat(
        TALK,
        GREEDY,
        use_tqdm=False,
        chat_template=mine,
        chat_template_kwargs={"enable_thinking": False},
    )[0].prompt
    assert shown == "helloFalse"


def test_a_request_that_fails_in_the_engine_does_not_take_others_along(tmp_path: Path) -> None:
    folder = write_model(tmp_path, faults=({"kind": "nan", "token": 9},))
    with LLM(folder, device="faulty") as llm:
        outputs = generate(llm, [[5, 6], [8, 9], [6, 7]], GREEDY)
        assert [output.outputs[0].finish_reason for output in outputs] == [
            "length",
            "error",
            "length",
        ]
        assert outputs[1].error
        assert outputs[0].outputs[0].token_ids == expected(llm, [5, 6])


def test_progress_is_shown_when_wanted(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY)
    shown = capfd.readouterr().err
    assert "Processed prompts" in shown and "2/2" in shown and "tok/s" in shown
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert "Processed" not in capfd.readouterr().err


def test_prefixes_are_reused_and_can_be_forgotten(llm: LLM) -> None:
    prompt = list(range(20, 84))
    generate(llm, [prompt], GREEDY)
    assert (generate(llm, [prompt], GREEDY)[0].num_cached_tokens or 0) > 0
    assert llm.reset_prefix_cache()
    assert generate(llm, [prompt], GREEDY)[0].num_cached_tokens == 0


def test_a_model_can_be_used_without_its_tokenizer(folder: Path) -> None:
    with LLM(folder, device="null", skip_tokenizer_init=True) as llm:
        answer = generate(llm, [[5, 6, 7]], GREEDY)[0].outputs[0]
        assert answer.token_ids == NullModel(VOCAB_SIZE).expected([5, 6, 7], 6, GREEDY)
        assert answer.text == ""
        with pytest.raises(InvalidRequest, match="needs a tokenizer"):
            generate(llm, "text", GREEDY)
        with pytest.raises(ConfigError, match="no tokenizer"):
            llm.get_tokenizer()


def test_a_closed_llm_says_so(folder: Path) -> None:
    llm = LLM(folder, device="null")
    llm.close()
    llm.close()
    with pytest.raises(ConfigError, match="closed"):
        generate(llm, "a", GREEDY)


def test_arguments_have_both_spellings_and_unknown_ones_are_named(folder: Path) -> None:
    with LLM(folder, device="null", max_model_len=64, load_choices="dummy") as llm:
        assert llm.config.model.max_model_len == 64
        assert llm.config.model.load_format == "dummy"
        tokenizer = llm.get_tokenizer()
        assert isinstance(tokenizer, Tokenizer)
        prompt = tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
        assert prompt.count("hello") == 1
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(folder, device="null", max_model_length=64)
