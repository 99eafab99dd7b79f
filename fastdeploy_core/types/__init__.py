"""Plain records that cross rooms and processes: no tensor library, no behaviour beyond validation.

Everything here is a msgspec Struct: typed, fast, and encodable as MessagePack, which is the only
thing that crosses a socket in this project.
"""

from .outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from .request import FinishReason, Request, RequestOutputDelta, RequestStatus, SequenceDelta
from .sampling import SamplingParams, StructuredOutputsParams
from .step import (
    BlockCopies,
    GrammarStart,
    ModelRunnerOutput,
    NewSequence,
    ScheduledSequence,
    SchedulerOutput,
    SequenceOutput,
    TokenLogprobs,
)

__all__ = [
    "BlockCopies",
    "CompletionOutput",
    "FinishReason",
    "GrammarStart",
    "Logprob",
    "ModelRunnerOutput",
    "NewSequence",
    "Request",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputDelta",
    "RequestStatus",
    "SamplingParams",
    "ScheduledSequence",
    "SchedulerOutput",
    "SequenceDelta",
    "SequenceOutput",
    "StructuredOutputsParams",
    "TokenLogprobs",
]
