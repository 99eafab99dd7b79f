"""Bytes that sequences of real models with windows hold in the cache, against the arithmetic."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fastdeploy_core.config import BatchConfig, CacheConfig
from fastdeploy_core.contracts.attention import AttentionSpec, cache_dtypes
from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_core.kvcache import KVCacheManager
from fastdeploy_core.kvcache.sizing import plan_cache
from fastdeploy_core.models.shapes import read_shapes
from fastdeploy_core.plugins.kernels import build_kernel_table
from fastdeploy_core.reference.attention import ReferenceAttention
from fastdeploy_core.reference.device import CpuDevice
from fastdeploy_core.tensor import DTYPE_BYTES
from fastdeploy_core.types.worker import LayerGroup, WorkerInfo

BLOCK, CHUNK = 64, 8192
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "vocab_size": 201088,
}
GEMMA_3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_hidden_layers": 34,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000.0,
    "rope_theta": 1000000.0,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "vocab_size": 262208,
}
# Layers with and without a window, the window, and bytes of a token's keys and values in one.
MODELS = {
    "gpt-oss 20b": (GPT_OSS, 12, 12, 128, 2 * 8 * 64 * 2),
    "Gemma 3 4B": (GEMMA_3, 29, 5, 1024, 2 * 4 * 256 * 2),
}


def block_bytes(config: dict[str, Any], tensor_library: str) -> dict[str, int]:
    """Of one block in all layers of a group, by its kind, as the driver lays it out."""
    device = CpuDevice(DeviceOptions(tensor_library=tensor_library, num_threads=1))
    found, kernels = dict.fromkeys(("all", "window"), 0), build_kernel_table("cpu")
    for spec in read_shapes(config, dtype="bfloat16").layers:
        assert isinstance(spec, AttentionSpec)
        shapes = ReferenceAttention(spec, BLOCK, device, kernels).cache_shapes(1)
        for shape, dtype in zip(shapes, cache_dtypes(spec, len(shapes)), strict=True):
            found[spec.retention.kind] += math.prod(shape) * DTYPE_BYTES[dtype]
    device.close()
    return found


@pytest.mark.parametrize("length", [8192, 32768, 131072])
@pytest.mark.parametrize("model", MODELS)
def test_a_prompt_holds_what_the_windows_need(model: str, length: int, tensor_library: str) -> None:
    config, with_window, without, window, token_bytes = MODELS[model]
    of_block = block_bytes(config, tensor_library)
    per_block = BLOCK * token_bytes
    assert of_block == {"all": without * per_block, "window": with_window * per_block}
    info = WorkerInfo(
        num_layers=with_window + without,
        vocab_size=1000,
        max_model_len=length,
        bytes_per_block=of_block["all"],
        available_bytes=64 << 30,
        block_size=BLOCK,
        bounded=[LayerGroup("window", window, of_block["window"])],
    )
    batch = BatchConfig(max_num_seqs=8, max_num_batched_tokens=CHUNK)
    plan = plan_cache([info], CacheConfig(), batch, length)
    pools = plan.num_blocks * of_block["all"] + plan.bounded[0].num_blocks * of_block["window"]
    assert 0 <= info.available_bytes - pools < of_block["all"]  # nothing is lost by padding

    kv = KVCacheManager(plan.num_blocks, BLOCK, model_identity="m", enable_prefix_caching=False)
    kv.add_groups(plan.bounded)
    (windows,), text = kv.bounded, [7] * (length + 1)
    table = kv.new_table()
    kv.start(table, kv.match(table, text), CHUNK)
    for end in range(CHUNK, length + 1, CHUNK):
        assert kv.grow(table, end) is not None
        assert windows.pool.num_used <= (CHUNK + window) // BLOCK + 1
        kv.commit(table, text, end)
        kv.let_go(table, end)
    kept = kv.pool.num_used * of_block["all"] + windows.pool.num_used * of_block["window"]
    needed = token_bytes * (without * length + with_window * window)
    assert needed <= kept + token_bytes * with_window and kept <= 1.03 * needed
    kv.free(table)
    assert kv.num_used == 0
