"""Decode attention over quantized caches in CUDA C++ (kernels/native/quant_attention.cu), where the
GPU and the shape suit it; everything else takes the Triton kernel over the same plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from fd_cuda.kernels.quant_layout import FP8_ROWS, INT4, INT8_ROWS

from .native_gqa import NativeDecode, NativeShape, launch_splits
from .plan import decode_items, split_parts

if TYPE_CHECKING:
    from fastdeploy_core.contracts.attention import AttentionBatch, AttentionSpec
    from torch import Tensor

    from .tuning import Sizes

_FORMATS: Final = {"int8": INT8_ROWS, "float8_e4m3fn": FP8_ROWS, "int4_zp": INT4}


@dataclass(slots=True)
class Splits:
    """A step's rows that feed few tokens, cut."""

    shape: NativeShape
    columns: int
    items: Tensor
    parts: tuple[Tensor, ...]


class QuantizedDecode:
    """The kernel for one spec and block size."""

    def __init__(self, spec: AttentionSpec, block_size: int) -> None:
        self._spec, self._block_size = spec, block_size
        self._kind = _FORMATS[spec.kv_format]
        self._bf16 = NativeDecode(spec, block_size)  # knows which heads and GPUs such kernels serve

    def cut(self, batch: AttentionBatch, max_tokens: int, sizes: Sizes) -> Splits | None:
        """None where the kernel does not serve such rows."""
        columns = self._bf16.columns(max_tokens)
        # Hopper converts fp8 itself, and others that do are not told apart here.
        if not columns or (self._kind == FP8_ROWS and not sizes.gpu.from_hopper_on):
            return None
        heads, num_seqs = self._spec.num_kv_heads, batch.num_seqs
        shape = sizes.quantized(num_seqs, heads, columns)
        items, counters = decode_items(
            batch.seq_lens_dev, batch.cu_seqlens_q_dev, num_seqs, num_seqs * heads * shape.cluster,
            max_tokens, shape.plan, new_in_cache=True,
        )  # fmt: skip
        parts = split_parts(items, heads * columns, self._spec.v_head_dim)
        return Splits(shape, columns, items, (*parts, counters))

    def run(
        self,
        q: Tensor,
        out: Tensor,
        numbers: tuple[Tensor, ...],
        scales: tuple[Tensor, ...],
        batch: AttentionBatch,
        splits: Splits,
        scale: float,
        *,
        is_static: bool,
    ) -> None:
        """Queue it. `scales`: of keys and values, by slot and head in float16, or by channel in
        float32; and by how much channels of values are shifted."""
        spec = self._spec
        if q.stride(2) != 1 or q.stride(0) % 8 or q.stride(1) % 8:
            q = q.contiguous()
        defines = {
            "HALF": int(spec.dtype == "float16"),
            "Y_HALF": 0,
            "FORMAT": self._kind,
            "SCALED": 0,
            "IS_STATIC": int(is_static),
            "GROUP": spec.num_heads // spec.num_kv_heads,
            "BLOCK_SIZE": self._block_size,
        }
        tables = batch.block_tables_dev
        arguments: list[Any] = [
            *(q, out, *numbers, *scales, splits.items, tables, *splits.parts, scale),
            *(q.stride(0), q.stride(1), tables.stride(0), spec.num_kv_heads),
        ]
        launch_splits(
            "quant_attention", splits.shape, splits.columns, defines, splits.items, spec, arguments
        )
