"""Features, tokens and patches equal transformers', on the tensor library of the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from fd_vision.patches import as_rgb, patches_of, read_rule, target_size
from fd_vision.positions import three_axes
from fd_vision.processor import ImageProcessor
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny import Oracle, picture, prompt_of, runner_of

from fastdeploy_core.api.llm import LLM
from fastdeploy_core.contracts.model import MediaPart, MediaRules
from fastdeploy_core.errors import ConfigError
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


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@pytest.fixture(scope="module")
def llm(folder: Path, fd_tensor: str) -> Iterator[LLM]:
    with LLM(folder, tensor_library=fd_tensor, **ROOM) as made:
        yield made


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_are_transformers(llm: LLM, oracle: Oracle, name: str) -> None:
    images = [picture(*case) for case in CASES[name]]
    given = {"prompt": prompt_of(len(images)), "multi_modal_data": {"image": images}}
    (output,) = llm.generate(given, GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == oracle.greedy(given["prompt"], images, 64)


def test_pictures_of_one_batch_do_not_mix(llm: LLM, oracle: Oracle) -> None:
    """All at once, and the same pictures the other way round, which must not say the same."""
    asked = [[picture(*case) for case in cases] for cases in CASES.values()]
    asked += [list(reversed(images)) for images in asked if len(images) == 2]
    prompts = [{"prompt": prompt_of(len(i)), "multi_modal_data": {"image": i}} for i in asked]
    found = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)]
    assert found == [oracle.greedy(prompt_of(len(i)), i, 64) for i in asked]
    assert found[2] != found[-1]


def test_features_are_transformers(llm: LLM, oracle: Oracle, folder: Path) -> None:
    images = [picture(*case) for cases in CASES.values() for case in cases]
    processor = ImageProcessor.of(
        llm.config.model.hf_config, folder, MediaRules({"image": 99}, is_trusted=True),
        "image_token_id",
    )  # fmt: skip
    parts = [MediaPart("image", image, "") for image in images]
    try:
        place = processor._tokens.image
        _, extras = processor.prepare([place] * len(images), parts, "")
    finally:
        processor.close()
    assert extras is not None
    model = runner_of(llm)._model
    xp = model._build.xp
    by_digest = {item.digest: item for item in extras.media}
    with xp.no_grad():
        rows = model.encode([by_digest[span.digest] for span in extras.embeddings])
    found, wanted = xp.to_numpy(rows), oracle.features(images)
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max()


@pytest.mark.parametrize(
    "size",
    [
        (1, 1),
        (1, 200),
        (3, 50),
        (42, 70),
        (60, 90),
        (199, 10),
        (768, 1024),
        (4000, 20),
        (700, 2000),
    ],
)
def test_patches_are_transformers_bit_by_bit(oracle: Oracle, folder: Path, size) -> None:
    rule = read_rule(folder, 14, 2)
    image = picture(*size, 3)
    data, grid = patches_of(as_rgb(image), rule)
    theirs = oracle.pixels([image])
    assert tuple(theirs["image_grid_thw"][0].tolist()) == grid
    mean, std = (np.array(x, np.float32).reshape(3, 1, 1) for x in (rule.mean, rule.std))
    own = np.frombuffer(data, np.uint8).reshape(-1, 3, 1, 14 * 14)
    back = theirs["pixel_values"].numpy().reshape(-1, 3, 2, 14 * 14) * std + mean
    levels = np.rint(back * 255)
    assert np.abs(back * 255 - levels).max() < 0.01
    assert (levels == own).all()  # both frames of a still picture


def test_positions_are_transformers(oracle: Oracle, folder: Path) -> None:
    images = [picture(*case) for case in CASES["mixed"]]
    grids = oracle.pixels(images)["image_grid_thw"]
    runs = [(4, None)]
    for grid in grids.tolist():
        merged = (grid[0], grid[1] // 2, grid[2] // 2)
        runs += [(int(np.prod(merged)), merged), (2, None)]
    found, offset = three_axes(runs)
    config = oracle.model.config
    ids = [7] * found.shape[1]
    types, at = [0] * len(ids), 0
    for count, grid in runs:
        if grid is not None:
            ids[at : at + count], types[at : at + count] = (
                [config.image_token_id] * count,
                [1] * count,
            )
            ids[at - 1] = config.vision_start_token_id
        at += count
    theirs, delta = oracle.model.model.get_rope_index(
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


def test_a_folder_without_a_preprocessor_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"no processor_config\.json or preprocessor_config\.json"
    ):
        read_rule(tmp_path, 14, 2)


def test_sizes_follow_the_rule_at_its_edges(folder: Path) -> None:
    rule = read_rule(folder, 14, 2)
    # 42 / 28 is 1.5, which Python rounds to 2; 70 / 28 is 2.5, which it rounds to 2.
    assert target_size(42 * 4, 70 * 2, rule) == (168, 140)
    assert target_size(70, 70, rule) == (56, 56)
    for width, height in ((5000, 25), (1, 200), (29, 29)):
        w, h = target_size(width, height, rule)
        assert w % 28 == h % 28 == 0
    assert Image.Resampling.BICUBIC == 3
