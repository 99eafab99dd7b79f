"""GGUF files on fd-cpu's device: packed matrices stay packed and run in the plain operations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_core.plugins import lookup
from tests.checkpoints import build
from tests.gguf_files import write_gguf
from tests.paged import PagedModel, load_driver, with_quantizer

pytest.importorskip("fd_cpu._native", reason="fd-cpu is not installed")
DRIVERS = {"attention": "x86_paged", "moe": "x86_experts", "quantizer": "gguf"}


def drivers(kind: str, name: str) -> Any:
    return lookup(kind, name or DRIVERS[kind]) if kind in DRIVERS else load_driver(kind, name)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
@pytest.mark.parametrize("variant", ["gguf-wide", "gguf-experts"])
def test_packed_matrices_have_nearly_the_logits_of_decoded_ones(
    variant: str,
    kind: str,
    tensor_library: str,
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FD_CACHE_DIR", str(tmp_path / "cache"))
    source = build(tmp_path_factory.mktemp("checkpoints"), [variant]) / variant
    file = write_gguf(source, tmp_path / "model.gguf", kind)
    prompt = ("a", [5, 9, 77, 3, 12, 60, 61, 62])
    reference = with_quantizer("gguf")  # which decodes: the reference has no kernel of its own
    decoded = PagedModel(file, tensor_library, dtype="float32", drivers=reference).step([prompt])[0]
    model = PagedModel(
        file, tensor_library, dtype="float32", device="x86", block_size=16, drivers=drivers
    )
    got = model.step([prompt])[0]
    # Activations are rounded to int8 for each group of 32.
    lengths = np.linalg.norm(got, axis=-1) * np.linalg.norm(decoded, axis=-1)
    assert (np.sum(got * decoded, -1) / lengths).min() > 0.99
    layer = model.loaded.model.layers[0]
    assert layer.attention.qkv.weight.native.group == 32
    model.close()
