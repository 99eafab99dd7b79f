"""A tokenizer's decoder as a chain of streaming steps over token strings.

Tokenizer files define their decoder as a chain over all tokens of a text at once. Each step here
gives the same text however the tokens are cut into pieces, shows nothing before it is certain, and
costs the same for each token independent of the length of the text.
"""

from __future__ import annotations

import codecs
import functools
import json
from collections.abc import Sequence
from typing import Any, Protocol

from tokenizers import Regex, decoders

REPLACEMENT = "\ufffd"
CACHED_TOKENS = 1 << 15  # tokens with cached spellings; nearly all tokens of a text are among them


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's visible characters for bytes: printable Latin-1 as itself, the rest from 256 up."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {chr(byte): byte for byte in kept}
    others = (byte for byte in range(256) if byte not in set(kept))
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return alphabet


BYTE_ALPHABET = _byte_alphabet()


@functools.lru_cache(CACHED_TOKENS)
def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; a token outside the alphabet encodes itself."""
    try:
        return bytes([BYTE_ALPHABET[char] for char in token])
    except KeyError:
        return token.encode()


def fallback_byte(token: str) -> int | None:
    """The byte of a token such as <0xE4>."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


class Step(Protocol):
    """One step of a decoder chain."""

    def push(self, tokens: list[str]) -> list[str]:
        """Take token strings; returns the text that is certain."""

    def finish(self) -> list[str]:
        """No more tokens follow."""

    def primed(self) -> list[str]:
        """Everything so far was the prompt's: drop it, but the first bytes of a character."""


class _Plain:
    """Base of steps that hold nothing back."""

    def push(self, tokens: list[str]) -> list[str]:
        return tokens

    def finish(self) -> list[str]:
        return []

    def primed(self) -> list[str]:
        return self.finish()


class _ByteLevel(_Plain):
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: list[str]) -> list[str]:
        text = self._decoder.decode(b"".join([byte_level_bytes(token) for token in tokens]))
        return [text] if text else []

    def finish(self) -> list[str]:
        return [self._decoder.decode(b"", True)]

    def primed(self) -> list[str]:
        return []


class _ByteFallback(_Plain):
    """A run of byte tokens is text if all of it is valid UTF-8, else one U+FFFD for each byte.

    So a run can only be shown when it has ended; the decoder is defined that way.
    """

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, tokens: list[str]) -> list[str]:
        out: list[str] = []
        for token in tokens:
            byte = fallback_byte(token)
            if byte is None:
                out += self.finish()
                out.append(token)
            else:
                self._run.append(byte)
        return out

    def finish(self) -> list[str]:
        if not self._run:
            return []
        try:
            out = [self._run.decode()]
        except UnicodeDecodeError:
            out = [REPLACEMENT] * len(self._run)
        self._run.clear()
        return out

    def primed(self) -> list[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        complete = decoder.decode(bytes(self._run))
        self._run[:] = decoder.getstate()[0]
        return [complete] if complete else []


class _PerToken(_Plain):
    """A step of the tokenizers library that looks at one token at a time."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder

    def push(self, tokens: list[str]) -> list[str]:
        return [self._decoder.decode([token]) for token in tokens]


class _ReplaceText(_Plain):
    def __init__(self, pattern: str, content: str) -> None:
        self._pattern = pattern
        self._content = content

    def push(self, tokens: list[str]) -> list[str]:
        return [token.replace(self._pattern, self._content) for token in tokens]


class _ReplaceInStream(_Plain):
    """A replacement after tokens were joined: a pattern may cross the border of two pieces."""

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern = pattern
        self._content = content
        self._held = ""

    def push(self, tokens: list[str]) -> list[str]:
        *done, rest = (self._held + "".join(tokens)).split(self._pattern)
        keep = next(
            (n for n in range(len(self._pattern) - 1, 0, -1) if rest.endswith(self._pattern[:n])), 0
        )
        self._held = rest[len(rest) - keep :]
        return [self._content.join([*done, rest[: len(rest) - keep]])]

    def finish(self) -> list[str]:
        held, self._held = self._held, ""
        return [held]


class _StripTokens(_Plain):
    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content = content
        self._start = start
        self._stop = stop

    def push(self, tokens: list[str]) -> list[str]:
        return [self._strip(token) for token in tokens]

    def _strip(self, token: str) -> str:
        begin, end = 0, len(token)
        while begin < min(self._start, len(token)) and token[begin] == self._content:
            begin += 1
        while len(token) - end < self._stop and end > 0 and token[end - 1] == self._content:
            end -= 1
        return token[begin:end]


class _StripStream(_Plain):
    """A strip after tokens were joined: it only affects the beginning and the end of the text."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content = content
        self._start = start
        self._stop = stop
        self._held = ""

    def push(self, tokens: list[str]) -> list[str]:
        text = self._held + "".join(tokens)
        while text and self._start:
            if text[0] != self._content:
                self._start = 0
            else:
                text, self._start = text[1:], self._start - 1
        keep = 0
        while keep < min(self._stop, len(text)) and text[len(text) - keep - 1] == self._content:
            keep += 1
        self._held = text[len(text) - keep :]
        return [text[: len(text) - keep]]

    def finish(self) -> list[str]:
        self._held = ""  # may have to be stripped
        return []


class _Metaspace(_Plain):
    def __init__(self, replacement: str, strip_first: bool) -> None:
        self._replacement = replacement
        self._strip_first = strip_first

    def push(self, tokens: list[str]) -> list[str]:
        out = [token.replace(self._replacement, " ") for token in tokens]
        if tokens and self._strip_first:
            out[0] = tokens[0].replace(self._replacement, "")
            self._strip_first = False
        return out


class _Words(_Plain):
    """A space before each token but the first, for files without a decoder and for WordPiece."""

    def __init__(self, prefix: str | None, cleanup: Any) -> None:
        self._prefix = prefix
        self._cleanup = cleanup
        self._first = True

    def push(self, tokens: list[str]) -> list[str]:
        out = []
        for token in tokens:
            if not self._first:
                joined = self._prefix is not None and token.startswith(self._prefix)
                token = token[len(self._prefix or "") :] if joined else " " + token
            self._first = False
            out.append(self._cleanup(token) if self._cleanup else token)
        return out


class _WordSuffix(_Plain):
    """A suffix such as </w> is a space, but not on the last token."""

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._held: str | None = None

    def push(self, tokens: list[str]) -> list[str]:
        if not tokens:
            return []
        waiting = [*([] if self._held is None else [self._held]), *tokens]
        self._held = waiting.pop()
        return [token.replace(self._suffix, " ") for token in waiting]

    def finish(self) -> list[str]:
        held, self._held = self._held, None
        return [] if held is None else [held.replace(self._suffix, "")]

    def primed(self) -> list[str]:
        return [token.replace(self._suffix, " ") for token in self.finish()]


class _WholeAtEnd(_Plain):
    """A step that needs all tokens (CTC, a regular expression over the joined text); its text is
    shown at the end."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self._tokens: list[str] = []

    def push(self, tokens: list[str]) -> list[str]:
        self._tokens += tokens
        return []

    def finish(self) -> list[str]:
        tokens, self._tokens = self._tokens, []
        return [self._decoder.decode(tokens)]


def describe_decoder(decoder: Any | None) -> list[dict[str, Any]]:
    """The decoder of a tokenizer as a flat list of its steps' settings."""
    if decoder is None:
        return []
    flat: list[dict[str, Any]] = []
    pending = [json.loads(decoder.__getstate__())]
    while pending:
        item = pending.pop(0)
        if item["type"] == "Sequence":
            pending = [*item["decoders"], *pending]
        else:
            flat.append(item)
    return flat


def make_steps(settings: Sequence[dict[str, Any]]) -> list[Step]:
    """Fresh streaming steps for one answer."""
    if not settings:
        return [_Words(None, None)]
    steps: list[Step] = []
    fused = False
    for item in settings:
        steps.append(_make_step(item, fused))
        fused = fused or item["type"] in ("Fuse", "ByteLevel", "CTC")
    return steps


def _make_step(item: dict[str, Any], fused: bool) -> Step:
    kind = item["type"]
    if kind == "ByteLevel":
        return _ByteLevel()
    if kind == "ByteFallback" and not fused:
        return _ByteFallback()
    if kind == "Fuse":
        return _Plain()
    if kind == "Strip":
        make = _StripStream if fused else _StripTokens
        return make(item["content"], item["start"], item["stop"])
    if kind == "Metaspace" and not fused:
        return _Metaspace(item["replacement"], item.get("prepend_scheme", "always") != "never")
    if kind == "Replace":
        pattern = item["pattern"].get("String")
        if pattern:
            return (_ReplaceInStream if fused else _ReplaceText)(pattern, item["content"])
        decoder = decoders.Replace(Regex(item["pattern"]["Regex"]), item["content"])
        return _WholeAtEnd(_Joined(decoder)) if fused else _PerToken(decoder)
    if kind == "WordPiece" and not fused:
        cleanup = decoders.WordPiece(item["prefix"], True) if item["cleanup"] else None
        return _Words(item["prefix"], (lambda token: cleanup.decode([token])) if cleanup else None)
    if kind == "BPEDecoder" and not fused:
        return _WordSuffix(item["suffix"])
    state = json.dumps(item).encode()
    decoder = getattr(decoders, kind)()
    decoder.__setstate__(state)
    return _WholeAtEnd(_Joined(decoder) if fused else decoder)


class _Joined:
    """Decodes several pieces as the one token that they were joined from."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder

    def decode(self, tokens: list[str]) -> str:
        text: str = self._decoder.decode(["".join(tokens)])
        return text


def push(steps: Sequence[Step], tokens: list[str]) -> str:
    """Send token strings through a chain."""
    for step in steps:
        tokens = step.push(tokens)
    return "".join(tokens)


def prime(steps: Sequence[Step], tokens: list[str]) -> None:
    """Feed a chain the tokens before the wanted text, without showing them."""
    for step in steps:
        tokens = [*step.push(tokens), *step.primed()]


def finish(steps: Sequence[Step]) -> str:
    """End a chain: what a step releases goes through the steps after it."""
    tokens: list[str] = []
    for step in steps:
        tokens = [*step.push(tokens), *step.finish()]
    return "".join(tokens)
