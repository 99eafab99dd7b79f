"""Sleep and new weights with what else an engine may have: several ranks, drafts, a host tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoint import MODEL, PROMPTS, ROOM, changed, write

from fastdeploy import LLM, SamplingParams
from fastdeploy_core.errors import ConfigError

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
DRAFTER = {"method": "draft_model", "model": str(MODEL), "num_speculative_tokens": 2}
KINDS: dict[str, dict[str, Any]] = {
    "two ranks": {"tensor_parallel_size": 2},
    "n-gram drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    "a draft model": {"speculative_config": DRAFTER},
    # So few blocks that prefixes wait on the host.
    "a host tier": {"swap_space": 0.05, "num_gpu_blocks_override": 24},
}


def ask(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_answers_after_sleep_and_with_new_weights(
    kind: str, fd_tensor: str, tmp_path: Path
) -> None:
    other = write(tmp_path / "other", changed(1.3))
    with LLM(other, tensor_library=fd_tensor, **ROOM) as fresh:
        expected = ask(fresh)
    settings = {**ROOM, **KINDS[kind]}
    has_weights = settings.get("speculative_config") == DRAFTER
    with LLM(MODEL, tensor_library=fd_tensor, enable_rollout=True, **settings) as llm:
        before = ask(llm)
        for level in (1, 2):
            if level == 2 and has_weights:
                with pytest.raises(ConfigError, match="draft_model, which has weights of its own"):
                    llm.sleep(2)
                assert not llm.is_sleeping()
                assert ask(llm) == before
                continue
            llm.sleep(level)
            llm.wake_up()
            assert ask(llm) == before, level
        if has_weights:
            with pytest.raises(ConfigError, match="draft_model, which has weights of its own"):
                llm.update_weights(str(other))
            assert ask(llm) == before
        else:
            llm.update_weights(str(other))
            assert ask(llm) == expected
