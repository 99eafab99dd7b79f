"""A logits processor that forces the words of a script, for agents on a model without any skill:
a tool call first, then, once a tool has answered, a closing sentence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from fastdeploy_core.contracts.small import ProcessorContext
from fastdeploy_core.types import SamplingParams

COMMAND = "echo agent-ok > made.txt && cat made.txt"
CLOSING = "The file was made."
TITLE = '{"title": "A file"}'
# The tool of each agent that runs a command, with its arguments.
CALLS: dict[str, dict[str, Any]] = {
    "exec_command": {"cmd": COMMAND},
    "Bash": {"command": COMMAND, "description": "Make a file"},
}
TURN, END = "<|im_start|>", "<|im_end|>"


class Script:
    """Every sequence follows it."""

    def __init__(self, context: ProcessorContext) -> None:
        self._tokenizer = Tokenizer.from_file(context.tokenizer_json)
        self._forced: dict[int, list[int]] = {}

    def validate(self, params: SamplingParams) -> None:
        """It has no arguments."""

    def add(self, seq_id: int, params: SamplingParams, prompt_token_ids: np.ndarray) -> bool:
        prompt = self._tokenizer.decode(prompt_token_ids.tolist(), skip_special_tokens=False)
        last_turn = prompt.rsplit(TURN, 2)[-2]
        tool = next((name for name in CALLS if f'"name": "{name}"' in prompt), None)
        if "<tool_response>" in last_turn:
            said = CLOSING
        elif tool is None:
            said = TITLE
        else:
            call = json.dumps({"name": tool, "arguments": CALLS[tool]})
            said = f"<tool_call>\n{call}\n</tool_call>"
        if prompt.rstrip().endswith("<think>"):
            said = f"I see.\n</think>\n\n{said}"
        ids = self._tokenizer.encode(said + END, add_special_tokens=False).ids
        self._forced[seq_id] = ids
        return True

    def remove(self, seq_id: int) -> None:
        self._forced.pop(seq_id, None)

    def apply(
        self, logits: Any, seq_ids: Sequence[int], output_token_ids: Sequence[np.ndarray]
    ) -> Any:
        for row, (seq_id, output) in enumerate(zip(seq_ids, output_token_ids, strict=True)):
            forced = self._forced[seq_id]
            token = forced[min(len(output), len(forced) - 1)]
            logits[row : row + 1] = float("-inf")
            logits[row : row + 1, token : token + 1] = 0.0
        return logits
