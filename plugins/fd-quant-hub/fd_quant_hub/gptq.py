"""Drivers gptq and awq: int4 (GPTQ also int8) checkpoints whose integers lie in int32 words.

    GPTQ  qweight [K / per_word, N] packed along inputs, qzeros [G, N / per_word], scales [G, N],
          g_idx [K]: the group of each input. Format "gptq" stores zero - 1, "gptq_v2" zero.
    AWQ   qweight [K, N / 8], qzeros [G, N / 8], both packed along outputs in AWQ's own order,
          scales [G, N].

A value is (q - zero) * scale. With GPTQ's act-order, inputs of a group are scattered: they are put
into the order of groups once, and x is gathered in that order before each product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from fd_quant_formats import PackedQuantizer, check_group, group_size_of

from fastdeploy_core.contracts.quant_formats import FORMATS, PackedWeight, pack_int4
from fastdeploy_core.contracts.quantizer import ParameterSpec
from fastdeploy_core.errors import ConfigError, UnsupportedModel, WeightError

from .ordered import OrderedQuantizer
from .packing import AWQ_ORDER, unpack_int32, unpack_rows

if TYPE_CHECKING:
    from fastdeploy_core.contracts.device import DeviceBackend
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.contracts.quantizer import LayerSpec
    from fastdeploy_core.tensor import Tensor

_BITS: Final = (4, 8)
_WORD_BITS: Final = 32


def gptq_problem(config: Mapping[str, Any]) -> str:
    """Why this configuration cannot be read; empty when it can."""
    if config.get("bits") not in _BITS:
        return f"GPTQ with bits {config.get('bits')!r}; possible: 4, 8"
    form = config.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        return f"GPTQ checkpoint_format {form!r}; possible: gptq, gptq_v2"
    return ""


def awq_problem(config: Mapping[str, Any]) -> str:
    """Why this configuration cannot be read; empty when it can."""
    if config.get("bits", config.get("w_bit")) != 4:
        return f"AWQ with bits {config.get('bits', config.get('w_bit'))!r}; possible: 4"
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        return f"AWQ version {version!r}; possible: gemm"
    return ""


class WordQuantizer(PackedQuantizer):
    """What both share: groups, and the conversion from words [K, N] to rows [N, K]."""

    bits = 4

    def __init__(
        self, config: Mapping[str, Any], device: DeviceBackend, kernels: KernelTable
    ) -> None:
        super().__init__(config, device, kernels)
        self.group_size = group_size_of(config, 128)

    @property
    def per_word(self) -> int:
        """Integers in an int32."""
        return _WORD_BITS // self.bits

    def supports(self, layer: LayerSpec) -> bool:
        """As in PackedQuantizer; layers that are not whole groups and words are refused by name."""
        if not super().supports(layer):
            return False
        check_group(layer, self.group_size, self.name)
        sizes = [layer.in_features, *(part.out_features for part in layer.parts)]
        if any(size % self.per_word for size in sizes):
            raise ConfigError(
                f"{self.name}: {layer.name} has {layer.in_features} inputs and "
                f"{layer.out_features} "
                f"outputs on this rank; expected multiples of {self.per_word}, the integers in a "
                "word; use fewer tensor-parallel ranks"
            )
        self._check_cut(layer)
        return True

    def _check_cut(self, layer: LayerSpec) -> None:
        """Check a layer whose inputs cannot be divided among ranks."""

    def _groups(self, layer: LayerSpec) -> int:
        return layer.in_features // self.group_size if self.group_size else 1

    def _group_dim(self, layer: LayerSpec) -> int | None:
        """The dimension of [G, N] that ranks divide."""
        if layer.parallel != "row":
            return 1
        return 0 if self._groups(layer) > 1 else None

    def pack(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> PackedWeight:
        """To rows of outputs; experts one by one."""
        if not layer.num_experts:
            return self._pack_one(layer, tensors)
        one = replace(layer, num_experts=0)
        packed = [
            self._pack_one(one, {name: tensor[expert] for name, tensor in tensors.items()})
            for expert in range(layer.num_experts)
        ]
        stacked = {
            name: self.xp.stack([weight.tensors[name] for weight in packed])
            for name in packed[0].tensors
        }
        return replace(packed[0], tensors=stacked, num_experts=layer.num_experts)

    def _pack_one(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> PackedWeight:
        raise NotImplementedError

    def _packed(
        self, layer: LayerSpec, rows: Tensor, zeros: Tensor | None, scales: Tensor
    ) -> PackedWeight:
        """rows [N, K] and zeros [N, G] are unsigned; without zeros the offset is the middle of the
        range."""
        xp = self.xp
        if self.bits == 4:
            weight = pack_int4(rows.contiguous())
        elif zeros is None:
            weight = (rows.to(xp.int32) - 128).to(xp.int8).contiguous()
        else:
            weight = rows.contiguous()
        packed = {"weight": weight, "scale": scales.transpose(0, 1).contiguous()}
        if zeros is not None:
            packed["zero"] = zeros.contiguous()
        kind = FORMATS[f"wint{self.bits}" + ("" if zeros is None else "_zp")]
        return PackedWeight(
            kind, layer.out_features, layer.in_features, packed, group_size=self.group_size
        )


class Gptq(OrderedQuantizer, WordQuantizer):
    """GPTQ, symmetric or not, with or without act-order."""

    name = "gptq"
    contract = (1, 0)

    def __init__(
        self, config: Mapping[str, Any], device: DeviceBackend, kernels: KernelTable
    ) -> None:
        super().__init__(config, device, kernels)
        problem = gptq_problem(config)
        if problem:
            raise ConfigError(problem)
        self.bits = int(config["bits"])
        self._is_symmetric = bool(config.get("sym", True))
        self._is_scattered = bool(config.get("desc_act", False))
        self._zero_offset = 0 if config.get("checkpoint_format") == "gptq_v2" else 1

    def _check_cut(self, layer: LayerSpec) -> None:
        if self._is_scattered and layer.parallel == "row" and layer.shards > 1:
            raise ConfigError(
                f"{self.name}: {layer.name} has its inputs in the order of act-order (desc_act) "
                "and cannot be divided; possible: --tensor-parallel-size 1"
            )

    def joins(self, layer: LayerSpec) -> bool:
        """No: each part has its own order of inputs."""
        return not self._is_scattered

    def parameters(self, layer: LayerSpec) -> dict[str, ParameterSpec]:
        """qweight, qzeros, scales, g_idx."""
        rows, count, groups = layer.out_features, layer.in_features, self._groups(layer)
        by_row, group_dim = layer.parallel == "row", self._group_dim(layer)
        words = rows // self.per_word
        return {
            "qweight": ParameterSpec((count // self.per_word, rows), "int32", 0 if by_row else 1),
            "qzeros": ParameterSpec((groups, words), "int32", group_dim, self._dummy_zero()),
            "scales": ParameterSpec((groups, rows), "float16", group_dim, 0.004),
            "g_idx": ParameterSpec(
                (count,), "int32", 0 if by_row else None, 0.0, optional=not self._is_scattered
            ),
        }

    def _dummy_zero(self) -> float:
        """An int32 word in which every integer is the middle of the range."""
        middle = (1 << (self.bits - 1)) - self._zero_offset
        word = sum(middle << (self.bits * n) for n in range(self.per_word))
        return float(word - (1 << 32) if word >= 1 << 31 else word)

    def _pack_one(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> PackedWeight:
        xp = self.xp
        values = unpack_rows(tensors["qweight"], self.bits)  # [K, N]
        zeros = unpack_int32(tensors["qzeros"], self.bits) + self._zero_offset  # [G, N]
        middle = 1 << (self.bits - 1)
        if self._is_symmetric and not bool((zeros == middle).all()):
            raise WeightError(
                f"tensor {layer.name}.qzeros is not all {middle}; config.json says sym=true; the "
                "checkpoint does not belong to this config.json"
            )
        order = self.order(layer, tensors)
        if order is not None:
            values = xp.index_select(values, 0, order)
        table = None if self._is_symmetric else zeros.transpose(0, 1)
        return self._packed(layer, values.transpose(0, 1), table, tensors["scales"])

    def order(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> Tensor | None:
        """Inputs in the order of their groups; None if they are in that order already."""
        index, xp = tensors.get("g_idx"), self.xp
        if index is None or not self.group_size or not self._is_scattered:
            return None
        # joined experts: one row for gate, one for up
        rows = index.reshape([-1, layer.in_features])
        plain = xp.arange(layer.in_features, dtype=xp.int64, device=rows.device) // self.group_size
        if bool((rows == plain.to(rows.dtype).unsqueeze(0)).all()):
            return None
        if layer.role == "experts":
            raise UnsupportedModel(
                f"{layer.name}: GPTQ experts with act-order (desc_act) are not supported; "
                "possible: desc_act=false"
            )
        flat = rows[0]
        counts = xp.to_numpy(xp.bincount(flat.to(xp.int64)))
        if (counts != self.group_size).any():
            raise WeightError(
                f"tensor {layer.name}.g_idx does not give every group {self.group_size} inputs; "
                "the checkpoint is damaged or was cut by tensor parallelism; use one rank"
            )
        return xp.argsort(flat.to(xp.int64), 0, stable=True)


class Awq(WordQuantizer):
    """AWQ in its "gemm" packing."""

    name = "awq"
    contract = (1, 0)

    def __init__(
        self, config: Mapping[str, Any], device: DeviceBackend, kernels: KernelTable
    ) -> None:
        group = config.get("group_size", config.get("q_group_size", 128))
        super().__init__({**config, "group_size": group}, device, kernels)
        problem = awq_problem(config)
        if problem:
            raise ConfigError(problem)

    def parameters(self, layer: LayerSpec) -> dict[str, ParameterSpec]:
        """qweight, qzeros, scales."""
        rows, count, groups = layer.out_features, layer.in_features, self._groups(layer)
        by_row, group_dim = layer.parallel == "row", self._group_dim(layer)
        words = rows // self.per_word
        middles = float(0x88888888 - (1 << 32))
        return {
            "qweight": ParameterSpec((count, words), "int32", 0 if by_row else 1),
            "qzeros": ParameterSpec((groups, words), "int32", group_dim, middles),
            "scales": ParameterSpec((groups, rows), "float16", group_dim, 0.004),
        }

    def _pack_one(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> PackedWeight:
        values = unpack_int32(tensors["qweight"], self.bits, AWQ_ORDER)  # [K, N]
        zeros = unpack_int32(tensors["qzeros"], self.bits, AWQ_ORDER)  # [G, N]
        return self._packed(layer, values.transpose(0, 1), zeros.transpose(0, 1), tensors["scales"])
