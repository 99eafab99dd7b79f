"""docs/how-to/migrate.md: every command runs as printed, with the demo model in a folder of the
printed name. Its configuration says a longer context, as the model of that name has; nothing else
is changed but the port, which may be taken on the machine that tests.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "migrate.md").read_text("utf-8")
BLOCKS = re.findall(r"```(bash|python)[^\n]*\n(.*?)```", PAGE, re.DOTALL)
DEMO = ROOT / "models" / "ernie-tiny"
NAME = "baidu/ERNIE-4.5-0.3B-Paddle"
_SERVES = re.compile(r"api_server|fastdeploy serve")
_PRINTED = re.compile(r"http://(?:0\.0\.0\.0|localhost):8\d{3}")
_AT = re.compile(r"serving \S+ at http://[^:]+:(\d+)")
START_S = 180.0


@pytest.fixture
def user(tmp_path: Path, tensor_library: str) -> tuple[Path, dict[str, str]]:
    """A folder with the model, and an environment whose `python` and `fastdeploy` are these."""
    model = tmp_path / NAME
    model.mkdir(parents=True)
    for file in DEMO.iterdir():
        if file.is_file() and file.name != "config.json":
            (model / file.name).symlink_to(file)
    config = json.loads((DEMO / "config.json").read_text("utf-8"))
    config["max_position_embeddings"] = 131072
    (model / "config.json").write_text(json.dumps(config))
    tools = tmp_path / "bin"
    tools.mkdir()
    start = f'#!/bin/sh\nexec "{sys.executable}" '
    for name, more in (("python", '"$@"'), ("fastdeploy", '-m fastdeploy_core.cli.main "$@"')):
        (tools / name).write_text(start + more + "\n")
        (tools / name).chmod(0o755)
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("FD_", "VLLM_", "OPENAI_"))}
    plugins = {"FD_PLUGINS": "fd-tools,fd-bench,fd-hub", "HF_HUB_OFFLINE": "1"}
    paths = {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    few = {"OMP_NUM_THREADS": "1", "NO_PROXY": "*"}
    return tmp_path, {**kept, **plugins, **paths, **few}


@contextmanager
def serving(command: str, user: tuple[Path, dict[str, str]]) -> Iterator[tuple[str, list[str]]]:
    """The URL of the printed server, and its log."""
    folder, environment = user
    server = subprocess.Popen(
        ["bash", "-c", f"{_with_exec(command)} --port 0"],
        cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    log: list[str] = []
    assert server.stdout is not None
    reader = threading.Thread(target=log.extend, args=(server.stdout,))
    reader.start()
    try:
        deadline = time.monotonic() + START_S
        while not (at := _AT.search("".join(log))):
            assert server.poll() is None and time.monotonic() < deadline, "".join(log)
            time.sleep(0.1)
        yield f"http://127.0.0.1:{at[1]}", log
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)
        reader.join()
        server.stdout.close()


def _with_exec(command: str) -> str:
    """So that the signal reaches the server and not a shell; variables stay before it."""
    return re.sub(r"^((?:[A-Z_]+=\S+ )*)", r"\1exec ", command.rstrip(), count=1).replace(
        "VLLM_API_KEY=token-abc123 exec", "export VLLM_API_KEY=token-abc123; exec"
    )


def groups() -> list[tuple[str, list[str]]]:
    """Each server with the commands printed after it."""
    found: list[tuple[str, list[str]]] = []
    for language, text in BLOCKS:
        if language == "bash" and _SERVES.search(text):
            found.append((text, []))
        elif language == "bash":
            found[-1][1].extend(text.splitlines())
    return found


def test_the_page_prints_both_projects_commands() -> None:
    servers = [server for server, _ in groups()]
    assert any("entrypoints.openai.api_server" in s for s in servers)
    assert any("--kv-cache-ratio 0.75" in s for s in servers)
    assert all(clients for _, clients in groups())
    assert [language for language, _ in BLOCKS].count("python") == 1


@pytest.mark.skipif(shutil.which("curl") is None, reason="the page calls curl, which is not here")
@pytest.mark.parametrize(("server", "clients"), groups())
def test_a_printed_server_and_the_calls_after_it(
    server: str, clients: list[str], user: tuple[Path, dict[str, str]]
) -> None:
    folder, environment = user
    with serving(server, user) as (url, log):
        for client in clients:
            done = subprocess.run(
                ["bash", "-c", _PRINTED.sub(url, client)],
                cwd=folder, env=environment, capture_output=True, text=True, timeout=300,
            )  # fmt: skip
            assert done.returncode == 0, (client, done.stdout, done.stderr)
            assert '"error":' not in done.stdout, (client, done.stdout)
            if "capital" in client:
                pieces = re.findall(r'"content": ?"([^"]*)"', done.stdout)  # of a stream
                assert "Beijing" in ("".join(pieces) or done.stdout), done.stdout
            if "/v1/models" in client:
                assert json.loads(done.stdout)["data"][0]["id"] == Path(NAME).name
    said = "".join(log)
    for flag in re.findall(r"--(?:[a-z]+-)*port(?= 818[1-3])|--kv-cache-ratio|--trust\S+", server):
        assert said.count(f"{flag} has no effect: ") == 1, said


def test_the_printed_offline_program(user: tuple[Path, dict[str, str]]) -> None:
    folder, environment = user
    (text,) = (text for language, text in BLOCKS if language == "python")
    done = subprocess.run(
        [sys.executable, "-c", text],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Beijing" in done.stdout
    assert "trust_remote_code has no effect" in done.stderr
