"""The commands: help, mistakes in one line, tokenizers, what a bug report may show."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from fd_tools import collect_env, run_batch
from fd_tools.http_client import Client
from server_support import write_tokenizer
from tokenizers import Tokenizer

from fastdeploy_core.cli.main import main

COMMANDS = ("chat", "complete", "run-batch", "tokenizer", "collect-env")


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Restores logging, which run-batch sets up."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert f"fastdeploy {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["chat", "-q", "x", "--url", "http://127.0.0.1:9"], "no server answers"),
        (["chat", "-q", "x", "--url", "ftp://x"], "--url"),
        (["chat", "--max-token", "3", "--temprature", "1"], "did you mean --temperature?"),
        (["tokenizer", "info", "--model", "m", "--jsn"], "did you mean --json?"),
        (["tokenizer", "inf", "--model", "m"], "invalid choice"),
        (["tokenizer", "--model", "m", "--vocab-sise"], "did you mean --vocab-size?"),
        (["collect-env", "--xyzzy"], "see `fastdeploy collect-env --help`"),
        (["run-batch", "-i", "/nowhere", "-o", "x", "m"], "does not exist"),
        (["run-batch", "-i", "http://127.0.0.1:9/x?key=s", "-o", "x", "m"], ":9/x cannot be read"),
        (["tokenizer", "info", "--model", "/nowhere"], "/nowhere"),
    ],
)
def test_mistakes_are_one_line_and_an_exit_code(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1, error
    assert error[0].startswith("fastdeploy: error: ")
    assert words in error[0]


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "fastdeploy_core.cli.main", *arguments]


def test_a_closed_pipe_is_no_traceback(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    line = _command("tokenizer", "encode", "x" * 50_000, "--model", str(folder))
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()


def test_tokenizer_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write_tokenizer(tmp_path))
    assert main(["tokenizer", "encode", "hé", "--model", folder, "--json"]) == 0
    encoded = json.loads(capsys.readouterr().out)
    assert encoded["count"] == 3
    ids = ",".join(map(str, encoded["ids"]))
    assert main(["tokenizer", "decode", ids, "--model", folder, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"text": "hé"}
    assert main(["tokenizer", "info", "--model", folder, "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert (info["vocab_size"], info["chat_template"]) == (259, "yes")
    assert main(["tokenizer", "decode", "99999", "--model", folder]) == 1
    assert "is not one of" in capsys.readouterr().err


def test_tokenizer_command_in_the_originals_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of its options at once, as its documents print them."""
    folder = write_tokenizer(tmp_path)
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = str(own.encode("hi", add_special_tokens=False).ids)
    form = ["tokenizer", "-m", str(folder), "-e", "hé", "-i", "-vs", "--json"]
    listed, exported = tmp_path / "new" / "vocab.json", tmp_path / "vocab.txt"
    assert main([*form, "-d", ids, "-ve", str(listed)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["count"], found["text"], found["vocab_size"]) == (3, "hi", 259)
    vocabulary = json.loads(listed.read_text("utf-8"))
    assert vocabulary == own.get_vocab()
    assert main(["tokenizer", "--model", str(folder), "--vocab-export", str(exported)]) == 0
    lines = exported.read_text("utf-8").splitlines()
    assert [int(line.split("\t")[0]) for line in lines] == sorted(vocabulary.values())
    assert main(["tokenizer", "--model", str(folder)]) == 1
    assert "give --encode" in capsys.readouterr().err


def test_collect_env_shows_settings_and_hides_secrets() -> None:
    found = collect_env.collect(
        {"FD_LOG_LEVEL": "debug", "FD_API_KEY": "sk-1", "OMP_NUM_THREADS": "2", "HOME": "/h"}
    )
    assert found["environment"] == {
        "FD_API_KEY": "***",
        "FD_LOG_LEVEL": "debug",
        "OMP_NUM_THREADS": "2",
    }
    assert found["packages"]["fastapi"][0].isdigit()
    assert any("device cpu" in row for row in found["plugins"].values())


def test_collect_env_prints_json() -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FD_")}
    ended = subprocess.run(
        _command("collect-env", "--json"), env=kept, capture_output=True, text=True, check=True
    )
    assert set(json.loads(ended.stdout)) == {
        "fastdeploy",
        "machine",
        "packages",
        "plugins",
        "environment",
    }


def test_a_batch_comes_from_a_url_and_goes_to_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And is not lost where it is not taken."""
    put: list[bytes] = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def answered(_: object, source: Path, target: Path) -> int:
        target.write_bytes(source.read_bytes().upper())
        return 0

    monkeypatch.setattr(run_batch, "_answer_batch", answered)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"requests")

        def do_PUT(self) -> None:
            put.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200 if self.path == "/out" else 403)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        base = f"http://127.0.0.1:{server.server_port}"
        codes = [
            main(["run-batch", "-i", f"{base}/in", "-o", f"{base}/{name}", "--model", "m"])
            for name in ("out", "closed")
        ]
        server.shutdown()
        thread.join()
    assert (codes, put) == ([0, 1], [b"REQUESTS"] * 2)
    kept = capsys.readouterr().err.strip().rpartition("kept as ")[2]
    assert Path(kept).read_bytes() == b"REQUESTS"


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/", "/behind/proxy"])
def test_an_address_with_and_without_v1_is_the_same(path: str) -> None:
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            body = b'{"data": [{"id": "m"}]}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert Client(f"http://127.0.0.1:{server.server_port}{path}").model() == "m"
        thread.join()
    expected = "/behind/proxy/v1/models" if "proxy" in path else "/v1/models"
    assert asked == [expected]
