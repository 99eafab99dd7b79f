"""Speculative methods propose; the core verifies. Several proposals per sequence and step.

Whatever a drafter proposes, the output is what it would be without: a draft is taken only when it
is the token that the target samples at that place. A drafter can cost time, never a request.

There are two ways to draft, and a driver says which is its own in `runs_on`:

    "host"     propose(HostDraftInput) -> list[list[int]], from token histories; on rank 0 only
    "device"   propose(DraftBatch) -> Tensor [B, k], after the target's step and without waiting for
               the host; on every rank alike, because its layers may meet in collectives

A host driver may name a driver of the same method for devices that capture decode steps, where a
step need not wait for the host then: class attribute `on_device`. A device driver may ask for the
tokens of its sequences in DraftBatch.history: class attribute `reads_history = True`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from .attention import AttentionBatch
from .small import CausalLM

if TYPE_CHECKING:
    import numpy as np

    from fastdeploy_core.tensor import Tensor

    from .device import DeviceBackend
    from .ops import KernelTable

# The value of a device drafter's result where it has no draft.
NO_DRAFT = -1


@dataclass(frozen=True, slots=True)
class SpeculativeQuestion:
    """Asked of `fd_speculative_requirements`: what does this method need of this configuration?"""

    method: str
    num_speculative_tokens: int
    architecture: str
    hf_config: Mapping[str, Any]
    options: Mapping[str, Any]  # the method's own keys of --speculative-config
    model_path: str = ""  # the target's folder
    vocab_size: int = 0
    max_model_len: int = 0
    tensor_parallel_size: int = 1
    device: str = ""
    tensor_library: str = ""


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """What a drafter is built from, right after the target model and before memory is measured.

    The fields after `max_num_seqs` serve drafters with layers; they are there whenever the core
    builds a drafter that runs on the device.
    """

    num_speculative_tokens: int
    options: Mapping[str, Any]
    vocab_size: int
    max_num_seqs: int
    max_model_len: int = 0
    device: DeviceBackend | None = None
    kernels: KernelTable | None = None
    hf_config: Mapping[str, Any] = field(default_factory=dict)  # the target's config.json
    model: CausalLM | None = None  # the target; its embedding and head may be shared
    # layers.ModelBuilder as the target's model got it: the same ranks, quantizer and drivers.
    # Layers that its add_kv_layer counts get a cache in the same pool under the same block tables.
    builder: Any = None
    # (folder, quantization) to a loaded model of the same vocabulary, whose attention layers are
    # counted likewise. Quantization "": what the folder's config.json says.
    load_model: Callable[[str, str], CausalLM] | None = None
    # Fills what was made with `builder` from the tensors whose names begin with one of these
    # prefixes: of the folder that option "model" names, else of the target's own checkpoint.
    load_weights: Callable[[Sequence[str]], None] | None = None


@dataclass(slots=True)
class HostDraftInput:
    """What a host drafter sees after a step, rows in batch order."""

    seq_ids: Sequence[int]
    # All known tokens of each sequence, the newest last: int32 views that are only valid during the
    # call and only ever grow for one sequence (until `forget`).
    token_ids: Sequence[np.ndarray]
    max_drafts: Sequence[int]  # how many drafts each row may get, 0 to num_speculative_tokens
    # Drafts that stand after the known tokens already, for a drafter that continues another one's
    # (Requirements.continued_by): its own go after them. They are not counted in max_drafts.
    drafts: Sequence[Sequence[int]] = ()


@dataclass(slots=True)
class DraftBatch:
    """What a device drafter sees after a step of the target: B rows in batch order, T tokens fed.

    Row i fed tokens attention.cu_seqlens_q[i]:[i + 1]. A decode row fed its newest token and the
    drafts after it; a prefill chunk its tokens. Those after a row's last verified token were
    refused: what a drafter writes for them is overwritten later, and later positions never see it.
    """

    seq_ids: np.ndarray  # [B] int64
    slots: np.ndarray  # [B] int64: the worker's place for the sequence, below max_num_seqs
    draws: np.ndarray  # [B] bool: False: a prefill chunk before the last; it wants no drafts
    max_drafts: int  # drafts wanted of every row that samples; 0: only keep the own cache complete
    attention: AttentionBatch  # of the target's step
    context: Any  # layers.ForwardContext of the target's step, the drafter's layers included
    input_ids: Tensor  # [T] int64
    # [T] int64: the token that follows each token fed: the prompt's next one, the accepted draft,
    # the sampled token. Meaningless, but a valid id, after a row's last verified token.
    next_token_ids: Tensor
    # [T, hidden]: what the target's forward returned. For drivers with reads_history it may be of
    # fewer tokens.
    hidden_states: Tensor
    last: Tensor  # [B] int64: index into T of each row's last verified token
    # (logits [B, vocabulary] float32, j) to ids [B] int64: the j-th draft as the target would
    # sample it from these logits: the row's temperature and filters, and the very random numbers
    # that the target will use there, so that equal distributions give equal tokens. Greedy rows:
    # the likeliest token. Consumes the logits; the same on all ranks.
    draw: Callable[[Tensor, int], Tensor]
    # Places [B] int64 (on the device) to (attention, context) of a step that feeds one token per
    # row, there in its sequence. Rows that do not sample, and places beyond a row's blocks, write
    # nothing. While drafts are wanted, blocks reach Requirements.lookahead_tokens after the tokens
    # fed. attention.positions are what the drafter's layers are given, safe for those rows, too.
    decode: Callable[[Tensor], tuple[AttentionBatch, Any]]
    # For drivers with reads_history, which then sample nothing: row r's tokens are the first
    # num_known[r] of history[history_rows[r]], the token sampled last included.
    history: Tensor | None = None  # [S, L] int32
    history_rows: Tensor | None = None  # [B] int64
    num_known: Tensor | None = None  # [B] int64
    # Every row samples greedily, so a drafter may find the likeliest tokens without `draw` and
    # without logits (small.GreedyLM); they have to be the same on all ranks.
    is_greedy: bool = False
    # [B] int64: where in its sequence each row's last verified token stands; `decode` goes on one
    # after. Of a target that takes pictures this is not its position. Meaningless where no drafts
    # are wanted.
    ends: Tensor = None


@runtime_checkable
class Drafter(Protocol):
    """Constructed as `Driver(context: DrafterContext)`; see HostDrafter and DeviceDrafter.

    An exception costs the drafts of the step, not its requests; it is logged once and counted.
    """

    name: str
    contract: tuple[int, int]
    runs_on: Literal["host", "device"]

    def propose(self, batch: Any) -> Any:
        """Draft tokens for every row; see the two protocols below."""
        ...

    def observe(self, seq_id: int, drafted: Sequence[int], accepted: int) -> None:
        """How a proposal fared: the drafts that were fed, and how many of them were right. Told to
        host drafters only, before the next `propose`."""
        ...

    def forget(self, seq_id: int) -> None:
        """The sequence ended or was preempted; also called for sequences never seen."""
        ...


class HostDrafter(Drafter, Protocol):
    """`runs_on = "host"`. Deterministic: the same histories give the same proposals."""

    runs_on: Literal["host"]

    def propose(self, batch: HostDraftInput) -> list[list[int]]:
        """Up to max_drafts[i] draft tokens for each row, possibly none."""
        ...


class DeviceDrafter(Drafter, Protocol):
    """`runs_on = "device"`. Where the builder's attention drivers can be captured, propose() may be
    captured in a graph, of a step in which every row decodes, or with max_drafts 0 of any: it reads
    nothing on the host but shapes."""

    runs_on: Literal["device"]

    def propose(self, batch: DraftBatch) -> Tensor:
        """[B, max_drafts] int64, NO_DRAFT from where a row has none. Rows that do not sample may
        hold anything. Called also with max_drafts 0 ([B, 0] is the answer then)."""
        ...
