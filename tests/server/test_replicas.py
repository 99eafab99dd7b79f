"""Several engines behind one port (--data-parallel-size): the same answers as one gives, shared
load, known beginnings, deaths, drains, numbers of each."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from fastdeploy_core.types import SamplingParams
from fastdeploy_testing.fakes import NullModel
from tests.server_process import REPOSITORY, ServerProcess, run, serving
from tests.server_support import slowly, wait_for, write_null_model

NULL = ("--device", "null", "--block-size", "16", "--data-parallel-size", "2")
BODY = {"prompt": [1, 2, 3], "temperature": 0, "ignore_eos": True, "return_token_ids": True}
EITHER = ["1", pytest.param("2", marks=pytest.mark.slow)]  # --api-server-count
DEMO = REPOSITORY / "models" / "ernie-tiny"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_null_model(tmp_path_factory.mktemp("null"), step_s=0.005, num_blocks=512)


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers of 400 tokens take 12 seconds: long enough to be looked at."""
    return write_null_model(tmp_path_factory.mktemp("slow"), step_s=0.03, num_blocks=512)


@pytest.fixture(scope="module", params=["1", "2"], ids=["one_api_server", "two_api_servers"])
def server(slow_model: Path, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    with serving(slow_model, *NULL, "--api-server-count", request.param) as process:
        assert process.url
        yield process


def expected(prompt: list[int], count: int) -> list[int]:
    return NullModel(259).expected(prompt, count, SamplingParams(temperature=0.0))


def post(server: ServerProcess, **body: object) -> httpx.Response:
    """On a connection of its own."""
    return httpx.post(server.url + "/v1/completions", json={**BODY, **body}, timeout=60)


def tokens_of(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


class Stream:
    """A client that reads a streamed answer in a thread of its own; its first token has come."""

    def __init__(self, server: ServerProcess, prompt: list[int], max_tokens: int = 400) -> None:
        self._url = server.url + "/v1/completions"
        self._body = {**BODY, "prompt": prompt, "max_tokens": max_tokens, "stream": True}
        self._lines: list[str] = []
        self._has_begun, self._leaving = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self._has_begun.wait(60)

    def _read(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=60) as answer:
            for line in answer.iter_lines():
                self._lines.append(line)
                self._has_begun.set()
                if self._leaving.is_set():
                    return

    def leave(self) -> None:
        """Close the connection."""
        self._leaving.set()
        self._thread.join()

    def events(self) -> list[dict[str, Any]]:
        """All of the answer."""
        self._thread.join()
        lines = [line.removeprefix("data: ") for line in self._lines if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    def tokens(self) -> list[int]:
        choices = [choice for event in self.events() for choice in event["choices"]]
        return [token for choice in choices for token in choice["token_ids"]]


def metric(server: ServerProcess, name: str, engine: int | None = None) -> float:
    """A number of one engine, or of all."""
    label = "" if engine is None else f'engine="{engine}",'
    text = httpx.get(server.url + "/metrics").text
    found = re.search(rf"^fastdeploy:{name}{{{label}model_name[^}}]*}} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else -1.0


def of_each(server: ServerProcess, name: str) -> list[float]:
    return [metric(server, name, engine) for engine in (0, 1)]


def engine_processes(server: ServerProcess) -> list[int]:
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in server.children()}
    return sorted(pid for pid, line in lines.items() if b"fastdeploy-engine" in line)


def states(server: ServerProcess) -> tuple[int, str]:
    answer = httpx.get(server.url + "/health/ready")
    return answer.status_code, answer.json()["engines"]


def test_parallel_requests_leave_no_engine_idle(server: ServerProcess, slow_model: Path) -> None:
    before = of_each(server, "generation_tokens_total")
    with slowly(slow_model):
        streams = [Stream(server, [1, 2, number], 200) for number in range(8)]
        assert of_each(server, "num_requests_running") == [4, 4]
        assert metric(server, "num_requests_running") == 8
    for number, stream in enumerate(streams):
        assert stream.tokens() == expected([1, 2, number], 200)
    after = of_each(server, "generation_tokens_total")
    assert [new - old for new, old in zip(after, before, strict=True)] == [800, 800]
    assert metric(server, "generation_tokens_total") == sum(after)


def test_choices_of_one_prompt_stay_on_one_engine(server: ServerProcess) -> None:
    before = of_each(server, "generation_tokens_total")
    answer = post(server, n=4, temperature=1.0, seed=5, max_tokens=20)
    assert [len(c["token_ids"]) for c in answer.json()["choices"]] == [20] * 4
    after = of_each(server, "generation_tokens_total")
    assert sorted(new - old for new, old in zip(after, before, strict=True)) == [0, 80]


def test_prompts_of_one_call_are_shared_out(server: ServerProcess) -> None:
    before = of_each(server, "generation_tokens_total")
    prompts = [[5, 6, n] for n in range(4)]
    answer = post(server, prompt=prompts, max_tokens=50)
    found = [choice["token_ids"] for choice in answer.json()["choices"]]
    assert found == [expected(prompt, 50) for prompt in prompts]
    after = of_each(server, "generation_tokens_total")
    assert [new - old for new, old in zip(after, before, strict=True)] == [100, 100]


def converse(server: ServerProcess, start: int, turns: int) -> Iterator[None]:
    """One conversation: each prompt is all that was said, and something new."""
    said = [3 + (start * 7 + place) % 200 for place in range(256)]
    for turn in range(turns):
        answer = tokens_of(post(server, prompt=said, max_tokens=16))
        assert answer == expected(said, 16)
        said = [*said, *answer, *[3 + (start + turn + place) % 250 for place in range(24)]]
        yield


def talk(server: ServerProcess) -> float:
    """Prompt tokens found in caches by six conversations at once."""
    conversations = [converse(server, number, 5) for number in range(6)]
    for conversation in conversations:
        next(conversation)
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(list, conversations))
    return metric(server, "prefix_cache_token_num_total")


@pytest.mark.parametrize("api_servers", EITHER)
def test_conversations_find_their_cache_as_often_as_on_one_engine(
    model: Path, api_servers: str
) -> None:
    with serving(model, *NULL[:-2]) as one:
        assert one.url
        alone = talk(one)
    with serving(model, *NULL, "--api-server-count", api_servers) as two:
        assert two.url
        assert talk(two) == alone > 6 * 4 * 256
        assert min(of_each(two, "prefix_cache_token_num_total")) > 0


@pytest.mark.parametrize("api_servers", ["1", "2"])
def test_an_engine_that_is_killed_ends_its_own_streams_only(
    slow_model: Path, api_servers: str
) -> None:
    options = (*NULL, "--max-num-seqs", "4", "--api-server-count", api_servers)
    with serving(slow_model, *options) as server, ThreadPoolExecutor(12) as threads:
        assert states(server) == (200, {"0": "ready", "1": "ready"})
        # Both engines are full of running streams, then requests wait behind them.
        streams = [Stream(server, [1, 2, number]) for number in range(8)]
        waiting = [threads.submit(post, server, prompt=[7, n], max_tokens=10) for n in range(12)]
        wait_for(lambda: metric(server, "requests_number_total") == 20, "all requests")
        assert of_each(server, "num_requests_running") == [4, 4]
        os.kill(engine_processes(server)[0], signal.SIGKILL)
        ended = re.compile(r"engine (\d) ended: the engine process was killed by SIGKILL")
        fallen = int(wait_for(lambda: ended.search(server.log), "its death to be told")[1])
        status, engines = states(server)
        assert status == 200
        assert engines[str(1 - fallen)] == "ready"
        # Requests that waited are answered as if nothing had happened, and so are new ones.
        assert tokens_of(post(server, max_tokens=5)) == expected([1, 2, 3], 5)
        for number, answer in enumerate(waiting):
            assert tokens_of(answer.result()) == expected([7, number], 10)
        broken = [s for s in streams if "error" in s.events()[-1]]
        assert len(broken) == 4
        for stream in broken:
            assert stream.events()[-1]["error"]["code"] == 503
        for number, stream in enumerate(streams):
            assert stream in broken or stream.tokens() == expected([1, 2, number], 400)
        wait_for(lambda: of_each(server, "engine_ready") == [1.0, 1.0], "its return", 60)
        assert metric(server, "engine_restarts_total", fallen) == 1
        assert metric(server, "engine_restarts_total") == 1
        assert metric(server, "num_requests_running") == 0
        again = [Stream(server, [1, number], 100) for number in range(4)]
        assert of_each(server, "num_requests_running") == [2, 2]
        for number, stream in enumerate(again):
            assert stream.tokens() == expected([1, number], 100)
        assert httpx.get(server.url + "/load").json() == {"server_load": 0}
    assert "Traceback" not in server.log


@pytest.mark.slow
def test_an_api_server_that_is_started_again_knows_which_engines_live(model: Path) -> None:
    options = (*NULL, "--api-server-count", "2", "--max-restarts", "0")
    with serving(model, *options) as server:
        assert server.url
        os.kill(engine_processes(server)[0], signal.SIGKILL)
        wait_for(lambda: "is not started again" in server.log, "an engine that stays dead")
        lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in server.children()}
        first, *_ = sorted(pid for pid, line in lines.items() if b"fastdeploy-api" in line)
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: "it is started again" in server.log, "the API server's restart")
        for number in range(8):
            assert tokens_of(post(server, prompt=[1, number], max_tokens=5)) == expected(
                [1, number], 5
            )
        os.kill(engine_processes(server)[0], signal.SIGKILL)
        assert server.wait() == 1  # the last one


@pytest.mark.parametrize("api_servers", EITHER)
def test_sigterm_lets_the_streams_of_all_engines_end(slow_model: Path, api_servers: str) -> None:
    with serving(slow_model, *NULL, "--api-server-count", api_servers) as server:
        with slowly(slow_model):
            streams = [Stream(server, [1, number], 150) for number in range(4)]
            server.signal()
            wait_for(lambda: "shutting down" in server.log, "draining")
            assert httpx.get(server.url + "/health/ready").status_code == 503
        for number, stream in enumerate(streams):
            assert stream.tokens() == expected([1, number], 150)
        assert server.wait() == 0
    assert not re.search(r"Traceback|ERROR|CRITICAL|Warning", server.log)


def test_start_up_fails_when_one_engine_does_not_start(tmp_path: Path) -> None:
    # Loading takes a while, so that one of two engines can be killed meanwhile.
    faults = [{"kind": "slow", "at_load": True, "seconds": 30.0}]
    model = write_null_model(tmp_path / "slow", faults=faults)
    with serving(model, "--device", "faulty", "--data-parallel-size", "2") as server:
        wait_for(lambda: len(engine_processes(server)) == 2, "two processes")
        time.sleep(1.0)
        os.kill(engine_processes(server)[1], signal.SIGKILL)
        assert server.wait() == 1
    assert re.search(r"engine [01]: the engine process was killed by SIGKILL", server.log)


@pytest.mark.slow
def test_a_model_that_no_engine_can_load_says_why(tmp_path: Path) -> None:
    faults = [{"kind": "raise", "at_load": True, "message": "the shelf is empty"}]
    model = write_null_model(tmp_path / "bad", faults=faults)
    result = run("serve", str(model), "--port", "0", "--device", "faulty", "-dp", "2")
    assert result.returncode == 1
    assert re.search(r"engine [01]: .*the shelf is empty", result.stderr.strip().splitlines()[-1])


def client_run(url: str) -> list[object]:
    """What one client program gets, in order: completions and chat, whole and streamed."""
    found: list[object] = []
    chat = {"messages": [{"role": "user", "content": "Where is the capital of China?"}]}
    texts = ["The capital of France", "Once upon a time", "One, two, three", "Water is"]
    common = {"temperature": 0, "max_tokens": 24}

    def ask(path: str, body: dict[str, object]) -> object:
        answer = httpx.post(url + path, json={**common, **body}, timeout=60)
        assert answer.status_code == 200, answer.text
        if body.get("stream"):
            lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
            choices = [choice for line in lines for choice in json.loads(line)["choices"]]
            parts = [c.get("text") or c.get("delta", {}).get("content") or "" for c in choices]
            return "".join(parts), choices[-1]["finish_reason"]
        choice = answer.json()["choices"][0]
        return choice.get("text") or choice["message"]["content"], choice["finish_reason"]

    for stream in (False, True):
        for _ in range(2):  # also on the engine, and with the cache, that the first try made
            found.append(ask("/v1/chat/completions", {**chat, "stream": stream}))
            found += [ask("/v1/completions", {"prompt": t, "stream": stream}) for t in texts]
        with ThreadPoolExecutor(4) as threads:
            jobs = [
                threads.submit(ask, "/v1/completions", {"prompt": t, "stream": stream})
                for t in texts
            ]
            found += [job.result() for job in jobs]
    return found


def test_the_same_client_gets_the_same_answers_from_one_engine_and_two() -> None:
    # float32: in bfloat16, near-ties depend on who else is in the batch
    options = ("--device", "cpu", "--dtype", "float32", "--num-gpu-blocks-override", "64")
    with serving(DEMO, *options) as one:
        alone = client_run(one.url)
    with serving(DEMO, *options, "--data-parallel-size", "2") as two:
        together = client_run(two.url)
        assert min(of_each(two, "generation_tokens_total")) > 0
    assert together == alone
    assert any("Beijing" in str(answer) for answer in alone)


def test_clients_that_leave_free_their_engine(server: ServerProcess) -> None:
    streams = [Stream(server, [9, number]) for number in range(4)]
    assert of_each(server, "num_requests_running") == [2, 2]
    for stream in streams:
        stream.leave()
    wait_for(lambda: metric(server, "num_requests_running") == 0, "free engines")
    # What counts against an engine has ended, too: the next four are shared out again.
    streams = [Stream(server, [8, number], 100) for number in range(4)]
    assert of_each(server, "num_requests_running") == [2, 2]
    for number, stream in enumerate(streams):
        assert stream.tokens() == expected([8, number], 100)
