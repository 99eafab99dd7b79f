"""Steps of random sequences over a scattered cache, for the tests of the attention drivers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from fastdeploy_core.contracts.attention import AttentionBatch, AttentionSpec, HeadNorms

from fastdeploy_testing import oracle

TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}
MAX_POSITION = 4096


@dataclass
class Step:
    """Random sequences in a scattered cache, and one step over them."""

    device: Any
    spec: AttentionSpec
    rows: list[tuple[int, int]]  # (tokens fed, tokens in all); (n, 0): a row that stands in
    block_size: int = 16
    rotary_dim: int = 0
    padding: int = 0  # how many tokens at the end of each row are padding
    has_norms: bool = False
    offset: int = 0  # of positions from indices
    seed: int = 0

    def __post_init__(self) -> None:
        spec, rng = self.spec, np.random.default_rng(self.seed)
        self.dtype = getattr(torch, spec.dtype)
        self.fed = [fed for fed, _ in self.rows]
        self.starts = np.cumsum([0, *self.fed]).astype(np.int32)
        total = int(self.starts[-1])

        def values(*shape: int) -> torch.Tensor:
            x = torch.from_numpy(rng.standard_normal(shape).astype(np.float32))
            return x.to(self.dtype)

        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        widths = (heads * spec.head_dim, kv_heads * spec.head_dim, kv_heads * spec.v_head_dim)
        # As layers hand them over: slices of one matrix.
        self.qkv = values(total, sum(widths))
        q, k, v = self.qkv.split(widths, 1)
        self.q = q.view(total, heads, spec.head_dim)
        self.k = k.view(total, kv_heads, spec.head_dim)
        self.v = v.view(total, kv_heads, spec.v_head_dim)
        angles = rng.standard_normal((MAX_POSITION, self.rotary_dim // 2))
        table = np.concatenate((np.cos(angles), np.sin(angles)), 1).astype(np.float32)
        self.rotary = torch.from_numpy(table) if self.rotary_dim else None
        self.norms = None
        if self.has_norms:
            weights = (1 + values(spec.head_dim) / 2 for _ in "qk")
            self.norms = HeadNorms(*weights, 1e-3)
        blocks = [-(-max(n, 1) // self.block_size) for _, n in self.rows]
        free = list(rng.permutation(np.arange(1, sum(blocks) + 4)))
        self.tables = np.zeros((len(self.rows), max(blocks)), np.int32)
        for row, count in enumerate(blocks):
            self.tables[row, :count] = [free.pop() for _ in range(count)]
        slots = (sum(blocks) + 4) * self.block_size
        self.old_k = values(slots, kv_heads, spec.head_dim)
        self.old_v = values(slots, kv_heads, spec.v_head_dim)
        self.sinks = values(heads).float() * 3 if spec.sinks else None
        # What no token may see, blocks among it that belong to others by now.
        needed = [range(self.first_needed(*row), row[1] - row[0]) for row in self.rows]
        used = [self.slot(r, t) for r, tokens in enumerate(needed) for t in tokens]
        for row, tokens in enumerate(needed):
            gone = tokens.start // self.block_size
            self.tables[row, :gone] = rng.integers(0, sum(blocks) + 4, gone)
        unused = np.setdiff1d(np.arange(slots), used)
        self.old_k[unused] = self.old_v[unused] = float("nan")

    def first_needed(self, fed: int, length: int) -> int:
        """Index of the first token that the row's first one sees."""
        index, spec = max(length - fed, 0), self.spec
        if spec.window:
            return max(index - spec.window + 1, 0)
        return index // spec.chunk * spec.chunk if spec.chunk else 0

    def slot(self, row: int, token: int) -> int:
        return int(self.tables[row, token // self.block_size]) * self.block_size + (
            token % self.block_size
        )

    def positions(self) -> np.ndarray:
        indices = [max(n - fed + i, 0) for fed, n in self.rows for i in range(fed)]
        return np.array(indices, np.int64) + self.offset

    def slot_mapping(self) -> np.ndarray:
        return np.array(
            [
                self.slot(row, n - fed + i) if n and i < fed - self.padding else -1
                for row, (fed, n) in enumerate(self.rows)
                for i in range(fed)
            ],
            np.int64,
        )

    def batch(self, *, tokens_per_row: int = 0, is_exact: bool = True) -> AttentionBatch:
        lengths = np.array([n for _, n in self.rows], np.int32)
        batch = AttentionBatch.upload(
            self.device.to_device,
            *(self.starts, lengths, self.tables, self.slot_mapping(), self.positions()),
            tokens_per_row,
        )
        if not is_exact:
            bounds, tables = np.full_like(lengths, MAX_POSITION), np.zeros_like(self.tables)
            batch = replace(batch, seq_lens=bounds, block_tables=tables, is_exact=False)
        return batch

    def run(self, driver: Any, batch: AttentionBatch) -> tuple[np.ndarray, list[np.ndarray]]:
        """(result, caches afterwards)."""
        spec, to = self.spec, self.device.device
        shapes = driver.cache_shapes(self.old_k.shape[0] // self.block_size)
        olds = (self.old_k, self.old_v)[: len(shapes)]
        cache = tuple(c.reshape(s).to(to) for c, s in zip(olds, shapes, strict=True))
        qkv = self.qkv.to(to)
        q, k, v = (
            torch.as_strided(qkv, x.shape, x.stride(), x.storage_offset())
            for x in (self.q, self.k, self.v)
        )
        rotary = None if self.rotary is None else self.rotary.to(to)
        if spec.kind == "mla":  # unit core: the step's rows are in the cache
            mapping = torch.from_numpy(self.slot_mapping())
            cache[0].view(-1, spec.head_dim)[mapping[mapping >= 0].to(to)] = k[mapping >= 0, 0]
            v = k[..., : spec.kv_lora_rank]
        more: dict[str, Any] = {}
        if self.norms is not None:
            norms = HeadNorms(self.norms.q.to(to), self.norms.k.to(to), self.norms.eps)
            more["norms"] = norms
        if self.sinks is not None:
            more["sinks"] = self.sinks.to(to)
        out = driver.forward(q, k, v, cache, driver.prepare(batch), rotary, **more)
        return out.float().cpu().numpy(), [c.float().cpu().numpy() for c in cache]

    def expected(self) -> list[np.ndarray]:
        """Per row, in float64, from the rotated values as the model's dtype holds them."""
        results, (q, k) = [], self.rotated()
        v = self.v.double().numpy()
        old_k, old_v = self.old_k.double().numpy(), self.old_v.double().numpy()
        for row, (fed, n) in enumerate(self.rows):
            own = slice(self.starts[row], self.starts[row + 1])
            if not fed:
                results.append(np.zeros((0, 1)))
                continue
            first = min(self.first_needed(fed, n), max(n - fed, 0))
            before = [self.slot(row, t) for t in range(first, n - fed)]
            keys = np.concatenate((old_k[before], k[own]))
            if self.spec.kind == "mla":
                values = keys[..., : self.spec.kv_lora_rank]
            else:
                values = np.concatenate((old_v[before], v[own]))
            spec = self.spec
            sinks = None if self.sinks is None else self.sinks.double().numpy()
            results.append(
                oracle.attention(
                    *(q[own], keys, values, spec.scale),
                    window=spec.window,
                    chunk=spec.chunk,
                    softcap=spec.softcap,
                    sinks=sinks,
                    first=first,
                )
            )
        return results

    def rotated(self) -> tuple[np.ndarray, np.ndarray]:
        q, k = self.q.double().numpy(), self.k.double().numpy()
        if self.norms is not None:
            q, k = (self._normed(q, self.norms.q), self._normed(k, self.norms.k))
        if self.rotary is None:
            return q, k
        table, at = self.rotary.double().numpy(), self.positions()
        turned = (oracle.rotary(x, at, table, self.spec.rotary_interleaved) for x in (q, k))
        return tuple(torch.from_numpy(x).to(self.dtype).double().numpy() for x in turned)

    def _normed(self, x: np.ndarray, weight: torch.Tensor) -> np.ndarray:
        """As the model's dtype holds it."""
        factor = (np.square(x).mean(-1, keepdims=True) + self.norms.eps) ** -0.5
        return (
            torch.from_numpy(x * factor * weight.double().numpy()).to(self.dtype).double().numpy()
        )

    def check(self, driver: Any, batch: AttentionBatch) -> np.ndarray:
        out, caches = self.run(driver, batch)
        assert np.isfinite(out).all()
        limit = TOLERANCE[self.spec.dtype]
        for row, expected in enumerate(self.expected()):
            if self.rows[row][1] == 0 or self.rows[row][0] == 0:
                continue
            fed = self.fed[row] - self.padding
            got = out[self.starts[row] : self.starts[row] + fed]
            assert np.abs(got - expected[:fed]).max() <= limit * max(1, np.abs(expected).max())
        if self.spec.kind == "gqa":
            self._check_cache(caches)
        return out

    def _check_cache(self, caches: list[np.ndarray]) -> None:
        mapping = self.slot_mapping()
        kept = mapping >= 0
        news = (self.rotated()[1], self.v.double().numpy())
        for old, new, cache in zip((self.old_k, self.old_v), news, caches, strict=True):
            wanted = old.float().numpy()
            wanted[mapping[kept]] = new[kept]
            got = cache.reshape(wanted.shape)
            # A norm that is rounded the other way is an ulp of what is rotated.
            atol = 1e-3 if self.norms is None else 1e-2
            assert np.allclose(got, wanted, rtol=1e-2, atol=atol, equal_nan=True)


def gqa(
    dtype: str, heads: int = 4, kv_heads: int = 2, width: int = 32, *, interleaved: bool = False
) -> AttentionSpec:
    return AttentionSpec(
        "gqa", heads, kv_heads, width, width, width**-0.5, dtype, rotary_interleaved=interleaved
    )


MIXED = [(1, 70), (20, 20), (33, 90), (1, 1), (3, 40), (9, 9), (1, 33)]


def mla(dtype: str, heads: int = 5, rank: int = 32, rope: int = 16) -> AttentionSpec:
    return AttentionSpec(
        "mla", heads, 1, rank + rope, rank, 0.2, dtype, kv_lora_rank=rank, qk_rope_head_dim=rope
    )


class Host:
    """As much of a device as compiling needs."""

    device = "cpu"

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array)


def compile_cases(capability: int) -> Iterator[Callable[[], Any]]:
    """Steps of models' shapes, for drivers made for that architecture."""
    from fd_cuda.attention.gqa import PagedAttention
    from fd_cuda.attention.latent.driver import LatentAttention
    from fd_cuda.attention.tuning import Gpu, Sizes

    for spec, rotary, block_size in (
        (gqa("bfloat16", 16, 2, 128), 128, 64),
        (gqa("bfloat16", 20, 4, 128), 128, 16),
        (gqa("float16", 4, 4, 64, interleaved=True), 32, 64),
        (gqa("bfloat16", 8, 1, 256), 0, 64),
        (gqa("float32", 6, 2, 40), 24, 5),
        (mla("bfloat16", 16, 512, 64), 0, 64),
        (mla("float16", 4, 128, 32), 0, 64),
    ):
        driver = LatentAttention if spec.kind == "mla" else PagedAttention
        for rows, same in (
            ([(1, 30), (1, 0)], 1),
            ([(8, 30), (8, 9)], 8),
            ([(1, 30), (40, 70)], 0),
        ):
            kinds = (True, False) if not same else (True,)
            for is_exact in kinds:

                def case(
                    spec=spec, rotary=rotary, size=block_size, rows=rows, same=same, d=driver,
                    is_exact=is_exact,
                ):  # fmt: skip
                    built = d(spec, size, Host(), None)
                    built.use(Sizes(Gpu(132, capability >= 90, capability in (86, 89, 120))))
                    step = Step(Host(), spec, rows, rotary_dim=rotary, block_size=size)
                    return step.run(built, step.batch(tokens_per_row=same, is_exact=is_exact))

                yield case

    def streams() -> None:
        from fd_cuda.attention.plan import StreamShape, stream_items

        lengths = torch.zeros(70, dtype=torch.int32)
        stream_items(
            lengths,
            torch.zeros(71, dtype=torch.int32),
            70,
            2,
            1,
            StreamShape(32, 4, 1, 3, 2, 140),
        )

    yield streams

    def one_shot() -> None:
        from fd_cuda.one_shot import OneShot

        for world_size in (2, 8):
            for dtype in (torch.float32, torch.bfloat16):
                group = object.__new__(OneShot)
                group._rank, group._world_size = 1, world_size
                group._bases = torch.zeros(world_size, dtype=torch.int64)
                group.all_reduce(torch.zeros(5000, dtype=dtype))

    yield one_shot
