"""Every architecture on fd-cpu's device: against transformers in float32, within tolerances a wrong
kernel fails in the other modes, at every instruction level and with every number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_core.plugins import lookup
from tests.checkpoints import FAMILY_LIMITS, VARIANTS, build, reference
from tests.paged import PagedModel, load_driver, with_quantizer
from tests.parity import (
    TOLERANCE,
    check_chunks_beside_a_decode,
    check_prompts_and_greedy,
    relative_error,
)

native = pytest.importorskip("fd_cpu._native", reason="fd-cpu is not installed")


def drivers(kind: str, name: str) -> Any:
    if kind in ("attention", "moe"):
        return lookup(kind, {"attention": "x86_paged", "moe": "x86_experts"}[kind])
    return (
        lookup("quantizer", name or QUANTIZER[0])
        if kind == "quantizer"
        else load_driver(kind, name)
    )


QUANTIZER = [""]


@contextmanager
def model_of(folder: Path, library: str, **options: Any) -> Iterator[PagedModel]:
    QUANTIZER[0] = options.get("quantization", "")
    made = PagedModel(folder, library, device="x86", block_size=16, drivers=drivers, **options)
    yield made
    made.close()


def similarity(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The smallest cosine between rows."""
    lengths = np.linalg.norm(ours, axis=-1) * np.linalg.norm(theirs, axis=-1)
    return float((np.sum(ours * theirs, -1) / lengths).min())


@pytest.mark.parametrize("variant", VARIANTS)
def test_prompt_logits_and_64_greedy_tokens_equal_transformers(
    checkpoints: Path, variant: str, tensor_library: str
) -> None:
    with model_of(checkpoints / variant, tensor_library) as model:
        check_prompts_and_greedy(model, reference(checkpoints / variant))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_prompt_in_chunks_beside_a_decode_gives_the_same_logits(
    checkpoints: Path, variant: str, tensor_library: str
) -> None:
    with model_of(checkpoints / variant, tensor_library, num_threads=2) as model:
        check_chunks_beside_a_decode(model, reference(checkpoints / variant))


# Windows; in turn with all keys, and a soft cap; and sinks.
BEYOND_PLAIN = ("mistral-window", "gemma2", "gpt-oss")


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("families"), list(BEYOND_PLAIN))


@pytest.mark.parametrize("variant", BEYOND_PLAIN)
def test_windows_sinks_and_caps_equal_transformers(
    families: Path, variant: str, tensor_library: str
) -> None:
    folder, limits = families / variant, FAMILY_LIMITS.get(variant, {})
    with model_of(folder, tensor_library, **limits) as model:
        check_prompts_and_greedy(model, reference(folder))
    with model_of(folder, tensor_library, num_threads=2, **limits) as model:
        check_chunks_beside_a_decode(model, reference(folder))


# Cosine to float32's logits. These models have few, random weights, which rounds badly: what is
# wrong about a kernel shows as 0.8 or less.
MODES = {"wint8": 0.98, "wint4": 0.85}


@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_is_as_near_as_its_rounding(
    checkpoints: Path, variant: str, tensor_library: str
) -> None:
    if tensor_library != "torch":
        pytest.skip("PaddlePaddle has no bfloat16 arithmetic on a processor")
    answer = reference(checkpoints / variant)[0]
    with model_of(checkpoints / variant, tensor_library, dtype="bfloat16") as model:
        logits = model.step([("a", answer["prompt"].tolist())])[0]
    assert similarity(logits, answer["logits"]) > 0.999


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("variant", ["llama", "qwen3", "ernie"])
def test_other_modes_stay_near_float32(
    checkpoints: Path, variant: str, mode: str, tensor_library: str
) -> None:
    answer = reference(checkpoints / variant)[0]
    options = {"dtype": "bfloat16"} if tensor_library == "torch" else {}
    options["quantization"] = mode
    with model_of(checkpoints / variant, tensor_library, **options) as model:
        logits = model.step([("a", answer["prompt"].tolist())])[0]
    assert similarity(logits, answer["logits"]) > MODES[mode]


@pytest.mark.parametrize("variant", ["ernie-moe", "deepseek", "qwen3-moe"])
@pytest.mark.parametrize("mode", ["w8a8", "w4a8"])
def test_formats_that_round_activations_equal_the_reference_device(
    checkpoints: Path, variant: str, mode: str, tensor_library: str
) -> None:
    prompt = reference(checkpoints / variant)[0]["prompt"].tolist()
    folder, options = checkpoints / variant, {"quantization": mode}
    with model_of(folder, tensor_library, **options) as model:
        logits = model.step([("a", prompt)])[0]
    other = PagedModel(folder, tensor_library, drivers=with_quantizer(mode), **options)
    # Both round the same numbers, but for the few that lie between two levels.
    assert similarity(logits, other.step([("a", prompt)])[0]) > 0.998
    other.close()


@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_a_cache_of_int8_equals_the_reference_devices(
    checkpoints: Path, variant: str, tensor_library: str
) -> None:
    prompt = reference(checkpoints / variant)[0]["prompt"].tolist()
    found = []
    for options in ({"device": "x86", "block_size": 16, "drivers": drivers}, {}):
        with closing(
            PagedModel(checkpoints / variant, tensor_library, kv_dtype="int8", **options)
        ) as model:
            model.step([("a", prompt[:-1])])
            found.append(model.step([("a", prompt[-1:])])[0])
    plain = PagedModel(checkpoints / variant, tensor_library)
    wanted = plain.step([("a", prompt)])[0][-1:]
    plain.close()
    # Both round the same numbers, but for the few that lie between two levels.
    assert similarity(*found) > 0.9999 and similarity(found[0], wanted) > 0.999


@pytest.mark.parametrize("isa", [*native.available_isas(), "emulated", "emulated_vnni"])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_levels_and_thread_counts_agree(
    checkpoints: Path,
    tensor_library: str,
    isa: str,
    num_threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = reference(checkpoints / "ernie-moe")[0]
    monkeypatch.setenv("FD_CPU_ISA", isa)
    folder = checkpoints / "ernie-moe"
    with model_of(folder, tensor_library, num_threads=num_threads) as model:
        assert model.device.report()[0] == f"native kernels: {isa}, {num_threads} threads"
        logits = model.step([("a", answer["prompt"].tolist())])[0]
    assert relative_error(logits, answer["logits"]) < TOLERANCE
