"""The offline API under its FastDeploy 2.x path."""

from fastdeploy.llm import LLM

__all__ = ["LLM"]
