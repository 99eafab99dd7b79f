"""Structured output: limits on what clients send, compilation in a killable child, token masks.

`GrammarCompiler` is used by the front ends (LLM, server); the matcher runs on rank 0 of the worker.
"""

from .compiler import GrammarCompiler

__all__ = ["GrammarCompiler"]
