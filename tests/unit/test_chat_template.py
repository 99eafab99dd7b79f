"""Chat templates: transformers' output, and limits that a request cannot get around."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_core.errors import ConfigError, InvalidRequest
from fastdeploy_core.tokenizer import Tokenizer, chat_template
from tests import hf_tokenizer_child, tokenizer_files

DEMO = Path(__file__).parents[2] / "models" / "ernie-tiny"
PLAIN = tokenizer_files.CHAT_TEMPLATE
RICH = """{{- bos_token }}
{%- if tools %}{{ '<tools>' }}
    {%- for tool in tools %}
{{ tool | tojson }}
    {%- endfor %}
{{ tools[0] | tojson(indent=2, sort_keys=true) }}
{% endif %}
{%- set ns = namespace(index=0, system='none') %}
{%- set box = dict(a=1) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% set ns.system = message.content %}{% continue %}{% endif %}
    {%- if message.role not in ('user', 'assistant', 'tool') %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
    {{- '[' ~ ns.index ~ ' ' ~ message.role ~ '] ' }}
    {%- if message.reasoning_content %}
        {{- '<think>' + message.reasoning_content + '</think>' }}
    {%- endif %}
    {%- generation %}{{ message.content | trim if message.content else '' }}{% endgeneration %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n' + call.function.name + ' ' + (call.function.arguments | tojson) }}
    {%- endfor %}
    {{- eos_token + '\\n' }}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- ns.system ~ box.a }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think></think>' }}{% endif %}
{%- for i in range(10) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}
{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif %}
"""
PARTS = """{%- for m in messages %}{{ m.role }}:
{%- if m.content is string %}{{ m.content }}{% else %}
{%- for part in m.content %}{% if part.type == 'text' %}<{{ part.text }}>{% endif %}{% endfor %}
{%- endif %}{%- endfor %}"""
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "be <b>brief</b> & 'kind'"},
    {"role": "user", "content": " What is 你好? "},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "look it up",
        "tool_calls": [
            {
                "type": "function",
                "function": {"name": "look", "arguments": {"word": "你好", "n": 1}},
            }
        ],
    },
    {"role": "tool", "content": '{"meaning": "hello"}'},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": '查 <it> up & "quote"',
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
IN_PARTS = [{"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b c ")]}]
LAST = [*TALK, {"role": "assistant", "content": "It means hel"}]
SPACED = [*TALK, {"role": "assistant", "content": "It means "}]
CASES: list[tuple[str, dict[str, Any]]] = [
    (PLAIN, {"messages": TALK[:2], "add_generation_prompt": True}),
    (PLAIN, {"messages": LAST, "add_generation_prompt": False}),
    (PARTS, {"messages": [*IN_PARTS, *TALK[:2]], "add_generation_prompt": False}),
    (
        PARTS,
        {"messages": IN_PARTS, "add_generation_prompt": False, "continue_final_message": True},
    ),
    (RICH, {"messages": TALK, "add_generation_prompt": True}),
    (RICH, {"messages": TALK, "tools": [TOOL], "add_generation_prompt": True}),
    (
        RICH,
        {
            "messages": TALK,
            "add_generation_prompt": True,
            "template_kwargs": {"enable_thinking": False},
        },
    ),
    (
        PLAIN,
        {"messages": LAST, "add_generation_prompt": False, "continue_final_message": True},
    ),
    (
        RICH,
        {"messages": SPACED, "add_generation_prompt": False, "continue_final_message": True},
    ),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("templates")
    return {
        source: tokenizer_files.write(root / name, "byte_level", {"chat_template": source})
        for name, source in (("plain", PLAIN), ("rich", RICH), ("parts", PARTS))
    }


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path]) -> Tokenizer:
    return Tokenizer.load(folders[PLAIN])


@pytest.fixture(scope="module")
def rich(folders: dict[str, Path]) -> Tokenizer:
    return Tokenizer.load(folders[RICH])


def test_prompts_equal_those_of_transformers(folders: dict[str, Path]) -> None:
    jobs = [{"path": str(folders[source]), **case} for source, case in CASES]
    expected = hf_tokenizer_child.ask("render", jobs)
    for (source, case), prompt in zip(CASES, expected, strict=True):
        assert Tokenizer.load(folders[source]).apply_chat_template(**case) == prompt


def test_arguments_given_as_json_text_render_as_objects(rich: Tokenizer) -> None:
    as_text = [dict(message) for message in TALK]
    call = {"function": {"name": "look", "arguments": '{"word": "你好", "n": 1}'}}
    as_text[2]["tool_calls"] = [call]
    assert rich.apply_chat_template(as_text) == rich.apply_chat_template(TALK)
    for broken, read in (("{", "{"), ("[1]", [1]), ('"text"', "text"), ("[" * 10**5, "[" * 10**5)):
        call["function"]["arguments"] = broken  # as a model may write them
        assert json.dumps({"input": read})[1:-1] in rich.apply_chat_template(as_text)
    assert as_text[2]["tool_calls"] == [call]  # the caller's messages are not changed


def test_a_turn_of_thinking_alone_has_no_text() -> None:
    """A template that writes content as it is would write "None"."""
    (turn,) = chat_template.prepare_messages([{"role": "assistant", "content": None}])
    assert turn["content"] == ""


def test_text_parts_are_joined_and_other_parts_refused(plain: Tokenizer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    assert "a\nb" in plain.apply_chat_template([{"role": "assistant", "content": parts}])
    image = [{"type": "image_url", "image_url": {"url": "http://x"}}]
    with pytest.raises(InvalidRequest, match=r"image_url.*takes text"):
        plain.apply_chat_template([{"role": "user", "content": image}])


@pytest.mark.parametrize("name", ["reasoning", "thinking", "reasoning_content", "thoughts"])
def test_earlier_thinking_is_found_under_each_name(rich: Tokenizer, name: str) -> None:
    prompt = rich.apply_chat_template([{"role": "assistant", "content": "x", name: "deep"}])
    assert "<think>deep</think>x" in prompt


@pytest.mark.parametrize("thought", ["deep", [{"type": "text", "text": "de"}, "ep"]])
def test_parts_of_thinking_are_shown_as_thinking(rich: Tokenizer, thought: Any) -> None:
    """As the clients of Mistral and Anthropic give an answer back."""
    parts = [{"type": "thinking", "thinking": thought}, {"type": "text", "text": "x"}]
    assert "<think>deep</think>x" in rich.apply_chat_template(
        [{"role": "assistant", "content": parts}]
    )
    assert parts[0]["thinking"] is thought  # the caller's messages are not changed
    with pytest.raises(InvalidRequest, match="thinking"):
        rich.apply_chat_template([{"role": "user", "content": parts}])
    with pytest.raises(InvalidRequest, match=r"messages\[0\].content\[0\]"):
        rich.apply_chat_template([{"role": "assistant", "content": [{"type": "thinking"}]}])


@pytest.mark.parametrize(
    "messages",
    ["hi", {}, [], ["hi"], [{}], [{"role": 1}], [{"role": "user", "content": 3}], None, 7],
)
def test_malformed_messages_are_refused(plain: Tokenizer, messages: Any) -> None:
    with pytest.raises(InvalidRequest):
        plain.apply_chat_template(messages)


def test_what_the_template_raises_reaches_the_client(rich: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="unknown role robot"):
        rich.apply_chat_template([{"role": "robot", "content": "x"}])


@pytest.mark.parametrize(
    "name", ["chat_template", "tokenize", "messages", "add_generation_prompt", "raise_exception"]
)
def test_kwargs_cannot_name_internal_arguments(plain: Tokenizer, name: str) -> None:
    talk = [{"role": "user", "content": "x"}]
    with pytest.raises(InvalidRequest, match=name):
        plain.apply_chat_template(talk, template_kwargs={name: True})
    with pytest.raises(InvalidRequest, match=name):  # nor with a template of the request's own
        plain.apply_chat_template(talk, template_kwargs={name: True}, chat_template="x")


def test_kwargs_are_those_the_template_reads(
    plain: Tokenizer, rich: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    talk = [{"role": "user", "content": "x"}]
    with pytest.raises(InvalidRequest, match=r"did you mean .enable_thinking"):
        plain.apply_chat_template(talk, template_kwargs={"enable_thinkin": False})
    chat_template._unread.clear()
    for _ in range(2):  # as FastDeploy 2.x's documents print it; vLLM leaves it out, too
        shown = plain.apply_chat_template(talk, template_kwargs={"custom_var": "value"})
        assert shown == plain.apply_chat_template(talk)
    assert caplog.text.count("chat_template_kwargs.custom_var has no effect") == 1
    for odd in ("_x", "a b", "__class__", ""):
        with pytest.raises(InvalidRequest, match="malformed name"):
            rich.apply_chat_template(talk, template_kwargs={odd: 1})
    with pytest.raises(InvalidRequest, match="at most"):
        rich.apply_chat_template(talk, template_kwargs={f"a{i}": 1 for i in range(99)})
    # A common switch may be sent to a template that does not know it.
    assert plain.apply_chat_template(talk, template_kwargs={"enable_thinking": True})


def test_objects_with_methods_do_not_reach_a_template(rich: Tokenizer) -> None:
    talk = [{"role": "user", "content": "x"}]
    with pytest.raises(InvalidRequest, match="plain data"):
        rich.apply_chat_template(talk, template_kwargs={"enable_thinking": Path("/")})
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="deeper"):
        rich.apply_chat_template([{"role": "user", "content": "x", "extra": deep}])


def test_a_model_without_a_template_takes_no_messages(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tokenizer_files.write(tmp_path, "byte_level"))
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
    given = Tokenizer.load(tmp_path, chat_template="{{ messages[0].content }}")
    assert given.apply_chat_template([{"role": "user", "content": "x"}]) == "x"
    with pytest.raises(ConfigError, match="malformed"):
        Tokenizer.load(tmp_path, chat_template="{% if %}")


def test_the_template_file_wins_and_tools_may_have_their_own(tmp_path: Path) -> None:
    templates = [
        {"name": "default", "template": "inline"},
        {"name": "tool_use", "template": "tools"},
    ]
    folder = tokenizer_files.write(tmp_path, "byte_level", {"chat_template": templates})
    talk = [{"role": "user", "content": "x"}]
    assert Tokenizer.load(folder).apply_chat_template(talk) == "inline"
    assert Tokenizer.load(folder).apply_chat_template(talk, [TOOL]) == "tools"
    (folder / "chat_template.jinja").write_text("file")
    assert Tokenizer.load(folder).apply_chat_template(talk) == "file"


def test_the_models_own_template_has_an_output_limit(tmp_path: Path) -> None:
    folder = tokenizer_files.write(tmp_path, "byte_level")
    endless = "{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}"
    tokenizer = Tokenizer.load(folder, chat_template=endless)
    assert len(tokenizer.apply_chat_template([{"role": "user", "content": "x"}])) == 99999
    with pytest.raises(InvalidRequest, match="exceeds"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x" * 100}])


def test_time_comes_from_the_clock(plain: Tokenizer) -> None:
    talk = [{"role": "user", "content": "x"}]
    shown = plain.apply_chat_template(talk, chat_template="{{ strftime_now('%Y') }}")
    assert int(shown) >= 2024


def test_names_that_are_ours_are_all_reserved() -> None:
    rendered_with = {"messages", "tools", "documents", "add_generation_prompt"}
    assert rendered_with <= chat_template.RESERVED_NAMES
    assert (
        set(chat_template.environment().globals)
        - {
            "cycler",
            "joiner",
            "lipsum",
            "range",
        }
        <= chat_template.RESERVED_NAMES
    )


MIXED = """{% if messages[0].role == 'system' %}S:{{ messages[0].content + '!' }}{% endif %}
{%- for m in messages if m.role == 'user' %}U:
{%- for part in m.content %}<{{ part.text }}>{% endfor %}{% endfor %}
{%- for m in messages if m.role == 'tool' %}T:{{ '/' ~ m.content.split('b')[0] }}{% endfor %}"""


def test_parts_read_as_text_where_a_template_treats_them_as_text(tmp_path: Path) -> None:
    tokenizer_files.write(tmp_path, "byte_level")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    talk = [{"role": role, "content": parts} for role in ("system", "user", "tool")]
    mixed = Tokenizer.load(tmp_path, chat_template=MIXED)
    assert mixed.apply_chat_template(talk) == "S:a\nb!U:<a><b>T:/a\n"
    demo = Tokenizer.load(DEMO)
    as_text = [{"role": "system", "content": "a\nb"}, {"role": "user", "content": "ab"}]
    assert demo.apply_chat_template(talk[:2]) == demo.apply_chat_template(as_text)


def test_a_role_that_the_template_does_not_know_is_not_left_out(tmp_path: Path) -> None:
    demo = Tokenizer.load(DEMO)
    user = {"role": "user", "content": "x"}
    for given, usual in (("developer", "system"), ("function", "tool")):
        talk = [[{"role": role, "content": "secret word"}, user] for role in (given, usual)]
        assert demo.apply_chat_template(talk[0]) == demo.apply_chat_template(talk[1])
        assert "secret word" in demo.apply_chat_template(talk[0])
    knows = "{% for m in messages %}{% if m.role in ('developer', 'user') %}{{ m.role }}"
    tokenizer_files.write(tmp_path, "byte_level")
    tokenizer = Tokenizer.load(tmp_path, chat_template=knows + "{% endif %}{% endfor %}")
    assert tokenizer.apply_chat_template([{**user, "role": "developer"}]) == "developer"
