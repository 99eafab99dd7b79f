"""Plain records that cross rooms and processes: no tensor library, no behaviour beyond validation.

Everything here is a msgspec Struct: typed, fast, and encodable as MessagePack, which is the only
thing that crosses a socket in this project.
"""

from .outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, SpeculateMetrics
from .request import (
    DraftStats,
    FinishReason,
    InstanceRole,
    LoRARequest,
    Request,
    RequestOutputDelta,
    RequestStatus,
    SequenceDelta,
    TokenDeltas,
    branch_id,
    each_delta,
    join_tokens,
    split_branch_id,
)
from .sampling import SamplingParams, StructuredOutputsParams
from .step import (
    NO_COPIES,
    BatchRows,
    BlockCopies,
    EmbeddedSpan,
    GrammarStart,
    MediaItem,
    ModelRunnerOutput,
    NewSequence,
    SchedulerOutput,
    SequenceExtras,
    TokenLogprobs,
)

__all__ = [
    "NO_COPIES",
    "BatchRows",
    "BlockCopies",
    "CompletionOutput",
    "DraftStats",
    "EmbeddedSpan",
    "FinishReason",
    "GrammarStart",
    "InstanceRole",
    "LoRARequest",
    "Logprob",
    "MediaItem",
    "ModelRunnerOutput",
    "NewSequence",
    "Request",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputDelta",
    "RequestStatus",
    "SamplingParams",
    "SchedulerOutput",
    "SequenceDelta",
    "SequenceExtras",
    "SpeculateMetrics",
    "StructuredOutputsParams",
    "TokenDeltas",
    "TokenLogprobs",
    "branch_id",
    "each_delta",
    "join_tokens",
    "split_branch_id",
]
