"""`fastdeploy bench`: help, mistakes, numbers, and offline runs of a tiny model."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from fd_bench import report
from fd_bench.client import Measured
from fd_bench.offline import _draft_numbers
from fd_bench.serve import summary
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from fastdeploy_core import tensor
from fastdeploy_core.cli.main import main
from fastdeploy_testing.tiny_model import CONFIG, write_tiny_model

# Options as `vllm bench serve` spells them.
VLLM = ("--model", "m", "--random-input-len", "8", "--random-output-len", "2", "--num-prompts", "1")


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Restores logging, which commands set up."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)


def test_without_a_kind_it_lists_the_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    assert main(["bench", "--help"]) == 0
    assert capsys.readouterr().out.count("latencies of a running server") == 2


@pytest.mark.parametrize("kind", ["throughput", "latency", "serve"])
def test_each_benchmark_explains_itself(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", kind, "--help"]) == 0
    assert "--input-len" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench", "throughout"], "possible: throughput"),
        (["bench", "serve", "--request-rate", "fast"], "--request-rate"),
        (["bench", "latency", "--batch-size", "0"], "--batch-size: expected a whole number from 1"),
        (["bench", "latency", "--num-prompts", "3"], "--num-prompts"),
        (["bench", "throughput", "--num-prompts", "many"], "--num-prompts: expected a whole"),
        (["bench", "serve", "--goodput", "speed:3"], "--goodput"),
        (["bench", "latency"], "no model given"),
        (["bench", "serve", "--endpoint", "/v1/messages"], "possible: /v1/completions"),
        (["bench", "serve", "--extra-body", "{", *VLLM], "--extra-body"),
        (
            ["bench", "serve", "--base-url", "http://127.0.0.1:9", *VLLM],
            "the server does not answer",
        ),
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


def test_percentiles_are_linear_between_neighbours() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert report.percentile(values, 0) == 1.0
    assert report.percentile(values, 50) == 2.5
    assert report.percentile(values, 100) == 4.0
    assert report.percentile([], 50) == 0.0
    assert report.percentile([7.0], 99) == 7.0


def test_goodput_counts_requests_that_met_every_limit() -> None:
    def measured(ttft: float, e2e: float, tokens: int = 5) -> Measured:
        return Measured(ttft_s=ttft, e2e_s=e2e, gaps_s=[0.1], output_tokens=tokens, prompt_tokens=2)

    runs = [measured(0.1, 0.5), measured(0.3, 0.5), measured(0.1, 2.1), Measured(error="503")]
    result = summary(runs, 2.0, 4.0, {"ttft": 0.2, "tpot": 0.2}, [50, 99])
    assert (result["completed"], result["failed"]) == (3, 1)
    assert result["goodput_requests_per_s"] == 0.5
    assert result["slo_met_share"] == 0.25
    assert result["output_tokens_per_s"] == 7.5
    assert result["p50_ttft_ms"] == 100.0
    assert result["mean_tpot_ms"] == pytest.approx(1000 * (0.1 + 0.05 + 0.5) / 3, rel=1e-3)


@pytest.mark.parametrize("kind", ["EBChat", "EB", "sharegpt"])
def test_serve_sends_what_printed_commands_say(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            asked.append((self.path, json.loads(body)))
            piece = {"choices": [{"text": "a"}]}
            usage = {"usage": {"prompt_tokens": 3, "completion_tokens": 2}}
            answer = f"data: {json.dumps(piece)}\n\ndata: {json.dumps(usage)}\n\n".encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None: ...

    question = [{"role": "user", "content": "Hi"}]
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    entry = {
        "EBChat": {"messages": question, "max_tokens": 7},
        "EB": {"text": "Hi", "max_dec_len": 7},
        "sharegpt": [{"conversations": turns}],
    }[kind]
    data, fields = tmp_path / "data.json", tmp_path / "fields.yaml"
    data.write_text(json.dumps(entry))
    fields.write_text("top_p: 0.5\n")
    form = ["bench", "serve", "--backend", "openai-chat", "--host", "127.0.0.1", "--seed", "3"]
    form += ["--model", "m", "--endpoint", "/v1/chat/completions", "--dataset-name", kind]
    form += ["--dataset-path", str(data), "--hyperparameter-path", str(fields), "--top-k", "5"]
    form += ["--percentile-metrics", "ttft,e2el", "--metric-percentiles", "80,99.9"]
    form += ["--num-prompts", "1", "--max-concurrency", "1", "--save-result"]
    form += ["--result-dir", str(tmp_path / "new")]
    form += ["--result-filename", "r.json"] if kind == "EB" else []
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert main([*form, "--port", str(server.server_port), "--num-warmups", "0"]) == 0
        finally:
            server.shutdown()
            thread.join()
    ((path, body),) = asked
    assert (path, body["messages"]) == ("/v1/chat/completions", question)
    length = 64 if kind == "sharegpt" else 7
    assert (body["max_tokens"], body["top_p"], body["top_k"]) == (length, 0.5, 5)
    assert "--percentile-metrics has no effect" in capsys.readouterr().err
    (file,) = (tmp_path / "new").iterdir()
    assert file.name == "r.json" or (kind != "EB" and file.suffix == ".json")
    (result,) = json.loads(file.read_text())
    assert result["completed"] == 1 and "p99.9_ttft_ms" in result


def test_evaluation_is_lm_evals_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "lm_eval"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("import sys; sys.exit(len(sys.argv))")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert main(["bench", "eval", "--model", "local-completions", "--write_out"]) == 4


def test_bench_takes_the_difference() -> None:
    names = ("drafts_total", "draft_tokens_total", "accepted_draft_tokens_total", "draft_s")
    before = dict(zip(names, (4, 8, 2, 1.0), strict=True)) | {"accepted_drafts_at_total": [2]}
    after = dict(zip(names, (14, 38, 14, 1.5), strict=True)) | {"accepted_drafts_at_total": [10, 4]}
    change = {name: after[name] - before[name] for name in names}
    found = _draft_numbers(change, before, after, 20)
    assert found["draft_acceptance"] == 0.4 and found["tokens_per_drafted_row"] == 2.2
    assert (found["acceptance_at_0"], found["acceptance_at_1"]) == (0.8, 0.4)
    assert found["mean_draft_ms"] == 25.0
    assert _draft_numbers(dict.fromkeys(names, 0), before, before, 20) == {}


@pytest.fixture
def model(tmp_path: Path, fd_tensor: str) -> list[str]:
    """Arguments of an offline run."""
    library = fd_tensor or tensor.available()[0]
    folder = write_tiny_model(tmp_path / "model")
    words = {f"w{number}": number for number in range(CONFIG["vocab_size"])}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return [
        *("--model", str(folder), "--device", "cpu"),
        *("--tensor-library", library, "--num-threads", "1", "--num-gpu-blocks-override", "32"),
        *("--input-len", "8", "--output-len", "4", "--max-model-len", "64"),
    ]


def test_throughput_counts_what_was_generated(model: list[str], tmp_path: Path) -> None:
    saved = tmp_path / "result.json"
    command = ["bench", "throughput", *model, "--num-prompts", "5", "--no-progress"]
    command += ["--backend", "vllm", "--async-engine", "--prefix-len", "2", "--n", "2"]
    assert main([*command, "--output-json", str(saved)]) == 0
    result = json.loads(saved.read_text())
    assert (result["num_prompts"], result["prompt_tokens"], result["output_tokens"]) == (5, 50, 40)
    assert result["steps"] >= 4
    assert result["output_tokens_per_s"] == pytest.approx(8 * result["requests_per_s"])


def test_latency_reports_each_batch(
    model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "result.json"
    command = ["bench", "latency", *model, "--batch-size", "2", "--num-iters", "3"]
    assert main([*command, "--save-result", str(saved)]) == 0
    result = json.loads(saved.read_text())
    assert (result["batch_size"], result["iterations"]) == (2, 3)
    assert result["mean_batch_ms"] == pytest.approx(4 * result["mean_output_token_ms"], rel=0.01)
    assert "== latency" in capsys.readouterr().out
