"""`fastdeploy tokenizer encode | decode | info | convert`: what a model's tokenizer does with a
text, and a tokenizer.json for folders without. FastDeploy 2.x's options instead of a word do the
same.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastdeploy_core.contracts.command import CommandParser
from fastdeploy_core.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    """Run one subcommand, or what the options ask for."""
    if argv and argv[0].startswith("-") and not {"-h", "--help"} & {*argv}:
        arguments = _options_parser().parse_args(argv)
        result = _asked(_load(arguments.model), arguments)
    else:
        arguments = _parser().parse_args(argv)
        if arguments.command == "convert":
            from .sentencepiece import convert

            print(f"wrote {convert(Path(arguments.model))}")
            return 0
        tokenizer = _load(arguments.model)
        if arguments.command == "encode":
            text = sys.stdin.read() if arguments.text is None else arguments.text
            result = _encode(tokenizer, text, not arguments.no_special_tokens)
        elif arguments.command == "decode":
            result = _decode(tokenizer, arguments.ids, arguments.skip_special_tokens)
        else:
            result = _info(tokenizer)
    if arguments.json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        for name, value in result.items():
            print(f"{name}: {value}")
    return 0


def _load(model: str) -> Any:
    """Of a folder, of a file in another format, or of a model that is named."""
    from fastdeploy_core.plugins.checkpoints import find_model
    from fastdeploy_core.tokenizer import Tokenizer

    path = Path(model)
    return Tokenizer.load(path if path.is_dir() else find_model(path, {}).tokenizer_path)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="fastdeploy tokenizer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="without a word: --model DIR [--encode TEXT] [--decode IDS] [--info]\n"
        "                [--vocab-size] [--vocab-export FILE] [--enable-mm] [--json]",
    )
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


def _options_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="fastdeploy tokenizer", description=__doc__)
    parser.add_argument("-m", "--model", "--model_name_or_path", required=True, metavar="DIR")
    parser.add_argument("-e", "--encode", metavar="TEXT")
    parser.add_argument("-d", "--decode", metavar="IDS")
    parser.add_argument("-i", "--info", action="store_true")
    parser.add_argument("-vs", "--vocab-size", action="store_true")
    parser.add_argument("-ve", "--vocab-export", metavar="FILE")
    parser.add_argument("-mm", "--enable-mm", action="store_true", help="changes nothing")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    return parser


def _asked(tokenizer: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if arguments.encode is not None:
        result |= _encode(tokenizer, arguments.encode, True)
    if arguments.decode is not None:
        result |= _decode(tokenizer, [arguments.decode], False)
    if arguments.vocab_size:
        result["vocab_size"] = tokenizer.vocab_size
    if arguments.info:
        result |= _info(tokenizer)
    if arguments.vocab_export:
        result["vocab_export"] = _export(tokenizer, Path(arguments.vocab_export))
    if not result:
        raise ConfigError("give --encode, --decode, --info, --vocab-size or --vocab-export")
    return result


def _export(tokenizer: Any, path: Path) -> str:
    """JSON from tokens to ids, or a line for each: its id, a tab, its text as Python writes it."""
    named = ((t, tokenizer.token_string(t)) for t in range(tokenizer.vocab_size))
    ids = {token: number for number, token in named if token is not None}
    if path.suffix.lower() == ".json":
        text = json.dumps(ids, ensure_ascii=False, indent=2)
    else:
        text = "\n".join(f"{number}\t{token!r}" for token, number in ids.items())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    return str(path)


def _encode(tokenizer: Any, text: str, with_special_tokens: bool) -> dict[str, Any]:
    ids = tokenizer.encode(text, with_special_tokens)
    return {"count": len(ids), "ids": ids, "tokens": [tokenizer.token_string(t) for t in ids]}


def _decode(tokenizer: Any, given: Sequence[str], skips_special_tokens: bool) -> dict[str, Any]:
    words = re.sub(r"[\[\],]", " ", " ".join(given)).split()
    try:
        ids = [int(word) for word in words]
    except ValueError as error:
        raise ConfigError(f"token ids must be integers, got {' '.join(words)[:80]!r}") from error
    wrong = [t for t in ids if not 0 <= t < tokenizer.vocab_size]
    if wrong:
        raise ConfigError(f"token id {wrong[0]} is not one of 0 to {tokenizer.vocab_size - 1}")
    return {"text": tokenizer.decode(ids, skips_special_tokens)}


def _info(tokenizer: Any) -> dict[str, Any]:
    names = {i: tokenizer.token_string(i) for i in sorted(tokenizer.special_token_ids)}
    return {
        "path": str(tokenizer.path),
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": [tokenizer.token_string(t) for t in tokenizer.eos_token_ids],
        "num_special_tokens": len(names),
        "special_tokens": dict(list(names.items())[:32]),
        "chat_template": "yes" if tokenizer.chat_template else "no",
    }
