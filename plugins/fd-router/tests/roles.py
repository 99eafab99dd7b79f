"""Servers with roles on the demo model, and what tests ask of them."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from conftest import MODEL, Router
from server_process import CommandProcess
from server_support import wait_for

BLOCK_SIZE = 16
STORY = "Once upon a time there was a king who had three daughters and no bread at all. "
TEXT = "/v1/completions"
SECRET = "a secret of at least thirty-two characters"


def server(
    role: str,
    *options: str,
    port: int = 0,
    host: str = "127.0.0.1",
    within: Sequence[str] = (),
    model: Path = MODEL,
) -> CommandProcess:
    """On the demo model, or another one."""
    return CommandProcess(
        *("serve", str(model), "--host", host, "--port", str(port), "--max-num-seqs", "8"),
        *("--block-size", str(BLOCK_SIZE), "--max-num-batched-tokens", "64"),
        *("--num-gpu-blocks-override", "256", "--swap-space", "0.1", "--num-threads", "1"),
        # A busy machine is no reason to give up.
        *("--splitwise-role", role, "--kv-transport-timeout", "600", *options),
        extra={"FD_KV_SECRET": SECRET},
        within=within,
    )


class Apart:
    """A prefill instance, a decode instance, and the router."""

    def __init__(
        self,
        *options: str,
        each: Mapping[str, Sequence[str]] | None = None,
        model: Path = MODEL,
    ) -> None:
        """each: more options, by role."""
        self.options, self.model, each = options, model, each or {}
        self.prefill, self.decode = (
            server(role, *options, *each.get(role, ()), model=model)
            for role in ("prefill", "decode")
        )
        self.route()

    def route(self) -> None:
        """Start a router, and wait until it knows who is what."""
        urls = [self.prefill.url, self.decode.url]
        self.router = Router(urls, "--prefill-min-tokens", "64")
        self.wait()

    def wait(self) -> None:
        """Until the router knows both instances and their roles."""
        self.router.until_ready(2)
        wait_for(lambda: set(self.router.listed("role").values()) == {"prefill", "decode"}, "roles")

    def replace(self, role: str) -> None:
        """Another process at the address of one that has ended."""
        old: CommandProcess = getattr(self, role)
        wait_for(lambda: self.router.listed("state")[old.name] != "ready", "the loss to be noticed")
        port = int(old.url.rpartition(":")[2])
        setattr(self, role, server(role, *self.options, port=port, model=self.model))
        self.wait()

    def stop(self) -> None:
        for process in (self.router, self.decode, self.prefill):
            process.signal(signal.SIGCONT)
            process.stop()


def ask(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_body(name: str, repeat: int = 12, **fields: Any) -> dict[str, Any]:
    return {"prompt": f"({name}) " + STORY * repeat, "max_tokens": 12, "temperature": 0, **fields}


def said(answer: dict[str, Any]) -> list[Any]:
    """The choices, without the digits of log-probabilities that a chunk's size decides."""
    text = re.sub(r"-?\d+\.\d+(e-?\d+)?", lambda n: f"{float(n[0]):.3f}", repr(answer["choices"]))
    return [text]


def metric(process: CommandProcess, name: str) -> float:
    text = httpx.get(process.url + "/metrics", timeout=20).text
    lines = [line for line in text.splitlines() if line.startswith(f"fastdeploy:{name}")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def taken(process: CommandProcess) -> float:
    return metric(process, "kv_taken_over_total")


def check_idle(*processes: CommandProcess) -> None:
    """Every block has come back."""
    for process in processes:
        wait_for(lambda p=process: metric(p, "kv_blocks_used{") == 0, "blocks", 30)
