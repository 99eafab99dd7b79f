"""Models with several groups of layers and a KV store: what one engine has computed is found by the
next one where every group has what resuming takes, and answers are those of one engine alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from fd_kv_disk.disk import DiskStore
from fd_scale_out.stored_blocks import CHECKSUM_BYTES, MAGIC

from tests.checkpoints import build
from tests.cpu.engine_mixes import Bench, Settings, answers_alone, check, count_loads, poison
from tests.cpu.test_group_host_tier import make_sessions
from tests.null_engine import make_request

# Windows with sinks beside full layers, and alone; chunks; delta nets, convolutions and Mamba-2.
VARIANTS = ("gpt-oss", "mistral-window", "gemma3", "llama4", "qwen3-next", "lfm2", "nemotron-h")
SLOW = (pytest.mark.slow, pytest.mark.timeout(900))
CASES = [pytest.param(name, 1, id=name) for name in ("gpt-oss", "qwen3-next")]
CASES += [pytest.param(name, 8, id=f"{name}-8", marks=SLOW) for name in VARIANTS]


class Unsteady:
    """A store that sometimes fails, is late or damages what it gives."""

    def __init__(self, store: Any, random: Random) -> None:
        self._store, self._random, self._lock = store, random, threading.Lock()
        self.name, self.contract = store.name, store.contract

    def _roll(self) -> float:
        with self._lock:
            dice = self._random.random()
        if dice < 0.05:
            raise OSError("the store has a bad day")
        if dice < 0.1:
            time.sleep(0.02)
        return dice

    def find(self, names: Sequence[str]) -> int:
        self._roll()
        return int(self._store.find(names))

    def get(self, name: str, parts: Sequence[memoryview]) -> bool:
        dice, is_there = self._roll(), bool(self._store.get(name, parts))
        if dice > 0.95 and parts[-1].nbytes:
            parts[-1][0] ^= 1
        return is_there

    def put(self, name: str, parts: Sequence[memoryview]) -> None:
        self._roll()
        self._store.put(name, parts)

    def close(self) -> None:
        self._store.close()


class WithStore:
    """Resolved plugins with a KV store among them. random: it is Unsteady."""

    def __init__(self, resolved: Any, folder: Path, random: Random | None = None) -> None:
        self._resolved, self._folder, self._random = resolved, folder, random

    def load(self, kind: str, name: str = "") -> Any:
        return self._make if kind == "kv_store" else self._resolved.load(kind, name)

    def _make(self, options: Any) -> Any:
        store = DiskStore({"path": str(self._folder)})
        return store if self._random is None else Unsteady(store, self._random)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._resolved, name)


def bench_with(folder: Path, variant: str, tensor_library: str, patch: pytest.MonkeyPatch) -> Bench:
    """What lies in its caches when an engine begins is NaN."""
    bench = Bench(build(folder, [variant]) / variant, tensor_library)
    initialize = bench._executor.initialize_cache

    def poisoned(*sizes: int, **named: Any) -> None:
        initialize(*sizes, **named)
        poison(bench)

    patch.setattr(bench._executor, "initialize_cache", poisoned)
    return bench


def use_store(bench: Bench, resolved: Any, timeout_s: float = 20.0) -> None:
    cache = replace(bench.config.cache, kv_store="disk", kv_store_timeout_s=timeout_s)
    bench.config, bench._resolved = replace(bench.config, cache=cache), resolved


def settings_with(random: Random, overlap: bool) -> Settings:
    return Settings(
        prefix_caching=True,
        chunked_prefill=True,
        max_num_batched_tokens=random.choice([8, 40]),
        max_num_seqs=random.choice([2, 4]),
        num_blocks=random.choice([24, 64]),
        host_blocks=random.choice([80, 300]),
        overlap=overlap,
    )


@pytest.mark.parametrize(("variant", "num_mixes"), CASES)
def test_the_next_engine_resumes_in_every_group_of_layers(
    tmp_path: Path,
    tensor_library: str,
    variant: str,
    num_mixes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = bench_with(tmp_path, variant, tensor_library, monkeypatch)
    requests, resolved = make_sessions(Random(5)), bench._resolved
    alone = answers_alone(bench, requests)
    loads, random, num_hit, num_read = count_loads(bench, monkeypatch), Random(7), 0, 0
    for mix in range(num_mixes):
        use_store(bench, WithStore(resolved, tmp_path / f"steady{mix}"))
        for is_second in (False, True):
            settings = settings_with(random, overlap=mix % 2 > 0)
            core, collector = bench.run(settings, [(random.randrange(60), r) for r in requests])
            check(collector, requests, alone)
            core.close()
            core.scheduler.kv.check()
            assert core.scheduler.kv.num_used == 0, "a block is leaked"
            assert not any(tier._leased for tier in core.scheduler.kv.tiers)
            stats = core.stats()
            assert not stats.kv_store_failures_total and stats.kv_store_written_blocks_total
            if is_second:
                num_hit += stats.host_hit_tokens_total
                num_read += stats.kv_store_read_blocks_total
    assert num_hit > 100 * num_mixes and num_read > 30 * num_mixes
    assert loads[1] > num_mixes or variant == "llama4"  # a chunk just begun needs no block


@pytest.mark.parametrize(("variant", "num_mixes"), CASES)
def test_answers_do_not_depend_on_what_a_store_does(
    tmp_path: Path,
    tensor_library: str,
    variant: str,
    num_mixes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = bench_with(tmp_path, variant, tensor_library, monkeypatch)
    requests, resolved, random = make_sessions(Random(6)), bench._resolved, Random(8)
    alone, num_failures, num_read = answers_alone(bench, requests), 0, 0
    for _ in range(2 * num_mixes):
        unsteady = WithStore(resolved, tmp_path / "unsteady", Random(random.random()))
        use_store(bench, unsteady, random.choice([0.01, 5.0]))
        settings = replace(settings_with(random, overlap=True), host_blocks=random.choice([30, 80]))
        core, collector = bench.run(settings, [(random.randrange(60), r) for r in requests])
        check(collector, requests, alone)
        core.close()
        core.scheduler.kv.check()
        assert core.scheduler.kv.num_used == 0, "a block is leaked"
        num_failures += core.stats().kv_store_failures_total
        num_read += core.stats().kv_store_read_blocks_total
    assert num_failures and num_read


@pytest.mark.parametrize("variant", ["gpt-oss", "qwen3-next"])
def test_a_prefix_that_one_group_lacks_is_computed(
    tmp_path: Path, tensor_library: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the files of the second group nothing is resumed, nor read."""
    bench = bench_with(tmp_path, variant, tensor_library, monkeypatch)
    request, resolved = make_request("it", list(range(3, 37)), max_tokens=4), bench._resolved
    alone, folder = answers_alone(bench, [request]), tmp_path / "store"
    settings = Settings(
        prefix_caching=True, chunked_prefill=True, max_num_batched_tokens=40, host_blocks=100
    )
    use_store(bench, WithStore(resolved, folder))
    cached = []
    for number in range(3):
        core, collector = bench.run(settings, [(0, request)])
        core.close()
        check(collector, [request], alone)
        cached.append(int(collector.first["it"].num_cached_tokens or 0))
        assert bool(core.stats().kv_store_read_blocks_total) == (number == 1)
        for file in [p for p in folder.rglob("*") if p.is_file()] if number == 1 else ():
            if file.read_bytes()[CHECKSUM_BYTES:].startswith(MAGIC + bytes([1])):
                file.unlink()
    assert cached == [0, 32, 0]
