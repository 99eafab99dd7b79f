"""Products with packed weights: every cell of a device's table against the definition of its
format."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastdeploy_core.contracts.quant_formats import FORMATS, PackedWeight
from fastdeploy_core.quantization import (
    quantize_block_fp8,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
)
from fastdeploy_testing import oracle

from .base import OnDevice, values

# (outputs, inputs, inputs that share a scale)
SHAPES = ((48, 64, 0), (64, 128, 0), (96, 256, 32), (256, 384, 128))
TOKENS = (0, 1, 7, 33)
EXPERTS = 4
# Factor on the tolerance for experts whose hidden activations are rounded.
_LEVELS = 100.0


def make_packed(xp: Any, name: str, weight: Any, group_size: int = 0) -> PackedWeight:
    """A weight [N, K] on the device in an internal format, by the core's own rounding."""
    if name.startswith(("wint8", "w8a8")):
        numbers, scale = quantize_int8(weight, group_size)
    elif name.startswith(("wint4", "w4a8")):
        numbers, scale = quantize_int4(weight, group_size)
    elif name == "block_fp8":
        numbers, scale = quantize_block_fp8(weight)
    else:
        numbers, scale = quantize_fp8(weight)
    held = {"weight": numbers, "scale": scale}
    if name.endswith("_zp"):
        middle = 8 if name.startswith("wint4") else 128
        held["zero"] = xp.full(list(scale.shape), middle, dtype=xp.uint8, device=scale.device)
        if middle == 128:
            held["weight"] = (numbers.to(xp.int32) + 128).to(xp.uint8)
    if name.endswith("_static"):
        held["input_scale"] = xp.full([1], 0.03, dtype=xp.float32, device=scale.device)
    rows, count = weight.shape
    return PackedWeight(FORMATS[name], int(rows), int(count), held, group_size=group_size)


class QuantizedOpsConformance(OnDevice):
    """Operations that the device lacks come from the reference and are tested too."""

    kind = "kernels"

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("name", FORMATS)
    def test_linear(
        self, device: Any, kernels: Any, dtype: str, name: str, shape: tuple[int, int, int]
    ) -> None:
        rows, count, group = shape
        if group and not name.startswith("wint"):
            pytest.skip("the format has no groups")
        weight = self.to_device(device, values(0, rows, count))
        packed = make_packed(device.xp, name, weight, group)
        operation = packed.format.linear
        prepared = kernels.prepare(operation, packed)
        rounds = kernels.activations(operation)
        for tokens in TOKENS:
            x, bias = values(1, tokens, count), values(2, rows)
            for has_bias in (False, True):
                got = kernels[operation](
                    self.to_device(device, x, dtype),
                    prepared,
                    self.to_device(device, bias, dtype) if has_bias else None,
                )
                expected = self._product(device, packed, x, dtype, rounds)
                if has_bias:
                    expected = expected + self.rounded(device, bias, dtype)
                assert device.xp.dtype_name(got.dtype) == dtype
                self.assert_close(device, got, expected, dtype)

    @pytest.mark.parametrize("name", FORMATS)
    def test_experts(self, device: Any, kernels: Any, dtype: str, name: str) -> None:
        hidden, inner = 128, 128
        gate_up = self._experts(device, name, 3, 2 * inner, hidden)
        down = self._experts(device, name, 4, hidden, inner)
        operation = gate_up.format.experts
        prepared = [kernels.prepare(operation, weight) for weight in (gate_up, down)]
        rounds = kernels.activations(operation)
        for tokens in TOKENS:
            x = values(5, tokens, hidden)
            rng = np.random.default_rng(6)
            ids = np.array([rng.permutation(EXPERTS)[:2] for _ in range(tokens)]).reshape(-1, 2)
            shares = rng.uniform(0.1, 1, (tokens, 2)).astype("float32")
            got = kernels[operation](
                self.to_device(device, x, dtype),
                device.to_device(ids.astype("int64")),
                device.to_device(shares),
                *prepared,
            )
            expected = np.zeros((tokens, hidden))
            for token in range(tokens):
                for expert, share in zip(ids[token], shares[token], strict=True):
                    row = x[token : token + 1]
                    up = self._product(device, gate_up.expert(int(expert)), row, dtype, rounds)
                    inside = oracle.silu_and_mul(self.rounded(device, up, dtype))
                    y = self._product(device, down.expert(int(expert)), inside, dtype, rounds)
                    expected[token] += share * y[0]
            # An activation between two levels may be rounded either way: one level of one input.
            wider = _LEVELS * float(np.max(np.abs(expected), initial=0.0))
            self.assert_close(
                device, got, expected, dtype, wider if _rounds(name) or rounds else 0.0
            )

    def _experts(self, device: Any, name: str, seed: int, rows: int, count: int) -> PackedWeight:
        xp = device.xp
        parts = [
            make_packed(xp, name, self.to_device(device, values(seed * 10 + e, rows, count)))
            for e in range(EXPERTS)
        ]
        held = {}
        for key, first in parts[0].tensors.items():
            is_fp8 = first.dtype == xp.float8_e4m3fn
            bits = [p.tensors[key].view(xp.uint8) if is_fp8 else p.tensors[key] for p in parts]
            held[key] = xp.stack(bits).view(xp.float8_e4m3fn) if is_fp8 else xp.stack(bits)
        return PackedWeight(FORMATS[name], rows, count, held, EXPERTS)

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("name", FORMATS)
    def test_plain_products_that_take_the_format(
        self, device: Any, kernels: Any, dtype: str, name: str, shape: tuple[int, int, int]
    ) -> None:
        rows, count, group = shape
        if not kernels.takes("linear", name) or not kernels.takes("gated_linear", name):
            pytest.skip("the device's plain products do not take the format")
        if group and not name.startswith("wint"):
            pytest.skip("the format has no groups")
        packed = make_packed(device.xp, name, self.to_device(device, values(0, rows, count)), group)
        rounds = kernels.activations(packed.format.linear)
        plain, gated = (kernels.prepare(o, packed) for o in ("linear", "gated_linear"))
        bias = self.to_device(device, values(2, rows), dtype)
        shift = self.rounded(device, values(2, rows), dtype)
        for tokens in TOKENS:
            array = values(1, tokens, count)
            x = self.to_device(device, array, dtype)
            expected = self._product(device, packed, array, dtype, rounds) + shift
            self.assert_close(device, kernels["linear"](x, plain, bias), expected, dtype)
            got = kernels["gated_linear"](x, None, 0.0, gated, bias)
            self.assert_close(device, got, oracle.silu_and_mul(expected), dtype)
            rest = self.to_device(device, np.ones((tokens, rows), "float32"), dtype)
            got = kernels["linear_add"](x, plain, bias, rest)
            self.assert_close(device, got, expected + 1, dtype)

    @pytest.mark.parametrize("name", FORMATS)
    def test_what_stands_before_a_product(
        self, device: Any, kernels: Any, dtype: str, name: str
    ) -> None:
        """Kernel.behind: bit for bit the result of the two operations, one after the other."""
        rows, count, _ = SHAPES[-1]
        packed = make_packed(device.xp, name, self.to_device(device, values(0, rows, count)))
        operation = packed.format.linear
        befores = ("add_rms_norm", "silu_and_mul")
        norm, activation = (kernels.behind(operation, before) for before in befores)
        if norm is None and activation is None:
            pytest.skip("the cell leaves what stands before it alone")
        prepared, product = kernels.prepare(operation, packed), kernels[operation]
        for tokens in TOKENS:
            x, rest = (self.to_device(device, values(n, tokens, count), dtype) for n in (1, 2))
            if norm is not None:
                given = (x, rest, self.to_device(device, values(3, count), dtype), 0.3)
                normed, total = norm(*given, prepared)
                expected, expected_total = kernels["add_rms_norm"](*given)
                self._same(device, total, expected_total)
                self._same(device, *(product(y, prepared, None) for y in (normed, expected)))
            if activation is not None:
                both = device.xp.cat((x, rest), -1)
                ways = activation(both, prepared), kernels["silu_and_mul"](both)
                self._same(device, *(product(y, prepared, None) for y in ways))

    def _same(self, device: Any, got: Any, expected: Any) -> None:
        ours, theirs = (np.array(device.to_host(y.float())) for y in (got, expected))
        np.testing.assert_array_equal(ours, theirs)

    def _product(
        self, device: Any, packed: PackedWeight, x: np.ndarray, dtype: str, rounds: str = ""
    ) -> np.ndarray:
        """The format's definition, summed in float64; `rounds` is Kernel.activations."""
        if not len(x):
            return np.zeros((0, packed.out_features))
        seen = packed.activate(self.to_device(device, np.asarray(x, "float32"), dtype)).float()
        if rounds == "int8":
            groups = seen.reshape([len(x), -1, packed.group_size or packed.in_features])
            scale = groups.abs().amax(dim=-1, keepdim=True) / 127.0
            seen = ((groups / scale).round() * scale).reshape([len(x), -1])
        weight = np.array(device.to_host(packed.dequantize()), "float64")
        product: np.ndarray = np.array(device.to_host(seen), "float64") @ weight.T
        return product


def _rounds(name: str) -> bool:
    return bool(FORMATS[name].activation)


class TestQuantizedOps(QuantizedOpsConformance):
    """Run by `fastdeploy plugins check`."""
