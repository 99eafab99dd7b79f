"""Driver compressed-tensors: int4, int8 and fp8 checkpoints of llm-compressor and similar tools.

weight_packed [N, K * bits / 32] int32, low bits first, offset by 2^(bits-1) (pack-quantized)
weight        [N, K] int8 or float8_e4m3fn (the other formats)
weight_scale  [1], [N, 1], [N, G] or blocks
weight_zero_point  packed along N if weights are
weight_g_idx  [K] with actorder "group"
input_scale   [1] if activations are static
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fd_quant_formats import check_group, largest_scale, names_in, spread_parts

from fastdeploy_core.contracts.quant_formats import FORMATS, FP8_BLOCK, PackedWeight, pack_int4
from fastdeploy_core.contracts.quantizer import ParameterSpec
from fastdeploy_core.errors import ConfigError, UnsupportedModel

from .ordered import OrderedQuantizer
from .packing import unpack_int32
from .schemes import Scheme, find_scheme, matches, read_schemes

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.contracts.quantizer import LayerSpec
    from fastdeploy_core.tensor import Tensor


class CompressedTensors(OrderedQuantizer):
    """Reads every layer by the scheme of its config group."""

    name = "compressed-tensors"
    contract = (1, 0)

    def __init__(
        self, config: Mapping[str, Any], device: DeviceBackend, kernels: KernelTable
    ) -> None:
        super().__init__(config, device, kernels)
        self._schemes = read_schemes(config)
        self._ignore = names_in(config, "ignore")
        self._quantizes_head = True  # unless it is ignored, which is usual

    def is_ignored(self, name: str) -> bool:
        """Whether the layer is named in `ignore` or belongs to no group."""
        if any(matches(name, entry) for entry in self._ignore):
            return True
        return find_scheme(self._schemes, name) is None

    def _scheme(self, layer: LayerSpec) -> Scheme:
        names = [part.name for part in layer.parts] or [layer.name]
        found = {find_scheme(self._schemes, name) for name in names}
        if len(found) != 1:
            raise ConfigError(
                f"compressed-tensors: {', '.join(names)} fall into different config_groups; they "
                f"are computed as one layer ({layer.name}) and need one"
            )
        scheme = found.pop()
        if scheme is None:
            raise ConfigError(f"compressed-tensors: {layer.name} is in no config group")
        return scheme

    def supports(self, layer: LayerSpec) -> bool:
        """As the groups say; a layer that cannot be divided is refused by name."""
        if not super().supports(layer):
            return False
        scheme = self._scheme(layer)
        check_group(layer, scheme.group_size, self.name)
        if scheme.is_scattered and layer.role == "experts":
            raise UnsupportedModel(
                f"{layer.name}: experts with actorder group are not supported; possible: actorder "
                "weight or none"
            )
        if scheme.is_scattered and layer.parallel == "row" and layer.shards > 1:
            raise ConfigError(
                f"{self.name}: {layer.name} has its inputs in an order of its own (actorder group) "
                "and cannot be divided; possible: --tensor-parallel-size 1"
            )
        if scheme.strategy == "block":
            sizes = [part.out_features for part in layer.parts[:-1]]
            if layer.parallel == "row" and layer.shards > 1:
                sizes.append(layer.in_features)
            if (layer.role == "experts" or layer.shards > 1) and any(
                size % FP8_BLOCK for size in sizes
            ):
                raise ConfigError(
                    f"compressed-tensors: {layer.name} is cut inside a block of {FP8_BLOCK}; use "
                    "fewer tensor-parallel ranks"
                )
        return True

    def joins(self, layer: LayerSpec) -> bool:
        """Not if parts have an order of inputs of their own, and not across the edge of a block."""
        scheme = self._scheme(layer)
        if scheme.strategy == "block":
            return all(part.out_features % FP8_BLOCK == 0 for part in layer.parts[:-1])
        return not scheme.is_scattered

    def parameters(self, layer: LayerSpec) -> dict[str, ParameterSpec]:
        """The tensors that the scheme stores."""
        scheme = self._scheme(layer)
        rows, count = layer.out_features, layer.in_features
        by_row = layer.parallel == "row"
        dim = 1 if by_row else 0
        found: dict[str, ParameterSpec] = {}
        if scheme.is_packed:
            width = -(-count * scheme.bits // 32)
            found["weight_packed"] = ParameterSpec((rows, width), "int32", dim)
            found["weight_shape"] = ParameterSpec((2,), "int64", None, 1.0, optional=True)
        else:
            dtype = "float8_e4m3fn" if "fp8" in scheme.format else "int8"
            found["weight"] = ParameterSpec((rows, count), dtype, dim)
        shape, scale_dim = self._scale_shape(layer, scheme)
        found["weight_scale"] = ParameterSpec(shape, "float32", scale_dim, 0.004)
        if not scheme.is_symmetric:
            zero = (-(-rows * scheme.bits // 32), shape[1]) if scheme.is_packed else shape
            dtype = "int32" if scheme.is_packed else "int8"
            found["weight_zero_point"] = ParameterSpec(zero, dtype, scale_dim, 0.0)
        if scheme.is_scattered:
            found["weight_g_idx"] = ParameterSpec((count,), "int32", 0 if by_row else None, 0.0)
        if scheme.is_static:
            found["input_scale"] = ParameterSpec((1,), "float32", None, 0.05)
        return found

    def _scale_shape(self, layer: LayerSpec, scheme: Scheme) -> tuple[tuple[int, ...], int | None]:
        rows, count, by_row = layer.out_features, layer.in_features, layer.parallel == "row"
        if scheme.strategy == "tensor":
            return (1,), None
        if scheme.strategy == "channel":
            return (rows, 1), None if by_row else 0
        if scheme.strategy == "block":
            return (-(-rows // FP8_BLOCK), -(-count // FP8_BLOCK)), 1 if by_row else 0
        groups = count // scheme.group_size
        return (rows, groups), 0 if not by_row else (1 if groups > 1 else None)

    def pack(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> PackedWeight:
        """To the internal format. Experts share every step except unpacking words."""
        scheme, xp = self._scheme(layer), self.xp
        scale = tensors["weight_scale"]
        if scheme.strategy == "tensor":
            scale = spread_parts(xp, layer, scale.float())
        packed = {"scale": scale}
        if scheme.is_packed:
            packed["weight"] = self._from_words(layer, scheme, tensors)
        elif scheme.bits == 4:
            packed["weight"] = pack_int4((tensors["weight"].to(xp.int32) + 8).to(xp.uint8))
        elif scheme.is_symmetric:
            packed["weight"] = tensors["weight"]
        else:
            packed["weight"] = (tensors["weight"].to(xp.int32) + 128).to(xp.uint8)
        if not scheme.is_symmetric:
            packed["zero"] = self._zeros(layer, scheme, tensors["weight_zero_point"])
        if scheme.is_static:
            packed["input_scale"] = largest_scale(layer, tensors["input_scale"])
        return PackedWeight(
            FORMATS[scheme.format],
            layer.out_features,
            layer.in_features,
            packed,
            layer.num_experts,
            scheme.group_size,
        )

    def _from_words(self, layer: LayerSpec, scheme: Scheme, tensors: dict[str, Tensor]) -> Tensor:
        xp = self.xp
        values = unpack_int32(tensors["weight_packed"], scheme.bits)[..., : layer.in_features]
        order = self.order(layer, tensors)
        if order is not None:
            values = xp.index_select(values, 1, order)
        if scheme.bits == 4:
            return pack_int4(values.contiguous())
        if scheme.is_symmetric:
            return (values.to(xp.int32) - 128).to(xp.int8)
        return values.contiguous()

    def _zeros(self, layer: LayerSpec, scheme: Scheme, stored: Tensor) -> Tensor:
        xp, offset = self.xp, 1 << (scheme.bits - 1)
        if not scheme.is_packed:
            return (stored.to(xp.int32) + offset).to(xp.uint8)
        # Words run along outputs: [..., N / per_word, G]. Each of several joined parts ends in a
        # whole word.
        words = unpack_int32(stored.transpose(-1, -2).contiguous(), scheme.bits)
        rows = [part.out_features for part in layer.parts] or [layer.out_features]
        per_word, kept, start = 32 // scheme.bits, [], 0
        for count in rows:
            kept.append(words[..., start : start + count])
            start += -(-count // per_word) * per_word
        return xp.cat(kept, -1).transpose(-1, -2).contiguous()

    def order(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> Tensor | None:
        """By the stored group numbers."""
        scheme = self._scheme(layer)
        if not scheme.is_scattered or not scheme.group_size:
            return None
        xp = self.xp
        return xp.argsort(tensors["weight_g_idx"].reshape([-1]).to(xp.int64), 0, stable=True)
