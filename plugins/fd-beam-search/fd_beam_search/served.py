"""Beam search for a request of the API: `use_beam_search`, with `n` answers out of `best_of` beams.

The engine knows nothing of it. Each step is one request for one token after each running beam;
their common prefixes are in the prefix cache. What the client gets is one output with all answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from fastdeploy_core.errors import InvalidRequest
from fastdeploy_core.types import (
    FinishReason,
    Request,
    RequestOutputDelta,
    SamplingParams,
    SequenceDelta,
    SequenceExtras,
    TokenLogprobs,
)

from .params import EarlyStopping, check_mode, check_search
from .search import BeamSearch, Finished

if TYPE_CHECKING:
    from fastdeploy_core.engine.client import AsyncEngine
    from fastdeploy_core.serving.openai.schemas.common import SamplingFields

_LEAST_S = 1e-3  # of a deadline that has passed: the engine says so in its words


class BeamSampling(SamplingParams, kw_only=True, omit_defaults=True):
    """The sampling of a request that the engine never sees: `search` answers it."""

    beam_width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_int("beam_width", self.n, 2**31 - 1)
        self._check_float("length_penalty", -10.0, 10.0)
        check_search(self.length_penalty, self.early_stopping)
        unlike = {
            "structured output": self.structured_outputs is not None,
            "stop strings (use stop_token_ids)": bool(self.stop_strings),
            "logprob_token_ids": self.logprob_token_ids is not None,
            "penalties, biases, bad words, allowed tokens, min_tokens": (
                not self.is_unconstrained or bool(self.bad_words)
            ),
            "max_tokens 0": self.max_tokens == 0,
        }
        for what, is_asked in unlike.items():
            if is_asked:
                raise InvalidRequest(
                    f"beam search compares the model's own log-probabilities; {what}: not possible "
                    "with use_beam_search",
                    param="use_beam_search",
                )

    @property
    def is_greedy(self) -> bool:
        """Nothing is sampled, and yet several answers differ."""
        return False

    async def search(
        self, request: Request, engine: AsyncEngine
    ) -> AsyncGenerator[RequestOutputDelta, None]:
        """All answers to a request whose sampling this is, as its one output."""
        check_mode(engine._config.logprobs_mode)
        stop_ids = {*(() if self.ignore_eos else request.eos_token_ids)}
        found = BeamSearch[TokenLogprobs](
            self.beam_width,
            self.max_tokens or 1,
            frozenset(stop_ids | {*(self.stop_token_ids or ())}),
            self.length_penalty,
            self.early_stopping,
        )
        began_s, first = time.monotonic(), RequestOutputDelta(request_id=request.request_id)
        while not found.is_done:
            asked = [
                self._step(request, beam.token_ids, number, found.num_asked, began_s)
                for number, beam in enumerate(found.running)
            ]
            deltas = await _all_of([_answer(engine.generate(one)) for one in asked])
            if not found.running[0].token_ids:
                (first,) = deltas
            found.take([_likeliest(delta, self.logprobs) for delta in deltas])
        yield RequestOutputDelta(
            request_id=request.request_id,
            sequences=[
                self._shown(index, one, request)
                for index, one in enumerate(found.finished[: self.n])
            ],
            prompt_logprobs=first.prompt_logprobs,
            num_cached_tokens=first.num_cached_tokens,
            queue_s=first.queue_s,
            finished=True,
        )

    def _step(
        self, request: Request, after: tuple[int, ...], number: int, num_asked: int, began_s: float
    ) -> Request:
        """One token after a beam; which one does not matter, what is likely does."""
        is_first, logprobs = not after, num_asked
        if self.logprobs is not None:
            logprobs = -1 if self.logprobs == -1 else max(num_asked, self.logprobs)
        deadline_s = request.deadline_s
        if deadline_s is not None:
            deadline_s = max(_LEAST_S, deadline_s - (time.monotonic() - began_s))
        return msgspec.structs.replace(
            request,
            request_id=f"{request.request_id}-{len(after)}-{number}",
            prompt_token_ids=[*request.prompt_token_ids, *after],
            extras=_longer(request.extras, len(after)),
            sampling=SamplingParams(
                max_tokens=1,
                ignore_eos=True,
                logprobs=logprobs,
                prompt_logprobs=self.prompt_logprobs if is_first else None,
                seed=0,
                detokenize=False,
            ),
            deadline_s=deadline_s,
        )

    def _shown(self, index: int, one: Finished[TokenLogprobs], request: Request) -> SequenceDelta:
        reason = FinishReason.LENGTH if one.stop_id is None else FinishReason.STOP
        is_eos = self.ignore_eos or one.stop_id in request.eos_token_ids
        return SequenceDelta(
            index=index,
            token_ids=list(one.beam.token_ids),
            logprobs=None if self.logprobs is None else list(one.beam.said),
            finish_reason=reason,
            stop_reason=None if is_eos else one.stop_id,
        )


def sampling(body: SamplingFields, values: Mapping[str, Any]) -> BeamSampling:
    """Part `beam-sampling`: the sampling of a body with `use_beam_search`. values: what
    SamplingParams would be made of. InvalidRequest for what cannot be had with beam search."""
    if body.stream:
        raise InvalidRequest(
            "which answers are the likeliest is known at their end; use_beam_search cannot be "
            "streamed",
            param="stream",
        )
    n, best_of = body.n or 1, getattr(body, "best_of", None)
    given = {name: values[name] for name in values if name not in ("n", "seed")}
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    return BeamSampling(
        n=n,
        beam_width=best_of or n,
        length_penalty=penalty,
        early_stopping=body.early_stopping or False,
        **given,
    )


def _longer(extras: SequenceExtras | None, count: int) -> SequenceExtras | None:
    """Those of a prompt with `count` tokens of an answer behind it: of positions on three axes, all
    go on as they do in decode steps."""
    if extras is None or not extras.positions:
        return extras
    given = np.frombuffer(extras.positions, np.int32).reshape(3, -1)
    first = given.shape[1] + extras.position_offset
    more = np.broadcast_to(np.arange(first, first + count, dtype=np.int32), (3, count))
    return msgspec.structs.replace(
        extras, positions=np.concatenate((given, more), axis=1).tobytes()
    )


async def _answer(deltas: AsyncGenerator[RequestOutputDelta, None]) -> RequestOutputDelta:
    """The one output of a request for one token."""
    async with aclosing(deltas):
        async for delta in deltas:
            if delta.sequences and delta.sequences[0].logprobs:
                return delta
    raise RuntimeError("a request for one token ended without it")


async def _all_of(asked: list[Coroutine[Any, Any, RequestOutputDelta]]) -> list[RequestOutputDelta]:
    """What all give; if one fails or the caller leaves, the others end first."""
    tasks = [asyncio.create_task(one) for one in asked]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _likeliest(
    delta: RequestOutputDelta, num_shown: int | None
) -> list[tuple[int, float, TokenLogprobs]]:
    """The likeliest tokens, each with its position in an answer's log-probabilities."""
    (said,) = delta.sequences[0].logprobs or []
    ids, logprobs = said.token_ids[1:], said.logprobs[1:]  # the first one is what was sampled
    most = len(ids) if num_shown == -1 else num_shown or 0
    return [
        (token, value, TokenLogprobs([token, *ids[:most]], [value, *logprobs[:most]], rank))
        for rank, (token, value) in enumerate(zip(ids, logprobs, strict=True), 1)
    ]
