"""Parsers that split a model's text into thinking, answer and tool calls.

Each takes text in pieces and gives the same result for every way of cutting it, in linear time;
non-streaming answers are one piece. Found by name through the entry-point groups
fastdeploy.reasoning_parsers and fastdeploy.tool_parsers, as a third party's are.
"""

from .answer import AnswerReader

__all__ = ["AnswerReader"]
