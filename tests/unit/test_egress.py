"""What several front ends asked for comes back to the one that asked, whole and in order."""

from __future__ import annotations

from random import Random

import pytest

from fastdeploy_core.engine.egress import Routes
from fastdeploy_core.types import RequestOutputDelta, TokenDeltas, each_delta


def single(name: str, position: int, *, finished: bool = False) -> RequestOutputDelta:
    return RequestOutputDelta(request_id=name, position=position, finished=finished)


@pytest.mark.parametrize("num_front_ends", [1, 2, 5])
def test_every_delta_reaches_its_front_end_in_order(num_front_ends: int) -> None:
    random, routes = Random(num_front_ends), Routes(num_front_ends)
    owners = {f"r{i}": random.randrange(num_front_ends) for i in range(30)}
    for name, owner in owners.items():
        routes.add(name, owner)
    positions = dict.fromkeys(owners, 0)
    alive = list(owners)
    got: dict[str, list[int]] = {name: [] for name in owners}
    steady = list(alive)
    for _ in range(60):
        if random.random() < 0.3:
            steady = [name for name in alive if random.random() < 0.8]
        outputs: list[RequestOutputDelta | TokenDeltas] = []
        chosen = [positions[name] for name in steady]
        outputs.append(TokenDeltas(steady, chosen, [1] * len(steady), chosen))
        for name in steady:
            positions[name] += 1
        if len(alive) > 5 and random.random() < 0.4:
            ended = random.choice(alive)
            outputs.append(single(ended, positions[ended], finished=True))
            alive.remove(ended)
            steady = [name for name in steady if name != ended]
        for front_end, part in routes.sort(outputs):
            for delta in each_delta(part):
                assert owners[delta.request_id] == front_end
                got[delta.request_id].append(delta.position)
                for sequence in delta.sequences:
                    assert sequence.token_ids == [delta.position]
    for name, found in got.items():
        assert found == list(range(len(found)))
        assert len(found) == positions[name] + (name not in alive)


def test_what_a_dead_front_end_asked_for_is_found_and_forgotten() -> None:
    routes = Routes(2)
    for name, owner in (("a", 0), ("b", 1), ("c", 1), ("d", 1)):
        routes.add(name, owner)
    assert dict(routes.sort([single("d", 0, finished=True)])).keys() == {1}
    routes.remove("c")
    assert routes.remove_all(1) == ["b"]
    assert routes.remove_all(1) == []
    columns = TokenDeltas(["a", "b"], [0, 0], [1, 1], [5, 6])
    ((owner, (part,)),) = routes.sort([columns, single("b", 1)])
    assert owner == 0 and part == TokenDeltas(["a"], [0], [1], [5])
    several = TokenDeltas(["b", "a"], [0, 0], [1, 1], [5, 6, 7, 8], [1, 3])
    ((owner, (part,)),) = routes.sort([several])
    assert owner == 0 and part == TokenDeltas(["a"], [0], [1], [6, 7, 8], [3])
