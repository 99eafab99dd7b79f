"""Adapters compute what PEFT computes on transformers, in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from engines import GREEDY, RAW, SCORED, ask, engine, logits_of, lora, tokens_of
from peft_adapters import ADAPTERS, PROMPT_LENGTHS

TOLERANCE = 1e-4  # of the largest logit


@pytest.mark.parametrize(
    "base", ["llama", *(pytest.param(b, marks=pytest.mark.slow) for b in ADAPTERS if b != "llama")]
)
def test_logits_and_greedy_tokens_are_pefts(
    made: Callable[[str], Path], fd_tensor: str, base: str
) -> None:
    folder, names = made(base), list(ADAPTERS[base])
    settings = {"max_loras": 4, **RAW}
    settings["lora_experts"] = any("target_parameters" in a for a in ADAPTERS[base].values())
    with engine(folder / base, fd_tensor, **settings) as llm:
        for name in names:
            with np.load(folder / f"{name}.npz") as data:
                answers = dict(data)
            numbers = range(len(PROMPT_LENGTHS))
            prompts = [answers[f"prompt{n}"].tolist() for n in numbers]
            adapters = [lora(folder, name)] * len(prompts)
            for number, output in enumerate(ask(llm, prompts, adapters, SCORED)):
                theirs = answers[f"logits{number}"][:-1]
                ours = logits_of(output, theirs.shape[1])
                assert np.abs(ours - theirs).max() < TOLERANCE * np.abs(theirs).max()
            greedy = [answers[f"greedy{n}"].tolist() for n in numbers]
            assert tokens_of(ask(llm, prompts, adapters, GREEDY)) == greedy
