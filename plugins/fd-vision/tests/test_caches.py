"""However a prompt with pictures is cut, cached, preempted or batched, its tokens are the same; and
a picture is encoded once."""

from __future__ import annotations

import gc
import os
import random
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fd_vision.patches import PatchRule
from fd_vision.processor import KeptAnswers, digest_of
from fd_vision.sources import Source
from PIL import Image
from tiny import picture, prompt_of, runner_of

from fastdeploy_core.api import llm as api
from fastdeploy_core.api.llm import LLM
from fastdeploy_core.engine.media import MEDIA_THREADS
from fastdeploy_core.errors import InvalidRequest
from fastdeploy_core.types import SamplingParams

WIDE = (230, 170, 5)  # 48 vectors
ROOM = {"dtype": "float32", "max_model_len": 512, "num_gpu_blocks_override": 128, "block_size": 16}


def ask(llm: LLM, prompts: list[tuple[str, list[Any]]], count: int = 24, **more: Any) -> list[Any]:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    given = [
        {"prompt": text, **({"multi_modal_data": {"image": images}} if images else {}), **more}
        for text, images in prompts
    ]
    return llm.generate(given, params, use_tqdm=False)


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@contextmanager
def engine(folder: Path, library: str, **settings: Any) -> Iterator[LLM]:
    with LLM(folder, tensor_library=library, **{**ROOM, **settings}) as llm:
        yield llm


def mixes(number: int) -> list[tuple[str, list[Image.Image]]]:
    """Prompts with no picture to three, some of them alike."""
    draw = random.Random(7)
    pool = [picture(*case) for case in (WIDE, (90, 60, 1), (60, 120, 2), (3, 2, 4), (28, 300, 9))]
    found = []
    for _ in range(number):
        images = [draw.choice(pool) for _ in range(draw.choice((0, 1, 1, 2, 3)))]
        words = " ".join(
            draw.choice(("What", "is", "here", "and")) for _ in range(draw.randrange(30))
        )
        found.append((prompt_of(len(images), words or "What"), images))
    return found


@pytest.fixture(scope="module")
def plain(folder: Path, fd_tensor: str) -> list[list[int]]:
    """One prompt after the other, whole, and without a cache."""
    with engine(folder, fd_tensor, enable_prefix_caching=False, max_encoder_cache=0) as llm:
        return [tokens(ask(llm, [each]))[0] for each in mixes(24)]


SETTINGS: dict[str, dict[str, Any]] = {
    "one batch": {},
    "chunks of a block": {"max_num_batched_tokens": 16, "max_num_seqs": 4},
    "chunks inside pictures": {"max_num_batched_tokens": 23, "max_num_seqs": 4},
    "long prompts in parts of 7": {
        "max_num_partial_prefills": 3, "max_long_partial_prefills": 3,
        "long_prefill_token_threshold": 7,
    },
    "parts of 2": {
        "max_num_partial_prefills": 3, "max_long_partial_prefills": 3,
        "long_prefill_token_threshold": 2,
    },
    "parts of one token": {
        "max_num_partial_prefills": 8, "max_long_partial_prefills": 8,
        "long_prefill_token_threshold": 1, "max_num_seqs": 8,
    },
    "one picture a step": {"max_encode_tokens": 1},
    "no chunks": {"enable_chunked_prefill": False},
    "preempted": {"num_gpu_blocks_override": 18, "max_num_seqs": 8, "max_model_len": 288},
    "preempted in chunks": {
        "num_gpu_blocks_override": 18, "max_num_seqs": 8, "max_num_batched_tokens": 23,
        "max_model_len": 288
    },
    "no prefix cache": {"enable_prefix_caching": False},
    "nothing kept of pictures": {
        "max_encoder_cache": 0, "max_num_batched_tokens": 23, "max_num_seqs": 4
    },
    "no overlap": {"async_scheduling": False},
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_those_of_each_prompt_alone(
    folder: Path,
    fd_tensor: str,
    plain: list[list[int]],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(api, "MEDIA_THREADS", 1000)  # as in test_mixes.py
    with engine(folder, fd_tensor, **SETTINGS[name]) as llm:
        assert tokens(ask(llm, mixes(24))) == plain
        again = ask(llm, mixes(24))  # now from the caches
        assert tokens(again) == plain
        if name.startswith("preempted"):
            assert llm.get_metrics()["preemptions_total"] > 0
        if SETTINGS[name].get("enable_prefix_caching", True) and not name.startswith("preempted"):
            assert sum(output.num_cached_tokens or 0 for output in again) > 0


def test_a_stream_gives_the_same(folder: Path, fd_tensor: str, plain: list[list[int]]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    asked = [
        {"prompt": text, **({"multi_modal_data": {"image": images}} if images else {})}
        for text, images in mixes(6)
    ]
    streamed: dict[str, list[int]] = {}
    with engine(folder, fd_tensor) as llm:
        for piece in llm.generate(asked, params, stream=True):
            streamed.setdefault(piece.request_id, []).extend(piece.outputs[0].token_ids)
    assert sorted(streamed.values()) == sorted(plain[:6])


@pytest.mark.parametrize("budget", [16, 23, 64])
def test_a_picture_is_encoded_once_however_its_prompt_is_cut(
    folder: Path, fd_tensor: str, budget: int
) -> None:
    images = [picture(*WIDE), picture(90, 60, 1), picture(*WIDE)]  # two are the same
    settings = {"max_num_batched_tokens": budget, "max_num_seqs": 4, "max_encoder_cache": 0}
    with engine(folder, fd_tensor, **settings, enable_prefix_caching=False) as llm:
        media = runner_of(llm).media
        ask(llm, [(prompt_of(3), images)])
        first = media.num_encoded
        # Without a place for later, the second of two equal pictures may come after the first left.
        assert first <= 3 and not media._vectors and not media._used_by and not media._brought
    with engine(folder, fd_tensor, **settings | {"max_encoder_cache": 4096}) as llm:
        media = runner_of(llm).media
        ask(llm, [(prompt_of(3), images)])
        assert media.num_encoded == 2
        ask(llm, [(prompt_of(3, "Otherwise, again"), images)])  # another prefix, the same pictures
        assert media.num_encoded == 2


def test_pictures_are_prepared_while_those_before_run(folder: Path, fd_tensor: str) -> None:
    images = [picture(90, 60, seed) for seed in range(2 * MEDIA_THREADS)]
    with engine(folder, fd_tensor) as llm:
        model, prepare, encoded = runner_of(llm)._model, llm._media.prepare, threading.Event()
        encode = model.encode

        def encoding(items: list[Any]) -> Any:
            encoded.set()
            return encode(items)

        def preparing(ids: Any, parts: Any, salt: str) -> Any:
            if parts[0].value is images[-1]:
                assert encoded.wait(30)
            return prepare(ids, parts, salt)

        model.encode, llm._media.prepare = encoding, preparing
        outputs = ask(llm, [(prompt_of(1), [image]) for image in images], 4)
        assert [len(each) for each in tokens(outputs)] == [4] * len(images)


def test_a_picture_that_is_refused_ends_the_call_and_leaves_nothing(
    folder: Path, fd_tensor: str
) -> None:
    good = [(prompt_of(1), [picture(90, 60, seed)]) for seed in range(3)]
    bad = (prompt_of(1), [picture(900, 2, 1)])
    with engine(folder, fd_tensor) as llm:
        wanted = tokens(ask(llm, good))
        for place in range(4):
            with pytest.raises(InvalidRequest, match="too narrow"):
                ask(llm, [*good[:place], bad, *good[place:]])
            assert not llm._batches and not llm._engine.has_work()
            llm._engine._core.scheduler.check_idle()
        assert tokens(ask(llm, good)) == wanted


@pytest.mark.parametrize("gone", [0, 1])
def test_one_of_two_that_share_a_picture_may_leave_in_the_middle_of_it(
    folder: Path, fd_tensor: str, gone: int
) -> None:
    shared = [(prompt_of(1, words), [picture(*WIDE)]) for words in ("What", "Who is that")]
    parts = SETTINGS["long prompts in parts of 7"] | {"max_encoder_cache": 0}
    with engine(folder, fd_tensor, **parts) as llm:
        wanted = tokens(ask(llm, shared))
        llm.reset_prefix_cache()
        local, media, waiting = llm._engine, runner_of(llm).media, list[int]()
        step = local.step

        def stepping() -> Any:
            deltas = step()
            waiting.append(sum(media._used_by.values()))
            if len(waiting) == 3:
                name = list(llm._batches)[gone]
                local.abort([name])
                left = SimpleNamespace(request_id=name, finished=True, error=None, outputs=[])
                llm._batches[name].deliver(left)
            return deltas

        local.step = stepping
        outputs = ask(llm, shared)
        assert waiting[2] == 2, "both have yet to be fed some of it"
        assert not outputs[gone].outputs
        assert outputs[1 - gone].outputs[0].token_ids == wanted[1 - gone]
        assert not media._brought and not media._used_by and not media._vectors


@pytest.mark.parametrize("settings", [{}, {"enable_prefix_caching": False}])
def test_answers_of_one_request_share_its_pictures(
    folder: Path, fd_tensor: str, settings: dict[str, Any]
) -> None:
    """Four answers at random are those of four requests with their seeds, with equal
    log-probabilities."""
    text, images = prompt_of(2), [picture(*WIDE), picture(90, 60, 1)]
    given = {"prompt": text, "multi_modal_data": {"image": images}}

    def answers(number: int, seed: int) -> list[Any]:
        params = SamplingParams(
            n=number, seed=seed, temperature=1.0, max_tokens=16, logprobs=3, ignore_eos=True
        )
        (output,) = llm.generate(given, params, use_tqdm=False)
        return [
            (o.token_ids, [{k: round(v.logprob, 4) for k, v in at.items()} for at in o.logprobs])
            for o in output.outputs
        ]

    with engine(folder, fd_tensor, **settings) as llm:
        four = answers(4, 5)
        assert runner_of(llm).media.num_encoded == 2
        assert answers(4, 5) == four
        assert len({tuple(ids) for ids, _ in four}) == 4
        assert answers(1, 5)[0] == four[0]


def test_kept_vectors_stay_within_their_limit(folder: Path, fd_tensor: str) -> None:
    with engine(folder, fd_tensor, max_encoder_cache=60) as llm:
        media = runner_of(llm).media
        for seed in range(4):
            ask(llm, [(prompt_of(1), [picture(230, 170, seed)])], 1)
            assert sum(v.shape[0] for v in media._vectors.values()) <= 60
        assert media.num_encoded == 4


def test_a_step_encodes_no_more_than_its_budget_but_one_picture(
    folder: Path, fd_tensor: str
) -> None:
    seen: list[int] = []
    with engine(folder, fd_tensor, max_encode_tokens=50, max_encoder_cache=0) as llm:
        model = runner_of(llm)._model
        encode = model.encode

        def counted(items: list[Any]) -> Any:
            seen.append(sum(item.num_rows for item in items))
            return encode(items)

        model.encode = counted
        prompts = [(prompt_of(2), [picture(230, 170, s), picture(60, 60, s)]) for s in range(3)]
        ask(llm, prompts, 2)
    assert sum(seen) == 3 * (48 + 4) and max(seen) <= 50 + 2 and len(seen) > 3


def test_equal_text_with_another_picture_shares_nothing_behind_it(
    folder: Path, fd_tensor: str
) -> None:
    base = picture(*WIDE)
    near = base.copy()
    near.putpixel((100, 100), tuple(255 - c for c in base.getpixel((100, 100))))
    with engine(folder, fd_tensor) as llm:
        text = prompt_of(1, "word " * 40)
        whole = len(ask(llm, [(text, [base])], 1)[0].prompt_token_ids)
        # All but the last block of the prompt: its last token is computed again.
        same = ask(llm, [(text, [base.copy()])], 1)[0].num_cached_tokens
        other = ask(llm, [(text, [near])], 1)[0].num_cached_tokens
        before = (llm.get_tokenizer().encode(text, add_special_tokens=False)).index(
            llm.config.model.hf_config["image_token_id"]
        )
        assert same == (whole - 1) // 16 * 16 > before
        assert other == before // 16 * 16 < same
        # Nor with another salt, from the first block on.
        assert ask(llm, [(text, [base])], 1, cache_salt="tenant")[0].num_cached_tokens == 0


def test_a_prefix_hit_may_end_inside_a_picture(folder: Path, fd_tensor: str) -> None:
    """Blocks of 16 end somewhere in 48 vectors; the next prompt differs after the picture."""
    image = [picture(*WIDE)]
    first, second = prompt_of(1, "What"), prompt_of(1, "What").replace(" and ", " or ")
    with engine(folder, fd_tensor, enable_prefix_caching=False) as llm:
        wanted = tokens(ask(llm, [(second, image)]))
    with engine(folder, fd_tensor, max_encoder_cache=0) as llm:
        ask(llm, [(first, image)])
        output = ask(llm, [(second, image)])
        start = output[0].prompt_token_ids.index(llm.config.model.hf_config["image_token_id"])
        assert start < output[0].num_cached_tokens < start + 48
        assert tokens(output) == wanted


def test_near_collisions_have_digests_of_their_own() -> None:
    """1,000 and more records that differ in little: a pixel, a side, how bytes are cut into fields,
    a setting, a salt."""
    rule = PatchRule(14, 2, 3136, 50176, (0.5,) * 3, (0.5,) * 3)
    raw = np.zeros((12, 16, 3), np.uint8)
    sources = [
        Source(raw.tobytes(), (w, 192 // w)) for w in (1, 2, 3, 4, 6, 8, 12, 16, 24, 96, 192)
    ]
    for place in range(raw.size):
        changed = raw.copy()
        changed.reshape(-1)[place] = 1
        sources.append(Source(changed.tobytes(), (16, 12)))
    sources.append(Source(raw.tobytes()))
    sources += [Source(bytes(n)) for n in range(400)]
    identities = [repr(rule), repr(rule).replace("50176", "50177"), ""]
    digests = [digest_of(s, i, salt) for s in sources for i in identities for salt in ("", "a")]
    digests += [digest_of(Source(b"a"), "", ""), digest_of(Source(b""), "a", "")]
    digests += [digest_of(Source(b""), "", "aa"), digest_of(Source(b"a"), "", "a")]
    repeated = digest_of(Source(b""), "", "")  # is among them already
    assert repeated in digests
    assert len(set(digests)) == len(digests) > 1000


def test_placeholders_alone_are_not_the_content_of_a_block(folder: Path, fd_tensor: str) -> None:
    """Even where every block's hash collides, what a block holds is compared."""
    with engine(folder, fd_tensor) as llm:
        prefix = llm._engine._core.scheduler.kv.prefix
        texts = [(prompt_of(1), [picture(230, 170, seed)]) for seed in range(4)]
        honest = tokens(ask(llm, texts, 8))
        llm.reset_prefix_cache()
        prefix._hash = lambda data: b"same"
        for _ in range(2):
            assert [tokens(ask(llm, [each], 8))[0] for each in texts] == honest


@pytest.mark.slow
def test_a_thousand_pictures_leave_nothing(folder: Path, fd_tensor: str) -> None:
    """Descriptors, files in shared memory, vectors, memory of this process and those that decode:
    after 1,000 as after 300."""
    page = resource.getpagesize()

    def held() -> tuple[int, int, int]:
        pids = ["self", *Path("/proc/self/task").glob("*/children")]
        children = [word for path in pids[1:] for word in path.read_text().split()]
        memory = sum(
            int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in ["self", *children]
        )
        gc.collect()
        shared = len(list(Path("/dev/shm").glob(f"*{os.getpid()}*")))
        return len(list(Path("/proc/self/fd").iterdir())), shared, memory * page

    with engine(folder, fd_tensor, max_encoder_cache=600) as llm:
        media, before = runner_of(llm).media, (0, 0, 0)
        llm._media._kept = KeptAnswers(2**23)  # full of the first 100; by default of 1,200 such
        for seed in range(1000):
            ask(llm, [(prompt_of(1), [picture(230, 170, seed)])], 2)
            if seed == 299:
                before = held()
        after = held()
        assert sum(v.shape[0] for v in media._vectors.values()) <= 600
        assert media.num_encoded == 1000 and not media._brought and not media._used_by
    assert after[:2] == before[:2]
    assert after[2] - before[2] < 50 * 2**20
