"""The gated feed-forward block: down(silu(gate(x)) * up(x)), gate and up in one product."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .linear import Linear, LinearPart, LinearShape

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor

    from .builder import ModelBuilder
    from .norm import RMSNorm


class GatedMLP:
    """x: [num_tokens, hidden]; so is the result. Without `reduce` every rank returns its own part
    of the sum, for a caller that adds something before summing over ranks."""

    def __init__(
        self,
        build: ModelBuilder,
        prefix: str,
        hidden: int,
        intermediate: int,
        *,
        bias: bool = False,
        reduce: bool = True,
    ) -> None:
        self.gate_up = Linear(
            build,
            LinearShape(
                f"{prefix}.gate_up_proj",
                [
                    LinearPart(f"{prefix}.gate_proj", intermediate, build.piece),
                    LinearPart(f"{prefix}.up_proj", intermediate, build.piece),
                ],
                hidden,
                parallel="column",
                bias=bias,
                gated=True,
            ),
        )
        self.down = Linear(
            build,
            LinearShape(
                f"{prefix}.down_proj",
                [LinearPart(f"{prefix}.down_proj", hidden)],
                intermediate,
                parallel="row",
                bias=bias,
                reduce=reduce,
            ),
        )
        self.gate_up.feed(self.down)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, hidden], model dtype."""
        return self.down(self.gate_up(x))

    def after(
        self, norm: RMSNorm, x: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Two addends of t + block(norm(t)), t = x + residual, as Linear.add_to returns them."""
        hidden, total = self.gate_up.after(norm, x, residual)
        return self.down.add_to(total, hidden)

    def add_to(self, total: Tensor, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Two addends of total + block(x), as Linear.add_to returns them."""
        return self.down.add_to(total, self.gate_up(x))
