"""What travels between client and engine: requests to the engine, deltas of output back."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, count, zip_longest

import msgspec

from .sampling import SamplingParams
from .step import GrammarStart, SequenceExtras, TokenLogprobs


class RequestStatus(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    # Another instance computes its prompt: it can neither run nor make others wait for room.
    WAITING_FOR_REMOTE_KV = "waiting_for_remote_kv"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class InstanceRole(enum.StrEnum):
    """What an instance does with requests. Every instance can do both; the role is what it says of
    itself to whoever routes, and may change with its epoch."""

    MIXED = "mixed"
    PREFILL = "prefill"  # computes prompts, whose KV blocks a decode instance fetches
    DECODE = "decode"


class FinishReason(enum.StrEnum):
    """Why a sequence ended, in OpenAI's words where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


def branch_id(request_id: str, index: int) -> str:
    """The name of one of a request's n sequences, for calls that end sequences by name."""
    return f"{request_id}#{index}"


def split_branch_id(name: str) -> tuple[str, int | None]:
    """The request id and the index of the sequence; an index of None means all sequences."""
    request_id, separator, index = name.rpartition("#")
    return (request_id, int(index)) if separator and index.isdecimal() else (name, None)


class Request(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request as the engine sees it: token ids only.

    `request_id` is made by the front end, never by the client, and is unique. A client's own id is
    only echoed and never reaches the engine.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    eos_token_ids: list[int] = []
    arrival_time_s: float = 0.0  # time.time() at the front end, for metrics only
    # seconds that the request may take in all, counted from its admission
    deadline_s: float | None = None
    priority: int = 0  # smaller runs first
    cache_salt: str = ""  # enters the hash of the first block: equal salts share prefixes
    tenant: str = ""  # fair queueing key; empty: one shared queue
    grammar: bytes | None = (
        None  # compiled constraint, made by the grammar backend of the front end
    )
    grammar_backend: str = ""
    grammar_start: GrammarStart | None = None  # None: the grammar binds from the first token
    attempt: int = 0  # fencing number: only results of the newest attempt reach the client
    instance: str = ""  # instance that a request scheduler routed it to; empty: any
    extras: SequenceExtras | None = None
    handover: str = ""  # which other instance has to do with it, as a router says: fd-scale-out
    traceparent: str = ""  # the client's header, W3C Trace Context: where spans of it belong

    @property
    def is_pooled(self) -> bool:
        """Whether it asks for a vector, with max_tokens=0, instead of tokens."""
        return self.extras is not None and bool(self.extras.pooling)


class LoRARequest(msgspec.Struct, frozen=True):
    """An adapter, as vLLM names it. Here the name and the files tell adapters apart."""

    lora_name: str
    lora_int_id: int
    lora_path: str


class DraftStats(msgspec.Struct, omit_defaults=True):
    """How the drafts of one sequence fared."""

    num_steps: int = 0  # steps of the sequence that had drafts
    num_drafts: int = 0
    accepted_at: list[int] = []  # entry i: steps whose first i + 1 drafts were accepted

    def add(self, other: DraftStats) -> None:
        """Add the numbers of another sequence of the same request."""
        self.num_steps += other.num_steps
        self.num_drafts += other.num_drafts
        pairs = zip_longest(self.accepted_at, other.accepted_at, fillvalue=0)
        self.accepted_at = [one + two for one, two in pairs]

    @property
    def num_accepted(self) -> int:
        """Drafts that were accepted."""
        return sum(self.accepted_at)


class SequenceDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """New tokens of one sequence of a request (`index` counts 0 to n-1)."""

    index: int = 0
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None  # one per token of token_ids, when asked for
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # stop token id, when one ended it
    drafts: DraftStats | None = None  # with the finish_reason, if the sequence had drafts
    pooled: bytes | None = None  # as ModelRunnerOutput.pooled, with the finish_reason


class RequestOutputDelta(msgspec.Struct, kw_only=True, omit_defaults=True, tag="delta"):
    """What one engine step adds to one request; a request's carry consecutive `position`s."""

    request_id: str
    position: int = 0  # number of this delta within its request, from 0: shows repeats and gaps
    attempt: int = 0
    sequences: list[SequenceDelta] = []
    prompt_logprobs: list[TokenLogprobs | None] | None = (
        None  # log-probabilities of the whole prompt, sent once; the first entry is None
    )
    num_cached_tokens: int | None = (
        None  # prompt tokens found in the prefix cache, in the first delta
    )
    queue_s: float | None = None  # time spent waiting, in the first delta
    finished: bool = False  # no more deltas of this request follow
    error: str | None = None  # the request failed; safe to show to the client
    error_type: str = ""  # class name in errors.py, and the field at fault: "InvalidRequest:n"


class TokenDeltas(msgspec.Struct, tag="tokens"):
    """New tokens, and nothing else, for many requests that have one sequence each. Nearly all
    output of a step travels in these columns. Entry i stands for one RequestOutputDelta."""

    request_ids: list[str]
    positions: list[int]
    attempts: list[int]
    token_ids: list[int]  # tokens of all entries, entry after entry
    counts: list[int] | None = None  # number of tokens of each entry; None: one each
    # consecutive deltas that each entry replaces, the same number for all entries
    num_deltas: int = 1

    def pieces(self) -> Iterable[Sequence[int]]:
        """The tokens of each entry."""
        if self.counts is None:
            return zip(self.token_ids, strict=True)
        tokens, ends = self.token_ids, accumulate(self.counts)
        return [tokens[end - size : end] for size, end in zip(self.counts, ends, strict=True)]

    def delta(self, index: int, token_ids: Iterable[int]) -> RequestOutputDelta:
        """One entry as a RequestOutputDelta with these tokens."""
        return RequestOutputDelta(
            request_id=self.request_ids[index],
            position=self.positions[index],
            attempt=self.attempts[index],
            sequences=[SequenceDelta(token_ids=list(token_ids))],
        )

    def __iter__(self) -> Iterator[RequestOutputDelta]:
        return map(self.delta, count(), self.pieces())


def join_tokens(parts: Sequence[TokenDeltas]) -> TokenDeltas:
    """Join successive deltas of the same list of requests: one entry per request."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    columns = zip(*(part.pieces() for part in parts), strict=True)
    rows = [list(chain.from_iterable(pieces)) for pieces in columns]
    return TokenDeltas(
        first.request_ids,
        first.positions,
        first.attempts,
        list(chain.from_iterable(rows)),
        list(map(len, rows)),
        sum(part.num_deltas for part in parts),
    )


def each_delta(outputs: Iterable[RequestOutputDelta | TokenDeltas]) -> Iterator[RequestOutputDelta]:
    """The same output with every column entry as a RequestOutputDelta of its own."""
    for output in outputs:
        if isinstance(output, TokenDeltas):
            yield from output
        else:
            yield output
