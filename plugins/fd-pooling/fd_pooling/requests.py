"""Prompts to engine requests that are pooled, the same offline and in the server."""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy_core.engine.input import RequestLimits, RequestOptions, build_request
from fastdeploy_core.types import Request, SamplingParams, SequenceExtras

from .prompts import Prompter
from .settings import PoolingSettings

NO_TOKENS = SamplingParams(temperature=0.0, max_tokens=0, detokenize=False)


def pooled_requests(
    prompts: Sequence[list[int]],
    settings: PoolingSettings,
    prompter: Prompter,
    limits: RequestLimits,
    options: RequestOptions,
    param: str = "input",
) -> list[list[Request]]:
    """The requests of each prompt: one, or with STEP one for each of its steps. param: what the
    caller calls the prompts, for errors."""
    found: list[list[Request]] = []
    for ids in prompts:
        prompter.check(ids, param)
        found.append([])
        for part in prompter.steps(ids):
            request = build_request(part, NO_TOKENS, tokenizer=None, limits=limits, options=options)
            request.extras = SequenceExtras(pooling=settings.pooling_type)
            found[-1].append(request)
    return found
