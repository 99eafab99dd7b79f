"""Every operation in a device's kernel table against the numpy oracle, over shapes and dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastdeploy_core.contracts.moe import RoutingSpec
from fastdeploy_core.contracts.ops import OPERATIONS
from fastdeploy_testing import oracle

from .base import values
from .decode_ops import DecodeOps
from .sampling_ops import SamplingOps

TOKENS = (0, 1, 7, 33)
# (eps, size of x) of norms. Where the square of the size is about eps, a kernel that takes another
# eps than the one that it was given is far off.
NORMS = ((1e-5, 3.0), (1e-6, 1e-3), (0.3, 0.5))
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


class OpsConformance(SamplingOps, DecodeOps):
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
        ids[:1] = 49
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
        weight, bias = values(1, 24, 48), values(2, 24)
        for seed in (0, 3):
            x = values(seed, tokens, 48)
            got = kernels["linear"](
                self.to_device(device, x, dtype),
                kernels.prepare("linear", self.to_device(device, weight, dtype)),
                self.to_device(device, bias, dtype) if has_bias else None,
            )
            expected = self.rounded(device, x, dtype) @ self.rounded(device, weight, dtype).T
            if has_bias:
                expected = expected + self.rounded(device, bias, dtype)
            self.assert_close(device, got, expected, dtype)

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
        for seed in (0, 1):
            x = values(seed, tokens, 40) * 4
            got = kernels["silu_and_mul"](self.to_device(device, x, dtype))
            self.assert_close(
                device, got, oracle.silu_and_mul(self.rounded(device, x, dtype)), dtype
            )

    @pytest.mark.parametrize(
        "index", [[0], [6], [0, 3, 6], [*range(7)], [2, 5, 0], [0, 0, 0]], ids=str
    )
    def test_select_rows(self, device: Any, kernels: Any, dtype: str, index: list[int]) -> None:
        named = np.array(index)
        real = 1 + int((np.diff(named) > 0).sum())  # zeros after that are padding
        for seed in (0, 1):
            x = values(seed, 7, 48)
            got = kernels["select_rows"](
                self.to_device(device, x, dtype), self.to_device(device, named)
            )
            expected = self.rounded(device, x, dtype)[named[:real]]
            assert np.array_equal(self.to_host(device, got)[:real], expected)

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
        width, rotated = heads[2:]
        angles = np.arange(64)[:, None] / 100.0 ** (np.arange(rotated // 2) * 2 / rotated)
        cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], -1).astype("float32")
        for seed in (0, 2):
            positions = np.random.default_rng(seed).integers(0, 64, tokens)
            arrays = [values(seed + n, tokens, m, width) for n, m in enumerate(heads[:2])]
            got = kernels["rotary_embedding"](
                *(self.to_device(device, x, dtype) for x in arrays),
                self.to_device(device, positions),
                self.to_device(device, cos_sin),
                interleaved,
            )
            for result, x in zip(got, arrays, strict=True):
                seen, table = self.rounded(device, x, dtype), cos_sin.astype("float64")
                expected = oracle.rotary(seen, positions, table, interleaved)
                self.assert_close(device, result, expected, dtype)

    @pytest.mark.parametrize("tokens", TOKENS)
    @pytest.mark.parametrize("has_bias", [False, True])
    def test_products_with_a_norm_before_or_a_sum_after(
        self, device: Any, kernels: Any, dtype: str, tokens: int, has_bias: bool
    ) -> None:
        for eps, size in NORMS:
            arrays = {
                "x": values(0, tokens, 64) * size,
                "w": values(2, 48, 64) / 8,
                "b": values(3, 48),
                "n": values(4, 64),
            }
            x, w, b, n = (self.to_device(device, array, dtype) for array in arrays.values())
            seen = {name: self.rounded(device, array, dtype) for name, array in arrays.items()}
            bias, shift = (b, seen["b"]) if has_bias else (None, 0.0)
            normed = oracle.rms_norm(seen["x"], seen["n"], eps)
            of_norm, plain = normed @ seen["w"].T + shift, seen["x"] @ seen["w"].T + shift
            linear, gated = (kernels.prepare(name, w) for name in ("linear", "gated_linear"))
            got = kernels["norm_linear"](x, n, eps, linear, bias)
            self.assert_close(device, got, of_norm, dtype)
            got = kernels["gated_linear"](x, n, eps, gated, bias)
            self.assert_close(device, got, oracle.silu_and_mul(of_norm), dtype)
            got = kernels["gated_linear"](x, None, 0.0, gated, bias)
            self.assert_close(device, got, oracle.silu_and_mul(plain), dtype)
            residual = values(1, tokens, 48)
            sent = self.to_device(device, residual, dtype)
            got = kernels["linear_add"](x, linear, bias, sent)
            self.assert_close(device, got, plain + self.rounded(device, residual, dtype), dtype)

    @pytest.mark.parametrize("tokens", TOKENS)
    @pytest.mark.parametrize("heads", [(4, 2), (3, 3)], ids=str)
    def test_qk_norm(
        self, device: Any, kernels: Any, dtype: str, tokens: int, heads: tuple[int, int]
    ) -> None:
        num_heads, num_kv_heads = heads
        end = num_heads + num_kv_heads
        weights = [values(1, 16), values(2, 16)]
        for eps, size in NORMS:
            joined = values(0, tokens, num_heads + 2 * num_kv_heads, 16) * size
            on_device = self.to_device(device, joined.copy(), dtype)
            got = kernels["qk_norm"](
                on_device[:, :num_heads],
                on_device[:, num_heads:end],
                *(self.to_device(device, w, dtype) for w in weights),
                eps,
            )
            whole = self.rounded(device, joined, dtype)
            for result, part, weight in zip(
                got, (whole[:, :num_heads], whole[:, num_heads:end]), weights, strict=True
            ):
                expected = oracle.rms_norm(part, self.rounded(device, weight, dtype), eps)
                self.assert_close(device, result, expected, dtype)
            after = self.to_host(device, on_device)
            assert np.array_equal(after[:, end:], whole[:, end:]), "values were changed"

    @pytest.mark.parametrize("tokens", TOKENS)
    @pytest.mark.parametrize("width", [48, 64])
    def test_concat_rms_norm(
        self, device: Any, kernels: Any, dtype: str, tokens: int, width: int
    ) -> None:
        weights = [values(n, width) for n in (2, 3)]
        for eps, size in NORMS:
            arrays = [values(n, tokens, width) * size for n in (0, 1)]
            x, y, *gains = (self.to_device(device, array, dtype) for array in (*arrays, *weights))
            got = kernels["concat_rms_norm"](x, gains[0], y, gains[1], eps)
            expected = [
                oracle.rms_norm(self.rounded(device, a, dtype), self.rounded(device, w, dtype), eps)
                for a, w in zip(arrays, weights, strict=True)
            ]
            self.assert_close(device, got, np.concatenate(expected, -1), dtype)

    @pytest.mark.parametrize("tokens", TOKENS)
    def test_linear_float32(self, device: Any, kernels: Any, dtype: str, tokens: int) -> None:
        weight = values(1, 12, 80)
        for seed in (0, 2):
            x = values(seed, tokens, 80)
            got = kernels["linear_float32"](
                self.to_device(device, x, dtype),
                kernels.prepare("linear_float32", self.to_device(device, weight)),
            )
            expected = self.rounded(device, x, dtype) @ weight.astype("float64").T
            self.assert_close(device, got, expected, "float32")

    @pytest.mark.parametrize("tokens", TOKENS)
    @pytest.mark.parametrize("has_bias", [False, True])
    def test_embedding_and_head_share_a_weight(
        self, device: Any, kernels: Any, dtype: str, tokens: int, has_bias: bool
    ) -> None:
        weight, bias = values(0, 50, 32), values(1, 50)
        shared = kernels.prepare("linear", self.to_device(device, weight, dtype))
        seen = self.rounded(device, weight, dtype)
        for seed in (1, 2):
            ids = np.random.default_rng(seed).integers(0, 50, tokens)
            x = kernels["embedding"](self.to_device(device, ids), shared)
            assert np.array_equal(self.to_host(device, x), seen[ids])
            got = kernels["linear_logits"](
                x, shared, self.to_device(device, bias, dtype) if has_bias else None
            )
            expected = seen[ids] @ seen.T + (self.rounded(device, bias, dtype) if has_bias else 0.0)
            self.assert_close(device, got, expected, dtype)

    @pytest.mark.parametrize("tokens", TOKENS)
    @pytest.mark.parametrize("has_bias", [False, True])
    def test_greedy_linear(
        self, device: Any, kernels: Any, dtype: str, tokens: int, has_bias: bool
    ) -> None:
        weight, bias = values(1, 80, 64), values(2, 80) * 8
        weight[70], bias[70] = weight[7], bias[7]  # equal logits for every hidden state
        bias[79] = 5.0
        prepared = kernels.prepare("linear", self.to_device(device, weight, dtype))
        bias_dev = self.to_device(device, bias, dtype) if has_bias else None
        for seed in (0, 3):
            x = values(seed, tokens, 64)
            x[:1] = weight[-1]  # the last id is the largest
            ids, peaks = kernels["greedy_linear"](
                self.to_device(device, x, dtype), prepared, bias_dev
            )
            logits = self.rounded(device, x, dtype) @ self.rounded(device, weight, dtype).T
            logits += self.rounded(device, bias, dtype) if has_bias else 0.0
            got, rows = self.to_host(device, ids), np.arange(tokens)
            assert 70 not in got, "the smallest id among equals is taken"
            relative, absolute = self.tolerance(dtype)
            scale = float(np.max(np.abs(logits), initial=0.0))
            near = logits.max(-1, initial=-np.inf) - logits[rows, got] if tokens else np.zeros(0)
            assert np.all(near <= 2 * (absolute + relative * scale)), "not the largest logit"
            self.assert_close(device, peaks, logits[rows, got], dtype)

    def test_nan_stays_in_its_row_and_is_seen(self, device: Any, kernels: Any, dtype: str) -> None:
        """Else a model that computes nonsense answers fluently, or spoils its neighbours."""
        x = values(0, 3, 32)
        x[1, 5] = np.nan

        def send(array: np.ndarray, name: str = "") -> Any:
            sent = self.to_device(device, array, dtype)
            return kernels.prepare(name, sent) if name else sent

        gain, rest = send(values(1, 32)), send(values(2, 3, 24))
        weight, heads = values(3, 24, 32), x.reshape(3, 2, 16)
        ids, shares = np.zeros((3, 1), "int64"), np.ones((3, 1), "float32")
        position, angles = np.zeros(3, "int64"), np.ones((4, 16), "float32")
        plain = self.to_device(device, weight)
        results = {
            "linear": (send(x), send(weight, "linear"), None),
            "rms_norm": (send(x), gain, 1e-5),
            "add_rms_norm": (send(x), send(values(4, 3, 32)), gain, 1e-5),
            "silu_and_mul": (send(x),),
            "select_rows": (send(x), self.to_device(device, np.arange(3))),
            "rotary_embedding": (send(heads), send(heads), self.to_device(device, position),
                                 self.to_device(device, angles), False),
            "norm_linear": (send(x), gain, 1e-5, send(weight, "linear"), None),
            "gated_linear": (send(x), gain, 1e-5, send(weight, "gated_linear"), None),
            "linear_add": (send(x), send(weight, "linear"), None, rest),
            "qk_norm": (send(heads), send(heads), gain[:16], gain[:16], 1e-5),
            "concat_rms_norm": (send(x), gain, send(x), gain, 1e-5),
            "linear_float32": (send(x), kernels.prepare("linear_float32", plain)),
            "linear_logits": (send(x), send(weight, "linear"), None),
            "greedy_linear": (send(x), send(weight, "linear"), None),
            "moe_experts": (send(x), self.to_device(device, ids), self.to_device(device, shares),
                            send(values(5, 2, 24, 32)), send(values(6, 2, 32, 12))),
        }  # fmt: skip
        for name, arguments in results.items():
            got = kernels[name](*arguments)
            for part in got if isinstance(got, tuple) else (got,):
                host = self.to_host(device, part).reshape(3, -1)
                if name == "greedy_linear" and part is got[0]:
                    continue  # any id; its peak tells
                assert np.isnan(host[1]).any(), f"{name}: NaN of a row is gone"
                assert not np.isnan(host[[0, 2]]).any(), f"{name}: NaN in another row"

    def test_long_sums_keep_small_parts(self, device: Any, kernels: Any, dtype: str) -> None:
        """2,048 equal parts: a sum in 16 bits is soon too coarse for another one."""
        x, weight, gain = np.full((3, 2048), 0.7), np.full((8, 2048), 0.3), np.ones(2048)
        seen = self.rounded(device, x, dtype)
        expected = seen @ self.rounded(device, weight, dtype).T
        sent, on_device, ones = (
            self.to_device(device, a.astype("float32"), dtype) for a in (x, weight, gain)
        )
        linear = kernels.prepare("linear", on_device)
        self.assert_close(device, kernels["linear"](sent, linear, None), expected, dtype)
        self.assert_close(device, kernels["linear_logits"](sent, linear, None), expected, dtype)
        _, peaks = kernels["greedy_linear"](sent, linear, None)
        self.assert_close(device, peaks, expected[:, 0], dtype)
        got = kernels["rms_norm"](sent, ones, 0.0)
        self.assert_close(device, got, gain + 0 * x, dtype)
        got = kernels["norm_linear"](sent, ones, 0.0, linear, None)
        self.assert_close(device, got, expected / seen[0, 0], dtype)

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
        # Block 0 is read after it would have been overwritten.
        source, target = np.array([7, 0, 3])[:count], np.array([0, 8, 5])[:count]
        kernels["kv_copy_blocks"](
            cache, self.to_device(device, source), self.to_device(device, target)
        )
        for array in expected:
            array[target] = array[source].copy()
        for got, array in zip(cache, expected, strict=True):
            assert np.array_equal(self.to_host(device, got), array)
        for named in (source, target):
            taken = kernels["kv_read_blocks"](cache, self.to_device(device, named))
            for got, array in zip(taken, expected, strict=True):
                assert np.array_equal(self.to_host(device, got), array[named])
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
        bias = values(1, spec.num_experts) * 0.1 if spec.has_correction_bias else None
        for seed in (0, 5):
            self._route(device, kernels, values(seed, tokens, spec.num_experts) * 2, bias, spec)

    def test_moe_routing_adds_the_bias_in_float32(self, device: Any, kernels: Any) -> None:
        bias = np.full(8, 1.0, "float32")
        bias[[2, 5]] += 1e-3, 2e-3  # bfloat16 rounds both to 1
        spec = RoutingSpec(num_experts=8, top_k=2, has_correction_bias=True)
        self._route(device, kernels, np.zeros((3, 8), "float32"), bias, spec)

    def _route(
        self,
        device: Any,
        kernels: Any,
        logits: np.ndarray,
        bias: np.ndarray | None,
        spec: RoutingSpec,
    ) -> None:
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
        gate_up, down = values(2, 6, 48, 16), values(3, 6, 16, 24)
        for seed in (0, 1):
            rng, x = np.random.default_rng(seed), values(seed, tokens, 16)
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


class TestOps(OpsConformance):
    """Run by `fastdeploy plugins check`."""
