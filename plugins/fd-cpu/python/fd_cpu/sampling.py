"""Operations between logits and tokens; meanings: fastdeploy_core/contracts/ops/."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .team import address, team

if TYPE_CHECKING:
    from fastdeploy_core.tensor import Tensor

CELLS: Final = {
    name: f"fd_cpu.sampling:{name}"
    for name in (
        *("apply_penalties", "apply_bitmask", "filter_logits", "sample", "draw", "log_softmax"),
    )
}


def apply_penalties(
    logits: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    output_counts: Tensor,
    prompt_seen: Tensor,
) -> Tensor:
    """One pass, in place."""
    t, logits = team(), logits.contiguous()
    factors = [x.contiguous() for x in (presence, frequency, repetition)]
    counts, seen = output_counts.contiguous(), prompt_seen.contiguous()
    if int(logits.shape[0]):
        t.reads(logits, *factors, counts, seen)
        t.keep(logits, *factors, counts, seen)
        t.native.penalize(
            *(address(logits), *_size(logits), [address(x) for x in factors]),
            *(address(counts), int(counts.element_size()), address(seen)),
        )
    return logits


def apply_bitmask(logits: Tensor, mask: Tensor) -> Tensor:
    """In place."""
    t, logits, mask = team(), logits.contiguous(), mask.contiguous()
    if int(logits.shape[0]):
        t.call(t.native.mask, logits, *_size(logits), mask, reads=(logits, mask))
    return logits


def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """In place; the smallest logit to keep is found by counting, not by sorting."""
    t, logits = team(), logits.contiguous()
    limits = [x.contiguous() for x in (top_k, top_p, min_p)]
    if int(logits.shape[0]):
        t.call(t.native.filter, logits, *_size(logits), *limits, reads=(logits, *limits))
    return logits


def sample(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """With the reference's random numbers, so the same tokens as the reference."""
    t, logits = team(), logits.contiguous()
    seeds, positions = seeds.contiguous(), positions.contiguous()
    ids = t.new((int(logits.shape[0]),), t.xp.int64)
    if int(logits.shape[0]):
        operands = (logits, *_size(logits), seeds, positions, ids, None, 0)
        t.call(t.native.sample, *operands, reads=(logits, seeds, positions))
    return ids


def draw(
    logits: Tensor,
    is_random: Tensor,
    top_k: Tensor,
    seeds: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    positions: Tensor,
    filters: bool,
) -> tuple[Tensor, Tensor]:
    """The likeliest tokens, over which those of random rows are written. The rows of parameters
    belong to the caller, who may change them between replays."""
    t, logits, positions = team(), logits.contiguous(), positions.contiguous()
    rows, width = _size(logits)
    ids, peaks = t.new((rows,), t.xp.int64), t.new((rows,), t.xp.float32)
    parameters = (is_random, top_k, seeds, temperature, top_p, min_p)
    if not rows:
        return ids, peaks
    kinds = [x.contiguous() for x in parameters]
    t.owns(*kinds)
    chosen, ks, seed, heat, ps, least = kinds
    of, native = (logits, rows, width), t.native
    t.call(native.greedy, *of, ids, peaks, reads=(logits, positions))
    t.call(native.temper, *of, heat)
    if filters:
        t.call(native.filter, *of, ks, ps, least)
    t.call(native.sample, *of, seed, positions, ids, chosen, 1)
    return ids, peaks


def log_softmax(logits: Tensor) -> Tensor:
    """[B, V] float32."""
    t, logits = team(), logits.contiguous()
    y = t.new(_size(logits), t.xp.float32)
    if int(logits.shape[0]):
        t.call(t.native.log_softmax, logits, *_size(logits), y, reads=(logits,))
    return y


def _size(logits: Tensor) -> tuple[int, int]:
    rows, width = logits.shape
    return int(rows), int(width)
