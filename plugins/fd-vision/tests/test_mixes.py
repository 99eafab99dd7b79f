"""Every family: however prompts with pictures and videos are cut, cached, preempted or batched,
their tokens are those of each prompt alone. test_caches.py has more of it for one family."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import FAMILIES, film, picture, prompt_of

from fastdeploy_core.api.llm import LLM
from fastdeploy_core.types import SamplingParams

ROOM = {"dtype": "float32", "max_model_len": 512, "num_gpu_blocks_override": 128, "block_size": 16}
ALONE = {"enable_prefix_caching": False, "max_encoder_cache": 0}
SETTINGS: dict[str, dict[str, Any]] = {
    "cut inside pictures": {"max_num_batched_tokens": 23, "max_num_seqs": 4},
    "preempted, one item a step": {
        "num_gpu_blocks_override": 12, "max_num_seqs": 8, "max_num_batched_tokens": 37,
        "max_model_len": 192, "max_encode_tokens": 1,
    },
    "from the host tier": {
        "num_gpu_blocks_override": 12, "max_num_seqs": 2, "max_model_len": 192,
        "swap_space": 0.05, "max_encoder_cache": 0,
    },
}  # fmt: skip
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def mixes(name: str, number: int) -> list[dict[str, Any]]:
    """Prompts with pictures and videos, some of them alike, in any order."""
    family, draw = FAMILIES[name], random.Random(11)
    step = family.step
    images = [picture(*case) for case in ((230, 170, 5), (90, 60, 1), (60, 120, 2), (3, 2, 4))]
    videos = [film(n, 2 * step, 2 * step, n) for n in (4, 7)]
    kinds = ["image"] if name == "paddleocr_vl" else ["image", "image", "video"]
    places = {"image": family.place, "video": family.film}
    found = []
    for _ in range(number):
        chosen = [draw.choice(kinds) for _ in range(draw.choice((0, 1, 1, 2)))]
        words = " ".join(draw.choice(("What", "is", "here")) for _ in range(draw.randrange(20)))
        prompt = prompt_of(0, words + "".join(f" {places[kind]} and" for kind in chosen))
        data: dict[str, list[Any]] = {}
        for kind in chosen:
            data.setdefault(kind, []).append(draw.choice(images if kind == "image" else videos))
        found.append({"prompt": prompt, **({"multi_modal_data": data} if data else {})})
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_each_prompt_alone(
    checkpoint: Callable[[str], Path], fd_tensor: str, name: str
) -> None:
    asked = mixes(name, 14)
    limits = {"limit_mm_per_prompt": {"video": 2}, "tensor_library": fd_tensor}
    with LLM(checkpoint(name), **limits, **ROOM, **ALONE) as llm:
        plain = [llm.generate(each, PARAMS, use_tqdm=False)[0].outputs[0] for each in asked]
        wanted = [output.token_ids for output in plain]
    for setting, more in SETTINGS.items():
        with LLM(checkpoint(name), **limits, **{**ROOM, **more}) as llm:
            for _ in range(2):  # the second time from the caches
                outputs = llm.generate(asked, PARAMS, use_tqdm=False)
                assert [o.outputs[0].token_ids for o in outputs] == wanted, setting
            metrics = llm.get_metrics()
            if setting.startswith("preempted"):
                assert metrics["preemptions_total"] > 0
            if setting.startswith("from the host"):
                assert metrics["host_hit_tokens_total"] > 0


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "ernie4_5_vl"])
def test_two_ranks_say_the_same(
    checkpoint: Callable[[str], Path], fd_tensor: str, name: str
) -> None:
    found = []
    for ranks in (1, 2):
        with LLM(
            checkpoint(name), tensor_library=fd_tensor, tensor_parallel_size=ranks,
            limit_mm_per_prompt={"video": 2}, **ROOM,
        ) as llm:  # fmt: skip
            outputs = llm.generate(mixes(name, 6), PARAMS, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]
