"""Operations that this device implements itself; meanings and shapes:
fastdeploy_core/contracts/ops/."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from fastdeploy_core.contracts.ops import Kernel

from . import sampling
from .formats import FORMATS
from .packing import Packed
from .team import address, rows_of, team

if TYPE_CHECKING:
    from fastdeploy_core.contracts.moe import RoutingSpec
    from fastdeploy_core.tensor import Tensor

_OWN = (
    *("embedding", "norm_linear", "linear_add", "linear_logits", "greedy_linear"),
    *("rms_norm", "add_rms_norm", "silu_and_mul", "qk_norm", "select_rows"),
    *("moe_routing", "prepare_decode", "finish_decode", "keep_results"),
    *("mark_broken", "greedy"),
)
TABLE: Final[dict[str, str | Kernel]] = {
    **{name: f"fd_cpu.kernels:{name}" for name in _OWN},
    **sampling.CELLS,
    "linear": Kernel(
        "fd_cpu.kernels:linear", prepare="fd_cpu.formats:prepare", formats=tuple(FORMATS)
    ),
    "gated_linear": Kernel(
        "fd_cpu.kernels:gated_linear",
        prepare="fd_cpu.formats:prepare_gated",
        formats=tuple(FORMATS),
    ),
    "linear_float32": Kernel("fd_cpu.kernels:linear_float32", prepare="fd_cpu.formats:prepare"),
    **{
        f"linear_{name}": Kernel(
            "fd_cpu.kernels:linear",
            prepare="fd_cpu.formats:prepare",
            activations="int8" if name.startswith("wint") else "",
        )
        for name in FORMATS
    },
    **{
        f"moe_experts_{name}": Kernel(
            "fd_cpu.moe:moe_experts",
            prepare="fd_cpu.moe:prepare_experts",
            activations="int8" if name.startswith("wint") else "",
        )
        for name in FORMATS
    },
}


def _product(
    x: Tensor,
    weight: Packed,
    bias: Tensor | None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    dtype: Any = None,
) -> Tensor:
    t, x = team(), rows_of(x)
    num_rows = int(x.shape[0])
    y = t.new((num_rows, weight.rows), dtype or x.dtype)
    if num_rows:
        t.call(
            t.native.linear,
            *(weight, x, t.code(x), num_rows, int(x.stride()[0]), norm_weight, eps),
            *(bias, residual, y, t.code(y), weight.rows),
            reads=(x, residual),
        )
    return y


def linear(x: Tensor, weight: Packed, bias: Tensor | None) -> Tensor:
    """The plain product."""
    return _product(x, weight, bias)


def norm_linear(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Packed, bias: Tensor | None
) -> Tensor:
    """Rows are normalised while they are brought into the kernel's form."""
    return _product(x, weight, bias, norm_weight, eps)


def gated_linear(
    x: Tensor, norm_weight: Tensor | None, eps: float, weight: Packed, bias: Tensor | None
) -> Tensor:
    """The gate is applied to sums while they are in registers."""
    return _product(x, weight, bias, norm_weight, eps)


def linear_add(x: Tensor, weight: Packed, bias: Tensor | None, residual: Tensor) -> Tensor:
    """The residual is added to the sums."""
    return _product(x, weight, bias, residual=residual.contiguous())


def linear_float32(x: Tensor, weight: Packed) -> Tensor:
    """Float32 weights, sums and results for every dtype of x."""
    return _product(x, weight, None, dtype=team().xp.float32)


def linear_logits(x: Tensor, weight: Packed, bias: Tensor | None) -> Tensor:
    """Sums are always float32."""
    bias = None if bias is None else bias.float()
    return _product(x, weight, bias, dtype=team().xp.float32)


def greedy_linear(x: Tensor, weight: Packed, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The search reads sums while they are in registers: logits are not written."""
    t, x = team(), rows_of(x)
    num_rows = int(x.shape[0])
    ids, peaks = t.new((num_rows,), t.xp.int64), t.new((num_rows,), t.xp.float32)
    bias = None if bias is None else bias.float()
    if num_rows:
        t.call(
            t.native.greedy_linear,
            *(weight, x, t.code(x), num_rows, int(x.stride()[0]), bias, ids, peaks),
            reads=(x,),
        )
    return ids, peaks


def embedding(input_ids: Tensor, weight: Tensor | Packed) -> Tensor:
    """Rows of the table, or of the lm head's packed matrix if the two share it."""
    t = team()
    num_ids, (num_rows, width) = int(input_ids.shape[0]), weight.shape
    y = t.new((num_ids, int(width)), weight.dtype)
    packed = weight.native if isinstance(weight, Packed) else None
    table = 0 if packed is not None else address(weight)
    if num_ids:
        t.begins_with(input_ids)
        t.reads(input_ids)
        t.keep(input_ids, weight, y)
        t.native.embedding(
            *(address(input_ids), table, packed, address(y), t.code(y)),
            *(num_ids, int(num_rows), int(width)),
        )
    return y


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Any shape; rows are the last dimension."""
    t, x = team(), x.contiguous()
    y, width = t.new(tuple(x.shape), x.dtype), int(x.shape[-1])
    num_rows = t.xp.size(x) // width
    if num_rows:
        sizes = (t.code(x), num_rows, width)
        t.call(t.native.add_norm, x, None, None, weight, eps, y, *sizes, reads=(x,))
    return y


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum goes to new memory: x and residual are not changed."""
    t = team()
    total, update = t.new(tuple(residual.shape), residual.dtype), x.contiguous()
    residual = residual.contiguous()
    y, (num_rows, width) = t.new(tuple(x.shape), x.dtype), map(int, x.shape)
    if num_rows:
        t.call(
            t.native.add_norm,
            *(residual, update, total, weight, eps, y, t.code(x), num_rows, width),
            reads=(update, residual),
        )
    return y, total


def silu_and_mul(x: Tensor) -> Tensor:
    """Gate half, then up half."""
    t, x = team(), x.contiguous()
    num_rows, width = int(x.shape[0]), int(x.shape[1]) // 2
    y = t.new((num_rows, width), x.dtype)
    if num_rows:
        t.call(t.native.gate, x, y, t.code(x), num_rows, width, reads=(x,))
    return y


def qk_norm(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """In place."""
    t, q, k = team(), rows_of(q), rows_of(k)
    num_tokens, num_heads, head_dim = map(int, q.shape)
    if num_tokens:
        sizes = (num_tokens, num_heads, int(k.shape[1]), head_dim)
        t.call(
            t.native.head_norm,
            *(q, k, q_weight, k_weight, eps, t.code(q), *sizes),
            *(int(q.stride()[0]), int(k.stride()[0])),
            reads=(q, k),
        )
    return q, k


def select_rows(x: Tensor, index: Tensor) -> Tensor:
    """Operations captured after it skip padding rows, whose number may differ at each replay."""
    t, x = team(), rows_of(x)
    num_rows, width, size = int(index.shape[0]), int(x.shape[1]), int(x.element_size())
    y = t.new((num_rows, width), x.dtype)
    t.owns(index)
    strides = (width * size, int(x.stride()[0]) * size)
    t.call(t.native.select_rows, x, index, y, num_rows, *strides, reads=(x,))
    return y


def moe_routing(
    router_logits: Tensor, correction_bias: Tensor | None, spec: RoutingSpec
) -> tuple[Tensor, Tensor]:
    """One pass over each token's scores."""
    t = team()
    logits, num_tokens = router_logits.contiguous(), int(router_logits.shape[0])
    ids = t.new((num_tokens, spec.top_k), t.xp.int64)
    weights = t.new((num_tokens, spec.top_k), t.xp.float32)
    bias = None if correction_bias is None else correction_bias.reshape([-1])
    if num_tokens:
        t.call(
            t.native.route,
            *(logits, bias, ids, weights, num_tokens, spec.num_experts, spec.top_k),
            *(spec.num_groups, spec.top_k_groups, spec.scoring == "sigmoid", spec.renormalize),
            spec.scaling_factor,
            reads=(logits,),
        )
    return ids, weights


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token of each row."""
    return _search(logits)[0]


def _search(logits: Tensor) -> tuple[Tensor, Tensor]:
    t, logits = team(), logits.contiguous()
    num_rows, width = map(int, logits.shape)
    ids, peaks = t.new((num_rows,), t.xp.int64), t.new((num_rows,), t.xp.float32)
    if num_rows:
        t.call(t.native.greedy, logits, num_rows, width, ids, peaks, reads=(logits,))
    return ids, peaks


def prepare_decode(
    slots: Tensor,
    tables: Tensor,
    num_computed: Tensor,
    newest: Tensor,
    drafts: Tensor,
    num_drafts: Tensor,
    room: Tensor,
    block_size: int,
    turn: Tensor,
    *results: Tensor,
) -> None:
    """Begin a turn; fill input_ids, positions, slot_mapping, seq_lens and block_tables."""
    t, num_rows = team(), int(slots.shape[0])
    if num_rows == 0:
        return
    tensors = (slots, tables, num_computed, newest, drafts, num_drafts, room, *results, turn)
    t.owns(*tensors)
    sizes = (
        num_rows,
        int(results[0].shape[0]) // num_rows,
        int(num_computed.shape[0]),
        int(tables.shape[1]),
        int(drafts.shape[1]),
        block_size,
    )
    t.native.prepare_decode([address(x) for x in tensors], sizes)


def finish_decode(
    slots: Tensor,
    drawn: Tensor,
    marked: Tensor,
    peaks: Tensor | None,
    drafts: Tensor,
    num_drafts: Tensor,
    num_computed: Tensor,
    newest: Tensor,
    results: Tensor,
    post: None,  # this device is no PostingDevice
) -> Tensor:
    """Verify drafts and write back the sampled tokens; returns where each row's last kept token
    stands."""
    t = team()
    num_rows, width = map(int, results.shape)
    peaks = None if peaks is None else peaks.contiguous()
    last = t.new((num_rows,), t.xp.int64)
    if num_rows:
        t.reads(drawn, marked, peaks)
        held = (drafts, num_drafts, num_computed, newest, results)
        t.owns(*held)
        tensors = (slots, drawn, marked, peaks, *held, last)
        t.keep(*tensors)
        sizes = (num_rows, width, int(num_computed.shape[0]), int(drafts.shape[1]))
        t.native.finish_decode([address(x) for x in tensors], sizes)
    return last


def keep_results(slots: Tensor, results: Tensor, num_computed: Tensor, kept: Tensor) -> None:
    """Store the tokens sampled in a step, beside those of the previous steps."""
    t = team()
    num_rows, num_kept = map(int, kept.shape)
    if num_rows:
        t.owns(kept)
        sizes = (num_rows, num_kept, int(num_computed.shape[0]))
        t.call(t.native.keep_results, slots, results, num_computed, kept, *sizes, reads=(results,))


def mark_broken(drawn: Tensor, peaks: Tensor, possible: Tensor | None) -> Tensor:
    """Codes in place of tokens that are meaningless."""
    t, num_rows = team(), int(drawn.shape[0])
    peaks = peaks.contiguous()
    possible = None if possible is None else possible.contiguous()
    marked = t.new((num_rows,), t.xp.int64)
    if num_rows:
        operands = (drawn, peaks, possible)
        t.call(t.native.mark_broken, *operands, marked, num_rows, reads=operands)
    return marked
