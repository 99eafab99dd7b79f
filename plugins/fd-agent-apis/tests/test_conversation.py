"""Where system texts stand, and how items become turns: on real templates."""

from __future__ import annotations

from typing import Any

import pytest
from fd_agent_apis.blocks import Blocks
from fd_agent_apis.conversation import Conversation, placed, shows_system_in_place
from fd_agent_apis.tools import MAX_NAME_CHARS, Tool, Tools, shown_name
from server_process import REPOSITORY

from fastdeploy_core.contracts.small import ParsedDelta, ToolCallDelta
from fastdeploy_core.tokenizer import Tokenizer

MODEL = REPOSITORY / "models" / "ernie-tiny"
TURN = "{{ '<|im_start|>' + m.role + '\n' + (m.content or '') + '<|im_end|>\n' }}"
END = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
FRONT_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system must be first') }}{% endif %}" + TURN + "{% endfor %}" + END
)
HOISTS = (
    "{% for m in messages if m.role == 'system' %}" + TURN + "{% endfor %}"
    "{% for m in messages if m.role != 'system' %}" + TURN + "{% endfor %}" + END
)
DROPS = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}" + TURN + "{% endif %}"
    "{% endfor %}" + END
)
TEMPLATES = {"own": None, "front only": FRONT_ONLY, "hoists": HOISTS, "drops": DROPS}


def tokenizer_with(name: str) -> Tokenizer:
    return Tokenizer.load(MODEL, chat_template=TEMPLATES[name])


@pytest.mark.parametrize(
    ("name", "expected"),
    [("own", True), ("front only", False), ("hoists", False), ("drops", False)],
)
def test_the_probe_finds_out_what_a_template_does(name: str, expected: bool) -> None:
    assert shows_system_in_place(tokenizer_with(name)) is expected


def conversation(num_turns: int) -> Conversation:
    """An agent's session: rules, a question, later rules, calls with more rules among them."""
    made = Conversation()
    made.system(["Be brief."])
    made.system(["The folder is a."])
    made.user(["First", "question"])
    made.system(["LATER"])
    for turn in range(num_turns):
        made.thought("I look.")
        made.call(f"c{turn}", "ls", "{}")
        made.call(f"d{turn}", "cat", '{"file": "a"}')
        made.system([f"BETWEEN {turn}"])
        made.result(f"c{turn}", ["a.txt"])
        made.result(f"d{turn}", ["text"])
        made.system([f"AFTER {turn}"])
    return made


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_turn_extends_the_prompt_before_it(name: str) -> None:
    """So that the prefix cache holds all of it; and nothing that was said is lost."""
    tokenizer = tokenizer_with(name)
    in_place = shows_system_in_place(tokenizer)
    before = ""
    for num_turns in range(4):
        messages = placed(conversation(num_turns).messages, in_place)
        prompt = str(tokenizer.apply_chat_template(messages, None, False))
        # the turn of the tools that is open is closed by its end mark only when the next begins
        assert prompt.startswith(before.removesuffix("<|im_end|>\n"))
        for text in ("Be brief.", "The folder is a.", "LATER", *_said(num_turns)):
            assert prompt.count(text) == 1
        before = prompt


def _said(num_turns: int) -> list[str]:
    return [f"{word} {turn}" for turn in range(num_turns) for word in ("BETWEEN", "AFTER")]


@pytest.mark.parametrize("in_place", [True, False])
def test_nothing_stands_between_calls_and_results(in_place: bool) -> None:
    messages = placed(conversation(2).messages, in_place)
    roles = [message["role"] for message in messages]
    assert roles[0] == "system"
    for number, role in enumerate(roles):
        if role == "assistant":
            assert roles[number + 1 : number + 3] == ["tool", "tool"]
    assert roles.count("system") == (4 if in_place else 1)
    assert "user" not in roles[2:]  # a new turn of the user would end the tools' turn


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        (["s", "u"], ["system:S", "user:U"]),
        (["u", "s"], ["user:U\n\nS"]),
        (["a", "s", "u"], ["assistant:A", "user:S\n\nU"]),
        (["u", "a", "s"], ["user:U", "assistant:A", "user:S"]),
        (["s", "s", "u", "s", "s"], ["system:S\n\nS", "user:U\n\nS\n\nS"]),
    ],
)
def test_where_a_text_goes_that_cannot_stand_alone(items: list[str], expected: list[str]) -> None:
    made = Conversation()
    add = {"s": lambda: made.system(["S"]), "u": lambda: made.user(["U"])}
    add["a"] = lambda: made.said("A")
    for item in items:
        add[item]()
    found = [f"{m['role']}:{m['content']}" for m in placed(made.messages, False)]
    assert found == expected


def test_parts_of_a_user_are_kept_apart() -> None:
    made = Conversation()
    made.user(["a", "b"])
    made.system(["S"])
    (message,) = placed(made.messages, False)
    assert [part["text"] for part in message["content"]] == ["a", "b", "\n\nS"]
    assert made.messages[0]["content"] == [{"type": "text", "text": t} for t in "ab"]


def test_names_fit_and_stay_apart() -> None:
    names = ["a" * 64, "a" * 65, "a" * 66, "tool with space", "tool_with_space", "ü", "ö"]
    shown = [shown_name(name) for name in names]
    assert len(set(shown)) == len(names) and max(map(len, shown)) <= MAX_NAME_CHARS
    assert all(name.isascii() for name in shown)
    tools = Tools()
    for name in names:
        tools.add(Tool(name), None, None)
    assert [tools.given(name).name for name in shown] == names
    assert tools.given("made up").name == "made up"


def test_blocks_do_not_depend_on_how_an_answer_is_cut() -> None:
    def pieces(size: int) -> list[Any]:
        said = [("reasoning", "why not"), ("content", "\n\n So. "), ("content", "\n")]
        return [
            ParsedDelta(**{kind: text[at : at + size]})
            for kind, text in said
            for at in range(0, len(text), size)
        ]

    found = []
    for size in (1, 2, 100):
        blocks = Blocks()
        steps = [step for piece in pieces(size) for step in blocks.add(piece)]
        steps += blocks.close()
        opened: list[int] = []
        for what, block, _ in steps:
            if what == "start":
                opened.append(block.index)
            assert opened[-1] == block.index  # nothing happens to a block after the next began
        assert [s[0] for s in steps].count("stop") == len(opened)
        found.append([(block.kind, block.text) for block in blocks.all])
    assert found[0] == found[1] == found[2] == [("thinking", "why not"), ("text", "\n\n So. \n")]


def test_space_between_calls_is_no_block() -> None:
    blocks = Blocks()
    for number in range(2):
        first = ToolCallDelta(index=number, id=f"c{number}", name="f", arguments="{")
        rest = ToolCallDelta(index=number, arguments="}")
        for piece in (
            ParsedDelta(content="\n", tool_calls=[first]),
            ParsedDelta(tool_calls=[rest]),
            ParsedDelta(content="\n"),
        ):
            list(blocks.add(piece))
    list(blocks.close())
    assert [(block.kind, block.text) for block in blocks.all] == [("call", "{}")] * 2
