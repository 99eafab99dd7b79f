"""Chat templates of requests: limits that none of them can get around."""

from __future__ import annotations

import json
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from fd_agent_apis import request_templates

from fastdeploy_core.errors import InvalidRequest
from fastdeploy_core.tokenizer import Tokenizer

# A busy machine must not change which limit is met first.
patient = partial(request_templates.render_in_child, limit_s=30)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "x": 1}, "x"))
    backend.add_special_tokens(["</s>"])
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "</s>", "chat_template": "{{ messages[0].content }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(folder)


def test_a_requests_template_renders_in_the_child(plain: Tokenizer) -> None:
    source = "{{ eos_token }}{{ messages[0].content }}{{ {'é': 1} | tojson }}"
    talk = [{"role": "user", "content": "你好"}]
    prompt = plain.apply_chat_template(talk, chat_template=source, render=patient)
    assert prompt == '</s>你好{"é": 1}'


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ 'a' * 2000000000 }}", "memory|limit|time|exceeds"),
        ("{% for i in range(99999) %}{{ 'a' * 100 }}{% endfor %}", "exceeds"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "sandbox|undefined"),
        ("{{ messages.append(1) }}", "sandbox|failed"),
        ("{{ namespace(_x=1) }}", "sandbox"),
        ("{{ 1 / 0 }}", "failed"),
        ("{{ nothing.at.all }}", "refuses"),
        ("{% include 'x' %}", "refuses|failed|malformed"),
        ("{% if %}", "malformed"),
        ("{{ raise_exception('nope') }}", "nope"),
        ("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", "malformed|memory"),
        ("x" * 70_000, "at most"),
    ],
)
def test_hostile_templates_end_their_own_request(
    plain: Tokenizer, source: str, reason: str
) -> None:
    talk = [{"role": "user", "content": "x"}]
    with pytest.raises(InvalidRequest, match=reason):
        plain.apply_chat_template(talk, chat_template=source, render=patient)


def test_a_template_that_takes_too_long_is_killed() -> None:
    loops = "{% for i in range(90000) %}" * 3 + "{% set x = i * i %}"
    source = loops + "{% endfor %}" * 3
    with pytest.raises(InvalidRequest, match=r"longer than 0\.2 s"):
        request_templates.render_in_child(source, {}, limit_s=0.2)


def test_the_child_gets_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FD_API_KEY", "secret")
    environments = []
    real = subprocess.Popen

    def start(*args: Any, **kwargs: Any) -> Any:
        environments.append(kwargs["env"])
        return real(*args, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", start)
    assert request_templates.render_in_child("ok", {}, limit_s=30) == "ok"
    assert len(environments) == 1
    assert "FD_API_KEY" not in environments[0]
