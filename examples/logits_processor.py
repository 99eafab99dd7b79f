"""What you learn: change the model's scores with a class of your own, switched on per request.

python examples/logits_processor.py [model folder]
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastdeploy import LLM, SamplingParams
from fastdeploy_core.contracts.small import ProcessorContext
from fastdeploy_core.errors import InvalidRequest

DEMO = Path(__file__).resolve().parents[1] / "models" / "ernie-tiny"
MODEL = sys.argv[1] if len(sys.argv) > 1 else DEMO


class NeverTwice:
    """Forbids a token that the answer already has: logits_processors_args={"never_twice": true}."""

    arguments = frozenset({"never_twice"})  # others are refused

    def __init__(self, context: ProcessorContext) -> None:
        self.vocab_size = context.vocab_size

    def validate(self, params: SamplingParams) -> None:
        if not isinstance((params.logits_processors_args or {}).get("never_twice", False), bool):
            raise InvalidRequest("never_twice is true or false", param="logits_processors_args")

    def add(self, seq_id: int, params: SamplingParams, prompt_token_ids: np.ndarray) -> bool:
        """Whether this processor applies to the sequence."""
        return bool((params.logits_processors_args or {}).get("never_twice"))

    def remove(self, seq_id: int) -> None:
        """The sequence has ended; nothing was kept for it."""

    def apply(self, logits: Any, seq_ids: Sequence[int], output: Sequence[np.ndarray]) -> Any:
        """logits: one row for each sequence that `add` accepted."""
        for row, tokens in enumerate(output):
            for token in set(tokens):
                logits[row, token] = float("-inf")
        return logits


def main() -> None:
    """The same question with and without the processor, in one batch."""
    args = [None, {"never_twice": True}]
    params = [
        SamplingParams(temperature=0, max_tokens=24, logits_processors_args=each) for each in args
    ]
    with LLM(MODEL, logits_processors=["__main__:NeverTwice"]) as llm:
        for output in llm.generate(["one two one two one two"] * 2, params, use_tqdm=False):
            tokens = output.outputs[0].token_ids
            print(f"{output.outputs[0].text!r}: {len(tokens)} tokens, {len(set(tokens))} different")


if __name__ == "__main__":
    main()
