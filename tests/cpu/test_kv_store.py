"""KV blocks on disk (fd-kv-disk): what an engine has computed serves the next one, token for
token."""

from __future__ import annotations

import logging
import os
import random
import re
import resource
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from fastdeploy_core.config.arguments import build_engine_config
from fastdeploy_core.engine.core import EngineCore
from fastdeploy_core.models.shapes import read_shapes
from fastdeploy_core.plugins.resolve import resolve
from tests.null_engine import Collector, make_request
from tests.server_process import ServerProcess, serving

MODEL = Path(__file__).resolve().parents[2] / "models" / "ernie-tiny"
BLOCK_SIZE = 16
PROMPT = [random.Random(1).randrange(5, 500) for _ in range(300)]
NUM_CACHED = 288  # whole blocks before the last token
GREEDY = {"max_tokens": 12}
SEEDED = {"max_tokens": 12, "temperature": 1.0, "seed": 3}


@contextmanager
def engine(folder: Path | None, tensor_library: str, **more: Any) -> Iterator[EngineCore]:
    """An engine core with real ranks; without a folder it has no store."""
    store = {"kv_store": "disk", "kv_store_config": {"path": str(folder)}} if folder else {}
    config = build_engine_config(
        {
            "model": str(MODEL),
            "device": "cpu",
            "tensor_library": tensor_library,
            "dtype": "float32",
            "max_model_len": 512,
            "block_size": BLOCK_SIZE,
            "num_gpu_blocks_override": 64,
            "swap_space": 0.03,
            **store,
            **more,
        }
    )
    num_ranks = config.parallel.tensor_parallel_size
    shapes = read_shapes(config.model.hf_config, num_ranks)
    moe = [shapes.moe] if shapes.moe is not None else []
    core = EngineCore(config, resolve(config, layers=shapes.layers, moe=moe))
    try:
        yield core
    finally:
        core.close()


def answer(core: EngineCore, prompt: list[int], **sampling: Any) -> tuple[list[int], int]:
    """The tokens of an answer, and how many of the prompt's came from a cache."""
    collector = Collector()
    core.add(make_request("it", prompt, **sampling))
    while core.has_work():
        collector.take(core.step())
    core.scheduler.check_idle()
    return collector.tokens["it"][0], int(collector.first["it"].num_cached_tokens or 0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tensor_parallel_size": 2},
        {"kv_cache_dtype": "int8"},
        {"max_num_batched_tokens": 64},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ],
    ids=["plain", "two ranks", "quantized KV", "chunked prefill", "drafts"],
)
def test_the_next_engine_goes_on_with_what_one_has_computed(
    options: dict[str, Any], tmp_path: Path, tensor_library: str
) -> None:
    with engine(None, tensor_library, **options) as core:
        greedy, seeded = answer(core, PROMPT, **GREEDY)[0], answer(core, PROMPT, **SEEDED)[0]
    with engine(tmp_path, tensor_library, **options) as core:
        assert answer(core, PROMPT, **GREEDY) == (greedy, 0)
    with engine(tmp_path, tensor_library, **options) as core:
        assert answer(core, PROMPT, **SEEDED) == (seeded, NUM_CACHED)
        assert core.stats().kv_store_read_blocks_total == NUM_CACHED // BLOCK_SIZE
        assert answer(core, PROMPT, **GREEDY) == (greedy, NUM_CACHED)


def test_what_differs_in_model_format_or_ranks_is_not_shared(
    tmp_path: Path, tensor_library: str
) -> None:
    with engine(tmp_path, tensor_library) as core:
        answer(core, PROMPT, **GREEDY)
    others = [
        {"kv_cache_dtype": "int8"},
        {"tensor_parallel_size": 2},
        {"dtype": "bfloat16"},
        {"block_size": 32},
        {"model": str(_changed_copy(tmp_path / "model"))},
    ]
    for other in others:
        with engine(tmp_path, tensor_library, **other) as core:
            assert answer(core, PROMPT, **GREEDY)[1] == 0, other


def test_another_folder_of_the_same_weights_shares(tmp_path: Path, tensor_library: str) -> None:
    with engine(tmp_path / "kv", tensor_library) as core:
        answer(core, PROMPT, **GREEDY)
    (tmp_path / "model").mkdir()
    for file in MODEL.iterdir():
        (tmp_path / "model" / file.name).symlink_to(file)
    with engine(tmp_path / "kv", tensor_library, model=str(tmp_path / "model")) as core:
        assert answer(core, PROMPT, **GREEDY)[1] == NUM_CACHED


def _changed_copy(folder: Path) -> Path:
    """The demo model with one byte of one weight changed."""
    folder.mkdir()
    for file in filter(Path.is_file, MODEL.iterdir()):
        data = bytearray(file.read_bytes())
        if file.suffix == ".safetensors":
            data[-1] ^= 1
        (folder / file.name).write_bytes(data)
    return folder


def test_damaged_files_are_not_used_and_are_written_anew(
    tmp_path: Path, tensor_library: str
) -> None:
    with engine(tmp_path, tensor_library) as core:
        expected = answer(core, PROMPT, **GREEDY)[0]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    whole = {path: path.read_bytes() for path in files}
    rng = random.Random(2)
    for number, path in enumerate(files):
        data = bytearray(whole[path])
        if number % 3 == 0:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif number % 3 == 1:
            del data[rng.randrange(len(data)) :]
        else:
            data[:] = whole[files[(number + 1) % len(files)]]
        path.write_bytes(data)
    with engine(tmp_path, tensor_library) as core:
        assert answer(core, PROMPT, **GREEDY) == (expected, 0)
    with engine(tmp_path, tensor_library) as core:
        assert answer(core, PROMPT, **GREEDY) == (expected, NUM_CACHED)


def test_a_full_disk_costs_one_warning(
    tmp_path: Path, tensor_library: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The limit on the size of files stands for it: writing fails in the same place."""
    with engine(tmp_path, tensor_library) as core, caplog.at_level(logging.WARNING):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        try:
            first, second = answer(core, PROMPT, **GREEDY), answer(core, PROMPT[1:], **GREEDY)
            deadline = time.monotonic() + 60
            while not core.stats().kv_store_failures_total and time.monotonic() < deadline:
                answer(core, [7, 8, 9], max_tokens=2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    told = [r.getMessage() for r in caplog.records if "KV store disk" in r.getMessage()]
    assert len(told) == 1 and "could not write a block" in told[0]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    with engine(None, tensor_library) as core:
        assert (first, second) == (
            answer(core, PROMPT, **GREEDY),
            answer(core, PROMPT[1:], **GREEDY),
        )


def _server(folder: Path, tensor_library: str) -> Any:
    return serving(
        MODEL,
        *("--device", "cpu", "--tensor-library", tensor_library, "--dtype", "float32"),
        *("--num-threads", "1", "--max-model-len", "512", "--block-size", str(BLOCK_SIZE)),
        *("--num-gpu-blocks-override", "64", "--swap-space", "0.03"),
        *("--kv-store", "disk", "--kv-store-config.path", str(folder)),
    )


def _complete(server: ServerProcess, prompt: list[int]) -> tuple[list[int], int]:
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
    reply = httpx.post(server.url + "/v1/completions", json=body, timeout=60).json()
    details = reply["usage"]["prompt_tokens_details"] or {}
    return reply["choices"][0]["token_ids"], details.get("cached_tokens", 0)


def test_a_server_that_starts_again_says_how_many_tokens_it_found(
    tmp_path: Path, tensor_library: str
) -> None:
    with _server(tmp_path, tensor_library) as server:
        tokens, num_cached = _complete(server, PROMPT)
        assert num_cached == 0
    assert "KV store: disk" in server.log
    with _server(tmp_path, tensor_library) as server:
        assert _complete(server, PROMPT) == (tokens, NUM_CACHED)
        metrics = httpx.get(server.url + "/metrics").text
        read = re.search(r"kv_store_blocks_read_total\{[^}]*\} (\S+)", metrics)
        assert read is not None and float(read[1]) == NUM_CACHED // BLOCK_SIZE


def test_servers_share_a_folder_and_one_of_them_is_killed(
    tmp_path: Path, tensor_library: str
) -> None:
    prompts = [PROMPT[start : start + 200] for start in range(12)]
    with engine(None, tensor_library) as core:
        expected = [answer(core, prompt, **GREEDY)[0] for prompt in prompts]
    with (
        _server(tmp_path, tensor_library) as one,
        _server(tmp_path, tensor_library) as other,
        ThreadPoolExecutor(2) as threads,
    ):
        assert one.url != other.url

        def ask(server: ServerProcess) -> list[list[int]]:
            return [_complete(server, prompt)[0] for prompt in prompts]

        asked = [threads.submit(ask, server) for server in (one, other)]
        assert [future.result() for future in asked] == [expected, expected]
        asking = threads.submit(ask, one)
        for child in one.children():
            os.kill(child, signal.SIGKILL)  # the engine, while it may be writing
        one.process.kill()
        assert asking.exception() is not None
        assert ask(other) == expected
    with _server(tmp_path, tensor_library) as server:
        assert [_complete(server, prompt) for prompt in prompts] == [(t, 192) for t in expected]
