"""Bodies that are read with few looks at them: what is refused is refused all the same."""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import random
import re
import resource
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_core.errors import InvalidRequest
from fastdeploy_core.serving.http import event_loop, json_body, threads
from fastdeploy_core.serving.http.errors import ApiError
from fastdeploy_core.serving.http.json_body import MAX_DEPTH, MAX_KEYS, MAX_VALUES, parse_json
from fastdeploy_core.serving.http.threads import Threads
from fastdeploy_core.serving.openai.schemas import common
from fastdeploy_core.serving.openai.schemas.chat import ChatCompletionRequest
from fastdeploy_core.serving.openai.schemas.common import SamplingFields
from fastdeploy_core.serving.openai.schemas.completion import CompletionRequest, split_prompts


def nested(levels: int) -> bytes:
    return b"[" * levels + b"1" + b"]" * levels


def test_depth_is_bounded_however_many_brackets_there_are() -> None:
    assert parse_json(b"[" + b"[],{}," * 500 + b"1]")[-1] == 1
    assert parse_json(nested(MAX_DEPTH)) is not None
    with pytest.raises(ApiError, match="deeper"):
        parse_json(b"[" + b"[],{}," * 500 + nested(MAX_DEPTH + 1) + b"]")


@pytest.mark.parametrize(
    "text", ["1e999", "-1E999", "[7,1.5e400]", "9223372036854775808", "0.1e1000", "1" * 5000]
)
def test_a_number_out_of_range_is_found_wherever_it_is(text: str) -> None:
    with pytest.raises(ApiError, match="not valid JSON"):
        parse_json(b'{"text":"1e3 and 12345678901234567","x":' + text.encode() + b"}")


@pytest.mark.parametrize("text", ["9223372036854775807", "-9223372036854775808", "1e3", "1.5E-3"])
def test_a_number_within_range_is_taken(text: str) -> None:
    assert parse_json(b"[" + text.encode() + b"]") == [
        float(text) if "e" in text.lower() else int(text)
    ]


@pytest.mark.parametrize(
    "prompt", [[1, True], [1, 2.0], [1, "2"], [[1, None]], [[3], [1, -1]], [], [[]]]
)
def test_a_prompt_of_other_things_than_ids_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequest):
        split_prompts(prompt)


def test_prompts_of_ids_are_one_or_many() -> None:
    assert split_prompts([1, 2, 3]) == [[1, 2, 3]]
    assert split_prompts([[1, 2], [3]]) == [[1, 2], [3]]


@pytest.mark.parametrize("request_of", [ChatCompletionRequest, CompletionRequest])
def test_what_a_call_does_not_give_is_the_models_default(
    request_of: type[SamplingFields],
) -> None:
    """A field with a default of its own would be dropped where it was not given."""
    names = common._SAME_NAME & set(request_of.model_fields)
    assert {name: request_of.model_fields[name].default for name in names} == dict.fromkeys(names)


@pytest.mark.parametrize(
    ("most", "value"),
    [
        (MAX_KEYS - 1, lambda n: {f"k{i}": i for i in range(n)}),
        (MAX_KEYS - 1, lambda n: [[] for _ in range(n)]),
        (MAX_KEYS // 2 - 1, lambda n: [{"k": "\\"} for _ in range(n)]),
        (MAX_VALUES, lambda n: list(range(n))),
        (MAX_VALUES, lambda n: ['"\\'] * n),
    ],
)
def test_parts_are_counted_before_they_are_parsed(most: int, value: Any) -> None:
    assert parse_json(json.dumps(value(most)).encode()) == value(most)
    unclosed = json.dumps(value(most + 2)).encode()[:-1]  # would be refused for that when parsed
    with pytest.raises(ApiError, match="too many parts"):
        parse_json(unclosed)


def test_quotes_alone_are_refused_before_they_are_split() -> None:
    with pytest.raises(ApiError, match="too many parts"):
        parse_json(b'[""' + b':""' * 4_000_000 + b"]")


@pytest.mark.parametrize("piece", [",", ":[{", '"', "\\", '\\",', '",":['])
def test_a_long_text_is_one_part_whatever_it_holds(piece: str) -> None:
    text = piece * (2 * MAX_VALUES)
    assert parse_json(json.dumps({"prompt": text}).encode()) == {"prompt": text}


def test_looking_in_pieces_finds_what_looking_at_all_at_once_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = re.compile(rb'"(?:[^"\\]|\\.)*"')
    for seed in range(500):
        draw = random.Random(seed)
        monkeypatch.setattr(json_body, "PIECE_BYTES", draw.choice([1, 2, 3, 5, 7, 64]))
        text = "".join(draw.choice('\\\\\\"":,[{a1 ') for _ in range(draw.randrange(40)))
        value = {"before": [1, 2], text: [text, {"x": text}, 3.5], "after": None}
        raw = json.dumps(value).encode()
        found = b"".join(piece for piece, _ in json_body._outside_texts(raw))
        assert found == texts.sub(b"", raw), (seed, text)


@pytest.mark.parametrize("text", ["1e999", "-1E999", "9223372036854775808"])
@pytest.mark.parametrize("shift", range(0, 24, 3))
def test_a_number_out_of_range_is_found_between_pieces(text: str, shift: int) -> None:
    head = b"[" + b" " * (json_body.PIECE_BYTES - 1 - shift)
    with pytest.raises(ApiError, match="not valid JSON"):
        parse_json(head + text.encode() + b', "1e3"' + b" " * json_body.PIECE_BYTES + b"]")
    fits = parse_json(head + b'123, "1e999 ' + b"x" * json_body.PIECE_BYTES + b'"]')
    assert fits[0] == 123


def test_a_body_that_is_refused_in_a_thread_is_let_go_at_once() -> None:
    """Bodies may have megabytes; what only the garbage collector finds stays for thousands of
    requests."""

    class Left(bytes):
        alive = 0

        def __init__(self, _: bytes) -> None:
            type(self).alive += 1

        def __del__(self) -> None:
            type(self).alive -= 1

    def refuse(raw: bytes) -> None:
        raise ApiError(400, f"{len(raw)} bytes")

    async def main() -> None:
        pool = Threads(2, 10, "test")
        for _ in range(5):
            with pytest.raises(ApiError):
                await pool.run("", refuse, Left(b"x"))
        pool.close()

    gc.collect()
    gc.disable()
    try:
        asyncio.run(main())
        deadline = time.monotonic() + 30  # for the pool's thread, which may still leave its frames
        while Left.alive and time.monotonic() < deadline:
            time.sleep(0.01)
        assert Left.alive == 0
    finally:
        gc.enable()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def take_between() -> object:
    pieces = [bytes(1000) for _ in range(60_000)]
    return pieces[-1]  # above all the others, so that they do not go back by themselves


held = threading.Barrier(3)


def take_end() -> object:
    held.wait()  # each thread has a heap of its own
    text = b"x" * 20_000_000
    held.wait()
    return text[0]


def goes_back(take: Callable[[], object], num_threads: int) -> bool:
    threads.TRIM_AFTER_S = 0.05

    async def main() -> bool:
        pool = Threads(num_threads, 4, "test")
        before = resident_bytes()
        kept = await asyncio.gather(*(pool.run("", take) for _ in range(num_threads)))
        for _ in range(200):
            if resident_bytes() < before + 10e6:
                return True
            await asyncio.sleep(0.05)
        return not kept

    return event_loop.run(main())


@pytest.mark.parametrize(("take", "num_threads"), [(take_between, 1), (take_end, 3)])
def test_memory_of_freed_bodies_goes_back_to_the_system(
    take: Callable[[], object], num_threads: int
) -> None:
    """An allocator that keeps 60 MB for later shows as growth of the server."""
    # A process of its own: where many threads have begun, new ones share heaps with them, and what
    # these hold lies above what is freed.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        assert process.submit(goes_back, take, num_threads).result(timeout=300)
