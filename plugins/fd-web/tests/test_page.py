"""The page in Chromium, against a server of its own process."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageStat

from tests.server_process import ServerProcess

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or ""
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM, reason="no chromium; run: apt install chromium"),
]
sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")

PIXEL = bytes.fromhex(  # a PNG of one red pixel
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c4944415408d763f8cf"
    "c0000003010100c9fe92ef0000000049454e44ae426082"
)
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def open_page(browser: Any, server: ServerProcess) -> Iterator[Open]:
    """Opens the page; in the end, nothing has left the host and no script has failed."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    asked: list[str] = []
    problems: list[str] = []

    def opened(key: str = "sesame", at: str = "/") -> Any:
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(server.url + at)
        page.get_by_label("API key").fill(key)
        page.get_by_role("button", name="Continue").click()
        return page

    yield opened
    context.close()
    assert asked and all(url.startswith((server.url + "/", "data:")) for url in asked)
    assert not problems


def ask(page: Any, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.get_by_role("button", name="Send").click()


def answer_with(page: Any, *deltas: dict[str, Any]) -> list[Any]:
    """The next answers consist of these deltas; returns what the page asks."""
    bodies: list[Any] = []

    def fulfil(route: Any) -> None:
        bodies.append(json.loads(route.request.post_data))
        chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        chunks.append({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}})
        text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        route.fulfill(body=text, content_type="text/event-stream")

    page.route("**/v1/chat/completions", fulfil)
    return bodies


def test_an_answer_of_the_model_arrives_and_is_counted(open_page: Open) -> None:
    page = open_page()
    page.locator(".health.ready").wait_for()
    ask(page, "How many legs does a cat have?")
    page.locator(".message.assistant footer").wait_for(timeout=60_000)
    assert "4" in page.locator(".message.assistant .text").inner_text()
    assert "tokens/s" in page.locator(".message.assistant footer").inner_text()
    requests = page.locator(".tile", has_text="Requests").locator(".value")
    sync_api.expect(requests).not_to_have_text("0", timeout=20_000)
    first = page.get_by_role("row", name="First token")
    sync_api.expect(first).to_contain_text("s", timeout=20_000)


def test_behind_a_proxy_all_is_asked_below_its_path(open_page: Open) -> None:
    page, asked = open_page(at="/below/"), []
    page.on("request", lambda request: asked.append(request.url))
    page.reload()
    page.locator(".health.ready").wait_for()
    ask(page, "How many legs does a cat have?")
    page.locator(".message.assistant footer").wait_for(timeout=60_000)
    page.get_by_text("Installed plugins").click()
    page.locator(".lines li", has_text="fd-web").wait_for()
    asked += page.goto(page.url + "docs") and [page.locator("a").first.evaluate("a => a.href")]
    paths = {url.partition("://")[2].partition("/")[2] for url in asked}
    assert all(path.startswith("below/") for path in paths), paths
    assert {"below/v1/chat/completions", "below/ui/docs.css", "below/openapi.json"} <= paths


def test_the_state_says_why_each_plugin_was_chosen(open_page: Open) -> None:
    page = open_page()
    device = page.locator(".why li", has_text="device cpu")
    assert "asked for by name" in device.inner_text()
    page.get_by_text("Installed plugins").click()
    page.locator(".lines li", has_text="fd-web").wait_for()


def test_screenshots_fit_their_width_and_follow_the_systems_colours(open_page: Open) -> None:
    page = open_page()
    answer_with(page, {"content": "A long word: " + "x" * 300 + "\n\n    " + "code " * 60})
    ask(page, "Show me.")
    page.get_by_text("A long word").wait_for()
    for width in (1280, 390):  # a phone's
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") == width
        grey = {}
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            shot = Image.open(io.BytesIO(page.screenshot())).convert("L")
            darkest, lightest = shot.getextrema()
            assert lightest - darkest > 150  # text can be told from what is behind it
            grey[scheme] = ImageStat.Stat(shot).mean[0]
        assert grey["light"] > 180 and grey["dark"] < 75, grey


def test_a_wrong_key_shows_nothing(open_page: Open) -> None:
    page = open_page("guess")
    page.wait_for_timeout(300)
    assert page.get_by_label("API key").is_visible()
    assert not page.locator(".live").count()


def test_thinking_is_folded_away_behind_the_answer(open_page: Open) -> None:
    page = open_page()
    answer_with(page, {"reasoning_content": "Cats walk."}, {"content": "Four."})
    ask(page, "Legs?")
    page.locator(".message.assistant footer").wait_for()
    assert page.locator(".message.assistant .text").inner_text() == "Four."
    thoughts = page.locator(".thinking")
    assert not thoughts.get_by_text("Cats walk.").is_visible()
    thoughts.get_by_text("Thoughts").click()
    assert thoughts.get_by_text("Cats walk.").is_visible()


def test_a_tool_is_offered_called_and_answered(open_page: Open) -> None:
    page = open_page()
    call = {"index": 0, "id": "call-1", "function": {"name": "get_weather", "arguments": '{"ci'}}
    rest = {"index": 0, "function": {"arguments": 'ty": "Oslo"}'}}
    bodies = answer_with(page, {"tool_calls": [call]}, {"tool_calls": [rest]})
    page.get_by_text("Options").click()
    page.get_by_role("button", name="Example tool").click()
    ask(page, "Weather in Oslo?")
    page.get_by_text('get_weather({"city": "Oslo"})').wait_for()
    page.unroute("**/v1/chat/completions")
    bodies += answer_with(page, {"content": "Rain."})
    after = answer_with(page, {"content": "Rain."})
    page.get_by_label("Result of the tool").fill("rain")
    page.get_by_role("button", name="Give result").click()
    page.get_by_text("Rain.").wait_for()
    assert bodies[0]["tools"][0]["function"]["name"] == "get_weather"
    assert after[0]["messages"][-1] == {
        "role": "tool", "tool_call_id": "call-1", "content": "rain",
    }  # fmt: skip
    assert after[0]["messages"][-2]["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'


def test_a_picture_goes_along(open_page: Open, tmp_path: Path) -> None:
    page = open_page()
    bodies = answer_with(page, {"content": "Red."})
    (tmp_path / "red.png").write_bytes(PIXEL)
    page.locator("input[type=file]").set_input_files(tmp_path / "red.png")
    page.get_by_alt_text("attached").wait_for()
    ask(page, "Which colour?")
    page.get_by_text("Red.").wait_for()
    picture, text = bodies[0]["messages"][0]["content"]
    assert picture["image_url"]["url"].startswith("data:image/png;base64,")
    assert text == {"type": "text", "text": "Which colour?"}


def test_what_a_model_writes_runs_and_loads_nothing(open_page: Open) -> None:
    page = open_page()
    answer_with(
        page,
        {"content": "![a](http://198.51.100.7/a.png) <img src=http://198.51.100.7/b onerror=x()>"},
        {"content": "\n\n<script>window.hacked = 1</script> [c](javascript:window.hacked=1)\n\n"},
        {"content": "`code` **bold**"},
    )
    ask(page, "Attack")
    page.locator(".message.assistant strong", has_text="bold").wait_for()
    assert page.evaluate("window.hacked") is None
    assert not page.locator(".message.assistant img, .message.assistant script").count()
    assert not page.locator(".message.assistant a[href^=javascript]").count()


def test_an_error_of_the_server_is_shown(open_page: Open) -> None:
    page = open_page()
    page.get_by_text("Options").click()
    page.get_by_label("Tools, as JSON").fill('[{"type": "function"}]')
    ask(page, "x")
    alert = page.get_by_role("alert")
    alert.wait_for()
    assert "tools[0]" in alert.inner_text()


def test_a_stopped_answer_stays(open_page: Open) -> None:
    page = open_page()
    page.get_by_text("Options").click()
    page.get_by_label("Most tokens").fill("900")
    page.route(
        "**/v1/chat/completions",
        lambda route: route.continue_(
            post_data=json.dumps({**json.loads(route.request.post_data), "min_tokens": 900})
        ),
    )
    ask(page, "Tell me a long story")
    page.locator(".message.assistant .text").wait_for(timeout=60_000)
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("button", name="Send").wait_for()
    page.get_by_role("button", name="New chat").click()
    assert not page.locator(".message").count()
