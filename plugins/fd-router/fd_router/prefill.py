"""Prefill and decode apart: a prompt is computed at one instance and answered at another.

Instances whose role is prefill (--splitwise-role) hand the prompt's KV blocks and its first token
to the instance that answers, which gets the request at the same time. Those of --prefill leave the
blocks in a store that both share (--kv-store), and are asked for one token, which nobody gets to
see, before. What does not come is computed by the instance that answers: the answer is its own in
every case, and nothing that goes wrong before changes it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
from multidict import CIMultiDict

from .asked import Asked
from .instances import PREFILL, Fleet, InstanceFailed
from .metrics import RouterMetrics
from .options import PrefillOptions
from .policies import Choice

logger = logging.getLogger(__name__)

HANDOVER_HEADER: Final = "X-KV-Handover"
PATHS = ("/v1/chat/completions", "/v1/completions")
# Of no use for a token that nobody sees; the prompt does not depend on them.
_LEFT_OUT = frozenset(
    {
        *("stream_options", "max_completion_tokens", "min_tokens", "best_of", "echo", "suffix"),
        *("logprobs", "top_logprobs", "response_format", "structured_outputs"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object"),
    }
)


@dataclass(frozen=True, slots=True)
class Handover:
    """A prompt that is perhaps being computed for the instance that answers."""

    headers: CIMultiDict[str]  # for that instance
    task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """It is asked before the instance that answers: the first token waits for it alone."""
        if self.task is not None:
            await asyncio.sleep(0)

    def end(self) -> None:
        """Nobody wants the prompt any more."""
        if self.task is not None:
            self.task.cancel()


class Prefill:
    """Has prompts computed. `fleet`: the instances of --prefill."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        options: PrefillOptions,
        metrics: RouterMetrics,
        answering: Fleet,
    ) -> None:
        self.fleet, self._answering = Fleet(options.instances, options.policy), answering
        self._session, self._options, self._metrics = session, options, metrics
        self._tasks: set[asyncio.Task[None]] = set()
        self.mixed_share = 0.0  # of prompts that are not handed over (roles/controller.py)

    async def compute(self, asked: Asked, headers: Mapping[str, str]) -> None:
        """Have the prompt computed, if it is long enough and there is an instance for it."""
        is_long = asked.view.prompt_tokens >= self._options.min_tokens
        if not self.fleet.instances or not is_long or not has_prompt(asked):
            return
        choice = self.fleet.choose(asked.view, set())
        if choice.instance is None:
            self._metrics.prefills.labels("", "no instance").inc()
        else:
            await self._send(self.fleet, choice, asked, first_token(asked), headers)

    @contextmanager
    def hand_over(self, asked: Asked, to: Choice, headers: CIMultiDict[str]) -> Iterator[Handover]:
        """While the chosen instance answers, another one computes the prompt for it, where there
        is one and the prompt is worth it."""
        choice = self._partner(asked, to)
        if choice is None or choice.instance is None:
            yield Handover(headers)
            return
        name, ticket = secrets.token_hex(16), self._answering.instances[choice.instance.name].ticket
        prefill, decode = headers.copy(), headers.copy()
        prefill[HANDOVER_HEADER] = f"prefill {name}"
        decode[HANDOVER_HEADER] = f"decode {name} {ticket}"
        sending = self._send(self._answering, choice, asked, asked.body, prefill)
        task = asyncio.create_task(sending)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        handover = Handover(decode, task)
        try:
            yield handover
        except BaseException:
            handover.end()
            raise

    def _partner(self, asked: Asked, to: Choice) -> Choice | None:
        """Who computes the prompt; None: whoever answers it."""
        prompt = asked.fields.get("prompt")
        is_one = (
            asked.fields.get("messages") is not None or isinstance(prompt, str) or asked.token_ids
        )
        if to.instance is None or not is_one or not has_prompt(asked):
            return None
        own = self._answering.instances[to.instance.name]
        num_new = asked.view.prompt_tokens - to.cached_tokens
        if not own.ticket or own.role == PREFILL or num_new < self._options.min_tokens:
            return None
        if random.random() < self.mixed_share:  # noqa: S311, for balance
            return None
        return self._answering.choose_prefill(asked.view)

    async def _send(
        self, fleet: Fleet, choice: Choice, asked: Asked, body: bytes, headers: Mapping[str, str]
    ) -> None:
        if choice.instance is None:
            return
        name = choice.instance.name
        try:
            with fleet.call(asked.view, choice, self._options.timeout_s) as call:

                async def send() -> int:
                    url = call.instance.url + asked.path
                    async with self._session.post(
                        url, data=body, headers=headers, allow_redirects=False
                    ) as answer:
                        await answer.read()
                        return answer.status

                try:
                    status = await call.bounded(send)
                except (aiohttp.ClientError, OSError, ValueError) as error:
                    raise InstanceFailed(f"gives no answer: {type(error).__name__}") from None
        except InstanceFailed as error:
            logger.warning("prefill instance %s %s; the prompt is computed elsewhere", name, error)
            self._metrics.prefills.labels(name, "failed").inc()
        else:
            self._metrics.prefills.labels(name, str(status)).inc()


def has_prompt(asked: Asked) -> bool:
    """Whether it is of use to have the prompt computed: its log-probabilities are anyway."""
    is_answered = asked.path.partition("?")[0] in PATHS and bool(asked.fields)
    return is_answered and asked.fields.get("prompt_logprobs") is None


def first_token(asked: Asked) -> bytes:
    """The request with one token as its whole answer."""
    kept: dict[str, Any] = {n: value for n, value in asked.fields.items() if n not in _LEFT_OUT}
    kept |= {"max_tokens": 1, "stream": False, "n": 1}
    text = json.dumps(kept, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass")
