"""Every architecture against transformers, on checkpoints that transformers saved, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_core.contracts.attention import AttentionBatch, HeadNorms
from fastdeploy_core.reference.attention import ReferenceAttention
from fastdeploy_core.tensor import load
from tests.checkpoints import NUM_GREEDY, VARIANTS, paddle_copy, reference
from tests.paged import PagedModel, load_driver
from tests.parity import check_chunks_beside_a_decode, check_prompts_and_greedy


class NormingAttention(ReferenceAttention):
    """Norms, rotates and writes what it is given, each by its kernel."""

    unit = "rope_kv"
    norms_heads = True

    def __init__(self, spec: Any, block_size: int, device: Any, kernels: Any) -> None:
        super().__init__(spec, block_size, device, kernels)
        self._kernels = kernels

    def prepare(self, batch: AttentionBatch) -> Any:
        self._batch = batch
        return super().prepare(batch)

    def forward(
        self,
        q: Any,
        k: Any,
        v: Any,
        cache: tuple[Any, ...],
        metadata: Any,
        rotary: Any = None,
        scales: Any = None,
        norms: HeadNorms | None = None,
    ) -> Any:
        kernels, batch = self._kernels, self._batch
        assert norms is not None
        q, k = kernels["qk_norm"](q.clone(), k.clone(), norms.q, norms.k, norms.eps)
        interleaved = self.spec.rotary_interleaved
        q, k = kernels["rotary_embedding"](q, k, batch.positions, rotary, interleaved)
        kernels["kv_write"]((k, v), cache, batch.slot_mapping)
        return super().forward(q, k, v, cache, metadata)


@pytest.mark.parametrize("variant", VARIANTS)
def test_prompt_logits_and_64_greedy_tokens_equal_transformers(
    checkpoints: Path, variant: str, tensor_library: str
) -> None:
    model = PagedModel(checkpoints / variant, tensor_library)
    largest = check_prompts_and_greedy(model, reference(checkpoints / variant))
    print(f"{variant} on {tensor_library}: largest relative logit error {largest:.1e}")


@pytest.mark.parametrize("variant", ["qwen3", "qwen3-moe"])
def test_a_driver_that_norms_heads_is_given_the_weights(
    checkpoints: Path, variant: str, tensor_library: str
) -> None:
    def driver(kind: str, name: str) -> Any:
        return NormingAttention if kind == "attention" else load_driver(kind, name)

    model = PagedModel(checkpoints / variant, tensor_library, drivers=driver)
    check_prompts_and_greedy(model, reference(checkpoints / variant))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_prompt_in_chunks_beside_a_decode_gives_the_same_logits(
    checkpoints: Path, variant: str, tensor_library: str
) -> None:
    model = PagedModel(checkpoints / variant, tensor_library)
    check_chunks_beside_a_decode(model, reference(checkpoints / variant))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_paddle_layout_copy_gives_the_same_tokens(
    checkpoints: Path, variant: str, tensor_library: str, tmp_path: Path
) -> None:
    copy = paddle_copy(
        checkpoints / variant, tmp_path / "copy", ernie_names=variant.startswith("ernie")
    )
    answer = reference(checkpoints / variant)[0]
    tokens = PagedModel(copy, tensor_library).greedy({"a": answer["prompt"].tolist()}, NUM_GREEDY)
    assert tokens["a"] == answer["greedy"].tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_stays_near_float32(checkpoints: Path, variant: str, tensor_library: str) -> None:
    if "bfloat16" not in load(tensor_library).cpu_matmul_dtypes:
        pytest.skip(f"{tensor_library} cannot multiply bfloat16 on a CPU")
    answer = reference(checkpoints / variant)[0]
    model = PagedModel(checkpoints / variant, tensor_library, dtype="bfloat16")
    logits = model.step([("a", answer["prompt"].tolist())])[0]
    # Eight bits of mantissa: far from exact, yet a wrong cast or a lost scale would be far outside.
    similarity = np.sum(logits * answer["logits"], -1) / (
        np.linalg.norm(logits, axis=-1) * np.linalg.norm(answer["logits"], axis=-1)
    )
    assert similarity.min() > 0.98
