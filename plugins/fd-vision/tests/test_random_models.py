"""Models as strangers may configure them: random sizes, switches and preprocessor files of each
family, with random weights and requests, compared with transformers on the same folder. What is
not served as transformers computes it has to be refused by the name of its field."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fd_vision.ernie4_5_vl import Ernie4_5_VLMoeForConditionalGeneration
from fd_vision.paddleocr_vl import PaddleOCRVLForConditionalGeneration
from fd_vision.patches import as_rgb
from fd_vision.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from fd_vision.qwen3_vl import (
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeForConditionalGeneration,
)
from fd_vision.video import frame_size
from PIL import Image
from test_parity import assert_features, assert_patches
from tiny import FAMILIES, VOCAB, Oracle, film, make, picture

from fastdeploy_core.api.llm import LLM
from fastdeploy_core.config.arguments import build_engine_config
from fastdeploy_core.contracts.model import MediaRules
from fastdeploy_core.errors import ConfigError
from fastdeploy_core.plugins.checkpoints import find_model
from fastdeploy_core.types import SamplingParams

SERVED: dict[str, Any] = {
    "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration,
    "qwen3_vl": Qwen3VLForConditionalGeneration,
    "qwen3_vl_moe": Qwen3VLMoeForConditionalGeneration,
    "paddleocr_vl": PaddleOCRVLForConditionalGeneration,
    "ernie4_5_vl": Ernie4_5_VLMoeForConditionalGeneration,
}
BICUBIC = Image.Resampling.BICUBIC
ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "quick_gelu", "silu")
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
MODES = ("RGB", "L", "P", "RGBA", "CMYK", "LA", "1", "I;16")


def section(draw: random.Random, half: int, axes: str) -> list[int]:
    """Frequencies of each axis."""
    if axes == "pairs":
        time = draw.randrange(2 - half % 2, half - 1, 2)
        return [(half - time) // 2, (half - time) // 2, time]
    if axes == "interleaved":  # rows and columns at most a third each
        tall, wide = (draw.randrange(1, max(2, half // 3)) for _ in range(2))
        return [half - tall - wide, tall, wide]
    first, second = sorted(draw.sample(range(1, half), 2))
    return [first, second - first, half - second]


def decoder(draw: random.Random, name: str) -> dict[str, Any]:
    """Values of text_config."""
    kv_heads, head = draw.choice((1, 2, 3)), draw.choice((8, 12, 16, 24, 32))
    heads = kv_heads * draw.choice((1, 2, 3))
    hidden = heads * head if name == "qwen2_5_vl" else 4 * draw.randrange(6, 24)
    axes = {"ernie4_5_vl": "pairs", "qwen3_vl": "interleaved", "qwen3_vl_moe": "interleaved"}
    rope = {
        "rope_type": "default", "rope_theta": draw.choice((1e4, 5e5, 5e6)),
        "mrope_section": section(draw, head // 2, axes.get(name, "sections")),
    }  # fmt: skip
    if name != "ernie4_5_vl" and draw.random() < 0.3:
        rope |= {"rope_type": "yarn", "factor": draw.choice((2.0, 4.0))}
        rope["original_max_position_embeddings"] = 1024
    layers = draw.randrange(2, 6)
    found: dict[str, Any] = {
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": hidden,
        "num_hidden_layers": layers, "intermediate_size": 2 * draw.randrange(10, 60),
        "vocab_size": VOCAB + draw.randrange(50), "rms_norm_eps": draw.choice((1e-5, 1e-6, 1e-3)),
        "rope_parameters": rope,
    }  # fmt: skip
    if name == "qwen2_5_vl":
        return found | {"layer_types": ["full_attention"] * layers}
    found["head_dim"] = head
    if name.startswith("qwen3"):
        rope["mrope_interleaved"] = True
        found["attention_bias"] = draw.random() < 0.3
    else:
        found["use_bias"] = draw.random() < 0.3
    if name == "qwen3_vl_moe":
        found |= {
            "num_experts": draw.choice((2, 3, 5, 8)), "num_experts_per_tok": draw.choice((1, 2)),
            "moe_intermediate_size": 4 * draw.randrange(3, 20),
            "decoder_sparse_step": draw.choice((1, 1, 2)),
            "mlp_only_layers": draw.choice(([], [0], [1])),
        }  # fmt: skip
        found["num_local_experts"] = found["num_experts"]
    if name == "ernie4_5_vl":
        kinds = [draw.choice(("dense", "sparse", "sparse")) for _ in range(layers)]
        found |= {
            "moe_num_experts": draw.choice((2, 3, 5, 8)), "moe_k": draw.choice((1, 2)),
            "moe_intermediate_size": [4 * draw.randrange(3, 20), 4 * draw.randrange(3, 20)],
            "moe_num_shared_experts": draw.choice((0, 1, 3)),
            "mlp_layer_types": kinds,
        }  # fmt: skip
    return found


def tower(draw: random.Random, name: str, text: dict[str, Any]) -> dict[str, Any]:
    """Values of vision_config."""
    heads, head = draw.choice((1, 2, 3)), 4 * draw.randrange(1, 9)
    depth, patch, merge = (
        draw.randrange(1, 6),
        draw.choice((4, 7, 8, 14, 16)),
        draw.choice((1, 2, 2, 3)),
    )
    found: dict[str, Any] = {
        "hidden_size": heads * head, "intermediate_size": draw.randrange(5, 80),
        "num_attention_heads": heads, "num_hidden_layers": depth, "patch_size": patch,
        "spatial_merge_size": merge, "hidden_act": draw.choice(ACTIVATIONS),
    }  # fmt: skip
    if draw.random() < 0.3:
        found["rope_parameters"] = {"rope_type": "axial", "rope_theta": draw.choice((100.0, 5e5))}
    if name == "qwen2_5_vl":
        found |= {
            "window_size": patch * merge * draw.randrange(1, 5) + draw.choice((0, 0, 1)),
            "fullatt_block_indexes": sorted(draw.sample(range(depth), draw.randrange(depth + 1))),
            "tokens_per_second": draw.choice((1, 2, 4, 25)),
        }  # fmt: skip
    if name.startswith("qwen3"):
        most = min(depth, text["num_hidden_layers"] - 1)
        found |= {
            "num_position_embeddings": draw.randrange(1, 13) ** 2,
            "deepstack_visual_indexes": sorted(draw.sample(range(depth), draw.randrange(most + 1))),
        }  # fmt: skip
    if name == "paddleocr_vl":
        found |= {
            "image_size": patch * draw.randrange(1, 9) + draw.choice((0, 0, 3)),
            "layer_norm_eps": draw.choice((1e-6, 1e-3)),
        }  # fmt: skip
    if name == "ernie4_5_vl":
        found["rms_norm_eps"] = draw.choice((1e-6, 1e-3))
    if name.startswith(("qwen",)):
        found["out_hidden_size"] = text["hidden_size"]
    return found


def preprocessor(draw: random.Random, vision: dict[str, Any]) -> dict[str, Any]:
    """Values of the preprocessor file, in its new or its old spelling."""
    step = vision["patch_size"] * vision["spatial_merge_size"]
    least = draw.randrange(1, step * step * 6)
    most = least + step * step * draw.randrange(2, 40)
    found: dict[str, Any] = {
        "image_mean": [draw.choice((0.0, 0.5, round(draw.random(), 3))) for _ in range(3)],
        "image_std": [draw.choice((1.0, 0.5, round(0.1 + draw.random(), 3))) for _ in range(3)],
        "size": {"shortest_edge": least, "longest_edge": most},
    }  # fmt: skip
    if draw.random() < 0.4:
        found |= {"min_pixels": least, "max_pixels": most}
        if draw.random() < 0.5:
            found["size"] = None
    for key in ("do_resize", "do_normalize", "do_rescale", "resample"):
        if draw.random() < 0.2:
            found[key] = None  # the file does not say
    return found


def shown(draw: random.Random) -> Image.Image:
    """A picture as clients may hold one."""
    sides = [int(np.exp(draw.uniform(0, np.log(draw.choice((12, 200, 900)))))) for _ in range(2)]
    if draw.random() < 0.05:
        sides = [draw.choice((1, 3000)), draw.choice((1, 15))]
    if max(sides) > 200 * min(sides):
        sides = [7, 1400]
    image = picture(sides[0], sides[1], draw.randrange(1000))
    mode = draw.choice(MODES) if draw.random() < 0.4 else "RGB"
    if mode == "I;16":
        return Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
    image = image.convert(mode)
    if mode in ("RGBA", "LA"):
        image.putalpha(picture(*sides, 5).convert("L"))
    return image


TEXT, VISION = "text_config", "vision_config"
SECTIONS = {"rope_type": "default", "rope_theta": 1e6}
# Family, part of config.json, what it says there, words of the refusal.
REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("qwen2_5_vl", VISION, {"temporal_patch_size": 1}, "temporal_patch_size=1; possible: 2"),
    ("qwen3_vl", VISION, {"temporal_patch_size": 4}, "temporal_patch_size=4; possible: 2"),
    ("ernie4_5_vl", VISION, {"temporal_merge_size": 1}, "possible: 2"),
    ("qwen2_5_vl", VISION, {"window_size": 5}, "windows smaller than a cell"),
    ("qwen2_5_vl", VISION, {"patch_size": [14, 14]}, "patch_size"),
    ("qwen2_5_vl", VISION, {"out_hidden_size": 48}, "vectors of 48"),
    ("qwen3_vl", VISION, {"in_channels": 4}, "other channels than 3"),
    ("qwen3_vl", VISION, {"num_heads": 3}, "multiple of 4"),
    ("qwen3_vl", VISION, {"head_dim": 8}, "head_dim=8; possible: 16"),
    ("paddleocr_vl", VISION, {"rope_parameters": {"rope_type": "linear"}}, "type axial"),
    ("ernie4_5_vl", VISION, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "whole heads"),
    ("qwen3_vl", VISION, {"deepstack_visual_indexes": [2, 0]}, "rising numbers"),
    ("qwen3_vl", VISION, {"deepstack_visual_indexes": [0, 9]}, "of its 4 layers"),
    ("qwen2_5_vl", TEXT, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ("qwen2_5_vl", TEXT, {"rope_parameters": SECTIONS}, "mrope_section=None"),
    ("qwen3_vl", TEXT, {"rope_parameters": SECTIONS | {"mrope_section": [4, 3, 3]}}, "sum to 8"),
    ("ernie4_5_vl", TEXT, {"rope_parameters": SECTIONS | {"mrope_section": [2, 4, 2]}}, "as many"),
    ("ernie4_5_vl", TEXT, {"rope_parameters": {"rope_type": "yarn", "factor": 2.0,
     "mrope_section": [3, 3, 2]}}, "rope_type='yarn'; possible: default"),
    ("qwen2_5_vl", TEXT, {"rope_parameters": {"rope_type": "ntk", "factor": 2.0,
     "mrope_section": [2, 3, 3]}}, "ntk"),
    ("qwen3_vl_moe", TEXT, {"num_experts_per_tok": 5}, "num_experts_per_tok=5; expected at most 4"),
    ("ernie4_5_vl", TEXT, {"moe_k": 9}, "=9; expected at most 4"),
    ("ernie4_5_vl", TEXT, {"moe_intermediate_size": 24}, "expected two numbers"),
]  # fmt: skip
PREPARED: list[tuple[dict[str, Any], str]] = [
    ({"resample": 2}, "resample=2"),
    ({"do_resize": False}, "do_resize=False"),
    ({"do_rescale": False}, "do_rescale=False"),
    ({"do_normalize": False}, "do_normalize=False"),
    ({"rescale_factor": 1.0}, "rescale_factor=1.0; possible: 1/255"),
    ({"image_mean": [0.5, 0.5]}, "2 channels"),
    ({"image_std": [0.5, 0.0, 0.5]}, "image_std above 0"),
    ({"image_mean": "CLIP"}, "CLIP"),
    ({"size": {"height": 56, "width": 56}}, "size.shortest_edge"),
    ({"size": 448}, "size is 448"),
    ({"size": None, "min_pixels": 3136}, "size.longest_edge"),
    ({"min_pixels": 10**8}, "pixels from 100000000"),
    ({"patch_size": 8}, "patches of 8"),
    ({"merge_size": 1}, "merged by 1"),
]
SAME: list[dict[str, Any]] = [
    {"image_mean": 0.5, "image_std": 0.5},
    {"min_pixels": None, "max_pixels": None},
    {"size": {"min_pixels": 3136, "max_pixels": 50176}},
    {"rescale_factor": 0.00392156862745098, "do_convert_rgb": False},
]


def changed(folder: Path, made: Path, file: str, change: Callable[[Any], None]) -> Path:
    """A copy without weights, of whose file the content is changed."""
    shutil.copytree(folder, made, ignore=shutil.ignore_patterns("*.safetensors"))
    said = json.loads((made / file).read_text())
    change(said)
    (made / file).write_text(json.dumps(said))
    return made


def read(folder: Path, name: str) -> Any:
    """What an engine reads before it has weights: the processor of pictures."""
    family = SERVED[name]
    config = build_engine_config({"model": str(folder)}, find_model).model.hf_config
    family.shapes(config, 1, "float32")
    return family.media(config, folder, MediaRules(is_trusted=True))


@pytest.mark.parametrize(("name", "part", "said", "words"), REFUSED)
def test_what_is_not_served_is_refused_by_name(
    checkpoint: Callable[[str], Path], tmp_path: Path, name: str, part: str,
    said: dict[str, Any], words: str,
) -> None:  # fmt: skip
    change = lambda config: config[part].update(said)  # noqa: E731
    folder = changed(checkpoint(name), tmp_path / "made", "config.json", change)
    with pytest.raises(ConfigError, match=re.escape(words)):
        read(folder, name).close()


@pytest.mark.parametrize(("said", "words"), PREPARED)
def test_what_is_not_prepared_is_refused_by_name(
    folder: Path, tmp_path: Path, said: dict[str, Any], words: str
) -> None:
    made = changed(folder, tmp_path / "made", "processor_config.json", replaces(said))
    with pytest.raises(ConfigError, match=re.escape(words)):
        read(made, "qwen2_5_vl").close()


@pytest.mark.parametrize("said", SAME)
def test_spellings_of_preprocessor_files(
    folder: Path, tmp_path: Path, said: dict[str, Any]
) -> None:
    rules = []
    for number, change in enumerate(({}, said)):
        made = tmp_path / str(number)
        file = "processor_config.json"
        processor = read(changed(folder, made, file, replaces(change)), "qwen2_5_vl")
        rules.append(processor.image)
        processor.close()
    halves = {"mean": (0.5,) * 3, "std": (0.5,) * 3} if "image_mean" in said else {}
    assert rules[1] == msgspec.structs.replace(rules[0], **halves)


def replaces(said: dict[str, Any]) -> Callable[[Any], None]:
    def change(file: Any) -> None:
        for part in file.values():
            part.update(said)

    return change


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "seeds", [range(1), pytest.param(range(1, 40), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_random_models_are_transformers(
    tmp_path: Path, fd_tensor: str, name: str, seeds: range
) -> None:
    for seed in seeds:
        compare(tmp_path / str(seed), name, seed, fd_tensor)


def compare(folder: Path, name: str, seed: int, library: str) -> None:
    draw = random.Random(f"{name} {seed}")
    text = decoder(draw, name)
    vision = tower(draw, name, text)
    tied = {"tie_word_embeddings": draw.random() < 0.5}
    prepared = preprocessor(draw, vision)
    more = {"text_config": text, "vision_config": vision, "": tied}
    make(folder, name, seed, more, prepared)
    oracle = Oracle(folder, name)
    room = {
        "dtype": "float32", "max_model_len": 4096, "num_gpu_blocks_override": 300,
        "block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": draw.choice((17, 64, 4096)),
        "limit_mm_per_prompt": {"image": 5, "video": 2},
    }  # fmt: skip
    with LLM(folder, tensor_library=library, **room) as llm:
        for _ in range(4):
            request(draw, llm, oracle, (seed, more, prepared))


def request(draw: random.Random, llm: LLM, oracle: Oracle, about: Any) -> None:
    images = [shown(draw) for _ in range(draw.choice((0, 1, 1, 2, 5)))]
    rgb, videos, told = [as_rgb(image) for image in images], [], []
    if "video" in llm._media.kinds and draw.random() < 0.6:
        frames = film(draw.randrange(1, 9), draw.randrange(9, 99), draw.randrange(9, 99), 3)
        fps = draw.choice((2.0, 1.0, 7.5))
        size = frame_size(
            frames.shape[2], frames.shape[1], len(frames), llm._media._prepared["video"]
        )
        across = [Image.fromarray(f).resize((size[0], f.shape[0]), BICUBIC) for f in frames]
        told.append((frames, {"fps": fps}))
        videos.append((np.stack([np.asarray(f.resize(size, BICUBIC)) for f in across]), fps))
    family = oracle.family
    places = [family.place] * len(images) + [family.film] * len(videos)
    draw.shuffle(places)
    prompt = "<|im_start|>user\n" + "".join(f"{p} and " for p in places) + "?<|im_end|>\n"
    given = {"prompt": prompt, "multi_modal_data": {"image": images, "video": told}}
    (output,) = llm.generate(given, GREEDY, use_tqdm=False)
    for image in rgb:
        assert_patches(llm, oracle, image, (image.size, about))
    if rgb:
        assert_features(llm, oracle, rgb)
    assert output.outputs[0].token_ids == oracle.greedy(prompt, rgb, 12, videos), about
