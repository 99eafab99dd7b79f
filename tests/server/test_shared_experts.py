"""Engines that share experts (--data-parallel-size with --enable-expert-parallel): tokens of one
engine, whoever has work; and what happens when an engine is lost, frozen or told to stop."""

from __future__ import annotations

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.server_process import REPOSITORY, ServerProcess, serving
from tests.server_support import wait_for

DEMO = REPOSITORY / "models" / "ernie-tiny"  # 8 experts, 2 of them for each token, 1 for all
OPTIONS = ("--device", "cpu", "--dtype", "float32", "--max-model-len", "512")
ROOM = ("--max-num-seqs", "4", "--max-num-batched-tokens", "96", "--num-gpu-blocks-override", "64")
SHARED = (*OPTIONS, *ROOM, "--data-parallel-size", "2", "--enable-expert-parallel")
BODY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
EPLB = ("--enable-eplb", "--eplb-config", '{"step_interval": 3}')
# Prompts of 3 to 150 tokens, which need one step or two, for answers of 1 to 24 tokens.
REQUESTS = [([7 + n, 5, *range(20, 21 + 49 * (n % 4))], 1 + 23 * n // 11) for n in range(12)]

# A processor that captures, as a plugin.
CAPTURING = """
from fastdeploy_core.contracts import Accept, Candidate, hookimpl
from fastdeploy_testing.capturing import CapturingDevice, RecordableAttention as Attention

class Device(CapturingDevice):
    name = "capturing"

    def close(self):
        print("replayed", sum(work.num_replays for work in self.recorded), flush=True)
        super().close()

@hookimpl
def fd_device_probe():
    return Candidate("capturing", Accept(1, "a processor"))

@hookimpl
def fd_attention_backends(question):
    return [Candidate("recordable", Accept(500, "reads lengths on the device"))]
"""


def ask(server: ServerProcess, prompt: list[int], count: int) -> list[int]:
    body = {**BODY, "prompt": prompt, "max_tokens": count}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=90)
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def ask_all(server: ServerProcess) -> list[list[int]]:
    with ThreadPoolExecutor(len(REQUESTS)) as threads:
        return list(threads.map(lambda request: ask(server, *request), REQUESTS))


def of_each(server: ServerProcess, name: str) -> list[float]:
    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    pattern = rf'^fastdeploy:{name}{{engine="(\d)",.*}} (\S+)$'
    return [float(value) for _, value in sorted(re.findall(pattern, text, re.MULTILINE))]


def engines_of(server: ServerProcess) -> list[int]:
    """Their processes, in order of start."""
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in server.children()}
    return sorted(pid for pid, line in lines.items() if b"fastdeploy-engine" in line)


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """What one engine answers, to one request after the other."""
    with serving(DEMO, *OPTIONS, *ROOM) as one:
        return [ask(one, *request) for request in REQUESTS]


def test_tokens_are_those_of_one_engine_whoever_has_work(alone: list[list[int]]) -> None:
    with serving(DEMO, *SHARED) as server:
        # One request at a time: the other engine has nothing of its own.
        assert [ask(server, *request) for request in REQUESTS[:4]] == alone[:4]
        assert min(of_each(server, "engine_steps_total")) > 0
        assert ask_all(server) == alone
        assert min(of_each(server, "generation_tokens_total")) > 0

        def are_at_rest() -> bool:
            before = of_each(server, "engine_steps_total")
            time.sleep(1.0)
            return of_each(server, "engine_steps_total") == before

        wait_for(are_at_rest, "engines without work to step no more")
        assert ask(server, *REQUESTS[5]) == alone[5]  # and one wakes all
        server.signal()
        assert server.wait() == 0
    assert "experts are divided over 2 ranks of 2 engines" in server.log
    assert not re.search(r"Traceback|ERROR|CRITICAL", server.log)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ("--tensor-parallel-size", "2"),
        ("--data-parallel-size", "4"),
        ("--api-server-count", "2"),
        ("--expert-communicator", "all_gather"),
        EPLB,
        ("--tensor-library", "paddle"),
        ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'),
    ],
    ids=lambda more: more[0].strip("-"),
)
def test_the_same_with(more: tuple[str, ...], alone: list[list[int]]) -> None:
    with serving(DEMO, *SHARED, *more) as server:
        assert [ask(server, *request) for request in REQUESTS[:2]] == alone[:2]
        assert ask_all(server) == alone
        if "--enable-eplb" in more:
            assert "places change" in server.log
        server.signal()
        assert server.wait() == 0
    assert not re.search(r"Traceback|ERROR|CRITICAL", server.log)


@pytest.mark.parametrize(
    "more",
    [
        (),
        pytest.param(EPLB, marks=pytest.mark.slow),
        pytest.param(("--tensor-parallel-size", "2"), marks=pytest.mark.slow),
    ],
    ids=["plain", "eplb", "tensor-parallel"],
)
def test_captured_steps_are_taken_together(
    more: tuple[str, ...], alone: list[list[int]], tmp_path: Path
) -> None:
    """A processor that captures: a step of decodes has as many rows on each engine, one beside a
    prompt is not captured, and an engine without work takes captured steps with padding."""
    info = tmp_path / "fd_capturing-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fd-capturing\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(
        "[fastdeploy.devices]\ncapturing = capturing:Device\n[fastdeploy.hooks]\n"
        "capturing = capturing\n[fastdeploy.attention]\nrecordable = capturing:Attention\n"
    )
    (tmp_path / "capturing.py").write_text(CAPTURING)
    paths = {"PYTHONPATH": f"{REPOSITORY}{os.pathsep}{tmp_path}"}
    with serving(DEMO, *SHARED, "--device", "capturing", *more, extra=paths) as server:
        assert [ask(server, *request) for request in REQUESTS[:4]] == alone[:4]
        assert ask_all(server) == alone
        assert min(of_each(server, "generation_tokens_total")) > 0
        server.signal()
        assert server.wait() == 0
    replays = [int(number) for number in re.findall(r"replayed (\d+)", server.log)]
    assert len(replays) == 2 * (1 + ("--tensor-parallel-size" in more)), server.log
    assert min(replays) > 20
    assert not re.search(r"Traceback|ERROR|CRITICAL", server.log)


@pytest.mark.slow
@pytest.mark.parametrize("is_busy", [True, False])
def test_an_engine_that_is_killed_takes_the_others_along_and_all_come_back(
    is_busy: bool, alone: list[list[int]]
) -> None:
    with serving(DEMO, *SHARED) as server, ThreadPoolExecutor(8) as threads:
        assert server.url
        body = {**BODY, "prompt": [5, 6, 7], "max_tokens": 480}
        jobs = [
            threads.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=90)
            for _ in range(4 * is_busy)
        ]
        if is_busy:
            wait_for(lambda: min(of_each(server, "generation_tokens_total")) > 8, "output of both")
        fallen = engines_of(server)[0]
        os.kill(fallen, signal.SIGKILL)
        for job in jobs:
            assert job.result().status_code == 503
        ended = r"cannot go on without the experts of the others: rank \d left the group"
        wait_for(lambda: re.search(ended, server.log), "the other's end", 30)
        wait_for(lambda: of_each(server, "engine_ready") == [1.0, 1.0], "their return", 90)
        assert fallen not in engines_of(server)
        assert ask_all(server) == alone


@pytest.mark.slow
def test_an_engine_that_freezes_is_ended_and_nobody_waits_for_ever() -> None:
    options = (*SHARED, "--progress-timeout", "4", "--max-restarts", "0")
    with serving(DEMO, *options) as server, ThreadPoolExecutor(1) as threads:
        assert server.url
        os.kill(engines_of(server)[0], signal.SIGSTOP)
        body = {**BODY, "prompt": [5, 6, 7], "max_tokens": 100}
        job = threads.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=60)
        assert job.result().status_code == 503
        assert server.wait() == 1
    assert "made no progress" in server.log


@pytest.mark.slow
def test_sigterm_lets_streams_end_although_only_one_engine_has_some() -> None:
    with serving(DEMO, *SHARED) as server, ThreadPoolExecutor(1) as threads:
        assert server.url
        job = threads.submit(ask, server, [5, 6, 7], 200)
        wait_for(lambda: sum(of_each(server, "generation_tokens_total")) > 8, "output")
        server.signal()
        assert len(job.result()) == 200
        assert server.wait() == 0
    assert not re.search(r"Traceback|ERROR|CRITICAL", server.log)
