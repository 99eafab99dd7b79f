"""Every family: however prompts with pictures and videos are cut, cached, preempted, captured or
batched, their tokens are those of each prompt alone. test_caches.py has more of it for one
family."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tiny import FAMILIES, film, picture, prompt_of, runner_of

from fastdeploy_core.api import llm as api
from fastdeploy_core.api.llm import LLM
from fastdeploy_core.types import SamplingParams
from fastdeploy_core.worker import graph_sizes
from fastdeploy_testing.capturing import OnCapturingDevice, WithPrompts

ROOM = {
    "dtype": "float32", "max_model_len": 512, "num_gpu_blocks_override": 128, "block_size": 16,
    "limit_mm_per_prompt": {"video": 2},
}  # fmt: skip
ALONE = {"enable_prefix_caching": False, "max_encoder_cache": 0}
SMALL = {"num_gpu_blocks_override": 12, "max_model_len": 192}
SETTINGS: dict[str, dict[str, Any]] = {
    "cut inside pictures": {"max_num_batched_tokens": 23, "max_num_seqs": 4},
    "preempted, one item a step": {
        **SMALL, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_encode_tokens": 1,
    },
    "from the host tier": {**SMALL, "max_num_seqs": 2, "swap_space": 0.05, "max_encoder_cache": 0},
}  # fmt: skip
PROMPT_SIZES = (16, 48)  # tokens of captured prompts
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


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


def params_of(number: int) -> list[SamplingParams]:
    """Greedy and, every third, at random with a seed of its own."""
    return [
        SamplingParams(temperature=1.0, seed=n, max_tokens=24, ignore_eos=True) if n % 3 else GREEDY
        for n in range(number)
    ]


@contextmanager
def engine(folder: Path, *, captures: str = "", **settings: Any) -> Iterator[LLM]:
    """captures: on the reference device with captured "decodes", or "prompts", too; it has to be
    `device`."""
    with pytest.MonkeyPatch.context() as patch:
        # Whose turn it is to be given is waited for: else how many sequences run side by side, and
        # so what is preempted, would depend on how soon threads have prepared their pictures.
        patch.setattr(api, "MEDIA_THREADS", 1000)
        if captures:
            device = {"decodes": OnCapturingDevice, "prompts": WithPrompts}[captures]
            resolve = api.resolve_plugins
            patch.setattr(api, "resolve_plugins", lambda config: device(resolve(config)))
            patch.setattr(graph_sizes, "prompt_ladder", lambda most: PROMPT_SIZES)
        with LLM(folder, **{**ROOM, **settings}) as llm:
            yield llm


def ask(llm: LLM, asked: list[Any], params: Any) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(asked, params, use_tqdm=False)]


def num_replays(llm: LLM) -> int:
    return sum(work.num_replays for work in getattr(runner_of(llm)._device, "recorded", ()))


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_each_prompt_alone(
    checkpoint: Callable[[str], Path], fd_tensor: str, name: str
) -> None:
    asked = mixes(name, 14)
    with engine(checkpoint(name), tensor_library=fd_tensor, **ALONE) as llm:
        wanted = [ask(llm, [each], GREEDY)[0] for each in asked]
    for setting, more in SETTINGS.items():
        with engine(checkpoint(name), tensor_library=fd_tensor, **more) as llm:
            for _ in range(2):  # the second time from the caches
                assert ask(llm, asked, GREEDY) == wanted, setting
            metrics = llm.get_metrics()
            if setting.startswith("preempted"):
                assert metrics["preemptions_total"] > 0
            if setting.startswith("from the host"):
                assert metrics["host_hit_tokens_total"] > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_captured_decode_steps_say_the_same(
    checkpoint: Callable[[str], Path], fd_tensor: str, name: str
) -> None:
    """At the positions after pictures, and with the seeds of the tokens' indices."""
    asked, params = mixes(name, 9), params_of(9)
    device = {"tensor_library": fd_tensor, "device": "cpu"}
    with engine(checkpoint(name), **device) as llm:
        wanted = ask(llm, asked, params)
    with engine(checkpoint(name), captures="decodes", max_num_seqs=4, **device) as llm:
        for _ in range(2):
            assert ask(llm, asked, params) == wanted
        assert num_replays(llm) > 40


@pytest.mark.slow
def test_captured_decodes_far_behind_pictures_say_the_same(folder: Path, fd_tensor: str) -> None:
    """500 of them; and what comes next is what the whole text says as one prompt."""
    given = {"prompt": prompt_of(1), "multi_modal_data": {"image": picture(230, 170, 5)}}
    device = {"tensor_library": fd_tensor, "device": "cpu", "max_model_len": 1024}
    params = SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True)
    with engine(folder, captures="decodes", enable_prefix_caching=False, **device) as llm:
        (output,) = llm.generate(given, params, use_tqdm=False)
        assert num_replays(llm) >= 400
        place = llm.config.model.hf_config["image_token_id"]
        said = output.outputs[0].token_ids
        one = [t for n, t in enumerate(output.prompt_token_ids)
               if t != place or output.prompt_token_ids[n - 1] != place]  # fmt: skip
        for count in (100, 499):
            whole = {**given, "prompt_token_ids": [*one, *said[:count]]}
            del whole["prompt"]
            assert ask(llm, [whole], SamplingParams(temperature=0.0, max_tokens=1)) == [
                [said[count]]
            ]


@pytest.mark.parametrize(
    "name",
    ["qwen3_vl", *(pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES if n != "qwen3_vl")],
)
def test_captured_prompts_say_the_same(
    checkpoint: Callable[[str], Path], fd_tensor: str, name: str
) -> None:
    """Chunks of pictures and of text, of several prompts in a step and beside decodes."""
    asked, params = mixes(name, 9), params_of(9)
    device = {"tensor_library": fd_tensor, "device": "cpu", "max_num_seqs": 4}
    with engine(checkpoint(name), **device) as llm:
        wanted = ask(llm, asked, params)
    replays: Counter[tuple[int, bool]] = Counter()  # by size, and with pictures
    for tokens in (23, 48):
        more = {"captures": "prompts", "max_num_batched_tokens": tokens, **device}
        with engine(checkpoint(name), **more) as llm:
            for _ in range(2):
                assert ask(llm, asked, params) == wanted
            for kind, prompt in runner_of(llm)._graphs._prompts.items():
                replays[kind] += prompt._forward.num_replays
    # ERNIE divides the tokens of a step with pictures on the host.
    sees = (False,) if name == "ernie4_5_vl" else (False, True)
    assert {kind for kind, count in replays.items() if count} == {
        (size, seen) for size in PROMPT_SIZES for seen in sees
    }


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "ernie4_5_vl"])
def test_two_ranks_say_the_same(
    checkpoint: Callable[[str], Path], fd_tensor: str, name: str
) -> None:
    found = []
    for ranks in (1, 2):
        more = {"tensor_library": fd_tensor, "tensor_parallel_size": ranks}
        with engine(checkpoint(name), **more) as llm:
            found.append(ask(llm, mixes(name, 6), GREEDY))
    assert found[0] == found[1]
