"""Tasks over worker processes that are killed -9 again and again: what is lost, what is doubled?

    python benchmarks/kill.py --tasks 2000 --workers 4 --every 0.9
    python benchmarks/kill.py --tasks 2000 --kill fronts
    python benchmarks/kill.py --tasks 2000 --design pops

Starts a redis-server of its own. A worker runs up to four tasks at once, 20 to 200 ms each. With
`--kill fronts` the processes that put tasks are killed instead and started again; each puts again
what it has no answer to. `--design pops` is a model of destructive list pops, for comparison.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import redis
from fd_sched_redis.local_server import RedisProcess
from fd_sched_redis.scheduler import GlobalScheduler

from fastdeploy_core.contracts.scheduler import Capacity, InstanceLoad, RequestSchedulerConfig
from fastdeploy_core.types import (
    FinishReason,
    Request,
    RequestOutputDelta,
    SamplingParams,
    SequenceDelta,
    each_delta,
)

SLOTS = 4
GIVE_UP_S = 5.0  # without an answer
MIN_TASK_S, MAX_TASK_S = 0.02, 0.2


def scheduler(port: int, lease_s: float, instance: str = "") -> GlobalScheduler:
    """A driver as an engine (with a name) or a front end has it."""
    epoch = secrets.randbits(63) if instance else 0
    options = {"port": port, "topic": "kill", "max_attempts": 20}
    return GlobalScheduler(
        RequestSchedulerConfig(
            max_size=0, lease_s=lease_s, instance=instance, epoch=epoch, options=options
        )
    )


def last_delta(task: Request) -> RequestOutputDelta:
    """The whole answer in one delta."""
    sequence = SequenceDelta(token_ids=[task.attempt], finish_reason=FinishReason.STOP)
    return RequestOutputDelta(
        request_id=task.request_id, attempt=task.attempt, sequences=[sequence], finished=True
    )


def work(port: int, lease_s: float, name: str, die: str) -> None:
    """A worker. `die`: where it ends at its first task: after_take, in_mid_run, after_result."""
    queue = scheduler(port, lease_s, name)
    running: list[tuple[float, Request]] = []
    reported_s = 0.0
    while True:
        free = SLOTS - len(running)
        if free:
            capacity = Capacity(free, 10**6, 64, 10**9)
            for task in queue.get_requests(capacity, 0.0 if running else 0.05):
                if die == "after_take":
                    os._exit(1)
                running.append((time.monotonic() + random.uniform(MIN_TASK_S, MAX_TASK_S), task))
        if die == "in_mid_run" and running:
            os._exit(1)
        now = time.monotonic()
        done = [task for until, task in running if until <= now]
        running = [(until, task) for until, task in running if until > now]
        if done:
            queue.put_results([last_delta(task) for task in done])
            if die == "after_result":
                time.sleep(0.005)  # it may or may not have left this process
                os._exit(1)
        stopped = set(queue.get_aborts())
        running = [(until, task) for until, task in running if task.request_id not in stopped]
        if now - reported_s > lease_s / 10:
            reported_s = now
            queue.report_load(InstanceLoad(name, 1, num_running=len(running)))
        time.sleep(0.002)


def front(port: int, lease_s: float, share: int, shares: int, num_tasks: int, log: str) -> None:
    """Put the tasks of one share that the log has no answer to, and log the answers."""
    answered = Counter(line.split()[0] for line in Path(log).read_text().splitlines())
    wanted = [f"t{n}" for n in range(share, num_tasks, shares) if f"t{n}" not in answered]
    queue = scheduler(port, lease_s)
    put_s: dict[str, float] = {}
    with Path(log).open("a", buffering=1) as file:
        while wanted or put_s:
            batch = [Request(request_id=n, prompt_token_ids=[1], sampling=SamplingParams())
                     for n in wanted[:50]]  # fmt: skip
            del wanted[:50]
            for task, refusal in zip(batch, queue.put_requests(batch), strict=True):
                if refusal is None:
                    put_s.setdefault(task.request_id, time.monotonic())
                else:  # its earlier front end still counts as alive
                    wanted.append(task.request_id)
            for delta in each_delta(queue.get_results(0.05)):
                if delta.finished:
                    waited_s = time.monotonic() - put_s.pop(delta.request_id)
                    kind = delta.error_type or "ok"
                    file.write(f"{delta.request_id} {kind} {waited_s:.3f} {delta.attempt}\n")
    queue.close()


def pop_worker(port: int) -> None:
    """The original's way, modelled: a pop is final, results go into a list."""
    client = redis.Redis(port=port)
    running: list[tuple[float, bytes]] = []
    while True:
        free = SLOTS - len(running)
        for task in (client.lpop("tasks", free) or []) if free else []:  # type: ignore[union-attr]
            running.append((time.monotonic() + random.uniform(MIN_TASK_S, MAX_TASK_S), task))
        now = time.monotonic()
        for until, task in running:
            if until <= now:
                client.rpush("results", task)
        running = [(until, task) for until, task in running if until > now]
        time.sleep(0.002)


# Forked before this process has threads or sockets: a new worker serves after milliseconds, so one
# is killed while it works and not while it imports.
_fork = multiprocessing.get_context("fork")


def spawn(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    """A function in another process."""
    process = _fork.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def run(options: argparse.Namespace) -> dict[str, Any]:
    """One run on a new server; what became of the tasks."""
    lease_s = options.lease
    with tempfile.TemporaryDirectory() as folder:
        server = RedisProcess(Path(folder))
        server.start()
        log = Path(folder) / "answers"
        log.touch()
        processes: dict[str, BaseProcess] = {}

        def start(name: str) -> None:
            number = int(name.removeprefix("front").removeprefix("work"))
            if name.startswith("front"):
                more = (number, options.fronts, options.tasks, str(log))
                processes[name] = spawn(front, server.port, lease_s, *more)
            elif options.design == "pops":
                processes[name] = spawn(pop_worker, server.port)
            else:
                # The first workers end at the fault points; those that follow live until killed.
                die = options.die if name not in processes else ""
                processes[name] = spawn(work, server.port, lease_s, f"w{number}", die)

        fronts = [] if options.design == "pops" else list(range(options.fronts))
        for n in range(options.workers):
            start(f"work{n}")
        for n in fronts:
            start(f"front{n}")
        client = server.client()
        if options.design == "pops":
            client.rpush("tasks", *[f"t{n}" for n in range(options.tasks)])
        began_s, kills = time.monotonic(), 0
        next_s, still_s, seen = began_s + options.every, began_s, -1
        victims = "front" if options.kill == "fronts" else "work"
        while time.monotonic() - began_s < options.limit:
            lines = log.read_text().splitlines()
            if options.design == "pops":
                lines = [f"{x.decode()} ok 0 1" for x in client.lrange("results", 0, -1)]
            num_answered = len({line.split()[0] for line in lines})
            if num_answered != seen:
                seen, still_s = num_answered, time.monotonic()
            if (
                num_answered >= options.tasks
                or time.monotonic() - still_s > GIVE_UP_S + 6 * lease_s
            ):
                break
            if time.monotonic() >= next_s and kills < options.kills:
                next_s += options.every
                name = random.choice([n for n in processes if n.startswith(victims)])
                is_busy = processes[name].exitcode is None
                if is_busy or (victims == "work" and options.die):
                    processes[name].kill()
                    processes[name].join()
                    kills += 1
                    start(name)
            time.sleep(0.05)
        took_s = time.monotonic() - began_s
        time.sleep(2 * lease_s)  # whatever would come late or twice has come now
        lines = log.read_text().splitlines() if fronts else lines
        result = _count(lines, options, kills, took_s)
        if fronts:
            counters = scheduler(server.port, lease_s).cells[0].counters()
            result["counters"] = counters
            ended = ("finished", "failed", "cancelled", "expired", "dead", "taken_over", "unread")
            result["unaccounted"] = counters.get("submitted", 0) - sum(
                counters.get(name, 0) for name in ended
            )
        for process in processes.values():
            process.kill()
            process.join()
        server.kill()
        return result


def _count(
    lines: list[str], options: argparse.Namespace, kills: int, took_s: float
) -> dict[str, Any]:
    rows = [line.split() for line in lines]
    answers = Counter(row[0] for row in rows)
    waits = sorted(float(row[2]) for row in rows) or [0.0]
    return {
        "design": options.design,
        "tasks": options.tasks,
        "kills": kills,
        "killed": options.kill,
        "lost": options.tasks - len(answers),
        "doubled": sum(count > 1 for count in answers.values()),
        "reported as lost": sum(row[1] != "ok" for row in rows),
        "p50_s": waits[len(waits) // 2],
        "p99_s": waits[int(len(waits) * 0.99)],
        "max_s": waits[-1],
        "attempts": max((int(row[3]) for row in rows), default=0),
        "took_s": round(took_s, 1),
    }


def main() -> None:
    """Read the arguments; print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--fronts", type=int, default=2)
    parser.add_argument("--lease", type=float, default=1.5, help="seconds")
    parser.add_argument("--every", type=float, default=0.9, help="seconds between kills")
    parser.add_argument("--kills", type=int, default=16, help="at most")
    parser.add_argument("--kill", choices=("workers", "fronts"), default="workers")
    parser.add_argument("--design", choices=("leases", "pops"), default="leases")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of the whole run")
    parser.add_argument(
        "--die", choices=("", "after_take", "in_mid_run", "after_result"), default="",
        help="where the first workers end by themselves, at their first task",
    )  # fmt: skip
    print(json.dumps(run(parser.parse_args())))


if __name__ == "__main__":
    main()
