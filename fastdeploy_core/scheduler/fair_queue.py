"""A waiting queue that is first come first served within a tenant and fair between tenants.

Each tenant has a counter of the service it got (tokens); the next turn goes to the tenant with the
smallest, as in the Virtual Token Counter of "Fairness in Serving Large Language Models" (Sheng et
al., OSDI 2024). A tenant that was idle does not save up: it starts at the smallest active counter,
or where the last active one stopped.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Container, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
MAX_IDLE_TENANTS = 1024


class FairQueue(Generic[T]):
    """Items by tenant, each tenant's by (priority, arrival); smaller priorities always go first."""

    def __init__(self) -> None:
        self._tenants: dict[str, list[tuple[int, int, T]]] = {}
        self._service: dict[str, float] = {}
        self.active: Counter[str] = Counter()  # unfinished requests
        self.running: Counter[str] = Counter()  # kept by the queue's owner
        self._last_service = 0.0  # of the tenant that went idle last
        self._arrivals = 0
        self._places: dict[int, tuple[str, int, int]] = {}  # id(item) to where it waits

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[T]:
        for items in self._tenants.values():
            for _, _, item in items:
                yield item

    def push(self, item: T, tenant: str, priority: int = 0) -> None:
        """Queue an item after all of its tenant's with this priority."""
        self._arrivals += 1
        place = (priority, self._arrivals)
        bisect.insort(self._tenants.setdefault(tenant, []), (*place, item), key=lambda e: e[:2])
        self._places[id(item)] = (tenant, *place)

    def peek(self, passed_over: Container[T] = ()) -> T | None:
        """The item whose turn it is, leaving out those passed over: of equal priorities, that of a
        tenant of whom nothing runs, and of these, of the one that was served least."""
        turns: list[tuple[int, bool, float, int, T]] = []
        runs, service = self.running.get, self._service.get
        for tenant, items in self._tenants.items():
            for priority, came, item in items:
                if item not in passed_over:
                    turns.append((priority, runs(tenant, 0) > 0, service(tenant, 0.0), came, item))
                    break
        return min(turns)[-1] if turns else None

    def remove(self, item: T) -> bool:
        """Take an item out, wherever it is; False if it does not wait here."""
        place = self._places.pop(id(item), None)
        if place is None:
            return False
        tenant, *rest = place
        items = self._tenants[tenant]
        items.pop(bisect.bisect_left(items, tuple(rest), key=lambda e: e[:2]))
        if not items:
            del self._tenants[tenant]
        return True

    def arrive(self, tenant: str) -> None:
        """The tenant has one more unfinished request."""
        if tenant not in self.active:
            floor = min((self._service[t] for t in self.active), default=self._last_service)
            self._service[tenant] = max(self._service.get(tenant, 0.0), floor)
        self.active[tenant] += 1

    def depart(self, tenant: str) -> None:
        """One of the tenant's requests has finished."""
        self.active[tenant] -= 1
        if not self.active[tenant]:
            del self.active[tenant], self.running[tenant]
            self._last_service = self._service[tenant]
            if len(self._service) > MAX_IDLE_TENANTS:
                self._service = {t: s for t, s in self._service.items() if t in self.active}

    def charge(self, tenant: str, amount: float) -> None:
        """The tenant was served this much."""
        self._service[tenant] = self._service.get(tenant, 0.0) + amount
