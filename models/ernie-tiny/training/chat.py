"""Write a sample as text, in pieces that say which of them the model has to produce itself.

This is the chat template once more, in Python: rendering millions of conversations through Jinja
would take longer than the training. `test_curriculum.py` holds the two against each other.
"""

from __future__ import annotations

from typing import NamedTuple

from curriculum.base import Message, Sample, dump

TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
TEXT_END = "</s>"


class Piece(NamedTuple):
    """A stretch of text; `target` when the model has to write it."""

    text: str
    target: bool


def _system(sample: Sample) -> str:
    """The system turn: the system prompt, the tool definitions, both, or nothing."""
    first = sample.messages[0]
    prompt = first["content"] if first["role"] == "system" else ""
    if not sample.tools:
        return f"{TURN_START}system\n{prompt}{TURN_END}\n" if prompt else ""
    lines = "".join(f"\n{dump(tool)}" for tool in sample.tools)
    return (
        f"{TURN_START}system\n"
        + (f"{prompt}\n\n" if prompt else "")
        + f"# Tools\n\nYou can call these functions:\n<tools>{lines}\n</tools>\n\n"
        + "To call a function, answer with its name and arguments:\n"
        + '<tool_call>\n{"name": <name>, "arguments": <arguments>}\n</tool_call>'
        + f"{TURN_END}\n"
    )


def _calls(message: Message) -> str:
    """The tool calls of an assistant message."""
    texts = [
        f'<tool_call>\n{{"name": "{call["function"]["name"]}", '
        f'"arguments": {dump(call["function"]["arguments"])}}}\n</tool_call>'
        for call in message.get("tool_calls", ())
    ]
    return ("\n" if message["content"] and texts else "") + "\n".join(texts)


def answer_text(message: Message, opened: bool = False) -> str:
    """What the model writes for an assistant message; `opened` if the prompt wrote `<think>`."""
    text = str(message["content"]) + _calls(message)
    if "reasoning_content" in message:
        text = f"{message['reasoning_content']}\n</think>\n\n{text}"
        return text if opened else f"<think>\n{text}"
    return text


def pieces(sample: Sample) -> list[Piece]:
    """The text of a sample, cut where the writer changes."""
    if not sample.messages:
        return [Piece(sample.prompt, False), Piece(sample.completion + TEXT_END, True)]
    result: list[Piece] = []
    waiting = _system(sample)
    last = len(sample.messages) - 1
    for at, message in enumerate(sample.messages):
        role = message["role"]
        if role == "user":
            waiting += f"{TURN_START}user\n{message['content']}{TURN_END}\n"
        elif role == "tool":
            response = f"<tool_response>\n{message['content']}\n</tool_response>"
            waiting += f"{TURN_START}user\n{response}{TURN_END}\n"
        elif role == "assistant":
            opened = sample.thinking and at == last
            waiting += f"{TURN_START}assistant\n" + ("<think>\n" if opened else "")
            result += [Piece(waiting, False), Piece(answer_text(message, opened) + TURN_END, True)]
            waiting = "\n"
    return [*result, Piece(waiting, False)]


def prompt_text(sample: Sample) -> str:
    """Everything before the last answer: what a model is given to judge it."""
    if not sample.messages:
        return sample.prompt
    return "".join(piece.text for piece in pieces(sample)[:-2])


def expected_text(sample: Sample) -> str:
    """The last answer, without the end-of-turn token."""
    if not sample.messages:
        return sample.completion
    return answer_text(sample.messages[-1], sample.thinking)
