"""Fuzzers of every parser of bytes from outside: each gives a value or its own error, whatever it
reads.

Damaged GGUF files: tests/cpu/test_gguf_damage.py. HTTP heads: tests/server/test_http_protocol.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastdeploy_core.config.model import read_model_config
from fastdeploy_core.engine.processes import wire
from fastdeploy_core.errors import ConfigError, InvalidRequest, WeightError
from fastdeploy_core.loading.weights import _parse_header
from fastdeploy_core.serving.http.errors import ApiError
from fastdeploy_core.serving.http.json_body import parse_json
from fastdeploy_core.tokenizer import Tokenizer
from fastdeploy_core.tokenizer.chat_template import ChatTemplate, TemplateRefusal, prepare_messages
from tests.null_engine import make_request
from tests.server_support import write_tokenizer

# A fuzzer runs so many examples in every run, and so many in session `slow`.
FEW, MANY = 60, 2000
EXAMPLES = [FEW, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]

NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, 1, -1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63)]),
    st.floats(),
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8))
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["a", "type", "content", "name", "0"]), inner, max_size=3)
    ),
    max_leaves=12,
)


def fuzz(count: int, check: Callable[..., None], *given_: Any) -> None:
    """Run a check on so many examples; the same ones each time."""
    rules = settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    rules(given(*given_)(check))()


@st.composite
def damaged(draw: Any, document: Any) -> Any:
    """The document with one to three of its values, at any depth, replaced or removed."""
    found = json.loads(json.dumps(document))
    for _ in range(draw(st.integers(1, 3))):
        node, parent, key = found, None, None
        while isinstance(node, dict | list) and node and (parent is None or draw(st.booleans())):
            keys = sorted(node) if isinstance(node, dict) else range(len(node))
            parent, key = node, draw(st.sampled_from(keys))
            node = node[key]
        if parent is None:
            return draw(VALUES)
        if draw(st.integers(0, 4)):
            parent[key] = draw(VALUES)
        else:
            del parent[key]
    return found


@st.composite
def broken(draw: Any, data: bytes) -> bytes:
    """The bytes with a few of them changed, doubled or cut off."""
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        piece = draw(st.binary(max_size=4))
        kind = draw(st.sampled_from(["change", "change", "insert", "cut", "double"]))
        if kind == "change":
            data = data[:at] + piece + data[at + len(piece) :]
        elif kind == "insert":
            data = data[:at] + piece + data[at:]
        elif kind == "cut":
            data = data[:at]
        else:
            data += data[at:]
    return data


BODY = {
    "model": "m",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hé\u2028 \\"}]}],
    "temperature": 0.5e-3,
    "stop": ["\n", "x"],
    "logit_bias": {"5": -1},
    "n": 12345678901234567,
}


def equal(one: Any, other: Any) -> bool:
    """Equal, numbers also in their kind."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


@pytest.mark.parametrize("count", EXAMPLES)
def test_http_bodies(count: int) -> None:
    """What is taken is what Python's own parser reads, and can be written again."""
    plain = json.dumps(BODY, ensure_ascii=False).encode()

    def check(raw: bytes) -> None:
        try:
            value = parse_json(raw)
        except ApiError as error:
            assert error.status == 400
            assert "\n" not in error.message
            return
        assert equal(value, json.loads(raw))
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()

    whole = damaged(BODY).map(lambda value: json.dumps(value).encode())
    fuzz(count, check, st.one_of(broken(plain), whole, whole.flatmap(broken), st.binary()))


PIECES = (
    *(
        "{% for m in messages %}",
        "{% endfor %}",
        "{{ m.role }}",
        "{{ m['content'] }}",
        "{% if x %}",
    ),
    *(
        "{% else %}",
        "{% endif %}",
        "{{ messages | tojson }}",
        "{% set x = messages %}",
        "{{ x.y.z }}",
    ),
    *(
        "{% generation %}",
        "{% endgeneration %}",
        "{% macro f(a) %}",
        "{% endmacro %}",
        "{{ f(1) }}",
    ),
    *("{{ namespace(a=1).a }}", "{{ ''.__class__ }}", "{{ x | attr('__init__') }}", "{{ 1 // 0 }}"),
    *(
        "{{ raise_exception('no') }}",
        "{{ strftime_now('%Y') }}",
        "{{ 'a' * 9 }}",
        "{% raw %}",
        "\x00",
    ),
    *(
        "{{ messages[0].content[-1] }}",
        "{{ messages[99] }}",
        "{{ cycler.__init__ }}",
        "{% break %}",
    ),
    *(
        "{{ dict(a=1).a }}",
        "{{ lipsum() }}",
        "{% include 'x' %}",
        "{% import 'x' as y %}",
        "{{",
        "%}",
    ),
    *("{{ range(10) | list }}", "{{ '%s' % messages }}", "{{ '{0.role}'.format(x) }}", "text"),
)
MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "42"},
]


@pytest.mark.parametrize("count", EXAMPLES)
def test_chat_templates(count: int) -> None:
    def check(pieces: list[str], extra: Any) -> None:
        try:
            template = ChatTemplate("".join(pieces))
            text = template.render({"messages": MESSAGES, "x": extra})
        except TemplateRefusal:
            return
        assert isinstance(text, str)
        assert "<class" not in text and "<function" not in text, "something of Python's was shown"

    pieces = st.lists(st.sampled_from(PIECES), max_size=8)
    fuzz(count, check, pieces, VALUES)


@pytest.mark.parametrize("count", EXAMPLES)
def test_messages(count: int) -> None:
    def check(messages: Any) -> None:
        if not isinstance(messages, list):
            return  # the request's model refuses it before
        try:
            prepared = prepare_messages(messages)
        except InvalidRequest:
            return
        assert len(prepared) == len(messages)

    fuzz(count, check, damaged(MESSAGES))


HEADER: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "c": {"dtype": "U8", "shape": [], "data_offsets": [32, 33]},
}


ITEM_BYTES = {
    **{"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "I8": 1, "U8": 1},
    **{"F8_E4M3": 1, "F8_E5M2": 1, "BOOL": 1},
}


@pytest.mark.parametrize("count", EXAMPLES)
def test_safetensors_headers(count: int) -> None:
    """No accepted entry reaches beyond the data, and none has other than its own bytes."""
    plain = json.dumps(HEADER).encode()

    def check(raw: bytes) -> None:
        try:
            entries = _parse_header(Path("f"), raw, 33)
        except WeightError:
            return
        for entry in entries.values():
            assert 0 <= entry.start <= entry.stop <= 33
            assert entry.stop - entry.start == math.prod(entry.shape) * ITEM_BYTES[entry.dtype]

    assert set(_parse_header(Path("f"), plain, 33)) == {"a", "b", "c"}
    data = len(plain).to_bytes(8, "little") + plain + bytes(33)
    assert {name for name, _ in safetensors.deserialize(data)} == {"a", "b", "c"}
    whole = damaged(HEADER).map(lambda value: json.dumps(value).encode())
    fuzz(count, check, st.one_of(whole, broken(plain)))


TOKENIZER_FILES: dict[str, Any] = {
    "tokenizer_config.json": {
        "eos_token": {"content": "<eos>", "special": True},
        "chat_template": "{{ messages }}",
        "added_tokens_decoder": {"258": {"content": "<new>", "lstrip": False, "special": True}},
        "additional_special_tokens": ["<a>", {"content": "<b>"}],
        "split_special_tokens": False,
    },
    "special_tokens_map.json": {"eos_token": "<eos>", "pad_token": {"content": "<eos>"}},
    "generation_config.json": {"eos_token_id": [256]},
    "chat_template.json": {"chat_template": "{{ messages }}"},
}


@pytest.mark.parametrize("count", EXAMPLES)
def test_tokenizer_files(count: int, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    whole = (tmp_path / "tokenizer.json").read_bytes()

    def check(documents: dict[str, bytes]) -> None:
        for name, data in documents.items():
            (tmp_path / name).write_bytes(data)
        try:
            tokenizer = Tokenizer.load(tmp_path)
            assert all(token >= 0 for token in tokenizer.encode("hi"))
        except ConfigError as error:
            assert str(tmp_path) in str(error), "it does not say which file"

    def of(name: str) -> st.SearchStrategy[bytes]:
        document = TOKENIZER_FILES[name]
        written = damaged(document).map(lambda value: json.dumps(value).encode())
        return st.one_of(written, broken(json.dumps(document).encode()))

    some = {name: of(name) for name in TOKENIZER_FILES}
    rest = {"tokenizer.json": st.one_of(st.just(whole), broken(whole))}
    fuzz(count, check, st.fixed_dictionaries({}, optional={**some, **rest}))


CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 4096,
    "rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 512},
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "text_config": {"hidden_size": 64},
    "vocab_size": 64,
}


@pytest.mark.parametrize("count", EXAMPLES)
def test_model_configurations(count: int, tmp_path: Path) -> None:
    plain = json.dumps(CONFIG).encode()

    def check(data: bytes, generation: bytes) -> None:
        (tmp_path / "config.json").write_bytes(data)
        (tmp_path / "generation_config.json").write_bytes(generation)
        try:
            config = read_model_config(tmp_path)
        except ConfigError as error:
            assert str(error)
            return
        assert config.max_model_len > 0

    whole = damaged(CONFIG).map(lambda value: json.dumps(value).encode())
    sampling = damaged({"top_p": 0.5, "eos_token_id": [3]}).map(lambda v: json.dumps(v).encode())
    fuzz(count, check, st.one_of(whole, broken(plain)), sampling)


@pytest.mark.parametrize("count", EXAMPLES)
def test_messages_between_processes(count: int) -> None:
    """Whatever decodes is of the declared types; all else is an error of the decoder."""
    request = make_request(
        "r", [5, 6, 7], temperature=1.0, n=2, logit_bias={5: 1.0}, stop_token_ids=[9]
    )
    messages: list[Any] = [wire.Put(request, 1), wire.Abort(["r", "s"]), wire.AskStats(3, 1)]
    decode = wire.decoder(wire.ToEngine).decode

    def check(data: bytes) -> None:
        try:
            message = decode(data)
        except wire.UNREADABLE:
            return
        wire.encode(message)
        if isinstance(message, wire.Put):
            assert all(type(token) is int for token in message.request.prompt_token_ids)

    encoded = [wire.encode(message) for message in messages]
    fuzz(count, check, st.one_of(*map(broken, encoded), st.binary(max_size=64)))
