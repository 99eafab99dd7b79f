"""Two servers and a Redis server: what one has computed, the other one finds."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from fd_sched_redis.local_server import SERVERS, RedisProcess
from server_process import REPOSITORY, serving

MODEL = REPOSITORY / "models" / "ernie-tiny"


def test_what_one_server_computed_another_one_finds(tmp_path: Path) -> None:
    """Also after the Redis server was gone for a while."""
    if not any(map(shutil.which, SERVERS)):
        pytest.skip("neither redis-server nor valkey-server is installed")
    kept = RedisProcess(tmp_path)
    kept.start()
    url = f"redis://127.0.0.1:{kept.port}/0"
    words = ("--kv-store", "redis", "--kv-store-config.url", url, "--swap-space", "0.1")
    words += ("--block-size", "16", "--num-gpu-blocks-override", "64", "--num-threads", "1")

    def ask(server: Any, text: str) -> tuple[str, int]:
        body = {"prompt": text * 40, "max_tokens": 8, "temperature": 0}
        answer = httpx.post(server.url + "/v1/completions", json=body, timeout=60).json()
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["text"], cached

    try:
        with serving(MODEL, *words) as one:
            first, second = ask(one, "bread and wine "), ask(one, "a king ")
        assert first[1] == second[1] == 0
        with serving(MODEL, *words) as two:
            found = ask(two, "bread and wine ")
            assert found[0] == first[0] and found[1] >= 64
            kept.kill()
            assert ask(two, "a king ") == second, "it is computed"
            assert ask(two, "a king ")[0] == second[0]
            assert "KV store redis could not" in two.log
    finally:
        kept.kill()
