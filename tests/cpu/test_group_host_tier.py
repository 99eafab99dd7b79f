"""Models with several groups of layers and a host tier: what comes back from host memory gives the
tokens of a prompt that is computed whole, in every kind of layer."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from fastdeploy_core.engine import core as engine_core
from fastdeploy_core.types import Request
from tests.checkpoints import VOCAB, build
from tests.cpu.engine_mixes import Bench, Settings, answers_alone, check, count_loads, poison
from tests.null_engine import make_request

# Windows with sinks and full layers, alone, and with full layers; chunks; delta nets, convolutions
# and Mamba-2, each with full layers.
VARIANTS = ("gpt-oss", "mistral-window", "gemma3", "llama4", "qwen3-next", "lfm2", "nemotron-h")
SLOW = (pytest.mark.slow, pytest.mark.timeout(900))
CASES = [pytest.param("qwen3-next", 2, id="qwen3-next")]
CASES += [pytest.param(name, 16, id=f"{name}-16", marks=SLOW) for name in VARIANTS]


def make_sessions(random: Random) -> list[Request]:
    """Six beginnings, each asked three times with another end. None ends in front of a chunk of
    Llama 4, where its chunked layers need no block."""
    requests = []
    for session in range(6):
        shared = [random.randrange(3, VOCAB) for _ in range(random.choice([20, 21, 29]))]
        for turn in range(3):
            prompt = shared + [random.randrange(3, VOCAB) for _ in range(random.randrange(1, 9))]
            sampling = {} if turn % 2 else {"temperature": 1.0, "seed": turn}
            request = make_request(
                f"r{session}.{turn}", prompt, max_tokens=random.choice([3, 18]), **sampling
            )
            requests.append(request)
    return requests


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory, tensor_library: str) -> dict[str, Any]:
    """What is made of each model, once."""
    return {"folder": tmp_path_factory.mktemp("host-tier"), "library": tensor_library}


def bench_of(benches: dict[str, Any], variant: str) -> tuple[Bench, list[Request], Any]:
    if variant not in benches:
        folder: Path = benches["folder"]
        bench = Bench(build(folder, [variant]) / variant, benches["library"])
        requests = make_sessions(Random(3))
        benches[variant] = bench, requests, answers_alone(bench, requests)
    return benches[variant]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("variant", "num_mixes"), CASES)
def test_prefixes_that_come_back_from_host_memory_change_no_token(
    benches: dict[str, Any], variant: str, num_mixes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, requests, alone = bench_of(benches, variant)
    plan_cache, initialize = engine_core.plan_cache, bench._executor.initialize_cache
    random = Random(0)

    def short(*args: Any) -> Any:
        """Room for a sequence or two on the device; in host memory for a few, or for all."""
        made = plan_cache(*args)
        num_first, num_other = (100, 60) if mix % 2 else (12, 5)
        plans = tuple(
            g._replace(num_blocks=g.most_blocks + random.randrange(2), num_host_blocks=num_other)
            for g in made.bounded
        )
        return made._replace(bounded=plans, num_host_blocks=num_first)

    def poisoned(*sizes: int, **named: Any) -> None:
        initialize(*sizes, **named)
        poison(bench)

    monkeypatch.setattr(engine_core, "plan_cache", short)
    monkeypatch.setattr(bench._executor, "initialize_cache", poisoned)
    loads, host_hits, preemptions = count_loads(bench, monkeypatch), 0, 0
    for mix in range(num_mixes):
        settings = Settings(
            prefix_caching=True,
            chunked_prefill=True,
            max_num_batched_tokens=random.choice([5, 8]),
            max_num_seqs=random.choice([2, 4]),
            num_blocks=random.choice([18, 22]),
            host_blocks=60,
            overlap=mix % 3 > 0,
        )
        # Others come between two of a beginning, and take its blocks.
        arrivals = [(20 * (i % 3) + random.randrange(20), r) for i, r in enumerate(requests)]
        core, collector = bench.run(settings, arrivals)
        check(collector, requests, alone)
        core.scheduler.kv.check()
        assert core.scheduler.kv.num_used == 0, "a block is leaked"
        host_hits += core.stats().host_hit_tokens_total
        preemptions += core.stats().preemptions_total
    has_full = bench._executor._info.bytes_per_block > 0
    assert host_hits > 10 * num_mixes and loads[1] > num_mixes // 2 and preemptions
    assert loads[0] > num_mixes or not has_full
