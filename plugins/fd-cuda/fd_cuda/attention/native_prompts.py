"""The prompt kernel in CUDA C++, kernels/native/prompt_attention.cu, where the GPU and the shape
suit it: Hopper, head widths of 128 in 16 bits, every key before a token seen. Everything else takes
the Triton kernel of prefill.py, over the same tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fd_cuda.kernels import native
from fd_cuda.kernels.native import tensor_map

from .native_decode import WIDTH
from .plan import TILE_WORDS

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionBatch, AttentionSpec
    from torch import Tensor

ROWS: Final = 128  # tokens times heads of a group
_KEYS: Final = 128
_STAGES: Final = 2
_MAX_GROUP: Final = 64
_THREADS: Final = 384
_BARRIER_BYTES: Final = 8 * (2 + 4 * _STAGES)
_ALIGNMENT: Final = 1024


class NativePrompts:
    """The kernel for one spec and block size."""

    def __init__(self, spec: AttentionSpec, block_size: int) -> None:
        self._spec, self._block_size = spec, block_size
        self._group = spec.num_heads // spec.num_kv_heads
        self._box = min(block_size, _KEYS)  # of the cache, keys that lie together
        self.serves = (
            spec.dtype in ("bfloat16", "float16")
            and spec.head_dim == spec.v_head_dim == WIDTH
            and spec.needs <= {"offsets"}
            and self._group <= _MAX_GROUP
            and self._box >= 8
            and _KEYS % self._box == block_size % self._box == 0
            and native.has_wgmma()
        )

    def can_run(self, q: Tensor, v: Tensor) -> bool:
        """Whether the copy engine can fetch these."""
        return v.stride(1) == WIDTH and all(
            x.data_ptr() % 16 == 0 and x.stride(0) % 8 == x.stride(1) % 8 == 0 for x in (q, v)
        )

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        cache: tuple[Tensor, ...],
        batch: AttentionBatch,
        tiles: Tensor,
        scale: float,
        num_processors: int,
    ) -> None:
        """Queue it; k is contiguous. `tiles`: those of prefill_tiles, of ROWS // group tokens."""
        tokens, heads = ROWS // self._group, self._spec.num_kv_heads
        defines = {
            "HALF": int(self._spec.dtype == "float16"),
            "GROUP": self._group,
            "TOKENS": tokens,
            "BLOCK_SIZE": self._block_size,
            "BOX": self._box,
            "THREADS": _THREADS,
            "TILE_WORDS": TILE_WORDS,
        }
        values = v.as_strided((v.shape[0], heads * WIDTH), (v.stride(0), 1))
        slots = cache[0].shape[0] * self._block_size
        arguments = [
            tensor_map.head_boxes(q, self._group, tokens),
            tensor_map.boxes(k.view(k.shape[0], -1), _KEYS),
            tensor_map.boxes(values, _KEYS),
            *(tensor_map.boxes(x.view(slots, -1), self._box) for x in cache),
            *(tiles, batch.block_tables_dev, out, scale, batch.block_tables_dev.stride(0)),
            *(heads, tiles.shape[0]),
        ]
        shared = _ALIGNMENT + (ROWS + 2 * _STAGES * _KEYS) * WIDTH * 2 + _BARRIER_BYTES
        kernel = native.function("prompt_attention", defines)
        blocks = min(num_processors, tiles.shape[0] * heads)
        native.launch(kernel, (blocks, 1, 1), _THREADS, arguments, shared=shared)
