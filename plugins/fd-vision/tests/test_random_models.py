"""Models as strangers may configure them: random sizes, switches and preprocessor files of each
family, with random weights and requests, compared with transformers on the same folder. What is
not served as transformers computes it has to be refused by the name of its field."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fd_vision.patches import as_rgb
from fd_vision.video import frame_size
from PIL import Image
from test_parity import assert_features, assert_patches
from tiny import FAMILIES, VOCAB, Oracle, film, make, picture

from fastdeploy_core.api.llm import LLM
from fastdeploy_core.types import SamplingParams

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


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "seeds", [range(2), pytest.param(range(2, 60), marks=pytest.mark.slow)], ids=["few", "many"]
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
