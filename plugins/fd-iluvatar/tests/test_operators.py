"""The vendor's operators are called with what they want; recorded by a stand-in in numpy."""

from itertools import pairwise

import numpy as np
import pytest
from fd_iluvatar.attention import BLOCK_SIZE, IluvatarAttention
from fd_iluvatar.device import IluvatarDevice
from fd_iluvatar.operators import OPERATORS
from fd_simdevice.expert_cases import check_int8_cell
from fd_simdevice.stand_in import (
    SortedExperts,
    StandIn,
    attend,
    check,
    like,
    read,
    rotate,
    standing_in,
    write,
)

from fastdeploy_core.contracts.attention import AttentionSpec
from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_core.errors import CapabilityError, ConfigError
from fastdeploy_testing.attention_case import AttentionCase
from fastdeploy_testing.drivers import build_kernel_table

pytestmark = pytest.mark.usefixtures("simulated")

HEADS, KV_HEADS, DIM = 4, 2, 16
GIB = 1024**3


class Operators(StandIn):
    """As FastDeploy 2.x called them."""

    def _run(self, qkv, k_cache, v_cache, tables, rows, cos, sin, shape):
        """rows: (first token, tokens fed, tokens in all) each."""
        check(qkv, "bfloat16", None, (HEADS + 2 * KV_HEADS) * DIM)
        check(tables, "int32", len(rows), None)
        for table in (cos, sin):
            check(table, "float32", None, 1, DIM)
        for cache in (k_cache, v_cache):
            check(cache, "bfloat16", None, KV_HEADS, BLOCK_SIZE, DIM)
        assert shape["num_heads"] == HEADS and shape["num_kv_heads"] == KV_HEADS
        assert shape["block_size"] == BLOCK_SIZE and shape["causal"] and shape["head_dim"] == DIM
        interleaved = shape["is_interleaved_rope_mode"]
        pick = slice(0, None, 2) if interleaved else slice(0, DIM // 2)
        angles = [read(x)[:, 0, pick] for x in (cos, sin)]
        # [blocks, heads, tokens, dim] -> [blocks, tokens, heads, dim]
        pools = [read(c).transpose(0, 2, 1, 3).copy() for c in (k_cache, v_cache)]
        joined = read(qkv).reshape(qkv.shape[0], -1, DIM)
        out = np.zeros((qkv.shape[0], HEADS, DIM))
        for row, (first, fed, total) in enumerate(rows):
            own, where = joined[first : first + fed], np.arange(total - fed, total)
            turned = rotate(
                own[:, : HEADS + KV_HEADS], *(a[where] for a in angles), not interleaved
            )
            blocks = read(tables)[row][where // BLOCK_SIZE]
            pools[0][blocks, where % BLOCK_SIZE] = turned[:, HEADS:]
            pools[1][blocks, where % BLOCK_SIZE] = own[:, HEADS + KV_HEADS :]
            keys, values = (p[read(tables)[row]].reshape(-1, KV_HEADS, DIM)[:total] for p in pools)
            out[first : first + fed] = attend(turned[:, :HEADS], keys, values, shape["scale"])
        for cache, pool in zip((k_cache, v_cache), pools, strict=True):
            write(cache, pool.transpose(0, 2, 1, 3))
        return like(qkv, out.reshape(qkv.shape[0], -1))

    def prefill_fused_paged_attention(
        self, qkv, k_cache, v_cache, *, block_tables, cu_seqlens_qkv, rope_sin, rope_cos,
        max_seq_len,
        q_rope, k_rope, v_rope, **shape,
    ):  # fmt: skip
        self.count("prefill")
        check(cu_seqlens_qkv, "int32", block_tables.shape[0] + 1)
        assert q_rope and k_rope and not v_rope and max_seq_len > 0
        starts = read(cu_seqlens_qkv)
        rows = [(int(a), int(b - a), int(b - a)) for a, b in pairwise(starts)]
        return self._run(qkv, k_cache, v_cache, block_tables, rows, rope_cos, rope_sin, shape)

    def paged_attention(
        self, qkv, k_cache, v_cache, *, block_tables, seq_lens, rope_sin, rope_cos, merged_qkv, k,
        v,
        max_context_len, alibi_slopes, window_left, window_right, softcap, use_cuda_graph,
        use_sqrt_alibi, rope_batch_stride, **shape,
    ):  # fmt: skip
        self.count("decode")
        check(seq_lens, "int32", qkv.shape[0])
        assert merged_qkv and k is qkv and v is qkv and alibi_slopes is None and not use_cuda_graph
        rows = [(i, 1, int(n)) for i, n in enumerate(read(seq_lens))]
        return self._run(qkv, k_cache, v_cache, block_tables, rows, rope_cos, rope_sin, shape)


@pytest.fixture
def device():
    device = IluvatarDevice(DeviceOptions())
    with device.xp.no_grad():
        yield device
    device.close()


def spec(interleaved=False):
    return AttentionSpec(
        "gqa", HEADS, KV_HEADS, DIM, DIM, DIM**-0.5, "bfloat16", rotary_interleaved=interleaved
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [DIM, 4])
def test_prompts_decodes_and_both_in_one_step(device, interleaved, rotated):
    case = AttentionCase(device, spec(interleaved), BLOCK_SIZE, 4, rotary_dim=rotated)
    driver = IluvatarAttention(case.spec, BLOCK_SIZE, device, build_kernel_table("iluvatar"))
    steps = [[(0, 5), (1, 33)], [(1, 1), (0, 1)], [(0, 1), (2, 9), (1, 1), (3, 1)]]
    with standing_in(OPERATORS, Operators()) as operators:
        case.check(driver, steps, 0.05)
    assert operators.calls == {"prefill": 2, "decode": 2}


def test_continuing_a_prompt_is_refused(device):
    case = AttentionCase(device, spec(), BLOCK_SIZE, 1)
    driver = IluvatarAttention(case.spec, BLOCK_SIZE, device, build_kernel_table("iluvatar"))
    with (
        standing_in(OPERATORS, Operators()),
        pytest.raises(CapabilityError, match="chunked_prefill"),
    ):
        case.check(driver, [[(0, 5)], [(0, 3)]], 0.05)


def test_other_block_sizes_are_refused(device):
    with pytest.raises(CapabilityError, match="--block-size 16"):
        IluvatarAttention(spec(), 64, device, build_kernel_table("iluvatar"))


def test_kv_memory_is_set_by_hand(monkeypatch):
    monkeypatch.delenv("FD_ILUVATAR_KVCACHE_MEM", raising=False)
    assert IluvatarDevice(DeviceOptions()).limits.kv_memory_bytes == 3 * GIB
    monkeypatch.setenv("FD_ILUVATAR_KVCACHE_MEM", "0.5")
    assert IluvatarDevice(DeviceOptions()).limits.kv_memory_bytes == GIB // 2
    monkeypatch.setenv("FD_ILUVATAR_KVCACHE_MEM", "much")
    with pytest.raises(ConfigError, match="FD_ILUVATAR_KVCACHE_MEM"):
        IluvatarDevice(DeviceOptions())


def test_visible_chips_are_numbered_as_the_host_does(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    assert IluvatarDevice(DeviceOptions()).chips() == [9]
    monkeypatch.setenv("ILUVATAR_VISIBLE_DEVICES", "3, 5")
    assert IluvatarDevice(DeviceOptions()).chips() == [3, 5]


class Experts(SortedExperts):
    """moe_expert_ffn as FastDeploy 2.x called it."""

    def moe_expert_ffn(
        self,
        rows,
        counts,
        gate_up,
        down,
        up_bias,
        gate_up_scale,
        gate_up_zeros,
        down_scale,
        down_zeros,
        algorithm,
        group_size,
        phase,
    ):
        self.count("ffn")
        experts, width = len(counts), gate_up.shape[1] // 2
        check(gate_up, "int8", experts, 2 * width, rows.shape[1])
        check(down, "int8", experts, rows.shape[1], width)
        check(gate_up_scale, "bfloat16", experts, 2 * width)
        check(down_scale, "bfloat16", experts, rows.shape[1])
        assert (up_bias, gate_up_zeros, down_zeros) == (None, None, None)
        assert (algorithm, group_size, phase) == ("weight_only_int8", -1, "prefill")
        return self.gated(
            rows,
            counts,
            read(gate_up) * read(gate_up_scale)[..., None],
            read(down) * read(down_scale)[..., None],
        )


def test_int8_experts_equal_the_oracle():
    device = IluvatarDevice(DeviceOptions())
    check_int8_cell(device, OPERATORS, Experts(), "fd-iluvatar")
    device.close()
