"""Sampling that looks at text through the model runner: grammars, thinking budgets, processors.

Every case runs with steps launched ahead of the tokens they depend on, and again one by one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from fd_grammar_llguidance.backend import LLGuidanceBackend
from fd_grammar_llguidance.matcher import Grammar
from fd_parsers.thinking_budget import ThinkingBudgetLogitsProcessor
from llguidance import LLMatcher
from tokenizers import Tokenizer

from fastdeploy_core.contracts.small import ProcessorContext
from fastdeploy_core.errors import InvalidRequest, PluginLoadError
from fastdeploy_core.sampling.processors import ProcessorSet, find_processor
from fastdeploy_core.types import SamplingParams, StructuredOutputsParams
from tests.worker_steps import (
    EOS,
    RowOutput,
    Steps,
    engine_config,
    make_worker,
    sharpen,
    write_model,
)


class Exploding:
    """A processor that takes part when asked, and then fails in the way that was asked for."""

    def __init__(self, context: ProcessorContext) -> None:
        self.removed: list[int] = []
        self.how = ""

    def validate(self, params: SamplingParams) -> None:
        return None

    def add(self, seq_id: int, params: SamplingParams, prompt_token_ids: Sequence[int]) -> bool:
        self.how = (params.logits_processors_args or {}).get("explode", self.how)
        return bool((params.logits_processors_args or {}).get("explode"))

    def remove(self, seq_id: int) -> None:
        self.removed.append(seq_id)

    def apply(self, logits: Any, seq_ids: Sequence[int], output_token_ids: Any) -> Any:
        if self.how == "boom":
            raise RuntimeError("boom")
        if self.how == "exit":
            raise SystemExit("bye")
        return None if self.how == "nothing" else logits[:, :-1]


class NoRepeat:
    """Forbids every token generated before; sees all of them although steps are launched ahead."""

    def __init__(self, context: ProcessorContext) -> None:
        pass

    def validate(self, params: SamplingParams) -> None:
        return None

    def add(self, seq_id: int, params: SamplingParams, prompt_token_ids: Sequence[int]) -> bool:
        return bool((params.logits_processors_args or {}).get("no_repeat"))

    def remove(self, seq_id: int) -> None:
        return None

    def apply(self, logits: Any, seq_ids: Sequence[int], output_token_ids: Any) -> Any:
        for row, output in enumerate(output_token_ids):
            for token in output:
                logits[row : row + 1, int(token) : int(token) + 1] = float("-inf")
        return logits


@pytest.fixture(scope="module")
def steps(tensor_library: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Steps]:
    folder = write_model(tmp_path_factory.mktemp("llama"), with_tokenizer=True)
    names = (f"{__name__}:Exploding", f"{__name__}:NoRepeat")
    worker = make_worker(engine_config(folder, tensor_library, logits_processors=names))
    worker.load()
    sharpen(worker)
    yield Steps(worker)
    worker.close()


@pytest.fixture(scope="module")
def tokenizer(steps: Steps) -> Tokenizer:
    return Tokenizer.from_file(str(steps.worker.config.model.path / "tokenizer.json"))


@pytest.fixture(scope="module")
def backend(steps: Steps) -> LLGuidanceBackend:
    folder = steps.worker.config.model.path
    vocab_size = steps.worker._runner.vocab_size
    return LLGuidanceBackend(str(folder / "tokenizer.json"), vocab_size, [EOS])


@pytest.fixture(params=[False, True], ids=["one by one", "ahead"])
def ahead(request: pytest.FixtureRequest) -> bool:
    return request.param


def generate(steps: Steps, seq_ids: list[int], count: int, ahead: bool) -> list[RowOutput]:
    """`count` steps of these sequences together; the outputs of the last one."""
    pending, last = [], []
    for _ in range(count):
        pending.append(steps.launch([steps.row(n) for n in seq_ids]))
        if len(pending) > int(ahead):
            last = steps.take(pending.pop(0).wait())
    for left in pending:
        last = steps.take(left.wait())
    return last


def finish_all(steps: Steps) -> None:
    for seq_id in list(steps.tokens):
        steps.finish(seq_id)
    steps.launch([]).wait()


def text_of(tokenizer: Tokenizer, tokens: list[int]) -> str | None:
    """What came before the end of text; None if it did not come."""
    if EOS not in tokens:
        return None
    return tokenizer.decode(tokens[: tokens.index(EOS)], skip_special_tokens=False)


def test_grammars_hold_in_a_mixed_batch(
    steps: Steps, tokenizer: Tokenizer, backend: LLGuidanceBackend, ahead: bool
) -> None:
    prompt = [10, 11, 12]
    free = steps.alone(prompt, 30, SamplingParams(temperature=0), 1)
    schema = {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 4}
    constraints = [
        StructuredOutputsParams(choice=["Beijing", "Paris, I think"]),
        StructuredOutputsParams(regex="[a-c]{4,12}"),
        StructuredOutputsParams(json=schema),
    ]
    steps.add(1, prompt)
    for number, constraint in enumerate(constraints, start=2):
        steps.add(
            number,
            prompt,
            SamplingParams(temperature=1.0, max_tokens=60, min_tokens=3),
            grammar=backend.compile(constraint, {}),
            grammar_backend="llguidance",
        )
    last = generate(steps, [1, 2, 3, 4], 30, ahead)
    assert [row.error for row in last] == [None] * 4
    assert steps.tokens[1][3:] == free, "the row without a grammar is not touched"
    texts = [text_of(tokenizer, steps.tokens[n][3:]) for n in (2, 3, 4)]
    assert texts[0] in ("Beijing", "Paris, I think")
    assert texts[1] is not None and re.fullmatch("[a-c]{4,12}", texts[1])
    assert texts[2] is None or isinstance(json.loads(texts[2]), list)
    finish_all(steps)


def test_a_grammar_over_its_time_ends_its_own_request(
    steps: Steps, backend: LLGuidanceBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Grammar.compute

    def slow(grammar: Grammar, matcher: LLMatcher) -> tuple[float, np.ndarray]:
        return 0.1, real(grammar, matcher)[1]

    monkeypatch.setattr(Grammar, "compute", slow)
    compiled = backend.compile(StructuredOutputsParams(regex="[a-c]{4,200}"), {})
    steps.add(1, [10, 11, 12])
    steps.add(2, [10, 11], grammar=compiled, grammar_backend="llguidance")
    errors: list[str | None] = []
    for _ in range(12):
        first, second = generate(steps, [1, 2], 1, ahead=False)
        assert first.error is None
        errors.append(second.error)
        if second.error:
            break
    assert 2 < len(errors) < 12, "some long calls are free, but not all"
    assert "takes too long" in (errors[-1] or "")
    finish_all(steps)


def test_a_preempted_grammar_goes_on_where_it_was(
    steps: Steps, tokenizer: Tokenizer, backend: LLGuidanceBackend
) -> None:
    compiled = backend.compile(StructuredOutputsParams(regex="(abc){4}d"), {})
    params = SamplingParams(temperature=1.0)
    fields = {"grammar": compiled, "grammar_backend": "llguidance", "seed": 5}
    steps.add(1, [10, 11], params, **fields)
    generate(steps, [1], 5, ahead=False)
    steps.preempt(1, 2, params, **fields)
    generate(steps, [1], 12, ahead=True)
    assert text_of(tokenizer, steps.tokens[1][2:]) == "abcabcabcabcd"
    finish_all(steps)


@pytest.mark.parametrize("style", ["vllm", "fastdeploy"])
def test_the_thinking_budget_is_exact(
    steps: Steps, tokenizer: Tokenizer, style: str, ahead: bool
) -> None:
    think, end = (tokenizer.token_to_id(t) for t in ("<think>", "</think>"))
    plain = SamplingParams(temperature=0, bad_words_token_ids=[[end], [think]])
    free = steps.alone([10, 11, think], 12, plain, 1)
    if style == "vllm":
        params, forced = {"thinking_token_budget": 5}, [end]
    else:
        sentence = "Stop.</think>"
        params = {"logits_processors_args": {"thinking_budget": 5, "think_stop_sentence": sentence}}
        forced = tokenizer.encode(sentence, add_special_tokens=False).ids
    given = SamplingParams(temperature=0, bad_words_token_ids=[[think]], **params)
    steps.add(1, [10, 11, think], given)
    steps.add(2, [10, 11], given)  # never begins to think: nothing is forced
    steps.add(3, [think, 9, end, 8], given)  # has done thinking in the prompt
    generate(steps, [1, 2, 3], 12, ahead)
    output = steps.tokens[1][3:]
    thought = output[: output.index(end)] if style == "vllm" else output[:5]
    assert thought == free[:5]
    assert output[5 : 5 + len(forced)] == forced
    assert steps.tokens[2][2:] == steps.alone([10, 11], 12, given_without_budget(), 1)
    assert steps.tokens[3][4:] == steps.alone([think, 9, end, 8], 12, given_without_budget(), 1)
    finish_all(steps)


def given_without_budget() -> SamplingParams:
    return SamplingParams(temperature=0, bad_words_token_ids=[[3]])


def test_a_budget_of_nothing_ends_thinking_at_once(steps: Steps, tokenizer: Tokenizer) -> None:
    think, end = (tokenizer.token_to_id(t) for t in ("<think>", "</think>"))
    steps.add(1, [10, think], SamplingParams(temperature=0, thinking_token_budget=0))
    generate(steps, [1], 2, ahead=False)
    assert steps.tokens[1][2] == end
    finish_all(steps)


def test_thinking_that_ends_by_itself_is_left_alone(steps: Steps, tokenizer: Tokenizer) -> None:
    think, end = (tokenizer.token_to_id(t) for t in ("<think>", "</think>"))
    context = ProcessorContext(
        steps.worker._runner._xp,
        "cpu",
        310,
        4,
        str(steps.worker.config.model.path / "tokenizer.json"),
    )
    processor = ThinkingBudgetLogitsProcessor(context)
    assert processor.add(1, SamplingParams(thinking_token_budget=4), [5, think])
    assert not processor.add(2, SamplingParams(), [5, think])
    state = processor._states[1]
    assert processor._next_forced(state, [7, 8]) is None
    assert processor._next_forced(state, [7, 8, end, 9, 9, 9, 9, 9]) is None
    assert processor.add(3, SamplingParams(thinking_token_budget=2), [5])
    state = processor._states[3]
    assert processor._next_forced(state, [7, 8, 9]) is None
    assert processor._next_forced(state, [7, 8, 9, think, 9, 9]) == end


def test_processors_see_every_token_before_the_one_they_shape(steps: Steps, ahead: bool) -> None:
    params = SamplingParams(temperature=0, logits_processors_args={"no_repeat": True})
    steps.add(1, [10, 11, 12], params)
    steps.add(2, [10, 11, 12])
    generate(steps, [1, 2], 40, ahead)
    assert len(set(steps.tokens[1][3:])) == 40
    assert len(set(steps.tokens[2][3:])) < 40, "the model repeats itself when it is let"
    finish_all(steps)


@pytest.mark.parametrize(
    ("how", "said"),
    [("boom", "boom"), ("exit", "bye"), ("nothing", "NoneType"), ("narrow", "it returned shape")],
)
def test_a_processor_that_fails_fails_its_rows_only(
    steps: Steps, ahead: bool, how: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    truth = steps.alone([10, 11, 12], 6, SamplingParams(temperature=0), 1)
    steps.add(1, [10, 11, 12])
    steps.add(2, [10, 11, 12], SamplingParams(logits_processors_args={"explode": how}))
    good, bad = steps.step([steps.row(1), steps.row(2)])
    assert good.error is None and bad.error == "logits_processor_failed"
    steps.finish(2)
    generate(steps, [1], 5, ahead)
    assert steps.tokens[1][3:] == truth
    assert said in caplog.text and "logits processor" in caplog.text
    finish_all(steps)


def test_wrong_processor_arguments_are_refused() -> None:
    context = ProcessorContext(None, "cpu", 100, 4)
    thinking = ThinkingBudgetLogitsProcessor(context)
    bias = find_processor("LogitBiasLogitsProcessor")(context)
    for processor, args in (
        (thinking, {"thinking_budget": -1}),
        (thinking, {"thinking_budget": "5"}),
        (thinking, {"think_stop_sentence": 5}),
        (thinking, {"think_stop_sentence": "x" * 1000}),
        (bias, {"logit_bias": {"100": 1}}),
        (bias, {"logit_bias": {"-1": 1}}),
        (bias, {"logit_bias": {"1": "nan"}}),
        (bias, {"logit_bias": [1, 2]}),
        (bias, {"logit_bias": 7}),
    ):
        with pytest.raises(InvalidRequest, match="logits_processors_args"):
            processor.validate(SamplingParams(logits_processors_args=args))


@pytest.mark.parametrize(
    "given",
    [{"thinking_token_budget": 3}, {"logits_processors_args": {"thinking_budget": 3}}],
    ids=str,
)
def test_a_budget_that_nobody_keeps_is_refused(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    monkeypatch.setenv("FD_PLUGINS", "")
    processors = ProcessorSet(None, None, ProcessorContext(None, "cpu", 9, 4))
    with pytest.raises(InvalidRequest, match=r"needs a plugin: .*fd-parsers"):
        processors.add(0, 1, SamplingParams(**given), np.zeros(1, np.int64))
    processors.add(0, 1, SamplingParams(), np.zeros(1, np.int64))


def test_unknown_processors_are_refused_at_start() -> None:
    with pytest.raises(PluginLoadError, match="module:Class"):
        find_processor("no_such_module:Thing")
