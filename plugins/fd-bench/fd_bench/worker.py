"""One of several client processes of `bench serve`: reads its calls, returns its measurements."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import IO, cast

import msgspec

from fastdeploy_core.errors import FastDeployError

from .client import BenchClient, Call, Measured

START_DELAY_S = 2.0  # time for every process to start and read its calls


class Work(msgspec.Struct):
    """The work of one client process."""

    url: str
    api_key: str
    calls: list[Call]
    start_at: float  # by the monotonic clock, which all processes of a machine share
    max_concurrency: int


def run_in_processes(
    url: str, api_key: str, calls: Sequence[Call], max_concurrency: int, count: int
) -> tuple[list[Measured], float, float]:
    """Distribute the calls over client processes; returns all measurements, when they began, and
    the processor time of the process that took most of it."""
    start_at = time.perf_counter() + START_DELAY_S
    share = -(-max_concurrency // count) if max_concurrency else 0
    processes = []
    for number in range(count):
        work = Work(url, api_key, list(calls[number::count]), start_at, share)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fd_bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        stdin = cast("IO[bytes]", process.stdin)
        stdin.write(msgspec.msgpack.encode(work))
        stdin.close()
        processes.append(process)
    measured: list[Measured] = []
    busy_s = 0.0
    for process in processes:
        answer = cast("IO[bytes]", process.stdout).read()
        if process.wait():
            raise FastDeployError("a client process of the benchmark failed; see above")
        part, spent_s = msgspec.msgpack.decode(answer, type=tuple[list[Measured], float])
        measured += part
        busy_s = max(busy_s, spent_s)
    return measured, start_at, busy_s


def main() -> None:
    """Entry point of a client process."""
    work = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Work)
    client = BenchClient(work.url, work.api_key)
    began_s = time.process_time()
    measured = asyncio.run(client.send(work.calls, work.start_at, work.max_concurrency))
    spent_s = time.process_time() - began_s
    sys.stdout.buffer.write(msgspec.msgpack.encode((measured, spent_s)))


if __name__ == "__main__":
    main()
