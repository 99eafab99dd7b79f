"""Grammar backends: what their masks let through fits the constraint, and nothing that fits is shut
out; states go forward, back and apart as the worker needs it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from fastdeploy_core.errors import InvalidRequest
from fastdeploy_core.types import StructuredOutputsParams

from .base import Conformance

EOS = 2
VOCAB = 650  # wider than the tokenizer, and no multiple of 32
NUM_WALKS, LONGEST = 12, 200
WORDS = ["yes", "yes, sir", "no", 'a "quoted" word', "naïve 你好"]
DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-[0-3][0-9]"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def is_person(text: str) -> bool:
    """Whether the text is JSON that PERSON describes."""
    value = json.loads(text)
    return (
        sorted(value) == ["age", "name"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 8
        and type(value["age"]) is int
    )


# Each kind: a constraint, whether a text fits it, and texts that do.
Case = tuple[StructuredOutputsParams, Callable[[str], bool], list[str]]
CASES: dict[str, Case] = {
    "choice": (StructuredOutputsParams(choice=WORDS), WORDS.__contains__, WORDS),
    "regex": (
        StructuredOutputsParams(regex=DATE),
        lambda text: re.fullmatch(DATE, text) is not None,
        ["2026-11-24", "0000-01-39"],
    ),
    "json": (
        StructuredOutputsParams(json=PERSON),
        is_person,
        ['{"name": "Ann", "age": 31}', '{"name": "", "age": -7}'],
    ),
    "grammar": (
        StructuredOutputsParams(grammar='root ::= "x" | "(" root ")"'),
        lambda text: text == "(" * (len(text) // 2) + "x" + ")" * (len(text) // 2),
        ["x", "((x))"],
    ),
}
# No driver can do anything with these: InvalidRequest, never another exception.
HOPELESS = [
    StructuredOutputsParams(regex="[a-"),
    StructuredOutputsParams(regex="(" * 500),
    StructuredOutputsParams(json="{not json"),
    StructuredOutputsParams(json={"type": "nothing"}),
    StructuredOutputsParams(grammar="root ::= missing"),
    StructuredOutputsParams(grammar="\x00"),
    StructuredOutputsParams(choice=[]),
]


class GrammarConformance(Conformance):
    """A kind of constraint that the driver refuses is skipped, with the driver's reason; declare in
    `kinds` those that it must take."""

    kind = "grammar"
    kinds: ClassVar[tuple[str, ...]] = ("choice",)

    @pytest.fixture(scope="class")
    @classmethod
    def tokenizer(cls) -> Tokenizer:
        """What `backend` reads."""
        return make_tokenizer()

    @pytest.fixture(scope="class")
    @classmethod
    def tokenizer_json(cls, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> str:
        """The path of that tokenizer's file."""
        path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
        tokenizer.save(str(path))
        return str(path)

    @pytest.fixture(scope="class")
    @classmethod
    def backend(cls, driver: Any, tokenizer_json: str) -> Any:
        """The driver over that tokenizer."""
        return driver(tokenizer_json, VOCAB, [EOS])

    def compiled(self, backend: Any, kind: str) -> bytes:
        """The constraint of that kind, compiled; skips where the driver refuses it."""
        try:
            made = backend.compile(CASES[kind][0], {})
        except InvalidRequest as error:
            assert kind not in self.kinds, f"kind {kind!r} is declared, and refused: {error}"
            pytest.skip(f"the driver refuses {kind!r}: {error}")
        assert isinstance(made, bytes), "compile() returns bytes, for another process reads them"
        return made

    @pytest.mark.parametrize("kind", CASES)
    def test_what_the_masks_let_through_fits(
        self, backend: Any, tokenizer: Tokenizer, kind: str
    ) -> None:
        compiled, (_, fits, _) = self.compiled(backend, kind), CASES[kind]
        ended = 0
        for seed in range(NUM_WALKS):
            tokens = walk(backend.matcher(compiled), seed)
            if tokens[-1] == EOS:
                text = tokenizer.decode(tokens[:-1], skip_special_tokens=False)
                assert fits(text), f"the masks let through {text!r}"
                ended += 1
        assert ended, f"none of {NUM_WALKS} answers of {LONGEST} tokens came to an end"

    @pytest.mark.parametrize("kind", CASES)
    def test_nothing_that_fits_is_shut_out(
        self, backend: Any, tokenizer: Tokenizer, kind: str
    ) -> None:
        compiled = self.compiled(backend, kind)
        for text in CASES[kind][2]:
            matcher = backend.matcher(compiled)
            assert not matcher.is_finished(), f"nothing has come of {text!r}, and yet finished"
            for token in [*tokenizer.encode(text).ids, EOS]:
                assert token in possible(matcher), f"{tokenizer.decode([token])!r} of {text!r}"
                assert matcher.accept([token]) == 1
            assert matcher.is_finished(), f"{text!r} and the end of text, and yet not finished"
            assert possible(matcher) == [EOS], "after the end only the end can follow"

    @pytest.mark.parametrize("kind", CASES)
    def test_accept_stops_at_the_first_token_that_does_not_fit(
        self, backend: Any, kind: str
    ) -> None:
        compiled = self.compiled(backend, kind)
        tokens = walk(backend.matcher(compiled), 3)[:6]
        for at in range(len(tokens)):
            matcher = backend.matcher(compiled)
            assert matcher.accept(tokens[:at]) == at
            before = possible(matcher)
            wrongs = sorted(set(range(VOCAB)) - set(before))
            for wrong in (0, *random.Random(at).sample(wrongs, 8)):  # noqa: S311
                assert matcher.accept([wrong]) == 0, f"token {wrong} is not in the mask"
                assert possible(matcher) == before, "a token that does not fit changes nothing"
            assert matcher.accept([*tokens[at:], wrong]) == len(tokens) - at

    @pytest.mark.parametrize("kind", CASES)
    def test_rollback_undoes_exactly_that(self, backend: Any, kind: str) -> None:
        compiled = self.compiled(backend, kind)
        for seed in range(NUM_WALKS):
            tokens = walk(backend.matcher(compiled), seed)
            rng, matcher, at = random.Random(seed), backend.matcher(compiled), 0  # noqa: S311
            seen: dict[int, tuple[list[int], bool]] = {}
            for _ in range(40):
                state = (possible(matcher), matcher.is_finished())
                assert seen.setdefault(at, state) == state, f"another state at token {at}"
                back = rng.randrange(min(at, 8) + 1)
                matcher.rollback(back)
                at -= back
                ahead = tokens[at : at + rng.randrange(1, 9)]
                assert matcher.accept(ahead) == len(ahead)
                at += len(ahead)

    @pytest.mark.parametrize("kind", CASES)
    def test_sequences_do_not_meet(self, backend: Any, kind: str) -> None:
        """Two states of one grammar, and a backend in another process."""
        compiled = self.compiled(backend, kind)
        first, second = backend.matcher(compiled), backend.matcher(compiled)
        start = possible(second)
        for token in walk(backend.matcher(compiled), 1):
            assert first.accept([token]) == 1
            assert possible(second) == start

    def test_constraints_do_not_meet(self, backend: Any, tokenizer: Tokenizer) -> None:
        self.compiled(backend, "choice")  # skips where the driver refuses it
        for words in (["yes"], ["no"], ["yes"]):
            compiled = backend.compile(StructuredOutputsParams(choice=words), {})
            tokens = walk(backend.matcher(compiled), 2)
            text = tokenizer.decode([t for t in tokens if t != EOS], skip_special_tokens=False)
            assert text == words[0], f"{text!r} of {words}"

    def test_the_worker_reads_what_a_front_end_compiled(
        self, driver: Any, backend: Any, tokenizer_json: str
    ) -> None:
        for kind in CASES:
            try:
                compiled = backend.compile(CASES[kind][0], {})
            except InvalidRequest:
                continue
            other = driver(tokenizer_json, VOCAB, [EOS])
            assert walk(other.matcher(compiled), 5) == walk(backend.matcher(compiled), 5)

    @pytest.mark.parametrize("params", HOPELESS, ids=lambda p: f"{p.kind}-{len(str(p))}")
    def test_a_constraint_that_cannot_be_is_refused(
        self, backend: Any, params: StructuredOutputsParams
    ) -> None:
        with pytest.raises(InvalidRequest):
            backend.compile(params, {})


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer of about 600 tokens; id 2 ends a text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        show_progress=False,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator([*WORDS, '{"name": "value", "age": 12} 2026-11-24'] * 20, trainer)
    return made


def possible(matcher: Any) -> list[int]:
    """The tokens of the mask, which is written whole, whatever stood in the memory."""
    masks = []
    for before in (0, -1):
        mask = np.full((VOCAB + 31) // 32, before, dtype=np.int32)
        matcher.fill_mask(mask)
        masks.append(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    assert np.array_equal(masks[0], masks[1]), "fill_mask() leaves bits as they were"
    tokens: list[int] = np.flatnonzero(masks[0]).tolist()
    assert tokens, "a mask leaves at least one token"
    assert max(tokens) < VOCAB, "a token beyond the vocabulary"
    return tokens


def walk(matcher: Any, seed: int) -> list[int]:
    """Tokens drawn from the masks until the end of text, or LONGEST of them. Where the end is
    possible, it is taken half of the time."""
    rng = random.Random(seed)  # noqa: S311
    tokens: list[int] = []
    while len(tokens) < LONGEST:
        choices = possible(matcher)
        if EOS in choices and rng.random() < 0.5:
            token = EOS
        else:
            token = rng.choice([t for t in choices if t != EOS] or [EOS])
        assert matcher.accept([token]) == 1, "a token of the mask fits"
        tokens.append(token)
        if token == EOS:
            break
    return tokens


class TestGrammar(GrammarConformance):
    """Run by `fastdeploy plugins check`."""
