"""Parsers that find tool calls in a model's answer."""

from .deepseek import DeepSeekToolParser
from .hermes import HermesToolParser

__all__ = ["DeepSeekToolParser", "HermesToolParser"]
