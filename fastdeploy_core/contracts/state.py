"""Layers that keep a state of fixed size per sequence: a short convolution, then a recurrence.

Of each head, with q, k, v out of the convolved input and a state S [key_dim, value_dim], float32:

    "delta"       g = decay * softplus(dt + dt_bias), b = sigmoid(beta); q, k of length 1, q / sqrt(key_dim)
                  S <- e^g S;  S <- S + k (b (v - S^T k))^T;  o = S^T q      (arXiv 2412.06464)
    "space"       t = softplus(dt + dt_bias), g = decay * t
                  S <- e^g S + k (t v)^T;  o = S^T q + skip * v              (Mamba-2, arXiv 2405.21060)
    "short_conv"  no recurrence and no activation: o is the convolved input

Added in contract 1.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from .model import StateSpec as StateSpec

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor

    from .attention import AttentionBatch
    from .device import DeviceBackend
    from .ops import KernelTable


@dataclass(frozen=True, slots=True)
class StateQuestion:
    """Asked of `fd_state_backends`."""

    device: str
    tensor_library: str
    spec: StateSpec


@dataclass(slots=True, eq=False)
class StateWeights:
    """One layer's weights, this rank's share; float32 but for the convolution's."""

    conv: Tensor  # [sum(conv_parts), conv_width], model dtype; the newest input's weight is last
    conv_bias: Tensor | None = None  # [sum(conv_parts)], model dtype
    decay: Tensor | None = None  # [num_heads], below 0; None: "short_conv"
    dt_bias: Tensor | None = None  # [num_heads]
    skip: Tensor | None = None  # [num_heads]; "space" alone


@runtime_checkable
class StateBackend(Protocol):
    """Constructed as `Driver(spec, block_size, device, kernels)`, once per distinct spec. `features` are
    the kinds that it serves, words of model.STATE_FEATURES."""

    name: str
    contract: tuple[int, int]
    can_capture_decode: bool
    can_capture_mixed: bool
    features: frozenset[str]

    def __init__(
        self, spec: StateSpec, block_size: int, device: DeviceBackend, kernels: KernelTable
    ) -> None: ...

    def cache_shapes(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of one layer's cache tensors; dimension 0 is the block: the state in spec.state_dtype,
        unless the kind has none, then the convolution's last conv_width - 1 inputs in spec.dtype."""
        ...

    def prepare(self, batch: AttentionBatch) -> Any:
        """What every layer of this spec needs for this step. Must not wait for the device.

        A row that feeds tokens start to end reads the state that lies in the block of its table for token
        start - 1, and leaves its own in the block for token end - 1, often the same. No other entry of the
        table and nothing of slot_mapping is meant. A row that starts at 0 begins with zeros without
        reading: whatever lies in a block that was another's must not show.
        """
        ...

    def forward(
        self,
        x: Tensor,
        dt: Tensor | None,
        beta: Tensor | None,
        weights: StateWeights,
        cache: tuple[Tensor, ...],
        metadata: Any,
    ) -> Tensor:
        """[num_tokens, num_heads * value_dim], model dtype; of "short_conv" [num_tokens, channels].

        x: [num_tokens, sum(conv_parts)] before the convolution: "delta" q, k, v; "space" v, k, q. Key heads
        serve as many neighbouring heads each. silu is behind every convolution but that of "short_conv".
        dt, beta: [num_tokens, num_heads], before their activations; beta of "delta" alone.
        """
        ...
