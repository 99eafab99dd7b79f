"""The vendor's operators are called with what they want; recorded by a stand-in in numpy."""

import numpy as np
import pytest
from fd_gcu.attention import GcuAttention
from fd_gcu.device import GcuDevice
from fd_gcu.operators import OPERATORS, TILES, answer_attention
from fd_simdevice.stand_in import StandIn, attend, check, like, read, rotate, standing_in, write

from fastdeploy_core.contracts.attention import AttentionQuestion, AttentionSpec
from fastdeploy_core.contracts.base import Accept, Decline
from fastdeploy_core.contracts.device import DeviceOptions
from fastdeploy_core.contracts.quant_formats import FORMATS, PackedWeight
from fastdeploy_testing import oracle
from fastdeploy_testing.attention_case import AttentionCase
from fastdeploy_testing.drivers import build_kernel_table

pytestmark = pytest.mark.usefixtures("simulated")

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 16, 64


class Operators(StandIn):
    """As FastDeploy 2.x called them."""

    def fused_rotary_embedding(self, query, key, table, positions, is_neox, head_dim):
        self.count("rotary")
        tokens = query.shape[0]
        check(query, "bfloat16", tokens, HEADS * DIM)
        check(key, "bfloat16", tokens, KV_HEADS * DIM)
        check(table, "bfloat16", None, DIM)
        check(positions, "int32", tokens)
        assert head_dim == DIM
        rows = read(table)[read(positions)]
        return [
            like(x, rotate(read(x).reshape(tokens, -1, DIM), rows[:, : DIM // 2], rows[:,
                DIM // 2 :],
                           is_neox).reshape(tokens, -1))
            for x in (query, key)
        ]  # fmt: skip

    def reshape_and_cache_flash(self, key_cache, value_cache, key, value, slots):
        self.count("cache")
        check(slots, "int32", key.shape[0])
        for cache, rows in ((key_cache, key), (value_cache, value)):
            check(cache, "bfloat16", None, BLOCK, KV_HEADS, DIM)
            check(rows, "bfloat16", None, KV_HEADS * DIM)
            values = read(cache).reshape(-1, KV_HEADS, DIM)
            values[read(slots)] = read(rows).reshape(-1, KV_HEADS, DIM)
            write(cache, values.reshape(tuple(cache.shape)))

    def flash_attn_var_len(
        self, *, query, key, value, cu_seqlens_q, seqused_k, block_table, max_seqlen_q,
        max_seqlen_k,
        softmax_scale, is_causal, **rest,
    ):  # fmt: skip
        self.count("attention")
        rows = block_table.shape[0]
        check(query, "bfloat16", None, HEADS, DIM)
        check(cu_seqlens_q, "int32", rows + 1)
        check(seqused_k, "int32", rows)
        check(block_table, "int32", rows, None)
        starts, lengths, tables = read(cu_seqlens_q), read(seqused_k), read(block_table)
        assert is_causal and max_seqlen_k == lengths.max() and rest["p_dropout"] == 0.0
        assert max_seqlen_q == np.diff(starts).max() and rest["cu_seqlens_k"] is None
        q, keys, values = read(query), read(key), read(value)
        out = np.zeros_like(q)
        for row in range(rows):
            part = slice(starts[row], starts[row + 1])
            own = [
                x[tables[row]].reshape(-1, KV_HEADS, DIM)[: lengths[row]] for x in (keys, values)
            ]
            out[part] = attend(q[part], *own, softmax_scale)
        return like(query, out)

    def rms_norm(self, x, weight, eps):
        self.count("norm")
        return like(x, oracle.rms_norm(read(x), read(weight), eps))

    def fused_add_rms_norm(self, x, residual, weight, eps):
        self.count("add_norm")
        total = read(x) + read(residual)
        return like(x, oracle.rms_norm(total, read(weight), eps)), like(x, total)

    def linear_quant(self, *, lhs, rhs, scale, bias, group_size):
        self.count("linear")
        check(lhs, "bfloat16", None, rhs.shape[1])
        check(rhs, "int8", None, None)
        check(scale, "bfloat16", rhs.shape[0])
        assert bias is None and group_size == -1
        return like(lhs, read(lhs) @ (read(rhs) * read(scale)[:, None]).T)

    def moe_align_block_size(self, sorted_ids, expert_ids, num_padded, ids, experts, block):
        self.count("align")
        tokens, top_k = ids.shape
        check(ids, "int32", tokens, top_k)
        check(sorted_ids, "int32", tokens * top_k + experts * (block - 1))
        check(expert_ids, "int32", sorted_ids.shape[0] // block)
        assert block == TILES["BLOCK_SIZE_M"]
        return sorted_ids, expert_ids, num_padded

    def invoke_fused_moe_kernel(
        self, x, weight, out, a_scale, b_scale, b_zero, weights, ids, sorted_ids, expert_ids,
        num_padded, applies_weights, top_k, config, is_int4, block_shape,
    ):  # fmt: skip
        self.count("product")
        tokens, chosen = ids.shape
        check(out, "bfloat16", tokens, chosen, weight.shape[1])
        check(x, "bfloat16", tokens if top_k > 1 else tokens * chosen, weight.shape[2])
        assert config == TILES and not is_int4 and block_shape[0] == 0
        source, matrices, picks = read(x), read(weight), read(ids)
        result = np.zeros(tuple(out.shape))
        for token in range(tokens):
            for rank in range(chosen):
                row = source[token] if top_k > 1 else source[token * chosen + rank]
                result[token, rank] = matrices[picks[token, rank]] @ row
        if applies_weights:
            result *= read(weights)[..., None]
        write(out, result)


@pytest.fixture
def device():
    device = GcuDevice(DeviceOptions())
    with device.xp.no_grad():
        yield device
    device.close()


def spec(interleaved=False):
    return AttentionSpec(
        "gqa", HEADS, KV_HEADS, DIM, DIM, DIM**-0.5, "bfloat16", rotary_interleaved=interleaved
    )


@pytest.mark.parametrize("interleaved", [False, True])
def test_attention_over_prompts_chunks_and_decodes(device, interleaved):
    case = AttentionCase(device, spec(interleaved), BLOCK, 3)
    driver = GcuAttention(case.spec, BLOCK, device, build_kernel_table("gcu"))
    steps = [[(0, 5), (1, 70)], [(0, 1), (2, 9)], [(1, 3), (0, 1), (2, 1)]]
    with standing_in(OPERATORS, Operators()) as operators:
        case.check(driver, steps, 0.05)
    assert operators.calls == {"rotary": 3, "cache": 3, "attention": 3}


def test_partly_rotated_heads_use_the_tables_kernel(device):
    case = AttentionCase(device, spec(), BLOCK, 1)
    case.rotary = np.ascontiguousarray(case.rotary[:, [0, 1, 8, 9]])  # 4 of 16 dimensions
    driver = GcuAttention(case.spec, BLOCK, device, build_kernel_table("gcu"))
    with standing_in(OPERATORS, Operators()) as operators:
        case.check(driver, [[(0, 7)], [(0, 1)]], 0.05)
    assert "rotary" not in operators.calls


def test_cells_are_filled_where_the_operators_are_installed(device):
    assert (
        build_kernel_table("gcu", {"dtype": "bfloat16"}).origins()["rms_norm"] == "fastdeploy-core"
    )
    with standing_in(OPERATORS, Operators()) as operators:
        table = build_kernel_table("gcu", {"dtype": "bfloat16"})
        assert {table.origins()[o] for o in ("rms_norm", "add_rms_norm", "moe_experts")} == {
            "fd-gcu"
        }
        assert build_kernel_table("gcu", {"dtype": "float32"}).origins()["moe_experts"] != "fd-gcu"
        rng = np.random.default_rng(0)

        def tensor(*shape):
            array = rng.standard_normal(shape).astype("float32")
            return device.to_device(array).to(device.xp.bfloat16)

        x, residual, weight = tensor(3, 32), tensor(3, 32), tensor(32)
        normed, total = table["add_rms_norm"](x, residual, weight, 1e-6)
        assert np.allclose(read(total), read(x) + read(residual), atol=0.05)
        expected = oracle.rms_norm(read(x) + read(residual), read(weight), 1e-6)
        assert np.allclose(read(normed), expected, atol=0.05)
        x, gate_up, down = tensor(5, 8), tensor(4, 24, 8), tensor(4, 8, 12)
        ids = rng.integers(0, 4, (5, 2))
        weights = rng.random((5, 2)).astype("float32")
        got = table["moe_experts"](
            x, device.to_device(ids), device.to_device(weights), gate_up, down
        )
        expected = oracle.moe_experts(read(x), ids, weights, read(gate_up), read(down))
        assert np.allclose(read(got), expected, rtol=0.05, atol=0.3)
    assert operators.calls == {"add_norm": 1, "align": 1, "product": 2}


def test_int8_product_equals_the_oracle(device):
    rng = np.random.default_rng(4)
    numbers = rng.integers(-127, 128, (6, 16)).astype("int8")
    scale = (rng.random((6, 1)) * 0.01 + 0.001).astype("float32")
    tensors = {"weight": device.to_device(numbers), "scale": device.to_device(scale)}
    weight = PackedWeight(FORMATS["wint8"], 6, 16, tensors)
    x, bias = (
        device.to_device(rng.standard_normal(shape).astype("float32")).to(device.xp.bfloat16)
        for shape in ((3, 16), (6,))
    )
    with standing_in(OPERATORS, Operators()) as operators:
        table = build_kernel_table("gcu", {"dtype": "bfloat16"})
        assert table.origins()["linear_wint8"] == "fd-gcu"
        got = table["linear_wint8"](x, weight, bias)
    expected = read(x) @ (numbers * scale).T + read(bias)
    assert np.allclose(read(got), expected, rtol=0.05, atol=0.05)
    assert operators.calls == {"linear": 1}


def test_attention_driver_answers_with_its_reason():
    question = AttentionQuestion("gcu", "paddle", spec(), BLOCK, "auto")
    verdict = answer_attention(question).verdict
    assert isinstance(verdict, Decline) and "flash_attn_var_len" in verdict.reason
    with standing_in(OPERATORS, Operators()):
        assert isinstance(answer_attention(question).verdict, Accept)
        other = AttentionQuestion("cpu", "paddle", spec(), BLOCK, "auto")
        assert isinstance(answer_attention(other).verdict, Decline)
