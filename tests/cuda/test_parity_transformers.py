"""Every architecture on a GPU against transformers on the same GPU, in float32 and in bfloat16.

Checkpoints are random and written by transformers: the small odd ones of the CPU suite, and wide
ones whose shapes reach the kernels that real models run on.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_core.config.arguments import build_engine_config
from fastdeploy_core.models.shapes import read_shapes
from fastdeploy_core.plugins.resolve import resolve
from tests.checkpoints import (
    FAMILY_LIMITS,
    FAMILY_VARIANTS,
    NUM_GREEDY,
    STATE_VARIANTS,
    VARIANTS,
    VOCAB,
    WIDE_VARIANTS,
    build,
    obey_config,
)
from tests.mxfp4_checkpoints import build_mxfp4
from tests.paged import PagedModel

pytestmark = pytest.mark.device("cuda")

# Largest difference of two logits over the largest logit, TF32 off on both sides.
FLOAT32_TOLERANCE = 1e-4
# In bfloat16 both sides are wrong. Ours may be this many times as far from the float32 logits as
# those of transformers, at the median token: random routers have near ties, and a token that visits
# another expert is far off on either side, as is one that reads other keys where an indexer chooses
# them. All tokens together may be no further than this (mean squares), or than that many times as
# far as those of transformers.
BFLOAT16_RATIO = {"dense": 1.5, "experts": 1.5, "index": 2.0}
BFLOAT16_TOLERANCE = {"dense": 0.06, "experts": 0.3, "index": 0.3}
PROMPT_LENGTHS = (5, 23, 150)
# Families of fd-models, but for the one whose context is shorter than the longest prompt.
FAMILIES = [name for name in (*FAMILY_VARIANTS, *STATE_VARIANTS) if name != "phi3-longrope"]
WITH_EXPERTS = (
    "moe",
    "deepseek",
    "mixtral",
    "minimax",
    "gpt-oss",
    "qwen3-next",
    "granite4",
    "kimi-linear",
    "llama4",
    "nemotron",
    "hy3",
)
# Of the newest: what config.json calls them.
NEWEST = {
    "cohere2-moe": "cohere2_moe",
    "exaone-moe": "exaone_moe",
    "hy3": "hy_v3",
    "kimi-linear": "kimi_linear",
}


@pytest.fixture(scope="module", params=[*VARIANTS, *WIDE_VARIANTS, *FAMILIES])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made anew, or kept in the folder FD_TEST_CHECKPOINTS, since transformers takes its time."""
    if request.param == "granite4" and not _norms_by_group():
        pytest.skip("this transformers norms Mamba's groups together, newer ones each of them")
    if (model_type := NEWEST.get(request.param)) and not _has(model_type):
        pytest.skip(f"this transformers has no {model_type}")
    kept = os.environ.get("FD_TEST_CHECKPOINTS")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("checkpoints")
    if not (folder / request.param / "reference.npz").exists():
        build(folder, [request.param])
    return folder / request.param


def _has(model_type: str) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return model_type in CONFIG_MAPPING_NAMES


def _norms_by_group() -> bool:
    from transformers.models.granitemoehybrid import modeling_granitemoehybrid as modeling

    return "group_size" in inspect.signature(modeling.GraniteMoeHybridRMSNormGated).parameters


@pytest.fixture(scope="module")
def prompts() -> dict[str, list[int]]:
    rng = np.random.default_rng(11)
    return {str(n): rng.integers(3, VOCAB, n).tolist() for n in PROMPT_LENGTHS}


class Theirs:
    """transformers, with plain matrix products for attention and experts."""

    def __init__(self, folder: Path, dtype: str) -> None:
        import torch
        import transformers

        self._torch = torch
        assert torch.get_float32_matmul_precision() == "highest", "TF32 is on"
        options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "eager"}
        config = transformers.AutoConfig.from_pretrained(folder)
        if hasattr(config, "_experts_implementation"):
            options["experts_implementation"] = "eager"
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
        self.model = obey_config(model).eval().cuda()

    def logits(self, prompts: dict[str, list[int]]) -> dict[str, np.ndarray]:
        """[tokens, vocabulary] of each."""
        torch = self._torch
        with torch.no_grad():
            return {
                name: self.model(torch.tensor([ids], device="cuda")).logits[0].float().cpu().numpy()
                for name, ids in prompts.items()
            }

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """What follows, token by token."""
        torch = self._torch
        with torch.no_grad():
            output = self.model(torch.tensor([prompt], device="cuda"), use_cache=True)
            tokens = [int(output.logits[0, -1].argmax())]
            while len(tokens) < count:
                step = torch.tensor([tokens[-1:]], device="cuda")
                output = self.model(step, past_key_values=output.past_key_values, use_cache=True)
                tokens.append(int(output.logits[0, -1].argmax()))
        return tokens


def ours(folder: Path, dtype: str) -> PagedModel:
    values = {"model": str(folder), "device": "cuda", "tensor_library": "torch", "dtype": dtype}
    limits = FAMILY_LIMITS.get(folder.name, {})
    config = build_engine_config({**values, **limits})
    shapes = read_shapes(config.model.hf_config, 1)
    resolved = resolve(config, layers=shapes.layers, moe=[] if shapes.moe is None else [shapes.moe])
    return PagedModel(folder, "torch", device="cuda", dtype=dtype, drivers=resolved.load, **limits)


def logits_of(model: PagedModel, prompts: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """All prompts in one step of uneven lengths."""
    rows = model.step([(f"logits{name}", ids) for name, ids in prompts.items()])
    return dict(zip(prompts, rows, strict=True))


def mean_square_error(found: dict[str, np.ndarray], true: dict[str, np.ndarray]) -> float:
    """Of all logits together, over their own mean square; its root."""
    wrong = sum(float(np.square(found[n] - true[n], dtype=np.float64).sum()) for n in true)
    return (wrong / sum(float(np.square(x, dtype=np.float64).sum()) for x in true.values())) ** 0.5


def median_error(found: dict[str, np.ndarray], true: dict[str, np.ndarray]) -> float:
    """Of one token's logits, over the root of the mean square of all."""
    wrong = [np.square(found[n] - true[n], dtype=np.float64).mean(-1) for n in true]
    scale = np.square(np.concatenate(list(true.values())), dtype=np.float64).mean()
    return float(np.sqrt(np.median(np.concatenate(wrong)) / scale))


def kind(checkpoint: Path) -> str:
    """What makes a token's logits jump where roundings differ."""
    if checkpoint.name == "deepseek-v32":
        return "index"
    return "experts" if any(word in checkpoint.name for word in WITH_EXPERTS) else "dense"


@pytest.fixture(scope="module")
def truth(checkpoint: Path, prompts: dict[str, list[int]]) -> Iterator[dict[str, Any]]:
    theirs = Theirs(checkpoint, "float32")
    yield {
        "logits": theirs.logits(prompts),
        "greedy": {name: theirs.greedy(ids, NUM_GREEDY) for name, ids in prompts.items()},
    }


def test_float32_logits_and_greedy_tokens_equal_transformers(
    checkpoint: Path, prompts: dict[str, list[int]], truth: dict[str, Any]
) -> None:
    model = ours(checkpoint, "float32")
    found = logits_of(model, prompts)
    largest = max(float(np.abs(x).max()) for x in truth["logits"].values())
    error = max(float(np.abs(found[n] - x).max()) for n, x in truth["logits"].items()) / largest
    print(f"{checkpoint.name} float32: largest difference {error:.1e} of the largest logit")
    assert error < FLOAT32_TOLERANCE
    # A prompt alone, then decode steps of all rows together.
    assert model.greedy(prompts, NUM_GREEDY) == truth["greedy"]


def test_bfloat16_logits_are_as_near_to_float32_as_those_of_transformers(
    checkpoint: Path, prompts: dict[str, list[int]], truth: dict[str, Any]
) -> None:
    found = logits_of(ours(checkpoint, "bfloat16"), prompts)
    theirs = Theirs(checkpoint, "bfloat16").logits(prompts)
    mine = mean_square_error(found, truth["logits"])
    other = mean_square_error(theirs, truth["logits"])
    between = mean_square_error(found, theirs)
    median, their_median = (median_error(x, truth["logits"]) for x in (found, theirs))
    print(
        f"{checkpoint.name} bfloat16: {mine:.4f} from float32, transformers {other:.4f}, "
        f"{between:.4f} between the two; medians {median:.4f}, {their_median:.4f}"
    )
    ratio = BFLOAT16_RATIO[kind(checkpoint)]
    assert mine < max(BFLOAT16_TOLERANCE[kind(checkpoint)], ratio * other)
    assert median < ratio * their_median


def test_bfloat16_decode_steps_give_the_logits_of_the_prompt(
    checkpoint: Path, prompts: dict[str, list[int]], truth: dict[str, Any]
) -> None:
    """Token by token through the kernels of decode steps, against the float32 logits of the
    whole."""
    model, first = ours(checkpoint, "bfloat16"), 3
    names = [n for n in prompts if len(prompts[n]) > first + 12]
    model.step([(n, prompts[n][:first]) for n in names])
    found: dict[str, list[np.ndarray]] = {n: [] for n in names}
    for at in range(first, first + 12):
        for name, row in zip(
            names, model.step([(n, [prompts[n][at]]) for n in names]), strict=True
        ):
            found[name].append(row[0])
    decoded = {n: np.stack(rows) for n, rows in found.items()}
    true = {n: truth["logits"][n][first : first + 12] for n in names}
    error = mean_square_error(decoded, true)
    print(f"{checkpoint.name} bfloat16, decode steps: {error:.4f} from float32")
    assert error < BFLOAT16_TOLERANCE[kind(checkpoint)]


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-5), ("bfloat16", 0.03)])
def test_experts_in_mxfp4_give_the_logits_of_the_numbers_that_they_stand_for(
    tmp_path: Path, prompts: dict[str, list[int]], dtype: str, most: float
) -> None:
    """Each of these numbers is one in bfloat16 too, so only sums' order differs."""
    packed, twin = build_mxfp4(tmp_path)
    found, wanted = (logits_of(ours(folder, dtype), prompts) for folder in (packed, twin))
    error = median_error(found, wanted)
    print(f"gpt-oss in MXFP4, {dtype}: {error:.1e} from the same numbers, median token")
    assert error < most
