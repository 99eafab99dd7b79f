"""Engines on vendor devices, in the test's own process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastdeploy_core.config.arguments import build_engine_config
from fastdeploy_core.engine.client import LocalEngine
from fastdeploy_core.models.shapes import read_shapes
from fastdeploy_core.plugins.resolve import resolve
from tests.null_engine import Collector, make_request

BLOCK_SIZES = {"iluvatar": 16, "gaudi": 128}


@contextmanager
def engine(model: Path, device: str, **options: Any) -> Iterator[LocalEngine]:
    """A LocalEngine in float32; `options` are engine arguments."""
    config = build_engine_config(
        {
            "model": str(model),
            "device": device,
            "dtype": "float32",
            "max_model_len": 128,
            "block_size": BLOCK_SIZES.get(device, 64),
            "max_num_seqs": 4,
            "max_num_batched_tokens": 128,
            "num_gpu_blocks_override": 24,
            "num_threads": 1,
            **options,
        }
    )
    shapes = read_shapes(config.model.hf_config, 1)
    resolved = resolve(
        config, layers=shapes.layers, moe=[shapes.moe] if shapes.moe is not None else []
    )
    running = LocalEngine(config, resolved)
    try:
        yield running
    finally:
        running.close()


def greedy(running: LocalEngine, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Tokens after each prompt, all at once."""
    collector = Collector()
    for number, prompt in enumerate(prompts):
        running.add(make_request(str(number), prompt, max_tokens=num_tokens))
    while running.has_work():
        collector.take(running.step())
    assert not collector.errors, collector.errors
    return [collector.answers(str(n))[0] for n in range(len(prompts))]
