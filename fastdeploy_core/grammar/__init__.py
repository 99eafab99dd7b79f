"""Structured output: limits on constraints, compilation in a killable child process, token masks.

Front ends (LLM, server) use `GrammarCompiler`; the matcher runs on rank 0 of the worker.
"""

from .compiler import GrammarCompiler

__all__ = ["GrammarCompiler"]
