"""Operations between logits and tokens. Logits are float32 [B, V]; rows never influence each other.

Results are new tensors unless a docstring says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastdeploy_core.reference.random import exponential
from fastdeploy_core.tensor import namespace

if TYPE_CHECKING:
    from fastdeploy_core.contracts.ops import KernelTable
    from fastdeploy_core.tensor import Tensor

_NEVER = float("-inf")
# Filtering and sampling from most distributions needs few of their largest values, so few are
# ranked first. Up to _SORT_ALL, a full sort is cheaper than finding out whether they suffice.
_SORT_ALL = 512
_FIRST_CANDIDATES = 32
_CANDIDATE_GROWTH = 16
# Numbers per chunk, so that each pass finds the previous pass's results in the cache.
_CHUNK = 1 << 18


def apply_penalties(
    logits: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    output_counts: Tensor,
    prompt_seen: Tensor,
) -> Tensor:
    """Penalise tokens that occurred before.

    presence, frequency (OpenAI's) count generated tokens only; repetition (arXiv 1909.05858)
    divides positive logits and multiplies negative ones of every token in prompt or output. [B]
    float32 each; output_counts [B, V], any integer or float dtype; prompt_seen [B, V] bool.
    """
    xp = namespace(logits)
    counts = output_counts.to(xp.float32)
    generated = output_counts > 0
    factor = repetition.unsqueeze(1)
    changed = xp.where(logits > 0, logits / factor, logits * factor)
    result = xp.where(generated | prompt_seen, changed, logits)
    result = result - frequency.unsqueeze(1) * counts
    return result - presence.unsqueeze(1) * generated.to(xp.float32)


def apply_bitmask(logits: Tensor, mask: Tensor) -> Tensor:
    """-inf where the bit is not set. mask [B, ceil(V / 32)] int32, bit t % 32 of word t // 32."""
    xp = namespace(logits)
    rows, width = logits.shape
    bits = xp.arange(32, dtype=xp.int32, device=mask.device)
    spread = xp.bitwise_and(xp.right_shift(mask.unsqueeze(2), bits), 1)
    possible = spread.reshape([rows, mask.shape[1] * 32])[:, :width] > 0
    return xp.where(possible, logits, _scalar(xp, logits, _NEVER))


def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """-inf outside the kept set; logits are already divided by the temperature.

    First min_p [B] float32 (0 keeps all): tokens with at least min_p times the largest probability.
    Then top_k [B] int64 (0 keeps all). Then top_p [B] float32 (1 keeps all), over what is left,
    renormalised: the fewest most likely tokens whose probabilities reach top_p, at least one.
    Tokens equal to the last one kept are kept too, so the set does not depend on an order among
    equals.
    """
    xp = namespace(logits)
    if logits.shape[0] == 0:
        return logits
    peak = xp.amax(logits, -1, keepdim=True)
    threshold = peak + xp.log(min_p).unsqueeze(1)
    width = logits.shape[1]
    uses_k = (top_k > 0) & (top_k < width)
    uses_p = top_p < 1
    if bool((uses_k | uses_p).any()):
        ranked = width
        if width > _SORT_ALL:
            largest = int(xp.where(uses_k, top_k, xp.zeros_like(top_k)).max())
            unbounded = bool((uses_p & (uses_k == xp.zeros_like(uses_k))).any())
            ranked = max(largest, _FIRST_CANDIDATES if unbounded else 1)
        found = None
        while found is None:
            ranked = min(ranked, width)
            found = _rank_threshold(xp, logits, peak, threshold, top_k, top_p, ranked)
            ranked *= _CANDIDATE_GROWTH
        threshold = found
    return xp.where(logits < threshold, _scalar(xp, logits, _NEVER), logits)


def _rank_threshold(
    xp: Any,
    logits: Tensor,
    peak: Tensor,
    threshold: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    ranked: int,
) -> Tensor | None:
    """The smallest logit kept in each row, [B, 1], from the `ranked` largest; None: too few."""
    width = logits.shape[1]
    if ranked == width:
        best, _ = xp.sort(logits, -1, descending=True)
    else:
        best, _ = xp.topk(logits, ranked, -1)
    uses_k = ((top_k > 0) & (top_k < width)).unsqueeze(1)
    kth = xp.gather(best, 1, xp.clamp(top_k - 1, 0, ranked - 1).unsqueeze(1))
    threshold = xp.where(uses_k, xp.maximum(threshold, kth), threshold)

    zero = _scalar(xp, logits, 0.0)
    weights = xp.where(best < threshold, zero, xp.exp(best - peak))
    if ranked == width:
        total = weights.sum(dim=-1, keepdim=True)
    else:
        total = xp.where(logits < threshold, zero, xp.exp(logits - peak)).sum(dim=-1, keepdim=True)
    reached = xp.cumsum(weights, -1)
    wanted = top_p.unsqueeze(1) * total
    uses_p = top_p.unsqueeze(1) < 1
    if ranked < width and bool((uses_p & (reached[:, ranked - 1 :] < wanted)).any()):
        # More values may equal the k-th one and have probability of their own, so only a full rank
        # may end here.
        return None
    kept = ((reached - weights) < wanted).to(xp.int64).sum(dim=-1, keepdim=True)
    last = xp.gather(best, 1, xp.clamp(kept - 1, 0, ranked - 1))
    return xp.where(uses_p, xp.maximum(threshold, last), threshold)


def sample(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Sample one token per row from softmax(logits): [B] int64.

    seeds, positions [B] int64. An exponential race: token t arrives after Exp(1) / probability(t)
    and the first one wins. Its random number is a hash of (seed, position, t), so a row's token
    does not depend on its place in the batch, on other rows, or on earlier samples.
    """
    xp = namespace(logits)
    rows, width = logits.shape
    if rows == 0:
        return xp.zeros([0], dtype=xp.int64, device=logits.device)
    index = xp.arange(width, device=logits.device).unsqueeze(0)
    possible = int((logits > _NEVER).to(xp.int64).sum(dim=-1).max())
    if possible <= width // _CANDIDATE_GROWTH:
        # After filtering, only candidates race. Their hashes are the same, so the winner is, too.
        logits, index = xp.topk(logits, max(1, possible), -1)
        winner = _race(xp, logits, seeds, positions, index).unsqueeze(1)
        return xp.gather(index, 1, winner).squeeze(1)
    step = max(1, _CHUNK // width)
    parts = [slice(start, start + step) for start in range(0, rows, step)]
    winners = [_race(xp, logits[p], seeds[p], positions[p], index) for p in parts]
    return winners[0] if len(winners) == 1 else xp.cat(winners, 0)


def _race(xp: Any, logits: Tensor, seeds: Tensor, positions: Tensor, index: Tensor) -> Tensor:
    """The column that arrives first, [B] int64. logits [B, n]; index: the columns' token ids."""
    return xp.argmax(logits - xp.log(exponential(xp, seeds, positions, index)), -1)


def greedy(logits: Tensor) -> Tensor:
    """The most likely token of each row, the smallest id among equals: [B] int64."""
    return namespace(logits).argmax(logits, -1)


def log_softmax(logits: Tensor) -> Tensor:
    """[B, V] float32."""
    return namespace(logits).log_softmax(logits, -1)


def _scalar(xp: Any, like: Tensor, value: float) -> Tensor:
    return xp.full([1], value, dtype=like.dtype, device=like.device)


def draw(kernels: KernelTable) -> Callable[..., tuple[Tensor, Tensor]]:
    """Every row is sampled both greedily and at random, and one of the two tokens is chosen."""
    greedy, filter_, sample = kernels["greedy"], kernels["filter_logits"], kernels["sample"]

    def run(
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
        xp = namespace(logits)
        peaks, likeliest = xp.amax(logits, -1), greedy(logits)
        logits = logits.div_(temperature.unsqueeze(1))
        if filters:
            logits = filter_(logits, top_k, top_p, min_p)
        return xp.where(is_random > 0, sample(logits, seeds, positions + 1), likeliest), peaks

    return run
