"""Prompts for benchmarks: random token ids, or entries of a file; seeded."""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdeploy_core.errors import ConfigError

# Special tokens are at both ends of most vocabularies; random prompts avoid the low end.
LOWEST_RANDOM_ID = 16
OUTPUT_LEN = 64
# The name of each text in lines of FastDeploy 2.x's files, and of the length of its answer.
TEXTS, LENGTHS = ("prompt", "text"), ("max_tokens", "max_dec_len")


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One prompt and the number of tokens to generate: text, token ids or messages."""

    output_len: int
    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None


def load_prompts(arguments: argparse.Namespace, vocab_size: int) -> list[BenchPrompt]:
    """As many prompts as asked for."""
    if not 0.0 <= arguments.range_ratio <= 0.9:
        raise ConfigError("--range-ratio must be between 0 and 0.9")
    draw = random.Random(arguments.dataset_seed)  # noqa: S311 - prompts, not secrets
    if arguments.dataset is not None:
        return _from_file(Path(arguments.dataset), arguments, draw)
    if vocab_size <= LOWEST_RANDOM_ID:
        raise ConfigError(f"random prompts need a vocabulary above {LOWEST_RANDOM_ID} tokens")
    prompts = []
    prefix = [draw.randrange(LOWEST_RANDOM_ID, vocab_size) for _ in range(arguments.prefix_len)]
    for _ in range(arguments.num_prompts):
        length = _vary(arguments.input_len, arguments.range_ratio, draw)
        ids = [draw.randrange(LOWEST_RANDOM_ID, vocab_size) for _ in range(length)]
        asked = arguments.output_len or OUTPUT_LEN
        output_len = _vary(asked, arguments.range_ratio, draw)
        prompts.append(BenchPrompt(output_len, token_ids=prefix + ids))
    return prompts


def _vary(length: int, ratio: float, draw: random.Random) -> int:
    return max(1, round(length * draw.uniform(1 - ratio, 1 + ratio)))


def _from_file(path: Path, arguments: argparse.Namespace, draw: random.Random) -> list[BenchPrompt]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"dataset {str(path)!r} cannot be read: {error}") from error
    try:
        if text.lstrip().startswith("["):
            entries = json.loads(text)
        else:
            entries = [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise ConfigError(f"dataset {str(path)!r} has a line that is not JSON") from error
    if not entries:
        raise ConfigError(f"dataset {str(path)!r} has no prompts")
    draw.shuffle(entries)
    numbers = range(arguments.num_prompts)
    return [_from_entry(entries[n % len(entries)], path, arguments.output_len) for n in numbers]


def _from_entry(entry: Any, path: Path, asked: int | None) -> BenchPrompt:
    if isinstance(entry, dict):
        said = next((n for name in LENGTHS if type(n := entry.get(name)) is int and n > 0), None)
        output_len = asked or said or OUTPUT_LEN
        messages = entry.get("messages")
        if isinstance(messages, list):
            # The expected answer of a data set is not part of the question.
            while messages and messages[-1].get("role") == "assistant":
                messages = messages[:-1]
            if messages:
                return BenchPrompt(output_len, messages=messages)
        turns = entry.get("conversations")  # ShareGPT's: the first one asks
        if isinstance(turns, list) and turns and isinstance(turns[0], dict):
            entry = {"prompt": turns[0].get("value")}
        text = next((t for name in TEXTS if isinstance(t := entry.get(name), str) and t), None)
        if text is not None:
            return BenchPrompt(output_len, text=text)
    raise ConfigError(
        f'each line of dataset {str(path)!r} needs "prompt", "messages", "text" or "conversations"'
    )
