"""The whole sampler on the reference device: stages, distributions, logprobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fastdeploy_core.config import EngineConfig, ModelConfig
from fastdeploy_core.config.engine import BatchConfig
from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_core.errors import InvalidRequest
from fastdeploy_core.plugins import lookup
from fastdeploy_core.plugins.kernels import build_kernel_table
from fastdeploy_core.reference.device import CpuDevice
from fastdeploy_core.sampling.captured import CapturedSampling
from fastdeploy_core.sampling.columns import SamplingColumns, SamplingPlan
from fastdeploy_core.sampling.logprobs import read
from fastdeploy_core.sampling.sampler import Sampled, SamplingStep
from fastdeploy_core.sampling.state import SamplingState
from fastdeploy_core.types import NewSequence, SamplingParams

VOCAB = 70  # more than two mask words, and no multiple of 32


class Bench:
    """A sampler with its state, without a model."""

    def __init__(self, library: str, max_num_seqs: int = 8, **settings: Any) -> None:
        self.device = CpuDevice(DeviceOptions(tensor_library=library, num_threads=1))
        self.columns = SamplingColumns(max_num_seqs, VOCAB)
        config = EngineConfig(
            model=ModelConfig(Path("none"), Path("none")),
            batch=BatchConfig(max_num_seqs=max_num_seqs),
            **settings,
        )
        kernels = build_kernel_table("cpu")
        self.state = SamplingState(config, self.device, kernels, self.columns, lookup)
        self.tokens: dict[int, list[int]] = {}
        self.num_prompt: dict[int, int] = {}

    def add(
        self,
        slot: int,
        params: SamplingParams,
        *,
        seed: int = 0,
        prompt: list[int] | None = None,
        output: list[int] | None = None,
        eos: list[int] | None = None,
    ) -> None:
        prompt, output = prompt or [1], output or []
        self.columns.add(slot, params, seed)
        self.tokens[slot], self.num_prompt[slot] = prompt + output, len(prompt)
        new = NewSequence(
            seq_id=slot,
            token_ids=prompt + output,
            num_prompt_tokens=len(prompt),
            block_ids=[],
            sampling=params,
            seed=seed,
            eos_token_ids=eos or [],
        )
        self.state.add(slot, new)

    def remove(self, slot: int) -> None:
        for part in [self.columns, *self.state.parts]:
            part.reset(slot)

    def sample(self, logits: np.ndarray, slots: list[int], positions: Any = None) -> Sampled:
        """logits: [rows, VOCAB], one row for each slot."""
        where = np.asarray(slots, dtype=np.int64)
        length = np.array([len(self.tokens[s]) for s in slots], dtype=np.int64)
        prompt = np.array([self.num_prompt[s] for s in slots], dtype=np.int64)
        step = SamplingStep(
            length if positions is None else np.asarray(positions, dtype=np.int64),
            length - prompt,
            lambda slot: np.asarray(self.tokens[slot][self.num_prompt[slot] :], dtype=np.int32),
        )
        plan = SamplingPlan(self.columns, where, self.device)
        rows = self.device.to_device(np.array(logits, dtype=np.float32))
        with self.device.xp.no_grad():
            if plan.is_plain:
                return self.state.sampler.greedy(rows)
            return self.state.sampler.sample(rows, plan, step)

    def ids(self, logits: np.ndarray, slots: list[int], positions: Any = None) -> list[int]:
        sampled = self.sample(logits, slots, positions)
        return self.device.to_host(sampled.token_ids).tolist()


@pytest.fixture
def bench(tensor_library: str) -> Bench:
    return Bench(tensor_library)


def exact(
    logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]
) -> np.ndarray:
    """The distribution as documented, in float64 and one token at a time."""
    x = logits.astype(np.float64).copy()
    for token in range(x.size):
        count = output.count(token)
        if token in prompt or count:
            x[token] *= params.repetition_penalty if x[token] < 0 else 1 / params.repetition_penalty
        x[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    x /= params.temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    p[p < params.min_p * p.max()] = 0
    order = np.argsort(-p)
    if params.top_k > 0:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    if params.top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= params.top_p]] = 0
    return p / p.sum()


NUM_SEEDS, NUM_POSITIONS = 512, 200


def draw(library: str, logits: np.ndarray, params: SamplingParams, **known: Any) -> np.ndarray:
    """Counts of 102,400 draws: 512 sequences with different seeds, 200 positions each."""
    bench, slots = Bench(library, max_num_seqs=NUM_SEEDS), list(range(NUM_SEEDS))
    for slot in slots:
        bench.add(slot, params, seed=slot * 7919 + 13, **known)
    counts, rows = np.zeros(VOCAB), np.tile(logits, (NUM_SEEDS, 1))
    tables = bench.state._penalties._tables
    table = None if tables is None else tables[0]
    start = None if table is None else table.clone()
    for position in range(5, 5 + NUM_POSITIONS):
        np.add.at(counts, bench.ids(rows, slots, np.full(NUM_SEEDS, position)), 1)
        if table is not None:  # drawing counts the token; start each draw from the same state
            table[:NUM_SEEDS] = start
    return counts


def p_value(counts: np.ndarray, p: np.ndarray) -> float:
    """Chi-square; cells with fewer than five expected draws are joined. Impossible tokens: 0."""
    if counts[p == 0].sum():
        return 0.0
    expected = p * counts.sum()
    small = expected < 5
    observed = np.append(counts[~small], counts[small].sum())
    wanted = np.append(expected[~small], expected[small].sum())
    keep = wanted > 0
    if keep.sum() == 1:
        return 1.0
    return float(stats.chisquare(observed[keep], wanted[keep]).pvalue)


CASES = {
    "plain": SamplingParams(),
    "temperature": SamplingParams(temperature=0.6),
    "hot": SamplingParams(temperature=1.9),
    "top_k": SamplingParams(top_k=7),
    "top_p": SamplingParams(top_p=0.8),
    "min_p": SamplingParams(min_p=0.08),
    "all filters": SamplingParams(temperature=1.3, top_k=20, top_p=0.85, min_p=0.02),
    "penalties": SamplingParams(
        presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.3
    ),
    "everything": SamplingParams(
        temperature=0.8,
        top_k=30,
        top_p=0.95,
        min_p=0.01,
        presence_penalty=-0.5,
        frequency_penalty=0.6,
        repetition_penalty=1.2,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_exact_distribution(tensor_library: str, name: str) -> None:
    logits = np.random.default_rng(5).normal(size=VOCAB).astype(np.float32) * 1.5
    params, prompt, output = CASES[name], [3, 4, 5, 60], [5, 5, 9, 69, 9, 9]
    counts = draw(tensor_library, logits, params, prompt=prompt, output=output)
    p = exact(logits, params, prompt, output)
    assert counts.sum() > 1e5
    assert p_value(counts, p) > 1e-3

    # The test must be able to fail: a little more of the likeliest token is noticed.
    biased = logits.copy()
    biased[int(p.argmax())] += 0.15
    wrong = draw(tensor_library, biased, params, prompt=prompt, output=output)
    assert p_value(wrong, p) < 1e-3


def test_a_seed_draws_the_same_alone_and_in_a_crowd(tensor_library: str) -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(8, VOCAB)).astype(np.float32)
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=0.5, top_p=0.9),
        SamplingParams(temperature=0.0),
        SamplingParams(top_k=5, min_p=0.01),
        SamplingParams(presence_penalty=0.5, repetition_penalty=1.1),
        SamplingParams(logit_bias={3: 2.0}, allowed_token_ids=list(range(40))),
        SamplingParams(temperature=1.2, logprobs=3),
        SamplingParams(min_tokens=3, stop_token_ids=[4]),
    ]
    crowd = Bench(tensor_library)
    for slot, params in enumerate(kinds):
        crowd.add(slot, params, seed=slot + 100, prompt=[1, 2, 3], output=[7, 8])
    order = rng.permutation(8).tolist()
    together = crowd.ids(logits[order], order)
    for row, slot in enumerate(order):
        alone = Bench(tensor_library, max_num_seqs=1)
        alone.add(0, kinds[slot], seed=slot + 100, prompt=[1, 2, 3], output=[7, 8])
        assert alone.ids(logits[[slot]], [0]) == [together[row]], kinds[slot]


def test_another_seed_or_position_draws_something_else(bench: Bench) -> None:
    rows = np.zeros((8, VOCAB))
    for slot in range(8):
        bench.add(slot, SamplingParams(), seed=slot % 4)
    first = bench.ids(rows, list(range(8)), [5] * 8)
    assert first[:4] == first[4:]
    assert len(set(first[:4])) > 1
    assert bench.ids(rows, list(range(8)), [6] * 8) != first


def test_draws_in_a_captured_graph_are_those_of_the_sampler(bench: Bench) -> None:
    """Drafts of sampled rows are sampled from fixed memory that is filled anew for other rows."""
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7),
        SamplingParams(top_k=5),
        SamplingParams(temperature=1.3, top_p=0.6),
        SamplingParams(min_p=0.2, top_k=20, top_p=0.95),
    ]
    for slot, params in enumerate(kinds):
        bench.add(slot, params, seed=100 + slot)
    device, xp, rng = bench.device, bench.device.xp, np.random.default_rng(0)
    draws = CapturedSampling(device, build_kernel_table("cpu"), bench.columns, 8)
    for order in ([0, 1, 2, 3, 4], [4, 0, 2], [3, 3, 1, 4]):
        slots = np.array(order)
        draws.fill(slots)
        for _ in range(20):
            logits = rng.normal(size=(slots.size, VOCAB)).astype(np.float32) * 3
            positions = device.to_device(rng.integers(0, 99, slots.size))
            plan = SamplingPlan(bench.columns, slots, device)
            expected = bench.state.sampler.draw_at(xp.from_numpy(logits.copy()), plan, positions)
            found, peaks = draws.sample(xp.from_numpy(logits.copy()), positions - 1)
            assert device.to_host(found).tolist() == device.to_host(expected).tolist()
            assert device.to_host(peaks).tolist() == logits.max(-1).tolist()


def test_a_plain_greedy_batch_is_one_argmax(bench: Bench) -> None:
    logits = np.random.default_rng(0).normal(size=(3, VOCAB))
    for slot in range(3):
        bench.add(slot, SamplingParams(temperature=0))
    sampled = bench.sample(logits, [0, 1, 2])
    assert bench.device.to_host(sampled.token_ids).tolist() == logits.argmax(-1).tolist()
    assert sampled.possible is None and sampled.logprobs is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_seen_and_others_are_not_touched(
    bench: Bench, temperature: float, broken: float
) -> None:
    logits = np.random.default_rng(0).normal(size=(3, VOCAB))
    for slot in range(3):
        bench.add(slot, SamplingParams(temperature=temperature), seed=slot)
    clean = bench.ids(logits, [0, 1, 2])
    hurt = logits.copy()
    hurt[1] = broken if broken < 0 else hurt[1]
    hurt[1, 40] = broken
    sampled = bench.sample(hurt, [0, 1, 2])
    finite = np.isfinite(bench.device.to_host(sampled.peak)).reshape(-1)
    assert finite.tolist() == [True, False, True]
    ids = bench.device.to_host(sampled.token_ids).tolist()
    assert [ids[0], ids[2]] == [clean[0], clean[2]]
    assert 0 <= ids[1] < VOCAB


def test_masks_forbid_what_they_must(bench: Bench) -> None:
    flat = np.zeros((1, VOCAB))
    ramp = np.arange(VOCAB, dtype=float)[None]
    allowed = [0, 31, 32, 69]
    bench.add(0, SamplingParams(temperature=0, allowed_token_ids=allowed))
    assert bench.ids(ramp, [0]) == [69]
    bench.add(1, SamplingParams(temperature=0, bad_words_token_ids=[[69], [68], [3, 4, 67]]))
    assert bench.ids(ramp, [1]) == [67]
    bench.add(2, SamplingParams(temperature=0, bad_words_token_ids=[[3, 4, 69]]), prompt=[3, 4])
    assert bench.ids(ramp, [2]) == [69], "a bad word does not begin in the prompt"
    bench.tokens[2] += [3]
    assert bench.ids(ramp, [2]) == [69]
    bench.tokens[2] += [4]
    assert bench.ids(ramp, [2]) == [68]
    bench.tokens[2] += [4]
    assert bench.ids(ramp, [2]) == [69]
    bench.add(3, SamplingParams(allowed_token_ids=allowed), seed=3)
    drawn = {bench.ids(flat, [3], [p])[0] for p in range(100)}
    assert drawn == set(allowed)


def test_min_tokens_holds_back_end_of_text_and_stop_ids(bench: Bench) -> None:
    ramp = np.arange(VOCAB, dtype=float)[None]
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[68])
    bench.add(0, params, eos=[69, 999])
    assert bench.ids(ramp, [0]) == [67]
    bench.tokens[0] += [67]
    assert bench.ids(ramp, [0]) == [67]
    bench.tokens[0] += [67]
    assert bench.ids(ramp, [0]) == [69]


def test_when_everything_is_forbidden_the_row_says_so(bench: Bench) -> None:
    params = SamplingParams(allowed_token_ids=[5], bad_words_token_ids=[[5]])
    bench.add(0, params)
    bench.add(1, SamplingParams())
    possible = bench.sample(np.zeros((2, VOCAB)), [0, 1]).possible
    finite = np.isfinite(bench.device.to_host(possible)).reshape(-1)
    assert finite.tolist() == [False, True]


def test_bias_and_penalties_change_greedy_choices(bench: Bench) -> None:
    logits = np.zeros((1, VOCAB))
    logits[0, [10, 20, 30]] = [3.0, 2.9, 2.8]
    bench.add(0, SamplingParams(temperature=0, logit_bias={30: 1.0, 10: -1.0}))
    assert bench.ids(logits, [0]) == [30]
    bench.add(1, SamplingParams(temperature=0, frequency_penalty=0.06), output=[10, 10])
    # 10 and 20 take turns: 2.88 < 2.9, then 2.88 > 2.84, then 2.82 < 2.84.
    assert [bench.ids(logits, [1])[0] for _ in range(3)] == [20, 10, 20]
    bench.add(2, SamplingParams(temperature=0, repetition_penalty=1.2), prompt=[10])
    assert bench.ids(logits, [2]) == [20]


def test_ids_outside_the_vocabulary_are_refused(bench: Bench) -> None:
    for params in (
        SamplingParams(allowed_token_ids=[VOCAB]),
        SamplingParams(bad_words_token_ids=[[1, VOCAB]]),
        SamplingParams(logit_bias={VOCAB: 1.0}),
        SamplingParams(stop_token_ids=[VOCAB]),
    ):
        with pytest.raises(InvalidRequest, match="vocabulary"):
            bench.add(0, params)


# -- log-probabilities ----------------------------------------------------------------------------


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


@pytest.mark.parametrize(
    "mode", ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
)
def test_logprobs_are_of_the_stage_the_mode_names(tensor_library: str, mode: str) -> None:
    bench = Bench(tensor_library, logprobs_mode=mode)
    logits = np.random.default_rng(2).normal(size=(3, VOCAB)).astype(np.float32) * 2
    params = SamplingParams(temperature=0.5, top_k=4, logit_bias={7: 5.0}, logprobs=2)
    bench.add(0, params, seed=1)
    bench.add(1, SamplingParams(temperature=0, logprobs=0))
    bench.add(2, SamplingParams())
    sampled = bench.sample(logits, [0, 1, 2])
    ids = bench.device.to_host(sampled.token_ids).tolist()
    assert sampled.logprobs is not None and sampled.logprobs.rows.tolist() == [0, 1]
    first, second = read(
        sampled.logprobs, (bench.device.to_host(x) for x in sampled.logprobs.tensors())
    )

    shown = logits[0].copy()
    if mode.startswith("processed"):
        shown[7] += 5
        shown /= 0.5
        shown[np.argsort(-shown)[4:]] = -np.inf
    values = shown if mode.endswith("logits") else log_softmax(shown)
    order = np.argsort(-values, kind="stable")
    assert first.token_ids == [ids[0], *order[:2].tolist()]
    assert np.allclose(first.logprobs, values[first.token_ids], atol=1e-5)
    assert first.rank == 1 + order.tolist().index(ids[0])

    plain = logits[1] if mode.endswith("logits") else log_softmax(logits[1])
    assert second.token_ids == [ids[1]] and second.rank == 1
    assert np.allclose(second.logprobs, plain[ids[1]], atol=1e-5)


def test_logprobs_of_the_whole_vocabulary_hold_no_infinity(tensor_library: str) -> None:
    bench = Bench(tensor_library, logprobs_mode="processed_logprobs")
    bench.add(0, SamplingParams(allowed_token_ids=[3, 5], logprobs=-1), seed=2)
    sampled = bench.sample(np.zeros((1, VOCAB)), [0])
    (record,) = read(
        sampled.logprobs, (bench.device.to_host(x) for x in sampled.logprobs.tensors())
    )
    assert len(record.token_ids) == VOCAB + 1 and sorted(record.token_ids[1:]) == list(range(VOCAB))
    assert np.isfinite(record.logprobs).all()
    assert np.allclose(record.logprobs[1:3], np.log(0.5), atol=1e-5)
    assert min(record.logprobs) == -9999.0


def test_named_tokens_are_given_in_place_of_the_likeliest(tensor_library: str) -> None:
    bench = Bench(tensor_library)
    logits = np.random.default_rng(4).normal(size=(3, VOCAB)).astype(np.float32) * 2
    bench.add(0, SamplingParams(temperature=0, logprobs=3))
    bench.add(1, SamplingParams(temperature=0, logprob_token_ids=[9, 2, 9, 11, 0]))
    bench.add(2, SamplingParams(temperature=0, logprobs=-1, logprob_token_ids=[VOCAB - 1]))
    sampled = bench.sample(logits, [0, 1, 2])
    likeliest, named, last = read(
        sampled.logprobs, (bench.device.to_host(x) for x in sampled.logprobs.tensors())
    )
    assert likeliest.token_ids[1:] == np.argsort(-logits[0], kind="stable")[:3].tolist()
    assert named.token_ids == [int(logits[1].argmax()), 9, 2, 11, 0]
    assert last.token_ids == [int(logits[2].argmax()), VOCAB - 1]
    for record, row in zip((likeliest, named, last), logits, strict=True):
        assert np.allclose(record.logprobs, log_softmax(row)[record.token_ids], atol=1e-5)


# -- slots ----------------------------------------------------------------------------------------


def random_params(rng: np.random.Generator) -> SamplingParams:
    def maybe(value: Any, default: Any) -> Any:
        return value if rng.random() < 0.3 else default

    return SamplingParams(
        temperature=float(rng.choice([0.0, 0.5, 1.0, 1.5])),
        top_p=maybe(0.8, 1.0),
        top_k=maybe(10, 0),
        min_p=maybe(0.05, 0.0),
        presence_penalty=maybe(0.5, 0.0),
        frequency_penalty=maybe(0.3, 0.0),
        repetition_penalty=maybe(1.3, 1.0),
        min_tokens=int(maybe(3, 0)),
        max_tokens=50,
        stop_token_ids=maybe([4, 5], None),
        allowed_token_ids=maybe([int(t) for t in rng.choice(VOCAB, 20, replace=False)], None),
        bad_words_token_ids=maybe([[7], [8, 9], [1, 2, 3]], None),
        logit_bias=maybe({6: 3.0, 9: -4.0}, None),
        logprobs=maybe(2, None),
        logits_processors_args=maybe({"logit_bias": {"11": 2.5}}, None),
    )


@pytest.mark.parametrize("seed", range(6))
def test_nothing_of_a_former_sequence_survives_in_its_slot(tensor_library: str, seed: int) -> None:
    """Random arrivals, departures and orders; every row equals a fresh sampler's."""
    rng = np.random.default_rng(seed)
    names = ("LogitBiasLogitsProcessor",)
    bench = Bench(tensor_library, logits_processors=names)
    live: dict[int, tuple[SamplingParams, int, list[int]]] = {}
    for _ in range(60):
        for slot in list(live):
            if rng.random() < 0.15:
                bench.remove(slot)
                del live[slot]
        for slot in range(8):
            if slot not in live and rng.random() < 0.5:
                params, number = random_params(rng), int(rng.integers(2**63))
                prompt = rng.integers(0, VOCAB, 4).tolist()
                bench.add(slot, params, seed=number, prompt=prompt, eos=[3])
                live[slot] = (params, number, prompt)
        slots = [s for s in rng.permutation(list(live)).tolist() if rng.random() < 0.8]
        if not slots:
            continue
        logits = rng.normal(size=(len(slots), VOCAB)).astype(np.float32)
        together = bench.ids(logits, slots)
        check = slots[int(rng.integers(len(slots)))]
        row = slots.index(check)
        params, number, prompt = live[check]
        fresh = Bench(tensor_library, max_num_seqs=1, logits_processors=names)
        output = bench.tokens[check][len(prompt) :]
        fresh.add(0, params, seed=number, prompt=prompt, output=output, eos=[3])
        assert fresh.ids(logits[[row]], [0]) == [together[row]], params
        for slot, token in zip(slots, together, strict=True):
            bench.tokens[slot].append(token)
