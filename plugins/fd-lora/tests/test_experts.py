"""Adapters of routed experts: both ways in which files name them, mixed batches, ranks, quantized
experts, and what is refused. Logits and tokens of PEFT: test_parity.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
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
from fd_lora.experts import AdaptedMoE
from peft_adapters import EXPERTS
from safetensors.numpy import load_file, save_file

from fastdeploy_core.contracts.quant_formats import PackedWeight, QuantFormat
from fastdeploy_core.errors import ConfigError, InvalidRequest

NUM_EXPERTS = 8


@pytest.fixture(scope="module")
def folder(made: Callable[[str], Path]) -> Path:
    return made("qwen3-moe")


def by_expert(stacked: Path, folder: Path) -> Path:
    """The same adapter as PEFT wrote it when experts were linear layers of their own."""
    tensors: dict[str, np.ndarray] = {}
    config = json.loads((stacked / "adapter_config.json").read_text())
    for name, stored in load_file(stacked / "adapter_model.safetensors").items():
        module, half = name.removesuffix(".weight").rsplit(".", 1)
        is_down = not module.endswith(".base_layer")
        block = module.removesuffix(".base_layer")
        for expert in range(NUM_EXPERTS):
            rank = config["r"]
            if half == "lora_A":
                own = [stored[expert * rank : (expert + 1) * rank]] * 2
            else:
                own = np.split(stored[:, expert::NUM_EXPERTS], 1 if is_down else 2)
            for part, matrix in zip(["down"] if is_down else ["gate", "up"], own, strict=False):
                key = f"{block}.{expert}.{part}_proj.{half}.weight"
                tensors[key] = np.ascontiguousarray(matrix)
    (folder / "each").mkdir()
    save_file(tensors, folder / "each" / "adapter_model.safetensors")
    config |= {"target_parameters": None, "target_modules": ["gate_proj", "up_proj", "down_proj"]}
    (folder / "each" / "adapter_config.json").write_text(json.dumps(config))
    return folder / "each"


def test_experts_may_be_named_one_by_one(folder: Path, tmp_path: Path, fd_tensor: str) -> None:
    prompt, _, greedy = answer(folder, "experts")
    by_expert(folder / "experts", tmp_path)
    with engine(folder / "qwen3-moe", fd_tensor, lora_experts=True) as llm:
        assert tokens_of(ask(llm, [prompt], [lora(tmp_path, "each")], GREEDY)) == [greedy]


def test_rows_of_one_batch_have_their_own_experts(folder: Path, fd_tensor: str) -> None:
    """Prompts of several adapters and none together, cut into parts, with fewer slots than
    adapters; again from the prefix cache. An adapter of --lora-modules that changes experts is
    reason enough for their slots."""
    names = [None, "experts", "attention", "down", "first"]
    settings = {
        "lora_modules": [f"experts={folder / 'experts'}"], "max_loras": 2, "max_num_seqs": 8,
        "max_num_batched_tokens": 17,
    }  # fmt: skip
    prompts = [answer(folder, "experts", number)[0] for number in (0, 1)]
    asked = [(prompt, name) for prompt in prompts for name in names]
    with engine(folder / "qwen3-moe", fd_tensor, **settings) as llm:
        alone = [
            tokens_of(ask(llm, [prompt], [lora(folder, name)], GREEDY))[0] for prompt, name in asked
        ]
        for _ in range(2):
            adapters = [lora(folder, name) for _, name in asked]
            assert tokens_of(ask(llm, [p for p, _ in asked], adapters, GREEDY)) == alone
    for (_, name), number, tokens in zip(asked, [0] * 5 + [1] * 5, alone, strict=True):
        if name is not None:
            assert tokens == answer(folder, name, number)[2]
    assert len({tuple(tokens) for tokens in alone[5:]}) == len(names)


@pytest.mark.slow
def test_two_ranks_divide_each_experts_adapter(folder: Path, fd_tensor: str) -> None:
    prompt, _, greedy = answer(folder, "experts")
    settings = {"tensor_parallel_size": 2, "lora_experts": True}
    with engine(folder / "qwen3-moe", fd_tensor, **settings) as llm:
        assert tokens_of(ask(llm, [prompt], [lora(folder, "experts")], GREEDY)) == [greedy]


@pytest.mark.slow
def test_quantized_experts_get_the_whole_adapter(folder: Path, fd_tensor: str) -> None:
    base = folder / "qwen3-moe"
    check_quantized(base, folder, "experts", fd_tensor, "wint8", lora_experts=True)


def test_what_is_refused(folder: Path, tmp_path: Path, fd_tensor: str) -> None:
    base, experts = folder / "qwen3-moe", "model.layers.0.mlp.experts"
    prompt, _, _ = answer(folder, "experts")
    with (
        engine(base, fd_tensor) as llm,
        pytest.raises(InvalidRequest, match="can be with --lora-experts"),
    ):
        ask(llm, [prompt], [lora(folder, "experts")], GREEDY)
    sizes = {f"{experts}.base_layer": (48, 48, 4), experts: (24, 48, 4)}
    write_adapter(tmp_path, "four", sizes, parameters=EXPERTS)
    with (
        engine(base, fd_tensor, lora_experts=True) as llm,
        pytest.raises(InvalidRequest, match="has 4 experts, here there are 8"),
    ):
        ask(llm, [prompt], [lora(tmp_path, "four")], GREEDY)
    sizes = {experts: (24, 48, NUM_EXPERTS), f"{experts}.5.down_proj": (24, 48)}
    write_adapter(tmp_path, "twice", sizes, parameters=EXPERTS[1:])
    with (
        engine(base, fd_tensor, lora_experts=True) as llm,
        pytest.raises(InvalidRequest, match="names a module twice"),
    ):
        ask(llm, [prompt], [lora(tmp_path, "twice")], GREEDY)
    ranks = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    with pytest.raises(ConfigError, match="--enable-expert-parallel"):
        engine(base, fd_tensor, lora_experts=True, **ranks)
    config = json.loads((base / "config.json").read_text())
    config["mlp_only_layers"] = list(range(config["num_hidden_layers"]))
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="no routed experts"):
        engine(tmp_path, fd_tensor, lora_experts=True, load_format="dummy")


def test_a_format_that_is_not_the_cores_is_refused_when_weights_are_loaded() -> None:
    codes = QuantFormat("tet2", "codes of another distribution", {}, lambda weight: None)
    build: Any = SimpleNamespace(kernels={"moe_routing": None})
    driver: Any = SimpleNamespace(name="cuda")
    adapters: Any = None
    weight = PackedWeight(codes, 64, 64, {}, NUM_EXPERTS)
    with pytest.raises(ConfigError, match=r"format tet2; possible: .*wint8.*--lora-experts"):
        AdaptedMoE(driver, adapters, build, None).prepare_weights(weight, weight)
