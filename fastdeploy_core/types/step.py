"""One engine step: SchedulerOutput goes to every worker, ModelRunnerOutput comes back.

Both carry several tokens per sequence per step, because chunked prefill, speculation and overlap
need it. `seq_id` is a number the engine never reuses in its life.
"""

from __future__ import annotations

import msgspec

from .sampling import SamplingParams


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: the chosen token first, then the most likely tokens, best
    first, among which the chosen one may be again. What is impossible has -9999."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # rank of the chosen token, 1 = most likely


class GrammarStart(msgspec.Struct, frozen=True, omit_defaults=True):
    """A grammar that binds only behind thinking: both are token ids."""

    end: int  # the token that ends thinking
    # The token that begins it, where the model may answer at once; None: the text begins in thinking.
    begin: int | None = None


class NewSequence(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Everything a worker must know of a sequence it has not seen, or that was preempted."""

    seq_id: int
    token_ids: list[int]  # prompt, then what was generated before a preemption
    num_prompt_tokens: int
    block_ids: list[int]
    sampling: SamplingParams
    seed: int  # 64 bit; with the token position it determines the random stream of this sequence
    eos_token_ids: list[int] = []
    grammar: bytes | None = None
    grammar_backend: str = ""
    grammar_start: GrammarStart | None = None  # None: it binds from the first token


class ScheduledSequence(msgspec.Struct, omit_defaults=True):
    """One row of the batch: feed tokens [num_computed_tokens, num_computed_tokens + num_tokens)."""

    seq_id: int
    num_computed_tokens: int  # tokens whose keys and values lie in the cache before this step
    num_tokens: int  # tokens fed now: a prefill chunk, or the last token plus drafts
    new_block_ids: list[int] = []  # appended to the block table before this step
    draft_token_ids: list[int] = []  # the last len() of the num_tokens fed are unverified drafts
    sample: bool = True  # False: a prefill chunk that does not reach the last known token


class BlockCopies(msgspec.Struct, frozen=True, omit_defaults=True):
    """Block moves a worker does before the forward pass, in this order; pairs of (source, target)."""

    device_to_host: list[tuple[int, int]] = []
    host_to_device: list[tuple[int, int]] = []
    device_to_device: list[tuple[int, int]] = []


class SchedulerOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What to run in one step. Row order is batch order."""

    step_id: int
    new_sequences: list[NewSequence] = []
    sequences: list[ScheduledSequence] = []
    finished_seq_ids: list[int] = []  # workers forget these first; preempted ones included
    copies: BlockCopies = BlockCopies()

    @property
    def num_tokens(self) -> int:
        """Tokens fed in this step over all rows."""
        return sum(s.num_tokens for s in self.sequences)


class SequenceOutput(msgspec.Struct, omit_defaults=True):
    """What one row produced: no token for an unfinished prefill, up to 1 + drafts otherwise."""

    seq_id: int
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = (
        None  # of the prompt tokens predicted in this chunk
    )
    next_draft_token_ids: list[int] = []  # proposals for the next step, verified then
    num_accepted_drafts: int = 0
    error: str | None = None  # fails this request only, such as "nan_logits"


class ModelRunnerOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a step produced. Rows are in the order of SchedulerOutput.sequences."""

    step_id: int
    sequences: list[SequenceOutput] = []
    model_s: float = 0.0  # seconds in the forward pass, attention's preparation and logits included
    execute_s: float = 0.0  # seconds in the worker, the forward pass included
