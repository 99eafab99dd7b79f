"""The named operations: what a kernel is, and the table a device fills in any order.

An operation is a plain function over tensors. Group `fastdeploy.kernels` maps a device name to a
table `{operation: "module:function"}` (or `Kernel` records with a predicate). What a device lacks
comes from the reference, which is also what every kernel is tested against
(fastdeploy_core/reference/). Lookup happens once, when layers are built.

Arguments are positional, in the order written here. Shapes: T tokens, H hidden, I intermediate, V
vocabulary, B sequences, E experts, k experts per token. Unless a dtype is written, a tensor has the
model's dtype, and results have that of the first argument. T, B and n may be 0. Sums, norms and
softmax are computed in float32 or better. docs of each reference function say the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from .kv_formats import KV_OPERATIONS
from .quant_formats import FORMAT_OPERATIONS

OPERATIONS: Final[dict[str, str]] = {
    # Model body
    "embedding": "(input_ids [T] int64, weight [V,H]) -> [T,H]",
    "linear": "(x [T,K], weight [N,K], bias [N] | None) -> [T,N]",
    "rms_norm": "(x [...,H], weight [H], eps) -> [...,H]; computed in float32",
    "add_rms_norm": "(x [T,H], residual [T,H], weight [H], eps) -> (normed, x + residual)",
    "silu_and_mul": "(x [T,2I]: gate then up) -> silu(gate) * up [T,I]",
    "rotary_embedding": "(q [T,Hq,D], k [T,Hk,D], positions [T] int64, cos_sin [P,R], interleaved) "
    "-> (q, k); rotates the first R dimensions, cos_sin holds R/2 cosines then R/2 sines",
    # KV cache
    "kv_write": "(rows: tuple of [T,h,d], cache: tuple of [blocks,block_size,h,d], "
    "slot_mapping [T] int64) -> None; in place, slot -1 writes nothing",
    "kv_copy_blocks": "(cache: tuple of [blocks,...], source [n] int64, target [n] int64) -> "
    "None; in place, every source is read before any target is written",
    "kv_read_blocks": "(cache: tuple of [blocks,...], blocks [n] int64) -> tuple of [n,...]",
    "kv_write_blocks": "(cache: tuple of [blocks,...], blocks [n] int64, data: tuple of [n,...]) -> "
    "None; in place",
    # Mixture of experts
    "moe_routing": "(router_logits [T,E] float32, correction_bias [E] | None, spec: RoutingSpec) "
    "-> (topk_ids [T,k] int64, topk_weights [T,k] float32)",
    "moe_experts": "(x [T,H], topk_ids [T,k], topk_weights [T,k], gate_up [E,2I,H], down [E,H,I]) "
    "-> [T,H]",
    # Sampling; logits are float32 [B,V]. apply_* and filter_logits may overwrite them, the others
    # leave them alone.
    "apply_penalties": "(logits, presence [B], frequency [B], repetition [B], output_counts [B,V], "
    "prompt_seen [B,V] bool) -> logits; the [B] are float32, counts of any integer dtype",
    "apply_bitmask": "(logits, mask [B,ceil(V/32)] int32: bit set = possible) -> logits",
    "filter_logits": "(logits, top_k [B] int64, top_p [B], min_p [B]) -> logits, -inf outside the "
    "kept set: at least min_p times the largest probability; then the top_k largest (0: all); then the "
    "fewest that reach top_p of what is left. Equals of the last one kept are kept",
    "sample": "(logits, seeds [B] int64, positions [B] int64) -> [B] int64; the draw of a "
    "row depends on its seed, position and logits only",
    "greedy": "(logits) -> [B] int64; the smallest id among equals; NaN counts as the largest",
    "log_softmax": "(logits) -> [B,V] float32",
}

# Operations that only quantized models need (quant_formats.py, kv_formats.py). A device that lacks one
# falls back when a layer asks for it, not before.
QUANTIZED_OPERATIONS: Final[dict[str, str]] = {**FORMAT_OPERATIONS, **KV_OPERATIONS}


@dataclass(frozen=True, slots=True)
class Kernel:
    """A table cell that says more than its target.

    `predicate` ("module:function", taking a mapping of model facts): the cell is used only where it
    returns True. `prepare` ("module:function", PackedWeight -> anything): lays a weight out for this
    very cell, once after loading; the operation is then handed the result in the weight's place.
    """

    target: str
    predicate: str = ""
    prepare: str = ""


class KernelTable(Protocol):
    """What layers see: operations by name, already chosen."""

    device: str

    def __getitem__(self, operation: str) -> Callable[..., Any]:
        """The kernel for the operation; KeyError names the operations there are."""
        ...

    def __contains__(self, operation: object) -> bool:
        """Whether there is a kernel for the operation."""
        ...

    def prepare(self, operation: str, weight: Any) -> Any:
        """The weight as the chosen cell of that operation wants it; itself where the cell has no wish."""
        ...

    def origins(self) -> Mapping[str, str]:
        """For the start-up report: operation -> distribution it came from."""
        ...
