"""Carries a stream on at another instance, so that its client sees one answer.

The router asks for token ids beside the text and takes them out again where the client did not ask.
When the instance dies, another one gets prompt and delivered tokens as its prompt and what is left
of the limits. That gives the same tokens only where the rest does not depend on what came before
in another way, so `Transcript.of` is choosy.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .asked import Asked
from .events import each, frame, parsed
from .instances import InstanceFailed
from .policies import RequestView

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
# Fields that mean the same for the rest of an answer as for all of it.
_KEPT = (
    *("model", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids"),
    *("include_stop_str_in_output", "ignore_eos", "repetition_penalty", "logit_bias"),
    *("allowed_token_ids", "skip_special_tokens", "priority", "cache_salt", "stream_interval"),
    *("max_streaming_response_tokens", "user"),
)
_PENALTIES = ("presence_penalty", "frequency_penalty")
# Fields that are about more than token by token: state that would begin anew in the middle, or a
# form of answer that cannot be put together.
_REFUSED = (
    *(*_PENALTIES, "bad_words", "bad_words_token_ids", "tools"),
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice"),
    *("guided_grammar", "guided_json_object", "structural_tag", "thinking_token_budget"),
    *("reasoning_max_tokens", "logits_processors_args", "logprobs", "top_logprobs", "echo"),
    *("prompt_logprobs", "best_of", "suffix", "truncate_prompt_tokens", "vllm_xargs"),
)
MOST_TOKENS = 2**31 - 1
SEAM_TOKENS = 8  # so many tokens may be delivered without their text, as parts of a character
PRIMING_TOKENS = 32  # before the answer, whose text decides how its first token is written


class Transcript:
    """What a client has seen of a stream."""

    def __init__(self, asked: Asked) -> None:
        fields = asked.fields
        self._asked = fields
        self._view = asked.view
        self._is_chat = asked.path == CHAT
        self._shows_ids = fields.get("return_token_ids") is True
        options = fields.get("stream_options") or {}
        self._shows_usage = options.get("include_usage") is True
        self._continuous = self._shows_usage and options.get("continuous_usage_stats") is True
        self._frame: dict[str, Any] = {}  # what all chunks of this answer have in common
        self._prompt: list[int] = []
        self._tokens: list[int] = []
        self._text = ""
        self._kept = 0  # of the tokens, those that a continuation takes over
        self._ended = False
        self._counted = False  # the event with the usage of all was shown
        self._plain = True  # nothing but content so far: no thinking, no tool calls

    @staticmethod
    def of(asked: Asked) -> Transcript | None:
        """For a request whose stream may be carried on; None for others."""
        fields = asked.fields
        if asked.path not in (COMPLETIONS, CHAT) or not asked.streams:
            return None
        if fields.get("n") not in (None, 1) or any(_asks(name, fields) for name in _REFUSED):
            return None
        prompt = fields.get("prompt")
        if isinstance(prompt, list) and not set(map(type, prompt)) <= {int}:
            return None
        options = fields.get("stream_options")
        if not isinstance(options, dict | None):
            return None
        limits = (fields.get("max_tokens"), fields.get("max_completion_tokens"))
        if any(
            type(limit) not in (int, type(None)) for limit in (*limits, fields.get("min_tokens"))
        ):
            return None
        return Transcript(asked)

    def body(self, asked: bytes) -> bytes:
        """The request, with token ids asked for. asked: its body as it came."""
        if "return_token_ids" in self._asked or json.detect_encoding(asked) != "utf-8":
            return json.dumps({**self._asked, "return_token_ids": True}).encode()
        # To write a long prompt anew takes longer than to choose an instance for it.
        return asked.rstrip()[:-1] + b',"return_token_ids":true}'

    def take(self, events: bytes) -> bytes:
        """Events of the first instance, as the client gets them; InstanceFailed for what are no
        events of an answer."""
        return self._checked(self._take, events)

    def _checked(self, take: Callable[[bytes], bytes], events: bytes) -> bytes:
        try:
            return take(events)
        except (AttributeError, KeyError, TypeError, ValueError):
            self._plain = False  # what was taken down of these events has not been shown
            raise InstanceFailed("sent an event of an unknown form") from None

    def _take(self, events: bytes) -> bytes:
        shown = b""
        for raw, event in each(events):
            if not self._frame:
                self._frame = {
                    name: event.get(name) for name in ("id", "object", "created", "model")
                }
            shown += self._take_one(event, raw)
        return shown

    def _take_one(self, event: dict[str, Any], raw: bytes) -> bytes:
        if ids := event.get("prompt_token_ids"):
            self._prompt = ids
        self._counted = self._counted or (not event.get("choices") and bool(event.get("usage")))
        for choice in event.get("choices", ()):
            part = choice.get("delta", choice)
            text = part.get("content" if self._is_chat else "text")
            tokens = choice.get("token_ids") or []
            self._prompt = choice.get("prompt_token_ids") or self._prompt
            self._tokens += tokens
            self._text += text or ""
            self._ended = self._ended or choice.get("finish_reason") is not None
            known = {"role", "content", "prompt_token_ids", "completion_token_ids"}
            if self._is_chat and not part.keys() <= known:
                self._plain = False
            if self._shows_ids:
                continue
            raw = b""  # the ids are taken out
            for holder in (event, choice, part):
                for name in ("prompt_token_ids", "completion_token_ids", "token_ids"):
                    holder.pop(name, None)
            # A chunk that would not have been sent without the ids.
            empty = not part if self._is_chat else not text
            if empty and tokens and choice.get("finish_reason") is None:
                return b""
        return raw or frame(event)

    # ------------------------------------------------------------------ another instance

    def view(self) -> RequestView:
        """The request for the rest: its prompt is longer by what was delivered."""
        return replace(self._view, prompt_tokens=self._view.prompt_tokens + len(self._tokens))

    @property
    def movable(self) -> bool:
        """Whether another instance can carry on exactly."""
        return bool(self._plain and self._prompt and self._frame)

    @property
    def ended(self) -> bool:
        """Whether the client has seen the answer's end, if not the stream's."""
        return self._ended

    def seams(self) -> list[tuple[int, bytes, bytes]]:
        """Questions to /detokenize, the best first: how many tokens they keep, and bodies of which
        the second's answer is the first's and all of the text if these are the right ones."""
        before = self._prompt[-PRIMING_TOKENS:]
        skip = self._asked.get("skip_special_tokens") is not False
        # A client that saw the ids of tokens must not see others in their place.
        fewest = len(self._tokens) - (0 if self._shows_ids else SEAM_TOKENS)

        def question(count: int) -> bytes:
            tokens = before + self._tokens[:count]
            return json.dumps({"tokens": tokens, "skip_special_tokens": skip}).encode()

        counts = range(len(self._tokens), max(fewest, 0) - 1, -1)
        return [(count, question(0), question(count)) for count in counts]

    def fits(self, count: int, before: str, after: str) -> bool:
        """Whether so many tokens are exactly the text that the client has; then they are kept."""
        if after != before + self._text:
            return False
        self._kept = count
        return True

    @property
    def left(self) -> int:
        """Tokens that may still be generated."""
        limit = self._asked.get("max_completion_tokens") if self._is_chat else None
        limit = limit or self._asked.get("max_tokens") or (None if self._is_chat else 16)
        return MOST_TOKENS if limit is None else limit - self._kept

    def rest(self) -> bytes:
        """The request for the rest, which goes to /v1/completions: it asks for plain text."""
        kept = {name: self._asked[name] for name in _KEPT if self._asked.get(name) is not None}
        fewest = max(0, (self._asked.get("min_tokens") or 0) - self._kept)
        return json.dumps(
            {
                **kept,
                "prompt_token_ids": self._prompt + self._tokens[: self._kept],
                "max_tokens": self.left,
                "min_tokens": fewest,
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
            }
        ).encode()

    def begin_rest(self) -> None:
        """The instance that sends the rest has begun: what it will send again is forgotten."""
        del self._tokens[self._kept :]

    def take_rest(self, events: bytes) -> bytes:
        """Events of the rest, as the client gets them; InstanceFailed as in `take`."""
        return self._checked(self._take_rest, events)

    def _take_rest(self, events: bytes) -> bytes:
        shown = b""
        for event in parsed(events):
            for choice in event.get("choices", ()):
                tokens = choice.get("token_ids") or []
                text, reason = choice.get("text") or "", choice.get("finish_reason")
                self._tokens += tokens
                self._text += text
                self._ended = self._ended or reason is not None
                if text or reason is not None or (self._shows_ids and tokens):
                    shown += self._chunk(text, tokens, reason, choice.get("stop_reason"))
            if (usage := event.get("usage")) and not event.get("choices") and self._shows_usage:
                shown += frame({**self._frame, "choices": [], "usage": self._usage(usage)})
                self._counted = True
        return shown

    def end(self) -> bytes:
        """The end of an answer that has all its tokens, where only the last events were lost."""
        shown = b"" if self._ended else self._chunk("", [], "length", None)
        self._ended = True
        if self._shows_usage and not self._counted:
            shown += frame({**self._frame, "choices": [], "usage": self._usage({})})
            self._counted = True
        return shown

    def _chunk(self, text: str, tokens: list[int], reason: Any, stop: Any) -> bytes:
        if self._is_chat:
            delta: dict[str, Any] = {"content": text} if text else {}
            choice: dict[str, Any] = {"index": 0, "delta": delta}
        else:
            choice = {"index": 0, "text": text}
        choice.update(logprobs=None, finish_reason=reason)
        if reason is not None:
            choice["stop_reason"] = stop
        if self._shows_ids:
            choice["token_ids"] = tokens
            (delta if self._is_chat else choice)["completion_token_ids"] = tokens
        event = {**self._frame, "choices": [choice]}
        if self._continuous:
            event["usage"] = self._usage({})
        return frame(event)

    def _usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        prompt, answer = len(self._prompt), len(self._tokens)
        counts = {"prompt_tokens": prompt, "completion_tokens": answer}
        return {**usage, **counts, "total_tokens": prompt + answer}


def _asks(name: str, fields: dict[str, Any]) -> bool:
    """Whether a field asks for something; 0 does, but for penalties: 0 log-probabilities are those
    of the tokens themselves."""
    value = fields.get(name)
    if value is None or value is False or value in ("", [], {}):
        return False
    return name not in _PENALTIES or value != 0
