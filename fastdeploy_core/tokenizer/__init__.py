"""Text to token ids and back: tokenizer files, chat templates, streaming detokenization.

Built on the `tokenizers` library and a sandboxed jinja2; imports no tensor library.
"""

from .detokenizer import IncrementalDetokenizer
from .stop_strings import StopStringMatcher
from .tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer", "StopStringMatcher", "Tokenizer"]
