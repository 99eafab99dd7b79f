"""The vendor's operators are called with what they want; recorded by a stand-in in numpy."""

import numpy as np
import pytest
from fd_metax.attention import MetaxAttention
from fd_metax.device import MetaxDevice
from fd_metax.operators import OPERATORS
from fd_simdevice.expert_cases import check_int8_cell
from fd_simdevice.stand_in import (
    SortedExperts,
    StandIn,
    attend,
    check,
    read,
    rotate,
    standing_in,
    write,
)

from fastdeploy_core.contracts.attention import AttentionSpec
from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_testing.attention_case import AttentionCase
from fastdeploy_testing.drivers import build_kernel_table

pytestmark = pytest.mark.usefixtures("simulated")

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 16, 64


class Operators(StandIn):
    """As FastDeploy 2.x called them; the first two work in place on the joined heads."""

    def _where(self, qkv, before, row_of_token, starts):
        tokens, rows = qkv.shape[0], before.shape[0]
        check(qkv, "bfloat16", tokens, (HEADS + 2 * KV_HEADS) * DIM)
        check(before, "int32", rows, 1)
        check(row_of_token, "int32", tokens)
        check(starts, "int32", rows + 1)
        row = read(row_of_token)
        return row, read(before)[row, 0] + np.arange(tokens) - read(starts)[row]

    def rotary_position_embedding(
        self, qkv, other, before, row_of_token, starts, table, heads, kv_heads, dim, positions,
        is_neox, is_3d,
    ):  # fmt: skip
        self.count("rotary")
        assert other is None and (heads, kv_heads, dim) == (HEADS, KV_HEADS, DIM) and not is_3d
        check(table, "float32", 2, 1, positions, 1, DIM // 2)
        _, where = self._where(qkv, before, row_of_token, starts)
        cos, sin = read(table)[:, 0, where, 0]
        joined = read(qkv).reshape(qkv.shape[0], -1, DIM)
        joined[:, : heads + kv_heads] = rotate(joined[:, : heads + kv_heads], cos, sin, is_neox)
        write(qkv, joined.reshape(qkv.shape[0], -1))

    def write_cache_kv(
        self, qkv, other, before, row_of_token, starts, tables, k_cache, v_cache, heads, kv_heads,
        dim,
        longest,
    ):  # fmt: skip
        self.count("cache")
        row, where = self._where(qkv, before, row_of_token, starts)
        check(tables, "int32", before.shape[0], None)
        blocks = read(tables)[row, where // BLOCK]
        joined = read(qkv).reshape(qkv.shape[0], -1, DIM)
        for cache, first in ((k_cache, heads), (v_cache, heads + kv_heads)):
            check(cache, "bfloat16", None, BLOCK, KV_HEADS, DIM)
            pool = read(cache)
            pool[blocks, where % BLOCK] = joined[:, first : first + kv_heads]
            write(cache, pool)
        assert longest == where.max() + 1

    def flash_attn_varlen_forward(
        self, *, q, k, v, out, cu_seqlens_q, cu_seqlens_k, block_tables, softmax_scale, causal,
        max_seqlen_q, max_seqlen_k, **rest,
    ):  # fmt: skip
        self.count("attention")
        check(out, "bfloat16", q.shape[0], HEADS, DIM)
        starts, ends, tables = read(cu_seqlens_q), read(cu_seqlens_k), read(block_tables)
        assert causal and rest["dropout_p"] == 0.0 and max_seqlen_k == np.diff(ends).max()
        assert max_seqlen_q == np.diff(starts).max()
        result = np.zeros(tuple(out.shape))
        for row in range(len(tables)):
            part, total = slice(starts[row], starts[row + 1]), ends[row + 1] - ends[row]
            own = [read(x)[tables[row]].reshape(-1, KV_HEADS, DIM)[:total] for x in (k, v)]
            result[part] = attend(read(q)[part], *own, softmax_scale)
        write(out, result)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [DIM, 4])
def test_attention_over_prompts_chunks_and_decodes(interleaved, rotated):
    device = MetaxDevice(DeviceOptions())
    spec = AttentionSpec(
        "gqa", HEADS, KV_HEADS, DIM, DIM, DIM**-0.5, "bfloat16", rotary_interleaved=interleaved
    )
    case = AttentionCase(device, spec, BLOCK, 3, rotary_dim=rotated)
    driver = MetaxAttention(spec, BLOCK, device, build_kernel_table("metax"))
    steps = [[(0, 5), (1, 70)], [(0, 1), (2, 9)], [(1, 3), (0, 1), (2, 1)]]
    with standing_in(OPERATORS, Operators()) as operators, device.xp.no_grad():
        case.check(driver, steps, 0.05)
    assert operators.calls == {"rotary": 3, "cache": 3, "attention": 3}
    device.close()


def test_inputs_stay_as_they_are():
    """The operators work in place, so the driver must hand them a copy."""
    device = MetaxDevice(DeviceOptions())
    spec = AttentionSpec("gqa", HEADS, KV_HEADS, DIM, DIM, 0.25, "bfloat16")
    case = AttentionCase(device, spec, BLOCK, 1)
    driver = MetaxAttention(spec, BLOCK, device, build_kernel_table("metax"))
    forward, kept = driver.forward, []

    def watched(q, k, v, *rest):
        before = [read(x).copy() for x in (q, k, v)]
        result = forward(q, k, v, *rest)
        kept.append(all(np.array_equal(read(x), b) for x, b in zip((q, k, v), before, strict=True)))
        return result

    driver.forward = watched
    with standing_in(OPERATORS, Operators()), device.xp.no_grad():
        case.check(driver, [[(0, 4)]], 0.05)
    assert kept == [True]


def test_kv_memory_can_be_set_by_hand(monkeypatch):
    assert MetaxDevice(DeviceOptions()).limits.kv_memory_bytes == 0
    monkeypatch.setenv("FD_METAX_KVCACHE_MEM", "2")
    assert MetaxDevice(DeviceOptions()).limits.kv_memory_bytes == 2 * 1024**3


class Experts(SortedExperts):
    """moe_expert_ffn as FastDeploy 2.x called it."""

    def moe_expert_ffn(
        self, rows, counts, gate_up, down, up_bias, gate_up_scale, down_scale, expert_ids, algorithm
    ):
        self.count("ffn")
        experts, width = len(counts), gate_up.shape[1] // 2
        check(gate_up, "int8", experts, 2 * width, rows.shape[1])
        check(down, "int8", experts, rows.shape[1], width)
        check(gate_up_scale, "bfloat16", experts, 2 * width)
        check(down_scale, "bfloat16", experts, rows.shape[1])
        assert up_bias is None and expert_ids is None and algorithm == "weight_only_int8"
        return self.gated(
            rows,
            counts,
            read(gate_up) * read(gate_up_scale)[..., None],
            read(down) * read(down_scale)[..., None],
        )


def test_int8_experts_equal_the_oracle():
    device = MetaxDevice(DeviceOptions())
    check_int8_cell(device, OPERATORS, Experts(), "fd-metax")
    device.close()
