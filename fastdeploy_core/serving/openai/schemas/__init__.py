"""What clients may send: strict pydantic models of request bodies, one file per route family."""

from .chat import ChatCompletionRequest
from .common import StreamOptions
from .completion import CompletionRequest
from .tools import DetokenizeRequest, Invocation, TokenizeRequest

__all__ = [
    "ChatCompletionRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "Invocation",
    "StreamOptions",
    "TokenizeRequest",
]
