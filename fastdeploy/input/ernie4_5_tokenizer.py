"""The tokenizer of any model under its FastDeploy 2.x path."""

from fastdeploy.tokenizer import Tokenizer as Ernie4_5Tokenizer

__all__ = ["Ernie4_5Tokenizer"]
