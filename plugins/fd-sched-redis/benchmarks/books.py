"""Many tasks over many workers: do the books balance, and does memory stay flat?

    python benchmarks/books.py --tasks 100000 --workers 64
    python benchmarks/books.py --tasks 1000000

Starts a redis-server of its own. Workers answer at once. A twentieth of the tasks fails, another
one is cancelled before it is put, a third one when it may wait, run or be over. Memory is the
server's, without the stream `ended`, which keeps the last 100,000 endings by design.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import redis
from fd_sched_redis.local_server import RedisProcess
from kill import last_delta, scheduler, spawn

from fastdeploy_core.contracts.scheduler import Capacity, InstanceLoad
from fastdeploy_core.types import Request, SamplingParams, each_delta

LEASE_S = 10.0
WINDOW = 400  # unfinished tasks of a front end
WAYS = ("finished", "failed", "cancelled", "expired", "dead", "taken_over", "unread")
SAMPLES = 10


def work(port: int, name: str) -> None:
    """Answer tasks until killed."""
    queue = scheduler(port, LEASE_S, name)
    reported_s = 0.0
    while True:
        answers = []
        for task in queue.get_requests(Capacity(16, 10**6, 64, 10**9), 0.2):
            answers.append(last_delta(task))
            if random.random() < 0.05:
                answers[-1].error, answers[-1].error_type = "it failed", "WorkerError"
        queue.put_results(answers)
        queue.get_aborts()
        if time.monotonic() - reported_s > LEASE_S / 10:
            reported_s = time.monotonic()
            queue.report_load(InstanceLoad(name, 1))


def front(port: int, share: int, shares: int, num_tasks: int) -> None:
    """Put the tasks of one share, cancel some, and count the answers of each."""
    queue = scheduler(port, LEASE_S)
    left = iter(range(share, num_tasks, shares))
    open_tasks: set[str] = set()
    is_more, num_doubled = True, 0
    while is_more or open_tasks:
        batch = []
        while is_more and len(open_tasks) + len(batch) < WINDOW:
            number = next(left, None)
            if number is None:
                is_more = False
                break
            batch.append(
                Request(
                    request_id=f"t{number}",
                    prompt_token_ids=list(range(64)),
                    sampling=SamplingParams(),
                )
            )
        names = [one.request_id for one in batch]
        if batch:
            queue.abort([name for name in names if random.random() < 0.05])
            assert queue.put_requests(batch) == [None] * len(batch)
            open_tasks.update(names)
            queue.abort([name for name in names if random.random() < 0.05])
        for delta in each_delta(queue.get_results(0.05)):
            if delta.request_id in open_tasks:
                open_tasks.remove(delta.request_id)
            else:
                num_doubled += 1
    server = redis.Redis(port=port)
    server.incrby("doubled", num_doubled)
    queue.close()
    server.incr("fronts done")


def used(client: redis.Redis, ended: str) -> int:
    """Bytes that the server uses, without the endings that it keeps."""
    info: Any = client.info("memory")
    kept: Any = client.memory_usage(ended, samples=0) or 0
    return int(info["used_memory"]) - int(kept)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """One run on a new server."""
    with tempfile.TemporaryDirectory() as folder:
        server = RedisProcess(Path(folder))
        server.start()
        port = server.port
        processes = [spawn(work, port, f"w{n}") for n in range(options.workers)]
        processes += [spawn(front, port, n, options.fronts, options.tasks)
                      for n in range(options.fronts)]  # fmt: skip
        client = server.client()
        cell = scheduler(port, LEASE_S).cells[0]
        began_s, memory = time.monotonic(), []
        while int(client.get("fronts done") or 0) < options.fronts:  # type: ignore[arg-type]
            put = cell.counters().get("submitted", 0)
            if put >= (len(memory) + 1) * options.tasks / SAMPLES:
                memory.append(used(client, cell.prefix + "ended"))
            time.sleep(0.05)
        took_s = time.monotonic() - began_s
        time.sleep(1.0)
        counters = cell.counters()
        held = ("t:", "q", "wait", "own:", "x:")
        names = [key.decode().removeprefix(cell.prefix) for key in client.scan_iter(count=10**4)]
        result = {
            "tasks": options.tasks,
            "workers": options.workers,
            "took_s": round(took_s, 1),
            "tasks_per_s": round(options.tasks / took_s),
            "doubled": int(client.get("doubled") or 0),  # type: ignore[arg-type]
            "unaccounted": counters["submitted"] - sum(counters.get(way, 0) for way in WAYS),
            "left": sorted(name for name in names if name.startswith(held) and name[:5] != "wake"),
            "used_mb": [round(size / 2**20, 1) for size in memory],
            "counters": counters,
        }
        for process in processes:
            process.kill()
            process.join()
        server.kill()
        return result


def main() -> None:
    """Read the arguments; print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--fronts", type=int, default=2)
    print(json.dumps(run(parser.parse_args())))


if __name__ == "__main__":
    main()
