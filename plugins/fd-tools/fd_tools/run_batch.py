"""`fastdeploy run-batch -i in.jsonl -o out.jsonl MODEL`: an OpenAI batch file, answered in process.

One output line per input line, in the same order. A line that cannot be answered gets its error and
stops nothing else. The output appears under its name only when it is complete.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from fastdeploy_core.cli.parsing import parse_table
from fastdeploy_core.config.argument_values import of_scope
from fastdeploy_core.errors import ConfigError

URLS = (
    *("/v1/chat/completions", "/v1/completions"),
    *("/v1/responses", "/v1/messages"),  # of fd-agent-apis
    *("/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/v1/classify"),  # of fd-pooling
    *("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/v1/reward"),
    "/v1/chat/reward",
)
TIMEOUT_S = 60.0  # of a file behind a URL, without a byte
IN_FLIGHT_PER_SEQ = 2  # enough to keep the batch full while answers are written


def main(argv: Sequence[str]) -> int:
    """Answer a file; 0 when every line was answered, 1 when some have an error."""
    values, own = parse_table(
        argv,
        "fastdeploy run-batch",
        "Answer the requests of an OpenAI batch file with an engine in this process.",
        ("engine", "server"),
        _own_arguments,
    )
    if own.output_tmp_dir is not None and not Path(own.output_tmp_dir).is_dir():
        raise ConfigError(f"--output-tmp-dir {own.output_tmp_dir!r} is not a folder")
    source, target = Path(own.input_file), Path(own.output_file)
    with tempfile.TemporaryDirectory(dir=own.output_tmp_dir, prefix="fd-batch-") as folder:
        if _is_url(own.input_file):
            _download(own.input_file, source := Path(folder, "requests.jsonl"))
        if _is_url(own.output_file):
            target = Path(folder, "answers.jsonl")
        num_errors = _answer_batch(values, source, target)
        if _is_url(own.output_file):
            _upload(target, own.output_file)
    return 1 if num_errors else 0


def _answer_batch(values: Mapping[str, Any], source: Path, target: Path) -> int:
    """How many answers have an error."""
    if not source.is_file():
        raise ConfigError(f"input file {str(source)!r} does not exist")
    if not target.parent.is_dir():
        raise ConfigError(f"folder {str(target.parent)!r} of the output file does not exist")
    from fastdeploy_core.cli.logs import setup_logging
    from fastdeploy_core.config.arguments import build_engine_config, build_server_config
    from fastdeploy_core.plugins.checkpoints import find_model

    setup_logging(values.get("log_level", "info"))
    engine = build_engine_config(of_scope(values, "engine"), find_model)
    server = build_server_config(values, engine)
    # Nobody else reaches this app, so it needs no keys; and a batch waits instead of being refused.
    limit = engine.batch.max_num_seqs * IN_FLIGHT_PER_SEQ
    server = replace(server, api_keys=(), allowed_hosts=(), max_concurrency=max(limit, 512))
    num_lines, num_errors = asyncio.run(_answer_file(source, target, engine, server, limit))
    print(f"{num_lines} requests, {num_errors} with an error, written to {target}")
    return num_errors


def _own_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("files")
    group.add_argument(
        "-i", "--input-file", required=True, metavar="FILE", help="requests, JSONL; or a URL"
    )
    group.add_argument(
        *("-o", "--output-file"),
        required=True,
        metavar="FILE",
        help="answers, JSONL; or a URL that takes PUT",
    )
    group.add_argument("--output-tmp-dir", metavar="DIR", help="where files of URLs are meanwhile")


async def _answer_file(
    source: Path, target: Path, engine: Any, server: Any, limit: int
) -> tuple[int, int]:
    from fastdeploy_core.serving.launch import running_app

    num_lines = num_errors = 0
    part = target.with_name(f".{target.name}.part")
    try:
        async with running_app(engine, server) as (app, _):
            with part.open("w", encoding="utf-8") as output:
                async for answer in _in_order(app, _lines(source), limit):
                    num_lines += 1
                    response = answer["response"]
                    failed = answer["error"] is not None or response["status_code"] != 200
                    num_errors += failed
                    output.write(json.dumps(answer, ensure_ascii=False) + "\n")
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return num_lines, num_errors


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.strip():
                yield line


async def _in_order(app: Any, lines: Iterator[str], limit: int) -> AsyncIterator[dict[str, Any]]:
    """Answers in the order of the lines, with at most `limit` being worked on."""
    running: list[asyncio.Task[dict[str, Any]]] = []
    try:
        for line in lines:
            running.append(asyncio.create_task(_answer(app, line)))
            while len(running) >= limit:
                yield await running.pop(0)
        while running:
            yield await running.pop(0)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _answer(app: Any, line: str) -> dict[str, Any]:
    """The output line of an input line."""
    from fastdeploy_core.serving.http.errors import ApiError
    from fastdeploy_core.serving.http.json_body import parse_json

    from .in_process import call

    custom_id = None
    try:
        request = parse_json(line.encode("utf-8"))
        if not isinstance(request, dict):
            raise ApiError(400, "a line must be a JSON object")
        custom_id = request.get("custom_id")
        _check(request)
    except ApiError as error:
        return _line(custom_id, None, {"code": "invalid_request", "message": error.message})
    status, request_id, body = await call(app, "POST", request["url"], request["body"])
    response = {"status_code": status, "request_id": request_id, "body": body}
    return _line(custom_id, response, None)


def _check(request: dict[str, Any]) -> None:
    from fastdeploy_core.serving.http.errors import ApiError

    if not isinstance(request.get("custom_id"), str):
        raise ApiError(400, "custom_id must be a string")
    if request.get("method", "POST") != "POST":
        raise ApiError(400, "method must be POST")
    if request.get("url") not in URLS:
        raise ApiError(400, f"url must be one of {', '.join(URLS)}")
    body = request.get("body")
    if not isinstance(body, dict):
        raise ApiError(400, "body must be an object")
    if body.get("stream"):
        raise ApiError(400, "a batch cannot be streamed")


def _line(custom_id: Any, response: Any, error: Any) -> dict[str, Any]:
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": custom_id if isinstance(custom_id, str) else None,
        "response": response,
        "error": error,
    }


# -- files behind http(s) --------------------------------------------------------------------------


def _is_url(name: str) -> bool:
    """Whether it is not the name of a file here."""
    return name.startswith(("http://", "https://"))


def _download(url: str, target: Path) -> None:
    """Write what is behind the URL into the file; ConfigError if that cannot be had."""
    try:
        with urlopen(url, timeout=TIMEOUT_S) as answer, target.open("wb") as file:  # noqa: S310
            shutil.copyfileobj(answer, file)
    except (OSError, HTTPException) as error:
        raise ConfigError(f"{_shown(url)} cannot be read: {error}") from None


def _upload(source: Path, url: str) -> None:
    """Put the file there. If it is not taken, ConfigError says where a copy is kept."""
    size = {"Content-Length": str(source.stat().st_size)}
    try:
        with source.open("rb") as file:
            request = Request(url, file, size, method="PUT")  # noqa: S310
            urlopen(request, timeout=TIMEOUT_S).close()  # noqa: S310
    except (OSError, HTTPException) as error:
        kept = shutil.copy(source, tempfile.mkdtemp(prefix="fd-batch-"))
        raise ConfigError(f"{_shown(url)} takes no PUT: {error}; it is kept as {kept}") from None


def _shown(url: str) -> str:
    """Without a password, and a query, which may be a signature."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
