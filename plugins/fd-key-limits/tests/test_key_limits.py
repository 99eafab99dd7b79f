"""Keys are held to the limits of a file, by a server that real clients ask."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fd_key_limits import limits as module
from fd_key_limits.accounts import Account, SharedAccounts
from fd_key_limits.file import Limits, read
from fd_key_limits.limits import KeyLimits
from server_process import ServerProcess
from server_process import serving as serving_model
from server_support import ScriptedEngine, live, wait_for, write_null_model, write_tokenizer

from fastdeploy_core.config.arguments import build_engine_config, build_server_config
from fastdeploy_core.errors import ConfigError, QueueFull
from fastdeploy_core.tokenizer import Tokenizer

KEYS = ("sk-one", "sk-two")
BODY = {"prompt": "12345678", "max_tokens": 4, "ignore_eos": True}


def digest(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "limits.toml"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path / "model"))


@contextmanager
def serving(path: Path, tokenizer: Tokenizer, text: str) -> Iterator[tuple[Any, ScriptedEngine]]:
    """A server with both keys, and a function that asks it with one of them."""
    path.write_text(text)
    engine = ScriptedEngine(tokenizer, lambda prompt, index: "abcd")
    with live(KeyLimits(str(path)).around(engine), tokenizer, api_keys=KEYS) as server:

        def ask(key: str, **body: Any) -> httpx.Response:
            headers = {"Authorization": f"Bearer {key}"}
            url = f"{server.url}/v1/completions"
            return httpx.post(url, json=BODY | body, headers=headers, timeout=30)

        ask.url = server.url  # type: ignore[attr-defined]
        yield ask, engine


def refused(answer: httpx.Response, limit: str) -> int:
    """Seconds until it may be asked again."""
    assert answer.status_code == 429, answer.text
    error = answer.json()["error"]
    assert limit in error["message"] and error["type"] == "RateLimitError"
    return int(answer.headers["retry-after"])


def test_requests_of_each_key_are_counted_apart(path: Path, tokenizer: Tokenizer) -> None:
    with serving(path, tokenizer, "[default]\nrequests_per_minute = 2\n") as (ask, _):
        for key in KEYS:
            assert [ask(key).status_code for _ in range(2)] == [200, 200]
            assert 1 <= refused(ask(key), "requests_per_minute = 2") <= 30


def test_tokens_are_those_of_prompt_and_answer(path: Path, tokenizer: Tokenizer) -> None:
    text = f'[one]\nkey = "{digest(KEYS[0])}"\ntokens_per_minute = 20\n'
    with serving(path, tokenizer, text) as (ask, _):
        usage = ask(KEYS[0]).json()["usage"]
        # 12 of 20 are used, so the next prompt of 8 fits only just, and then nothing does
        assert usage["total_tokens"] == 12
        assert ask(KEYS[0]).status_code == 200
        assert 20 <= refused(ask(KEYS[0]), "tokens_per_minute = 20") <= 40
        assert ask(KEYS[1]).status_code == 200, "a key without a section is not limited"


def test_running_requests_end_with_their_clients(path: Path, tokenizer: Tokenizer) -> None:
    with serving(path, tokenizer, "[default]\nrunning_requests = 1\n") as (ask, engine):
        engine.gate = threading.Event()
        headers = {"Authorization": f"Bearer {KEYS[0]}"}
        body = BODY | {"stream": True}
        with httpx.stream("POST", f"{ask.url}/v1/completions", json=body, headers=headers) as held:
            lines = held.iter_lines()
            next(lines)  # and kept: a generator that is dropped closes its connection
            assert refused(ask(KEYS[0]), "running_requests = 1") == 1
            other = threading.Thread(target=ask, args=(KEYS[1],))
            other.start()
            wait_for(lambda: engine.running == 2, "the other key's request to run")
        wait_for(lambda: engine.running == 1, "the client that left to be noticed")
        engine.gate.set()
        other.join()
        assert ask(KEYS[0]).status_code == 200


def test_the_openai_client_waits_as_it_is_told(path: Path, tokenizer: Tokenizer) -> None:
    """Its own retries read Retry-After."""
    with serving(path, tokenizer, "[default]\nrequests_per_minute = 20\n") as (ask, engine):
        client = openai.OpenAI(base_url=f"{ask.url}/v1", api_key=KEYS[0], max_retries=0)
        with pytest.raises(openai.RateLimitError, match="requests_per_minute = 20"):
            for _ in range(200):  # 20, and what flows in meanwhile
                client.completions.create(model="tiny", prompt="a", max_tokens=1)
        num_served = len(engine.requests)
        patient = client.with_options(max_retries=2)
        assert patient.completions.create(model="tiny", prompt="a", max_tokens=1).choices
        assert num_served >= 20 and len(engine.requests) == num_served + 1


def test_a_changed_file_is_read_again_and_a_wrong_one_is_not(
    path: Path,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    with serving(path, tokenizer, "[default]\nrequests_per_minute = 1\n") as (ask, _):
        assert [ask(KEYS[0]).status_code for _ in range(2)] == [200, 429]
        path.write_text("[default]\nrequests_per_hour = 1\n")
        assert ask(KEYS[0]).status_code == 429
        assert "requests_per_hour" in caplog.text and "requests_per_minute" in caplog.text
        path.unlink()
        assert ask(KEYS[0]).status_code == 429
        path.write_text("[default]\nrequests_per_minute = 100\n")
        assert [ask(KEYS[0]).status_code for _ in range(3)] == [200] * 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[a]\nrequests_per_minute = 1", "sha256sum"),
        ('[a]\nkey = "sk-plain"', "sha256:HEX"),
        ("[default]\nrequests_per_minute = 0", "at least 1"),
        ("[default]\nrequests_per_minute = true", "whole number"),
        ("[default]\nname = 3", "'name' is no limit; there are: key, requests_per_minute"),
        ("requests_per_minute = 3", r"\[requests_per_minute\]: a section is expected"),
        (f'[a]\nkey = "{digest("x")}"\n[b]\nkey = "{digest("x")}"', r"has the key of \[a\]"),
        ("[default", "cannot be read"),
    ],
)
def test_mistakes_in_the_file_are_named(path: Path, text: str, words: str) -> None:
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read(path)


def test_a_bucket_fills_evenly_and_pays_what_it_owes() -> None:
    limits, account = Limits(tokens_per_minute=60), Account.at(0.0)
    account.enter(limits, 60, 0.0)
    account.tokens.used += 30  # generated
    for at_s, is_full in ((0.0, True), (29.9, True), (30.0, True), (39.9, True), (40.1, False)):
        if is_full:
            with pytest.raises(QueueFull) as refusal:
                account.enter(limits, 10, at_s)
            assert refusal.value.retry_after_s == pytest.approx(40.0 - at_s)
        else:
            account.enter(limits, 10, at_s)
    with pytest.raises(QueueFull):
        account.enter(limits, 1000, 99.0)
    account.enter(limits, 1000, 200.0)  # more than fits ever: once nothing is used


def asked(server: ServerProcess, key: str, **body: Any) -> int:
    """The status of one request; 0: the connection broke."""
    headers = {"Authorization": f"Bearer {key}"}
    url, sent = f"{server.url}/v1/completions", {"prompt": [5, 6], "max_tokens": 2} | body
    try:
        return httpx.post(url, json=sent, headers=headers, timeout=60).status_code
    except httpx.HTTPError:
        return 0


@contextmanager
def two_api_servers(tmp_path: Path, path: Path, text: str) -> Iterator[ServerProcess]:
    path.write_text(text)
    model = write_null_model(tmp_path / "served", step_s=0.05, num_blocks=512)
    options = ("--device", "null", "--api-server-count", "2", "--api-key-limits", str(path))
    with serving_model(model, *options, *(w for key in KEYS for w in ("--api-key", key))) as server:
        yield server


def test_api_servers_count_together(tmp_path: Path, path: Path) -> None:
    text = f'[one]\nkey = "{digest(KEYS[0])}"\nrequests_per_minute = 12\n'
    with two_api_servers(tmp_path, path, text) as server, ThreadPoolExecutor(8) as pool:
        began = time.monotonic()
        answers = Counter(pool.map(lambda _: asked(server, KEYS[0]), range(40)))
        # as many as a bucket holds, and what flows in meanwhile
        most = 12 + (time.monotonic() - began) * 12 / 60
        assert answers[200] + answers[429] == 40 and 12 <= answers[200] <= most
        others = Counter(pool.map(lambda _: asked(server, KEYS[1]), range(40)))
        assert others == {200: 40}, "without a limit"


@pytest.mark.slow
def test_an_api_server_that_dies_gives_back_what_it_ran(tmp_path: Path, path: Path) -> None:
    text = "[default]\nrunning_requests = 4\n"
    with two_api_servers(tmp_path, path, text) as server, ThreadPoolExecutor(8) as pool:
        long = [
            pool.submit(asked, server, KEYS[0], max_tokens=400, ignore_eos=True) for _ in range(8)
        ]
        # Nothing else is asked before: it would take one of the places.
        wait_for(lambda: sum(job.done() for job in long) == 4, "those without a place to end")
        assert asked(server, KEYS[0]) == 429 and asked(server, KEYS[1]) == 200
        names = api_servers(server)
        os.kill(next(p for p, name in names.items() if name.endswith("0")), signal.SIGKILL)
        wait_for(lambda: asked(server, KEYS[0]) == 200, "places of the dead one to be free", 60)
        found = Counter(job.result() for job in long)
        assert found[429] == 4 and found[0] + found[200] == 4 and found[0] > 0


def api_servers(server: ServerProcess) -> dict[int, str]:
    """Process ids and names."""
    found = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in server.children()}
    names = {pid: re.search(rb"fastdeploy-api\d", line) for pid, line in found.items()}
    return {pid: name[0].decode() for pid, name in names.items() if name}


def test_accounts_are_shared_and_outlive_who_wrote_them(tmp_path: Path) -> None:
    first, second = (SharedAccounts(tmp_path / "shared", number, 2) for number in range(2))
    limits = Limits(running_requests=3)
    for accounts, tenant in ((first, "a" * 16), (second, "a" * 16), (second, "")):
        with accounts.open(tenant) as account:
            account.enter(limits, 5, 0.0)
    with first.open("a" * 16) as account:
        assert (account.running, account.running_elsewhere) == (1, 1)
        account.enter(limits, 5, 0.0)
    with pytest.raises(QueueFull), second.open("a" * 16) as account:
        account.enter(limits, 5, 0.0)
    again = SharedAccounts(tmp_path / "shared", 0, 2)  # in the place of one that died
    with again.open("a" * 16) as account:
        assert (account.running, account.running_elsewhere) == (0, 1)
    with again.open("") as account:
        assert (account.running, account.running_elsewhere) == (0, 1)


@pytest.mark.skipif(os.name != "posix", reason="models are served on Linux")
def test_the_flag_reaches_the_server(tmp_path: Path, path: Path) -> None:
    values = {"model": str(write_null_model(tmp_path)), "api_key_limits": str(path)}
    config = build_server_config(values, build_engine_config({"model": values["model"]}))
    assert config.api_key_limits == str(path)
