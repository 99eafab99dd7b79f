"""A logits processor that forces the words of a script, for agents on a model without any skill:
each agent reads the file that its task names, changes a word in it, and says that it is done."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from fastdeploy_core.contracts.small import ProcessorContext
from fastdeploy_core.types import SamplingParams

TASK = "Write ready instead of draft in the file {path} please."
OLD, NEW = "draft", "ready"
CLOSING = "The file is ready."
TITLE = '{"title": "A file"}'
_FILE = re.compile(r"in the file (/\S+)")
_SHELL = f"sed -i s/{OLD}/{NEW}/ {{path}} && cat {{path}}"
# What an agent calls, one tool a turn, by a tool that no other agent has. {path}: of the file.
CALLS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "exec_command": [  # Codex
        ("exec_command", {"cmd": "cat {path}"}),
        ("exec_command", {"cmd": _SHELL}),
    ],
    "Bash": [  # Claude Code
        ("Read", {"file_path": "{path}"}),
        ("Edit", {"file_path": "{path}", "old_string": OLD, "new_string": NEW}),
    ],
    "run_shell_command": [  # Qwen Code
        ("read_file", {"file_path": "{path}"}),
        ("edit", {"file_path": "{path}", "old_string": OLD, "new_string": NEW}),
    ],
    "run_commands": [  # Cline
        ("read_files", {"files": [{"path": "{path}"}]}),
        ("editor", {"path": "{path}", "old_text": OLD, "new_text": NEW}),
    ],
    "bash": [  # opencode
        ("read", {"filePath": "{path}"}),
        ("edit", {"filePath": "{path}", "oldString": OLD, "newString": NEW}),
    ],
}
# aider has no tools: it reads changes from the text, and shows the file in the prompt.
CHANGES = "SEARCH/REPLACE"
CHANGE = f"{{path}}\n```\n<<<<<<< SEARCH\n{OLD}\n=======\n{NEW}\n>>>>>>> REPLACE\n```\n\n{CLOSING}"
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
        said = _answer(prompt)
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


def _answer(prompt: str) -> str:
    """What the script says next. Requests without tools ask for a title, but for aider's."""
    found = _FILE.search(prompt)
    if found is None:
        return TITLE
    calls = next((CALLS[name] for name in CALLS if f'"name": "{name}"' in prompt), None)
    if calls is None:
        return CHANGE.replace("{path}", found[1]) if CHANGES in prompt else TITLE
    done = prompt.count(f"{TURN}user\n<tool_response>")
    if done >= len(calls):
        return CLOSING
    name, arguments = calls[done]
    call = json.dumps({"name": name, "arguments": arguments}).replace("{path}", found[1])
    return f"<tool_call>\n{call}\n</tool_call>"
