"""Products with packed weights: every cell of a device's table against the definition of its
format."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from fd_quant_formats import (
    quantize_block_fp8,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
)

from fastdeploy_core.contracts.attention import KVScales
from fastdeploy_core.contracts.kv_formats import KV_FORMATS, KVFormat
from fastdeploy_core.contracts.quant_formats import FORMATS, PackedWeight
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
        bias = values(2, rows)
        for tokens, seed in itertools.product(TOKENS, (1, 3)):
            x = values(seed, tokens, count)
            for has_bias in (False, True):
                got = kernels[operation](
                    self.to_device(device, x, dtype),
                    prepared,
                    self.to_device(device, bias, dtype) if has_bias else None,
                )
                expected = self._product(device, packed, x, dtype, rounds)
                if has_bias:
                    expected = expected + self.rounded(device, bias, dtype)
                self.assert_close(device, got, expected, dtype)

    @pytest.mark.parametrize("name", FORMATS)
    def test_experts(self, device: Any, kernels: Any, dtype: str, name: str) -> None:
        hidden, inner = 128, 128
        gate_up = self._experts(device, name, 3, 2 * inner, hidden)
        down = self._experts(device, name, 4, hidden, inner)
        operation = gate_up.format.experts
        prepared = [kernels.prepare(operation, weight) for weight in (gate_up, down)]
        rounds = kernels.activations(operation)
        for tokens, seed in itertools.product(TOKENS, (5, 6)):
            x = values(seed, tokens, hidden)
            rng = np.random.default_rng(seed)
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

    @pytest.mark.parametrize("name", FORMATS)
    def test_experts_are_weighted_in_float32(
        self, device: Any, kernels: Any, dtype: str, name: str
    ) -> None:
        """A token's one expert by 0.3: 0.3 times what the expert gives."""
        weights = [self._experts(device, name, seed, 256 // seed, 128) for seed in (1, 2)]
        operation = weights[0].format.experts
        prepared = [kernels.prepare(operation, weight) for weight in weights]
        x = self.to_device(device, values(3, 5, 128), dtype)
        ids = self.to_device(device, np.full((5, 1), 2))
        whole, part = (
            kernels[operation](x, ids, self.to_device(device, np.full((5, 1), share, "float32")),
                               *prepared)
            for share in (1.0, 0.3)
        )  # fmt: skip
        self.assert_close(device, part, self.to_host(device, whole) * 0.3, dtype)

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
        # What the cell makes for itself need not be a tensor: no declaration holds it.
        own = getattr(kernels, "inner", kernels)[operation]
        for tokens in TOKENS:
            x, rest = (self.to_device(device, values(n, tokens, count), dtype) for n in (1, 2))
            if norm is not None:
                given = (x, rest, self.to_device(device, values(3, count), dtype), 0.3)
                normed, total = norm(*given, prepared)
                expected, expected_total = kernels["add_rms_norm"](*given)
                self._same(device, total, expected_total)
                made = own(normed, prepared, None)
                self._same(device, made, product(expected, prepared, None))
            if activation is not None:
                both = device.xp.cat((x, rest), -1)
                made = own(activation(both, prepared), prepared, None)
                expected = product(kernels["silu_and_mul"](both), prepared, None)
                self._same(device, made, expected)

    @pytest.mark.parametrize("is_static", [False, True])
    @pytest.mark.parametrize("name", KV_FORMATS)
    def test_kv_write_rounds_rows_into_their_slots_only(
        self, device: Any, kernels: Any, dtype: str, name: str, is_static: bool
    ) -> None:
        kind, heads, dim, xp = KV_FORMATS[name], 2, 8, device.xp
        scales, tables = self._static_scales(device, kind, heads, dim)
        for tokens in TOKENS:
            numbers = [np.full((10, 4, heads, kind.width(dim)), 0x55, "uint8") for _ in range(2)]
            cache = [device.to_device(bits.copy()).view(xp.dtype(kind.dtype)) for bits in numbers]
            for _ in range(0 if is_static else 2):
                own = np.full((10, 4, heads, kind.scale_width), 0.5, "float32")
                cache.append(device.to_device(own).to(xp.dtype(kind.scale_dtype)))
            before = [np.array(device.to_host(c.float())) for c in cache]
            rng = np.random.default_rng(tokens)
            rows = [rng.uniform(-8.5, 8.5, (tokens, heads, dim)).astype("float32") for _ in "kv"]
            slots = rng.permutation(40)[:tokens]
            slots[::3] = -1
            kernels[kind.write](
                tuple(self.to_device(device, row, dtype) for row in rows),
                tuple(cache),
                self.to_device(device, slots),
                scales if is_static else None,
            )
            after = [np.array(device.to_host(c.float())) for c in cache]
            written = slots[slots >= 0]
            for old, new in zip(before, after, strict=True):
                old, new = (x.reshape(40, heads, -1) for x in (old, new))
                others = np.setdiff1d(np.arange(40), written)
                assert np.array_equal(new[others], old[others]), "a slot of nobody was written"
            for place, row in enumerate(rows):
                found = after[place].reshape(40, heads, -1)[written]
                if is_static:
                    scale, low = tables[place]
                else:
                    own = after[place + 2].reshape(40, heads, -1)[written]
                    scale, low = own[..., :1], own[..., 1:] if kind.has_minimum else 0.0
                expected = self.rounded(device, row, dtype)[slots >= 0]
                self._near(kind, found, expected, scale, low)

    def _static_scales(self, device: Any, kind: KVFormat, heads: int, dim: int) -> Any:
        """(KVScales, (scale, minimum) of keys and of values) that hold rows of up to +-10."""
        tables = []
        for seed in (7, 8):
            spread = np.random.default_rng(seed).uniform(9, 11, (heads, dim)).astype("float32")
            low = -spread if kind.has_minimum else np.zeros(1, "float32")
            tables.append((spread * (2 if kind.has_minimum else 1) / np.float32(kind.bound), low))
        scale, minimum = zip(*tables, strict=True)
        send = device.to_device
        lowest = tuple(map(send, minimum)) if kind.has_minimum else ()
        return KVScales(tuple(map(send, scale)), lowest), tables

    def _near(
        self, kind: KVFormat, found: np.ndarray, expected: np.ndarray, scale: Any, low: Any
    ) -> None:
        if kind.per_byte == 2:
            pairs = found.astype("uint8")
            found = np.stack([pairs & 15, pairs >> 4], -1).reshape(expected.shape)
        got = found * np.asarray(scale, "float64") + low
        if kind.dtype.startswith("float8"):  # half of the last of 3 bits
            size = np.maximum(np.abs(expected / scale), 2.0**-6)
            limit = 2.0 ** (np.floor(np.log2(size)) - 3) * 0.502 * scale
        else:
            # Scales are rounded, too, so the largest numbers may be cut a little.
            is_cut = (found <= (0 if kind.has_minimum else -kind.bound)) | (found >= kind.bound)
            limit = np.where(is_cut, 0.6, 0.502) * scale
        worst = np.max(np.abs(got - expected) - limit, initial=-1.0)
        assert worst <= 0, f"{worst:.3g} further from the row than rounding to {kind.name} allows"

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
