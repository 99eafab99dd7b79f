"""Pictures through both APIs, by the demo model that sees."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from server_process import REPOSITORY, ServerProcess, serving

MODEL = REPOSITORY / "models" / "qwen3-vl-tiny"
DATA = base64.b64encode((REPOSITORY / "examples" / "shapes.png").read_bytes()).decode()
ASKED = "What color is the star?"
BASE64 = {"type": "base64", "media_type": "image/png", "data": DATA}
BY_URL = {"type": "url", "url": f"data:image/png;base64,{DATA}"}


@pytest.fixture(scope="module")
def seeing(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    library = request.config.getoption("--fd-tensor") or "torch"
    options = ("--tensor-library", library, "--dtype", "float32", "--num-threads", "1")
    with serving(MODEL, *options) as process:
        yield process


@pytest.fixture
def claude(seeing: ServerProcess) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=seeing.url, api_key="x", max_retries=0)


@pytest.fixture
def oai(seeing: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="x", max_retries=0)


def _body(messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {"model": MODEL.name, "messages": messages}


@pytest.mark.parametrize("source", [BASE64, BY_URL])
def test_messages(claude: anthropic.Anthropic, source: dict[str, Any]) -> None:
    content = [{"type": "image", "source": source}, {"type": "text", "text": ASKED}]
    body = _body([{"role": "user", "content": content}])
    answer = claude.messages.create(**body, max_tokens=32, extra_body={"temperature": 0})
    assert "blue" in answer.content[0].text
    counted = claude.messages.count_tokens(**body).input_tokens
    assert counted == answer.usage.input_tokens > 20


def test_a_tool_shows_a_picture(claude: anthropic.Anthropic) -> None:
    """What the prompt holds; the demo model was never taught to look at tools' results."""
    use = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    texts = [{"type": "text", "text": "Here it is."}]

    def tokens(shown: list[dict[str, Any]]) -> int:
        result = {"type": "tool_result", "tool_use_id": "t1", "content": shown}
        turns = [
            {"role": "user", "content": ASKED},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]
        return claude.messages.count_tokens(**_body(turns)).input_tokens

    assert tokens([*texts, {"type": "image", "source": BASE64}]) > tokens(texts) + 10


def test_responses(oai: openai.OpenAI) -> None:
    picture = {"type": "input_image", "detail": "auto", "image_url": BY_URL["url"]}
    item = {"role": "user", "content": [picture, {"type": "input_text", "text": ASKED}]}
    answer = oai.responses.create(
        model=MODEL.name, input=[item], temperature=0, max_output_tokens=32, truncation="auto"
    )
    assert "blue" in answer.output_text
    with oai.responses.stream(
        model=MODEL.name, input=[item], temperature=0, max_output_tokens=32
    ) as stream:
        assert stream.get_final_response().output_text == answer.output_text


def test_what_cannot_be_seen(oai: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    by_id = {"type": "input_image", "file_id": "file_1"}
    with pytest.raises(openai.BadRequestError, match=r"input\.0\.content\.0\.image_url"):
        oai.responses.create(model=MODEL.name, input=[{"role": "user", "content": [by_id]}])
    in_chat = {"type": "image_url", "image_url": {"url": BY_URL["url"]}}
    with pytest.raises(openai.BadRequestError, match=r'possible here: .*"type": "input_image"'):
        oai.responses.create(model=MODEL.name, input=[{"role": "user", "content": [in_chat]}])
    with pytest.raises(anthropic.BadRequestError, match=r"possible here: .*source"):
        body = _body([{"role": "user", "content": [in_chat]}])
        claude.messages.create(**body, max_tokens=4)
    stored = {"type": "image", "source": {"type": "file", "file_id": "file_1"}}
    broken = {"type": "image", "source": {**BASE64, "data": "AAAA"}}
    said = {"type": "image", "source": BASE64}
    for role, block, field in (
        ("user", stored, "messages.0.content.0.source.type"),
        ("user", broken, "messages"),
        ("assistant", said, "messages.0.content.0"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=field.replace(".", r"\.")):
            claude.messages.create(**_body([{"role": role, "content": [block]}]), max_tokens=4)
