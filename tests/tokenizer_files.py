"""Builds small tokenizer folders of every style that language models use; nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello world, hello there!",
    "你好，世界！北京是中国的首都。",
    'def main():\n    print("naïve café", 3.14)\n\treturn {"a": [1, 2]}',
    "emoji 😀 🚀 👩‍👩‍👧 and flags 🇨🇳 and ½ € ß",
] * 4
TEXTS = [
    "",
    " ",
    "hello world",
    "  two  spaces and\n\nlines\t",
    "你好, Beijing 北京! 😀👩‍👩‍👧",
    "ünïcödé ½ €100 <s> and </s> inside",
    "<|user|>hi<|end|> <tool_call>{}</tool_call>",
    "﷽ ʘ 𝔘𝔫𝔦 \u200b zero",
]
CHAT_TEMPLATE = """{%- for message in messages %}
{{- '<|' + message['role'] + '|>' + (message.content or '') + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
SPLIT = r"""(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"""


def _train(tokenizer: Tokenizer, trainer: Any) -> Tokenizer:
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>"],
        show_progress=False,
    )
    return _train(tokenizer, trainer)


def byte_level() -> Tokenizer:
    """Qwen's and GPT's style, with added tokens that are not special."""
    tokenizer = _byte_level()
    tokenizer.add_tokens([AddedToken("<tool_call>"), AddedToken("</tool_call>"), AddedToken("é x")])
    return tokenizer


def byte_level_with_bos() -> Tokenizer:
    """Llama 3's style: the file's own post-processor writes <s>."""
    tokenizer = _byte_level()
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
            ),
        ]
    )
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Llama 2's and ERNIE's style: sentencepiece BPE that spells unknown characters in bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=560,
        special_tokens=["<unk>", "<s>", "</s>"],
        limit_alphabet=60,
        show_progress=False,
    )
    _train(tokenizer, trainer)
    # Byte tokens are ordinary entries of the vocabulary, not added tokens.
    state = json.loads(tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    for token in bytes_:
        vocabulary[token] = len(vocabulary)
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_special_tokens(["<|user|>", "<|assistant|>", "<|end|>"])
    return tokenizer


def metaspace() -> Tokenizer:
    """Unigram with the Metaspace pair."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    trainer = trainers.UnigramTrainer(
        vocab_size=200,
        special_tokens=["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>"],
        unk_token="<unk>",
        show_progress=False,
    )
    return _train(tokenizer, trainer)


def word_suffix() -> Tokenizer:
    """BPE whose tokens end words with </w>."""
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=200,
        special_tokens=["<unk>", "<s>", "</s>"],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    return _train(tokenizer, trainer)


def word_piece() -> Tokenizer:
    """BERT's style, with the decoder that tidies spaces."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece("##", True)
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    return _train(tokenizer, trainer)


def word_level() -> Tokenizer:
    """No decoder at all: tokens are joined by spaces."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(
        special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    return _train(tokenizer, trainer)


def replacing_after_fuse() -> Tokenizer:
    """A decoder with steps after Fuse: patterns across tokens, spaces stripped."""
    tokenizer = byte_fallback()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Replace("▁", " "),
            decoders.Replace("th", "<TH>"),
            decoders.Replace(Regex("l+"), "L"),
            decoders.Strip(" ", 2, 0),
        ]
    )
    return tokenizer


STYLES: dict[str, Callable[[], Tokenizer]] = {
    function.__name__: function
    for function in (
        byte_level,
        byte_level_with_bos,
        byte_fallback,
        metaspace,
        word_suffix,
        word_piece,
        word_level,
        replacing_after_fuse,
    )
}


def write(folder: Path, style: str, config: Mapping[str, Any] | None = None, **files: Any) -> Path:
    """Write a folder; `files` maps names (without .json) to further JSON files."""
    folder.mkdir(parents=True, exist_ok=True)
    STYLES[style]().save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", **(config or {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder
