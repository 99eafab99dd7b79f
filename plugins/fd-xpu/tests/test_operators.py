"""The vendor's operator is called with what it wants; recorded by a stand-in in numpy."""

import numpy as np
import pytest
from fd_simdevice.stand_in import StandIn, attend, check, like, read, rotate, standing_in, write
from fd_xpu.attention import NUM_UNUSED, PARAMETERS, PASSED, XpuAttention
from fd_xpu.device import XpuDevice
from fd_xpu.operators import OPERATORS

from fastdeploy_core.contracts.attention import AttentionSpec
from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_core.errors import CapabilityError
from fastdeploy_testing.attention_case import AttentionCase
from fastdeploy_testing.drivers import build_kernel_table

pytestmark = pytest.mark.usefixtures("simulated")

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 16, 64


class Operators(StandIn):
    """get_infer_param's arrays carry their own names here, so that a wrong order shows."""

    def get_infer_param(self, encoder, decoder, this_time, tables, block_size):
        self.count("parameters")
        rows = encoder.shape[0]
        for lengths in (encoder, decoder, this_time):
            check(lengths, "int32", rows)
        check(tables, "int32", rows, None)
        assert block_size == BLOCK
        self.encoder, self.decoder, self.counts = map(read, (encoder, decoder, this_time))
        return list(PARAMETERS)

    def block_attn(self, qkv, k_cache, v_cache, cum_offsets, table, tables, *rest):
        self.count("attention")
        check(qkv, "bfloat16", None, (HEADS + 2 * KV_HEADS) * DIM)
        check(cum_offsets, "int32", len(self.counts))
        check(table, "float32", 2, 1, None, 1, DIM // 2)
        names, unused, (is_neox, is_3d) = rest[: len(PASSED)], rest[len(PASSED) : -2], rest[-2:]
        assert names == PASSED and unused == (None,) * NUM_UNUSED and not is_3d
        # Prompts first, then decodes.
        order = [i for i in range(len(self.counts)) if self.encoder[i]]
        order += [i for i in range(len(self.counts)) if not self.encoder[i]]
        pools = []
        for cache in (k_cache, v_cache):
            check(cache, "bfloat16", None, KV_HEADS, BLOCK, DIM)
            pools.append(read(cache).transpose(0, 2, 1, 3).copy())
        joined, out, first = read(qkv).reshape(qkv.shape[0], -1, DIM), [], 0
        for row in order:
            fed, before = int(self.counts[row]), int(self.decoder[row])
            assert self.encoder[row] in (0, fed)
            own, where = joined[first : first + fed], np.arange(before, before + fed)
            cos, sin = read(table)[:, 0, where, 0]
            turned = rotate(own[:, : HEADS + KV_HEADS], cos, sin, is_neox)
            blocks = read(tables)[row][where // BLOCK]
            pools[0][blocks, where % BLOCK] = turned[:, HEADS:]
            pools[1][blocks, where % BLOCK] = own[:, HEADS + KV_HEADS :]
            keys, values = (
                p[read(tables)[row]].reshape(-1, KV_HEADS, DIM)[: before + fed] for p in pools
            )
            out.append(attend(turned[:, :HEADS], keys, values, DIM**-0.5))
            first += fed
        for cache, pool in zip((k_cache, v_cache), pools, strict=True):
            write(cache, pool.transpose(0, 2, 1, 3))
        return [like(qkv, np.concatenate(out).reshape(qkv.shape[0], -1))]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("scale", "rotated"), [(DIM**-0.5, DIM), (0.5, DIM), (0.1, 4)])
def test_prompts_go_first_and_results_come_back_in_order(interleaved, scale, rotated):
    device = XpuDevice(DeviceOptions())
    spec = AttentionSpec(
        "gqa", HEADS, KV_HEADS, DIM, DIM, scale, "bfloat16", rotary_interleaved=interleaved
    )
    case = AttentionCase(device, spec, BLOCK, 4, rotary_dim=rotated)
    driver = XpuAttention(spec, BLOCK, device, build_kernel_table("xpu"))
    steps = [[(0, 5)], [(0, 1), (1, 70)], [(1, 1), (2, 9), (0, 1)], [(1, 6), (0, 1), (3, 1)]]
    with standing_in(OPERATORS, Operators()) as operators, device.xp.no_grad():
        case.check(driver, steps, 0.05)
    assert operators.calls == {"parameters": 4, "attention": 4}
    device.close()


@pytest.mark.parametrize(
    ("visible", "allowed"),
    [
        ("0,1,2,3", True),
        ("4,5,6,7", True),
        ("7,6,5,4", True),
        ("2,3,4,5", False),
        ("0,1,2,7", False),
    ],
)
def test_four_cards_work_together_only_where_they_are_wired(
    monkeypatch, tmp_path, visible, allowed
):
    device = XpuDevice(DeviceOptions())
    monkeypatch.setenv("XPU_VISIBLE_DEVICES", visible)
    joined = []
    monkeypatch.setattr(device._paddle, "Collectives", lambda *args: joined.append(args))
    if allowed:
        device.communicator(0, 4, str(tmp_path))
        assert joined[0][1:3] == (0, 4)
    else:
        with pytest.raises(CapabilityError, match=r"0,1,2,3 or 4,5,6,7.*XPU_VISIBLE_DEVICES"):
            device.communicator(0, 4, str(tmp_path))
        assert not joined
