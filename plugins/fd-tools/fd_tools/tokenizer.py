"""`fastdeploy tokenizer encode | decode | info | convert`: what a model's tokenizer does with a
text, and a tokenizer.json for folders without."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastdeploy_core.contracts.command import CommandParser
from fastdeploy_core.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    """Run one subcommand."""
    arguments = _parser().parse_args(argv)
    if arguments.command == "convert":
        from .sentencepiece import convert

        print(f"wrote {convert(Path(arguments.model))}")
        return 0
    from fastdeploy_core.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(arguments.model)
    command = {"encode": _encode, "decode": _decode, "info": _info}[arguments.command]
    result = command(tokenizer, arguments)
    if arguments.json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        for name, value in result.items():
            print(f"{name}: {value}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="fastdeploy tokenizer", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    encode = commands.add_parser("encode", help="text to token ids")
    encode.add_argument("text", nargs="?", help="default: standard input")
    encode.add_argument(
        "--no-special-tokens", action="store_true", help="leave out <s> and the like"
    )
    decode = commands.add_parser("decode", help="token ids to text")
    decode.add_argument("ids", nargs="+", help="ids, separated by spaces or commas")
    decode.add_argument("--skip-special-tokens", action="store_true")
    info = commands.add_parser("info", help="size, special tokens, chat template")
    convert = commands.add_parser(
        "convert", help="tokenizer.model (SentencePiece) to tokenizer.json"
    )
    convert.add_argument("--model", required=True, metavar="DIR")
    for command in (encode, decode, info):
        command.add_argument("--model", "--tokenizer", required=True, metavar="DIR")
        command.add_argument("--json", action="store_true", help="one JSON object")
    return parser


def _encode(tokenizer: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    text = sys.stdin.read() if arguments.text is None else arguments.text
    ids = tokenizer.encode(text, not arguments.no_special_tokens)
    return {"count": len(ids), "ids": ids, "tokens": [tokenizer.token_string(t) for t in ids]}


def _decode(tokenizer: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    words = [word for part in arguments.ids for word in part.replace(",", " ").split()]
    try:
        ids = [int(word) for word in words]
    except ValueError as error:
        raise ConfigError(f"token ids must be integers, got {' '.join(words)[:80]!r}") from error
    wrong = [t for t in ids if not 0 <= t < tokenizer.vocab_size]
    if wrong:
        raise ConfigError(f"token id {wrong[0]} is not one of 0 to {tokenizer.vocab_size - 1}")
    return {"text": tokenizer.decode(ids, arguments.skip_special_tokens)}


def _info(tokenizer: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    names = {i: tokenizer.token_string(i) for i in sorted(tokenizer.special_token_ids)}
    return {
        "path": str(tokenizer.path),
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": [tokenizer.token_string(t) for t in tokenizer.eos_token_ids],
        "num_special_tokens": len(names),
        "special_tokens": dict(list(names.items())[:32]),
        "chat_template": "yes" if tokenizer.chat_template else "no",
    }
