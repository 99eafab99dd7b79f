"""Features, tokens and patches equal transformers', on the tensor library of the run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fd_vision import ernie4_5_vl
from fd_vision.patches import as_rgb, patches_of, read_image_rule, target_size
from fd_vision.positions import Run, three_axes
from fd_vision.processor import image_rule
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, Oracle, make, picture, prompt_of, runner_of

from fastdeploy_core.api.llm import LLM
from fastdeploy_core.contracts.model import MediaPart
from fastdeploy_core.errors import ConfigError, InvalidRequest
from fastdeploy_core.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
ROOM = {"dtype": "float32", "max_model_len": 1024, "num_gpu_blocks_override": 96, "block_size": 16}
CASES = {
    "none": [],
    "one": [(90, 60, 1)],
    "two": [(60, 120, 2), (150, 60, 3)],
    "smaller than a cell": [(3, 2, 4)],
    "ragged windows": [(170, 230, 5)],
    "shrunk": [(900, 500, 6)],
    "mixed": [(200, 100, 7), (64, 64, 8), (28, 300, 9), (90, 60, 1)],
}


SERVED = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "paddleocr_vl", "ernie4_5_vl")


@pytest.fixture(scope="module", params=SERVED)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def family_folder(checkpoint: Callable[[str], Path], name: str) -> Path:
    return checkpoint(name)


@pytest.fixture(scope="module")
def oracle(family_folder: Path, name: str) -> Oracle:
    return Oracle(family_folder, name)


@pytest.fixture(scope="module")
def llm(family_folder: Path, fd_tensor: str) -> Iterator[LLM]:
    with LLM(family_folder, tensor_library=fd_tensor, **ROOM) as made:
        yield made


def asked(oracle: Oracle, cases: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    """A prompt with these pictures."""
    images = [picture(*case) for case in cases]
    prompt = prompt_of(len(images), place=oracle.family.place)
    return {"prompt": prompt, "multi_modal_data": {"image": images}}


def wanted(oracle: Oracle, given: dict[str, Any], count: int = 64) -> list[int]:
    return oracle.greedy(given["prompt"], given["multi_modal_data"]["image"], count)


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_transformers(llm: LLM, oracle: Oracle, case: str) -> None:
    given = asked(oracle, CASES[case])
    (output,) = llm.generate(given, GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == wanted(oracle, given)


def test_the_text_half_alone_is_transformers_and_loads_no_tower(
    llm: LLM, oracle: Oracle, family_folder: Path, fd_tensor: str
) -> None:
    given = asked(oracle, [])
    options: dict[str, Any] = {"tensor_library": fd_tensor, "language_model_only": True}
    with LLM(family_folder, **options, **ROOM) as half:
        (output,) = half.generate(given["prompt"], GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == wanted(oracle, given)
        placed, all_placed = (set(runner_of(one)._model.weights.placements) for one in (half, llm))
        assert placed < all_placed
        assert not [name for name in placed if "vision" in name or "visual" in name]
        with pytest.raises(InvalidRequest, match="takes text only"):
            half.generate(asked(oracle, CASES["one"]), GREEDY, use_tqdm=False)


def test_far_behind_pictures_tokens_are_transformers(llm: LLM, oracle: Oracle) -> None:
    """500 tokens, more than any position in the prompt."""
    given = asked(oracle, CASES["two"])
    params = SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True)
    (output,) = llm.generate(given, params, use_tqdm=False)
    assert output.outputs[0].token_ids == wanted(oracle, given, 500)


def test_pictures_of_one_batch_do_not_mix(llm: LLM, oracle: Oracle) -> None:
    """All at once, and the same pictures the other way round, which must not say the same."""
    cases = list(CASES.values())
    cases += [list(reversed(c)) for c in cases if len(c) == 2]
    prompts = [asked(oracle, case) for case in cases]
    found = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)]
    assert found == [wanted(oracle, given) for given in prompts]
    assert found[2] != found[-1]


def test_features_are_transformers(llm: LLM, oracle: Oracle) -> None:
    assert_features(llm, oracle, [picture(*case) for cases in CASES.values() for case in cases])


def assert_features(llm: LLM, oracle: Oracle, images: Sequence[Image.Image]) -> None:
    ids = oracle.tokenizer(oracle.family.place, add_special_tokens=False)["input_ids"]
    rows = []
    for image in images:
        ids_of_one, extras = llm._media.prepare(ids, [MediaPart("image", image, "")], "")
        assert extras is not None
        model, (item,), (span,) = runner_of(llm)._model, extras.media, extras.embeddings
        with model._xp.no_grad():
            found = model._xp.to_numpy(model.encode([item]))
        places = [ids_of_one[span.start + n] == oracle.image for n in range(span.count)]
        rows.append(found[places])
    found, theirs = np.concatenate(rows), oracle.features(images)
    assert found.shape == theirs.shape
    assert np.abs(found - theirs).max() <= 1e-4 * np.abs(theirs).max(), [
        image.size for image in images
    ]


def sizes(count: int) -> list[tuple[int, int]]:
    """Width and height: the smallest, the narrowest, and others at random."""
    found = [(1, 1), (1, 200), (3, 50), (42, 70), (199, 10), (768, 1024), (4000, 20), (700, 2000)]
    draw = np.random.default_rng(3)
    while len(found) < count:
        width, height = (int(side) for side in np.exp(draw.uniform(0, np.log(1500), 2)))
        if max(width, height) <= 200 * min(width, height):
            found.append((width, height))
    return found


def test_patches_are_transformers_bit_by_bit(llm: LLM, oracle: Oracle) -> None:
    for size in sizes(40):
        assert_patches(llm, oracle, picture(*size, 3), size)


def assert_patches(llm: LLM, oracle: Oracle, image: Image.Image, size: tuple[int, int]) -> None:
    family = oracle.family
    rule = llm._media.image
    data, grid = patches_of(as_rgb(image), rule)
    theirs = oracle.pixels([image])
    assert tuple(theirs["image_grid_thw"][0].tolist()) == grid, size
    mean, std = (np.array(x, np.float32).reshape(3, 1, 1) for x in (rule.mean, rule.std))
    own = np.frombuffer(data, np.uint8).reshape(-1, 3, 1, oracle.patch**2)
    back = theirs["pixel_values"].numpy().reshape(-1, 3, family.frames, oracle.patch**2)
    back = back * std + mean
    if family.is_raster:  # the same patches, row by row
        (rows, columns), merge = grid[1:], oracle.merge
        cells = np.arange(rows * columns).reshape(rows // merge, merge, columns // merge, merge)
        inside = cells.transpose(0, 2, 1, 3).reshape(-1)
        back = back[inside]
    levels = np.rint(back * 255)
    assert np.abs(back * 255 - levels).max() < 0.01, size
    assert (levels == own).all(), size  # both frames of a still picture


def test_a_request_may_ask_for_smaller_pictures(llm: LLM, oracle: Oracle) -> None:
    given = asked(oracle, CASES["shrunk"])
    step, kept = oracle.family.step, dict(oracle.processor.size)
    limits = {"min_pixels": step**2 * 4, "max_pixels": step**2 * 12}
    (output,) = llm.generate(given | {"mm_processor_kwargs": limits}, GREEDY, use_tqdm=False)
    oracle.processor.size = {
        "shortest_edge": limits["min_pixels"], "longest_edge": limits["max_pixels"]
    }  # fmt: skip
    try:
        assert output.outputs[0].token_ids == wanted(oracle, given)
    finally:
        oracle.processor.size = kept


def test_positions_are_transformers(oracle: Oracle) -> None:
    images = [picture(*case) for case in CASES["mixed"]]
    grids = oracle.pixels(images)["image_grid_thw"]
    runs = [Run(4)]
    for grid in grids.tolist():
        merged = (grid[0], grid[1] // 2, grid[2] // 2)
        runs += [Run(int(np.prod(merged)), merged), Run(2)]
    found, offset = three_axes(runs)
    config = oracle.model.config
    ids = [7] * found.shape[1]
    types, at = [0] * len(ids), 0
    for run in runs:
        if run.grid is not None:
            ids[at : at + run.count] = [config.image_token_id] * run.count
            types[at : at + run.count] = [1] * run.count
            ids[at - 1] = oracle.ids[0]
        at += run.count
    theirs, delta = oracle.own_positions(
        torch.tensor([ids]), mm_token_type_ids=torch.tensor([types]), image_grid_thw=grids
    )
    assert (theirs[:, 0].numpy() == found).all()
    assert int(delta) == offset < 0


def test_older_folders_read_the_same(folder: Path, tmp_path: Path, fd_tensor: str) -> None:
    """Flat config.json, rope_scaling, preprocessor_config.json, no language_model in names."""
    old = tmp_path / "old"
    old.mkdir()
    for file in folder.iterdir():
        if file.suffix == ".json" and file.name != "processor_config.json":
            (old / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    flat = {k: v for k, v in text.items() if k not in ("model_type", "layer_types", "dtype")}
    flat |= config | {
        "rope_theta": rope["rope_theta"], "tie_word_embeddings": False,
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }  # fmt: skip
    (old / "config.json").write_text(json.dumps(flat))
    kept = json.loads((folder / "processor_config.json").read_text())["image_processor"]
    size = kept.pop("size")
    kept |= {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    (old / "preprocessor_config.json").write_text(json.dumps(kept))
    renames = (("model.visual.", "visual."), ("model.language_model.", "model."))
    tensors = load_file(folder / "model.safetensors")
    for new, before in renames:
        tensors = {name.replace(new, before): t for name, t in tensors.items()}
    save_file(tensors, old / "model.safetensors", metadata={"format": "pt"})
    given = {"prompt": prompt_of(1), "multi_modal_data": {"image": picture(90, 60, 1)}}
    answers = []
    for path in (folder, old):
        with LLM(path, tensor_library=fd_tensor, **ROOM) as llm:
            answers.append(llm.generate(given, GREEDY, use_tqdm=False)[0].outputs[0].token_ids)
    assert answers[0] == answers[1]


def test_released_ernie_reads_the_same(
    checkpoint: Callable[[str], Path], tmp_path: Path, fd_tensor: str
) -> None:
    """The config.json of released folders: flat, numbers of both sets of experts in lists, a last
    layer after the last one, and one placeholder, which the template writes as text."""
    new, old = checkpoint("ernie4_5_vl"), tmp_path / "old"
    shutil.copytree(new, old)
    config = json.loads((new / "config.json").read_text())
    text, vision = config["text_config"], config["vision_config"]
    kept = ("hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads",
            "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "vocab_size", "use_bias",
            "head_dim", "moe_k", "moe_num_shared_experts", "moe_intermediate_size")  # fmt: skip
    released = {key: text[key] for key in kept} | {
        "architectures": config["architectures"], "model_type": "ernie4_5_moe_vl",
        "torch_dtype": "float32", "tie_word_embeddings": True, "rope_theta": 5e5, "rope_3d": True,
        "freq_allocation": 2, "moe_num_experts": [4, 4], "moe_use_aux_free": True,
        "moe_layer_start_index": [1, 1], "moe_layer_end_index": [4, 3], "moe_layer_interval": 1,
        "im_patch_id": config["image_token_id"], "eos_token_id": 4,
        "vision_config": {
            "depth": 2, "embed_dim": 32, "hidden_size": 32, "hidden_act": "quick_gelu",
            "mlp_ratio": vision["intermediate_size"] / 32, "num_heads": 2, "in_channels": 3,
            "patch_size": 14, "spatial_merge_size": 2,
        },
    }  # fmt: skip
    (old / "config.json").write_text(json.dumps(released))
    oracle = Oracle(new, "ernie4_5_vl")
    given, theirs = asked(oracle, CASES["two"]), wanted(oracle, asked(oracle, CASES["two"]))
    spelled = given["prompt"].replace(oracle.family.tokens[2], "image@placeholder")
    with LLM(old, tensor_library=fd_tensor, **ROOM) as llm:
        for prompt in (given["prompt"], spelled):
            (output,) = llm.generate(given | {"prompt": prompt}, GREEDY, use_tqdm=False)
            assert output.outputs[0].token_ids == theirs


def test_ernie_routes_by_token(
    checkpoint: Callable[[str], Path], fd_tensor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Placeholders with start and end around them to the vision experts, everything else to the
    text experts; a step without a picture computes no vision expert."""
    seen: list[tuple[int, int]] = []  # tokens of one sparse layer: text, vision
    real = ernie4_5_vl.ModalityExperts.after

    def after(self: Any, norm: Any, x: Any, residual: Any) -> Any:
        divided = self._routes.divided
        counts = (int(x.shape[0]), 0) if divided is None else [int(d.shape[0]) for d in divided]
        seen.append(tuple(counts))
        return real(self, norm, x, residual)

    monkeypatch.setattr(ernie4_5_vl.ModalityExperts, "after", after)
    family = FAMILIES["ernie4_5_vl"]
    prompt, image = prompt_of(1, place=family.place), picture(56, 56, 1)
    given = {"prompt": prompt, "multi_modal_data": {"image": image}}
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with LLM(checkpoint("ernie4_5_vl"), tensor_library=fd_tensor, **ROOM) as llm:
        (output,) = llm.generate(given, params, use_tqdm=False)
    whole = len(output.prompt_token_ids)
    prompt_steps = [counts for counts in seen if counts[1]]
    assert prompt_steps == [(whole - 6, 6)] * 2  # 4 vectors, start and end; two sparse layers
    assert set(seen) - set(prompt_steps) <= {(1, 0), (2, 0)}  # the tokens that were generated


@pytest.mark.parametrize("width", [24, 64, 32])
def test_stacked_experts_in_either_layout(
    checkpoint: Callable[[str], Path], tmp_path: Path, fd_tensor: str, width: int
) -> None:
    """Released folders have [experts, in, out]. At 64 down is square, at 32 gate and up are."""
    new, old = checkpoint("qwen3_vl_moe"), tmp_path / "old"
    if width != 24:
        config = {"text_config": {"moe_intermediate_size": width}}
        new = make(tmp_path / "new", "qwen3_vl_moe", more=config)
    shutil.copytree(new, old)
    tensors = load_file(new / "model.safetensors")
    for each in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        tensors[each] = tensors[each].transpose(1, 2).contiguous()
    save_file(tensors, old / "model.safetensors", metadata={"format": "pt"})
    given = {"prompt": prompt_of(1), "multi_modal_data": {"image": picture(90, 60, 1)}}
    answers = []
    for path in (new, old):
        with LLM(path, tensor_library=fd_tensor, **ROOM) as llm:
            answers.append(llm.generate(given, GREEDY, use_tqdm=False)[0].outputs[0].token_ids)
    theirs = Oracle(new, "qwen3_vl_moe").greedy(
        given["prompt"], [given["multi_modal_data"]["image"]], 64
    )
    assert answers == [theirs, theirs]


def test_a_folder_without_a_preprocessor_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"no processor_config\.json or preprocessor_config\.json"
    ):
        read_image_rule(tmp_path, 14, 2)


def test_sizes_follow_the_rule_at_its_edges(folder: Path) -> None:
    rule = read_image_rule(folder, 14, 2)
    # 42 / 28 is 1.5, which Python rounds to 2; 70 / 28 is 2.5, which it rounds to 2.
    assert target_size(42 * 4, 70 * 2, rule) == (168, 140)
    assert target_size(70, 70, rule) == (56, 56)
    for width, height in ((5000, 25), (1, 200), (29, 29)):
        w, h = target_size(width, height, rule)
        assert w % 28 == h % 28 == 0
    assert Image.Resampling.BICUBIC == 3


def test_the_operator_sets_pixels_above_those_of_the_files(folder: Path) -> None:
    own = read_image_rule(folder, 14, 2)
    config = {"vision_config": {"patch_size": 14, "spatial_merge_size": 2}}
    most = own.max_pixels * 4
    for name in ("max_pixels", "image_max_pixels"):
        served = image_rule(config | {"mm_processor_kwargs": {name: most}}, folder)
        assert (served.min_pixels, served.max_pixels) == (own.min_pixels, most)
    for wrong in ({"max_pixels": 0}, {"fps": 2}, {"max_pixels": own.min_pixels - 1}):
        with pytest.raises(ConfigError, match="--mm-processor-kwargs"):
            image_rule(config | {"mm_processor_kwargs": wrong}, folder)


@pytest.mark.parametrize("name", SERVED)
def test_random_weights_need_no_files(checkpoint: Callable[[str], Path], name: str) -> None:
    """As benchmarks load models of released shapes."""
    with LLM(checkpoint(name), load_format="dummy", **ROOM) as made:
        given = {"prompt": prompt_of(1, place=FAMILIES[name].place)}
        given["multi_modal_data"] = {"image": picture(90, 60, 1)}
        (output,) = made.generate(given, SamplingParams(max_tokens=2, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 2
