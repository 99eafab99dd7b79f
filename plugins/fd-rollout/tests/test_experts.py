"""The experts of each token, told and taken again: an engine whose router would choose otherwise
computes what the first one did."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint import MODEL, PROMPTS, ROOM, tensors, write
from fd_rollout.experts import decode, encode

from fastdeploy import LLM, SamplingParams
from fastdeploy_core.errors import ConfigError, InvalidRequest

SHAPE = (7, 2, 8)  # layers with experts, experts of a token, experts: of the demo model
BIAS = "e_score_correction_bias"
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
SCORED = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
# A prompt's token and the same one decoded are summed in different orders: 1.2e-5 on a GPU.
CLOSE = 5e-5
ROUTES = {"enable_return_routed_experts": True, "enforce_eager": True}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with another correction bias, which changes what is chosen and no weight."""
    draw, changed = np.random.default_rng(3), tensors()
    for name, tensor in changed.items():
        if BIAS in name:
            noise = draw.standard_normal(tuple(tensor.shape)).astype(np.float32)
            changed[name] = tensor + 0.3 * tensor.new_tensor(noise)
    return write(tmp_path_factory.mktemp("models") / "biased", changed)


@pytest.fixture(scope="module")
def first(fd_tensor: str) -> Iterator[LLM]:
    with LLM(MODEL, tensor_library=fd_tensor, **ROOM, **ROUTES) as llm:
        yield llm


def _routes(output: Any) -> np.ndarray:
    return decode(output.outputs[0].pooled.decode(), *SHAPE)


def _told(output: Any) -> list[float]:
    """Log-probabilities of a scored prompt's tokens, the first one left out."""
    pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return [position[token].logprob for token, position in pairs]


def test_a_router_that_would_flip_follows(first: LLM, other: Path, fd_tensor: str) -> None:
    made = first.generate(PROMPTS, GREEDY, use_tqdm=False)
    whole = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in made]
    routes = [_routes(o) for o in made]
    for ids, own in zip(whole, routes, strict=True):
        start = len(ids) - GREEDY.max_tokens - 1
        assert own.shape == (len(ids) - 1, *SHAPE[:2]) and own.max() < SHAPE[2]
        assert own[:, :-1].min() >= 0 and own[start:].min() >= 0  # see experts.py
        assert (own[:, :-1, 0] != own[:, :-1, 1]).all()
    given = [
        {"prompt_token_ids": ids, "routed_experts": encode(own)}
        for ids, own in zip(whole, routes, strict=True)
    ]
    with LLM(other, tensor_library=fd_tensor, **ROOM, **ROUTES) as llm:
        free = llm.generate(whole, SCORED, use_tqdm=False)
        followed = llm.generate(given, SCORED, use_tqdm=False)
        again = llm.generate(whole, SCORED, use_tqdm=False)  # cached blocks are not mixed
    for number, own in enumerate(routes):
        assert (_routes(free[number])[: len(own)] != own).mean() > 0.05
        seen = own >= 0
        assert (_routes(followed[number])[: len(own)][seen] == own[seen]).all()
        start = len(made[number].prompt_token_ids) - 1
        wanted = [
            position[token].logprob
            for position, token in zip(
                made[number].outputs[0].logprobs, made[number].outputs[0].token_ids, strict=True
            )
        ]
        assert _told(followed[number])[start:] == pytest.approx(wanted, abs=CLOSE)
        assert _told(free[number])[start:] != pytest.approx(wanted, abs=1e-2)
        assert _told(again[number]) == pytest.approx(_told(free[number]), abs=CLOSE)


def test_routes_of_cached_prefixes_and_of_several_answers(first: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=9, ignore_eos=True)
    prompt = PROMPTS[0]
    (plain,) = first.generate([prompt], GREEDY, use_tqdm=False)
    (output,) = first.generate([prompt], params, use_tqdm=False)
    assert output.num_cached_tokens
    for answer in output.outputs:
        routes = decode(answer.pooled.decode(), *SHAPE)
        assert routes.shape[0] == len(prompt) + 8 and routes[:, :-1].min() >= 0
        before = _routes(plain)[: len(prompt), :-1]
        assert (routes[: len(prompt), :-1] == before).all()


def test_some_tokens_are_left_to_the_router(first: LLM) -> None:
    (made,) = first.generate([PROMPTS[1]], GREEDY, use_tqdm=False)
    own = _routes(made)[: len(PROMPTS[1])].copy()
    own[3:9] = -1
    wanted = own.copy()
    wanted[0, :] = (7, 0)
    asked = {"prompt_token_ids": PROMPTS[1], "routed_experts": encode(wanted)}
    (output,) = first.generate([asked], SCORED, use_tqdm=False)
    told = _routes(output)
    kept = (wanted >= 0).all((1, 2))
    assert (told[kept] == wanted[kept]).all() and told.min() >= 0  # a scored prompt has all


@pytest.mark.parametrize(
    ("text", "words"),
    [("%%", "base64"), ("AAAA", "3 bytes"), (encode(np.full((2, 7, 2), 8)), "experts 0 to 7")],
)
def test_routes_that_are_none(first: LLM, text: str, words: str) -> None:
    asked = {"prompt_token_ids": PROMPTS[0], "routed_experts": text}
    with pytest.raises(InvalidRequest, match=words):
        first.generate([asked], GREEDY, use_tqdm=False)
    assert first.generate([PROMPTS[0]], GREEDY, use_tqdm=False)[0].error is None


def test_where_it_cannot_be(fd_tensor: str) -> None:
    with LLM(MODEL, tensor_library=fd_tensor, **ROOM) as llm:
        asked = {"prompt_token_ids": PROMPTS[0], "routed_experts": "AAAA"}
        with pytest.raises(InvalidRequest, match="routed_experts"):
            llm.generate([asked], GREEDY, use_tqdm=False)
    with pytest.raises(ConfigError, match="--swap-space"):
        LLM(MODEL, tensor_library=fd_tensor, swap_space=1, **ROOM, **ROUTES)
