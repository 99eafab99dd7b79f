"""The reference attention over padded steps gives each row what it gives it in an exact one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fastdeploy_core.contracts.attention import AttentionBatch
from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_core.plugins.kernels import build_kernel_table
from fastdeploy_core.reference.attention import ReferenceAttention
from fastdeploy_core.reference.device import CpuDevice
from fastdeploy_testing.conformance.test_attention import (
    AttentionConformance,
    World,
    gqa_spec,
    mla_spec,
)
from fastdeploy_testing.conformance.test_kv_formats import QuantizedWorld

BLOCK = 16
# (tokens fed, tokens in all) of each row.
STEPS = {
    "decodes": [(1, 5), (1, 40), (1, 17)],
    "prompts": [(5, 5), (20, 20)],
    "chunks": [(7, 23), (1, 1), (20, 33)],
}
SPECS = {
    "gqa": gqa_spec("gqa 4:2", "float32"),
    "mla": mla_spec("float32"),
    "softcap": replace(gqa_spec("gqa 4:2", "float32"), softcap=2.0),
    "sinks": replace(gqa_spec("gqa 4:2", "float32"), sinks=True),
    "int8": replace(gqa_spec("gqa 4:2", "float32"), kv_format="int8"),
    "mla float8": replace(mla_spec("float32"), kv_format="float8_e4m3fn"),
}


def padded(device: Any, exact: AttentionBatch) -> tuple[AttentionBatch, np.ndarray]:
    """As worker/padded_batch.py lays it out, with two padding rows; and where the tokens lie."""
    counts = np.diff(exact.cu_seqlens_q)
    rows, tokens = exact.num_seqs + 2, int(counts.max())
    tokens += tokens > 1  # so that the longest row has padding, too
    starts = exact.seq_lens - counts
    width = -(-int(starts.max() + tokens) // BLOCK) + 1
    tables = np.zeros((rows, width), dtype=np.int32)
    tables[: exact.num_seqs, : exact.block_tables.shape[1]] = exact.block_tables
    lengths = np.zeros(rows, dtype=np.int32)
    lengths[: exact.num_seqs] = starts + tokens
    where = np.concatenate([r * tokens + np.arange(n) for r, n in enumerate(counts)])
    slots = np.full(rows * tokens, -1, dtype=np.int64)
    slots[where] = device.to_host(exact.slot_mapping)
    offsets, positions = np.arange(rows + 1) * tokens, np.zeros(rows * tokens)
    batch = AttentionBatch.upload(
        device.to_device, offsets, lengths, tables, slots, positions, tokens_per_row=tokens
    )
    return replace(batch, is_padded=True), where


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", SPECS)
def test_padding_changes_nothing(tensor_library: str, name: str, step: str) -> None:
    device = CpuDevice(DeviceOptions(tensor_library=tensor_library, num_threads=1))
    spec, kernels = SPECS[name], build_kernel_table("cpu")
    driver = ReferenceAttention(spec, BLOCK, device, kernels)
    kind = QuantizedWorld if spec.kv_format else World
    sinks = device.to_device(np.array([0.5, -1, 2, 0], np.float32)) if spec.sinks else None
    with device.xp.no_grad():
        world = kind(AttentionConformance(), device, kernels, spec, BLOCK, STEPS[step])
        inputs = world.write(driver)
        exact = world.batch()
        expected = device.to_host(
            driver.forward(*inputs, world.cache, driver.prepare(exact), None, None, sinks)
        ).copy()
        batch, where = padded(device, exact)
        spread = []
        for x in inputs:
            values = device.to_host(x)
            wide = np.full((batch.num_tokens, *values.shape[1:]), 7.0, dtype=np.float32)
            wide[where] = values
            spread.append(device.to_device(wide))
        got = device.to_host(
            driver.forward(*spread, world.cache, driver.prepare(batch), None, None, sinks)
        )
        assert np.isfinite(got).all()
        assert np.abs(got[where] - expected).max() < 1e-5
        world.check_canaries()
