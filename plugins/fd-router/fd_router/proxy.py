"""Passes requests to instances and answers back.

A request that has shown its client nothing is tried at another instance. A stream that has shown
something is carried on where that is exact (migration.py), else it ends with an error event: never
without one, and never with a text twice.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from .asked import BYTES_PER_TOKEN, Asked, as_ids
from .cached.cached_blocks import token_keys
from .events import DONE, Events, frame
from .instances import Call, Fleet, InstanceFailed
from .metrics import RouterMetrics
from .migration import COMPLETIONS, Transcript
from .options import RouterOptions
from .prefill import Prefill

logger = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 256 * 2**20  # of an answer that is no stream
CLIENT_STALL_S = 15.0
TOKENIZE_S = 0.5  # for the tokens of a prompt; without them what was sent where counts
RETRY_AFTER = {"Retry-After": "1"}
# "Not here, not now", or the engine died of it: another instance may answer.
_ELSEWHERE = (429, 500, 502, 503)
# Of one connection, not of the request (RFC 9110, 7.6.1), or set by whoever sends.
_DROPPED = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
        *("proxy-connection", "transfer-encoding", "upgrade", "host", "content-length", "expect"),
        *("accept-encoding", "date", "server", "x-session-id", "x-kv-handover"),
    }
)


@dataclass(frozen=True, slots=True)
class Shown:
    """A stream that has begun to reach its client."""

    response: web.StreamResponse
    transcript: Transcript | None  # None: it cannot be carried on elsewhere


class Proxy:
    """Forwards requests."""

    def __init__(
        self,
        fleet: Fleet,
        session: aiohttp.ClientSession,
        options: RouterOptions,
        metrics: RouterMetrics,
        prefill: Prefill,
    ) -> None:
        self._prefill = prefill
        self._fleet = fleet
        self._session = session
        self._options = options
        self._metrics = metrics

    async def forward(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        """The answer of an instance, or an error."""
        headers = self._request_headers(request)
        asked = await self._with_tokens(asked, headers)
        await self._prefill.compute(asked, headers)
        excluded: set[str] = set()
        refusal: web.Response | None = None  # the last instance's own
        reason = ""
        while len(excluded) <= self._options.max_retries:
            choice = self._fleet.choose(asked.view, excluded)
            if choice.instance is None:
                reason = reason or choice.reason
                break
            name = choice.instance.name
            if excluded:
                self._metrics.retries.labels(name).inc()
            shown: list[Shown] = []
            try:
                timeout_s = self._options.timing.answer_timeout_s
                with (
                    self._prefill.hand_over(asked, choice, headers) as handover,
                    self._fleet.call(asked.view, choice, timeout_s) as call,
                ):
                    await handover.begin()
                    answer = await self._ask(request, asked, handover.headers, call, shown)
                    if answer.status != HTTPStatus.OK:
                        handover.end()
            except InstanceFailed as error:
                self._metrics.failures.labels(name).inc()
                logger.warning("instance %s %s", name, error)
                if shown:
                    await self._carry_on(shown[0], headers, {name}, f"instance {name} {error}")
                    return shown[0].response
                reason = f"instance {name} {error}"
                excluded.add(name)
                continue
            self._metrics.requests.labels(name, str(answer.status)).inc()
            if answer.status not in _ELSEWHERE or shown or not isinstance(answer, web.Response):
                return answer
            refusal = answer
            excluded.add(name)
        if refusal is not None:
            return refusal
        self._metrics.refused.inc()
        return error_response(503, f"no instance can answer now: {reason}", RETRY_AFTER)

    async def _with_tokens(self, asked: Asked, headers: Mapping[str, str]) -> Asked:
        """Where engines say what they have cached: the prompt's tokens, to compare with that."""
        events = self._fleet.events
        if not events.is_used or not asked.view.prompt_tokens:
            return asked
        tokens = asked.token_ids
        if not tokens and (body := asked.to_tokenize()):
            try:
                tokens = await self._tokenize(body, headers)
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError, TypeError):
                logger.debug("no tokens for a prompt", exc_info=True)
        if not tokens:
            return asked
        scopes = asked.scopes(headers.get("Authorization", ""))
        chains = tuple(token_keys(tokens, events.block_size, scope) for scope in scopes)
        count = len(tokens) // BYTES_PER_TOKEN
        return replace(asked, view=replace(asked.view, prompt_tokens=count, token_keys=chains))

    async def _tokenize(self, body: bytes, headers: Mapping[str, str]) -> bytes:
        """A prompt's tokens, by the instance with the fewest requests; empty: none can tell."""
        ready = [one for one in self._fleet.instances.values() if one.ready and not one.draining]
        if not ready:
            return b""
        url = min(ready, key=lambda one: len(one.calls)).url + "/tokenize"
        sent = {name: value for name, value in headers.items() if name != "Content-Type"}
        sent["Content-Type"] = "application/json"
        async with (
            asyncio.timeout(TOKENIZE_S),
            self._session.post(url, data=body, headers=sent, allow_redirects=False) as answer,
        ):
            return as_ids((await answer.json())["tokens"]) if answer.status == 200 else b""

    async def _ask(
        self,
        request: web.Request,
        asked: Asked,
        headers: CIMultiDict[str],
        call: Call,
        shown: list[Shown],
    ) -> web.StreamResponse:
        """One instance's answer. What is put into `shown` has begun to reach the client."""
        transcript = Transcript.of(asked)
        body = asked.body if transcript is None else transcript.body(asked.body)
        answer = await self._open(call, request.method, asked.path, headers, body)
        try:
            if answer.status == 200 and answer.content_type == "text/event-stream":
                if not asked.streams:
                    raise InstanceFailed("sent events where one answer was asked for")
                return await self._stream(request, call, answer, transcript, shown)
            data = await _read_all(call, answer)
            return web.Response(
                status=answer.status, headers=_end_to_end(answer.headers), body=data
            )
        finally:
            answer.close()  # without effect on a connection whose answer was read to its end

    async def _open(
        self, call: Call, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> aiohttp.ClientResponse:
        """Sends a request; the answer's status and headers have come."""

        async def send() -> aiohttp.ClientResponse:
            return await self._session.request(
                method,
                call.instance.url + path,
                data=body or None,
                headers=headers,
                allow_redirects=False,
            )

        try:
            return await call.bounded(send)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise InstanceFailed(f"gives no answer: {type(error).__name__}") from None

    async def _stream(
        self,
        request: web.Request,
        call: Call,
        answer: aiohttp.ClientResponse,
        transcript: Transcript | None,
        shown: list[Shown],
    ) -> web.StreamResponse:
        events = Events(call, answer)
        data = await events.next()
        if transcript is not None:
            while not (shows := transcript.take(data)) and not events.done:
                data = await events.next()
            data = shows
        response = web.StreamResponse(headers=_end_to_end(answer.headers))
        await response.prepare(request)
        shown.append(Shown(response, transcript))
        while data or not events.done:
            # Nothing comes between taking events down and sending them, so what a transcript has
            # is what the client gets.
            if data:
                await _write(response, data)
            data = await events.next()
            if transcript is not None and data:
                data = transcript.take(data)
        if transcript is not None:
            await _write(response, DONE)
        return response

    async def _carry_on(
        self, shown: Shown, headers: CIMultiDict[str], excluded: set[str], reason: str
    ) -> None:
        """Sends the rest of a stream from other instances, or the error that ends it."""
        response, transcript = shown.response, shown.transcript
        if transcript is None:
            await _end_with_error(response, f"the answer broke off: {reason}")
            return
        while transcript.movable and len(excluded) <= self._options.max_retries:
            if transcript.ended:
                await _write(response, transcript.end() + DONE)
                return
            choice = self._fleet.choose(transcript.view(), excluded)
            if choice.instance is None:
                reason = choice.reason
                break
            name = choice.instance.name
            excluded.add(name)
            try:
                with self._fleet.call(
                    transcript.view(), choice, self._options.timing.answer_timeout_s
                ) as call:
                    if not await self._find_seam(call, headers, transcript):
                        reason = "what was sent does not end where a token does"
                        break
                    if transcript.left < 1:
                        await _write(response, transcript.end() + DONE)
                        return
                    self._metrics.migrations.labels(name).inc()
                    await self._send_rest(response, call, headers, transcript)
                    return
            except InstanceFailed as error:
                self._metrics.failures.labels(name).inc()
                logger.warning("instance %s %s", name, error)
                reason = f"instance {name} {error}"
        await _end_with_error(response, f"the answer broke off, and none can go on: {reason}")

    async def _find_seam(
        self, call: Call, headers: CIMultiDict[str], transcript: Transcript
    ) -> bool:
        """Asks the instance which of the delivered tokens are the text that was shown."""
        for count, *bodies in transcript.seams():
            texts: list[str] = []
            for body in bodies:
                answer = await self._open(call, "POST", "/detokenize", headers, body)
                async with answer:
                    data = await _read_all(call, answer)
                try:
                    texts.append(str(json.loads(data)["prompt"]))
                except (ValueError, KeyError, TypeError):
                    raise InstanceFailed(f"answers {answer.status} to /detokenize") from None
            if transcript.fits(count, *texts):
                return True
        return False

    async def _send_rest(
        self,
        response: web.StreamResponse,
        call: Call,
        headers: CIMultiDict[str],
        transcript: Transcript,
    ) -> None:
        answer = await self._open(call, "POST", COMPLETIONS, headers, transcript.rest())
        try:
            if answer.status != 200:
                raise InstanceFailed(f"answers {answer.status} to the rest of a stream")
            events = Events(call, answer)
            data = await events.next()
            transcript.begin_rest()
            while data:
                if rest := transcript.take_rest(data):
                    await _write(response, rest)
                data = await events.next()
            await _write(response, DONE)
        finally:
            answer.close()

    def _request_headers(self, request: web.Request) -> CIMultiDict[str]:
        headers = _end_to_end(request.headers)
        headers["Accept-Encoding"] = "identity"
        headers.setdefault("X-Request-Id", secrets.token_hex(16))
        if self._options.keys.instances:
            headers["Authorization"] = f"Bearer {self._options.keys.instances}"
        return headers


def error_response(
    status: int, message: str, headers: Mapping[str, str] | None = None
) -> web.Response:
    """An error as OpenAI's API has it."""
    return web.json_response(error_body(status, message), status=status, headers=headers)


def error_body(status: int, message: str) -> dict[str, Any]:
    """The error object."""
    kinds = {401: "AuthenticationError", 404: "NotFoundError", 503: "ServiceUnavailableError"}
    kind = kinds.get(status) or HTTPStatus(status).phrase
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


async def _write(response: web.StreamResponse, data: bytes) -> None:
    """Sends to a client; one that does not read is taken for gone, before the instance, which
    waits as well, is taken for broken."""
    try:
        async with asyncio.timeout(CLIENT_STALL_S):
            await response.write(data)
    except TimeoutError:
        raise ConnectionResetError("the client does not read") from None


async def _end_with_error(response: web.StreamResponse, message: str) -> None:
    await _write(response, frame(error_body(503, message)) + DONE)


async def _read_all(call: Call, answer: aiohttp.ClientResponse) -> bytes:
    parts: list[bytes] = []
    size = 0
    try:
        while part := await call.bounded(answer.content.readany):
            parts.append(part)
            size += len(part)
            if size > MAX_ANSWER_BYTES:
                raise InstanceFailed(f"sends more than {MAX_ANSWER_BYTES} bytes")
    except (aiohttp.ClientError, OSError) as error:
        raise InstanceFailed(f"broke an answer off: {type(error).__name__}") from None
    return b"".join(parts)


def _end_to_end(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Headers without those of the connection, the ones that it names included."""
    kept: CIMultiDict[str] = CIMultiDict()
    named = ",".join(value for name, value in headers.items() if name.lower() == "connection")
    dropped = _DROPPED | {name.strip().lower() for name in named.split(",")}
    for name, value in headers.items():
        if name.lower() not in dropped:
            kept.add(name, value)
    return kept
