"""What every policy promises, and what each one is for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
from fd_router.cached.prefix_index import PrefixIndex, chained_keys
from fd_router.policies import (
    MAX_CANDIDATES,
    POLICIES,
    Choice,
    InstanceView,
    Policy,
    RequestView,
    make_policy,
)
from hypothesis import given
from hypothesis import strategies as st

NOW = 100.0
BLOCK = 64
NAMES = sorted(POLICIES)
INSTANCES = st.lists(
    st.builds(
        InstanceView,
        name=st.just(""),
        running=st.integers(0, 50),
        waiting=st.integers(0, 50),
        queued_tokens=st.integers(0, 100_000),
        prefill_rate=st.floats(100, 100_000),
        free_tokens=st.none() | st.integers(0, 100_000),
        draining=st.booleans(),
        broken=st.booleans(),
        reported_at=st.sampled_from([NOW, NOW - 0.05, NOW - 3]),
    ),
    max_size=40,
).map(lambda views: [_named(view, place) for place, view in enumerate(views)])


def _named(view: InstanceView, place: int) -> InstanceView:
    view.name = f"i{place}"
    return view


def _request(tokens: int, prompt: bytes = b"", session: str = "") -> RequestView:
    return RequestView(tokens, chained_keys(prompt, BLOCK), BLOCK, session)


def _send(policy: Policy, index: PrefixIndex, request: RequestView, instances, rng) -> Choice:
    choice = policy.choose(request, instances, rng, NOW)
    if choice.instance is not None:
        choice.instance.reserve(request.prompt_tokens - choice.cached_tokens)
        index.record(choice.instance.name, request.prefix_keys)
    return choice


@pytest.mark.parametrize("name", NAMES)
@given(instances=INSTANCES, seed=st.integers(0, 99), session=st.sampled_from(["", "s"]))
def test_chosen_is_usable_and_the_same_for_a_seed(name, instances, seed, session) -> None:
    def run() -> list[Choice]:
        index = PrefixIndex()
        for view in instances[::3]:
            index.record(view.name, chained_keys(b"a" * 640, BLOCK))
        policy, rng = make_policy(name, index), Random(seed)
        request = _request(700, b"a" * 900, session)
        return [policy.choose(request, instances, rng, NOW) for _ in range(3)]

    choices = run()
    for choice in choices:
        if any(view.usable for view in instances):
            assert choice.instance is not None
            assert choice.instance.usable
            assert 0 <= choice.cached_tokens < 700
        else:
            assert choice.instance is None
            assert (str(len(instances)) if instances else "no instance") in choice.reason
    again = [choice.instance and choice.instance.name for choice in run()]
    assert again == [choice.instance and choice.instance.name for choice in choices]


class _Counted(Sequence[InstanceView]):
    """Instances that count how often one is looked at."""

    def __init__(self, views: list[InstanceView]) -> None:
        self._views = views
        self.looks = 0

    def __len__(self) -> int:
        return len(self._views)

    def __getitem__(self, place):
        self.looks += 1
        return self._views[place]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_usable", [0, 1, 1000])
def test_cost_is_at_most_linear(name: str, num_usable: int) -> None:
    views = [InstanceView(f"i{n}", reported_at=NOW, broken=n >= num_usable) for n in range(1000)]
    index = PrefixIndex()
    prompt = b"a" * 6400
    for view in views:
        index.record(view.name, chained_keys(prompt, BLOCK))
    counted = _Counted(views)
    make_policy(name, index).choose(_request(6400, prompt, "s"), counted, Random(0), NOW)
    assert counted.looks <= 5 * len(views)


@pytest.mark.parametrize("name", ["low-load-set", "power-of-two", "least-tokens", "estimated-ttft"])
def test_large_fleet_is_chosen_from_a_few(name: str) -> None:
    counted = _Counted([InstanceView(f"i{n}", reported_at=NOW) for n in range(10_000)])
    make_policy(name).choose(_request(500), counted, Random(0), NOW)
    assert counted.looks <= MAX_CANDIDATES


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"round-robin", "power-of-two"}))
@pytest.mark.parametrize("age", [0.0, 0.05, 1.0])
def test_a_hot_prefix_does_not_overload_one_instance(name: str, age: float) -> None:
    """Everyone asks with one long prefix, in one session, and no report comes."""
    instances = [InstanceView(f"i{n}", reported_at=NOW - age) for n in range(8)]
    index = PrefixIndex()
    policy, rng = make_policy(name, index), Random(1)
    counts: Counter[str] = Counter()
    for number in range(800):
        # 75 % of a prompt are shared.
        prompt = b"s" * 3072 + number.to_bytes(2, "big") * 512
        choice = _send(policy, index, _request(4096, prompt, "hot"), instances, rng)
        counts[choice.instance.name] += 1
    assert max(counts.values()) <= 1.6 * 800 / len(instances)
    tokens = [view.reserved_tokens for view in instances]
    assert max(tokens) <= 1.6 * sum(tokens) / len(tokens)


@pytest.mark.parametrize("name", ["estimated-ttft", "cache-aware"])
def test_follows_a_cached_prefix_until_its_queue_is_longer(name: str) -> None:
    instances = [InstanceView(f"i{n}", reported_at=NOW) for n in range(4)]
    index = PrefixIndex()
    prompt = b"a" * 16_000
    index.record("i2", chained_keys(prompt, BLOCK))
    policy = make_policy(name, index)
    request = _request(16_000, prompt)
    for seed in range(20):
        choice = policy.choose(request, instances, Random(seed), NOW)
        assert choice.instance is instances[2]
        assert choice.cached_tokens == 15_999  # one token is computed, or there would be no answer
    instances[2].queued_tokens = 40_000
    assert policy.choose(request, instances, Random(0), NOW).instance is not instances[2]


def test_saturated_fleet_keeps_to_cached_prefixes_for_longer() -> None:
    def chosen(queued: int) -> str:
        views = [InstanceView(name, queued_tokens=queued, reported_at=NOW) for name in "ab"]
        views[0].queued_tokens += 15_000  # the owner's queue is longer than what is cached
        index = PrefixIndex()
        index.record("a", chained_keys(b"p" * 10_240, BLOCK))
        choice = make_policy("estimated-ttft", index).choose(
            _request(10_300, b"p" * 10_240), views, Random(0), NOW
        )
        return choice.instance.name

    assert chosen(0) == "b"
    assert chosen(200_000) == "a"


def test_estimated_ttft_knows_slow_instances() -> None:
    views = [
        InstanceView("slow", queued_tokens=2_000, prefill_rate=1_000, reported_at=NOW),
        InstanceView("fast", queued_tokens=8_000, prefill_rate=10_000, reported_at=NOW),
    ]
    request = _request(1_000)
    choose = {
        name: make_policy(name).choose(request, views, Random(0), NOW).instance.name
        for name in ("estimated-ttft", "least-tokens")
    }
    assert choose == {"estimated-ttft": "fast", "least-tokens": "slow"}


@pytest.mark.parametrize("name", ["low-load-set", "least-tokens", "estimated-ttft"])
def test_an_old_view_is_never_followed_to_its_minimum(name: str) -> None:
    """The instance that a stale view shows as idle gets the share of two random choices, 2 / n."""

    def share(age: float) -> float:
        views = [InstanceView(f"i{n}", reported_at=NOW - age) for n in range(10)]
        for view in views[1:]:
            view.queued_tokens = 50_000
        policy, rng = make_policy(name), Random(0)
        picks = [policy.choose(_request(500), views, rng, NOW).instance for _ in range(2000)]
        return sum(view is views[0] for view in picks) / len(picks)

    assert share(0.005) == 1.0
    assert 0.25 < share(0.05) < 0.35
    assert 0.15 < share(0.15) < 0.25


def test_full_kv_cache_is_passed_over_while_another_has_room() -> None:
    views = [
        InstanceView("full", free_tokens=100, reported_at=NOW),
        InstanceView("room", free_tokens=9_000, queued_tokens=5_000, reported_at=NOW),
    ]
    for name in ("estimated-ttft", "low-load-set", "least-tokens", "power-of-two"):
        choice = make_policy(name).choose(_request(2_000), views, Random(0), NOW)
        assert choice.instance is views[1], name


def test_sessions_move_only_from_an_instance_that_goes() -> None:
    views = [InstanceView(f"i{n}", reported_at=NOW) for n in range(10)]
    policy = make_policy("sticky")

    def homes() -> dict[str, str]:
        sessions = [f"user{n}" for n in range(500)]
        found = {s: policy.choose(_request(10, b"", s), views, Random(0), NOW) for s in sessions}
        return {session: choice.instance.name for session, choice in found.items()}

    before = homes()
    assert min(Counter(before.values()).values()) > 20  # 50 each on average
    views[3].draining = True
    after = homes()
    assert {s for s in before if before[s] != after[s]} == {s for s in before if before[s] == "i3"}


def test_round_robin_takes_turns_and_skips() -> None:
    views = [InstanceView(name, reported_at=NOW) for name in "abc"]
    views[1].broken = True
    policy = make_policy("round-robin")
    picks = [policy.choose(_request(1), views, Random(0), NOW).instance.name for _ in range(4)]
    assert picks in (["a", "c", "a", "c"], ["c", "a", "c", "a"])
    first = [
        make_policy("round-robin").choose(_request(1), views, Random(seed), NOW)
        for seed in range(20)
    ]
    assert {choice.instance.name for choice in first} == {"a", "c"}


def test_unknown_policy_names_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"'best'; there are: estimated-ttft, .*least-tokens"):
        make_policy("best")
