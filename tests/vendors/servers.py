"""`fastdeploy serve` on simulated devices, and what its log tells of detours over the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.server_process import ServerProcess, serving
from tests.vendors.engines import BLOCK_SIZES

# PaddlePaddle says which operation has no kernel on the chip when it detours, if it is told to.
FALLBACK_LOG = {"GLOG_vmodule": "kernel_factory=3", "GLOG_minloglevel": "0"}
FALLBACK_LINE = "fallbacking to CPU one"
NO_FALLBACK = {"FLAGS_enable_api_kernel_fallback": "0"}


@contextmanager
def server_on(device: str, model: Path, *arguments: str, **extra: str) -> Iterator[ServerProcess]:
    """One server in float32; `extra` is environment."""
    options = ("--device", device, "--dtype", "float32", "--num-threads", "1")
    sizes = ("--block-size", str(BLOCK_SIZES.get(device, 64)), "--max-num-seqs", "8")
    environment = {"FD_DEVICE_MEMORY_GIB": "1", "FD_PLUGINS": f"fd-{device}", **extra}
    with serving(model, *options, *sizes, *arguments, extra=environment) as server:
        yield server


def complete(server: ServerProcess, prompt: list[int], max_tokens: int) -> list[int]:
    """Greedy tokens after the prompt."""
    body = {
        "model": "tested",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text + server.log[-2000:]
    tokens: list[int] = response.json()["choices"][0]["completion_token_ids"]
    return tokens


def single_root(panels: Path, type_name: str) -> dict[str, str]:
    """A root with one type: PaddlePaddle joins ranks of the first one it finds."""
    from fd_simdevice.build import install

    return install(panels.parent / f"only-{type_name}", [type_name])
