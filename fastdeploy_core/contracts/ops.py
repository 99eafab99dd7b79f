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
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

from fastdeploy_core.errors import ConfigError

from .kv_formats import KV_OPERATIONS
from .quant_formats import FORMAT_OPERATIONS

OPERATIONS: Final[dict[str, str]] = {
    # Model body
    "embedding": "(input_ids [T] int64, weight [V,H]) -> [T,H]",
    "linear": "(x [T,K], weight [N,K], bias [N] | None) -> [T,N]",
    "rms_norm": "(x [...,H], weight [H], eps) -> [...,H]; computed in float32",
    "add_rms_norm": "(x [T,H], residual [T,H], weight [H], eps) -> (normed, x + residual)",
    "silu_and_mul": "(x [T,2I]: gate then up) -> silu(gate) * up [T,I]",
    "select_rows": "(x [T,H], index [n] int64) -> [n,H]; row i is row index[i] of x. The index begins with a number "
    "or more that grow strictly; zeros behind them stand for nobody, and what is in their rows is left open",
    "rotary_embedding": "(q [T,Hq,D], k [T,Hk,D], positions [T] int64, cos_sin [P,R], interleaved) "
    "-> (q, k); rotates the first R dimensions, cos_sin holds R/2 cosines then R/2 sines",
    # Fused
    "norm_linear": "(x [T,K], norm_weight [K], eps, weight [N,K], bias [N] | None) -> [T,N]; linear of "
    "rms_norm(x)",
    "gated_linear": "(x [T,K], norm_weight [K] | None: x as it is, eps, weight [2I,K]: gate then up, bias "
    "[2I] | None) -> [T,I]; silu_and_mul of linear of rms_norm(x)",
    "linear_add": "(x [T,K], weight [N,K], bias [N] | None, residual [T,N]) -> residual + linear(x); may "
    "overwrite residual",
    "qk_norm": "(q [T,Hq,D], k [T,Hk,D], q_weight [D], k_weight [D], eps) -> (q, k), each head rms_norm'ed; "
    "q and k may be slices of one tensor and may be overwritten",
    "concat_rms_norm": "(x [T,H], x_weight [H], y [T,H], y_weight [H], eps) -> [T,2H]; rms_norm of x, beside it "
    "rms_norm of y",
    "linear_float32": "(x [T,K], weight [N,K] float32) -> [T,N] float32; computed in float32",
    "linear_logits": "(x [T,K], weight [V,K], bias [V] | None) -> [T,V] float32; linear, not rounded to x's "
    "dtype where the kernel can help it",
    "greedy_linear": "(x [T,K], weight [V,K], bias [V] | None) -> (ids [T] int64, peaks [T] float32): "
    "greedy of the float32 logits linear(x), and the logits it chose",
    # KV cache
    "kv_write": "(rows: tuple of [T,h,d], cache: tuple of [blocks,block_size,h,d], "
    "slot_mapping [T] int64) -> None; in place, slot -1 writes nothing",
    "kv_copy_blocks": "(cache: tuple of [blocks,...], source [n] int64, target [n] int64) -> "
    "None; in place, every source is read before any target is written",
    "kv_read_blocks": "(cache: tuple of [blocks,...], blocks [n] int64) -> tuple of [n,...]",
    "kv_write_blocks": "(cache: tuple of [blocks,...], blocks [n] int64, data: tuple of [n,...]) -> "
    "None; in place",
    # Decode steps on the device: S slots hold a sequence each, but the last one nobody's, which stands
    # in for missing rows. W block numbers per slot, up to k drafts. q tokens per row, q <= 1 + k. `post` is (box
    # [R,P,...] int64, turn [1] int64) where the device is a PostingDevice, else None: what is posted in row r,
    # column j also becomes box[turn % R,r,j] = turn << 32 | its low 32 bits, written as one number.
    "prepare_decode": "(slots [B] int64: of each row, tables [S,W] int32, num_computed [S] int64, newest "
    "[S] int64, drafts [S,k] int64, num_drafts [S] int64, room [S] int64, block_size, turn [1] int64, input_ids [B*q] int64, "
    "positions [B*q] int64, slot_mapping [B*q] int64, seq_lens [B] int32, block_tables [B,W] int32) -> None; "
    "adds 1 to turn and fills the last five: token 0 of a row is its newest one at position num_computed, token j its j-th draft at "
    "num_computed + j, seq_lens is num_computed + q. Tokens behind num_drafts: id 0, slot_mapping -1, the "
    "row's first position. Rows of the last slot, and those whose num_computed is not below their room: id "
    "0, slot_mapping -1 and position 0 for all tokens, seq_lens 0",
    "place_tokens": "(positions [B] int64, room [B] int64, block_tables [B,W] int32, block_size) -> (positions "
    "[B] int64, slot_mapping [B] int64, seq_lens [B] int32) of a step with one token of each row at these "
    "positions. Rows whose position is not below their room: position 0, slot_mapping -1, seq_lens 0",
    "keep_drafts": "(slots [B] int64, proposals [B,n] int64, results [B,m] int64, limit [1] int64, vocab_size, "
    "num_computed [S] int64, room [S] int64, drafts [S,k] int64, num_drafts [S] int64, post) -> [B,m+n] int64; "
    "in place, n <= k: each row's proposals up to the first outside 0 to vocab_size - 1 become its drafts, at "
    "most limit of them and room - 1 - num_computed; returned are the results as they are, beside them what "
    "was taken and behind that -1, or -2 for what is neither a token nor -1: these n are posted. The last slot "
    "gets none; m may be 0",
    "finish_decode": "(slots [B] int64, drawn [B*q] int64, marked [B*q] int64: see mark_broken, peaks [B*q] "
    "float32 | None, drafts [S,k] int64, num_drafts [S] int64, num_computed [S] int64, newest [S] int64, "
    "results [B,q] int64, post) -> [B] int64; in place. Where peaks is not finite, marked counts as -2. With a, how "
    "many leading drafts of the row, of num_drafts and at most q - 1, are what was drawn in their place, "
    "before one behind which marked is negative: newest becomes drawn token a of the row, num_computed grows "
    "by 1 + a, results are the row's marked tokens up to a, then -1; these are posted, behind them how many "
    "drafts were judged, and a. Returned is where in drawn each row's token a stands. The last slot stays as it is",
    "keep_results": "(slots [B] int64, results [B,1] int64: of finish_decode, num_computed [S] int64: behind it, "
    "kept [B,n] int64) -> None; in place: each row's result stands in column num_computed % n. Rows of the "
    "last slot stay as they are",
    # Tokens of S sequences of which L fit, row S - 1 nobody's.
    "append_history": "(slots [B] int64, results [B,q] int64: of finish_decode, num_computed [S] int64: behind "
    "it, history [S,L] int32) -> None; in place: the row's leading results that are not negative stand up to "
    "position num_computed",
    "match_ngrams": "(history [S,L] int32, slots [B] int64, num_known [B] int64, min_size, max_size, n) -> "
    "[B,n] int64: what followed the last tokens of the first num_known where the longest end of them, of "
    "min_size to max_size tokens, stood before, at the latest such place; behind the newest token it goes on "
    "with itself. -1 where there is none",
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
    "draw": "(logits, is_random [B] int64, top_k [B] int64, seeds [B] int64, temperature [B] float32, top_p [B] "
    "float32, min_p [B] float32, positions [B] int64, filters: bool) -> (ids [B] int64, peaks [B] float32), logits "
    "may be overwritten: greedy where is_random is 0, elsewhere sample at positions + 1 of the logits divided by "
    "the temperature and, with filters, filtered by filter_logits. peaks: each row's largest logit before that",
    "greedy": "(logits) -> [B] int64; the smallest id among equals; NaN counts as the largest",
    "mark_broken": "(drawn [B] int64, peaks [B] float32, possible [B] float32 | None) -> [B] int64; "
    "drawn, but -2 where peaks is not finite, else -3 where possible is not finite",
    "log_softmax": "(logits) -> [B,V] float32",
}

# Operations that only quantized models need (quant_formats.py, kv_formats.py). A device that lacks one
# falls back when a layer asks for it, not before.
QUANTIZED_OPERATIONS: Final[dict[str, str]] = {**FORMAT_OPERATIONS, **KV_OPERATIONS}


# What predicates and deny lists of cells may ask about: the device's tensor library, the model's
# dtype, and sizes of config.json, each where the model has it.
KERNEL_SIZES: Final = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
KERNEL_FACTS: Final = ("tensor_library", "dtype", *KERNEL_SIZES)


@dataclass(frozen=True, slots=True)
class Deny:
    """A case for which a cell is not used although it exists, such as one with a wrong result.

    Every condition must hold. `sizes`: smallest and largest value, both included, by a name of
    KERNEL_SIZES; a model without that size is not the case. The next table's cell, and in the end the
    reference's, is used instead, and `fastdeploy plugins why kernels` shows the reason.
    """

    reason: str
    dtypes: tuple[str, ...] = ()  # of the model; empty: any
    sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.sizes) - set(KERNEL_SIZES))
        if unknown or not self.reason:
            raise ConfigError(
                f"a kernel's deny list names the sizes {', '.join(unknown) or 'none'} and the reason "
                f"{self.reason!r}; possible sizes: {', '.join(KERNEL_SIZES)}; a reason is needed"
            )

    def matches(self, facts: Mapping[str, Any]) -> bool:
        """Whether this is the case."""
        if self.dtypes and facts.get("dtype") not in self.dtypes:
            return False
        return all(
            name in facts and low <= facts[name] <= high for name, (low, high) in self.sizes.items()
        )


@dataclass(frozen=True, slots=True)
class Kernel:
    """A table cell that says more than its target.

    `predicate` ("module:function", taking a mapping of model facts): the cell is used only where it
    returns True. `prepare` ("module:function", weight -> anything): lays a weight out for this
    very cell, once after loading; the operation is then handed the result in the weight's place. With
    `composes` the target is called once with the finished table and returns the kernel: it combines
    others, whoever they come from.

    Plain weights are prepared for "linear", "gated_linear" or "linear_float32". What "linear" makes is
    also handed to "norm_linear", "linear_add", "linear_logits" and "greedy_linear", and, where
    embedding and head share their weight, to "embedding": a table that prepares "linear" either fills
    these itself or leaves them to the reference's compositions, "embedding" it fills in any case.
    Other weights of "embedding" stay as they are. `formats`, of "linear" and "gated_linear": internal
    formats (quant_formats.py) whose PackedWeights `prepare` takes as well; layers in these formats are
    then computed by the plain operations. `activations`, of a linear_<format> whose format leaves them
    as they are: "int8" rounds x to int8 by absmax / 127, for each token and each group of inputs that
    shares a scale, and so do plain products of that format.

    `behind`, of a linear_<format>: operations that the cell may stand behind ("add_rms_norm", "silu_and_mul"),
    each with a "module:function" that does the operation and what the cell does to x first, such as rounding it. It
    takes the operation's arguments, then the prepared weight, and returns what the operation does, but in the normed or
    activated tensor's place anything that the cell takes for x. The product is the same to the last bit.
    """

    target: str
    predicate: str = ""
    prepare: str = ""
    composes: bool = False
    formats: tuple[str, ...] = ()
    activations: Literal["", "int8"] = ""
    behind: Mapping[str, str] = field(default_factory=dict)
    denies: tuple[Deny, ...] = ()


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
        """The weight (a tensor or a PackedWeight) as the chosen cell of that operation wants it; itself
        where the cell has no wish. The rows of a plain weight of "gated_linear" are gate then up."""
        ...

    def takes(self, operation: str, format_name: str) -> bool:
        """Whether `prepare` of that plain operation takes PackedWeights of the internal format."""
        ...

    def activations(self, operation: str) -> str:
        """Kernel.activations of the chosen cell."""
        ...

    def behind(self, operation: str, before: str) -> Callable[..., Any] | None:
        """Kernel.behind of the chosen cell for the operation before it; None where it has nothing for that one."""
        ...

    def origins(self) -> Mapping[str, str]:
        """For the start-up report: operation -> distribution it came from."""
        ...
