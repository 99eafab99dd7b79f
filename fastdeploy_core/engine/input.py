"""From a prompt and its sampling parameters to a complete, checked Request.

Every front end calls this, so the same input is refused with the same words everywhere, before
anything reaches the engine.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from fastdeploy_core.config import EngineConfig
from fastdeploy_core.errors import ConfigError, InvalidRequest, RequestTooLong
from fastdeploy_core.tokenizer import Tokenizer
from fastdeploy_core.tokenizer.files import as_id_list
from fastdeploy_core.types import GrammarStart, Request, SamplingParams, SequenceExtras
from fastdeploy_core.types.sampling import check_logprobs

if TYPE_CHECKING:
    from fastdeploy_core.contracts.model import MediaPart, MediaProcessor
    from fastdeploy_core.parsers.answer import Thinking
    from fastdeploy_core.types.engine import EngineInfo

MAX_SALT_CHARS = 128
SURE_CHARS = 256 * 1024  # texts up to this length are tokenized whatever the context length
CHARS_PER_TOKEN = 16  # more than any language or program has on average
_GENERATION_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What a request may ask of this engine."""

    max_model_len: int  # prompt and answer together
    vocab_size: int  # width of the model's output; 0: not known here
    eos_token_ids: tuple[int, ...] = ()
    max_logprobs: int = 20  # -1: the whole vocabulary

    @property
    def max_chars(self) -> int:
        """Characters of one text that are tokenized."""
        return max(SURE_CHARS, CHARS_PER_TOKEN * self.max_model_len)

    def check_text(self, text: str, param: str) -> None:
        """RequestTooLong for a text that would take long to tokenize and could not be served."""
        if len(text) > self.max_chars:
            raise RequestTooLong(
                f"This model's maximum context length is {self.max_model_len} tokens. However, "
                f"the {param} has {len(text)} characters; at most {self.max_chars} are tokenized. "
                "Please shorten it.",
                param=param,
            )

    @classmethod
    def of(
        cls, config: EngineConfig, tokenizer: Tokenizer | None, info: EngineInfo | None = None
    ) -> RequestLimits:
        """The limits of a configured engine, and of its KV pool once it has started."""
        model = config.model
        asked = model.generation_config.get("eos_token_id", model.hf_config.get("eos_token_id"))
        eos = as_id_list(asked, "the model's configuration")
        if tokenizer is not None:
            eos = [*tokenizer.eos_token_ids, *eos]
        length, width = model.max_model_len, int(model.hf_config.get("vocab_size", 0))
        if info is not None:
            length, width = min(length, info.max_request_tokens), info.vocab_size
        return cls(
            max_model_len=length,
            vocab_size=width,
            eos_token_ids=tuple(dict.fromkeys(eos)),
            max_logprobs=config.max_logprobs,
        )


@dataclass(frozen=True, slots=True)
class Truncation:
    """How a prompt that is too long is cut, after it was tokenized."""

    max_tokens: int  # -1: as many as the context holds next to the answer
    side: str = "left"  # which end is cut off: "left" keeps the last tokens

    def room(self, limits: RequestLimits, max_answer: int | None) -> int:
        """How many tokens are kept; InvalidRequest if so long a prompt could never be served."""
        longest = limits.max_model_len
        if self.max_tokens > longest:
            raise InvalidRequest(
                f"truncate_prompt_tokens must be at most {longest}, the context length of this "
                f"model, got {self.max_tokens}",
                param="truncate_prompt_tokens",
            )
        return (
            self.max_tokens if self.max_tokens >= 0 else max(1, longest - max(1, max_answer or 1))
        )


@dataclass(slots=True)
class RequestOptions:
    """What a front end decides about a request besides its sampling."""

    add_special_tokens: bool = True
    truncation: Truncation | None = None
    priority: int = 0
    deadline_s: float | None = None
    tenant: str = ""
    cache_salt: str = ""  # the client's
    salt_scope: str = ""  # requests share cached prefixes only within one scope
    passed: Mapping[str, Any] = field(default_factory=dict)  # fields of Request, from headers
    log_id: str = ""  # begins the engine's id of the request, so that logs can be matched
    media: MediaProcessor | None = None  # of a family that takes pictures
    media_parts: Sequence[MediaPart] = ()
    extras: SequenceExtras | None = None  # of a model that takes no pictures


def grammar_start(thinking: Thinking | None, tokenizer: Tokenizer) -> GrammarStart | None:
    """The token ids between which a grammar does not bind. None (the grammar binds from the first
    token) for a model that does not think, or whose thinking marks are several tokens long."""
    if thinking is None:
        return None
    end = tokenizer.token_to_id(thinking.end)
    if thinking.begin is None:
        return None if end is None else GrammarStart(end)
    begin = tokenizer.token_to_id(thinking.begin)
    return None if end is None or begin is None else GrammarStart(end, begin)


def default_sampling_values(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """SamplingParams fields that a model's generation_config.json sets.

    `max_tokens` is the value of max_new_tokens, else None: up to the context length.
    """
    values: dict[str, Any] = {}
    for name in _GENERATION_FIELDS:
        if generation_config.get(name) is not None:
            values[name] = generation_config[name]
    if generation_config.get("do_sample") is False:
        values["temperature"] = 0.0
    values["max_tokens"] = generation_config.get("max_new_tokens")
    try:
        SamplingParams(**values)
    except InvalidRequest as error:
        raise ConfigError(f"generation_config.json or its override: {error}") from None
    return values


def build_request(
    prompt: str | Sequence[int],
    sampling: SamplingParams,
    *,
    tokenizer: Tokenizer | None,
    limits: RequestLimits,
    options: RequestOptions | None = None,
) -> Request:
    """Check and complete one request, but for its grammar; raises InvalidRequest or RequestTooLong.

    The caller's `sampling` is not changed.
    """
    options = options or RequestOptions()
    _check_salt(options.cache_salt)
    token_ids = _token_ids(prompt, tokenizer, limits, sampling.max_tokens, options)
    # No client can name another tenant's salt: "@" is not possible in a salt of a request.
    salt = f"{options.salt_scope}@{options.cache_salt}" if options.salt_scope else ""
    extras = options.extras
    if options.media is not None:
        if options.media_parts and options.truncation is not None:
            raise InvalidRequest(
                "a prompt with pictures is not truncated; leave out truncate_prompt_tokens",
                param="truncate_prompt_tokens",
            )
        shared = salt or options.cache_salt
        token_ids, extras = options.media.prepare(token_ids, options.media_parts, shared)
    return Request(
        request_id=f"{options.log_id or 'request'}-{secrets.token_hex(8)}",
        prompt_token_ids=token_ids,
        sampling=_complete(sampling, len(token_ids), tokenizer, limits),
        eos_token_ids=list(limits.eos_token_ids),
        arrival_time_s=time.time(),
        deadline_s=options.deadline_s,
        priority=options.priority,
        cache_salt=salt or options.cache_salt,
        tenant=options.tenant,
        extras=extras,
        **options.passed,
    )


def are_integers(values: Iterable[Any]) -> bool:
    """Whether all are plain integers (True is none), without a loop of Python over them."""
    return set(map(type, values)) <= {int}


def _token_ids(
    prompt: str | Sequence[int],
    tokenizer: Tokenizer | None,
    limits: RequestLimits,
    max_answer: int | None,
    options: RequestOptions,
) -> list[int]:
    cut = options.truncation
    room = limits.max_model_len if cut is None else cut.room(limits, max_answer)
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidRequest(
                "a text prompt needs a tokenizer, and none is loaded; give prompt_token_ids",
                param="prompt",
            )
        if cut is None:
            limits.check_text(prompt, "prompt")
        ids = tokenizer.encode_end(
            prompt,
            room,
            limits.max_chars,
            keeps_end=cut is not None and cut.side == "left",
            add_special_tokens=options.add_special_tokens,
        )
    else:
        ids = list(prompt)
        if not are_integers(ids):
            raise InvalidRequest("prompt token ids must be integers", param="prompt")
    if cut is not None and len(ids) > room:
        ids = ids[:room] if cut.side == "right" else ids[-room:]
    if not ids:
        raise InvalidRequest("the prompt must not be empty", param="prompt")
    # Also checked for text: a tokenizer may know tokens that the model has no embedding for.
    top = limits.vocab_size or 2**31
    lowest = min(ids)
    wrong = lowest if lowest < 0 else max(ids)
    if not 0 <= wrong < top:
        raise InvalidRequest(
            f"prompt token id {str(wrong)[:40]} is out of vocabulary; possible: 0 to {top - 1}",
            param="prompt",
        )
    return ids


def _complete(
    sampling: SamplingParams, num_prompt: int, tokenizer: Tokenizer | None, limits: RequestLimits
) -> SamplingParams:
    room = limits.max_model_len - num_prompt
    if room < (0 if sampling.max_tokens == 0 else 1):
        raise RequestTooLong(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, your "
            f"prompt contains {num_prompt} tokens or more, which leaves no room for an answer. "
            "Please shorten the prompt.",
            param="prompt",
        )
    max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    check_logprobs(sampling, limits.vocab_size, limits.max_logprobs)
    changes: dict[str, Any] = {
        "max_tokens": max_tokens,
        "min_tokens": min(sampling.min_tokens, max_tokens),
        "seed": secrets.randbits(63) if sampling.seed is None else sampling.seed,
    }
    if sampling.bad_words:
        if tokenizer is None:
            raise InvalidRequest(
                "bad_words needs a tokenizer; give bad_words_token_ids", param="bad_words"
            )
        words = bad_word_ids(sampling.bad_words, tokenizer)
        changes["bad_words_token_ids"] = [*(sampling.bad_words_token_ids or []), *words]
    complete = msgspec.structs.replace(sampling, **changes)
    if limits.vocab_size:
        complete.check_vocabulary(limits.vocab_size)
    return complete


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """The token sequences that spell words: at the start of a text and after a space."""
    starts = [word.lstrip() for word in words]
    spelt = tokenizer.encode_batch([*starts, *(" " + word for word in starts)], False)
    found: list[list[int]] = []
    for plain, spaced in zip(spelt[: len(starts)], spelt[len(starts) :], strict=True):
        # The plain spelling already covers one that only puts a space token in front.
        covered = len(spaced) > len(plain) and spaced[len(spaced) - len(plain) :] == plain
        found += [plain] if covered or plain == spaced else [plain, spaced]
    return [ids for ids in found if ids]


def _check_salt(salt: str) -> None:
    if len(salt) > MAX_SALT_CHARS or any(char in salt for char in "@\\\0"):
        raise InvalidRequest(
            f"cache_salt must have at most {MAX_SALT_CHARS} characters and none of @ \\ NUL",
            param="cache_salt",
        )
