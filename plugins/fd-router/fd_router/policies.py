"""Which instance gets a request: policies by name, without any input or output.

A policy sees views of instances that are as old as their reports. What many routers take to be the
least loaded instance they all run to, so the older a view, the fewer candidates are compared: all
up to 10 ms, three up to 100 ms, two of random choice beyond. Of a large fleet, 16 random instances
stand for all, which keeps a choice's cost flat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from random import Random
from typing import ClassVar

from .cached.cached_blocks import EventIndex
from .cached.prefix_index import Key, PrefixIndex

FRESH_S = 0.010
STALE_S = 0.100
MAX_CANDIDATES = 16
MAX_OWNERS = 2  # of instances with the longest cached prefix, so many are candidates, too


@dataclass(frozen=True, slots=True)
class RequestView:
    """What a policy knows of a request."""

    prompt_tokens: int  # counted or estimated
    prefix_keys: Sequence[Key] = ()  # of the prompt's full blocks, see prefix_index.chained_keys
    block_tokens: int = 0  # tokens that one key stands for
    session: str = ""  # requests of one conversation or user; empty: none
    # Of the prompt's tokens, in each scope that they may have; see cached_blocks.token_keys.
    token_keys: Sequence[Sequence[Key]] = ()


@dataclass(slots=True)
class InstanceView:
    """An instance's newest report, and what was sent to it since."""

    name: str
    running: int = 0  # requests that generate
    waiting: int = 0  # requests that wait for their first token
    queued_tokens: int = 0  # prompt tokens of those, not yet computed
    prefill_rate: float = 8_000.0  # prompt tokens/s, estimated
    free_tokens: int | None = None  # tokens that fit into free KV blocks; None: not known
    draining: bool = False
    broken: bool = False  # its circuit breaker is open
    reported_at: float = 0.0  # seconds, by the clock of `now`
    reserved_tokens: int = 0  # uncached prompt tokens sent since the report
    reserved_requests: int = 0

    @property
    def usable(self) -> bool:
        """Whether new requests may go to it."""
        return not (self.draining or self.broken)

    @property
    def requests(self) -> int:
        """Its unfinished requests."""
        return self.running + self.waiting + self.reserved_requests

    @property
    def load_tokens(self) -> int:
        """Prompt tokens that it computes before those of a new request."""
        return self.queued_tokens + self.reserved_tokens

    def reserve(self, tokens: int) -> None:
        """A request with so many uncached tokens was sent to it."""
        self.reserved_tokens += tokens
        self.reserved_requests += 1


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy's answer."""

    instance: InstanceView | None
    reason: str  # why this one, or why none
    cached_tokens: int = 0  # of the prompt, probably cached there


class Policy:
    """Base of all. One object serves one router; it keeps no load, only the prefix index."""

    name: ClassVar[str]

    def __init__(self, index: PrefixIndex | None = None, events: EventIndex | None = None) -> None:
        """index: kept by the caller, who records each request that was sent. events: what is
        cached where, of instances that say so; their entries of `index` then do not count."""
        self._index = index or PrefixIndex()
        self._events = events or EventIndex()

    def choose(
        self, request: RequestView, instances: Sequence[InstanceView], rng: Random, now: float
    ) -> Choice:
        """The instance for a request: never one that drains or is broken.

        now: seconds, by the clock of the views' `reported_at`. The cost grows at most linearly
        with the number of instances. The caller reserves and records what it sends.
        """
        found = self._choose(request, instances, rng, now)
        return found or Choice(None, _why_none(instances))

    def _choose(
        self, request: RequestView, instances: Sequence[InstanceView], rng: Random, now: float
    ) -> Choice | None:
        """None where no instance is usable."""
        raise NotImplementedError

    def _owners(
        self, request: RequestView, instances: Sequence[InstanceView], rng: Random
    ) -> list[InstanceView]:
        """Usable instances with the longest cached prefix."""
        names = self._index.owners(request.prefix_keys)
        if request.token_keys:
            sent = {name for name in names if not self._events.follows(name)}
            names = sent | self._events.owners(request.token_keys)
        if not names:
            return []
        # In the order of `instances`: a set's order is another one in every process.
        found = [one for one in instances if one.name in names and one.usable]
        if request.token_keys:  # what some say and what was sent to others may differ
            cached = [self._cached(request, one) for one in found]
            most = max(cached, default=0)
            found = [one for one, tokens in zip(found, cached, strict=True) if tokens == most]
        return found if len(found) <= MAX_OWNERS else rng.sample(found, MAX_OWNERS)

    def _cached(self, request: RequestView, instance: InstanceView) -> int:
        """Tokens of the prompt that are probably cached; at least one is always computed."""
        if request.token_keys and self._events.follows(instance.name):
            tokens = self._events.cached_tokens(instance.name, request.token_keys)
        elif request.prefix_keys:
            blocks = self._index.cached_blocks(instance.name, request.prefix_keys)
            tokens = blocks * request.block_tokens
        else:
            return 0
        return min(tokens, max(0, request.prompt_tokens - 1))

    def _balance(
        self, request: RequestView, candidates: list[InstanceView], rng: Random, width: float = 0.0
    ) -> Choice | None:
        """The candidate with the fewest tokens to compute first, cached prefixes left aside.

        width: tokens above the fewest that count as equal.
        """
        if not candidates:
            return None
        costs = [(float(one.load_tokens), 0, one) for one in _fitting(request, candidates)]
        chosen = _low_load(costs, width, rng)
        return Choice(chosen, f"least loaded of {len(candidates)}", self._cached(request, chosen))


class EstimatedTTFT(Policy):
    """The least estimated time to first token: tokens queued and tokens not cached, by the rate.

    When all candidates are saturated, cached prefixes are what capacity is left, so what is not
    cached costs more.
    """

    name = "estimated-ttft"
    SATURATED_S = 10.0  # where even the best candidate needs so long before it begins
    AFFINITY = 3.0  # what a token that is not cached costs more then

    def _choose(
        self, request: RequestView, instances: Sequence[InstanceView], rng: Random, now: float
    ) -> Choice | None:
        candidates = _draw(instances, rng, now)
        for owner in self._owners(request, instances, rng):
            if all(owner is not one for one in candidates):
                candidates.append(owner)
        if not candidates:
            return None
        candidates = _fitting(request, candidates)
        waits = [one.load_tokens / one.prefill_rate for one in candidates]
        weight = 1.0 + self.AFFINITY * min(1.0, min(waits) / self.SATURATED_S)
        costs = []
        for one, wait in zip(candidates, waits, strict=True):
            cached = self._cached(request, one)
            uncached = (request.prompt_tokens - cached) / one.prefill_rate
            costs.append((wait + weight * uncached, cached, one))
        rate = max(one.prefill_rate for one in candidates)
        chosen = _low_load(costs, _width(request) / rate, rng)
        cached = self._cached(request, chosen)
        return Choice(chosen, f"least estimated time of {len(candidates)}", cached)


class CacheAware(Policy):
    """The longest cached prefix, unless its instance has much more to do than another."""

    name = "cache-aware"
    MIN_SHARE = 0.25  # of the prompt: less is not worth a longer queue
    ABSOLUTE_TOKENS = 8_192  # much more: by more tokens than this, and
    RELATIVE = 1.5  # by more than this factor

    def _choose(
        self, request: RequestView, instances: Sequence[InstanceView], rng: Random, now: float
    ) -> Choice | None:
        other = self._balance(request, _draw(instances, rng, now), rng)
        if other is None or other.instance is None:
            return None
        owners = _fitting(request, self._owners(request, instances, rng))
        if not owners:
            return other
        owner = min(owners, key=lambda one: one.load_tokens)
        cached = self._cached(request, owner)
        if cached < self.MIN_SHARE * request.prompt_tokens:
            return other
        least = other.instance.load_tokens
        if owner.load_tokens > max(least + self.ABSOLUTE_TOKENS, least * self.RELATIVE):
            return other
        return Choice(owner, "longest cached prefix", cached)


class Sticky(Policy):
    """The same instance for a session, by rendezvous hashing with bounded loads.

    When an instance goes or comes, only the sessions that it had or gets move. A session goes to
    its next instance while the first has clearly more requests than the mean. A request without a
    session goes to the less loaded of two.
    """

    name = "sticky"
    RELATIVE = 1.25
    ABSOLUTE = 2

    def _choose(
        self, request: RequestView, instances: Sequence[InstanceView], rng: Random, now: float
    ) -> Choice | None:
        if not request.session:
            return self._balance(request, _draw(instances, rng, now)[:2], rng)
        usable = [one for one in instances if one.usable]
        if not usable:
            return None
        mean = sum(one.requests for one in usable) / len(usable)
        most = mean * self.RELATIVE + self.ABSOLUTE
        session = _hash(request.session)
        # The instance with the fewest requests is below the mean, so one is always left.
        chosen = max(
            (one for one in usable if one.requests <= most),
            key=lambda one: (_mix(session ^ _hash(one.name)), one.name),
        )
        return Choice(chosen, "the session's instance", self._cached(request, chosen))


class LowLoadSet(Policy):
    """A random one of those that have about the fewest tokens to compute first."""

    name = "low-load-set"

    def _choose(
        self, request: RequestView, instances: Sequence[InstanceView], rng: Random, now: float
    ) -> Choice | None:
        return self._balance(request, _draw(instances, rng, now), rng, _width(request))


class PowerOfTwo(Policy):
    """The less loaded of two random ones, however old the view is."""

    name = "power-of-two"

    def _choose(
        self, request: RequestView, instances: Sequence[InstanceView], rng: Random, now: float
    ) -> Choice | None:
        return self._balance(request, _draw(instances, rng, now)[:2], rng)


class RoundRobin(Policy):
    """Each in its turn, whatever its load. The first is random, for routers that start together."""

    name = "round-robin"

    def __init__(self, index: PrefixIndex | None = None, events: EventIndex | None = None) -> None:
        super().__init__(index, events)
        self._next: int | None = None

    def _choose(
        self, request: RequestView, instances: Sequence[InstanceView], rng: Random, now: float
    ) -> Choice | None:
        if self._next is None and instances:
            self._next = rng.randrange(len(instances))
        for step in range(len(instances)):
            place = ((self._next or 0) + step) % len(instances)
            one = instances[place]
            if one.usable:
                self._next = place + 1
                return Choice(one, "its turn", self._cached(request, one))
        return None


class LeastTokens(Policy):
    """The fewest tokens to compute first, of as many as the view's age allows."""

    name = "least-tokens"

    def _choose(
        self, request: RequestView, instances: Sequence[InstanceView], rng: Random, now: float
    ) -> Choice | None:
        return self._balance(request, _draw(instances, rng, now), rng)


POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        *(EstimatedTTFT, CacheAware, Sticky, LowLoadSet, PowerOfTwo, RoundRobin),
        LeastTokens,
    )
}
DEFAULT_POLICY = EstimatedTTFT.name


def make_policy(
    name: str, index: PrefixIndex | None = None, events: EventIndex | None = None
) -> Policy:
    """The policy of a name. ValueError names those that exist."""
    if name not in POLICIES:
        raise ValueError(f"no routing policy {name!r}; there are: {', '.join(POLICIES)}")
    return POLICIES[name](index, events)


def _draw(instances: Sequence[InstanceView], rng: Random, now: float) -> list[InstanceView]:
    """Usable candidates in random order, as many as the age of their reports allows."""
    if len(instances) > MAX_CANDIDATES:
        some = [instances[place] for place in rng.sample(range(len(instances)), MAX_CANDIDATES)]
        drawn = [one for one in some if one.usable]
        # Where few are usable, chance may miss them, and a choice of one would be none.
        if len(drawn) < 2:
            usable = [one for one in instances if one.usable]
            drawn = rng.sample(usable, min(MAX_CANDIDATES, len(usable)))
    else:
        drawn = [one for one in instances if one.usable]
        rng.shuffle(drawn)
    age = max((now - one.reported_at for one in drawn), default=0.0)
    return drawn if age <= FRESH_S else drawn[:3] if age <= STALE_S else drawn[:2]


def _fitting(request: RequestView, candidates: list[InstanceView]) -> list[InstanceView]:
    """Those whose free KV blocks hold the prompt; all where none has so many."""
    need = request.prompt_tokens
    fit = [one for one in candidates if one.free_tokens is None or one.free_tokens >= need]
    return fit or candidates


def _width(request: RequestView) -> float:
    """Tokens of difference in load that do not matter to this request."""
    return min(max(request.prompt_tokens / 2, 100.0), 500.0)


def _low_load(
    costs: list[tuple[float, int, InstanceView]], width: float, rng: Random
) -> InstanceView:
    """Of those within `width` of the least cost: the most cached tokens, then the fewer requests
    of two random ones. costs: cost, cached tokens, instance."""
    limit = min(cost for cost, _, _ in costs) + width
    near = [(cached, one) for cost, cached, one in costs if cost <= limit]
    most = max(cached for cached, _ in near)
    best = [one for cached, one in near if cached == most]
    if len(best) == 1:
        return best[0]
    first, second = rng.sample(best, 2)
    return first if first.requests <= second.requests else second


def _why_none(instances: Sequence[InstanceView]) -> str:
    if not instances:
        return "no instance is known"
    counts: list[tuple[str, Callable[[InstanceView], bool]]] = [
        ("draining", lambda one: one.draining),
        ("broken", lambda one: one.broken and not one.draining),
    ]
    words = [f"{sum(map(test, instances))} {word}" for word, test in counts]
    return f"none of {len(instances)} instances can be used: {', '.join(words)}"


@lru_cache(maxsize=65_536)
def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def _mix(value: int) -> int:
    """Spreads 64 bits, so that each session orders the instances its own way."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)
