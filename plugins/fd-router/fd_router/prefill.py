"""Prefill and decode apart: a prompt is computed at one instance and answered at another.

A prefill instance is asked for one token, which nobody gets to see. The instance that answers finds
the prompt's KV blocks in a store that both share (--kv-store), and computes what it does not find.
So the answer is its own in every case, and nothing that goes wrong before changes it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import aiohttp

from .asked import Asked
from .instances import Fleet, InstanceFailed
from .metrics import RouterMetrics
from .options import PrefillOptions

logger = logging.getLogger(__name__)

PATHS = ("/v1/chat/completions", "/v1/completions")
# Of no use for a token that nobody sees; the prompt does not depend on them.
_LEFT_OUT = frozenset(
    {
        *("stream_options", "max_completion_tokens", "min_tokens", "best_of", "echo", "suffix"),
        *("logprobs", "top_logprobs", "response_format", "structured_outputs"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object"),
    }
)


class Prefill:
    """The instances that compute prompts."""

    def __init__(
        self, session: aiohttp.ClientSession, options: PrefillOptions, metrics: RouterMetrics
    ) -> None:
        self.fleet = Fleet(options.instances, options.policy)
        self._session, self._options, self._metrics = session, options, metrics

    async def compute(self, asked: Asked, headers: Mapping[str, str]) -> None:
        """Have the prompt computed, if it is long enough and there is an instance for it."""
        body = first_token(asked)
        if body is None or asked.view.prompt_tokens < self._options.min_tokens:
            return
        choice = self.fleet.choose(asked.view, set())
        if choice.instance is None:
            self._metrics.prefills.labels("", "no instance").inc()
            return
        name = choice.instance.name
        try:
            with self.fleet.call(asked.view, choice, self._options.timeout_s) as call:

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


def first_token(asked: Asked) -> bytes | None:
    """The request with one token as its whole answer; None where that would be of no use."""
    fields: dict[str, Any] = asked.fields
    has_prompt = asked.path.partition("?")[0] in PATHS and bool(fields)
    if not has_prompt or fields.get("prompt_logprobs") is not None:  # these are computed anyway
        return None
    kept = {name: value for name, value in fields.items() if name not in _LEFT_OUT}
    kept |= {"max_tokens": 1, "stream": False, "n": 1}
    text = json.dumps(kept, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass")
