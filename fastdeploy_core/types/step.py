"""One engine step: SchedulerOutput goes to every worker, ModelRunnerOutput comes back.

Both carry several tokens per sequence per step, because chunked prefill, speculation and overlap
need it. A batch travels in columns, since a step of hundreds of rows must cost the host next to
nothing. `seq_id` is a number the engine never reuses in its life.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from .sampling import SamplingParams


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: the chosen token first, then the most likely tokens, best
    first, among which the chosen one may be again. What is impossible has -9999."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # rank of the chosen token, 1 = most likely


class GrammarStart(msgspec.Struct, frozen=True, omit_defaults=True):
    """A grammar that binds only after thinking: both are token ids."""

    end: int  # the token that ends thinking
    # The token that begins it, where the model may answer at once; None: the text begins in
    # thinking.
    begin: int | None = None


class EmbeddedSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens whose ids say nothing: vectors made from an image or a video stand in their places."""

    start: int  # index of the first token
    count: int
    digest: bytes  # SHA-256 of what the vectors are made from; the engine computes it, no client
    first_row: int = 0  # which of the item's vectors stands in the place of the first token


class MediaItem(msgspec.Struct, frozen=True, array_like=True):
    """One picture, or a part of a video, as a model's encoder takes it
    (contracts.model.MediaProcessor)."""

    digest: bytes  # that of the spans where its vectors stand
    num_rows: int  # vectors that the encoder makes of it
    grid: tuple[int, int, int]  # patches: in time, rows, columns
    data: bytes = b""  # uint8 patches; their order is the family's
    numbers: list[float] = []  # what its encoder needs beside them, such as the channels' means
    kind: str = "image"  # as MediaPart.kind, for usage. Added in contract 1.2


class SequenceExtras(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a sequence asks of model and worker beyond token ids and sampling.

    An engine refuses a request with `needs` that its workers do not report (WorkerInfo.features).
    They report "embeddings", "positions" and "pooling" for a family that has them, and then no
    request without "pooling" is taken; "adapter" with --enable-lora, "routed_experts" with
    --enable-return-routed-experts. `adapter`, `embeddings` and `routes` are part of the block hash,
    so the prefix cache can never mix two of them; positions follow from the token ids and from what
    `embeddings` digests.
    """

    adapter: str = ""  # a LoRA adapter: NAME@GENERATION, which is a digest of its files
    embeddings: list[EmbeddedSpan] = []  # in the order of their tokens, without overlaps
    # Positions of the prompt on three axes (time, height, width): [3, num_prompt_tokens] int32 in C
    # order. Empty: the position of a token is its index.
    positions: bytes = b""
    position_offset: int = 0  # added to the index of every token after the prompt
    pooling: str = ""  # how the hidden states become one vector; empty: tokens are sampled
    media: list[MediaItem] = []  # what `embeddings` digest, each once
    adapter_path: str = ""  # the adapter's folder
    routes: str = ""  # experts that the first tokens visit whatever the router says: fd-rollout

    @property
    def needs(self) -> frozenset[str]:
        """Of contracts.model.MODEL_FEATURES, those that carry it."""
        asked = {
            "adapter": self.adapter,
            "embeddings": self.embeddings,
            "positions": self.positions or self.position_offset,
            "pooling": self.pooling,
            "routed_experts": self.routes,
        }
        return frozenset(name for name, is_asked in asked.items() if is_asked)


class NewSequence(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Everything a worker must know of a sequence it has not seen, or that was preempted."""

    seq_id: int
    token_ids: list[int]  # prompt, then what was generated before a preemption
    num_prompt_tokens: int
    # Of each block of tokens one of every group of layers, as kvcache.BlockTable.interleaved says.
    block_ids: list[int]
    sampling: SamplingParams
    seed: int  # 64 bit; with the token position it determines the random stream of this sequence
    eos_token_ids: list[int] = []
    grammar: bytes | None = None
    grammar_backend: str = ""
    grammar_start: GrammarStart | None = None  # None: it binds from the first token
    extras: SequenceExtras | None = None


class BatchRows(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The rows of a step in columns, in batch order: what each may be fed at most.

    Row i is fed tokens of its sequence from position starts[i] on. The engine plans a step before
    it knows how many drafts of the steps before were accepted, so `starts`, `counts` and
    `num_drafts` of a row that decodes are upper bounds. The worker knows the true ones, and says
    them with the results. The rows of a prompt's chunk are exact.
    """

    seq_ids: np.ndarray  # [B] int64
    starts: np.ndarray  # [B] int64: tokens whose keys and values lie in the cache before this step
    # [B] int64: tokens fed: a prefill chunk, or the newest token plus drafts, num_decodes times
    counts: np.ndarray
    samples: np.ndarray  # [B] bool; False: a prefill chunk that does not reach the last known token
    # [B] int64: so many of the tokens fed are drafts that the worker holds for the sequence
    num_drafts: np.ndarray

    @classmethod
    def of(
        cls,
        seq_ids: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        samples: Sequence[bool] | None = None,
        num_drafts: Sequence[int] | None = None,
    ) -> BatchRows:
        """Rows from plain lists. By default every row samples, and none has drafts."""
        size = len(seq_ids)
        return cls(
            seq_ids=np.array(seq_ids, dtype=np.int64),
            starts=np.array(starts, dtype=np.int64),
            counts=np.array(counts, dtype=np.int64),
            samples=np.array([True] * size if samples is None else samples, dtype=bool),
            num_drafts=np.array([0] * size if num_drafts is None else num_drafts, dtype=np.int64),
        )

    @property
    def is_decode(self) -> bool:
        """Whether every row is fed exactly one token and samples the next."""
        return bool((self.counts == 1).all() and self.samples.all())

    def next(self, num_decodes: int = 1) -> BatchRows:
        """The rows of a step that only says that these go on, each with what it sampled."""
        size = self.seq_ids.size
        return BatchRows(
            seq_ids=self.seq_ids,
            starts=self.starts + self.counts,
            counts=np.full(size, num_decodes, dtype=np.int64),
            samples=np.ones(size, dtype=bool),
            num_drafts=np.zeros(size, dtype=np.int64),
        )


class BlockCopies(msgspec.Struct, frozen=True, omit_defaults=True):
    """Block moves before the forward pass, in this order; pairs of (source, target)."""

    device_to_host: list[tuple[int, int]] = []
    host_to_device: list[tuple[int, int]] = []
    device_to_device: list[tuple[int, int]] = []
    more: list[BlockCopies] = []  # of each bounded group; or none. Added in contract 1.5


NO_COPIES = BlockCopies()


class SchedulerOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What to run in one step."""

    step_id: int
    finished_seq_ids: list[int] = []  # workers forget these first; preempted ones included
    new_sequences: list[NewSequence] = []
    # None: those of the step before, `next()`, which is nearly always so: every row sampled there,
    # none had drafts, and each is fed the one token that it sampled.
    rows: BatchRows | None = None
    # Above 1: every row decodes, and does so that many times, each time fed what it sampled before,
    # and as many drafts as were made then.
    num_decodes: int = 1
    # By row: appended to its block table before this step; as in NewSequence.block_ids.
    new_block_ids: dict[int, list[int]] = {}
    copies: BlockCopies = NO_COPIES
    # Drafts to make after this step for each row that samples; 0: drafters with a cache of their
    # own only keep it complete; -1: drafters rest.
    max_drafts: int = -1


class ModelRunnerOutput(msgspec.Struct, kw_only=True, eq=False):
    """What a step produced, by rows of the step. What few rows have stands beside the columns."""

    step_id: int
    token_ids: np.ndarray  # int64: the new tokens of all rows, row after row
    # [B] int64: how many of these are each row's: none of a prefill that is not complete or of a
    # row with an error, else one more than the drafts that were accepted for each of num_decodes,
    # and less only where one of these led to nothing: an error of the row is then what comes after
    # its tokens. None: one of each row.
    counts: np.ndarray | None = None
    # [num_decodes, B] int64: drafts that each row was fed, and how many of them were accepted.
    # None: no row could have any.
    num_drafts: np.ndarray | None = None
    num_accepted: np.ndarray | None = None
    logprobs: dict[int, list[TokenLogprobs]] = {}  # one for each of the row's tokens
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}  # of prompt tokens that the chunk predicts
    errors: dict[int, str] = {}  # fails this row's request only, such as "nan_logits"
    model_s: float = 0.0  # seconds in the forward pass, attention's preparation and logits included
    draft_s: float = 0.0  # seconds in drafters
    execute_s: float = 0.0  # seconds in the worker, the forward pass included
    draft_failures: int = 0  # proposals lost since the start, because a drafter failed
    pooled: dict[int, bytes] = {}  # float32 in the host's order: what a row was pooled to
