"""`fastdeploy launch` with real servers on the demo model."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

MODEL = Path(__file__).resolve().parents[3] / "models" / "ernie-tiny"
SERVE = ("--max-num-seqs", "8", "--max-model-len", "512")


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 90) -> Any:
    """The first true value of a condition."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"waited {timeout_s} s for {what}")


def free_port() -> int:
    """The first of two ports that nobody listens at."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as one:
            port = int(one.getsockname()[1])
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except (OSError, OverflowError):
                continue
            return port


class Command:
    """`fastdeploy` with these words; its log is kept."""

    def __init__(self, *words: str) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("FD_")}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fastdeploy_core.cli.main", *words],
            env={**kept, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.log = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log += line

    def found(self, pattern: str) -> str:
        """The first group of a line in the log; waits for it."""

        def look() -> re.Match[str] | None:
            match = re.search(pattern, self.log)
            assert match or self.process.poll() is None, self.log
            return match

        return str(wait_for(look, pattern)[1])

    def stop(self) -> int:
        """Its exit code after SIGTERM."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(40)
        finally:
            self.process.kill()
            self._reader.join(10)
        return self.process.returncode


@pytest.fixture
def command() -> Iterator[Callable[..., Command]]:
    """Starts commands that the test ends with."""
    started: list[Command] = []

    def start(*words: str) -> Command:
        started.append(Command(*words))
        return started[-1]

    yield start
    for one in started:
        one.stop()


def _launch(command: Callable[..., Command], *more: str) -> tuple[Command, str, list[str]]:
    """A running launch, the router's URL, and those of two servers."""
    ports = ("--port", str(free_port()), "--instance-port", str(free_port()))
    launched = command("launch", str(MODEL), "-n", "2", *ports, "--grace", "10", *SERVE, *more)
    url = launched.found(r"routing at (http://\S+)")
    servers = [f"http://{one}" for one in launched.found(r"servers: (.+)").split(", ")]
    wait_for(lambda: httpx.get(f"{url}/health").json()["instances"] == 2, "both servers")
    return launched, url, servers


def _answers(url: str) -> list[object]:
    """What any client does: a chat, a completion, a stream, and many at a time."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
    model = client.models.list().data[0].id

    def completion(number: int) -> str:
        prompt = f"Number {number} is"
        done = client.completions.create(model=model, prompt=prompt, max_tokens=16, temperature=0)
        return done.choices[0].text

    chat = {"messages": [{"role": "user", "content": "Tell me a story"}], "model": model}
    whole = client.chat.completions.create(**chat, max_tokens=24, temperature=0)
    stream = client.chat.completions.create(**chat, max_tokens=24, temperature=0, stream=True)
    parts = [event.choices[0].delta.content or "" for event in stream if event.choices]
    with ThreadPoolExecutor(8) as threads:
        many = list(threads.map(completion, range(16)))
    return [whole.choices[0].message.content, "".join(parts), many]


def test_the_same_client_gets_the_same_greedy_answers_everywhere(
    command: Callable[..., Command],
) -> None:
    """From one engine, from two behind one port, and from two servers behind the router."""
    found = []
    for more in ((), ("--data-parallel-size", "2")):
        server = command("serve", str(MODEL), "--port", "0", *SERVE, *more)
        found.append(_answers(server.found(r"serving .* at (http://\S+)")))
        server.stop()
    launched, url, servers = _launch(command)
    found.append(_answers(url))
    metrics = httpx.get(f"{url}/metrics").text
    counts = re.findall(
        r'fastdeploy_router_requests_total\{instance="(\S+?)",status="200"', metrics
    )
    assert {f"http://{name}" for name in counts} == set(servers), "one server answered everything"
    assert found[0][0] == found[0][1] != ""
    assert found[1] == found[0]
    assert found[2] == found[0]
    assert launched.stop() == 0


def test_a_server_that_dies_is_started_again_and_nobody_notices(
    command: Callable[..., Command],
) -> None:
    launched, url, servers = _launch(command)
    body = {"prompt": "Once", "max_tokens": 200, "temperature": 0, "ignore_eos": True}

    def streamed() -> tuple[str, list[Any]]:
        text, errors = "", []
        sent = {**body, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=sent, timeout=60) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    errors += [event["error"]] if "error" in event else []
                    text += "".join(choice["text"] for choice in event.get("choices", ()))
        return text, errors

    expected, errors = streamed()
    assert expected
    assert not errors
    # The child of the launch that listens there.
    port = servers[0].rpartition(":")[2]
    children = Path(f"/proc/{launched.process.pid}/task/{launched.process.pid}/children")
    lines = {int(c): Path(f"/proc/{c}/cmdline").read_bytes() for c in children.read_text().split()}
    (server,) = [c for c, words in lines.items() if b"--port\0" + port.encode() in words]
    with ThreadPoolExecutor(6) as threads:
        streams = [threads.submit(streamed) for _ in range(6)]
        wait_for(lambda: "requests_in_flight" in httpx.get(f"{url}/metrics").text, "streams")
        os.kill(server, signal.SIGKILL)
        for stream in streams:
            assert stream.result(90) == (expected, [])
    launched.found(r"(ended with -9; starting it again)")
    wait_for(lambda: httpx.get(f"{url}/health").json()["instances"] == 2, "the server to return")
    assert launched.stop() == 0
    for one in (url, *servers):
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{one}/health")


def test_what_cannot_work_is_said_at_once(command: Callable[..., Command]) -> None:
    wrong = {
        ("--launcher", "nowhere"): "no launcher driver 'nowhere'",
        ("--launcher", "static"): "needs --ips",
        ("--launcher-config", "x=1"): "has no option 'x'",
        ("--launcher-config", "x"): "give KEY=VALUE",
        ("-n", "0"): "below 1",
        ("--uds", "x"): "for the launcher to say",
    }
    for words, said in wrong.items():
        one = command("launch", str(MODEL), *words)
        assert one.process.wait(60) == 1
        one.stop()
        assert said in one.log, one.log


def test_mistakes_are_one_line_and_what_is_not_launchs_goes_to_the_servers_as_it_is(
    command: Callable[..., Command],
) -> None:
    for words, said in {(): "no model given", ("m", "-n", "x"): "invalid int value: 'x'"}.items():
        one = command("launch", *words)
        assert one.process.wait(60) == 1
        one.stop()
        assert said in one.log and one.log.count("\n") == 1, one.log
    # the word after an option of the servers was taken for the model
    one = command("launch", "--max-num-seqs", "4", "/nowhere/m", "--port", str(free_port()))
    one.process.wait(60)
    one.stop()
    assert "/nowhere/m" in one.log and "unexpected" not in one.log, one.log


def test_nothing_is_left_of_a_launch_that_was_killed(command: Callable[..., Command]) -> None:
    launched, url, servers = _launch(command)
    launched.process.kill()

    def is_free(one: str) -> bool:
        try:
            socket.create_connection(("127.0.0.1", int(one.rpartition(":")[2]))).close()
        except ConnectionRefusedError:
            return True
        return False

    wait_for(lambda: all(map(is_free, (url, *servers))), "all ports to be free", 20)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--max-num-sqes", "4"), "did you mean --max-num-seqs"),
        (("--device", "nowhere"), "nowhere"),
        (("--reasoning-parser", "nope"), "no reasoning parser 'nope'"),
        (("--load-format", "dummy", "--max-model-len", "9999999"), "9999999"),
    ],
)
def test_servers_that_can_never_start_end_the_launch_at_once(
    command: Callable[..., Command], words: tuple[str, ...], said: str
) -> None:
    one = command("launch", str(MODEL), "--port", str(free_port()), *words)
    assert one.process.wait(60) == 2
    one.stop()
    assert said in one.log
    assert "cannot start as it was asked to" in one.log
    assert "starting it again" not in one.log
