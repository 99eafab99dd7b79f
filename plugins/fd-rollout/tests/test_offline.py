"""LLM(enable_rollout=True) on either tensor library: what is the same after sleep, and what new
weights change."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint import MODEL, PROMPTS, ROOM, changed, tensors, write
from fd_rollout.trainer import WeightServer

from fastdeploy import LLM, SamplingParams
from fastdeploy_core.errors import ConfigError, FastDeployError, Unavailable

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def llm(fd_tensor: str) -> Iterator[LLM]:
    with LLM(MODEL, tensor_library=fd_tensor, enable_rollout=True, **ROOM) as made:
        yield made


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "other", changed(1.3))


def ask(llm: LLM) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities, without help from the prefix cache."""
    llm.reset_prefix_cache()
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    found = []
    for output in outputs:
        answer = output.outputs[0]
        chances = [
            entry[t].logprob for t, entry in zip(answer.token_ids, answer.logprobs, strict=True)
        ]
        found.append((list(answer.token_ids), chances))
    return found


def test_answers_after_sleep_are_bit_by_bit_the_same(llm: LLM) -> None:
    before = ask(llm)
    for level in (0, 1, 2):
        llm.sleep(level)
        assert llm.is_sleeping() == (level > 0)
        with pytest.raises(Unavailable, match="wake_up"):
            ask(llm)
        assert llm.sleep(level)["status"] == ("asleep" if level else "paused")  # twice is once
        assert llm.wake_up()["status"] == "running"
        assert ask(llm) == before


def test_a_pause_that_was_asked_for_outlives_sleep(llm: LLM) -> None:
    llm.pause()
    llm.sleep(1)
    with pytest.raises(ConfigError, match="wake_up comes before resume"):
        llm.resume()
    assert llm.wake_up(["weights"])["asleep"] == ["kv_cache"]
    assert llm.wake_up()["status"] == "paused"
    assert llm.resume()["status"] == "running"


def test_new_weights_answer_as_in_an_engine_of_their_own(
    llm: LLM, other: Path, fd_tensor: str
) -> None:
    before = ask(llm)
    with LLM(other, tensor_library=fd_tensor, **ROOM) as fresh:
        expected = ask(fresh)
    assert expected != before
    llm.generate(PROMPTS, PARAMS, use_tqdm=False)  # fills the prefix cache with old keys
    assert llm.update_weights(str(other), version="step-1")["weight_version"] == "step-1"
    assert llm.weight_version() == "step-1"
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [list(o.outputs[0].token_ids) for o in outputs] == [tokens for tokens, _ in expected]
    assert [output.num_cached_tokens for output in outputs] == [0] * len(PROMPTS)
    assert ask(llm) == expected
    llm.sleep(2)  # the weights are read again from where they came last
    llm.wake_up()
    assert ask(llm) == expected
    llm.update_weights(str(MODEL))
    assert ask(llm) == before


@pytest.mark.parametrize("wrong", ["none", "missing", "shape", "unknown", "cut"])
def test_an_update_that_fails_changes_nothing(llm: LLM, tmp_path: Path, wrong: str) -> None:
    before, weights = ask(llm), changed(1.05)
    name = next(name for name in weights if name.endswith("q_proj.weight"))
    if wrong == "missing":
        del weights[name]
    elif wrong == "shape":
        weights[name] = weights[name][:-1].contiguous()
    elif wrong == "unknown":
        weights["model.layers.0.nobody.weight"] = weights[name].clone()
    folder = tmp_path / "weights"
    if wrong != "none":
        write(folder, weights)
    if wrong == "cut":
        file = folder / "model.safetensors"
        os.truncate(file, file.stat().st_size // 2)
    version = llm.weight_version()
    with pytest.raises(FastDeployError):
        llm.update_weights(str(folder), version="bad")
    assert llm.weight_version() == version
    assert ask(llm) == before


def test_weights_come_from_the_memory_of_another_process(llm: LLM, tmp_path: Path) -> None:
    before = ask(llm)
    socket = tmp_path / "weights"
    with WeightServer(socket) as server:
        server.publish("7", changed(1.03))
        options = {"socket": str(socket)}
        with pytest.raises(FastDeployError, match="there is version '7'"):
            llm.update_weights(source="shared", options=options, version="8")
        assert ask(llm) == before
        llm.update_weights(source="shared", options=options, version="7")
        assert ask(llm) != before
        with pytest.raises(ConfigError, match="sleep at level 1"):
            llm.sleep(2)
        server.publish("8", tensors())
        llm.update_weights(source="shared", options=options, version="8")
    assert ask(llm) == before
    with pytest.raises(FastDeployError, match=re.escape(str(socket))):
        llm.update_weights(source="shared", options=options, version="9")
    with pytest.raises(FastDeployError, match="possible: folder, shared"):
        llm.update_weights(source="telepathy")


def test_requests_of_a_stream_end_or_go_on_as_asked(llm: LLM, other: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    llm.reset_prefix_cache()
    whole = [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, params, use_tqdm=False)]
    for mode in ("keep", "wait", "abort"):
        stream = llm.generate(PROMPTS, params, use_tqdm=False, stream=True)
        found: dict[int, list[int]] = {number: [] for number in range(len(PROMPTS))}
        reasons: dict[int, str] = {}

        def take(piece: Any) -> None:
            place = PROMPTS.index(list(piece.prompt_token_ids))
            found[place] += piece.outputs[0].token_ids  # noqa: B023
            if piece.outputs[0].finish_reason:
                reasons[place] = piece.outputs[0].finish_reason  # noqa: B023

        while not all(found.values()):
            take(next(stream))
        llm.pause(mode)
        llm.resume()
        for piece in stream:
            take(piece)
        if mode == "abort":
            assert set(reasons.values()) == {"abort"}
            assert all(whole[n][: len(tokens)] == tokens for n, tokens in found.items())
            assert all(len(tokens) < 40 for tokens in found.values())
        else:
            assert list(found.values()) == whole


def test_a_kept_request_never_mixes_weights(llm: LLM, other: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    stream = llm.generate(PROMPTS, params, use_tqdm=False, stream=True)
    next(stream)
    llm.pause("keep")
    llm.update_weights(str(other))
    llm.resume()
    reasons = [p.outputs[0].finish_reason for p in stream if p.outputs[0].finish_reason]
    assert "abort" in reasons
    llm.update_weights(str(MODEL))


def test_what_cannot_be_is_said_at_the_start(fd_tensor: str, tmp_path: Path) -> None:
    store = {"kv_store": "disk", "kv_store_config": {"path": str(tmp_path)}}
    with pytest.raises(ConfigError, match="rollout is not possible with --kv-store"):
        LLM(MODEL, tensor_library=fd_tensor, enable_rollout=True, **store, **ROOM)


def test_a_wrong_mode_or_level_is_refused(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="mode must be abort, wait, keep"):
        llm.pause("now")
    with pytest.raises(ConfigError, match="level must be"):
        llm.sleep(3)
    with pytest.raises(ConfigError, match="possible: weights, kv_cache"):
        llm.sleep(1, tags=["lm_head"])
    assert not llm.is_sleeping()
    assert len(ask(llm)) == len(PROMPTS)
