"""A server with what `plugins new` makes, as it stands: a kit does not show that it serves."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from fastdeploy_testing.new import create
from tests import server_process
from tests.plugins.test_template import build
from tests.plugins.wheels import environment, install

DEMO = server_process.REPOSITORY / "models" / "ernie-tiny"
LIMITS = ("--max-model-len", "1024", "--num-gpu-blocks-override", "64", "--num-threads", "1")
# (kind, distribution): what has to be named to take part
MADE = {
    ("tool_parser", "fd-mycalls"): ("--tool-call-parser", "mycalls"),
    ("reasoning_parser", "fd-mythoughts"): ("--reasoning-parser", "mythoughts"),
    ("logits_processor", "fd-mybias"): ("--logits-processors", "mybias"),
    ("grammar", "fd-mygrammar"): ("--guided-decoding-backend", "mygrammar"),
    ("kv_store", "fd-kv-mystore"): ("--kv-store", "mystore"),
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, tensor_library: str) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("made")
    site, arguments = folder / "site", ["--kv-store-config.path", str(folder / "blocks")]
    for (kind, name), words in MADE.items():
        install(site, build(create(name, folder, kind), folder))
        arguments += words
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_process, "environment", lambda: environment(site))
        with server_process.serving(
            DEMO, *LIMITS, *arguments, "--device", "cpu", "--tensor-library", tensor_library
        ) as server:
            with httpx.Client(base_url=server.url, timeout=60) as client:
                yield client
            assert "Traceback" not in server.log, server.log
        assert list((folder / "blocks").iterdir()), "the KV store was given nothing"


def ask(client: httpx.Client, text: str, **more: object) -> str:
    """The content of a whole answer."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 16, "temperature": 0}
    answer = client.post("/v1/chat/completions", json={**body, **more})
    assert answer.status_code == 200, answer.text
    content: str = answer.json()["choices"][0]["message"]["content"]
    return content


def test_an_answer_comes_through_all_of_them(client: httpx.Client) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert "Beijing" in ask(client, "The capital of China is Beijing. " * 20, tools=tools)


@pytest.mark.parametrize("choice", [["yes", "no"], ["Peking"]])
def test_a_choice_is_kept(client: httpx.Client, choice: list[str]) -> None:
    assert ask(client, "yes or no?", guided_choice=choice) in choice


def test_tokens_are_not_said_twice(client: httpx.Client) -> None:
    """What the template of a logits processor does to the tokens that a request names."""
    question = "What is the capital of China?"
    plain = ask(client, question)
    tokenized = client.post("/tokenize", json={"prompt": plain, "add_special_tokens": False})
    tokens = tokenized.json()["tokens"]
    assert len(set(tokens)) < len(tokens)
    assert ask(client, question, logits_processors_args={"mybias": tokens}) != plain
