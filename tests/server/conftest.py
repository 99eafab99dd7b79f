"""Fixtures of the server tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from fastdeploy_core.tokenizer import Tokenizer
from tests.server_support import LiveServer, ScriptedEngine, live, write_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_folder)


@pytest.fixture
def engine(tokenizer: Tokenizer) -> ScriptedEngine:
    """Answers "Hello, world!" to everything until a test sets another script."""
    return ScriptedEngine(tokenizer, lambda prompt, index: "Hello, world!")


@pytest.fixture
def server(engine: ScriptedEngine, tokenizer: Tokenizer) -> Iterator[LiveServer]:
    with live(engine, tokenizer) as running:
        yield running


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as http:
        yield http
