"""Which cell a request is put into, and which instance gets it while Redis is away."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence

from fastdeploy_core.contracts.scheduler import InstanceLoad
from fastdeploy_core.types import Request

PREFIX_TOKENS = 256
_chance = random.Random()  # noqa: S311, for balance
# A request goes to another cell than its prefix's where each instance has this many more waiting.
SPILL_PER_INSTANCE = 2.0


def home_cell(instance: str, count: int) -> int:
    """The number of the cell that an instance reports to."""
    return zlib.crc32(instance.encode()) % count


def choose_cell(request: Request, waiting: Sequence[tuple[int, int]]) -> int:
    """The number of a cell. waiting: of each, requests that wait and instances that live.

    Requests with the same tenant and beginning meet in one cell, whose instances have their prefix
    cached, unless a second, random cell has much less to do.
    """
    count = len(waiting)
    if count == 1:
        return 0
    tokens = request.prompt_token_ids[:PREFIX_TOKENS]
    seed = f"{request.tenant}\0{request.cache_salt}\0{tokens}".encode()
    home, other = zlib.crc32(seed) % count, _chance.randrange(count)
    if waiting[home][1] == 0:
        live = [number for number in range(count) if waiting[number][1]]
        return _chance.choice(live) if live else home
    if waiting[other][1] and _per_instance(waiting[home]) > (
        _per_instance(waiting[other]) + SPILL_PER_INSTANCE
    ):
        return other
    return home


def _per_instance(cell: tuple[int, int]) -> float:
    return cell[0] / cell[1]


def choose_instance(
    live: Sequence[str], seen: Mapping[str, InstanceLoad], offered: Mapping[str, int]
) -> str | None:
    """The less loaded of two random instances: the view is old, and every front end has the same
    one, so all would run to its minimum."""
    usable = [name for name in live if name in seen and not seen[name].draining]
    if not usable:
        return None
    pair = _chance.sample(usable, min(2, len(usable)))
    return min(
        pair, key=lambda name: seen[name].num_running + seen[name].num_waiting + offered[name]
    )
