"""`fastdeploy tokenizer convert`, against the SentencePiece library on models that it trained."""

from __future__ import annotations

import io
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from fd_tools import sentencepiece, tokenizer

from fastdeploy_core.errors import ConfigError
from fastdeploy_core.tokenizer import Tokenizer

spm = pytest.importorskip("sentencepiece")
TEXTS = [
    *(
        "",
        " ",
        "Hello, world!",
        "  two  spaces ",
        "\n\ttabs\nand lines",
        "ﬁne Ⅷ ﹫",
        "日本語 テスト",
    ),
    *(
        "a" * 50,
        "hello <user> you<user>",
        "naïve café",
        "emoji 🙂🙂 \u0000",
        "\u2581 lower one eighth",
    ),
]
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity",
              "remove_extra_whitespaces": False},
    "gemma": {"model_type": "bpe", "byte_fallback": True, "add_dummy_prefix": False,
              "user_defined_symbols": ["<user>"],
              "normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    "bpe": {"model_type": "bpe", "normalization_rule_name": "nmt_nfkc"},
    "unigram": {"model_type": "unigram", "byte_fallback": True},
}  # fmt: skip


def corpus() -> list[str]:
    """Words of which few are alike, so that scores have no ties."""
    page = Path(__file__).resolve().parents[3] / "ARCHITECTURE.md"
    return [line for line in page.read_text("utf-8").splitlines() if line.strip()]


def train(folder: Path, **options: Any) -> Any:
    made = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()), model_writer=made, vocab_size=700, minloglevel=2,
        num_threads=1, **options,
    )  # fmt: skip
    (folder / "tokenizer.model").write_bytes(made.getvalue())
    return spm.SentencePieceProcessor(model_proto=made.getvalue())


@pytest.mark.parametrize("kind", KINDS)
def test_texts_get_the_ids_that_sentencepiece_gives(kind: str, tmp_path: Path) -> None:
    oracle = train(tmp_path, **KINDS[kind])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    assert tokenizer.main(["convert", "--model", str(tmp_path)]) == 0
    made, dice, lines = Tokenizer.load(tmp_path), Random(3), corpus()
    texts = list(TEXTS)
    for _ in range(200):
        text = dice.choice(lines)
        start = dice.randrange(len(text))
        texts.append(
            text[start : start + dice.randrange(1, 60)] + dice.choice(["", " ", "é", "\n"])
        )
    for text in texts:
        expected = oracle.encode(text)
        assert made.encode(text, False) == expected, text
        assert made.encode(text) == [oracle.bos_id(), *expected]
        if oracle.unk_id() not in expected:  # what stands for it in a text is each library's own
            assert made.decode(expected) == oracle.decode(expected), text
    assert made.vocab_size == oracle.vocab_size() and made.eos_token_id == oracle.eos_id()


def test_what_cannot_be_converted_is_said(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    with pytest.raises(ConfigError, match="expected a SentencePiece model"):
        sentencepiece.convert(tmp_path)
    train(tmp_path, model_type="word", hard_vocab_limit=False)
    with pytest.raises(ConfigError, match="of type 3; possible: 1"):
        sentencepiece.convert(tmp_path)
    train(tmp_path, model_type="bpe", user_defined_symbols=["<user>"])
    with pytest.raises(ConfigError, match="symbols of its own"):
        sentencepiece.convert(tmp_path)
    train(tmp_path, **KINDS["llama"])
    sentencepiece.convert(tmp_path)
    with pytest.raises(ConfigError, match="exists already"):
        sentencepiece.convert(tmp_path)
