"""Several API server processes behind one port: shared load, deaths, drains, one set of numbers."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from fastdeploy_core.types import SamplingParams
from fastdeploy_testing.fakes import NullModel
from tests.server_process import ServerProcess, run, serving
from tests.server_support import slowly, wait_for, write_null_model

SERVERS = ("--device", "null", "--block-size", "16", "--api-server-count", "2")
CONNECTED = "03"  # state of a socket in /proc/net/unix
BODY = {"prompt": [1, 2, 3], "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_null_model(tmp_path_factory.mktemp("null"), step_s=0.002, num_blocks=512)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ServerProcess]:
    with serving(model, *SERVERS) as process:
        assert process.url
        yield process


def expected(count: int) -> list[int]:
    return NullModel(259).expected([1, 2, 3], count, SamplingParams(temperature=0.0))


def post(server: ServerProcess, **body: object) -> httpx.Response:
    """On a connection of its own."""
    return httpx.post(server.url + "/v1/completions", json={**BODY, **body}, timeout=60)


def metric(server: ServerProcess, name: str) -> float:
    text = httpx.get(server.url + "/metrics").text
    found = re.search(rf"^fastdeploy:{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def processes(server: ServerProcess, name: bytes) -> list[int]:
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in server.children()}
    return sorted(pid for pid, line in lines.items() if name in line)


def connections(pid: int) -> int:
    """Sockets of a process that are clients' connections to the server's port."""
    links = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return sum(row[9] in inodes for row in rows)


def test_streams_are_shared_out_evenly_and_get_their_own_tokens(server: ServerProcess) -> None:
    counted = threading.Event()  # until then no client closes its connection

    def stream(number: int) -> list[int]:
        tokens: list[int] = []
        with httpx.stream(
            "POST",
            server.url + "/v1/completions",
            json={**BODY, "prompt": [1, 2, 3 + number], "max_tokens": 150, "stream": True},
            timeout=60,
        ) as answer:
            counted.wait(60)
            for found in re.finditer(r'"token_ids":\[([\d,]+)\],"comp', answer.read().decode()):
                tokens += map(int, found[1].split(","))
        return tokens

    api_servers = processes(server, b"fastdeploy-api")
    assert len(api_servers) == 2
    idle = [connections(pid) for pid in api_servers]
    with ThreadPoolExecutor(16) as threads:
        answers = [threads.submit(stream, number) for number in range(16)]
        wait_for(
            lambda: [connections(p) - i for p, i in zip(api_servers, idle, strict=True)] == [8, 8],
            "eight streams for each API server",
        )
        counted.set()
        greedy = SamplingParams(temperature=0.0)
        for number, answer in enumerate(answers):
            prompt = [1, 2, 3 + number]
            assert answer.result() == NullModel(259).expected(prompt, 150, greedy)


def test_numbers_are_those_of_all_of_them(server: ServerProcess) -> None:
    before = metric(server, "requests_number_total")
    for _ in range(6):
        assert post(server, max_tokens=3).status_code == 200
    for _ in range(4):  # whoever is asked
        assert metric(server, "requests_number_total") == before + 6
        assert httpx.get(server.url + "/load").json() == {"server_load": 0}


@pytest.mark.slow
def test_the_limit_of_requests_in_flight_holds_for_all_together(model: Path) -> None:
    with serving(model, *SERVERS, "--max-concurrency", "3") as server:
        assert server.url
        with ThreadPoolExecutor(3) as threads:
            held = [threads.submit(post, server, max_tokens=400) for _ in range(3)]
            wait_for(
                lambda: httpx.get(server.url + "/load").json() == {"server_load": 3},
                "three requests",
            )
            assert [post(server, max_tokens=3).status_code for _ in range(4)] == [429] * 4
            assert all(answer.result().status_code == 200 for answer in held)
        assert post(server, max_tokens=3).status_code == 200


def test_one_that_dies_costs_its_own_requests_only_and_comes_back(model: Path) -> None:
    with serving(model, *SERVERS) as server, ThreadPoolExecutor(4) as threads:
        assert server.url
        first, second = processes(server, b"fastdeploy-api")
        with slowly(model):
            answers = [threads.submit(post, server, max_tokens=450) for _ in range(4)]
            # Seen from outside: a question of ours would be a fifth connection.
            wait_for(lambda: connections(first) == connections(second) == 2, "two requests each")
            os.kill(first, signal.SIGKILL)
        ends = []
        for answer in answers:
            try:
                ends.append(answer.result().json()["choices"][0]["token_ids"] == expected(450))
            except httpx.TransportError:
                ends.append(False)
        assert sorted(ends) == [False, False, True, True]
        wait_for(lambda: metric(server, "kv_blocks_used") == 0, "its blocks to be free", 60)
        wait_for(lambda: len(processes(server, b"fastdeploy-api")) == 2, "a new API server", 60)
        assert second in processes(server, b"fastdeploy-api")
        wait_for(lambda: server.log.count("it is started again") == 1, "the log line")
        for _ in range(4):
            assert post(server, max_tokens=5).json()["choices"][0]["token_ids"] == expected(5)


def test_all_of_them_may_die_at_once(model: Path) -> None:
    with serving(model, *SERVERS) as server:
        assert post(server, max_tokens=5).status_code == 200
        for process in processes(server, b"fastdeploy-api"):
            os.kill(process, signal.SIGKILL)
        ready = server.url + "/health/ready"
        wait_for(lambda: httpx.get(ready).status_code == 503, "nobody who answers", 60)
        assert "API server" in httpx.get(ready).json()["reason"]
        wait_for(lambda: httpx.get(ready).status_code == 200, "new API servers", 60)
        for _ in range(4):
            assert post(server, max_tokens=5).json()["choices"][0]["token_ids"] == expected(5)


def test_the_engine_may_die_while_all_of_them_start(model: Path) -> None:
    def halls() -> int:
        """Connections of API servers to the front door's own socket."""
        rows = Path(f"/proc/{server.process.pid}/net/unix").read_text().splitlines()
        doors = [row.split() for row in rows if row.endswith(f"api-{server.process.pid}-{end}")]
        return sum(row[5] == CONNECTED for row in doors)

    with serving(model, *SERVERS) as server:
        assert post(server, max_tokens=5).status_code == 200
        (folder,) = Path(tempfile.gettempdir()).glob(f"fd-run-api-{server.process.pid}-*")
        end = f"{folder.name.rpartition('-')[2]}/door"
        (engine,) = processes(server, b"fastdeploy-engine")
        for process in processes(server, b"fastdeploy-api"):
            os.kill(process, signal.SIGKILL)
        wait_for(lambda: halls() == 0, "their end", 60)
        # They have said who they are, were told of the engine, and have not read that yet.
        wait_for(lambda: halls() == 2, "new API servers", 60)
        os.kill(engine, signal.SIGKILL)
        ready = server.url + "/health/ready"
        wait_for(lambda: httpx.get(ready).status_code == 200, "a new engine", 60)
        for _ in range(4):
            assert post(server, max_tokens=5).json()["choices"][0]["token_ids"] == expected(5)


def test_all_of_them_meet_the_engine_that_follows_a_dead_one(model: Path) -> None:
    with serving(model, *SERVERS) as server:
        assert post(server, max_tokens=5).status_code == 200
        (engine,) = processes(server, b"fastdeploy-engine")
        os.kill(engine, signal.SIGKILL)
        wait_for(
            lambda: httpx.get(server.url + "/health/ready").status_code == 503, "red health", 60
        )
        wait_for(
            lambda: httpx.get(server.url + "/health/ready").status_code == 200, "a new engine", 60
        )
        for _ in range(4):
            answer = post(server, max_tokens=5)
            assert answer.json()["choices"][0]["token_ids"] == expected(5)


def test_sigterm_lets_the_streams_of_all_end(model: Path) -> None:
    with serving(model, *SERVERS) as server, ThreadPoolExecutor(4) as threads:
        assert server.url
        load = server.url + "/load"
        with slowly(model):
            answers = [threads.submit(post, server, max_tokens=300, stream=True) for _ in range(4)]
            wait_for(lambda: httpx.get(load).json() == {"server_load": 4}, "streams")
            server.signal()
            wait_for(lambda: "shutting down" in server.log, "draining")
            health = httpx.get(server.url + "/health/ready")
            assert (health.status_code, health.json()) == (503, {"status": "draining"})
            assert post(server, max_tokens=3).status_code == 503
        for answer in answers:
            assert answer.result().text.endswith("data: [DONE]\n\n")
        assert server.wait() == 0
    assert not re.search(r"Traceback|ERROR|CRITICAL|Warning", server.log)


def test_all_drain_when_one_is_asked_to(model: Path) -> None:
    with (
        serving(model, *SERVERS, extra={"FD_ADMIN_KEY": "operator"}) as server,
        ThreadPoolExecutor(1) as threads,
    ):
        url = server.url
        with slowly(model):
            stream = threads.submit(post, server, max_tokens=400, stream=True)
            wait_for(lambda: httpx.get(url + "/load").json() == {"server_load": 1}, "the stream")
            answer = httpx.post(url + "/drain", headers={"Authorization": "Bearer operator"})
            assert answer.json() == {"status": "draining", "server_load": 1}
            # Each connection goes to the API server that has the fewest, so to both.
            assert [post(server, max_tokens=3).status_code for _ in range(4)] == [503] * 4
            assert httpx.get(url + "/health/ready").json() == {"status": "draining"}
        assert stream.result().text.endswith("data: [DONE]\n\n")
        assert len(processes(server, b"fastdeploy-api")) == 2, "they go on"
        server.signal()
        assert server.wait() == 0


@pytest.mark.slow
def test_an_engine_that_stays_dead_ends_all(model: Path) -> None:
    with serving(model, *SERVERS, "--max-restarts", "0") as server:
        assert server.url
        (engine,) = processes(server, b"fastdeploy-engine")
        os.kill(engine, signal.SIGKILL)
        assert server.wait() == 1
    assert server.log.count("engine is dead") == 2


@pytest.mark.slow
def test_a_model_that_fails_to_load_says_why_once(tmp_path: Path) -> None:
    faults = [{"kind": "raise", "at_load": True, "message": "the shelf is empty"}]
    model = write_null_model(tmp_path / "bad", faults=faults)
    result = run(
        "serve", str(model), "--port", "0", "--device", "faulty", "--api-server-count", "2"
    )
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert "the shelf is empty" in last
