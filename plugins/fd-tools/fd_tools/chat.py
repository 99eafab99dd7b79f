"""`fastdeploy chat` and `fastdeploy complete`: talk to a running server from a terminal."""

from __future__ import annotations

import argparse
import base64
import mimetypes
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fastdeploy_core.contracts.command import CommandParser
from fastdeploy_core.errors import ConfigError, FastDeployError

from .http_client import DEFAULT_URL, Client


def chat(argv: Sequence[str]) -> int:
    """`fastdeploy chat`."""
    return _talk("chat", argv)


def complete(argv: Sequence[str]) -> int:
    """`fastdeploy complete`."""
    return _talk("complete", argv)


def _talk(name: str, argv: Sequence[str]) -> int:
    arguments = _parser(name).parse_args(argv)
    client = Client(arguments.url, arguments.api_key)
    model = arguments.model_name or client.model()
    talk = (
        _Chat(client, model, arguments) if name == "chat" else _Complete(client, model, arguments)
    )
    if arguments.quick is not None:
        talk.say(arguments.quick)
        return 0
    pictures = "/image FILE shows a picture; " if name == "chat" else ""
    print(f"model {model}; {pictures}an empty line or Ctrl-D ends", file=sys.stderr)
    for line in _lines():
        try:
            talk.say(line)
        except FastDeployError as error:  # a refused turn or a mistyped file ends no conversation
            print(f"fastdeploy: error: {error}", file=sys.stderr)
    return 0


def _parser(name: str) -> argparse.ArgumentParser:
    what = "Chat with" if name == "chat" else "Complete text with"
    parser = CommandParser(prog=f"fastdeploy {name}", description=f"{what} a running server.")
    parser.add_argument("--url", default=DEFAULT_URL, help=f"its API (default: {DEFAULT_URL})")
    parser.add_argument("--model-name", help="default: the first of /v1/models")
    parser.add_argument("--api-key", help="default: OPENAI_API_KEY")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="send this, print the answer, end")
    parser.add_argument("--max-tokens", type=int, help="longest answer")
    parser.add_argument("--temperature", type=float, help="0: always the most likely token")
    if name == "chat":
        parser.add_argument("--system-prompt", help="instructions before the conversation")
        parser.add_argument(
            "--image",
            metavar="FILE",
            action="append",
            default=[],
            help="show a picture with the first message; may be given several times",
        )
    return parser


def _lines() -> Iterator[str]:
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        if not line.strip():
            return
        yield line


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
    return {name: value for name, value in given.items() if value is not None}


class _Chat:
    """A conversation that grows. Pictures go with the next message."""

    def __init__(self, client: Client, model: str, arguments: argparse.Namespace) -> None:
        self._client = client
        self._body = {"model": model, **_options(arguments)}
        self._messages: list[dict[str, Any]] = []
        if arguments.system_prompt:
            self._messages.append({"role": "system", "content": arguments.system_prompt})
        self._pictures = [_picture(file) for file in arguments.image]

    def say(self, text: str) -> None:
        """One turn, or `/image FILE`."""
        if text.startswith("/image "):
            self._pictures.append(_picture(text.removeprefix("/image ")))
            return
        parts = [*self._pictures, {"type": "text", "text": text}]
        asked = {"role": "user", "content": parts if self._pictures else text}
        self._pictures = []
        answer = self._answer([*self._messages, asked])
        self._messages += [asked, {"role": "assistant", "content": answer}]

    def _answer(self, messages: list[dict[str, Any]]) -> str:
        """Print the answer while it comes."""
        body = {**self._body, "messages": messages}
        answer = ""
        thinking = False
        for event in self._client.stream("/chat/completions", body):
            for choice in event.get("choices", []):
                delta = choice.get("delta", {})
                thought, content = delta.get("reasoning_content"), delta.get("content")
                if thought:
                    sys.stdout.write(("" if thinking else "[thinking] ") + thought)
                    thinking = True
                if content:
                    sys.stdout.write("\n\n" + content if thinking else content)
                    thinking = False
                    answer += content
                for call in delta.get("tool_calls") or []:
                    function = call["function"]
                    sys.stdout.write(function.get("name", "") + function.get("arguments", ""))
                sys.stdout.flush()
        print()
        return answer


def _picture(file: str) -> dict[str, Any]:
    """A part of a message. A terminal puts quotes around a file that is dropped on it."""
    path = Path(file.strip().strip("'\"")).expanduser()
    try:
        data = base64.b64encode(path.read_bytes()).decode()
    except OSError as error:
        raise ConfigError(f"the picture {path} cannot be read: {error.strerror}") from None
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}


class _Complete:
    """Each line is a prompt of its own."""

    def __init__(self, client: Client, model: str, arguments: argparse.Namespace) -> None:
        self._client = client
        self._body = {"model": model, **_options(arguments)}

    def say(self, text: str) -> None:
        """One prompt."""
        for event in self._client.stream("/completions", {**self._body, "prompt": text}):
            for choice in event.get("choices", []):
                sys.stdout.write(choice.get("text", ""))
                sys.stdout.flush()
        print()
