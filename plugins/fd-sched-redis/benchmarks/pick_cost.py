"""Redis CPU of one pick, by the number of instances: push mode's choice with its reservation, and
pull mode's put and take.

    python benchmarks/pick_cost.py

Starts a redis-server of its own and reads its processor time (INFO cpu), so what the network and
this process do is not counted, and what a call costs beside its script is. What a pick adds is the
median of push mode's put less pull mode's, over rounds of 100 each in turns.
"""

from __future__ import annotations

import argparse
import json
import secrets
import tempfile
from pathlib import Path
from statistics import median

import msgspec
import redis
from fd_sched_redis.cell import Cell, Reach
from fd_sched_redis.local_server import RedisProcess

from fastdeploy_core.contracts.scheduler import Capacity, InstanceLoad
from fastdeploy_core.types import Request, SamplingParams

LEASE_S = 3600.0
ROUND = 100  # calls between two looks at the clock
BODY = b"x" * 8192  # as the prompt of some 2,000 tokens
REPORT = msgspec.msgpack.encode(InstanceLoad("instance", 1))


def cpu_us(client: redis.Redis) -> float:
    """Processor time of the server so far."""
    info = client.info("cpu")
    return 1e6 * (info["used_cpu_user_main_thread"] + info["used_cpu_sys_main_thread"])


def measure(port: int, num_instances: int, calls: int, fresh: bool) -> dict[str, float]:
    """Microseconds of the server per call."""
    client = redis.Redis(port=port)
    client.flushdb()
    push = Cell(client, "{p:0}:", LEASE_S, 3, True, Reach())
    pull = Cell(client, "{q:0}:", LEASE_S, 3, False, Reach())
    for n in range(num_instances):
        push.beat(f"i{n}", "e", ("mixed", 100 * (n % 50), 1, REPORT), "0", False, False)
    push.front_beat("f", "ipc://nowhere", "0-0")
    pull.front_beat("f", "ipc://nowhere", "0-0")
    if fresh:  # believe the reports however old they are
        for n in range(num_instances):
            client.hset(f"{{p:0}}:i:i{n}", "at", 1 << 52)
    requests = [
        Request(request_id=secrets.token_hex(8), prompt_token_ids=[1] * 500,
                sampling=SamplingParams())
        for _ in range(calls)
    ]  # fmt: skip
    # In turns, so that both meet the same disturbances.
    costs: list[list[float]] = [[], []]
    for start in range(0, calls, ROUND):
        for cell, found in zip((push, pull), costs, strict=True):
            part = requests[start : start + ROUND]
            before = cpu_us(client)
            for number, request in enumerate(part, start):
                cell.submit("f", number, request, BODY, 900.0, (0, 0), 0)
            found.append((cpu_us(client) - before) / len(part))
    result = {
        "pick and reserve": median(a - b for a, b in zip(*costs, strict=True)),
        "push: pick and reserve, queue": median(costs[0]),
        "pull: queue": median(costs[1]),
    }
    capacity = Capacity(1, 10**9, 64, 10**9)
    before = cpu_us(client)
    for number in range(calls):
        pull.take(f"i{number % num_instances}", "e", number, capacity, 0, 0, False)
    result["pull: take"] = (cpu_us(client) - before) / calls
    before = cpu_us(client)
    for request in requests:
        pull.complete(request.request_id, 1, "finished")
    result["complete"] = (cpu_us(client) - before) / calls
    before = cpu_us(client)
    for n in range(calls):
        push.beat(f"i{n % num_instances}", "e", ("mixed", 100, 1, REPORT), "0", False, False)
    result["beat"] = (cpu_us(client) - before) / calls
    before = cpu_us(client)
    for _ in range(calls):
        client.ping()
    result["ping, for comparison"] = (cpu_us(client) - before) / calls
    return {name: round(value, 1) for name, value in result.items()}


def main() -> None:
    """One line of JSON for each number of instances."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--instances", type=int, nargs="+", default=[10, 100, 1000, 20000])
    parser.add_argument("--calls", type=int, default=3000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = RedisProcess(Path(folder))
        server.start()
        for count in options.instances:
            for fresh in (True, False):
                row = measure(server.port, count, options.calls, fresh)
                view = "fresh" if fresh else "old"
                print(json.dumps({"instances": count, "reports": view, **row}), flush=True)
        server.kill()


if __name__ == "__main__":
    main()
