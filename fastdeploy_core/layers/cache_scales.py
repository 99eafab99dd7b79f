"""Static scales of one layer's KV cache, read from the checkpoint.

Two spellings: FastDeploy's `cachek_matmul.activation_scale` (the largest magnitude, one per head or
per channel; with `activation_zero_point` for int4_zp, where the scale is the step size), and
`k_scale` (the step size, one number) of compressed-tensors and vLLM.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from fastdeploy_core.contracts.attention import KVScales
from fastdeploy_core.contracts.kv_formats import kv_format
from fastdeploy_core.contracts.model import StoredTensor
from fastdeploy_core.errors import UnsupportedModel, WeightError

from .weight_map import Placement

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionSpec
    from fastdeploy_core.tensor import Tensor

    from .builder import ModelBuilder
    from .stored import Piece

# FastDeploy 2.x stores int4 as -7..7; the cache holds it as 0..14.
_INT4_LOW: Final = -7.0
_DUMMY_PEAK: Final = 8.0
# Parts of their names, to recognise scales that are not used.
CACHE_SCALE_NAMES: Final = (".cachek_matmul.", ".cachev_matmul.", ".k_scale", ".v_scale")


class CacheScales:
    """Filled while the checkpoint is loaded; `value` is complete afterwards."""

    def __init__(
        self, build: ModelBuilder, prefix: str, spec: AttentionSpec, kv_piece: Piece
    ) -> None:
        kind = kv_format(spec.kv_format)
        if kind is None or spec.kind != "gqa":
            raise UnsupportedModel(
                f"{prefix}: static cache scales are not supported for {spec.kind} attention; "
                "possible: dynamic scales, --kv-cache-dtype int8 or float8_e4m3fn"
            )
        self._kind, self._piece, self._prefix = kind, kv_piece, prefix
        self._heads, self._xp = spec.num_kv_heads, build.xp
        dims = (spec.head_dim, spec.v_head_dim)
        xp = build.xp
        self._scale = tuple(build.zeros((self._heads, dim), xp.float32) for dim in dims)
        self._zero = tuple(build.zeros((self._heads, dim), xp.float32) for dim in dims)
        self._has_zero = [False, False]
        for index, side in enumerate("kv"):
            self._offer(build, f"cache{side}_matmul.activation_scale", index, False, True)
            if kind.has_minimum:
                self._offer(build, f"cache{side}_matmul.activation_zero_point", index, True, True)
            else:
                self._offer(build, f"{side}_scale", index, False, False)
        build.weights.when_loaded(self._finish)
        self._arrived = [False, False]
        self.value = KVScales(self._scale)

    def _offer(
        self, build: ModelBuilder, suffix: str, index: int, is_zero: bool, is_peak: bool
    ) -> None:
        dim = self._scale[index].shape[1]
        build.weights.add(
            _ScalePlacement(
                name=f"{self._prefix}.{suffix}",
                # Dummy checkpoints have one number for each head and channel.
                shape=(self._heads * self._piece.count * dim,),
                region=(slice(None),),
                accept=partial(self._accept, suffix, index, is_zero, is_peak),
                fill=0.0 if is_zero else _DUMMY_PEAK,
                required=False,
            )
        )

    def _accept(
        self, suffix: str, index: int, is_zero: bool, is_peak: bool, stored: Tensor
    ) -> None:
        flat = stored.float().reshape([-1])
        heads, dim = self._heads * self._piece.count, self._scale[index].shape[1]
        name = f"{self._prefix}.{suffix}"
        if not bool(self._xp.isfinite(flat).all()) or (not is_zero and bool((flat <= 0).any())):
            raise WeightError(
                f"tensor {name} holds a cache scale that is not a finite number above zero; the "
                "checkpoint is damaged; download it or calibrate again"
            )
        count = flat.shape[0]
        if count not in (1, heads, heads * dim):
            raise WeightError(
                f"tensor {name} has {count} numbers; possible: 1, {heads} (one per head) or "
                f"{heads * dim} (one per channel)"
            )
        if count == 1:
            table = flat.reshape([1, 1]).expand([heads, dim])
        else:
            table = flat.reshape([heads, count // heads]).expand([heads, dim])
        mine = table[self._piece.of(heads)]
        if is_zero:
            self._zero[index][:] = mine
            self._has_zero[index] = True
            return
        if is_peak and not self._kind.has_minimum:
            mine = mine / self._kind.bound
        self._scale[index][:] = mine
        self._arrived[index] = True

    def _finish(self) -> None:
        if not all(self._arrived):
            side = "kv"[self._arrived.index(False)]
            raise WeightError(
                f"the checkpoint lacks {self._prefix}.cache{side}_matmul.activation_scale; its "
                f"config.json promises static scales for a {self._kind.name} cache; compute them "
                "at run "
                f"time with --kv-cache-dtype {self._kind.name} on a config.json without them, or "
                "calibrate again"
            )
        if self._kind.has_minimum:
            minimum = tuple(
                (_INT4_LOW - zero) * scale
                for zero, scale in zip(self._zero, self._scale, strict=True)
            )
            self.value = KVScales(self._scale, minimum)


class _ScalePlacement(Placement):
    """Takes scales of any count; their owner checks the count."""

    def take(self, stored: StoredTensor) -> None:
        """Pass the whole tensor on."""
        self.accept(stored.read())
        self.done = True
