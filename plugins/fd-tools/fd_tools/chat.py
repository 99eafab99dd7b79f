"""`fastdeploy chat` and `fastdeploy complete`: talk to a running server from a terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from fastdeploy_core.contracts.command import CommandParser

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
    print(f"model {model}; an empty line or Ctrl-D ends", file=sys.stderr)
    for line in _lines():
        talk.say(line)
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
    """A conversation that grows."""

    def __init__(self, client: Client, model: str, arguments: argparse.Namespace) -> None:
        self._client = client
        self._body = {"model": model, **_options(arguments)}
        self._messages: list[dict[str, str]] = []
        if arguments.system_prompt:
            self._messages.append({"role": "system", "content": arguments.system_prompt})

    def say(self, text: str) -> None:
        """One turn."""
        self._messages.append({"role": "user", "content": text})
        body = {**self._body, "messages": self._messages}
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
        self._messages.append({"role": "assistant", "content": answer})


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
