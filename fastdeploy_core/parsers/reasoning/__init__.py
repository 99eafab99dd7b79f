"""Parsers that separate a model's thinking from its answer."""

from .think import DeepSeekR1Parser, ErnieX1Parser, ThinkParser

__all__ = ["DeepSeekR1Parser", "ErnieX1Parser", "ThinkParser"]
