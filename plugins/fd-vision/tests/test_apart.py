"""Blocks of a prompt with pictures that another engine has computed: handed over, or kept in a
store. They are found by the pictures' digests, and answers are those of one engine."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image
from test_caches import engine
from tiny import picture, prompt_of, runner_of

from fastdeploy_core.api.inputs import normalise_prompts
from fastdeploy_core.api.llm import LLM
from fastdeploy_core.types import Request, SamplingParams
from tests.null_engine import Collector

for part in ("fd_scale_out", "fd_kv_shm", "fd_kv_disk"):
    pytest.importorskip(part)

PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
TEXT = prompt_of(1, "What " * 20) + " ".join(["and so on"] * 20)
HOST = {"swap_space": 0.05}


def near(image: Image.Image) -> Image.Image:
    """The picture with one pixel changed."""
    changed = image.copy()
    changed.putpixel((100, 100), tuple(255 - c for c in image.getpixel((100, 100))))
    return changed


def asked(image: Image.Image) -> dict[str, Any]:
    return {"prompt": TEXT, "multi_modal_data": {"image": image}}


def request_of(llm: LLM, image: Image.Image) -> Request:
    (prompt,) = normalise_prompts(asked(image))
    return llm._build(prompt, PARAMS, 0, None)


def hand_over(prefill: LLM, decode: LLM, image: Image.Image) -> Collector:
    """The answer of one engine whose prompt the other one computes."""
    cores = [llm._engine._core for llm in (prefill, decode)]
    name, ticket = secrets.token_hex(16), cores[0].stats().kv_ticket
    orders = (f"prefill {name}", f"decode {name} {ticket}")
    for llm, core, order in zip((prefill, decode), cores, orders, strict=True):
        core.add(msgspec.structs.replace(request_of(llm, image), handover=order))
    collector, dropped, end_s = Collector(), Collector(), time.monotonic() + 60
    while any(core.has_work() for core in cores):
        for core, taker in zip(cores, (dropped, collector), strict=True):
            if core.has_work():
                taker.take(core.step())
        assert time.monotonic() < end_s
    return collector


def answer(collector: Collector) -> tuple[list[int], int]:
    """Tokens, and how many of the prompt came from a cache."""
    (first,) = collector.first.values()
    return collector.answers(first.request_id)[0], int(first.num_cached_tokens or 0)


def test_a_prompt_with_a_picture_is_handed_over(
    folder: Path, fd_tensor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FD_KV_SECRET", secrets.token_hex(32))
    images = [picture(230, 170, 5)]
    images.append(near(images[0]))
    with engine(folder, fd_tensor) as alone:
        wanted = [alone.generate(asked(image), PARAMS, use_tqdm=False)[0] for image in images]
    role = {**HOST, "kv_transport": "shm"}
    with (
        engine(folder, fd_tensor, splitwise_role="prefill", **role) as prefill,
        engine(folder, fd_tensor, splitwise_role="decode", **role) as decode,
    ):
        counts = [runner_of(llm).media for llm in (prefill, decode)]
        for number, (image, one) in enumerate(zip(images, wanted, strict=True), 1):
            tokens, num_cached = answer(hand_over(prefill, decode, image))
            assert tokens == one.outputs[0].token_ids
            # Of the instance that computes the prompt: the second time the text before the picture.
            place = one.prompt_token_ids.index(decode.config.model.hf_config["image_token_id"])
            assert num_cached == (place // 16 * 16 if number > 1 else 0)
            # The one pixel is another picture for both; it is encoded where its prompt is computed.
            assert [media.num_encoded for media in counts] == [number, 0]
        assert decode.get_metrics()["kv_taken_over_total"] == 2


def test_a_store_keeps_blocks_of_pictures(folder: Path, fd_tensor: str, tmp_path: Path) -> None:
    image = picture(230, 170, 5)
    settings = {**HOST, "kv_store": "disk", "kv_store_config": {"path": str(tmp_path)}}
    with engine(folder, fd_tensor, **settings) as first:
        (one,) = first.generate(asked(image), PARAMS, use_tqdm=False)
    length = len(one.prompt_token_ids)
    with engine(folder, fd_tensor, **settings) as second:
        place = one.prompt_token_ids.index(second.config.model.hf_config["image_token_id"])
        media = runner_of(second).media
        (other,) = second.generate(asked(near(image)), PARAMS, use_tqdm=False)
        assert other.num_cached_tokens == place // 16 * 16
        assert media.num_encoded == 1
        (again,) = second.generate(asked(image), PARAMS, use_tqdm=False)
        assert again.num_cached_tokens == (length - 1) // 16 * 16
        assert media.num_encoded == 1
        assert again.outputs[0].token_ids == one.outputs[0].token_ids
