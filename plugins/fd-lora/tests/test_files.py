"""Adapter folders: what is read, and that everything else is refused by its name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from engines import write_adapter
from fd_lora.files import read_folder

from fastdeploy_core.errors import InvalidRequest

Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"


def settings(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_scale_and_rank_of_each_module(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, "a", {Q: (8, 6), DOWN: (10, 4)}, rank=4)
    settings(folder, alpha_pattern={"down_proj": 2}, rank_pattern={r".*\.7\..*": 3})
    found = read_folder(folder).modules
    assert (found[Q].scale, found[DOWN].scale) == (2.0, 0.5)
    assert (found[DOWN].in_features, found[DOWN].out_features, found[DOWN].rank) == (10, 4, 4)
    settings(folder, use_rslora=True)
    assert read_folder(folder).modules[Q].scale == pytest.approx(8 / math.sqrt(4))


BLOCK = "model.layers.0.mlp.experts"
GATE_UP, DOWN_ALL = f"{BLOCK}.gate_up_proj", f"{BLOCK}.down_proj"


def test_parameters_of_all_experts_are_told_apart_by_their_sizes(tmp_path: Path) -> None:
    """PEFT wraps one into the other, in an order that the files do not say."""
    for inner, outer in (((8, 12, 2), (6, 8, 2)), ((6, 8, 2), (8, 12, 2))):
        sizes = {f"{BLOCK}.base_layer": inner, BLOCK: outer}
        folder = write_adapter(tmp_path, "a", sizes, parameters=[GATE_UP, "experts.down_proj"])
        settings(folder, alpha_pattern={"gate_up_proj": 2})
        found = {m.parameter: m for m in read_folder(folder).modules.values()}
        assert (found["gate_up_proj"].in_features, found["down_proj"].in_features) == (8, 6)
        assert (found["gate_up_proj"].scale, found["down_proj"].scale) == (0.5, 2.0)
        assert {module.num_experts for module in found.values()} == {2}


@pytest.mark.parametrize(
    ("sizes", "parameters", "words"),
    [
        ({BLOCK: (6, 8, 2)}, [], "do not tell which one"),
        ({BLOCK: (6, 8, 2)}, [GATE_UP, DOWN_ALL], "do not tell which one"),
        ({f"{BLOCK}.base_layer": (6, 8, 2), BLOCK: (6, 8, 2)}, [GATE_UP, DOWN_ALL], "do not tell"),
        ({BLOCK: (6, 8, 2)}, ["layers.1.mlp.experts.down_proj"], "do not tell which one"),
    ],
)
def test_parameters_of_all_experts_that_could_be_either(
    tmp_path: Path, sizes: dict[str, tuple[int, ...]], parameters: list[str], words: str
) -> None:
    folder = write_adapter(tmp_path, "a", sizes, parameters=parameters)
    with pytest.raises(InvalidRequest, match=words):
        read_folder(folder)


def test_the_digest_is_of_both_files(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, "a", {Q: (8, 6)})
    first = read_folder(folder).digest
    settings(folder, lora_alpha=9)
    second = read_folder(folder).digest
    write_adapter(tmp_path, "a", {Q: (8, 6)}, seed=1)
    assert len({first, second, read_folder(folder).digest}) == 3
    write_adapter(tmp_path, "a", {Q: (8, 6)})
    assert read_folder(folder).digest == first


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "biases"),
        ({"lora_bias": True}, "a bias is added"),
        ({"fan_in_fan_out": True}, "transposed"),
        ({"layer_replication": [[0, 2]]}, "several times"),
        ({"alora_invocation_tokens": [1]}, "aLoRA"),
        ({"trainable_token_indices": [3]}, "embeddings of tokens"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base's weights"),
        ({"use_something_new": True}, "does not know it"),
        ({"r": 3}, "rank 3"),
        ({"rank_pattern": {"q_proj": 2}}, "rank 2"),
        ({"rank_pattern": {"(": 2}}, "wrong rank_pattern"),
        ({"rank_pattern": [1]}, "wrong rank_pattern"),
        ({"lora_alpha": -1}, "above 0"),
        ({"lora_alpha": None}, "above 0"),
        ({"lora_alpha": True}, "above 0"),
        ({"r": "4"}, "above 0"),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    folder = write_adapter(tmp_path, "a", {Q: (8, 6)})
    settings(folder, **changes)
    with pytest.raises(InvalidRequest) as refused:
        read_folder(folder)
    assert words in str(refused.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"peft_type": "LORA"}'])
def test_a_damaged_configuration(tmp_path: Path, text: str) -> None:
    folder = write_adapter(tmp_path, "a", {Q: (8, 6)})
    (folder / "adapter_config.json").write_text(text)
    with pytest.raises(InvalidRequest):
        read_folder(folder)


def test_damaged_weights(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, "a", {Q: (8, 6)})
    weights = folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    for damaged in (b"", whole[:50], whole[:-4], whole.replace(b"lora_B", b"lora_C")):
        weights.write_bytes(damaged)
        with pytest.raises(InvalidRequest):
            read_folder(folder)
    weights.unlink()
    (folder / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(InvalidRequest, match=r"there is adapter_model\.bin"):
        read_folder(folder)
