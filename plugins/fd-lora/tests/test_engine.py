"""Ranks, quantized bases, limits, and adapters whose files change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engines import (
    GREEDY,
    answer,
    ask,
    check_quantized,
    engine,
    lora,
    tokens_of,
    write_adapter,
)

from fastdeploy_core.errors import ConfigError, InvalidRequest


@pytest.fixture(scope="module")
def folder(made: Callable[[str], Path]) -> Path:
    return made("llama")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all", "mixed"])
def test_two_ranks_divide_an_adapter(folder: Path, fd_tensor: str, name: str) -> None:
    prompt, _, greedy = answer(folder, name)
    with engine(folder / "llama", fd_tensor, tensor_parallel_size=2) as llm:
        assert tokens_of(ask(llm, [prompt], [lora(folder, name)], GREEDY)) == [greedy]


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["wint8", "wint4"])
def test_a_quantized_base_gets_the_whole_adapter(
    folder: Path, fd_tensor: str, quantization: str
) -> None:
    check_quantized(folder / "llama", folder, "all", fd_tensor, quantization, max_loras=1)


def test_target_modules_bound_what_is_loaded(folder: Path, fd_tensor: str) -> None:
    prompt, _, greedy = answer(folder, "some")
    chosen = {"lora_target_modules": ["q_proj", "v_proj"]}
    with engine(folder / "llama", fd_tensor, **chosen) as llm:
        assert tokens_of(ask(llm, [prompt], [lora(folder, "some")], GREEDY)) == [greedy]
        with pytest.raises(InvalidRequest, match="cannot change here; possible: k_proj, q_proj"):
            ask(llm, [prompt], [lora(folder, "mixed")], GREEDY)
        assert tokens_of(ask(llm, [prompt], [lora(folder, "some")], GREEDY)) == [greedy]


def test_files_that_changed_are_another_adapter(
    folder: Path, tmp_path: Path, fd_tensor: str
) -> None:
    """By name the same, with the prompt in the prefix cache."""
    sizes = {"model.layers.0.self_attn.o_proj": (64, 48)}
    prompt, _, _ = answer(folder, "some")
    with engine(folder / "llama", fd_tensor) as llm:
        found = []
        for seed in (0, 1, 0):
            write_adapter(tmp_path, "it", sizes, seed=seed)
            found += tokens_of(ask(llm, [prompt], [lora(tmp_path, "it")], GREEDY))
    assert found[0] == found[2] != found[1]


def test_what_an_engine_refuses(folder: Path, tmp_path: Path, fd_tensor: str) -> None:
    prompt, _, _ = answer(folder, "some")
    with (
        engine(folder / "llama", fd_tensor, enable_lora=False) as llm,
        pytest.raises(InvalidRequest, match="--enable-lora"),
    ):
        ask(llm, [prompt], [lora(folder, "some")], GREEDY)
    with (
        engine(folder / "llama", fd_tensor, max_lora_rank=4) as llm,
        pytest.raises(InvalidRequest, match="--max-lora-rank 4"),
    ):
        ask(llm, [prompt], [lora(folder, "all")], GREEDY)
    endless = write_adapter(tmp_path, "endless", {"model.layers.0.self_attn.o_proj": (64, 48)})
    settings = endless / "adapter_config.json"
    settings.write_text(settings.read_text().replace('"lora_alpha": 8', '"lora_alpha": 1e42'))
    with (
        engine(folder / "llama", fd_tensor) as llm,
        pytest.raises(InvalidRequest, match="not finite"),
    ):
        ask(llm, [prompt], [lora(tmp_path, "endless")], GREEDY)
    for module in (f"x={folder / 'none'}", "x", '{"name": "x"}'):
        with pytest.raises(ConfigError, match="--lora-modules"):
            engine(folder / "llama", fd_tensor, lora_modules=[module])
