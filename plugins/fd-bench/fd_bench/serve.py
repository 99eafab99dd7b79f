"""`fastdeploy bench serve`: what a running server's clients see, at one or several request rates.

Open loop: requests are sent at random moments (Poisson), whether or not earlier ones were answered,
so that a slow server is not spared. Goodput counts requests that met every limit of the SLO.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from fastdeploy_core.cli.parsing import whole
from fastdeploy_core.contracts.command import CommandParser
from fastdeploy_core.errors import ConfigError

from .client import BenchClient, Call, Measured
from .command import add_dataset_arguments
from .data import LOWEST_RANDOM_ID, BenchPrompt, load_prompts
from .other_names import add_options_without_effect
from .report import percentile, save, show, spread
from .worker import run_in_processes

SLO_NAMES = ("ttft", "tpot", "e2e")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SAMPLING = (
    *("top_p", "top_k", "min_p", "logprobs"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)


def run(argv: Sequence[str]) -> int:
    """Measure; 0 when every request was answered."""
    arguments = _parser().parse_args(argv)
    rates = _rates(arguments.request_rate)
    slo = _slo(arguments.goodput)
    if arguments.host or arguments.port:
        arguments.url = f"http://{arguments.host or '127.0.0.1'}:{arguments.port or 8180}"
    if not arguments.endpoint:
        arguments.endpoint = CHAT if arguments.backend.endswith("chat") else TEXT
    if arguments.endpoint not in (CHAT, TEXT):
        raise ConfigError(f"--endpoint {arguments.endpoint!r}; possible: {TEXT}, {CHAT}")
    if arguments.endpoint == CHAT and arguments.dataset is None:
        print(f"random prompts are token ids and go to {TEXT}", file=sys.stderr)
    arguments.fields = _fields(arguments)
    prompts = load_prompts(arguments, arguments.vocab_size)
    results = asyncio.run(_measure(arguments, prompts, rates, slo))
    if (name := arguments.save_result) is not None:
        save(arguments.result_filename or name, results, arguments.result_dir)
    return 1 if any(result["failed"] for result in results) else 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="fastdeploy bench serve", description=__doc__)
    parser.add_argument(
        "--url", "--base-url", default="http://127.0.0.1:8180", help="with or without /v1"
    )
    parser.add_argument("--host", help="instead of --url, with --port")
    parser.add_argument("--port", type=whole(1))
    parser.add_argument("--endpoint", metavar="PATH", help=f"of texts: {TEXT} (default) or {CHAT}")
    parser.add_argument("--backend", default="", metavar="NAME", help="...chat: texts go to chat")
    parser.add_argument("--model-name", "--model", help="default: the first of /v1/models")
    parser.add_argument("--served-model-name", help="the same; goes first")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY", ""))
    parser.add_argument(
        "--request-rate",
        default="inf",
        metavar="R[,R...]",
        help="requests per second; inf: all at once; several: one run each",
    )
    parser.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="B",
        help="shape of the gaps: 1 is Poisson, below 1 comes in bursts, above 1 more evenly",
    )
    parser.add_argument(
        "--num-clients",
        type=whole(1),
        default=1,
        metavar="N",
        help="client processes; one takes some ten thousand tokens per second",
    )
    parser.add_argument("--max-concurrency", type=whole(1), metavar="N", help="requests in flight")
    parser.add_argument(
        "--vocab-size",
        type=whole(LOWEST_RANDOM_ID + 1),
        default=256,
        help="random ids stay below it",
    )
    parser.add_argument(
        *("--num-warmup", "--num-warmups"),
        type=whole(0),
        default=1,
        metavar="N",
        help="requests sent before",
    )
    _add_fields_and_files(parser)
    add_dataset_arguments(parser, 100)
    parser.add_argument("--seed", dest="dataset_seed", type=int, default=0, help=argparse.SUPPRESS)
    add_options_without_effect(parser, is_offline=False)
    return parser


def _add_fields_and_files(parser: argparse.ArgumentParser) -> None:
    """What each request asks for, what is printed, and where the numbers go."""
    parser.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="limits a request must meet, such as ttft:200 tpot:50 e2e:3000",
    )
    parser.add_argument(
        "--percentiles", "--metric-percentiles", default="50,90,99", metavar="P[,P...]"
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--stream-interval",
        type=whole(1),
        metavar="N",
        help="tokens that a chunk waits for; default: the server's",
    )
    parser.add_argument("--respect-eos", action="store_true", help="let answers end by themselves")
    for name in SAMPLING:
        kind = int if name in ("top_k", "logprobs") else float
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="X")
    parser.add_argument("--extra-body", default="{}", metavar="JSON", help="fields of each request")
    parser.add_argument("--hyperparameter-path", metavar="FILE", help="the same from YAML")
    parser.add_argument("--result-dir", default="", metavar="DIR", help="of --save-result")
    parser.add_argument("--result-filename", metavar="NAME", help="of --save-result")


def _fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fields of each request: those of the file, then of options, then of --extra-body."""
    text, given = arguments.extra_body, {}
    try:
        if (file := arguments.hyperparameter_path) is not None:
            given = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
        more = json.loads(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            f"--hyperparameter-path or --extra-body cannot be read: {error}"
        ) from None
    if not isinstance(given, dict) or not isinstance(more, dict):
        raise ConfigError("--hyperparameter-path and --extra-body map names of fields to values")
    asked = {name: getattr(arguments, name) for name in SAMPLING}
    return given | {name: value for name, value in asked.items() if value is not None} | more


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--request-rate must be numbers or inf, got {text!r}") from error
    if not all(rate > 0 for rate in rates):
        raise ConfigError("--request-rate must be above 0")
    return rates


def _slo(pairs: Sequence[str]) -> dict[str, float]:
    limits = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        name = "e2e" if name == "e2el" else name  # vLLM's word
        try:
            limits[name] = float(value) / 1000
        except ValueError as error:
            raise ConfigError(f"--goodput takes NAME:MILLISECONDS, got {pair!r}") from error
        if name not in SLO_NAMES:
            raise ConfigError(f"--goodput {name!r} is unknown; possible: {', '.join(SLO_NAMES)}")
    return limits


async def _measure(
    arguments: argparse.Namespace,
    prompts: Sequence[BenchPrompt],
    rates: Sequence[float],
    slo: dict[str, float],
) -> list[dict[str, Any]]:
    client = BenchClient(arguments.url, arguments.api_key)
    try:
        given = arguments.served_model_name or arguments.model_name
        model = given or (await client.get("/v1/models"))["data"][0]["id"]
    except OSError as error:
        raise ConfigError(f"no server answers at {arguments.url} ({error})") from error
    calls = [_call(prompt, model, arguments) for prompt in prompts]
    for call in calls[: arguments.num_warmup]:
        warm = await client.measure(call.path, call.body)
        if warm.error:
            raise ConfigError(f"the server does not answer the benchmark's requests: {warm.error}")
    results = []
    for rate in rates:
        measured, started, busy_s = await _send_all(client, calls, rate, arguments)
        elapsed = max(m.started_at + m.e2e_s for m in measured) - started
        percents = [float(p) for p in arguments.percentiles.split(",")]
        result = summary(measured, elapsed, rate, slo, percents)
        # Near 1 the client is what was measured.
        result["client_busy"] = busy_s / elapsed
        show(f"request rate {rate:g}/s", result)
        for message in sorted({m.error for m in measured if m.error})[:5]:
            print(f"error: {message}")
        results.append(result)
    client.close()
    return results


def _call(prompt: BenchPrompt, model: str, arguments: argparse.Namespace) -> Call:
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": prompt.output_len,
        "temperature": arguments.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": not arguments.respect_eos,
        # so that a token without text of its own is also counted when it arrives
        "return_token_ids": True,
    }
    if arguments.stream_interval is not None:
        body["stream_interval"] = arguments.stream_interval
    body |= arguments.fields
    messages = prompt.messages
    if messages is None and prompt.text is not None and arguments.endpoint == CHAT:
        messages = [{"role": "user", "content": prompt.text}]
    if messages is not None:
        return Call(0.0, CHAT, {**body, "messages": messages})
    return Call(0.0, TEXT, {**body, "prompt": prompt.text or prompt.token_ids})


async def _send_all(
    client: BenchClient, calls: Sequence[Call], rate: float, arguments: argparse.Namespace
) -> tuple[list[Measured], float, float]:
    """Measurements of every call, when the first one was due, and processor time of the busiest
    client process."""
    draw = random.Random(arguments.dataset_seed)  # noqa: S311 - arrival times, not secrets
    due_s = 0.0
    for call in calls:
        call.due_s = due_s
        if math.isfinite(rate):
            shape = arguments.burstiness
            due_s += draw.gammavariate(shape, 1 / (rate * shape))
    most = arguments.max_concurrency or 0
    if arguments.num_clients > 1:
        return await asyncio.to_thread(
            run_in_processes,
            arguments.url,
            arguments.api_key,
            calls,
            most,
            min(arguments.num_clients, len(calls)),
        )
    start_at, began_s = time.perf_counter(), time.process_time()
    measured = await client.send(calls, start_at, most)
    return measured, start_at, time.process_time() - began_s


def summary(
    measured: Sequence[Measured],
    elapsed: float,
    rate: float,
    slo: dict[str, float],
    percents: Sequence[float],
) -> dict[str, Any]:
    """Every number of one run."""
    good = [m for m in measured if not m.error]
    num_output = sum(m.output_tokens for m in good)
    result: dict[str, Any] = {
        "request_rate": rate if math.isfinite(rate) else "inf",
        "completed": len(good),
        "failed": len(measured) - len(good),
        "duration_s": round(elapsed, 3),
        "prompt_tokens": sum(m.prompt_tokens for m in good),
        "output_tokens": num_output,
        "requests_per_s": len(good) / elapsed,
        "output_tokens_per_s": num_output / elapsed,
        **spread("ttft", [m.ttft_s for m in good], percents),
        **spread("tpot", [m.tpot_s for m in good if m.output_tokens > 1], percents),
        **spread("itl", [gap for m in good for gap in m.gaps_s], percents),
        **spread("e2e", [m.e2e_s for m in good], percents),
        "max_itl_ms": percentile([gap for m in good for gap in m.gaps_s], 100) * 1000,
    }
    if slo:
        met = sum(all(getattr(m, f"{n}_s") <= limit for n, limit in slo.items()) for m in good)
        result["goodput_requests_per_s"] = met / elapsed
        result["slo_met_share"] = met / max(1, len(measured))
    return result
