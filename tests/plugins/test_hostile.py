"""Forty hostile wheels side by side: every tool answers, names each, and agrees with the others."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests import server_process
from tests.plugins.hostile import HOSTILE, TALKATIVE, distribution, put
from tests.plugins.wheels import environment, fastdeploy

MOST_S = 3.0  # that all of them together may cost a start
SHIPPED = {"FD_PLUGIN_HOOK_TIMEOUT_S": "2", "FD_PLUGIN_DRIVER_TIMEOUT_S": "60"}


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site with all of them."""
    site = tmp_path_factory.mktemp("crowd") / "site"
    for name, plugin in HOSTILE.items():
        put(site, tmp_path_factory.mktemp("wheels"), name, plugin)
    return site


def test_there_are_forty() -> None:
    assert len(HOSTILE) == 40


@pytest.fixture(scope="module")
def checks(crowd: Path) -> list[dict[str, str]]:
    """What doctor says."""
    done = fastdeploy(crowd, "plugins", "doctor", "--json", "--timeout", "4", timeout_s=200)
    assert done.returncode == 1, done.stderr
    rows: list[dict[str, str]] = json.loads(done.stdout)["checks"]
    return rows


@pytest.mark.parametrize("name", HOSTILE)
def test_doctor_names_each(checks: list[dict[str, str]], name: str) -> None:
    stem = distribution(name)
    mine = [
        row
        for row in checks
        if row["origin"].startswith(f"{stem} ") or stem.replace("-", "_") in row["origin"]
    ]
    failed = [row["hint"] for row in mine if row["verdict"] == "FAIL"]
    assert any(HOSTILE[name].words in hint for hint in failed), mine
    assert all("\n" not in hint for hint in failed)


def test_doctor_says_nothing_of_the_core(checks: list[dict[str, str]]) -> None:
    of_core = [row for row in checks if row["origin"].startswith("fastdeploy-core ")]
    assert len(of_core) > 10 and all(row["verdict"] == "PASS" for row in of_core)


@pytest.mark.parametrize("kind", ["device", "attention", "kernels"])
def test_why_chooses_what_a_start_chooses(crowd: Path, kind: str) -> None:
    model = str(server_process.REPOSITORY / "models" / "ernie-tiny")
    words = ("--model", model) if kind != "device" else ()
    done = fastdeploy(crowd, "plugins", "why", kind, *words, "--json", timeout_s=300, **SHIPPED)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    decision = answer["decisions"][0]
    wanted = {"device": ("cpu", "x86"), "kernels": ("cpu", "x86")}.get(kind, ("reference", "x86"))
    assert decision["winner"] in wanted
    if kind == "device":
        rows = {row["distribution"]: row for row in decision["candidates"]}
        for name in ("driver-raises", "driver-newer", "driver-sleeps", "driver-undeclared"):
            row = rows[distribution(name)]
            assert not row["accepted"] and HOSTILE[name].words in row["reason"], row
        assert sum(row["name"] == decision["winner"] for row in decision["candidates"]) == 1


def test_list_takes_a_moment(crowd: Path) -> None:
    done = fastdeploy(crowd, "plugins", "list", "--json", timeout_s=300)
    entries = json.loads(done.stdout)["plugins"]
    named = {e["distribution"] for e in entries}
    assert {distribution(name) for name, p in HOSTILE.items() if not p.raw} <= named
    assert len([e for e in entries if "fd_bad" in e["distribution"]]) == 2, "unreadable metadata"


@pytest.fixture(scope="module")
def talkative(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site with one that prints wherever it can."""
    site = tmp_path_factory.mktemp("talk") / "site"
    put(site, tmp_path_factory.mktemp("wheels"), "talkative", TALKATIVE)
    return site


@pytest.mark.parametrize(
    "words",
    ["list", "doctor", "show fd-bad-talkative", "why device", "why kernels", "why scheduler"],
)
def test_json_is_json_whatever_a_plugin_prints(talkative: Path, words: str) -> None:
    done = fastdeploy(talkative, "plugins", *words.split(), "--json", timeout_s=300)
    assert json.loads(done.stdout), done.stdout
    if words.startswith("why"):
        assert "WELCOME" in done.stderr, "it was asked in this process"


def start_s(site: Path, monkeypatch: pytest.MonkeyPatch, library: str) -> tuple[float, str]:
    """Seconds until the demo model has answered, and the log."""
    monkeypatch.setattr(server_process, "environment", lambda: environment(site, **SHIPPED))
    model = server_process.REPOSITORY / "models" / "ernie-tiny"
    limits = ("--max-model-len", "512", "--num-gpu-blocks-override", "32", "--num-threads", "1")
    started = time.monotonic()
    with server_process.serving(model, *limits, "--tensor-library", library) as server:
        with httpx.Client(base_url=server.url, timeout=300) as client:
            body = {"model": "ernie-tiny", "prompt": "1 + 1 =", "max_tokens": 4}
            answer = client.post("/v1/completions", json=body)
        seconds = time.monotonic() - started
        assert answer.status_code == 200 and answer.json()["choices"][0]["text"]
        return seconds, server.log


@pytest.fixture
def starts(
    crowd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensor_library: str
) -> Iterator[tuple[list[float], list[float], str]]:
    """Seconds of starts without and with them, in turn, and a log."""
    (tmp_path / "empty").mkdir()
    without, together, log = [], [], ""
    for _ in range(3):
        without.append(start_s(tmp_path / "empty", monkeypatch, tensor_library)[0])
        seconds, log = start_s(crowd, monkeypatch, tensor_library)
        together.append(seconds)
    yield without, together, log


@pytest.mark.slow
def test_a_server_starts_nearly_as_fast_among_them(
    starts: tuple[list[float], list[float], str],
) -> None:
    without, together, log = starts
    more = statistics.median(together) - statistics.median(without)
    assert more <= MOST_S, f"{more:.1f} s more: {without} without, {together} with them"
    assert "no firmware" in log and "written for contract 2.0" in log
