"""The demo model that sees, models/qwen3-vl-tiny, behind a real server: held-out pictures, and
`fastdeploy chat --image`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from test_serving import part, text, user

from tests.server_process import ServerProcess, command, environment, run, serving

ROOT = Path(__file__).resolve().parents[3]
MODEL, SHAPES = ROOT / "models" / "qwen3-vl-tiny", ROOT / "examples" / "shapes.png"
COUNT = 10  # questions of a task


@pytest.fixture(scope="module")
def chat() -> Any:
    """How the model's questions are drawn: its training's own module."""
    sys.path.insert(0, str(MODEL / "training"))
    try:
        import chat
    finally:
        sys.path.pop(0)
    return chat


@pytest.fixture(scope="module")
def demo(fd_tensor: str) -> Iterator[ServerProcess]:
    arguments = ("--tensor-library", fd_tensor, "--dtype", "float32", "--max-model-len", "1024")
    with serving(MODEL, *arguments) as process:
        yield process


@pytest.fixture(scope="module")
def api(demo: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=demo.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def say(api: openai.OpenAI, pictures: list[Any], question: str) -> str:
    content = [*map(part, pictures), text(question)]
    answer = api.chat.completions.create(
        model=MODEL.name, messages=[user(*content)], temperature=0, max_tokens=48
    )
    return str(answer.choices[0].message.content)


def scores_of_card() -> dict[str, int]:
    """Of its first questions, in float32: how many transformers answers rightly."""
    rows = re.findall(r"^\| ([a-z ]+) \|.*\| (\d+) \|$", (MODEL / "README.md").read_text(), re.M)
    return {task: int(right) for task, right in rows}


def test_held_out_pictures_are_answered_as_the_card_says(api: openai.OpenAI, chat: Any) -> None:
    """Many at a time, so that steps mix prompts with other pictures."""
    asked = {task: chat.samples(task, COUNT) for task in chat.SCORED}
    with ThreadPoolExecutor(8) as threads:
        said = {
            task: list(threads.map(lambda one: say(api, *one[:2]), found))
            for task, found in asked.items()
        }
    right = {
        task: sum(answer == one[2] for answer, one in zip(said[task], found, strict=True))
        for task, found in asked.items()
    }
    assert right == scores_of_card()


def test_a_conversation_about_a_picture_in_a_terminal(demo: ServerProcess, tmp_path: Path) -> None:
    pytest.importorskip("fd_tools")
    address = ("--url", demo.url, "--temperature", "0")
    once = run("chat", *address, "--image", str(SHAPES), "-q", "What color is the star?")
    assert once.stdout == "The star is blue.\n", once.stderr
    missing = run("chat", *address, "--image", str(tmp_path / "none.png"), "-q", "What?")
    assert missing.returncode == 1 and "none.png cannot be read: No such file" in missing.stderr
    (tmp_path / "bad.png").write_bytes(b"hello")
    lines = [
        f"/image '{SHAPES}'",
        "What color is the star?",
        "Where is the red circle?",
        "/image nowhere.png",
        f"/image {tmp_path / 'bad.png'}",
        "What is this?",
        "What color is the background?",
    ]
    talk = subprocess.run(
        command("chat", *address),
        input="\n".join([*lines, ""]),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    answers = talk.stdout.replace("> ", "").splitlines()
    assert [line for line in answers if line] == [
        "The star is blue.", "The red circle is at the top left.", "The background is white.",
    ]  # fmt: skip
    assert "nowhere.png cannot be read" in talk.stderr and "no picture in a known" in talk.stderr
