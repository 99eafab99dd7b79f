"""Parsers that separate a model's thinking from its answer."""

from .think import DeepSeekR1Parser, ErnieThinkingParser, ErnieVLParser, ErnieX1Parser, Qwen3Parser

__all__ = [
    "DeepSeekR1Parser",
    "ErnieThinkingParser",
    "ErnieVLParser",
    "ErnieX1Parser",
    "Qwen3Parser",
]
