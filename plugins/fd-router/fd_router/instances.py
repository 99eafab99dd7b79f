"""The instances behind the router: what it knows of each, and the requests it has there."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

from .breaker import Breaker
from .cached.cached_blocks import EventIndex
from .cached.prefix_index import PrefixIndex
from .policies import Choice, InstanceView, Policy, RequestView, make_policy

T = TypeVar("T")
PREFILL = "prefill"  # the role
RATE_WEIGHT = 0.1  # of a new sample in the estimate of the prefill rate
RATE_MIN_TOKENS = 256  # shorter prompts say little about it


class InstanceFailed(Exception):
    """An instance is gone, silent, or sent what is no answer."""


class Call:
    """One request at one instance."""

    def __init__(self, instance: Instance, tokens: int, timeout_s: float) -> None:
        """tokens: uncached prompt tokens, estimated."""
        self.instance = instance
        self.tokens = tokens
        self.waits = True  # for its first token
        self._timeout_s = timeout_s
        self._ahead = instance.queued_tokens
        self._began = time.monotonic()
        self._lost = ""
        self._scope: asyncio.Timeout | None = None

    async def bounded(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Awaits what the instance sends; InstanceFailed when that takes too long, or at once
        when the instance is found to be lost."""
        if not self._lost:
            try:
                async with asyncio.timeout(self._timeout_s) as self._scope:
                    return await make()
            except TimeoutError:
                if self._scope is not None and not self._scope.expired():
                    raise InstanceFailed("accepted no connection in time") from None
                self._lost = self._lost or f"sent nothing for {self._timeout_s:g} s"
            finally:
                self._scope = None
        raise InstanceFailed(self._lost)

    def lose(self, reason: str) -> None:
        """The instance was found to be lost."""
        self._lost = reason
        if self._scope is not None:
            self._scope.reschedule(0)

    def first_token(self) -> None:
        """The first byte of an answer's stream came, which says how fast prompts are computed."""
        if not self.waits:
            return
        self.waits = False
        if self.tokens >= RATE_MIN_TOKENS:
            took = max(1e-4, time.monotonic() - self._began)
            sample = (self._ahead + self.tokens) / took
            view = self.instance.view
            view.prefill_rate += RATE_WEIGHT * (sample - view.prefill_rate)


class Instance:
    """One server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.name = urlsplit(url).netloc
        self.view = InstanceView(self.name)
        self.breaker = Breaker()
        self.draining = False
        # What it says of itself: its role, and how other instances reach it (fd-scale-out).
        self.role, self.ticket = "", ""
        self.calls: set[Call] = set()
        # What probes found; an instance gets requests only after one has found it ready.
        self.ready = False
        self.state = "not probed yet"
        self.metrics = b""
        self.others_running = 0  # requests that do not come from here
        self.others_waiting = 0
        self.reported_at = 0.0

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens sent there that have not led to a first token."""
        return sum(call.tokens for call in self.calls if call.waits)

    def refresh(self, now: float, mean_tokens: float) -> InstanceView:
        """The view that policies get; mean_tokens: of a prompt, for requests of others."""
        view = self.view
        own_waiting = sum(call.waits for call in self.calls)
        view.running = len(self.calls) - own_waiting + self.others_running
        view.waiting = own_waiting + self.others_waiting
        view.queued_tokens = self.queued_tokens + int(self.others_waiting * mean_tokens)
        view.draining = self.draining
        view.broken = not (self.ready and self.breaker.allows(now))
        # Without requests of others, what this router sent is the whole truth, and it is new.
        others = self.others_running or self.others_waiting
        view.reported_at = self.reported_at if others else now
        return view

    def report(self, running: int, waiting: int, free_tokens: int | None) -> None:
        """A load report came: requests that run and wait there, from wherever."""
        own_waiting = sum(call.waits for call in self.calls)
        self.others_running = max(0, running + waiting - len(self.calls))
        self.others_waiting = min(self.others_running, max(0, waiting - own_waiting))
        self.others_running -= self.others_waiting
        self.view.free_tokens = free_tokens
        self.reported_at = time.monotonic()

    def lose(self, reason: str) -> None:
        """It does not answer probes: requests that are there look for another instance."""
        self.ready = False
        self.state = reason
        for call in tuple(self.calls):
            call.lose(reason)


class Fleet:
    """All instances, and the policy that chooses among them."""

    def __init__(self, urls: tuple[str, ...], policy: str) -> None:
        self.instances = {one.name: one for one in map(Instance, urls)}
        self.index = PrefixIndex()
        self.events = EventIndex()
        self._policy: Policy = make_policy(policy, self.index, self.events)
        self._rng = random.Random()  # noqa: S311, for balance
        self._mean_tokens = 512.0

    def choose(self, request: RequestView, excluded: set[str]) -> Choice:
        """An instance to answer a request, not one of the excluded; one that computes prompts for
        others only where there is no other."""
        left = [one for one in self.instances.values() if one.name not in excluded]
        choice = self._among([one for one in left if one.role != PREFILL], request)
        others = [one for one in left if one.role == PREFILL]
        return choice if choice.instance or not others else self._among(others, request)

    def choose_prefill(self, request: RequestView) -> Choice:
        """An instance to compute a prompt that another one answers."""
        able = [one for one in self.instances.values() if one.role == PREFILL and one.ticket]
        return self._among(able, request)

    def _among(self, instances: Sequence[Instance], request: RequestView) -> Choice:
        now = time.monotonic()
        views = [one.refresh(now, self._mean_tokens) for one in instances]
        return self._policy.choose(request, views, self._rng, now)

    @contextmanager
    def call(self, request: RequestView, choice: Choice, timeout_s: float) -> Iterator[Call]:
        """A request goes to the chosen instance; its end tells the breaker how that went."""
        assert choice.instance is not None  # noqa: S101
        instance = self.instances[choice.instance.name]
        call = Call(instance, request.prompt_tokens - choice.cached_tokens, timeout_s)
        instance.calls.add(call)
        instance.breaker.begin(time.monotonic())
        self.index.record(instance.name, request.prefix_keys)
        if request.prompt_tokens:
            self._mean_tokens += 0.01 * (request.prompt_tokens - self._mean_tokens)
        try:
            yield call
        except InstanceFailed:
            instance.breaker.failed(time.monotonic())
            raise
        except BaseException:
            instance.breaker.left()
            raise
        else:
            instance.breaker.succeeded()
        finally:
            instance.calls.discard(call)

    @property
    def num_usable(self) -> int:
        """Instances that a new request could go to."""
        now = time.monotonic()
        return sum(
            one.ready and not one.draining and one.breaker.allows(now)
            for one in self.instances.values()
        )
