"""loading/loader.py: whole models from whole and broken checkpoints."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fastdeploy_core.errors import ConfigError, UnsupportedModel, WeightError
from fastdeploy_core.loading.weights import INDEX_NAME, dummy_tensors
from fastdeploy_core.models.qwen import Qwen2ForCausalLM
from tests.checkpoints import ask, build, paddle_copy, reference, to_bfloat16, write_safetensors
from tests.paged import PagedModel

VARIANTS = ["qwen2", "qwen3-moe", "ernie-moe", "deepseek"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("checkpoints"), VARIANTS)


@pytest.fixture
def copied(checkpoints: Path, tmp_path: Path) -> Any:
    """A function that copies a checkpoint with changed weights and config."""

    def copy(variant: str, change: Any = None, **config: Any) -> Path:
        target = tmp_path / variant
        target.mkdir()
        stored = json.loads((checkpoints / variant / "config.json").read_text())
        (target / "config.json").write_text(json.dumps({**stored, **config}))
        weights = load_file(checkpoints / variant / "model.safetensors")
        save_file(change(weights) if change else weights, target / "model.safetensors")
        return target

    return copy


def logits(model: PagedModel, folder: Path) -> np.ndarray:
    return model.step([("a", reference(folder)[1]["prompt"].tolist())])[0]


def test_sharded_files_equal_one_file(checkpoints: Path, tensor_library: str) -> None:
    folder = checkpoints / "qwen3-moe"
    assert len(list((folder / "sharded").glob("*.safetensors"))) > 3
    whole = logits(PagedModel(folder, tensor_library), folder)
    parts = logits(PagedModel(folder / "sharded", tensor_library), folder)
    np.testing.assert_array_equal(whole, parts)


def test_a_missing_shard_is_named(checkpoints: Path, tensor_library: str, tmp_path: Path) -> None:
    shutil.copytree(checkpoints / "qwen3-moe" / "sharded", tmp_path / "m")
    lost = sorted((tmp_path / "m").glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(WeightError, match=f"missing: {lost.name}"):
        PagedModel(tmp_path / "m", tensor_library)


def test_missing_weights_are_named(copied: Any, tensor_library: str) -> None:
    def without(weights: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in weights.items() if "layers.1.self_attn.k_proj" not in k}

    with pytest.raises(WeightError, match=r"lacks 2 weights.*layers\.1\.self_attn\.k_proj\.bias"):
        PagedModel(copied("qwen2", without), tensor_library)


def test_unexpected_weights_are_named(copied: Any, tensor_library: str) -> None:
    def more(weights: dict[str, Any]) -> dict[str, Any]:
        return {**weights, "model.layers.9.mlp.up_proj.weight": np.zeros((64, 48), np.float32)}

    with pytest.raises(WeightError, match=r"does not know: model\.layers\.9\.mlp\.up_proj"):
        PagedModel(copied("qwen2", more), tensor_library)


def test_a_tied_head_needs_no_weight_and_ignores_an_equal_one(
    checkpoints: Path, copied: Any, tensor_library: str
) -> None:
    def more(weights: dict[str, Any]) -> dict[str, Any]:
        return {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}

    folder = checkpoints / "qwen2"
    expected = PagedModel(folder, tensor_library)
    found = PagedModel(copied("qwen2", more), tensor_library)
    np.testing.assert_array_equal(logits(expected, folder), logits(found, folder))
    assert found.loaded.weight_bytes == expected.loaded.weight_bytes


def test_a_head_that_differs_is_not_tied_as_with_transformers(
    copied: Any, tensor_library: str, tmp_path: Path
) -> None:
    def more(weights: dict[str, Any]) -> dict[str, Any]:
        head = weights["model.embed_tokens.weight"].copy()
        head[-1] += 1
        return {**weights, "lm_head.weight": head}

    folder = copied("qwen2", more)
    told = ask(folder, tmp_path)[1]
    model = PagedModel(folder, tensor_library)
    found = model.step([("a", told["prompt"].tolist())])[0]
    np.testing.assert_allclose(found, told["logits"], atol=2e-4)
    assert any("not tied" in line for line in model.loaded.report)


def test_an_untied_head_is_required(copied: Any, tensor_library: str) -> None:
    with pytest.raises(WeightError, match=r"lacks 1 weights.*lm_head\.weight"):
        PagedModel(copied("qwen2", tie_word_embeddings=False), tensor_library)


def test_a_family_turns_heads_as_its_shapes_say(
    checkpoints: Path, tensor_library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drivers that turn heads themselves read the one, the layers here the other."""
    plain = Qwen2ForCausalLM.rotary
    other = staticmethod(lambda read: replace(plain(read), interleaved=True))
    monkeypatch.setattr(Qwen2ForCausalLM, "rotary", other)
    with pytest.raises(UnsupportedModel, match=r"interleaved=False.*builds.*interleaved=True"):
        PagedModel(checkpoints / "qwen2", tensor_library)


def test_a_config_of_another_model_is_told_by_shapes(copied: Any, tensor_library: str) -> None:
    with pytest.raises(
        WeightError, match=r"embed_tokens\.weight has shape \[131, 48\].*\[140, 48\]"
    ):
        PagedModel(copied("qwen2", vocab_size=140), tensor_library)


def test_bfloat16_weights_become_float32_without_loss(
    checkpoints: Path, tensor_library: str, tmp_path: Path
) -> None:
    folder = checkpoints / "qwen3-moe"
    weights = load_file(folder / "model.safetensors")
    for name, cut in (("cut", True), ("bits", False)):
        (tmp_path / name).mkdir()
        shutil.copy(folder / "config.json", tmp_path / name)
        bits = {k: to_bfloat16(v) for k, v in weights.items()}
        if cut:  # the same numbers in float32
            widened = {
                k: (b.astype(np.uint32) << 16).view(np.float32) for k, (_, b) in bits.items()
            }
            save_file(widened, tmp_path / name / "model.safetensors")
        else:
            write_safetensors(tmp_path / name / "model.safetensors", bits)
    one, two = (
        logits(PagedModel(tmp_path / name, tensor_library, dtype="float32"), folder)
        for name in ("cut", "bits")
    )
    np.testing.assert_array_equal(one, two)


def test_a_device_without_the_dtype_gets_float32_and_a_report_line(
    copied: Any, tensor_library: str
) -> None:
    model = PagedModel(copied("qwen2", dtype="float16"), tensor_library)
    assert model.loaded.dtype == "float32"
    assert any("instead of the checkpoint's float16" in line for line in model.loaded.report)
    asked = PagedModel(copied("qwen3-moe"), tensor_library, dtype="float16")
    assert asked.loaded.dtype == "float32"
    assert any("instead of --dtype float16" in line for line in asked.loaded.report)


def test_joined_projections_and_stacked_experts_load(
    checkpoints: Path, copied: Any, tensor_library: str
) -> None:
    def stacked(weights: dict[str, Any]) -> dict[str, Any]:
        joined = {k: v for k, v in weights.items() if ".experts." not in k}
        for layer in (0, 2):
            prefix = f"model.layers.{layer}.mlp.experts"
            kinds = {
                kind: np.stack([weights[f"{prefix}.{e}.{kind}_proj.weight"] for e in range(8)])
                for kind in ("gate", "up", "down")
            }
            joined[f"{prefix}.gate_up_proj"] = np.concatenate([kinds["gate"], kinds["up"]], axis=1)
            joined[f"{prefix}.down_proj"] = kinds["down"]
        return joined

    folder = checkpoints / "qwen3-moe"
    expected = logits(PagedModel(folder, tensor_library), folder)
    found = logits(PagedModel(copied("qwen3-moe", stacked), tensor_library), folder)
    np.testing.assert_array_equal(expected, found)


MTP = {
    "ernie-moe": ("model.mtp_emb_norm.0.weight", {"num_nextn_predict_layers": 1}),
    "deepseek": ("model.layers.3.eh_proj.weight", {"num_nextn_predict_layers": 1}),
}


@pytest.mark.parametrize("variant", MTP)
def test_multi_token_prediction_weights_are_kept_and_change_nothing(
    variant: str, checkpoints: Path, copied: Any, tensor_library: str
) -> None:
    name, config = MTP[variant]
    extra = np.arange(48, dtype=np.float32)
    folder = checkpoints / variant
    changed = copied(variant, lambda w: {**w, name: extra}, **config)
    model = PagedModel(changed, tensor_library)
    expected = logits(PagedModel(folder, tensor_library), folder)
    np.testing.assert_array_equal(logits(model, folder), expected)
    kept = model.loaded.model.mtp_weights
    assert list(kept) == [name]
    np.testing.assert_array_equal(model.device.to_host(kept[name].read()), extra)


def test_layout_follows_config_unless_the_environment_forces_torch(
    checkpoints: Path, tensor_library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints / "qwen2"
    paddle = paddle_copy(folder, tmp_path / "paddle")
    assert "transformers_version" not in json.loads((paddle / "config.json").read_text())
    expected = logits(PagedModel(folder, tensor_library), folder)
    np.testing.assert_array_equal(logits(PagedModel(paddle, tensor_library), folder), expected)
    monkeypatch.setenv("FD_FOR_TORCH_MODEL_FORMAT", "1")
    with pytest.raises(WeightError, match="has shape"):
        PagedModel(paddle, tensor_library)


def test_an_ambiguous_layout_stops_loading(copied: Any, tensor_library: str) -> None:
    with pytest.raises(ConfigError, match="both torch_dtype and dtype"):
        PagedModel(copied("qwen2", torch_dtype="float32"), tensor_library)


def test_dummy_weights_need_no_files_and_follow_the_seed(
    checkpoints: Path, tensor_library: str, tmp_path: Path
) -> None:
    folder = checkpoints / "ernie-moe"
    shutil.copy(folder / "config.json", tmp_path)

    def dummy(seed: int) -> np.ndarray:
        model = PagedModel(tmp_path, tensor_library, load_format="dummy", seed=seed)
        return logits(model, folder)

    np.testing.assert_array_equal(dummy(1), dummy(1))
    assert np.isfinite(dummy(1)).all()
    assert not np.allclose(dummy(1), dummy(2))


def test_dummy_weights_are_parts_of_the_same_whole_for_any_ranks(
    checkpoints: Path, tensor_library: str, tmp_path: Path
) -> None:
    """What a rank reads is a region of what one rank would read."""
    shutil.copy(checkpoints / "ernie-moe" / "config.json", tmp_path)
    model = PagedModel(tmp_path, tensor_library, load_format="dummy", seed=1)
    placements = model.loaded.model.weights.placements
    for name, stored in dummy_tensors(placements, 1, model.device):
        whole = model.device.to_host(stored.read())
        region = tuple(slice(size // 2, size) for size in stored.shape)
        np.testing.assert_array_equal(model.device.to_host(stored.read(*region)), whole[region])
        if placements[name].fill == "normal" and whole.size > 1000:
            assert 0.018 < whole.std() < 0.022


def test_no_weights_at_all_suggests_dummy(
    checkpoints: Path, tensor_library: str, tmp_path: Path
) -> None:
    shutil.copy(checkpoints / "qwen2" / "config.json", tmp_path)
    with pytest.raises(WeightError, match=f"{INDEX_NAME}.*--load-format dummy"):
        PagedModel(tmp_path, tensor_library)


def test_loading_takes_little_more_memory_than_the_weights(
    tensor_library: str, tmp_path: Path
) -> None:
    """Anonymous memory (file pages can be dropped) at every tensor, for a checkpoint of 128 MiB."""
    status = Path("/proc/self/status")
    if not status.exists() or "RssAnon" not in status.read_text():
        pytest.skip("this system does not tell anonymous memory apart")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "torch_dtype": "float32",
        "vocab_size": 64,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = {"q": (1024, 1024), "k": (1024, 1024), "v": (1024, 1024), "o": (1024, 1024)}
    weights = {"model.embed_tokens.weight": np.ones((64, 1024), np.float32)}
    weights["model.norm.weight"] = np.ones(1024, np.float32)
    for n in range(2):
        prefix = f"model.layers.{n}"
        for name, shape in sizes.items():
            weights[f"{prefix}.self_attn.{name}_proj.weight"] = np.ones(shape, np.float32)
        for name, shape in {"gate": (4096, 1024), "up": (4096, 1024), "down": (1024, 4096)}.items():
            weights[f"{prefix}.mlp.{name}_proj.weight"] = np.ones(shape, np.float32)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{name}.weight"] = np.ones(1024, np.float32)
    save_file(weights, tmp_path / "model.safetensors")
    total = sum(w.nbytes for w in weights.values())
    del weights

    asked = [sys.executable, "-W", "ignore", "-m", "tests.load_memory", tmp_path, tensor_library]
    peaks = []
    for _ in range(2):  # threads of a library may start late, and take memory of their own
        done = subprocess.run(
            asked,
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        taken = json.loads(done.stdout)
        assert total <= taken["weights"] < 1.01 * total
        peaks.append(taken["peak"])
    # Weights, one tensor on its way, and what the library starts at its first use; never two
    # copies.
    assert min(peaks) < 1.5 * total
