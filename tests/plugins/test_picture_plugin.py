"""The picture model of docs/how-to/serve-pictures.md, as a wheel: the kit compares its text with
transformers, and here its pictures are."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.plugins.test_model_plugin import site_with
from tests.plugins.wheels import REPOSITORY, fastdeploy, python

NAME, PLACE, HIDDEN = "ToyVisionForCausalLM", 90, 64
PAGE = REPOSITORY / "docs" / "how-to" / "serve-pictures.md"
EXAMPLE = REPOSITORY / "examples" / "fd-toy-vision" / "fd_toy_vision" / "model.py"
SOURCE = EXAMPLE.read_text("utf-8")
ASK = """
import json, sys
from fastdeploy import LLM
from fastdeploy_core.types import SamplingParams
model, library, asked = sys.argv[1:4]
room = {"max_model_len": 128, "num_gpu_blocks_override": 32, "block_size": 16}
params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
found = []
for more in ({}, {"max_num_batched_tokens": 19, "max_num_seqs": 4}):
    with LLM(model, tensor_library=library, dtype="float32", skip_tokenizer_init=True,
             **room, **more) as llm:
        for _ in range(2):  # the second time from the prefix cache
            outputs = llm.generate(json.loads(asked), params, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
print(json.dumps(found))
"""


def test_the_page_shows_the_example() -> None:
    assert f"```python\n{SOURCE}```" in PAGE.read_text("utf-8")
    assert len(SOURCE.splitlines()) < 250


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of transformers, to which a tower is added."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from safetensors.torch import load_file, save_file

    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        initializer_range=0.2,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("toy")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for part, width in (("up", 192), ("down", HIDDEN)):
        tensors[f"vision.{part}.weight"] = torch.randn(HIDDEN, width) / width**0.5
        tensors[f"vision.{part}.bias"] = torch.randn(HIDDEN)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((folder / "config.json").read_text())
    said |= {"architectures": [NAME], "image_token_id": PLACE}
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def test_the_kit_passes(tmp_path: Path, checkpoint: Path, tensor_library: str) -> None:
    site = site_with(tmp_path, NAME, SOURCE)
    done = fastdeploy(
        site, "plugins", "check", NAME, "--kind", "model", "--model", str(checkpoint),
        "--tensor", tensor_library, timeout_s=300,
    )  # fmt: skip
    assert re.search(r"TestModel +PASS +7 +0 +0", done.stdout), done.stdout[-9000:]


def test_pictures_are_what_transformers_makes_of_their_vectors(
    tmp_path: Path, checkpoint: Path, tensor_library: str
) -> None:
    """Whole and cut inside pictures, anew and from the cache; the tower in torch, as it is said."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from PIL import Image
    from safetensors.torch import load_file

    pictures = []
    for seed in (1, 2):
        pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        pictures.append(Image.fromarray(pixels).resize((50, 40), Image.Resampling.NEAREST))
    cases = [([5, PLACE, 7], [0]), ([PLACE, 8, PLACE], [0, 1]), ([PLACE, 8, PLACE], [1, 0])]
    asked: list[dict[str, Any]] = []
    for ids, which in cases:
        urls = []
        for number in which:
            buffer = io.BytesIO()
            pictures[number].save(buffer, "PNG")
            data = base64.b64encode(buffer.getvalue()).decode()
            urls.append(f"data:image/png;base64,{data}")
        asked.append({"prompt_token_ids": ids, "multi_modal_data": {"image": urls}})
    site = site_with(tmp_path, NAME, SOURCE)
    done = python(site, "-c", ASK, str(checkpoint), tensor_library, json.dumps(asked))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])

    model = transformers.LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    weights = load_file(checkpoint / "model.safetensors")
    wanted = []
    for ids, which in cases:
        rows, images = [], iter(which)
        for token in ids:
            if token != PLACE:
                rows.append(model.model.embed_tokens(torch.tensor([token])))
                continue
            small = pictures[next(images)].resize((32, 32), Image.Resampling.BICUBIC)
            cells = np.asarray(small).reshape(4, 8, 4, 8, 3).transpose(0, 2, 1, 3, 4)
            x = torch.tensor(cells.reshape(16, -1)).float() / 127.5 - 1
            x = torch.nn.functional.linear(
                x, weights["vision.up.weight"], weights["vision.up.bias"]
            )
            rows.append(
                torch.nn.functional.linear(
                    torch.nn.functional.gelu(x), weights["vision.down.weight"],
                    weights["vision.down.bias"],
                )
            )  # fmt: skip
        with torch.no_grad():
            output = model.generate(
                inputs_embeds=torch.cat(rows)[None], max_new_tokens=24, do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        wanted.append(output[0].tolist())
    assert found == [wanted] * 4
    assert wanted[1] != wanted[2]
