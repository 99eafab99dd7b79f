"""Calibration text: a file of lines, or of JSON lines, as token sequences of bounded length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastdeploy_core.errors import ConfigError, InvalidRequest
from fastdeploy_core.tokenizer import Tokenizer


def read_calibration(
    path: Path, tokenizer: Tokenizer, max_tokens: int, max_length: int
) -> list[list[int]]:
    """Sequences of at most max_length tokens, max_tokens in all; ConfigError if there are none.

    A line of a .jsonl file is {"text": ...} or {"messages": [...]}; messages go through the model's
    chat template. Any other file is text with a blank line between samples.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"calibration file {path} cannot be read: {reason}") from None
    samples: list[list[int]] = []
    left = max_tokens
    texts = _json_lines(path, content, tokenizer) if path.suffix == ".jsonl" else _plain(content)
    for text, is_chat in texts:
        # A chat template writes special tokens itself.
        ids = tokenizer.encode(text, not is_chat)
        for start in range(0, len(ids), max_length):
            part = ids[start : start + max_length][:left]
            if len(part) > 1:
                samples.append(part)
                left -= len(part)
        if left < 2:
            break
    if not samples:
        raise ConfigError(
            f"calibration file {path} holds no text; expected plain text with blank lines between "
            'samples, or .jsonl with {"text": ...} or {"messages": [...]} on each line'
        )
    return samples


def _plain(content: str) -> list[tuple[str, bool]]:
    return [(part.strip("\n"), False) for part in content.split("\n\n") if part.strip()]


def _json_lines(path: Path, content: str, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """(text, whether it was made from messages)."""
    texts = []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value: Any = json.loads(line)
            texts.append(_text(value, tokenizer))
        except (ValueError, TypeError, RecursionError, InvalidRequest) as error:
            raise ConfigError(
                f'{path}:{number} is no calibration sample: {error}; expected {{"text": "..."}} or '
                '{"messages": [...]}'
            ) from None
    return texts


def _text(value: Any, tokenizer: Tokenizer) -> tuple[str, bool]:
    if not isinstance(value, dict):
        raise ValueError(f"it is a {type(value).__name__}")
    if "messages" in value:
        return tokenizer.apply_chat_template(value["messages"], add_generation_prompt=False), True
    if not isinstance(value.get("text"), str):
        raise ValueError("it has neither a text nor messages")
    return value["text"], False
