"""`fastdeploy serve` with the real engine on device null: processes, signals, deaths, blocks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from fastdeploy_core.types import SamplingParams
from fastdeploy_testing.fakes import NullModel
from tests.kills import processes
from tests.server_process import ServerProcess, run, serving
from tests.server_support import slowly, wait_for, write_null_model

NULL = ("--device", "null", "--block-size", "16", "--max-num-seqs", "8")
VOCABULARY = 259
BODY = {"prompt": [1, 2, 3], "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_null_model(tmp_path_factory.mktemp("null"), step_s=0.002, num_blocks=128)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ServerProcess]:
    with serving(model, *NULL) as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        yield http


def expected(count: int) -> list[int]:
    """What the null model generates after BODY's prompt."""
    greedy = SamplingParams(temperature=0.0)
    return NullModel(VOCABULARY).expected([1, 2, 3], count, greedy)


def gauge(client: httpx.Client, name: str) -> float:
    text = client.get("/metrics").text
    found = re.search(rf"^fastdeploy:{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
    assert found, name
    return float(found[1])


def test_tokens_are_the_models(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json={**BODY, "max_tokens": 50}).json()
    assert answer["choices"][0]["token_ids"] == expected(50)


def test_nothing_listens_but_the_port(server: ServerProcess) -> None:
    port, inodes = httpx.URL(server.url).port, set()  # which waits for the server
    for pid in processes(server.process.pid):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # it was closed
                kind, _, inode = str(file.readlink()).partition(":")
                inodes |= {inode.strip("[]")} if kind == "socket" else set()
    table = [line.split() for kind in ("tcp", "tcp6") for line in sockets(kind)]
    listening = [row[1] for row in table if row[3] == "0A" and row[9] in inodes]
    assert listening == [f"0100007F:{port:04X}"]
    unix = [row.split() for row in sockets("unix")]
    paths = [Path(row[7]) for row in unix if row[6] in inodes and len(row) > 7]
    assert paths
    for path in paths:
        assert path.is_absolute(), "an abstract name is open to every user"
        assert path.parent.stat().st_mode & 0o777 == 0o700


def sockets(kind: str) -> list[str]:
    """Lines of the kernel's table."""
    return Path(f"/proc/net/{kind}").read_text().splitlines()[1:]


def test_a_crowd_gets_what_each_gets_alone(client: httpx.Client) -> None:
    with ThreadPoolExecutor(16) as threads:
        body = {**BODY, "max_tokens": 40}
        answers = [threads.submit(client.post, "/v1/completions", json=body) for _ in range(32)]
        for answer in answers:
            assert answer.result().json()["choices"][0]["token_ids"] == expected(40)


def test_clients_that_leave_give_their_blocks_back(
    server: ServerProcess, client: httpx.Client
) -> None:
    address = httpx.URL(server.url)
    raw = json.dumps({**BODY, "max_tokens": 500, "n": 1}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connections = []
    for number in range(8):
        connection = socket.create_connection((address.host, address.port), timeout=60)
        body = raw if number % 2 else raw[:-1] + b',"stream":true}'
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        connections.append(connection)
    wait_for(lambda: gauge(client, "kv_blocks_used") > 0, "blocks to be used")
    for connection in connections:
        connection.close()
    wait_for(lambda: gauge(client, "kv_blocks_used") == 0, "the blocks to come back")
    wait_for(lambda: client.get("/load").json() == {"server_load": 0}, "the permits to come back")
    assert gauge(client, "num_requests_running") == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_deadline_ends_a_request(client: httpx.Client, stream: bool) -> None:
    body = {**BODY, "max_tokens": 500, "stream": stream}
    answer = client.post("/v1/completions", json=body, headers={"X-Request-Timeout": "0.2"})
    assert "deadline" in answer.text
    assert '"code":504' in answer.text
    assert answer.status_code == (200 if stream else 504)
    for wrong in ("0", "-1", "soon", "nan"):
        answer = client.post("/v1/completions", json=BODY, headers={"X-Request-Timeout": wrong})
        assert answer.status_code == 400


def test_health_is_green_and_counters_move(client: httpx.Client) -> None:
    for path in ("/health", "/health/ready", "/health/live", "/ping"):
        assert client.get(path).status_code == 200
    before = gauge(client, "generation_tokens_total")
    client.post("/v1/completions", json={**BODY, "max_tokens": 20})
    wait_for(lambda: gauge(client, "generation_tokens_total") >= before + 20, "the counter")


def test_the_command_line_clients_talk_to_it(server: ServerProcess, tmp_path: Path) -> None:
    url = server.url + "/v1"
    completed = run("complete", "--url", url, "-q", "ab", "--max-tokens", "4", "--temperature", "0")
    assert completed.returncode == 0, completed.stderr
    chatted = run("chat", "--url", url, "-q", "hi", "--max-tokens", "4")
    assert chatted.returncode == 0, chatted.stderr


def test_a_benchmark_counts_its_answers(server: ServerProcess, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    bench = run(
        *("bench", "serve", "--url", server.url, "--num-prompts", "20", "--output-len", "8"),
        *("--request-rate", "200,inf", "--goodput", "ttft:60000", "e2e:60000"),
        *("--save-result", str(report)),
    )
    assert bench.returncode == 0, bench.stdout + bench.stderr
    results = json.loads(report.read_text())
    assert [result["request_rate"] for result in results] == [200.0, "inf"]
    for result in results:
        assert result["completed"] == 20
        assert result["output_tokens"] == 160
        assert result["slo_met_share"] == 1.0
        assert 0 < result["p50_ttft_ms"] <= result["p99_ttft_ms"]
        assert result["mean_e2e_ms"] >= result["mean_ttft_ms"]


def test_a_batch_file_is_answered_in_order(model: Path, tmp_path: Path) -> None:
    lines = [
        {"custom_id": "one", "method": "POST", "url": "/v1/completions", "body": BODY},
        "not json",
        {"custom_id": "three", "url": "/v1/completions", "body": {"prompt": "x", "n": 999}},
        {"custom_id": "four", "url": "/v1/audio/speech", "body": {}},
        {"custom_id": "five", "url": "/v1/chat/completions",
         "body": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}},
        {"custom_id": "six", "url": "/v1/responses",
         "body": {"input": "x", "max_output_tokens": 3}},
    ]  # fmt: skip
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    done = run("run-batch", "-i", str(source), "-o", str(target), str(model), *NULL)
    assert done.returncode == 1, done.stderr  # some lines have an error
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert [a["custom_id"] for a in answers] == ["one", None, "three", "four", "five", "six"]
    assert answers[0]["response"]["body"]["choices"][0]["token_ids"] == expected(16)
    assert answers[0]["response"]["request_id"]
    assert answers[1]["response"] is None
    assert answers[1]["error"]["message"]
    assert answers[2]["response"]["status_code"] == 400
    assert "url must be one of" in answers[3]["error"]["message"]
    assert [a["response"]["status_code"] for a in answers[4:]] == [200, 200]
    assert not list(tmp_path.glob(".*.part"))


@pytest.fixture
def hangup() -> Iterator[None]:
    """SIGHUP acts as in a terminal, whether or not these tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.usefixtures("hangup")
def test_a_signal_lets_streams_end_and_exits_with_zero(model: Path, number: signal.Signals) -> None:
    with serving(model, *NULL) as process, ThreadPoolExecutor(8) as threads:
        body = {**BODY, "max_tokens": 200, "stream": True}
        url = process.url + "/v1/completions"
        with slowly(model), httpx.Client(base_url=process.url, timeout=60) as client:
            answers = [threads.submit(httpx.post, url, json=body, timeout=60) for _ in range(8)]
            wait_for(lambda: client.get("/load").json()["server_load"] == 8, "eight streams")
            if number == signal.SIGHUP:  # a terminal that closes tells all of its processes
                for child in process.children():
                    os.kill(child, number)
            process.signal(number)
        for answer in answers:
            text = answer.result().text
            assert text.endswith("data: [DONE]\n\n")
            assert '"finish_reason":"length"' in text
        assert process.wait() == 0
    assert "shutting down: 8 requests" in process.log


def test_a_second_sigterm_exits_at_once(model: Path) -> None:
    with serving(model, *NULL, "--timeout-graceful-shutdown", "600") as process:
        address = httpx.URL(process.url)
        raw = json.dumps({**BODY, "max_tokens": 500, "n": 1, "stream": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with (
            slowly(model),
            socket.create_connection((address.host, address.port), timeout=60) as connection,
        ):
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(raw) + raw)
            assert connection.recv(1)
            process.signal()
            wait_for(lambda: "shutting down" in process.log, "draining")
            process.signal()
            assert process.wait() == 0  # and not after ten minutes


def engine_process(process: ServerProcess) -> int:
    """The pid of the engine process among the server's children."""
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in process.children()}
    (found,) = [pid for pid, line in lines.items() if b"engine.processes.child" in line]
    return found


def test_a_killed_engine_ends_streams_with_an_error_and_comes_back(model: Path) -> None:
    with (
        serving(model, *NULL) as process,
        ThreadPoolExecutor(1) as threads,
        httpx.Client(base_url=process.url, timeout=60) as client,
    ):
        body = {**BODY, "max_tokens": 500}
        streaming = {"method": "POST", "url": "/v1/completions", "json": {**body, "stream": True}}
        with slowly(model):
            whole = threads.submit(client.post, "/v1/completions", json=body)
            wait_for(lambda: gauge(client, "num_requests_running") == 1, "a request")
            with client.stream(**streaming) as streamed:
                events = streamed.iter_text()
                text = next(events)  # before it has begun it would be refused as a whole
                os.kill(engine_process(process), signal.SIGKILL)
                text += "".join(events)
        assert whole.result().status_code == 503
        assert '"error"' in text
        assert '"finish_reason":"' not in text
        assert text.endswith("data: [DONE]\n\n")
        wait_for(lambda: client.get("/health/ready").status_code == 200, "a new engine", 60)
        answer = client.post("/v1/completions", json={**BODY, "max_tokens": 5})
        assert answer.json()["choices"][0]["token_ids"] == expected(5)


def test_an_engine_that_stays_dead_ends_the_server(model: Path) -> None:
    with serving(model, *NULL, "--max-restarts", "0") as process:
        assert process.url
        os.kill(engine_process(process), signal.SIGKILL)
        assert process.wait() == 1
    assert "engine is dead" in process.log


def test_a_hanging_engine_turns_red_and_its_requests_end(tmp_path: Path) -> None:
    faults = [{"kind": "hang", "token": 77}]
    model = write_null_model(tmp_path / "hang", faults=faults)
    options = ("--device", "faulty", "--block-size", "16", "--progress-timeout", "4")
    with serving(model, *options) as process, httpx.Client(base_url=process.url) as client:
        answer = client.post("/v1/completions", json={"prompt": [1, 77]}, timeout=60)
        assert answer.status_code == 503
        wait_for(lambda: client.get("/health/ready").status_code == 200, "a new engine", 60)
        assert client.post("/v1/completions", json=BODY).status_code == 200


def test_broken_logits_fail_their_own_request_only(tmp_path: Path) -> None:
    model = write_null_model(tmp_path / "nan", faults=[{"kind": "nan", "token": 77}], step_s=0.005)
    options = ("--device", "faulty", "--block-size", "16")
    with (
        serving(model, *options) as process,
        ThreadPoolExecutor(1) as threads,
        httpx.Client(base_url=process.url, timeout=60) as client,
    ):
        body = {**BODY, "max_tokens": 60}
        good = threads.submit(client.post, "/v1/completions", json=body)
        bad = client.post("/v1/completions", json={"prompt": [1, 77]})
        assert bad.status_code == 500
        assert "nan_logits" in bad.json()["error"]["message"]
        assert good.result().json()["choices"][0]["token_ids"] == expected(60)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--device", "warp"), "warp"),
        (("--reasoning-parser", "nope", *NULL), "no reasoning parser 'nope'"),
        (("--max-model-len", "99999", *NULL), "99999"),
        (("--max-model-le", "5"), "did you mean --max-model-len"),
        (("--num-gpu-blocks-override", "0", *NULL), "--num-gpu-blocks-override must be"),
        (("--config", "missing.yaml"), "missing.yaml"),
        (("--max-num-batched-tokens", "4", *NULL), "--max-num-batched-tokens 4"),
        (("--host", "256.1.1.1", *NULL), "cannot listen on"),
        (("--ssl-keyfile", "x", *NULL), "--ssl-certfile"),
        (("--ssl-keyfile", "/x", "--ssl-certfile", "/y", *NULL), "cannot be used: No such file"),
        (("--ssl-keyfile", __file__, "--ssl-certfile", __file__, *NULL), "cannot be used: [SSL"),
        (("--uds", "/nowhere/socket", *NULL), "choose another with --uds"),
        (("--uds", "x" * 120, *NULL), "path too long"),
    ],
)
def test_a_bad_start_is_one_line_and_an_error_code(
    model: Path, arguments: tuple[str, ...], words: str
) -> None:
    ended = run("serve", str(model), "--port", "0", "--log-level", "error", *arguments)
    assert ended.returncode == 2
    lines = ended.stderr.strip().splitlines()
    assert len(lines) == 1, ended.stderr
    assert lines[0].startswith("fastdeploy: error: ")
    assert words in lines[0]


def test_a_model_that_is_missing_and_a_port_in_use(model: Path, tmp_path: Path) -> None:
    ended = run("serve", str(tmp_path / "nowhere"))
    assert ended.returncode == 2
    assert "is not a folder" in ended.stderr
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ended = run("serve", str(model), "--host", "127.0.0.1", "--port", port, *NULL)
    assert ended.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_model_that_fails_to_load_says_why(tmp_path: Path) -> None:
    faults = [{"kind": "raise", "at_load": True, "message": "weights are upside down"}]
    model = write_null_model(tmp_path / "bad", faults=faults)
    ended = run("serve", str(model), "--device", "faulty", "--port", "0")
    assert ended.returncode == 1
    assert "weights are upside down" in ended.stderr.strip().splitlines()[-1]


def test_the_original_entry_point_is_the_same_server(model: Path) -> None:
    import subprocess
    import sys

    from tests.server_process import environment

    module = "fastdeploy.entrypoints.openai.api_server"
    ended = subprocess.run(
        [sys.executable, "-P", "-m", module, "--model", str(model), "--max-num-sqes", "4"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert "did you mean --max-num-seqs" in ended.stderr
