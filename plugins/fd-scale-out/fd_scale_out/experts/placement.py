"""Where experts are, and where they had better be: the greedy balance published as EPLB (DeepSeek,
2025). The experts with the highest load for each copy get a further copy, as long as there is room;
then copies go, the heaviest first, to the rank that has the least load.

Ranks have equally many places. A map says of each place, rank by rank, which expert lies there.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Final

import numpy as np

_MAX_TRADES: Final = 256


def first_map(num_experts: int, num_redundant: int, num_ranks: int) -> list[int]:
    """Before anything was counted: each rank's own experts, then copies of the next rank's."""
    own, more = num_experts // num_ranks, num_redundant // num_ranks
    found: list[int] = []
    for rank in range(num_ranks):
        found += range(rank * own, (rank + 1) * own)
        found += [((rank + 1) * own + nth) % num_experts for nth in range(more)]
    return found


def rank_loads(loads: np.ndarray, places: Sequence[int], num_ranks: int) -> np.ndarray:
    """[num_ranks]: what each rank computes, if copies divide their expert's tokens evenly.
    loads: [num_experts]."""
    at = np.asarray(places)
    copies = np.bincount(at, minlength=len(loads))
    each: np.ndarray = (loads[at] / copies[at]).reshape(num_ranks, -1).sum(1)
    return each


def imbalance(loads: np.ndarray, places: Sequence[int], num_ranks: int) -> float:
    """The most loaded rank's share of the mean; 1.0 where nothing was counted."""
    each = rank_loads(loads, places, num_ranks)
    return float(each.max() / each.mean()) if each.any() else 1.0


def balanced_map(loads: np.ndarray, places: Sequence[int], num_ranks: int) -> list[int]:
    """A map with balanced ranks, in which as many experts as possible stay where they are in
    `places`. loads: [num_experts], what was counted."""
    copies = _copies(loads, len(places), num_ranks)
    packs = _packs(loads / copies, copies, len(places) // num_ranks, num_ranks)
    _trade(loads / copies, packs)
    return _settle(packs, np.asarray(places).reshape(num_ranks, -1).tolist())


def _copies(loads: np.ndarray, num_places: int, num_ranks: int) -> np.ndarray:
    """[num_experts]: how many copies of each there are to be; no rank needs two."""
    copies = np.ones(len(loads), np.int64)
    heaviest = [(-float(load), expert) for expert, load in enumerate(loads)]
    heapq.heapify(heaviest)
    for _ in range(num_places - len(loads)):
        while copies[heaviest[0][1]] >= num_ranks and len(heaviest) > 1:
            heapq.heappop(heaviest)
        expert = heaviest[0][1]
        copies[expert] += 1
        heapq.heapreplace(heaviest, (-float(loads[expert]) / int(copies[expert]), expert))
    return copies


def _packs(each: np.ndarray, copies: np.ndarray, room: int, num_ranks: int) -> list[list[int]]:
    """Experts of each rank. each: load of one copy."""
    packs: list[list[int]] = [[] for _ in range(num_ranks)]
    totals = np.zeros(num_ranks)
    for expert in np.argsort(-each, kind="stable"):
        for _ in range(int(copies[expert])):
            free = [r for r in range(num_ranks) if len(packs[r]) < room]
            new = [r for r in free if expert not in packs[r]] or free
            rank = min(new, key=lambda r: (totals[r], r))
            packs[rank].append(int(expert))
            totals[rank] += each[expert]
    return packs


def _trade(each: np.ndarray, packs: list[list[int]]) -> None:
    """Exchange experts between the heaviest rank and others, while that makes it lighter: packing
    leaves the last places to whatever is left."""
    totals = np.array([each[pack].sum() for pack in packs])
    for _ in range(_MAX_TRADES):
        heavy = int(totals.argmax())
        best, found = float(totals[heavy]) * (1 - 1e-6), None
        for other in map(int, np.argsort(totals)):
            if other == heavy:
                continue
            for i, mine in enumerate(packs[heavy]):
                for j, theirs in enumerate(packs[other]):
                    gain = each[mine] - each[theirs]
                    worst = max(totals[heavy] - gain, totals[other] + gain)
                    if worst < best and mine not in packs[other] and theirs not in packs[heavy]:
                        best, found = float(worst), (other, i, j, gain)
            if found is not None:
                break
        if found is None:
            return
        other, i, j, gain = found
        packs[heavy][i], packs[other][j] = packs[other][j], packs[heavy][i]
        totals[heavy] -= gain
        totals[other] += gain


def _settle(packs: list[list[int]], before: list[list[int]]) -> list[int]:
    """Give each pack to the rank that has most of it, and leave what it has in its place."""
    pairs = [
        (-len(set(pack) & set(had)), number, rank)
        for number, pack in enumerate(packs)
        for rank, had in enumerate(before)
    ]
    of_rank: dict[int, int] = {}
    taken: set[int] = set()
    for _, number, rank in sorted(pairs):
        if rank not in of_rank and number not in taken:
            of_rank[rank] = number
            taken.add(number)
    found: list[int] = []
    for rank, had in enumerate(before):
        coming = list(packs[of_rank[rank]])
        places = [-1] * len(had)
        for place, expert in enumerate(had):
            if expert in coming:
                coming.remove(expert)
                places[place] = expert
        found += [coming.pop() if expert < 0 else expert for expert in places]
    return found
