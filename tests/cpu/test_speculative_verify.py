"""The verifier keeps the target's distribution, at first and later positions, whatever is drafted.

A target of eight tokens whose next-token logits depend on the last token alone. Over 10^5 seeds
pairs of tokens are sampled with two drafts per step, and counted against the exact probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fastdeploy_core.config import EngineConfig, ModelConfig, SpeculativeConfig
from fastdeploy_core.config.engine import BatchConfig
from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_core.plugins.kernels import build_kernel_table
from fastdeploy_core.reference.device import CpuDevice
from fastdeploy_core.sampling.columns import PENALTY, SamplingColumns, SamplingPlan
from fastdeploy_core.sampling.sampler import SamplingStep
from fastdeploy_core.sampling.state import SamplingState
from fastdeploy_core.types import NewSequence, SamplingParams

VOCAB, SLOTS, NUM_DRAFTS = 8, 4000, 2
NUM_SAMPLES = 100_000
RNG = np.random.default_rng(11)
TARGET = RNG.normal(0.0, 1.2, (VOCAB, VOCAB)).astype(np.float32)  # row: the last token
DRAFT = (TARGET + RNG.normal(0.0, 0.8, (VOCAB, VOCAB))).astype(np.float32)
LAST = 3  # the token before the first that is sampled
FEATURES = {
    "temperature": SamplingParams(temperature=0.8),
    "top_k": SamplingParams(temperature=1.0, top_k=4),
    "top_p": SamplingParams(temperature=1.2, top_p=0.8),
    "min_p": SamplingParams(temperature=1.0, min_p=0.1),
    "penalties": SamplingParams(
        temperature=1.0, repetition_penalty=1.4, frequency_penalty=0.7, presence_penalty=0.3
    ),
    "bias": SamplingParams(temperature=1.0, logit_bias={2: 1.5, 5: -2.0}),
    "bad_words": SamplingParams(temperature=1.0, bad_words_token_ids=[[6], [1, 4], [LAST, 0]]),
}
Drafter = Callable[["Bench"], tuple[np.ndarray, np.ndarray]]


class Bench:
    """A sampler for many sequences of the same parameters, one seed each."""

    def __init__(self, library: str, params: SamplingParams, **speculative: Any) -> None:
        self.device = CpuDevice(DeviceOptions(tensor_library=library, num_threads=1))
        self.columns = SamplingColumns(SLOTS, VOCAB)
        config = EngineConfig(
            model=ModelConfig(Path("none"), Path("none")),
            batch=BatchConfig(max_num_seqs=SLOTS),
            speculative=SpeculativeConfig("any", NUM_DRAFTS, **speculative),
        )
        self.state = SamplingState(config, self.device, build_kernel_table("cpu"), self.columns)
        for slot in range(SLOTS):
            self.columns.add(slot, params, 0)
            new = NewSequence(
                seq_id=slot,
                token_ids=[LAST, LAST],
                num_prompt_tokens=1,
                block_ids=[],
                sampling=params,
                seed=0,
            )
            self.state.add(slot, new)
        self.outputs = np.zeros((SLOTS, 0), dtype=np.int64)  # beyond the one token that is known
        self.one_each = np.arange(SLOTS)
        self.expanded = np.repeat(self.one_each, 1 + NUM_DRAFTS)

    def seed(self, first: int) -> None:
        """New random streams; what was generated is forgotten."""
        self.columns.seed[:] = first + np.arange(SLOTS)
        self.columns.version += 1
        self.outputs = np.zeros((SLOTS, 0), dtype=np.int64)
        tables = self.state._penalties
        if tables._tables is not None:
            counts = np.zeros((SLOTS, VOCAB), dtype=np.int32)
            counts[:, LAST] = 1
            tables._tables[0].copy_(self.device.to_device(counts))

    def known(self, slot: int) -> np.ndarray:
        return np.concatenate(([LAST], self.outputs[slot]))

    def draw(
        self, logits: np.ndarray, slots: np.ndarray, drafts: np.ndarray | None = None
    ) -> tuple[np.ndarray, Any]:
        """One token per row; rows of a slot stand after its drafts."""
        plan = SamplingPlan(self.columns, slots, self.device)
        positions = 2 + self.outputs.shape[1] + plan.depths
        step = SamplingStep(positions, positions - 1, self.known)
        if drafts is not None:
            step.drafts, step.drafts_dev = drafts, self.device.to_device(drafts)
        with self.device.xp.no_grad():
            sampled = self.state.sampler.sample(self.device.to_device(logits), plan, step)
        return self.device.to_host(sampled.token_ids), (plan, sampled.token_ids, step.drafts_dev)

    def pairs(self, drafter: Drafter, verify: Callable[..., np.ndarray]) -> np.ndarray:
        """[SLOTS, 2]: the first two tokens of every sequence, drawn with drafts."""
        first, second = drafter(self)
        drafts = np.stack((first, second, np.full(SLOTS, -1)), 1).reshape(-1)
        behind = np.stack((np.full(SLOTS, LAST), first, second), 1).reshape(-1)
        drawn, details = self.draw(TARGET[behind], self.expanded, drafts)
        accepted, kept = verify(self, drawn, drafts, details)
        drawn = drawn.reshape(SLOTS, -1)
        if details[0].flags & PENALTY:
            self.state.sampler.count(details[0], details[1], self.device.to_device(kept))
        one, two = drawn[:, 0].copy(), drawn[:, 1].copy()
        one = np.where(accepted > 0, first, one)
        two = np.where(accepted > 1, second, two)
        # The others get their second token from a step of its own.
        self.outputs = one[:, None]
        again, _ = self.draw(TARGET[one], self.one_each)
        return np.stack((one, np.where(accepted > 0, two, again)), 1)


def exact(bench: Bench, drawn: np.ndarray, drafts: np.ndarray, details: Any) -> Any:
    """The product's verifier, kernel finish_decode."""
    put, to_host = bench.device.to_device, bench.device.to_host
    table = drafts.reshape(SLOTS, -1)[:, :NUM_DRAFTS]
    padding = np.zeros(1, dtype=np.int64)
    state = [
        put(np.vstack((table, np.zeros((1, NUM_DRAFTS), dtype=np.int64)))),
        put(np.append(np.full(SLOTS, NUM_DRAFTS), padding)),
        *(put(np.zeros(SLOTS + 1, dtype=np.int64)) for _ in range(2)),
    ]
    results = put(np.zeros((SLOTS, 1 + NUM_DRAFTS), dtype=np.int64))
    tokens = put(drawn)
    finish = build_kernel_table("cpu")["finish_decode"]
    last = to_host(finish(put(bench.one_each), tokens, tokens, None, *state, results, None))
    return last - bench.one_each * (1 + NUM_DRAFTS), (to_host(results) >= 0).reshape(-1)


def broken(bench: Bench, drawn: np.ndarray, drafts: np.ndarray, details: Any) -> Any:
    """Accepts what is likely enough."""
    table = drafts.reshape(SLOTS, -1)
    behind = np.stack((np.full(SLOTS, LAST), table[:, 0]), 1)
    likely = softmax(TARGET[behind])
    chance = np.take_along_axis(likely, table[:, :NUM_DRAFTS, None], 2)[..., 0]
    accepted = np.cumprod(chance > 0.15, 1).sum(1)
    return accepted, (np.arange(1 + NUM_DRAFTS) <= accepted[:, None]).reshape(-1)


def likeliest(bench: Bench) -> tuple[np.ndarray, np.ndarray]:
    """Like n-grams: the same drafts whatever the seed."""
    first = np.full(SLOTS, int(TARGET[LAST].argmax()))
    return first, TARGET[first].argmax(-1)


def random_drafts(bench: Bench) -> tuple[np.ndarray, np.ndarray]:
    """Unrelated to the target."""
    rng = np.random.default_rng(int(bench.columns.seed[0]))
    return rng.integers(0, VOCAB, SLOTS), rng.integers(0, VOCAB, SLOTS)


def coupled(bench: Bench) -> tuple[np.ndarray, np.ndarray]:
    """Like a draft model: drawn from other logits with the target's random numbers."""
    plan = SamplingPlan(bench.columns, bench.one_each, bench.device)
    drafts, last = [], np.full(SLOTS, LAST)
    for step in range(NUM_DRAFTS):
        where = bench.device.to_device(np.full(SLOTS, 2 + step))
        logits = bench.device.to_device(DRAFT[last])
        last = bench.device.to_host(bench.state.sampler.draw_at(logits, plan, where))
        drafts.append(last)
    return drafts[0], drafts[1]


DRAFTERS = {"likeliest": likeliest, "random": random_drafts, "coupled": coupled}


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def probabilities(params: SamplingParams, last: int, output: list[int]) -> np.ndarray:
    """The documented distribution after `last`, in float64; `output` is what was generated."""
    x = TARGET[last].astype(np.float64).copy()
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in range(VOCAB):
        count = output.count(token)
        if count or token == LAST:
            x[token] *= params.repetition_penalty if x[token] < 0 else 1 / params.repetition_penalty
        x[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    for word in params.bad_words_token_ids or []:
        if output[len(output) - len(word) + 1 :] == word[:-1]:
            x[word[-1]] = -np.inf
    p = softmax(x / params.temperature)
    p[p < params.min_p * p.max()] = 0.0
    order = np.argsort(-p, kind="stable")
    if params.top_k > 0:
        p[order[params.top_k :]] = 0.0
    p /= p.sum()
    if params.top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= params.top_p]] = 0.0
    return p / p.sum()


def expected_pairs(params: SamplingParams) -> np.ndarray:
    first = probabilities(params, LAST, [LAST])
    rows = [first[t] * probabilities(params, t, [LAST, t]) for t in range(VOCAB)]
    return np.stack(rows)


def p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """Of a chi-square test over the cells that can occur; none other may."""
    possible = expected > 0
    assert not counts[~possible].any(), "a token came that cannot come"
    wanted = expected[possible] / expected.sum() * counts.sum()
    enough = wanted >= 5
    seen = np.append(counts[possible][enough], counts[possible][~enough].sum())
    wanted = np.append(wanted[enough], wanted[~enough].sum())
    keep = wanted > 0
    return float(stats.chisquare(seen[keep], wanted[keep]).pvalue)


def count_pairs(bench: Bench, drafter: Drafter, verify: Any, num_samples: int) -> np.ndarray:
    counts = np.zeros((VOCAB, VOCAB), dtype=np.int64)
    for first in range(0, num_samples, SLOTS):
        bench.seed(1 + first)
        np.add.at(counts, tuple(bench.pairs(drafter, verify).T), 1)
    return counts


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n == "bad_words" else []) for n in FEATURES],
)
def test_pairs_have_the_targets_distribution(name: str, tensor_library: str) -> None:
    params = FEATURES[name]
    bench = Bench(tensor_library, params)
    expected = expected_pairs(params)
    alone: np.ndarray | None = None
    for drafter in DRAFTERS.values():
        counts = count_pairs(bench, drafter, exact, NUM_SAMPLES)
        # The drafts change nothing at all, so one set of counts stands for all drafters.
        assert alone is None or (counts == alone).all()
        alone = counts
    assert alone is not None
    assert p_value(alone.sum(1), expected.sum(1)) > 1e-3, "first position"
    assert p_value(alone, expected) > 1e-3, "both positions"


def test_broken_verifier_is_found_out(tensor_library: str) -> None:
    params = FEATURES["temperature"]
    counts = count_pairs(Bench(tensor_library, params), likeliest, broken, NUM_SAMPLES)
    assert p_value(counts.sum(1), expected_pairs(params).sum(1)) < 1e-12
    assert p_value(counts, expected_pairs(params)) < 1e-12


def test_lossy_acceptance_takes_more_and_has_another_distribution(tensor_library: str) -> None:
    params = FEATURES["top_p"]
    settings = {"acceptance": "lossy_top_p", "max_candidate_len": 3, "verify_window": 9}
    lossy = Bench(tensor_library, params, **settings)
    plain = Bench(tensor_library, params)
    for bench in (lossy, plain):
        bench.seed(5)
    first, second = coupled(plain)
    drafts = np.stack((first, second, np.full(SLOTS, -1)), 1).reshape(-1)
    behind = np.stack((np.full(SLOTS, LAST), first, second), 1).reshape(-1)
    taken = []
    for bench in (lossy, plain):
        drawn, details = bench.draw(TARGET[behind], bench.expanded, drafts)
        taken.append(exact(bench, drawn, drafts, details)[0])
    assert (taken[0] >= taken[1]).all() and taken[0].sum() > 1.1 * taken[1].sum()
    # A draft passes when top_p keeps it among the three likeliest, or when it is sampled all the
    # same.
    kept = probabilities(params, LAST, [])[first] > 0
    ranks = (TARGET[LAST] > TARGET[LAST][first][:, None]).sum(1)
    assert ((taken[0] > 0) == ((kept & (ranks < 3)) | (taken[1] > 0))).all()
    counts = count_pairs(lossy, likeliest, exact, 40_000)
    assert p_value(counts, expected_pairs(params)) < 1e-12


@pytest.mark.parametrize(("window", "passes"), [(1, 2), (2, 0)])
def test_second_likeliest_passes_before_a_window_of_likeliest_drafts(
    tensor_library: str, window: int, passes: int
) -> None:
    """top_p keeps one token, so the second likeliest only passes by that rule."""
    params = SamplingParams(temperature=1.0, top_p=0.01)
    bench = Bench(tensor_library, params, acceptance="lossy_top_p", verify_window=window)
    second = int(np.argsort(-TARGET[LAST])[1])
    likely = int(TARGET[second].argmax())
    drafts = np.tile([second, likely, -1], SLOTS)
    behind = np.tile([LAST, second, likely], SLOTS)
    drawn, details = bench.draw(TARGET[behind], bench.expanded, drafts)
    assert (exact(bench, drawn, drafts, details)[0] == passes).all()


def test_coupled_drafts_are_right_about_as_often_as_possible(tensor_library: str) -> None:
    """Rejection sampling accepts 1 - TV; the same noise for both accepts at least (1-TV)/(1+TV)."""
    bench = Bench(tensor_library, FEATURES["temperature"])
    right = []
    for first in range(0, NUM_SAMPLES, SLOTS):
        bench.seed(1 + first)
        drafts, _ = coupled(bench)
        drawn, _ = bench.draw(np.repeat(TARGET[LAST][None], SLOTS, 0), bench.one_each)
        right.append((drafts == drawn).mean())
    target, draft = softmax(TARGET[LAST] / 0.8), softmax(DRAFT[LAST] / 0.8)
    distance = np.abs(target - draft).sum() / 2
    assert (1 - distance) / (1 + distance) - 0.01 < np.mean(right) <= 1 - distance + 0.01
