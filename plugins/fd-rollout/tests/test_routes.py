"""A server of its own process: routes, the operator's key, and weights that change under load."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from checkpoint import MODEL, PROMPTS, ROOM, changed, tensors, write
from fd_rollout.routes import rollout_routes
from fd_rollout.trainer import WeightServer

from fastdeploy import LLM, SamplingParams
from fastdeploy_core.plugins.known import providers
from fastdeploy_core.serving.http.middleware import ADMIN_PATHS
from tests.server_process import ServerProcess, serving

KEY = {"authorization": "Bearer operators"}
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "other", changed(1.3))


@pytest.fixture(scope="module")
def answers(other: Path, fd_tensor: str) -> list[list[list[int]]]:
    """Of the prompts, by model."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    found = []
    for model in (MODEL, other):
        with LLM(model, tensor_library=fd_tensor, **ROOM) as llm:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            found.append([list(output.outputs[0].token_ids) for output in outputs])
    assert all(one != two for one, two in zip(*found, strict=True))
    return found


@pytest.fixture(scope="module")
def server(fd_tensor: str) -> Iterator[ServerProcess]:
    room = [word for name, value in ROOM.items() for word in (f"--{name}", str(value))]
    flags = [word.replace("_", "-") if word.startswith("--") else word for word in room]
    with serving(
        *(MODEL, "--tensor-library", fd_tensor, *flags, "--admin-key", "operators"),
        *("--enable-sleep-mode", "--served-model-name", "m"),
    ) as process:
        yield process


def post(server: ServerProcess, path: str, /, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body or None, headers=KEY, timeout=120)


def probes(server: ServerProcess) -> tuple[int, int]:
    ready, well = (
        httpx.get(server.url + path).status_code for path in ("/health/ready", "/health")
    )
    return ready, well


def get(server: ServerProcess, path: str) -> Any:
    answer = httpx.get(server.url + path, headers=KEY, timeout=60)
    assert answer.status_code == 200
    return answer.json()


def complete(server: ServerProcess, number: int) -> tuple[list[int], str]:
    more = {"ignore_eos": True, "return_token_ids": True, "temperature": 0}
    body = {"model": "m", "prompt": PROMPTS[number], "max_tokens": NUM_TOKENS, **more}
    answer = httpx.post(server.url + "/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice["token_ids"], choice["finish_reason"]


def test_the_core_knows_what_to_install_for_these_routes() -> None:
    known = {route for route, name in providers("route").items() if name == "fd-rollout"}
    routes = rollout_routes().router.routes
    assert known == {f"{method} {route.path}" for route in routes for method in route.methods}
    changing = {route.path for route in routes if "POST" in route.methods}
    assert changing <= ADMIN_PATHS


def test_only_the_operator_controls_the_engine(server: ServerProcess) -> None:
    for path in ("/pause", "/resume", "/sleep", "/wake_up", "/update_weights", "/v1/sleep"):
        assert httpx.post(server.url + path).status_code == 401
    assert not get(server, "/is_paused")["is_paused"]


def test_a_paused_server_answers_once_it_is_resumed(
    server: ServerProcess, answers: list[list[list[int]]]
) -> None:
    assert post(server, "/pause?mode=keep").json()["status"] == "paused"
    assert get(server, "/v1/is_paused") == {"is_paused": True, "state": "paused"}
    assert probes(server) == (503, 200)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(complete, server, 0)
        with pytest.raises(TimeoutError):
            waiting.result(0.7)
        assert post(server, "/resume").json()["status"] == "running"
        assert waiting.result(60) == (answers[0][0], "length")


def test_sleep_and_wake_by_both_projects_names(
    server: ServerProcess, answers: list[list[list[int]]]
) -> None:
    for sleep, wake, level in (("/sleep?level=1", "/wake_up", 1), ("/v1/sleep", "/v1/wakeup", 2)):
        slept = post(server, sleep) if "?" in sleep else post(server, sleep, level=level)
        assert slept.json()["status"] == "asleep"
        assert get(server, "/is_sleeping")["is_sleeping"] and probes(server) == (503, 200)
        conflict = post(server, "/resume")
        assert conflict.status_code == 409 and "wake_up" in conflict.json()["error"]["message"]
        assert post(server, wake).json()["status"] == "running"
        assert not get(server, "/is_sleeping")["is_sleeping"] and probes(server) == (200, 200)
        assert complete(server, 1)[0] == answers[0][1]
    first = post(server, "/v1/sleep", tags=["kv_cache"]).json()
    assert first["status"] == "asleep"
    assert get(server, "/is_sleeping")["asleep"] == ["kv_cache"]
    assert post(server, "/v1/wakeup?tags=weight,kv_cache").json()["status"] == "running"


def test_options_come_from_query_and_body_together(server: ServerProcess) -> None:
    both = post(server, "/sleep?tags=kv_cache&wait=1", level=1)
    assert both.json()["status"] == "asleep" and both.headers["x-ignored-fields"] == "wait"
    assert get(server, "/is_sleeping")["asleep"] == ["kv_cache"]
    assert post(server, "/wake_up").json()["status"] == "running"


def test_what_is_wrong_is_said(server: ServerProcess) -> None:
    for path, body in (
        ("/sleep?level=7", {}),
        ("/pause?mode=now", {}),
        ("/sleep", {"tags": ["lm_head"]}),
        ("/update_weights", {"mode": 3}),
    ):
        refused = post(server, path, **body)
        assert refused.status_code == 400 and "pydantic" not in refused.text
    answer = post(server, "/update_weights", path="/nowhere/at/all")
    assert answer.status_code == 400 and "no folder" in answer.json()["error"]["message"]
    assert get(server, "/is_paused") == {"is_paused": False, "state": "running"}


@pytest.mark.parametrize(
    "mode",
    ["wait", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("keep", "abort"))],
)
def test_no_answer_mixes_weights(
    server: ServerProcess,
    answers: list[list[list[int]]],
    other: Path,
    tmp_path: Path,
    mode: str,
) -> None:
    stop = threading.Event()
    found: list[tuple[int, list[int], str]] = []

    def load(worker: int) -> None:
        number = worker
        while not stop.is_set():
            number = (number + 1) % len(PROMPTS)
            found.append((number, *complete(server, number)))

    with WeightServer(tmp_path / "socket") as trainer, ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(load, worker) for worker in range(4)]
        shared = {"source": "shared", "options": {"socket": str(tmp_path / "socket")}}
        try:
            for turn in range(2):
                version = f"{mode}-{turn}"
                trainer.publish(version, tensors())
                for model, body in ((1, {"path": str(other)}), (0, shared)):
                    updated = post(server, "/update_weights", version=version, mode=mode, **body)
                    assert updated.status_code == 200, updated.text
                    assert updated.json()["status"] == "running"
                    assert complete(server, turn)[0] == answers[model][turn]
        finally:
            stop.set()
        for client in clients:
            client.result(60)
    assert get(server, "/weight_info")["weight_version"] == f"{mode}-1"
    for number, tokens, reason in found:
        assert any(model[number][: len(tokens)] == tokens for model in answers)
        assert reason == "length" or mode != "wait"
        assert reason != "length" or len(tokens) == NUM_TOKENS
