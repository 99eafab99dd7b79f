"""Compiles constraints for every grammar backend, in processes that may be killed.

Front ends (LLM, server) use it; matchers run on rank 0 of the worker.
"""
