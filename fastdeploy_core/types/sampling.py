"""How one request is sampled. Names and defaults are vLLM's; ranges are checked here."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from fastdeploy_core.errors import InvalidRequest

# Below this temperature sampling is greedy (vLLM's threshold).
GREEDY_TEMPERATURE = 1e-5
MAX_N = 128  # as in OpenAI's API
MAX_LOGPROB_TOKEN_IDS = 128  # as in vLLM
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_LOGIT_BIAS = 300
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
MAX_BAD_WORD_TOKENS = 2**16  # of all bad_words_token_ids together
MAX_SEED = 2**63 - 1
_WORD = 2**64 - 1


def _token_id(key: Any) -> int | None:
    """The token id that a key of logit_bias names: a number, or its plain digits."""
    if isinstance(key, str):
        return int(key) if key.isascii() and key.isdecimal() and len(key) < 20 else None
    return key if type(key) is int and key >= 0 else None


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Exactly one constraint on the generated text."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        given = [
            name for name in self.__struct_fields__ if getattr(self, name) not in (None, False)
        ]
        if len(given) != 1:
            raise InvalidRequest(
                f"structured_outputs needs exactly one constraint; given: "
                f"{', '.join(given) or 'none'}; possible: {', '.join(self.__struct_fields__)}",
                param="structured_outputs",
            )

    @property
    def kind(self) -> str:
        """The name of the one constraint that is set."""
        return next(n for n in self.__struct_fields__ if getattr(self, n) not in (None, False))


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Sampling parameters of one request; raises InvalidRequest naming the field that is wrong."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16  # None: up to the context length
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    bad_words: list[str] | None = None
    bad_words_token_ids: list[list[int]] | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    logprobs: int | None = (
        None  # number of alternatives beside the sampled token; -1: whole vocabulary
    )
    prompt_logprobs: int | None = None
    # Tokens whose log-probabilities are given in place of those of the likeliest ones.
    logprob_token_ids: list[int] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    logits_processors_args: dict[str, Any] | None = None
    thinking_token_budget: int | None = None

    def __post_init__(self) -> None:
        self._check_int("n", 1, MAX_N)
        self._check_float("temperature", 0.0, 2.0)
        self._check_float("top_p", 0.0, 1.0)
        self._check_float("min_p", 0.0, 1.0)
        self._check_int("top_k", -1, 2**31 - 1)
        self._check_float("presence_penalty", -2.0, 2.0)
        self._check_float("frequency_penalty", -2.0, 2.0)
        self._check_float("repetition_penalty", 0.0, 100.0)
        if self.repetition_penalty == 0.0:
            raise InvalidRequest(
                "repetition_penalty must be above 0, got 0", param="repetition_penalty"
            )
        for name in ("seed", "thinking_token_budget"):
            if getattr(self, name) == -1:  # none, as in vLLM
                setattr(self, name, None)
        if self.seed is not None:
            self._check_int("seed", -MAX_SEED - 1, MAX_SEED)
        if self.max_tokens is not None:
            self._check_int("max_tokens", 0, 2**31 - 1)
        self._check_int("min_tokens", 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        self._check_stops()
        self._check_token_lists()
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is True:  # one alternative, as in vLLM
                setattr(self, name, 1)
            if getattr(self, name) is not None:
                self._check_int(name, -1, 2**31 - 1)
        self.logprob_token_ids = list(dict.fromkeys(self.logprob_token_ids or ())) or None
        if self.logprob_token_ids and self.logprobs is None:
            self.logprobs = 0
        if self.thinking_token_budget is not None:
            self._check_int("thinking_token_budget", 0, 2**31 - 1)
        if self.is_greedy and self.n > 1:
            raise InvalidRequest(
                f"n={self.n} with temperature {self.temperature} would give identical answers; "
                "use n=1 or a temperature above 0",
                param="n",
            )

    @property
    def is_unconstrained(self) -> bool:
        """Whether tokens depend on the model's logits alone: no penalty, no bias, no mask, nothing
        that reads the text so far."""
        return not (
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or self.min_tokens
            or self.allowed_token_ids is not None
            or self.bad_words_token_ids
            or self.thinking_token_budget is not None
            or self.logits_processors_args
        )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1 or self.top_p == 0.0

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    def _check_int(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidRequest(f"{name} must be an integer, got {value!r:.40}", param=name)
        if not low <= value <= high:
            raise InvalidRequest(
                f"{name} must be between {low} and {high}, got {str(value)[:40]}", param=name
            )

    def _check_float(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidRequest(f"{name} must be a number, got {value!r:.40}", param=name)
        if not (math.isfinite(value) and low <= value <= high):
            raise InvalidRequest(
                f"{name} must be a finite number between {low:g} and {high:g}, got {value!r:.40}",
                param=name,
            )
        setattr(self, name, float(value))

    def _check_stops(self) -> None:
        stops = self.stop_strings
        if len(stops) > MAX_STOP_STRINGS:
            raise InvalidRequest(
                f"stop has {len(stops)} strings; at most {MAX_STOP_STRINGS} are possible",
                param="stop",
            )
        for text in stops:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_STRING_CHARS:
                raise InvalidRequest(
                    f"each stop string must have 1 to {MAX_STOP_STRING_CHARS} characters",
                    param="stop",
                )
        if stops and not self.detokenize:
            raise InvalidRequest("stop strings need detokenize=True", param="stop")

    def _check_token_lists(self) -> None:
        if self.logit_bias is not None:
            if len(self.logit_bias) > MAX_LOGIT_BIAS:
                raise InvalidRequest(
                    f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS} "
                    "are possible",
                    param="logit_bias",
                )
            bias: dict[int, float] = {}
            for token, value in self.logit_bias.items():
                token_id = _token_id(token)
                try:
                    number = float(value)
                except (TypeError, ValueError, OverflowError):
                    number = math.nan
                if token_id is None or not math.isfinite(number):
                    raise InvalidRequest(
                        "logit_bias maps token ids (0 and up) to finite numbers", param="logit_bias"
                    )
                bias[token_id] = max(-100.0, min(100.0, number))
            self.logit_bias = bias
        if self.bad_words is not None:
            if len(self.bad_words) > MAX_BAD_WORDS:
                raise InvalidRequest(
                    f"bad_words has {len(self.bad_words)} entries; at most {MAX_BAD_WORDS} are "
                    "possible",
                    param="bad_words",
                )
            lengths = [len(w) if isinstance(w, str) else 0 for w in self.bad_words]
            if lengths and not 0 < min(lengths) <= max(lengths) <= MAX_BAD_WORD_CHARS:
                raise InvalidRequest(
                    f"bad_words must be strings of 1 to {MAX_BAD_WORD_CHARS} characters",
                    param="bad_words",
                )
        given: list[Any] = self.bad_words_token_ids or []  # FastDeploy 2.x's are tokens
        words = [[word] if type(word) is int else word for word in given]
        self.bad_words_token_ids = words or None
        most = 4 * MAX_BAD_WORDS  # bad_words are added here, each in up to two spellings
        if len(words) > most or sum(map(len, words)) > MAX_BAD_WORD_TOKENS:
            raise InvalidRequest(
                f"bad_words_token_ids may hold {most} words and {MAX_BAD_WORD_TOKENS} ids",
                param="bad_words_token_ids",
            )
        if len(self.logprob_token_ids or ()) > MAX_LOGPROB_TOKEN_IDS:
            raise InvalidRequest(
                f"logprob_token_ids may name {MAX_LOGPROB_TOKEN_IDS} tokens, got "
                f"{len(self.logprob_token_ids or ())}",
                param="logprob_token_ids",
            )
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            ids = getattr(self, name)
            if ids and (set(map(type, ids)) != {int} or min(ids) < 0):
                raise InvalidRequest(f"{name} must be token ids (0 and up)", param=name)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids must not be empty", param="allowed_token_ids")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidRequest if a token id lies outside the model's output width."""
        named: list[tuple[str, list[int]]] = [
            ("stop_token_ids", self.stop_token_ids or []),
            ("allowed_token_ids", self.allowed_token_ids or []),
            ("logprob_token_ids", self.logprob_token_ids or []),
            ("logit_bias", list(self.logit_bias or {})),
            ("bad_words_token_ids", [t for w in self.bad_words_token_ids or [] for t in w]),
        ]
        for name, ids in named:
            for token_id in (min(ids), max(ids)) if ids else ():
                if not 0 <= token_id < vocab_size:
                    raise InvalidRequest(
                        f"{name} names token {token_id}; the vocabulary has ids 0 to "
                        f"{vocab_size - 1}",
                        param=name,
                    )


def check_logprobs(params: SamplingParams, vocab_size: int, most: int) -> None:
    """Raise InvalidRequest for more alternatives than the operator allows; most=-1: any number. A
    request's -1 stands for the whole vocabulary."""
    for name in ("logprobs", "prompt_logprobs"):
        number = getattr(params, name)
        if number is None or most == -1 or 0 <= number <= most:
            continue
        if number == -1 and 0 < vocab_size <= most:
            continue
        asked = f"-1, the whole vocabulary of {vocab_size}" if number == -1 else number
        raise InvalidRequest(
            f"{name} must be between 0 and {most}, got {asked}; the operator sets the limit with "
            "--max-logprobs",
            param=name,
        )


def mix64(value: int) -> int:
    """A bijection of 64-bit numbers without visible pattern (the finalizer of splitmix64,
    Steele, Lea and Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)


def sequence_seed(seed: int, index: int) -> int:
    """The seed of one of a request's n sequences, at most 63 bits; it depends on nothing else."""
    return mix64(mix64(seed) + index) & MAX_SEED
