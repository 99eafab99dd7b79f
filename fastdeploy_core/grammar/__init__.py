"""What is true of every grammar backend: constraints are compiled in processes that may be killed,
and bind after thinking only.

Front ends (LLM, server) compile; matchers run on rank 0 of the worker.
"""
