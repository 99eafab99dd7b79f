"""What every device must reproduce of transformers in float32: logits of prompts, greedy tokens,
chunks."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.checkpoints import NUM_GREEDY
from tests.paged import PagedModel

TOLERANCE = 1e-4  # of the largest logit


def relative_error(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Of the largest."""
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def check_prompts_and_greedy(model: PagedModel, answers: list[dict[str, Any]]) -> float:
    """All prompts in one batch of uneven lengths, then decoded together; the largest error."""
    prompts = {str(i): answer["prompt"].tolist() for i, answer in enumerate(answers)}
    logits = model.step([(f"logits{n}", p) for n, p in prompts.items()])
    errors = [relative_error(x, a["logits"]) for x, a in zip(logits, answers, strict=True)]
    assert max(errors) < TOLERANCE
    tokens = model.greedy(prompts, NUM_GREEDY)
    assert [tokens[n] for n in prompts] == [a["greedy"].tolist() for a in answers]
    return max(errors)


def check_chunks_beside_a_decode(model: PagedModel, answers: list[dict[str, Any]]) -> None:
    """The longer prompt in three pieces, while the shorter one's answer goes on."""
    short, long = answers
    prompt, greedy = long["prompt"].tolist(), short["greedy"].tolist()
    model.step([("decode", short["prompt"].tolist())])
    seen = []
    for start, stop, token in ((0, 1, greedy[0]), (1, 12, greedy[1]), (12, 23, greedy[2])):
        chunk, decoded = model.step([("chunked", prompt[start:stop]), ("decode", [token])])
        seen.append(chunk)
    assert relative_error(np.concatenate(seen), long["logits"]) < TOLERANCE
    assert int(decoded[-1].argmax()) == greedy[3]
