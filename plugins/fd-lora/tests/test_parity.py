"""Adapters compute what PEFT computes on transformers, in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engines import GREEDY, RAW, ask, check_logits, engine, lora, tokens_of
from peft_adapters import ADAPTERS


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
            prompts, greedy = check_logits(llm, folder, name)
            adapters = [lora(folder, name)] * len(prompts)
            assert tokens_of(ask(llm, prompts, adapters, GREEDY)) == greedy
