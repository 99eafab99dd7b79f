"""Every family on an NVIDIA GPU in float32: vectors and tokens are transformers', and captured
decode steps after pictures, with drafts and without, say what steps without graphs say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from test_mixes import GREEDY, ask, engine, mixes, params_of
from tiny import FAMILIES, Oracle, picture, prompt_of, runner_of

from fastdeploy_core.contracts.model import MediaPart
from fastdeploy_core.types import SamplingParams

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(600),
]
CUDA: dict[str, Any] = {"device": "cuda", "tensor_library": "torch", "max_num_seqs": 8}
CAPTURED = {**CUDA, "cudagraph_capture_sizes": [1, 2, 8]}
CASES = [[], [(90, 60, 1)], [(60, 120, 2), (150, 60, 3)], [(170, 230, 5), (28, 300, 9)]]
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3}


def num_captured(llm: Any) -> int:
    return len(runner_of(llm)._graphs._decodes)


@pytest.mark.parametrize("name", FAMILIES)
def test_vectors_and_tokens_are_transformers(checkpoint: Callable[[str], Path], name: str) -> None:
    oracle, place = Oracle(checkpoint(name), name), FAMILIES[name].place
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    # transformers 5.17 sees PaddleOCR's pictures otherwise than 5.24, on a processor, too.
    is_old = name == "paddleocr_vl" and transformers.__version__ < "5.24"
    with engine(checkpoint(name), **CAPTURED) as llm:
        assert num_captured(llm) >= 3
        for cases in [] if is_old else CASES:
            images = [picture(*case) for case in cases]
            given: dict[str, Any] = {"prompt": prompt_of(len(images), place=place)}
            if images:
                given["multi_modal_data"] = {"image": images}
            wanted = oracle.greedy(given["prompt"], images, 64)
            assert ask(llm, [given], params) == [wanted], cases
        image = picture(170, 230, 5)
        ids = oracle.tokenizer(place, add_special_tokens=False)["input_ids"]
        expanded, extras = llm._media.prepare(ids, [MediaPart("image", image, "")], "")
        model, (item,), (span,) = runner_of(llm)._model, extras.media, extras.embeddings
        with model._xp.no_grad():
            rows = model._xp.to_numpy(model.encode([item]))
    places = [expanded[span.start + n] == oracle.image for n in range(span.count)]
    found, theirs = rows[places], oracle.features([image])
    assert is_old or np.abs(found - theirs).max() <= 1e-4 * np.abs(theirs).max()


@pytest.mark.parametrize("name", FAMILIES)
def test_captured_steps_say_what_others_say(checkpoint: Callable[[str], Path], name: str) -> None:
    """In one batch, greedy and at random; the second time from the caches."""
    asked, params = mixes(name, 8), params_of(8)
    with engine(checkpoint(name), device="cpu", tensor_library="torch") as llm:
        reference = ask(llm, asked, GREEDY)
    with engine(checkpoint(name), enforce_eager=True, **CUDA) as llm:
        assert ask(llm, asked, GREEDY) == reference
        wanted = ask(llm, asked, params)
    for more in ({}, {"speculative_config": DRAFTS}):
        with engine(checkpoint(name), **CAPTURED, **more) as llm:
            assert num_captured(llm) >= 3
            prompts = runner_of(llm)._graphs._prompts
            assert any(sees for _, sees in prompts) == (name != "ernie4_5_vl")
            for _ in range(2):
                assert ask(llm, asked, params) == wanted, more
