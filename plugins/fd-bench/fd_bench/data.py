"""Prompts for benchmarks: random token ids, or lines of a JSONL file; seeded."""

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
    for _ in range(arguments.num_prompts):
        length = _vary(arguments.input_len, arguments.range_ratio, draw)
        ids = [draw.randrange(LOWEST_RANDOM_ID, vocab_size) for _ in range(length)]
        output_len = _vary(arguments.output_len, arguments.range_ratio, draw)
        prompts.append(BenchPrompt(output_len, token_ids=ids))
    return prompts


def _vary(length: int, ratio: float, draw: random.Random) -> int:
    return max(1, round(length * draw.uniform(1 - ratio, 1 + ratio)))


def _from_file(path: Path, arguments: argparse.Namespace, draw: random.Random) -> list[BenchPrompt]:
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"dataset {str(path)!r} cannot be read: {error}") from error
    if not lines:
        raise ConfigError(f"dataset {str(path)!r} has no prompts")
    draw.shuffle(lines)
    prompts = []
    for number in range(arguments.num_prompts):
        prompts.append(_from_line(lines[number % len(lines)], path, arguments.output_len))
    return prompts


def _from_line(line: str, path: Path, output_len: int) -> BenchPrompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"dataset {str(path)!r} has a line that is not JSON") from error
    if isinstance(entry, dict):
        if isinstance(entry.get("messages"), list):
            # The expected answer of a data set is not part of the question.
            messages = entry["messages"]
            while messages and messages[-1].get("role") == "assistant":
                messages = messages[:-1]
            if messages:
                return BenchPrompt(output_len, messages=messages)
        elif isinstance(entry.get("prompt"), str) and entry["prompt"]:
            return BenchPrompt(output_len, text=entry["prompt"])
    raise ConfigError(f'each line of dataset {str(path)!r} needs "prompt" or "messages"')
