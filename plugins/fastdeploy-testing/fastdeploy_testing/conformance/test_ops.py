"""Every operation in a device's kernel table against the numpy oracle, over shapes and dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastdeploy_core.contracts.moe import RoutingSpec
from fastdeploy_core.contracts.ops import OPERATIONS
from fastdeploy_testing import oracle

from .base import values
from .sampling_ops import SamplingOps

TOKENS = (0, 1, 7, 33)
# (eps, size of x) of norms. Where the square of the size is about eps, a kernel that takes another
# eps than the one that it was given is far off.
NORMS = ((1e-5, 3.0), (1e-6, 1e-3), (0.3, 0.5))
EPS = 0.3  # of norms within other operations, whose x is about 1
ROUTINGS = (
    RoutingSpec(num_experts=8, top_k=2),
    RoutingSpec(num_experts=8, top_k=1, renormalize=False),
    RoutingSpec(num_experts=16, top_k=6, has_correction_bias=True),
    RoutingSpec(
        num_experts=16,
        top_k=4,
        scoring="sigmoid",
        scaling_factor=2.5,
        num_groups=4,
        top_k_groups=2,
        has_correction_bias=True,
    ),
)


class OpsConformance(SamplingOps):
    """One test per operation; operations that the device lacks come from the reference and are
    tested too."""

    kind = "kernels"

    def test_every_operation_has_a_kernel(self, kernels: Any) -> None:
        missing = [name for name in OPERATIONS if name not in kernels]
        assert not missing, f"no kernel for {', '.join(missing)}"
        with pytest.raises(KeyError, match="no_such_operation"):
            kernels["no_such_operation"]

    def test_every_cell_of_the_table_can_be_used(self, kernels: Any) -> None:
        """Else the reference would be compared with itself."""
        assert not kernels.problems, "; ".join(kernels.problems)

    @pytest.mark.parametrize("tokens", TOKENS)
    def test_embedding(self, device: Any, kernels: Any, dtype: str, tokens: int) -> None:
        weight = values(0, 50, 16)
        ids = np.random.default_rng(1).integers(0, 50, tokens)
        got = kernels["embedding"](
            self.to_device(device, ids), self.to_device(device, weight, dtype)
        )
        expected = self.rounded(device, weight, dtype)[ids]
        assert np.array_equal(self.to_host(device, got), expected)

    @pytest.mark.parametrize("tokens", TOKENS)
    @pytest.mark.parametrize("has_bias", [False, True])
    def test_linear(
        self, device: Any, kernels: Any, dtype: str, tokens: int, has_bias: bool
    ) -> None:
        x, weight, bias = values(0, tokens, 48), values(1, 24, 48), values(2, 24)
        got = kernels["linear"](
            self.to_device(device, x, dtype),
            kernels.prepare("linear", self.to_device(device, weight, dtype)),
            self.to_device(device, bias, dtype) if has_bias else None,
        )
        expected = self.rounded(device, x, dtype) @ self.rounded(device, weight, dtype).T
        if has_bias:
            expected = expected + self.rounded(device, bias, dtype)
        self.assert_close(device, got, expected, dtype)
        self.assert_dtype(device, got, dtype)

    @pytest.mark.parametrize("shape", [(0, 32), (1, 32), (7, 32), (3, 4, 16)], ids=str)
    def test_rms_norm(self, device: Any, kernels: Any, dtype: str, shape: tuple[int, ...]) -> None:
        weight = values(1, shape[-1])
        for eps, size in NORMS:
            x = values(0, *shape) * size
            got = kernels["rms_norm"](
                self.to_device(device, x, dtype), self.to_device(device, weight, dtype), eps
            )
            expected = oracle.rms_norm(
                self.rounded(device, x, dtype), self.rounded(device, weight, dtype), eps
            )
            self.assert_close(device, got, expected, dtype)
            self.assert_dtype(device, got, dtype)

    @pytest.mark.parametrize("tokens", TOKENS)
    def test_add_rms_norm(self, device: Any, kernels: Any, dtype: str, tokens: int) -> None:
        weight = values(2, 32)
        for eps, size in NORMS:
            x, residual = values(0, tokens, 32) * size, values(1, tokens, 32) * size
            normed, total = kernels["add_rms_norm"](
                self.to_device(device, x, dtype),
                self.to_device(device, residual, dtype),
                self.to_device(device, weight, dtype),
                eps,
            )
            added = self.rounded(device, x, dtype) + self.rounded(device, residual, dtype)
            self.assert_close(device, total, added, dtype)
            expected = oracle.rms_norm(added, self.rounded(device, weight, dtype), eps)
            self.assert_close(device, normed, expected, dtype)
            self.assert_dtype(device, normed, dtype)
            self.assert_dtype(device, total, dtype)

    @pytest.mark.parametrize("tokens", TOKENS)
    def test_silu_and_mul(self, device: Any, kernels: Any, dtype: str, tokens: int) -> None:
        x = values(0, tokens, 40) * 4
        got = kernels["silu_and_mul"](self.to_device(device, x, dtype))
        expected = oracle.silu_and_mul(self.rounded(device, x, dtype))
        self.assert_close(device, got, expected, dtype)
        self.assert_dtype(device, got, dtype)

    @pytest.mark.parametrize(
        "index", [[0], [6], [0, 3, 6], [*range(7)], [2, 5, 0], [0, 0, 0]], ids=str
    )
    def test_select_rows(self, device: Any, kernels: Any, dtype: str, index: list[int]) -> None:
        x, named = values(0, 7, 48), np.array(index)
        got = kernels["select_rows"](
            self.to_device(device, x, dtype), self.to_device(device, named)
        )
        assert tuple(got.shape) == (len(index), 48)
        real = 1 + int((np.diff(named) > 0).sum())  # zeros after that are padding
        expected = self.rounded(device, x, dtype)[named[:real]]
        assert np.array_equal(self.to_host(device, got)[:real], expected)
        self.assert_dtype(device, got, dtype)

    @pytest.mark.parametrize("tokens", TOKENS)
    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("heads", [(4, 4, 16, 16), (4, 1, 16, 16), (6, 2, 32, 16)], ids=str)
    def test_rotary_embedding(
        self,
        device: Any,
        kernels: Any,
        dtype: str,
        tokens: int,
        interleaved: bool,
        heads: tuple[int, int, int, int],
    ) -> None:
        num_heads, num_kv_heads, width, rotated = heads
        q, k = values(0, tokens, num_heads, width), values(1, tokens, num_kv_heads, width)
        positions = np.random.default_rng(2).integers(0, 64, tokens)
        angles = np.arange(64)[:, None] / 100.0 ** (np.arange(rotated // 2) * 2 / rotated)
        cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], -1).astype("float32")
        got = kernels["rotary_embedding"](
            self.to_device(device, q, dtype),
            self.to_device(device, k, dtype),
            self.to_device(device, positions),
            self.to_device(device, cos_sin),
            interleaved,
        )
        for result, x in zip(got, (q, k), strict=True):
            expected = oracle.rotary(
                self.rounded(device, x, dtype), positions, cos_sin.astype("float64"), interleaved
            )
            self.assert_close(device, result, expected, dtype)
            self.assert_dtype(device, result, dtype)

    @pytest.mark.parametrize("tokens", TOKENS)
    @pytest.mark.parametrize("has_bias", [False, True])
    def test_products_with_a_norm_before_or_a_sum_behind(
        self, device: Any, kernels: Any, dtype: str, tokens: int, has_bias: bool
    ) -> None:
        x, residual = values(0, tokens, 64), values(1, tokens, 48)
        weight, bias, norm = values(2, 48, 64) / 8, values(3, 48), values(4, 64)
        on_device = {
            name: self.to_device(device, array, dtype)
            for name, array in (("x", x), ("w", weight), ("b", bias), ("n", norm))
        }
        seen = {
            name: np.array(device.to_host(t.float()), "float64") for name, t in on_device.items()
        }
        bias_dev = on_device["b"] if has_bias else None
        shift = seen["b"] if has_bias else 0.0
        normed = oracle.rms_norm(seen["x"], seen["n"], EPS)
        of_norm, plain = normed @ seen["w"].T + shift, seen["x"] @ seen["w"].T + shift
        operands = (kernels.prepare("linear", on_device["w"]), bias_dev)
        gated = (kernels.prepare("gated_linear", on_device["w"]), bias_dev)
        got = kernels["norm_linear"](on_device["x"], on_device["n"], EPS, *operands)
        self.assert_close(device, got, of_norm, dtype)
        got = kernels["gated_linear"](on_device["x"], on_device["n"], EPS, *gated)
        self.assert_close(device, got, oracle.silu_and_mul(of_norm), dtype)
        got = kernels["gated_linear"](on_device["x"], None, 0.0, *gated)
        self.assert_close(device, got, oracle.silu_and_mul(plain), dtype)
        addend = self.rounded(device, residual, dtype)
        got = kernels["linear_add"](
            on_device["x"], *operands, self.to_device(device, residual, dtype)
        )
        self.assert_close(device, got, plain + addend, dtype)
        self.assert_dtype(device, got, dtype)

    @pytest.mark.parametrize("tokens", TOKENS)
    @pytest.mark.parametrize("heads", [(4, 2), (3, 3)], ids=str)
    def test_qk_norm(
        self, device: Any, kernels: Any, dtype: str, tokens: int, heads: tuple[int, int]
    ) -> None:
        num_heads, num_kv_heads = heads
        joined = values(0, tokens, num_heads + 2 * num_kv_heads, 16) / 2
        on_device = self.to_device(device, joined.copy(), dtype)
        weights = [values(1, 16), values(2, 16)]
        end = num_heads + num_kv_heads
        got = kernels["qk_norm"](
            on_device[:, :num_heads],
            on_device[:, num_heads:end],
            *(self.to_device(device, w, dtype) for w in weights),
            EPS,
        )
        whole = self.rounded(device, joined, dtype)
        for result, part, weight in zip(
            got, (whole[:, :num_heads], whole[:, num_heads:end]), weights, strict=True
        ):
            expected = oracle.rms_norm(part, self.rounded(device, weight, dtype), EPS)
            self.assert_close(device, result, expected, dtype)
            self.assert_dtype(device, result, dtype)
        after = np.array(device.to_host(on_device.float()), "float64")
        assert np.array_equal(after[:, end:], whole[:, end:]), "values were changed"

    @pytest.mark.parametrize("tokens", TOKENS)
    @pytest.mark.parametrize("width", [48, 64])
    def test_concat_rms_norm(
        self, device: Any, kernels: Any, dtype: str, tokens: int, width: int
    ) -> None:
        arrays = [values(n, tokens, width) * (n + 1) for n in (0, 1)]
        weights = [values(n, width) for n in (2, 3)]
        x, y, *gains = (self.to_device(device, array, dtype) for array in (*arrays, *weights))
        got = kernels["concat_rms_norm"](x, gains[0], y, gains[1], EPS)
        expected = [
            oracle.rms_norm(self.rounded(device, a, dtype), self.rounded(device, w, dtype), EPS)
            for a, w in zip(arrays, weights, strict=True)
        ]
        self.assert_close(device, got, np.concatenate(expected, -1), dtype)
        self.assert_dtype(device, got, dtype)

    @pytest.mark.parametrize("tokens", TOKENS)
    def test_linear_float32(self, device: Any, kernels: Any, dtype: str, tokens: int) -> None:
        x, weight = values(0, tokens, 80), values(1, 12, 80)
        got = kernels["linear_float32"](
            self.to_device(device, x, dtype),
            kernels.prepare("linear_float32", self.to_device(device, weight)),
        )
        expected = self.rounded(device, x, dtype) @ weight.astype("float64").T
        self.assert_close(device, got, expected, "float32")
        self.assert_dtype(device, got, "float32")

    @pytest.mark.parametrize("tokens", TOKENS)
    @pytest.mark.parametrize("has_bias", [False, True])
    def test_embedding_and_head_share_a_weight(
        self, device: Any, kernels: Any, dtype: str, tokens: int, has_bias: bool
    ) -> None:
        weight, bias = values(0, 50, 32), values(1, 50)
        shared = kernels.prepare("linear", self.to_device(device, weight, dtype))
        ids = np.random.default_rng(1).integers(0, 50, tokens)
        x = kernels["embedding"](self.to_device(device, ids), shared)
        seen = self.rounded(device, weight, dtype)
        assert np.array_equal(self.to_host(device, x), seen[ids])
        got = kernels["linear_logits"](
            x, shared, self.to_device(device, bias, dtype) if has_bias else None
        )
        expected = seen[ids] @ seen.T + (self.rounded(device, bias, dtype) if has_bias else 0.0)
        self.assert_close(device, got, expected, dtype)
        self.assert_dtype(device, got, "float32")

    @pytest.mark.parametrize("tokens", TOKENS)
    def test_greedy_linear(self, device: Any, kernels: Any, dtype: str, tokens: int) -> None:
        x, weight = values(0, tokens, 64), values(1, 80, 64)
        weight[70] = weight[7]  # equal logits for every hidden state
        prepared = kernels.prepare("linear", self.to_device(device, weight, dtype))
        inputs = (self.to_device(device, x, dtype), prepared)
        ids, peaks = kernels["greedy_linear"](*inputs, None)
        logits = self.rounded(device, x, dtype) @ self.rounded(device, weight, dtype).T
        got, rows = self.to_host(device, ids), np.arange(tokens)
        assert got.shape == (tokens,) and got.dtype == np.int64
        assert 70 not in got, "the smallest id among equals is taken"
        relative, absolute = self.tolerance(dtype)
        scale = float(np.max(np.abs(logits), initial=0.0))
        near = logits.max(-1, initial=-np.inf) - logits[rows, got] if tokens else np.zeros(0)
        assert np.all(near <= 2 * (absolute + relative * scale)), "not the largest logit"
        self.assert_close(
            device, peaks, logits[rows, got], "float32" if dtype == "float32" else dtype
        )
        if tokens:
            inputs[0][0] = float("nan")
            _, peaks = kernels["greedy_linear"](*inputs, None)
            assert np.isnan(np.array(device.to_host(peaks.float())))[0], "NaN must be seen"

    @pytest.mark.parametrize("tokens", TOKENS)
    def test_kv_write_touches_its_slots_only(
        self, device: Any, kernels: Any, dtype: str, tokens: int
    ) -> None:
        before = [values(0, 12, 4, 2, 8), values(1, 12, 4, 2, 6)]
        rows = [values(2, tokens, 2, 8), values(3, tokens, 2, 6)]
        slots = np.random.default_rng(4).permutation(48)[:tokens]
        slots[::3] = -1
        cache = tuple(self.to_device(device, c, dtype) for c in before)
        kernels["kv_write"](
            tuple(self.to_device(device, r, dtype) for r in rows),
            cache,
            self.to_device(device, slots),
        )
        for got, old, new in zip(cache, before, rows, strict=True):
            expected = self.rounded(device, old, dtype).reshape(48, *old.shape[2:])
            expected[slots[slots >= 0]] = self.rounded(device, new, dtype)[slots >= 0]
            assert np.array_equal(self.to_host(device, got).reshape(expected.shape), expected)

    @pytest.mark.parametrize("count", [0, 1, 3])
    def test_blocks_are_copied_read_and_written(
        self, device: Any, kernels: Any, dtype: str, count: int
    ) -> None:
        before = [values(0, 9, 4, 2, 8), values(1, 9, 4, 2, 6)]
        cache = tuple(self.to_device(device, c, dtype) for c in before)
        expected = [self.rounded(device, c, dtype) for c in before]
        source, target = np.array([7, 0, 3])[:count], np.array([1, 8, 5])[:count]
        kernels["kv_copy_blocks"](
            cache, self.to_device(device, source), self.to_device(device, target)
        )
        for array in expected:
            array[target] = array[source]
        for got, array in zip(cache, expected, strict=True):
            assert np.array_equal(self.to_host(device, got), array)
        taken = kernels["kv_read_blocks"](cache, self.to_device(device, target))
        for got, array in zip(taken, expected, strict=True):
            assert np.array_equal(self.to_host(device, got), array[target])
        places = np.array([2, 4, 6])[:count]
        kernels["kv_write_blocks"](cache, self.to_device(device, places), taken)
        for got, array in zip(cache, expected, strict=True):
            array[places] = array[target]
            assert np.array_equal(self.to_host(device, got), array)

    @pytest.mark.parametrize("tokens", TOKENS)
    @pytest.mark.parametrize(
        "spec", ROUTINGS, ids=lambda s: f"{s.scoring}-{s.top_k}of{s.num_experts}"
    )
    def test_moe_routing(self, device: Any, kernels: Any, tokens: int, spec: RoutingSpec) -> None:
        logits = values(0, tokens, spec.num_experts) * 2
        bias = values(1, spec.num_experts) * 0.1 if spec.has_correction_bias else None
        ids, weights = kernels["moe_routing"](
            self.to_device(device, logits),
            None if bias is None else self.to_device(device, bias),
            spec,
        )
        expected_ids, expected_weights = oracle.moe_routing(
            logits.astype("float64"), None if bias is None else bias.astype("float64"), spec
        )
        got_ids = self.to_host(device, ids)
        got_weights = self.to_host(device, weights)
        assert got_ids.shape == (tokens, spec.top_k) and got_ids.dtype == np.int64
        # The order within a row is up to the kernel.
        by_id, expected_by_id = np.argsort(got_ids, -1), np.argsort(expected_ids, -1)
        assert np.array_equal(
            np.take_along_axis(got_ids, by_id, -1),
            np.take_along_axis(expected_ids, expected_by_id, -1),
        )
        assert np.allclose(
            np.take_along_axis(got_weights, by_id, -1),
            np.take_along_axis(expected_weights, expected_by_id, -1),
            atol=1e-5,
        )

    @pytest.mark.parametrize("tokens", TOKENS)
    @pytest.mark.parametrize("crowd", ["spread", "one expert", "same row"])
    def test_moe_experts(
        self, device: Any, kernels: Any, dtype: str, tokens: int, crowd: str
    ) -> None:
        rng = np.random.default_rng(0)
        x, gate_up, down = values(1, tokens, 16), values(2, 6, 48, 16), values(3, 6, 16, 24)
        ids = np.argsort(rng.random((tokens, 6)), -1)[:, :2]
        if crowd == "one expert":
            ids[:] = (4, 1)
        elif crowd == "same row" and tokens:
            x[:] = x[:1]
        weights = rng.random((tokens, 2)).astype("float32")
        got = kernels["moe_experts"](
            self.to_device(device, x, dtype),
            self.to_device(device, ids),
            self.to_device(device, weights),
            self.to_device(device, gate_up, dtype),
            self.to_device(device, down, dtype),
        )
        expected = oracle.moe_experts(
            *(self.rounded(device, x, dtype), ids, weights.astype("float64")),
            self.rounded(device, gate_up, dtype),
            self.rounded(device, down, dtype),
        )
        self.assert_close(device, got, expected, dtype)
        self.assert_dtype(device, got, dtype)

    @pytest.mark.parametrize("size", [1, 3, 8])
    def test_keep_results(self, device: Any, kernels: Any, size: int) -> None:
        rng, slots = np.random.default_rng(size), np.array([2, 0, 4, 3, 4])  # 4 is the padding slot
        computed, results = rng.integers(0, 99, 5), rng.integers(-3, 999, (5, 1))
        kept = rng.integers(0, 999, (5, size))
        on_device = [self.to_device(device, x.copy()) for x in (slots, results, computed, kept)]
        kernels["keep_results"](*on_device)
        for row in (0, 1, 3):
            kept[row, computed[slots[row]] % size] = results[row, 0]
        assert np.array_equal(device.to_host(on_device[-1]), kept)


class TestOps(OpsConformance):
    """Run by `fastdeploy plugins check`."""
