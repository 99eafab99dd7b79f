"""Two ranks of fd-cpu on one host: processes with threads of their own that meet in shared
memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastdeploy import LLM, SamplingParams

pytest.importorskip("fd_cpu._native", reason="fd-cpu is not installed")
DEMO = Path(__file__).resolve().parents[2] / "models" / "ernie-tiny"
PROMPTS = ["The capital of China is", "12 + 30 =", "Reverse: hello"]


def answers(library: str, cache: Path | None = None, **options: Any) -> list[list[int]]:
    if cache is not None:
        options["weight_cache"] = str(cache)
    llm = LLM(
        str(DEMO),
        device="x86",
        tensor_library=library,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        num_gpu_blocks_override=32,
        **options,
    )
    with llm:
        done = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=24), use_tqdm=False)
    return [output.outputs[0].token_ids for output in done]


def test_two_ranks_answer_as_one_does_and_keep_weights_of_their_own(
    tensor_library: str, tmp_path: Path
) -> None:
    alone = answers(tensor_library)
    for _ in range(2):  # the second start has the weights of the first
        assert answers(tensor_library, tmp_path, tensor_parallel_size=2) == alone
    names = [file.name for file in tmp_path.iterdir()]
    assert sorted(name.rsplit("-", 1)[1] for name in names) == ["0.packed", "1.packed"]
