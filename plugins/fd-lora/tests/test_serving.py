"""A server of its own process and the openai client: adapters by name, loaded and unloaded."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from engines import engine, lora, tokens_of, write_adapter

from fastdeploy_core.types import SamplingParams
from tests.server_process import REPOSITORY, ServerProcess, serving

MODEL = REPOSITORY / "models" / "ernie-tiny"
ATTENTION = {
    f"model.layers.{layer}.self_attn.{name}": size
    for layer in range(8)
    for name, size in (("q_proj", (256, 256)), ("v_proj", (256, 128)), ("o_proj", (256, 256)))
}
PROMPT = list(range(40, 75))  # more than two blocks, which the prefix cache keeps
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("first", "second", "third")):
        write_adapter(folder, name, ATTENTION, seed=seed)
    return folder


@pytest.fixture(scope="module")
def answers(root: Path, fd_tensor: str) -> dict[str | None, list[int]]:
    """Tokens of the prompt by adapter, of an engine in this process."""
    found: dict[str | None, list[int]] = {}
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with engine(MODEL, fd_tensor, max_loras=3, block_size=16) as llm:
        for name in (None, "first", "second", "third"):
            out = llm.generate([PROMPT], params, use_tqdm=False, lora_request=lora(root, name))
            assert isinstance(out, list)
            (found[name],) = tokens_of(out)
    assert len({tuple(tokens) for tokens in found.values()}) == 4
    return found


@pytest.fixture(scope="module")
def server(root: Path, fd_tensor: str) -> Iterator[ServerProcess]:
    with serving(
        MODEL,
        *("--tensor-library", fd_tensor, "--max-model-len", "128", "--block-size", "16"),
        *("--dtype", "float32", "--num-gpu-blocks-override", "96", "--served-model-name", "base"),
        *("--enable-lora", "--lora-modules", f"first={root / 'first'}", "--max-loras", "2"),
        *("--lora-root", str(root)),
    ) as process:
        yield process


@pytest.fixture(scope="module")
def api(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(api: openai.OpenAI, model: str) -> list[int]:
    more = {"ignore_eos": True, "return_token_ids": True}
    answer = api.completions.create(
        model=model, prompt=PROMPT, temperature=0, max_tokens=NUM_TOKENS, extra_body=more
    )
    assert answer.model == model
    return list(answer.choices[0].token_ids)  # type: ignore[attr-defined]


def post(server: ServerProcess, route: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{route}_lora_adapter", json=body, timeout=60)


def test_a_name_chooses_an_adapter(
    api: openai.OpenAI, root: Path, answers: dict[str | None, list[int]]
) -> None:
    cards = {card.id: card.model_dump() for card in api.models.list()}
    assert list(cards) == ["base", "first"]
    assert (cards["base"]["parent"], cards["base"]["root"]) == (None, "base")
    assert (cards["first"]["parent"], cards["first"]["root"]) == ("base", str(root / "first"))
    assert api.models.retrieve("first").id == "first"
    for _ in range(2):  # the second time from the prefix cache
        assert ask(api, "first") == answers["first"]
        assert ask(api, "base") == answers[None]


@pytest.mark.parametrize("model", ["third", "First", "first@1"])
def test_an_unknown_name_is_answered_with_those_there_are(api: openai.OpenAI, model: str) -> None:
    for call in (
        lambda: ask(api, model),
        lambda: api.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "x"}]
        ),
        lambda: api.models.retrieve(model),
    ):
        with pytest.raises(openai.NotFoundError, match="There are: base, first"):
            call()


def test_adapters_come_and_go(
    server: ServerProcess, api: openai.OpenAI, root: Path, answers: dict[str | None, list[int]]
) -> None:
    assert post(server, "load", lora_name="it", lora_path="second").json()["status"] == "loaded"
    assert ask(api, "it") == answers["second"]
    assert "it" in [card.id for card in api.models.list()]
    refused = post(server, "load", lora_name="it", lora_path=str(root / "third"))
    assert (refused.status_code, "load_inplace" in refused.text) == (400, True)
    assert ask(api, "it") == answers["second"]
    # Nothing of the other files that had this name stays, in the prefix cache or elsewhere.
    path = str(root / "third")
    assert post(server, "load", lora_name="it", lora_path=path, load_inplace=True).is_success
    assert ask(api, "it") == answers["third"]
    assert post(server, "unload", lora_name="it").is_success
    with pytest.raises(openai.NotFoundError, match="There are: base, first"):
        ask(api, "it")
    assert post(server, "unload", lora_name="it").status_code == 404
    assert post(server, "unload", lora_name="base").status_code == 400


def test_what_cannot_be_used_is_refused_and_not_listed(
    server: ServerProcess, api: openai.OpenAI, root: Path
) -> None:
    one = {"model.layers.1.self_attn.q_proj": (256, 256)}
    write_adapter(root, "head", {"lm_head": (256, 3072)})
    write_adapter(root, "experts", {"model.layers.1.mlp.experts.0.up_proj": (256, 128)})
    write_adapter(root, "wide", {"model.layers.1.self_attn.q_proj": (256, 512)})
    write_adapter(root, "rank", one, rank=17)
    write_adapter(root, "dora", one)
    config = root / "dora" / "adapter_config.json"
    config.write_text(config.read_text()[:-1] + ', "use_dora": true}')
    cases = {
        "head": "embedding and head", "experts": "routed experts", "wide": "another model",
        "rank": "--max-lora-rank 16", "dora": "use_dora", "none": "no adapter in",
        "../elsewhere": "--lora-root", "/etc": "--lora-root",
    }  # fmt: skip
    for path, words in cases.items():
        answer = post(server, "load", lora_name="bad", lora_path=path)
        assert (answer.status_code, words in answer.text) == (400, True), answer.text
    assert post(server, "load", lora_name="base", lora_path="second").status_code == 400
    assert [card.id for card in api.models.list()] == ["base", "first"]


@pytest.mark.slow
def test_adapters_come_and_go_under_load(
    server: ServerProcess, api: openai.OpenAI, answers: dict[str | None, list[int]]
) -> None:
    """More adapters than slots, one of them loaded and unloaded again and again: every answer is
    that of its own adapter."""
    named: dict[str, str | None] = {"base": None, "first": "first", "kept": "second"}
    assert post(server, "load", lora_name="kept", lora_path="second").is_success
    with ThreadPoolExecutor(4) as pool:
        pending = [(name, pool.submit(ask, api, name)) for name in [*named] * 12]
        for _ in range(6):
            assert post(server, "load", lora_name="passing", lora_path="third").is_success
            assert ask(api, "passing") == answers["third"]
            assert post(server, "unload", lora_name="passing").is_success
        for name, tokens in pending:
            assert tokens.result() == answers[named[name]]
    assert post(server, "unload", lora_name="kept").is_success
