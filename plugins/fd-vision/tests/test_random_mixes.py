"""Every family in engines as operators may configure them: 200 random mixes of prompts in session
`slow` of nox, a few elsewhere."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_mixes import ALONE, SMALL, ask, engine, mixes, num_replays, params_of
from tiny import FAMILIES


def settings_of(draw: random.Random) -> dict[str, Any]:
    """An engine as an operator may configure one."""
    found: dict[str, Any] = {
        "max_num_seqs": draw.choice((1, 2, 5, 8)),
        "max_num_batched_tokens": draw.choice((16, 23, 37, 64, 512)),
        "max_encode_tokens": draw.choice((1, 20, 64)),
        "max_encoder_cache": draw.choice((0, 60, 1000)),
        "enable_prefix_caching": draw.random() < 0.7,
        "async_scheduling": draw.random() < 0.7,
        "captures": draw.choice(("", "decodes", "prompts")),
    }
    if draw.random() < 0.3:
        drafts = draw.randrange(1, 5)
        found["speculative_config"] = {"method": "ngram", "num_speculative_tokens": drafts}
    if draw.random() < 0.6:
        found |= SMALL
    if found["enable_prefix_caching"] and draw.random() < 0.5:
        found["swap_space"] = 0.05
    longest = found.get("max_model_len", 512) * found["max_num_seqs"]
    found["max_num_batched_tokens"] = min(found["max_num_batched_tokens"], longest)
    return found


@pytest.mark.parametrize(
    ("num_engines", "num_mixes", "num_prompts"),
    [(1, 2, 8), pytest.param(40, 5, 24, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_random_mixes_in_random_engines(
    checkpoint: Callable[[str], Path],
    fd_tensor: str,
    name: str,
    num_engines: int,
    num_mixes: int,
    num_prompts: int,
) -> None:
    asked, params = mixes(name, num_prompts), params_of(num_prompts)
    device = {"tensor_library": fd_tensor, "device": "cpu"}
    with engine(checkpoint(name), **device, **ALONE) as llm:
        wanted = [ask(llm, [a], p)[0] for a, p in zip(asked, params, strict=True)]
    preemptions = hits = replays = 0
    for seed in range(num_engines):
        draw = random.Random(f"{name} {seed}")
        settings = settings_of(draw)
        with engine(checkpoint(name), **device, **settings) as llm:
            for _ in range(num_mixes):
                chosen = [draw.randrange(num_prompts) for _ in range(draw.randrange(3, 9))]
                said = ask(llm, [asked[n] for n in chosen], [params[n] for n in chosen])
                assert said == [wanted[n] for n in chosen], (seed, settings, chosen)
            metrics = llm.get_metrics()
            preemptions += metrics["preemptions_total"]
            hits += metrics["host_hit_tokens_total"]
            replays += num_replays(llm)
    if num_engines > 10:
        assert preemptions > 10 and hits > 100 and replays > 1000
