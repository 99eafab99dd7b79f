"""Every routing policy on simulated fleets, by the age of the load reports.

    python benchmarks/simulate.py             all tables, some minutes on one core
    python benchmarks/simulate.py --quick     a tenth of the requests
    python benchmarks/simulate.py --events    what the engines say beside what was sent, only

Discrete events in virtual time: an instance computes prompts one after the other at a fixed rate,
routers see reports that all came at the same moments. Time to first token (TTFT) is the wait in an
instance's queue plus the computation of the tokens that are not cached there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random

import numpy as np
from fd_router.cached.prefix_index import PrefixIndex
from fd_router.policies import POLICIES, InstanceView, RequestView, make_policy

RATE = 8_000.0  # prompt tokens/s of an instance
AGES_S = (0.0, 0.005, 0.05, 0.25, 1.0)
SIZES = {100: 20_000, 1_000: 40_000, 10_000: 100_000}  # instances: requests
LOAD = 0.85
ROUTERS = 64
BLOCK_TOKENS = 512
BLOCKS = 4_000  # of an instance's cache


@dataclass(slots=True)
class Arrival:
    at: float
    tokens: int
    keys: Sequence[bytes] = ()
    session: str = ""


class Fleet(Sequence[InstanceView]):
    """The instances as one router sees them; a view is made when a policy looks at it."""

    def __init__(self, busy_until: list[float]) -> None:
        self.seen = busy_until  # a copy of an earlier moment, or the truth itself
        self.array = np.array(busy_until)  # the same, for what looks at all of them
        self.reported_at = 0.0
        self.reserved: dict[int, int] = {}
        self._names = [str(place) for place in range(len(busy_until))]

    def __len__(self) -> int:
        return len(self.seen)

    def __getitem__(self, place: int) -> InstanceView:  # type: ignore[override]
        queued = int(max(0.0, self.seen[place] - self.reported_at) * RATE)
        view = InstanceView(self._names[place], 0, 0, queued, RATE)
        view.reported_at = self.reported_at
        view.reserved_tokens = self.reserved.get(place, 0)
        return view

    def __iter__(self) -> Iterator[InstanceView]:
        return map(self.__getitem__, range(len(self.seen)))


@dataclass(slots=True)
class Result:
    mean: float
    p50: float
    p99: float
    hit: float  # share of prompt tokens that were cached


def simulate(
    arrivals: list[Arrival],
    instances: int,
    policy_name: str,
    age: float,
    routers: int,
    known_blocks: int | None = BLOCKS,
) -> Result:
    """Runs one policy; `argmin` and `omniscient` are baselines that exist only here. known_blocks:
    of each instance, in a router's index of what it sent; None: what instances have is known."""
    rng = Random(1)
    busy_until = [0.0] * instances
    truth = PrefixIndex(BLOCKS)  # what the instances have cached
    fleets = [Fleet(busy_until) for _ in range(routers)]
    indices = [PrefixIndex(known_blocks) if known_blocks else truth for _ in range(routers)]
    choose = _chooser(policy_name, truth, indices, rng)
    ttft = np.zeros(len(arrivals))
    tokens = cached_tokens = 0
    next_report = 0.0
    truth_array = np.zeros(instances)
    for fleet in fleets:
        fleet.array = truth_array
    for number, arrival in enumerate(arrivals):
        if age and arrival.at >= next_report:
            reported_at = arrival.at - arrival.at % age
            next_report = reported_at + age
            seen, array = list(busy_until), truth_array.copy()
            for fleet in fleets:
                fleet.seen, fleet.array, fleet.reported_at = seen, array, reported_at
                fleet.reserved.clear()
        router = rng.randrange(routers)
        fleet = fleets[router]
        if not age:
            fleet.reported_at = arrival.at
        place, believed = choose(arrival, fleet, router)
        if age:
            reserved = arrival.tokens - believed
            fleet.reserved[place] = fleet.reserved.get(place, 0) + reserved
        cached = 0
        if arrival.keys:
            name = str(place)
            cached = min(truth.cached_blocks(name, arrival.keys) * BLOCK_TOKENS, arrival.tokens - 1)
            truth.record(name, arrival.keys)
            indices[router].record(name, arrival.keys)
        done = max(arrival.at, busy_until[place]) + (arrival.tokens - cached) / RATE
        busy_until[place] = truth_array[place] = done
        ttft[number] = done - arrival.at
        tokens += arrival.tokens
        cached_tokens += cached
    counted = ttft[len(arrivals) // 3 :]  # the fleet was empty before
    p50, p99 = np.percentile(counted, (50, 99))
    return Result(float(counted.mean()), float(p50), float(p99), cached_tokens / tokens)


def _chooser(
    name: str, truth: PrefixIndex, indices: list[PrefixIndex], rng: Random
) -> Callable[[Arrival, Fleet, int], tuple[int, int]]:
    """A function of arrival, fleet and router: the place chosen, the tokens believed cached."""
    if name in ("argmin", "omniscient"):

        def least(arrival: Arrival, fleet: Fleet, router: int) -> tuple[int, int]:
            # `omniscient` runs with age 0, so it sees the truth.
            waits = np.maximum(fleet.array - fleet.reported_at, 0.0)
            for place, reserved in fleet.reserved.items():
                waits[place] += reserved / RATE
            if name == "omniscient" and arrival.keys:
                blocks = [truth.cached_blocks(str(p), arrival.keys) for p in range(len(fleet))]
                waits -= np.asarray(blocks) * BLOCK_TOKENS / RATE
            return int(waits.argmin()), 0

        return least
    policies = [make_policy(name, index) for index in indices]

    def by_policy(arrival: Arrival, fleet: Fleet, router: int) -> tuple[int, int]:
        request = RequestView(arrival.tokens, arrival.keys, BLOCK_TOKENS, arrival.session)
        choice = policies[router].choose(request, fleet, rng, arrival.at)
        assert choice.instance is not None
        return int(choice.instance.name), choice.cached_tokens

    return by_policy


def independent(instances: int, count: int) -> list[Arrival]:
    """Poisson arrivals of log-normal prompts: about 2,000 tokens on average, 32,000 at most."""
    rng = np.random.default_rng(7)
    tokens = np.clip(rng.lognormal(np.log(2000) - 0.5, 1.0, count), 16, 32_000).astype(int)
    rate = LOAD * instances * RATE / tokens.mean()
    at = rng.exponential(1 / rate, count).cumsum()
    return [Arrival(float(when), int(size)) for when, size in zip(at, tokens, strict=True)]


def conversations(instances: int, count: int, speed: float) -> list[Arrival]:
    """Conversations of several turns, of the published averages of Mooncake's trace.

    Those are 12,031 requests in an hour on what are eight instances here, 12,035 prompt tokens
    and 343 generated ones each, and 40 % of the prompt blocks seen before. Arrivals here are
    Poisson, and pauses between turns are 150 s on average: both are assumptions.
    """
    rng = np.random.default_rng(11)
    per_s = 12_031 / 3_540 * instances / 8 * speed
    turns_on_average = 1.65
    arrivals: list[Arrival] = []
    # (when, session, turn, tokens so far), the earliest first
    waiting: list[tuple[float, int, int, int]] = []
    begins, session = 0.0, 0
    while len(arrivals) < count:
        if not waiting or begins <= waiting[0][0]:
            heappush(waiting, (begins, session, 0, 0))
            begins += rng.exponential(turns_on_average / per_s)
            session += 1
            continue
        at, owner, turn, before = heappop(waiting)
        # A long document at the beginning, shorter questions after it.
        mean = 10_300 if turn == 0 else 4_000
        new = int(np.clip(rng.lognormal(np.log(mean) - 0.605, 1.1), 16, 60_000))
        tokens = min(before + new, 120_000)
        # All begin with the same block, a system prompt.
        keys = [b"%d:%d" % (owner, block) for block in range(1, tokens // BLOCK_TOKENS)]
        keys.insert(0, b"system")
        arrivals.append(Arrival(at, tokens, keys, str(owner)))
        if rng.random() < 1 - 1 / turns_on_average:
            pause = rng.exponential(150.0 / speed)
            heappush(waiting, (at + pause, owner, turn + 1, tokens + 343))
    return arrivals


def load_table(divisor: int) -> None:
    print("\nIndependent prompts, 85 % load, 64 routers: p99 (mean) TTFT in ms\n")
    head = " | ".join(f"{age * 1000:.0f} ms" for age in AGES_S)
    print(f"| instances | policy | {head} |\n|---|---|{'---|' * len(AGES_S)}")
    for instances, count in SIZES.items():
        arrivals = independent(instances, count // divisor)
        for name in (*POLICIES, "argmin", "omniscient"):
            if name in ("cache-aware", "sticky"):
                continue  # without prefixes or sessions: least-tokens and power-of-two
            blind = name in ("round-robin", "omniscient")
            cells = []
            for age in AGES_S[:1] if blind else AGES_S:
                one = simulate(arrivals, instances, name, age, ROUTERS)
                cells.append(f"{one.p99 * 1000:.0f} ({one.mean * 1000:.0f})")
            cells += ["″"] * (len(AGES_S) - len(cells))
            print(f"| {instances:,} | {name} | {' | '.join(cells)} |", flush=True)


def conversation_table(divisor: int) -> None:
    arrivals = conversations(8, 12_031 // divisor, 1.0)
    seen: set[bytes] = set()
    again = blocks = 0
    for arrival in arrivals:
        again += sum(key in seen for key in arrival.keys)
        blocks += len(arrival.keys)
        seen.update(arrival.keys)
    mean = np.mean([arrival.tokens for arrival in arrivals])
    print(f"\nConversations: {mean:.0f} prompt tokens on average, {again / blocks:.0%} of the")
    print("blocks seen before. Hit rate: mean / p99 TTFT in s. One router.\n")
    cases = [(8, 12_031, speed, 0.05) for speed in (1.0, 2.0, 3.0)]
    cases += [(100, 24_000, 1.25, age) for age in AGES_S]
    heads = [f"{n} at {speed:g}x, {age * 1000:.0f} ms" for n, _, speed, age in cases]
    print(f"| policy | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}")
    traffic = {case[:3]: conversations(case[0], case[1] // divisor, case[2]) for case in cases}
    for name in (*POLICIES, "omniscient"):
        cells = []
        for instances, count, speed, age in cases:
            if name == "omniscient" and instances == 100 and age:
                cells.append("″")
                continue
            seen_age = 0.0 if name == "omniscient" else age
            one = simulate(traffic[instances, count, speed], instances, name, seen_age, 1)
            cells.append(f"{one.hit:.3f}: {one.mean:.2f} / {one.p99:.1f}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def events_table(divisor: int) -> None:
    """What the engines' KV events are worth, which arrive at once here."""
    print("\nConversations on 8 instances at 2x, 50 ms. Hit rate: mean / p99 TTFT in s.\n")
    arrivals = conversations(8, 12_031 // divisor, 2.0)
    counts = (1, 4, 16)
    print(f"| policy | index | {' | '.join(f'{n} routers' for n in counts)} |")
    print(f"|---|---|{'---|' * len(counts)}")
    rows = {"KV events": None, "what was sent": BLOCKS, "the same, of 65,536 blocks": 65_536}
    for name in ("estimated-ttft", "cache-aware"):
        for title, blocks in rows.items():
            cells = []
            for routers in counts:
                one = simulate(arrivals, 8, name, 0.05, routers, blocks)
                cells.append(f"{one.hit:.3f}: {one.mean:.2f} / {one.p99:.1f}")
            print(f"| {name} | {title} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Routing policies on simulated fleets.")
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests")
    parser.add_argument("--events", action="store_true", help="the last table only")
    given = parser.parse_args()
    divisor = 10 if given.quick else 1
    begun = time.perf_counter()
    if not given.events:
        load_table(divisor)
        conversation_table(divisor)
    events_table(divisor)
    print(f"\n{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
