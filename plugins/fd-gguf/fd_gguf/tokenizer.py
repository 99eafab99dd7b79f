"""A tokenizer folder's JSON files from the tokenizer.ggml settings of a GGUF file.

Two kinds of vocabulary are read: byte-level BPE with merges ("gpt2"), for which the file only names
the rule that splits text into words, and SentencePiece BPE with scores ("llama"), from which merges
are derived.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fastdeploy_core.errors import ConfigError

from .reader import GGUFModel

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # token types
_MAX_PIECE_CHARS: Final = 256  # longer pieces have no merges
_NAMED: Final[dict[str, str]] = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # spelled so in the format
    "mask_token": "mask_token_id",
}


@dataclass(frozen=True, slots=True)
class _Words:
    """How a named pre-tokenizer splits text; each pattern splits what the previous ones left
    whole."""

    patterns: tuple[str, ...]
    is_nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


_CONTRACTION: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2: Final = _Words((rf"{_CONTRACTION}|{_LETTERS}|\p{{N}}|{_REST}",), is_nfc=True)
_LLAMA3: Final = _Words(
    (rf"{_CONTRACTION}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}",), ignore_merges=True, adds_bos=True
)
_DEEPSEEK3: Final = _Words(
    (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
        r""" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
    )
)
_GPT2: Final = _Words(
    (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",)
)
_PRE_TOKENIZERS: Final[Mapping[str, _Words]] = {
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "deepseek-v3": _DEEPSEEK3,
    "gpt-2": _GPT2,
}


class _Vocabulary:
    """The token list with types, checked."""

    def __init__(self, model: GGUFModel) -> None:
        self.path, self.settings = model.path, model.settings
        tokens = self.get("tokens")
        if not isinstance(tokens, list) or not tokens:
            raise self.wrong("tokens", "a list of texts")
        self.tokens: list[str] = tokens
        types = self.get("token_type")
        if types is None:
            types = np.full(len(tokens), _NORMAL)
        if not isinstance(types, np.ndarray) or len(types) != len(tokens):
            raise self.wrong("token_type", f"{len(tokens)} numbers")
        self.types: list[int] = types.tolist()
        embedding = model.tensors.get("token_embd.weight")
        if embedding is not None and len(tokens) > embedding.shape[0]:
            raise ConfigError(
                f"{self.path} has {len(tokens)} tokens and embeddings of {embedding.shape[0]}"
            )
        self.ids: dict[str, int] = {}
        for number, token in enumerate(tokens):
            self.ids.setdefault(token, number)

    def get(self, key: str) -> Any:
        return self.settings.get(f"tokenizer.ggml.{key}")

    def wrong(self, key: str, expected: str) -> ConfigError:
        value = self.get(key)
        shown = f"{len(value)} of them" if isinstance(value, list | np.ndarray) else repr(value)
        return ConfigError(
            f"{self.path}: setting tokenizer.ggml.{key} is {shown:.100}; expected {expected}; a "
            "tokenizer of your own is given with --tokenizer DIR"
        )

    def token(self, key: str, default: int | None = None) -> str | None:
        """The text of the token whose id a setting has."""
        number = self.get(key)
        number = default if number is None else number
        if number is None:
            return None
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise self.wrong(key, "a token id")
        if number >= len(self.tokens):
            # Files use 2**32 - 1 for a token that the model does not have.
            if number == 0xFFFFFFFF:
                return None
            raise self.wrong(key, f"a token id below {len(self.tokens)}")
        return self.tokens[number]

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value


def tokenizer_files(model: GGUFModel) -> dict[str, dict[str, Any]]:
    """tokenizer.json and tokenizer_config.json of the file's tokenizer; ConfigError says what is
    wrong."""
    vocabulary = _Vocabulary(model)
    kind = vocabulary.get("model")
    if kind == "gpt2":
        tokenizer = _byte_level(vocabulary)
    elif kind == "llama":
        tokenizer = _sentencepiece(vocabulary)
    else:
        raise vocabulary.wrong("model", "gpt2 (byte-level BPE) or llama (SentencePiece BPE)")
    config: dict[str, Any] = {}
    for name, key in _NAMED.items():
        token = vocabulary.token(key)
        if token:
            config[name] = token
    templates = _chat_templates(model)
    if templates:
        config["chat_template"] = templates
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}


def _chat_templates(model: GGUFModel) -> list[dict[str, str]]:
    prefix = "tokenizer.chat_template"
    return [
        {"name": key.removeprefix(prefix).removeprefix(".") or "default", "template": value}
        for key, value in model.settings.items()
        if (key == prefix or key.startswith(f"{prefix}.")) and isinstance(value, str)
    ]


def _byte_level(vocabulary: _Vocabulary) -> dict[str, Any]:
    name = vocabulary.get("pre")
    if name not in _PRE_TOKENIZERS:
        raise vocabulary.wrong("pre", f"one of {', '.join(_PRE_TOKENIZERS)}")
    words = _PRE_TOKENIZERS[name]
    merges = vocabulary.get("merges")
    if not isinstance(merges, list):
        raise vocabulary.wrong("merges", "a list of texts")
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        if {left, right, left + right} - vocabulary.ids.keys():
            raise ConfigError(
                f"{vocabulary.path}: merge {merge!r:.80} of tokenizer.ggml.merges names tokens "
                "that are not in the vocabulary; download the file again, or pass --tokenizer DIR"
            )
        pairs.append([left, right])
    cuts: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False}
        for p in words.patterns
    ]
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    return _tokenizer(
        vocabulary,
        model=_bpe(vocabulary, pairs, ignore_merges=words.ignore_merges),
        normalizer={"type": "NFC"} if words.is_nfc else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*cuts, level]},
        decoder=level,
        bos=vocabulary.token("bos_token_id")
        if vocabulary.flag("add_bos_token", words.adds_bos)
        else None,
    )


def _sentencepiece(vocabulary: _Vocabulary) -> dict[str, Any]:
    scores = vocabulary.get("scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(vocabulary.tokens):
        raise vocabulary.wrong("scores", f"{len(vocabulary.tokens)} numbers")
    space, has_prefix = "\u2581", vocabulary.flag("add_space_prefix", True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": space}
    prepend = [{"type": "Prepend", "prepend": space}] if has_prefix else []
    back: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": space}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        back.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = vocabulary.token("unknown_token_id", 0)
    return _tokenizer(
        vocabulary,
        model=_bpe(vocabulary, _merges(vocabulary, scores), byte_fallback=True, unknown=unknown),
        normalizer={"type": "Sequence", "normalizers": [*prepend, replace]},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": back},
        bos=vocabulary.token("bos_token_id", 1) if vocabulary.flag("add_bos_token", True) else None,
    )


def _merges(vocabulary: _Vocabulary, scores: np.ndarray) -> list[list[str]]:
    """All pairs of pieces that make another piece, those of the best-scored pieces first."""
    ids, tokens, types = vocabulary.ids, vocabulary.tokens, vocabulary.types
    pieces = {t for t, kind in zip(tokens, types, strict=True) if kind in (_NORMAL, _USER_DEFINED)}
    found: list[list[str]] = []
    for number in np.argsort(-scores.astype(np.float64), kind="stable").tolist():
        piece = tokens[number]
        if types[number] != _NORMAL or not 1 < len(piece) <= _MAX_PIECE_CHARS:
            continue
        cuts = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        halves = [(a, b) for a, b in cuts if a in pieces and b in pieces]
        found += [[a, b] for a, b in sorted(halves, key=lambda pair: (ids[pair[0]], ids[pair[1]]))]
    return found


def _bpe(
    vocabulary: _Vocabulary,
    merges: list[list[str]],
    *,
    ignore_merges: bool = False,
    byte_fallback: bool = False,
    unknown: str | None = None,
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": unknown is not None,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": vocabulary.ids,
        "merges": merges,
    }


def _tokenizer(
    vocabulary: _Vocabulary,
    *,
    model: dict[str, Any],
    normalizer: dict[str, Any] | None,
    pre_tokenizer: dict[str, Any] | None,
    decoder: dict[str, Any],
    bos: str | None,
) -> dict[str, Any]:
    eos = vocabulary.token("eos_token_id") if vocabulary.flag("add_eos_token", False) else None
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {
            "id": number,
            "content": token,
            **flags,
            "special": vocabulary.types[number] != _USER_DEFINED,
        }
        for token, number in vocabulary.ids.items()
        if token and vocabulary.types[number] in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": _post_processor(vocabulary.ids, bos, eos),
        "decoder": decoder,
        "model": model,
    }


def _post_processor(
    ids: Mapping[str, int], bos: str | None, eos: str | None
) -> dict[str, Any] | None:
    """Writes the begin and end tokens that the file asks for."""
    if not bos and not eos:
        return None

    def around(sequence: str, number: int) -> list[dict[str, Any]]:
        def special(token: str | None) -> list[dict[str, Any]]:
            return [{"SpecialToken": {"id": token, "type_id": number}}] if token else []

        return [*special(bos), {"Sequence": {"id": sequence, "type_id": number}}, *special(eos)]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": {
            token: {"id": token, "ids": [ids[token]], "tokens": [token]}
            for token in (bos, eos)
            if token
        },
    }
