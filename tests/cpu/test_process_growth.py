"""No call and no request makes the process grow for ever."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_core import tensor
from fastdeploy_core.api.llm import LLM
from fastdeploy_core.types import SamplingParams, StructuredOutputsParams

NUM_CALLS = 15_000
DEMO = Path(__file__).parents[2] / "models" / "ernie-tiny"


@pytest.fixture
def xp(tensor_library: str) -> Any:
    return tensor.load(tensor_library)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def growth(call: Callable[[], object], count: int) -> float:
    """Bytes that one call costs for ever: what shows in each of several rounds, because an
    allocator grows now and then."""
    rounds = []
    for _ in range(4):
        gc.collect()
        before = resident_bytes()
        for _ in range(count):
            call()
        gc.collect()
        rounds.append((resident_bytes() - before) / count)
    return min(rounds)


@pytest.mark.parametrize("name", ["int64", "bool", "bfloat16", "list", "number"])
def test_tensors_of_host_data_are_given_back(xp: Any, name: str) -> None:
    calls: dict[str, Callable[[], object]] = {
        "int64": lambda: xp.from_numpy(np.arange(8)),
        "bool": lambda: xp.from_numpy(np.array([True, False])),
        "bfloat16": lambda: xp.from_numpy(np.ones(8, np.float32), xp.bfloat16),
        "list": lambda: xp.tensor([1.0, 2.0]),
        "number": lambda: xp.tensor(np.array([7]), device="cpu"),
    }
    # PaddlePaddle's own calls lose 64 to 112 bytes
    assert growth(calls[name], NUM_CALLS) < 25


KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "seed": 3},
    {"top_p": 0.9, "top_k": 7, "min_p": 0.05},
    {"logprobs": 2},
    {"prompt_logprobs": 1},
    {"logit_bias": {5: 1.0}},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    {"bad_words": ["x"], "min_tokens": 2},
    {"n": 2, "temperature": 0.9},
    {"structured_outputs": StructuredOutputsParams(choice=["yes", "no"])},
)


def test_no_request_makes_the_library_lose_memory(
    tensor_library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls that lose memory are known, so they are counted instead of a few bytes."""
    with LLM(
        DEMO, num_gpu_blocks_override=64, max_model_len=256, tensor_library=tensor_library
    ) as llm:

        def ask() -> None:
            for kind in KINDS:
                llm.generate("hello there", SamplingParams(max_tokens=6, **kind), use_tqdm=False)

        ask()  # the first time may make constants
        used: list[str] = []
        if tensor_library == "paddle":
            import paddle

            for module, name in (
                (paddle.utils.dlpack, "from_dlpack"),
                (paddle, "to_tensor"),
                (paddle, "tensor"),
            ):
                real = getattr(module, name)
                monkeypatch.setattr(
                    module,
                    name,
                    lambda *a, _r=real, _n=name, **k: (used.append(_n), _r(*a, **k))[1],
                )
        ask()
        assert not used
