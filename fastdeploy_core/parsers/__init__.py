"""Parsers that split a model's text into thinking, answer and tool calls.

Each takes text in pieces, gives the same result however the text is cut, and needs linear time; a
non-streaming answer is one piece. Like a third party's, they are found by name through the
entry-point groups fastdeploy.reasoning_parsers and fastdeploy.tool_parsers.
"""

from .answer import AnswerReader

__all__ = ["AnswerReader"]
