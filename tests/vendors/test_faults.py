"""Faults of a simulated device while `fastdeploy serve` is under load.

Every client gets its answer or its error, the server says which device failed, health turns red
within its limit and green again after the restart, nothing hangs, and no KV block is lost.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server_process import REPOSITORY, ServerProcess
from tests.server_support import wait_for
from tests.vendors.conftest import DEVICES
from tests.vendors.servers import server_on, single_root

pytestmark = pytest.mark.slow

MODEL = REPOSITORY / "models" / "ernie-tiny"
NUM_CLIENTS = 6
PROGRESS_TIMEOUT_S = 3.0
ONCE = ("fail_alloc_at", "fail_copy_at", "fail_launch_at")


class Load:
    """Clients that ask one question after the other and note what they got."""

    def __init__(self, server: ServerProcess) -> None:
        self.url, self.answers, self.errors = server.url, list[list[int]](), list[int]()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(n,), daemon=True) for n in range(NUM_CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        while not self._stop.is_set():
            status, tokens = ask(self.url, number)
            if status == 200:
                self.answers.append([number, *tokens])
            else:
                self.errors.append(status)
                time.sleep(0.05)

    def wait(self, count: int) -> None:
        """Until so many more answers have come."""
        wanted = len(self.answers) + count
        wait_for(lambda: len(self.answers) >= wanted, f"{count} answers", 60)

    def stop(self) -> None:
        """Every client must come back."""
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a client waits for ever"


def ask(url: str, number: int) -> tuple[int, list[int]]:
    body = {
        "model": "tested",
        "prompt": [10 + number] * (3 + 5 * number),
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    if response.status_code != 200:
        assert response.json()["error"]["message"]
        return response.status_code, []
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "length", choice
    return 200, choice["completion_token_ids"]


def is_healthy(url: str) -> bool:
    return httpx.get(f"{url}/health", timeout=10).status_code == 200


def blocks_used(url: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=10).text.splitlines()
    return next(float(x.split()[-1]) for x in lines if "kv_blocks_used" in x and x[0] != "#")


@contextmanager
def guarded(device: str, *arguments: str, **extra: str) -> Iterator[ServerProcess]:
    """A server whose watchdog is quick."""
    limits = ("--max-model-len", "256", "--num-gpu-blocks-override", "64")
    name = ("--served-model-name", "tested")
    watchdog = ("--progress-timeout", str(PROGRESS_TIMEOUT_S), "--max-restarts", "5")
    with server_on(device, MODEL, *limits, *name, *watchdog, *arguments, **extra) as server:
        yield server


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """What is served on: gcu, or what the test is parametrized with."""
    return str(getattr(request, "param", "gcu"))


@pytest.fixture
def panel(panels: Path, device: str) -> Any:
    from fd_simdevice.panel import Panel

    from fastdeploy_core.tensor import load

    load("paddle")  # the first process that loads the device types makes their panels
    panel = Panel(panels, DEVICES[device])
    faults = dict.fromkeys((*ONCE, "fail_kernel_at", "hang_at", "lost", "limit_bytes"), 0)
    panel.set(delay_us=50, **faults)
    yield panel
    panel.set(**faults)


def truth(server: ServerProcess) -> dict[int, list[int]]:
    return {n: ask(server.url, n)[1] for n in range(NUM_CLIENTS)}


def check_answers(load: Load, expected: dict[int, list[int]]) -> None:
    assert load.answers
    for number, *tokens in load.answers:
        assert tokens == expected[number], "an answer was corrupted"


@pytest.mark.parametrize(
    ("device", "faults"),
    # On metax decode steps are captured: it is the launch of a graph that fails.
    [("gcu", ONCE), ("metax", ("fail_launch_at",)), ("gaudi", ("fail_copy_at",))],
    indirect=["device"],
)
def test_one_failed_call_costs_no_wrong_answer(
    panel: Any, device: str, faults: tuple[str, ...]
) -> None:
    with guarded(device) as server:
        expected = truth(server)
        for fault in faults:
            load = Load(server)
            for _ in range(4):
                load.wait(2)
                panel.set(**{fault: 20})
            # An allocator that holds enough memory never asks for more.
            assert fault == "fail_alloc_at" or wait_zero(panel, fault)
            load.wait(NUM_CLIENTS)
            load.stop()
            panel.set(**{fault: 0})
            assert is_healthy(server.url)
            check_answers(load, expected)
            assert truth(server) == expected
            wait_for(lambda: blocks_used(server.url) == 0, "blocks to come back", 10)


def test_memory_that_runs_out_costs_what_does_not_fit(panel: Any) -> None:
    """Nothing more is to be had for a while: whatever needs more fails, the rest goes on."""
    with guarded("gcu") as server:
        expected = truth(server)
        load = Load(server)
        load.wait(2)
        panel.set(limit_bytes=panel.get("used_bytes"))
        refused = panel.get("refused_allocs")
        long_prompt = [ask_many(server.url) for _ in range(2)]
        assert panel.get("refused_allocs") > refused, "memory was enough"
        assert any(status >= 500 for statuses in long_prompt for status in statuses)
        panel.set(limit_bytes=0)
        load.wait(NUM_CLIENTS)
        load.stop()
        assert is_healthy(server.url), server.log[-2000:]
        check_answers(load, expected)
        assert truth(server) == expected
        assert "device memory ran out" in server.log
        wait_for(lambda: blocks_used(server.url) == 0, "blocks to come back", 10)


def ask_many(url: str) -> list[int]:
    """Statuses of six long prompts at once."""

    def one(number: int) -> int:
        body = {"model": "tested", "prompt": [20 + number] * 240, "max_tokens": 4}
        return httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code

    with ThreadPoolExecutor(6) as pool:
        return list(pool.map(one, range(6)))


def wait_zero(panel: Any, knob: str) -> bool:
    wait_for(lambda: panel.get(knob) == 0, f"{knob} to fire", 20)
    return True


def until_red(server: ServerProcess, limit_s: float) -> None:
    wait_for(lambda: not is_healthy(server.url), "health to turn red", limit_s)


def check_recovery(server: ServerProcess, load: Load, expected: dict[int, list[int]]) -> None:
    wait_for(lambda: is_healthy(server.url), "the engine to come back", 90)
    load.wait(NUM_CLIENTS)
    load.stop()
    check_answers(load, expected)
    assert load.errors and set(load.errors) <= {500, 502, 503}, load.errors
    assert truth(server) == expected
    wait_for(lambda: blocks_used(server.url) == 0, "blocks to come back", 10)


@pytest.mark.parametrize("device", ["gcu", "metax", "xpu"], indirect=True)
def test_late_kernel_fault_is_a_lost_device(panel: Any, device: str) -> None:
    with guarded(device) as server:
        expected = truth(server)
        load = Load(server)
        load.wait(NUM_CLIENTS)
        panel.set(fail_kernel_at=50)
        until_red(server, 20)
        check_recovery(server, load, expected)
        assert "the device of rank 0 is lost" in server.log


@pytest.mark.parametrize("device", ["gcu", "dcu"], indirect=True)
def test_lost_device_comes_back_with_a_restart(panel: Any, device: str) -> None:
    with guarded(device) as server:
        expected = truth(server)
        load = Load(server)
        load.wait(NUM_CLIENTS)
        panel.set(lost=1)
        until_red(server, 20)
        panel.set(lost=0)
        check_recovery(server, load, expected)
        assert "the device of rank 0 is lost" in server.log


@pytest.mark.parametrize("device", ["gcu", "iluvatar"], indirect=True)
def test_hang_is_seen_from_outside(panel: Any, device: str) -> None:
    """The hung call holds whatever locks it likes: the watchdog is another process."""
    with guarded(device) as server:
        expected = truth(server)
        load = Load(server)
        load.wait(NUM_CLIENTS)
        began = time.monotonic()
        panel.set(hang_at=30)
        until_red(server, PROGRESS_TIMEOUT_S + 10)
        assert time.monotonic() - began < PROGRESS_TIMEOUT_S + 10
        check_recovery(server, load, expected)
        assert "made no progress for" in server.log


def test_dead_peer_ends_the_group_at_once(panels: Path, panel: Any) -> None:
    one_type = single_root(panels, "gcu")
    with guarded("gcu", "--tensor-parallel-size", "2", **one_type) as server:
        expected = truth(server)
        load = Load(server)
        load.wait(NUM_CLIENTS)
        os.kill(rank_process(server), signal.SIGKILL)
        until_red(server, 20)
        check_recovery(server, load, expected)
        assert "rank 1" in server.log


def rank_process(server: ServerProcess) -> int:
    """Process id of rank 1, a grandchild of the server."""
    for engine in server.children():
        for task in Path(f"/proc/{engine}/task").glob("*/children"):
            for child in task.read_text().split():
                if b"fd-rank1" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
    raise AssertionError("there is no rank 1")


def test_two_ranks_answer_as_one(panels: Path) -> None:
    with guarded("gcu") as server:
        expected = truth(server)
    alone = single_root(panels, "gcu")
    with guarded("gcu", "--tensor-parallel-size", "2", **alone) as server:
        assert truth(server) == expected


def test_replayed_graph_equals_eager_on_a_device_that_serves(panels: Path) -> None:
    import numpy as np

    from fastdeploy_core.contracts.device import DeviceOptions
    from fastdeploy_core.plugins.drivers import lookup

    device = lookup("device", "metax")(DeviceOptions())
    xp = device.xp
    with xp.no_grad():
        rng = np.random.default_rng(0)
        weight = device.to_device(rng.standard_normal((16, 16)).astype("float32"))
        x = device.to_device(np.zeros((4, 16), "float32"))
        out = xp.zeros([4, 16], dtype=xp.float32, device=device.device)

        def run() -> None:
            out.copy_(xp.silu(xp.matmul(xp.rms_norm(x, weight[0], 1e-6), weight)))

        run()
        first = device.capture(run)
        second = device.capture(run, beside=first)
        for graph in (first, second, first):
            x.copy_(device.to_device(rng.standard_normal((4, 16)).astype("float32")))
            graph.replay()
            replayed = np.array(device.to_host(out))
            run()
            assert np.array_equal(replayed, device.to_host(out)) and replayed.any()
    device.close()
