"""Several decode steps in one go: the same tokens as one by one, whatever else the engine does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from fastdeploy_core.config import GraphConfig
from fastdeploy_core.contracts.device import CapturedGraph
from fastdeploy_core.plugins.kernels import build_kernel_table
from fastdeploy_core.scheduler import decode_count, planner
from fastdeploy_core.tensor import load
from fastdeploy_testing.capturing import CapturingDevice, OnCapturingDevice
from tests.cpu import engine_mixes
from tests.cpu.engine_mixes import (
    Bench,
    Settings,
    answers_alone,
    check,
    check_poisoned_step,
    counted,
    make_requests,
)
from tests.null_engine import make_request
from tests.worker_steps import sharpen, write_model

MOST = 4
NUM_MIXES = 10


class MultiDevice(CapturingDevice):
    """Takes several decode steps in one go."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.limits = replace(self.limits, decodes_per_step=MOST)


class RepeatingDevice(MultiDevice):
    """And goes through captured graphs by itself."""

    num_repeats = 0

    def replay_times(self, graphs: tuple[CapturedGraph, ...], times: int) -> None:
        self.num_repeats += 1
        for _ in range(times):
            for graph in graphs:
                graph.replay()


class PostingDevice(MultiDevice):
    """And whose results come by themselves, so that steps are queued ahead of them."""

    def host_box(self, num_words: int) -> tuple[Any, np.ndarray]:
        host = np.zeros(num_words, dtype=np.int64)
        return self.xp.from_numpy(host), host


class OnMultiDevice(OnCapturingDevice):
    """OnCapturingDevice with that device."""

    device: Any = MultiDevice

    def load(self, kind: str, name: str = "") -> Any:
        return self.device if kind == "device" else super().load(kind, name)


class OnPostingDevice(OnMultiDevice):
    """The same with that one."""

    device = PostingDevice


class OnRepeatingDevice(OnMultiDevice):
    """The same with the other one."""

    device = RepeatingDevice


@pytest.fixture(scope="module", autouse=True)
def patience() -> Iterator[None]:
    """A slow machine changes nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_count, "most_at", lambda *step: 1e6)
        yield


def make(
    checkpoint: Path,
    tensor_library: str,
    plugins: Any,
    graphs: GraphConfig,
    *,
    overlap: bool = False,
) -> Bench:
    def config(path: Path, library: str, num_ranks: int = 1) -> tuple[Any, Any]:
        made, resolved = original(path, library, num_ranks)
        model = replace(made.model, load_format="dummy")
        batch = replace(made.batch, overlap=overlap)
        return replace(made, model=model, graphs=graphs, batch=batch), plugins(resolved)

    original = engine_mixes.make_engine_config
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_mixes, "make_engine_config", config)
        bench = Bench(checkpoint, tensor_library)
    sharpen(bench.worker)
    return bench


@pytest.fixture(scope="module")
def benches(
    tmp_path_factory: pytest.TempPathFactory, tensor_library: str
) -> Iterator[tuple[Bench, Bench]]:
    """The same model, with several decodes per step and without captured graphs."""
    checkpoint = write_model(tmp_path_factory.mktemp("llama"))
    several = make(checkpoint, tensor_library, OnMultiDevice, GraphConfig(sizes=(1, 2, 4, 8)))
    eager = make(checkpoint, tensor_library, OnCapturingDevice, GraphConfig(enabled=False))
    yield several, eager
    for bench in (several, eager):
        bench.worker.close()


@pytest.fixture(scope="module")
def posting(
    tmp_path_factory: pytest.TempPathFactory, tensor_library: str, benches: tuple[Bench, Bench]
) -> Iterator[Bench]:
    """The same model where steps are queued ahead and results posted."""
    if tensor_library != "torch":
        pytest.skip("PaddlePaddle's tensors on a processor do not share memory with arrays")
    checkpoint = write_model(tmp_path_factory.mktemp("llama"))
    graphs = GraphConfig(sizes=(1, 2, 4, 8))
    bench = make(checkpoint, tensor_library, OnPostingDevice, graphs, overlap=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "BEFORE_SEVERAL", 2)
        yield bench
    bench.worker.close()


def test_steps_queued_ahead_decode_several_times(
    posting: Bench, benches: tuple[Bench, Bench]
) -> None:
    requests = make_requests(Random(6), 14)
    alone = answers_alone(benches[1], requests)
    preemptions, numbers = 0, list[int]()
    for seed in range(NUM_MIXES):
        random = Random(seed)
        chosen = random.sample(requests, random.randrange(2, 7))
        with counted(posting) as found:
            arrivals = [(random.randrange(10), request) for request in chosen]
            core, collector = posting.run(replace(Settings.random(random), overlap=True), arrivals)
        numbers += found
        check(collector, chosen, alone)
        preemptions += core.stats().preemptions_total
    assert preemptions > 3 and {1, 2, 4} <= set(numbers)


def test_random_mixes_give_the_tokens_of_each_request_alone(benches: tuple[Bench, Bench]) -> None:
    several, eager = benches
    requests = make_requests(Random(5), 14)
    alone = answers_alone(eager, requests)
    preemptions, numbers = 0, list[int]()
    for seed in range(NUM_MIXES):
        random = Random(seed)
        chosen_settings = replace(Settings.random(random), overlap=False)
        chosen = random.sample(requests, random.randrange(2, 7))
        with counted(several) as found:
            core, collector = several.run(
                chosen_settings, [(random.randrange(10), r) for r in chosen]
            )
        numbers += found
        check(collector, chosen, alone)
        preemptions += core.stats().preemptions_total
    assert preemptions > 3 and {1, 2, 3, 4} <= set(numbers)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_token_but_the_first_ones_comes_several_at_a_time(
    benches: tuple[Bench, Bench], temperature: float
) -> None:
    several, eager = benches
    sampling = {"temperature": temperature, "seed": 3, "top_p": 0.9, "ignore_eos": True}
    requests = [make_request(f"r{n}", [5 + n, 9], max_tokens=20, **sampling) for n in range(3)]
    with counted(several) as found:
        _, collector = several.run(Settings(max_num_seqs=4), [(0, r) for r in requests])
    assert found == [1, 1, 2, 4, 4, 4, 4]
    check(collector, requests, answers_alone(eager, requests))


def test_request_that_breaks_a_step_fails_alone(
    benches: tuple[Bench, Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    several, eager = benches
    requests = make_requests(Random(9), 6)
    check_poisoned_step(several, requests, answers_alone(eager, requests), False, monkeypatch)


@pytest.mark.parametrize("is_posting", [False, True])
@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("place", [8, 9, 10, 11])
def test_a_row_is_cut_before_what_means_nothing(
    benches: tuple[Bench, Bench],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    place: int,
    stops: bool,
    is_posting: bool,
) -> None:
    """Logits are NaN in the midst of several decodes: the sequence fails there, as it does alone,
    if it has not ended before; its neighbour goes on."""
    several, eager = benches
    if is_posting:
        several = request.getfixturevalue("posting")
    prompts = {"bad": [5, 6, 7], "good": list(range(30, 60))}
    common = {"max_tokens": 18, "ignore_eos": True}
    requests = [make_request(name, prompt, **common) for name, prompt in prompts.items()]
    alone = answers_alone(eager, requests)
    tokens = alone["bad"][0][:place]
    if stops:
        assert tokens.index(tokens[-1]) == place - 1
        requests[0] = make_request("bad", prompts["bad"], stop_token_ids=[tokens[-1]], **common)
    model, xp = several.worker._runner._model, several.worker.device.xp
    forward = model.forward

    def fragile(input_ids: Any, positions: Any, context: Any) -> Any:
        hidden = forward(input_ids, positions, context)
        if context.rows is not None:
            positions = xp.index_select(positions, 0, context.rows)
        broken = (positions == len(prompts["bad"]) + place - 1).unsqueeze(1)
        return xp.where(broken, xp.full([1], float("nan")), hidden)

    monkeypatch.setattr(model, "forward", fragile)
    with counted(several) as found:
        options = Settings(max_num_seqs=4, overlap=is_posting)
        _, collector = several.run(options, [(0, r) for r in requests])
    assert MOST in found
    assert collector.answers("good") == alone["good"] and "good" not in collector.errors
    assert collector.answers("bad") == [tokens]
    assert ("bad" in collector.errors) != stops


def test_a_device_may_go_through_captured_graphs_by_itself(
    benches: tuple[Bench, Bench], tmp_path: Path, tensor_library: str
) -> None:
    eager = benches[1]
    checkpoint = write_model(tmp_path)
    bench = make(checkpoint, tensor_library, OnRepeatingDevice, GraphConfig(sizes=(8,)))
    requests = [make_request(f"r{n}", [5 + n, 9], max_tokens=20) for n in range(3)]
    _, collector = bench.run(Settings(max_num_seqs=8), [(0, r) for r in requests])
    check(collector, requests, answers_alone(eager, requests))
    assert bench.worker.device.num_repeats > 2
    bench.worker.close()


def test_not_every_size_is_captured_so_nothing_is_promised(
    tmp_path: Path, tensor_library: str
) -> None:
    checkpoint = write_model(tmp_path)
    bench = make(checkpoint, tensor_library, OnMultiDevice, GraphConfig(sizes=(1, 2)))
    assert bench._executor._info.max_decodes == 1
    bench.worker.close()


@pytest.mark.parametrize("size", [1, 3, 5])
def test_keep_results_is_what_a_slow_loop_says(tensor_library: str, size: int) -> None:
    xp, rng = load(tensor_library), np.random.default_rng(size)
    table: Any = build_kernel_table("cpu", {"tensor_library": tensor_library})
    slots = np.array([2, 0, 4, 3, 4])
    computed = rng.integers(0, 50, 5)
    results, kept = rng.integers(-3, 99, (5, 1)), rng.integers(100, 200, (5, size))
    wanted, given = kept.copy(), xp.from_numpy(kept.copy())
    for row in (0, 1, 3):
        wanted[row, computed[slots[row]] % size] = results[row, 0]
    table["keep_results"](*(xp.from_numpy(x.copy()) for x in (slots, results, computed)), given)
    assert (xp.to_numpy(given) == wanted).all()
