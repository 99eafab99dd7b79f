"""What drivers share whose groups may consist of scattered inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fd_quant_formats import PackedQuantizer

if TYPE_CHECKING:
    from fastdeploy_core.contracts.quant_formats import PackedWeight
    from fastdeploy_core.contracts.quantizer import LayerSpec
    from fastdeploy_core.tensor import Tensor


class OrderedQuantizer(PackedQuantizer):
    """A driver whose groups may consist of scattered inputs. Inputs are put in the order of their
    groups before the product."""

    def order(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> Tensor | None:
        """[K] int64; None if the inputs are in the order of their groups already."""
        raise NotImplementedError

    def packed(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> PackedWeight | None:
        """The packed weight; None if inputs have to be reordered first."""
        return None if self.order(layer, tensors) is not None else super().packed(layer, tensors)

    def prepare(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> Any:
        """The kernel's weight, and the order of inputs that it needs."""
        prepared = super().prepare(layer, tensors)
        if layer.role == "experts":
            return prepared
        return (*prepared, self.order(layer, tensors))

    def apply(self, layer: LayerSpec, prepared: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply with the kernel, after reordering the inputs."""
        product, weight, order = prepared
        if order is not None:
            x = self.xp.index_select(x, 1, order)
        y: Tensor = product(x, weight, bias)
        return y

    def dequantize(self, layer: LayerSpec, tensors: dict[str, Tensor]) -> Tensor:
        """[N, K] float32 in the model's order of inputs."""
        weight = super().dequantize(layer, tensors)
        order = self.order(layer, tensors)
        if order is None:
            return weight
        return self.xp.index_select(weight, 1, self.xp.argsort(order, 0))
