"""Before a device serves, it computes pictures of the largest size: kernels are compiled then, and
the memory that they take is not given to the KV pool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_mixes import engine
from tiny import FAMILIES, picture, prompt_of, runner_of

from fastdeploy_core.api.llm import LLM
from fastdeploy_core.contracts.model import MediaPart

MOST = 2048  # tokens of a step, and vectors


@pytest.mark.parametrize("name", FAMILIES)
def test_first_steps_have_pictures_of_the_largest_size(
    name: str,
    checkpoint: Callable[[str], Path],
    fd_tensor: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the processor makes them of a picture that is larger; as many as a step encodes."""
    room = {"max_model_len": 512, "num_gpu_blocks_override": 256, "block_size": 16}
    settings: dict[str, Any] = {
        **room,
        "max_num_batched_tokens": MOST,
        "dtype": "float32",
        "device": "cpu",
    }
    with LLM(checkpoint(name), tensor_library=fd_tensor, **settings) as llm:
        engine_of: Any = llm._engine
        runner, worker = runner_of(llm), engine_of._core._executor._worker
        ids = llm.get_tokenizer().encode(prompt_of(1, place=FAMILIES[name].place))
        part = MediaPart("image", picture(2000, 2000, 1), "")
        processor: Any = llm._media
        (wanted,) = processor.prepare(ids, [part], "")[1].media
        assert not any(new.extras for new in worker._largest_steps()[0][0].new_sequences)
        with monkeypatch.context() as patch:  # a processor would compute for too long
            elsewhere = SimpleNamespace(limits=SimpleNamespace(shares_host_memory=False))
            patch.setattr(runner.media, "_device", elsewhere)
            steps, _ = worker._largest_steps()
        brought = [item for new in steps[0].new_sequences for item in new.extras.media]
        assert {(item.grid, len(item.data)) for item in brought} == {
            (wanted.grid, len(wanted.data))
        }
        num_rows = sum(item.num_rows for item in brought)
        assert 0 < num_rows <= MOST or len(brought) == 1
        runner.run_largest(steps)
        assert runner.media.num_encoded == len(brought)
        runner.free_cache()


@pytest.mark.parametrize(("name", "is_captured"), [("qwen3_vl", True), ("ernie4_5_vl", False)])
def test_steps_that_no_graph_takes_are_rehearsed(
    checkpoint: Callable[[str], Path],
    fd_tensor: str,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    is_captured: bool,
) -> None:
    """ERNIE's steps with pictures run operation by operation, where those with text are captured:
    their kernels were compiled beside requests, a few seconds in the first large batches."""
    settings: dict[str, Any] = {"tensor_library": fd_tensor, "device": "cpu", "max_num_seqs": 4}
    with engine(checkpoint(name), captures="prompts", **settings) as llm:
        runner, ran = runner_of(llm), list[object]()
        monkeypatch.setattr(runner, "run_largest", ran.extend)
        monkeypatch.setattr(runner._graphs, "rehearse", lambda caches: None)
        runner.rehearse(["a step"])
    assert ran == ([] if is_captured else ["a step"])
