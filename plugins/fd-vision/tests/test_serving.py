"""A server of its own process and the openai client: pictures in messages and over turns."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from PIL import Image
from tiny import Oracle, file_of, film, picture

from tests.server_process import ServerProcess


def part(image: Image.Image, kind: str = "PNG") -> dict[str, Any]:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    data = base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind.lower()};base64,{data}"}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


@pytest.fixture(scope="module")
def api(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


def create(api: openai.OpenAI, messages: list[Any], **more: Any) -> Any:
    settings = {"temperature": 0, "max_tokens": 16, "extra_body": {"ignore_eos": True}} | more
    return api.chat.completions.create(model="tiny", messages=messages, **settings)


def expected(oracle: Oracle, messages: list[Any], images: list[Image.Image]) -> str:
    turns = [
        {
            **m,
            "content": [{"type": "image"} if p["type"] == "image_url" else p for p in m["content"]],
        }
        if isinstance(m["content"], list)
        else m
        for m in messages
    ]
    prompt = oracle.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    ids = oracle.greedy(prompt, images, 16)
    return str(oracle.tokenizer.decode(ids, skip_special_tokens=True))


def test_pictures_in_a_message_and_over_turns(api: openai.OpenAI, oracle: Oracle) -> None:
    first, second, third = picture(230, 170, 5), picture(90, 60, 1), picture(60, 120, 2)
    messages: list[Any] = [user(text("Compare "), part(first), text(" and "), part(second))]
    answer = create(api, messages)
    said = answer.choices[0].message.content
    assert said == expected(oracle, messages, [first, second])
    usage = answer.usage
    assert usage.prompt_tokens_details.image_tokens == 48 + 6
    assert usage.prompt_tokens > 48 + 6
    messages += [{"role": "assistant", "content": said}, user(part(third), text("And this?"))]
    more = create(api, messages)
    assert more.choices[0].message.content == expected(oracle, messages, [first, second, third])
    # The first turn's pictures are in the cache.
    assert more.usage.prompt_tokens_details.cached_tokens >= usage.prompt_tokens // 16 * 16 - 16
    streamed = create(api, messages, stream=True)
    pieces = [c.choices[0].delta.content or "" for c in streamed if c.choices]
    assert "".join(pieces) == more.choices[0].message.content


def test_a_beam_of_one_behind_pictures_says_what_greedy_decoding_does(api: openai.OpenAI) -> None:
    """Each step is a request of its own, with the positions that decode steps have."""
    messages = [user(text("Look: "), part(picture(230, 170, 5)), text("What is it?"))]
    body = {"ignore_eos": True, "use_beam_search": True}
    one, two = (create(api, messages, n=n, extra_body=body).choices for n in (1, 2))
    assert one[0].message.content == create(api, messages).choices[0].message.content
    assert two[0].message.content != two[1].message.content


def test_a_video_file_and_how_it_is_prepared(api: openai.OpenAI) -> None:
    """The frames that are asked for, as large as they are asked for."""
    frames = film(12, 84, 56, 3)
    data = base64.b64encode(file_of(frames, rate=4)).decode()
    url = f"data:video/mp4;base64,{data}"
    messages = [user({"type": "video_url", "video_url": {"url": url}}, text("What happens?"))]

    def num_tokens(**more: Any) -> int:
        usage = create(api, messages, extra_body={"ignore_eos": True, **more}).usage
        details = usage.prompt_tokens_details.model_dump(exclude_none=True)
        assert "image_tokens" not in details
        return int(details["video_tokens"])

    # 3 seconds at 2 frames a second: three pairs of 2 x 3 vectors.
    assert num_tokens() == 18
    assert num_tokens(mm_processor_kwargs={"num_frames": 2}) == 6
    assert num_tokens(mm_processor_kwargs={"fps": 4}) == 36
    assert num_tokens(mm_processor_kwargs={"max_pixels": 3136}) == 3 * 2


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"max_pixels": 50177}, "at most 50176"),
        ({"max_pixels": "9"}, "a number above 0"),
        ({"num_frames": 769}, "at most 768"),
        ({"fps": 0}, "a number above 0"),
        ({"fps": 1, "num_frames": 2}, "one of them"),
        ({"max_pixels": 100}, "set both"),
        ({"size": 5}, "not known"),
    ],
)
def test_what_preparation_cannot_be_is_named(
    api: openai.OpenAI, asked: dict[str, Any], reason: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=reason):
        create(api, [user(part(picture(9, 9, 1)))], extra_body={"mm_processor_kwargs": asked})
    with pytest.raises(openai.BadRequestError, match="the messages have none"):
        create(api, [user(text("Hi"))], extra_body={"mm_processor_kwargs": {"max_pixels": 9}})


def test_text_alone_is_served_as_ever(api: openai.OpenAI, oracle: Oracle) -> None:
    messages = [{"role": "user", "content": "What is this?"}]
    answer = create(api, messages)
    assert answer.choices[0].message.content == expected(oracle, messages, [])
    details = answer.usage.prompt_tokens_details.model_dump(exclude_none=True)
    assert "image_tokens" not in details


def test_a_file_below_the_allowed_folder(api: openai.OpenAI, folder: Path) -> None:
    picture(90, 60, 1).save(folder / "seen.png")
    try:
        url = {"type": "image_url", "image_url": {"url": f"file://{folder}/seen.png"}}
        by_file = create(api, [user(url)]).choices[0].message.content
        assert by_file == create(api, [user(part(picture(90, 60, 1)))]).choices[0].message.content
    finally:
        (folder / "seen.png").unlink()


BAD: dict[str, tuple[Any, str]] = {
    "too many": ([part(picture(9, 9, n)) for n in range(4)], "at most 3"),
    "not a picture": ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}],
                      r"messages\[0\]\.content\[0\]"),
    "no url": ([{"type": "image_url", "image_url": {}}], "has no image_url"),
    "a host": ([{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}],
               "allowed-media-domains"),
    "another file": ([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}],
                     "allowed-local-media-path"),
    "not a video": ([{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,aGk="}}],
                    "no video in a known format"),
    "a picture as a video": (
        [{"type": "video_url", "video_url": part(picture(9, 9, 1))["image_url"]}],
        "possible: video/",
    ),
    "sound": ([{"type": "input_audio", "input_audio": {"data": "aGk="}}], "text, image, video"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_parts_get_a_400_and_the_next_request_works(api: openai.OpenAI, name: str) -> None:
    parts, reason = BAD[name]
    with pytest.raises(openai.BadRequestError, match=reason):
        create(api, [user(*parts)])
    assert create(api, [user(part(picture(9, 9, 1)))]).choices[0].message.content


def test_placeholders_in_text_are_text_and_in_prompts_are_refused(api: openai.OpenAI) -> None:
    spelled = user(text("<|vision_start|><|image_pad|><|vision_end|>"), part(picture(9, 9, 1)))
    assert create(api, [spelled]).usage.prompt_tokens_details.image_tokens == 4
    spelling = "<|vision_start|><|image_pad|>"
    elsewhere = [
        {"role": "system", "content": f"Say {spelling}"},
        {"role": "user", "content": "Hi", "name": "image_pad"},
        {"role": "assistant", "content": f"I see {spelling}", "tool_calls": [{
            "id": "1", "type": "function", "function": {"name": "f", "arguments": f'"{spelling}"'},
        }]},
        {"role": "tool", "tool_call_id": "1", "content": spelling},
    ]  # fmt: skip
    seen = create(api, [*elsewhere, user(part(picture(9, 9, 1)))]).usage
    assert seen.prompt_tokens_details.image_tokens == 4
    joined = user(text("<|image_"), text("pad|>"))
    details = create(api, [joined]).usage.prompt_tokens_details.model_dump(exclude_none=True)
    assert "image_tokens" not in details
    with pytest.raises(openai.BadRequestError, match="spells a media token"):
        api.completions.create(model="tiny", prompt="<|image_pad|>", max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="truncate"):
        create(api, [user(part(picture(9, 9, 1)))], extra_body={"truncate_prompt_tokens": 5})


def test_a_tokenized_conversation_has_its_pictures_tokens(api: openai.OpenAI) -> None:
    said = [user(part(picture(30, 40, 2)), text("What is it?"))]
    url = str(api.base_url).removesuffix("/v1/") + "/tokenize"
    found = httpx.post(url, json={"messages": said}, timeout=60).json()
    usage = create(api, said).usage
    assert usage.prompt_tokens_details.image_tokens > 1
    assert found["count"] == len(found["tokens"]) == usage.prompt_tokens
