"""Buckets, and the one operator of the vendor's that is used; recorded by a stand-in in numpy."""

import numpy as np
import pytest
from fd_gaudi.attention import GaudiBlock
from fd_gaudi.device import GaudiDevice, step_buckets
from fd_gaudi.operators import EXPERT_ROWS, OPERATORS
from fd_simdevice.stand_in import StandIn, check, read, standing_in, write

from fastdeploy_core.contracts.attention import AttentionSpec
from fastdeploy_core.contracts.device import DeviceOptions, StepBuckets
from fastdeploy_core.errors import CapabilityError, ConfigError
from fastdeploy_testing import oracle
from fastdeploy_testing.drivers import build_kernel_table

pytestmark = pytest.mark.usefixtures("simulated")


class Operators(StandIn):
    """index_copy_(target, index, source, dimension), in place."""

    def index_copy_(self, target, index, source, dimension):
        self.count("copy")
        check(index, "int64", source.shape[0])
        check(source, str(target.dtype).rpartition(".")[2], None, *target.shape[1:])
        assert dimension == 0 and (read(index) >= 0).all()
        self.shapes = [*getattr(self, "shapes", []), tuple(source.shape)]
        values = read(target)
        values[read(index)] = read(source)
        write(target, values)


@pytest.fixture
def device():
    device = GaudiDevice(DeviceOptions())
    with device.xp.no_grad():
        yield device
    device.close()


@pytest.mark.parametrize("slots", [[5, 0, 130], [-1, 7, -1], [3, -1, -1], [-1, -1, -1]])
def test_cache_write_has_the_same_shape_whatever_is_padding(device, slots):
    rng = np.random.default_rng(0)
    pools = [rng.standard_normal((3, 128, 2, 8)).astype("float32") for _ in range(2)]
    rows = [rng.standard_normal((3, 2, 8)).astype("float32") for _ in range(2)]
    with standing_in(OPERATORS, Operators()) as operators:
        table = build_kernel_table("gaudi")
        assert table.origins()["kv_write"] == "fd-gaudi"
        cache = tuple(device.to_device(p.copy()) for p in pools)
        rows_dev = tuple(device.to_device(r.copy()) for r in rows)
        table["kv_write"](rows_dev, cache, device.to_device(np.array(slots)))
    assert operators.shapes == [(3, 2, 8)] * 2
    for pool, row, got in zip(pools, rows, cache, strict=True):
        expected = pool.reshape(-1, 2, 8).copy()
        for token, slot in enumerate(slots):
            if slot >= 0:
                expected[slot] = row[token]
        assert np.array_equal(read(got).reshape(-1, 2, 8), expected)


@pytest.mark.parametrize("tokens", [1, 5, 32, 33, 150])
@pytest.mark.parametrize("routing", ["random", "one expert"])
def test_experts_equal_the_oracle_with_products_that_depend_on_no_routing(device, tokens, routing):
    rng, experts, top_k = np.random.default_rng(tokens), 16, 2
    ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)])
    if routing == "one expert":
        ids[:] = (3, 9)
    weights = rng.random((tokens, top_k)).astype("float32")
    x, gate_up, down = (
        rng.standard_normal(shape).astype("float32")
        for shape in ((tokens, 8), (experts, 12, 8), (experts, 8, 6))
    )
    table, xp = build_kernel_table("gaudi"), device.xp
    assert table.origins()["moe_experts"] == "fd-gaudi"
    rows, linear = [], type(xp).linear

    def counted(self, given, *rest):
        rows.append(given.shape[0])
        return linear(self, given, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(xp), "linear", counted)
        got = table["moe_experts"](*map(device.to_device, (x, ids, weights, gate_up, down)))
    assert np.allclose(read(got), oracle.moe_experts(x, ids, weights, gate_up, down), atol=1e-4)
    size = min(tokens, EXPERT_ROWS)
    assert set(rows) == {size}, "one shape"
    blocks = {1: 2, 5: 10, 32: 16, 33: 17, 150: 24}[tokens]  # of 16 experts with 2 a token
    assert len(rows) == 2 * blocks, "as many products whatever the routing"


def num_shapes(buckets):
    prompts = len(buckets.prompt_rows) * len(buckets.prompt_tokens)
    return prompts + len(buckets.decode_rows) * len(buckets.table_blocks)


def test_a_rotation_of_a_part_of_each_head_is_refused(device):
    spec = AttentionSpec("gqa", 4, 2, 16, 16, 0.25, "bfloat16")
    driver = GaudiBlock(spec, 128, device, build_kernel_table("gaudi"))
    table = device.to_device(np.zeros((9, 4), "float32"))
    with pytest.raises(CapabilityError, match=r"4 of 16 dimensions.*--attention-backend reference"):
        driver._rotary(None, table)


def test_buckets_follow_the_operators_variables(monkeypatch):
    assert step_buckets().prompt_tokens == (128, 256, 512, 1024, 2048, 4096)
    assert step_buckets().decode_rows == (4, 8, 16, 32, 64)
    assert num_shapes(step_buckets()) == 48
    monkeypatch.setenv("FD_GAUDI_SHAPES", "200")
    assert step_buckets().decode_rows == tuple(range(4, 65, 4))
    monkeypatch.setenv("FD_GAUDI_SHAPES", "1")
    assert step_buckets().decode_rows == (64,), "one for every number of decodes"
    monkeypatch.delenv("FD_GAUDI_SHAPES")
    monkeypatch.setenv("HPU_WARMUP_MODEL_LEN", "300")
    monkeypatch.setenv("BATCH_STEP_DECODE", "32")
    monkeypatch.setenv("MAX_PREFILL_NUM", "2")
    assert step_buckets() == StepBuckets((1, 2), (128, 256, 300), (32, 64), (1, 2, 3))
    monkeypatch.setenv("SEQUENCE_STEP_PREFILL", "many")
    with pytest.raises(ConfigError, match="SEQUENCE_STEP_PREFILL"):
        step_buckets()


def test_memory_tool_is_read():
    assert GaudiDevice.parse_memory("97000, 98304\n") == (97000 * 2**20, 98304 * 2**20)
    with pytest.raises(ValueError):
        GaudiDevice.parse_memory("no devices were found")
