"""Options of the conformance kit; one server on the demo model, and clients of both APIs."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import httpx
import openai
import pytest
from server_process import REPOSITORY, ServerProcess, serving

pytest_plugins = ["fastdeploy_testing.pytest_plugin"]

MODEL = REPOSITORY / "models" / "ernie-tiny"


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    library = request.config.getoption("--fd-tensor") or "torch"
    options = ("--tensor-library", library, "--dtype", "float32", "--num-threads", "1")
    parsers = ("--reasoning-parser", "qwen3", "--tool-call-parser", "hermes")
    limits = ("--max-model-len", "2048", "--num-gpu-blocks-override", "256")
    grammar = ("--guided-decoding-disable-any-whitespace", "--enable-per-request-metrics")
    with serving(MODEL, *options, *parsers, *limits, *grammar) as process:
        yield process


@pytest.fixture(scope="session")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def oai(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def claude(server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client:
        yield client
