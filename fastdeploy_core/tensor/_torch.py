"""torch as a TensorLibrary. Imported by `tensor.load` only."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ._bits import BIT_CARRIERS, as_carrier, tune_malloc
from ._same import SameNames


@dataclass(slots=True)
class _Ragged:
    """Rows of each query, in the forms that both kernels take."""

    starts: torch.Tensor  # [n + 1] int32
    wide_starts: torch.Tensor  # the same, int64
    rows: torch.Tensor  # [starts[n]] int32
    queries: torch.Tensor  # [starts[n]] int32: the query of each row
    mask: torch.Tensor | None = None  # the pattern as a sparse matrix, made by the first layer


@cache
def _dtype_name(dtype: Any) -> str:
    return str(dtype).rpartition(".")[2]


class TorchLibrary(SameNames, module=torch):
    """Mostly torch's own functions as class attributes, so a call costs nothing more."""

    name = "torch"
    version = torch.__version__
    tensor_type = torch.Tensor
    cpu_matmul_dtypes = ("float32", "bfloat16")
    has_ragged_attention = True

    split = staticmethod(torch.split)
    where = staticmethod(torch.where)
    index_select = staticmethod(torch.index_select)
    gather = staticmethod(torch.gather)
    scatter = staticmethod(torch.scatter)
    linear = staticmethod(F.linear)
    sigmoid = staticmethod(torch.sigmoid)
    silu = staticmethod(F.silu)
    clamp = staticmethod(torch.clamp)
    bitwise_and = staticmethod(torch.bitwise_and)
    bitwise_or = staticmethod(torch.bitwise_or)
    bitwise_xor = staticmethod(torch.bitwise_xor)
    left_shift = staticmethod(torch.bitwise_left_shift)
    right_shift = staticmethod(torch.bitwise_right_shift)
    bincount = staticmethod(torch.bincount)

    def dtype_name(self, dtype: Any) -> str:
        return _dtype_name(getattr(dtype, "dtype", dtype))

    def size(self, x: Any) -> int:
        return int(x.numel())

    def nbytes(self, x: Any) -> int:
        return int(x.numel() * x.element_size())

    def to_device(self, x: Any, device: str) -> Any:
        return x.to(device)

    def enter_thread(self) -> None:
        pass

    def no_grad(self) -> AbstractContextManager[Any]:
        return torch.inference_mode()

    def set_num_threads(self, count: int) -> None:
        torch.set_num_threads(count)

    def get_num_threads(self) -> int:
        return torch.get_num_threads()

    def arange(
        self,
        start: int,
        end: int | None = None,
        step: int = 1,
        dtype: Any = None,
        device: str | None = None,
    ) -> Any:
        first, last = (0, start) if end is None else (start, end)
        return torch.arange(first, last, step, dtype=dtype, device=device)

    def tensor(self, data: Any, dtype: Any = None, device: str | None = None) -> Any:
        return torch.tensor(data, dtype=dtype, device=device)

    def from_numpy(self, array: np.ndarray, dtype: Any = None) -> Any:
        bits, carrier = as_carrier(array, "" if dtype is None else self.dtype_name(dtype))
        x = torch.from_numpy(bits)
        if carrier:
            return x.view(dtype)
        return x if dtype is None else x.to(dtype)

    def to_numpy(self, x: Any) -> np.ndarray:
        if x.requires_grad or not x.is_cpu:
            x = x.detach().cpu()
        carrier = BIT_CARRIERS.get(self.dtype_name(x))
        array: np.ndarray
        if carrier is None:
            array = x.numpy()
        else:
            # torch has no unsigned 16-bit arithmetic but exports int16, whose bits are the same.
            signed = "int16" if carrier == "uint16" else carrier
            array = x.contiguous().view(getattr(torch, signed)).numpy().view(carrier)
        return array

    def from_buffer(self, buffer: Any, dtype: str, shape: Sequence[int]) -> Any:
        carrier = BIT_CARRIERS.get(dtype, dtype)
        array = np.frombuffer(buffer, dtype=carrier).reshape(tuple(shape))
        return self.from_numpy(array, self.dtype(dtype))

    def index_copy_(self, x: Any, dim: int, index: Any, source: Any) -> Any:
        # neither processors nor GPUs copy these; they copy bytes
        if x.dtype == torch.float8_e4m3fn:
            x.view(torch.uint8).index_copy_(dim, index, source.view(torch.uint8))
            return x
        return x.index_copy_(dim, index, source)

    def index_add_(self, x: Any, dim: int, index: Any, source: Any) -> Any:
        return x.index_add_(dim, index, source)

    def repeat_interleave(self, x: Any, repeats: Any, dim: int = 0) -> Any:
        return torch.repeat_interleave(x, repeats, dim=dim)

    def matmul_nt(self, a: Any, b: Any) -> Any:
        return torch.matmul(a, b.transpose(-1, -2))

    def softmax(self, x: Any, dim: int = -1) -> Any:
        return torch.softmax(x, dim)

    def log_softmax(self, x: Any, dim: int = -1) -> Any:
        return torch.log_softmax(x, dim)

    def logsumexp(self, x: Any, dim: int = -1, keepdim: bool = False) -> Any:
        return torch.logsumexp(x, dim, keepdim=keepdim)

    def cumsum(self, x: Any, dim: int = -1) -> Any:
        return torch.cumsum(x, dim)

    def argmax(self, x: Any, dim: int = -1) -> Any:
        # numpy's is 4 to 12 times as fast and treats NaN as the largest.
        if x.device.type == "cpu" and x.dtype == torch.float32 and dim == -1 and x.ndim:
            return torch.from_numpy(np.asarray(x.numpy().argmax(-1)))
        return torch.argmax(x, dim)

    def amax(self, x: Any, dim: int = -1, keepdim: bool = False) -> Any:
        return torch.amax(x, dim, keepdim=keepdim)

    def topk(self, x: Any, k: int, dim: int = -1) -> tuple[Any, Any]:
        values, indices = torch.topk(x, k, dim)
        return values, indices

    def sort(
        self, x: Any, dim: int = -1, descending: bool = False, stable: bool = False
    ) -> tuple[Any, Any]:
        values, indices = torch.sort(x, dim=dim, descending=descending, stable=stable)
        return values, indices

    def argsort(self, x: Any, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
        return torch.argsort(x, dim=dim, descending=descending, stable=stable)

    def searchsorted(self, sorted_values: Any, values: Any, right: bool = False) -> Any:
        return torch.searchsorted(sorted_values, values, right=right)

    def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def gelu(self, x: Any, approximate: str = "none") -> Any:
        return F.gelu(x, approximate=approximate)

    def layer_norm(self, x: Any, weight: Any, bias: Any, eps: float) -> Any:
        # It computes in float32 by itself; copies took twice as long as the norm.
        return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)

    def silu_and_mul(self, x: Any) -> Any:
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def rotate(self, x: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
        wide = x.float()
        if interleaved:
            pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)).contiguous())
            turned = torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)
        else:
            a, b = wide.chunk(2, -1)
            turned = torch.cat(
                (torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)), -1
            )
        return turned.to(x.dtype)

    def attend(self, q: Any, k: Any, v: Any, mask: Any, scale: float) -> Any:
        heads, group = q.shape[:2]
        keys = k.unsqueeze(1).expand(heads, group, *k.shape[1:])
        values = v.unsqueeze(1).expand(heads, group, *v.shape[1:])
        if q.device.type == "cpu":
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
        # With the call above the last of 65 queries was wrong on an H100 (torch 2.11, float32); the
        # cause is not known.
        scores = torch.matmul(q, keys.transpose(-1, -2)) * scale
        return torch.matmul(torch.softmax(scores if mask is None else scores + mask, -1), values)

    def ragged_pattern(self, offsets: np.ndarray, rows: np.ndarray) -> _Ragged:
        queries = np.repeat(np.arange(len(offsets) - 1, dtype=np.int32), np.diff(offsets))
        return _Ragged(
            starts=torch.from_numpy(offsets.astype(np.int32)),
            wide_starts=torch.from_numpy(offsets),
            rows=torch.from_numpy(rows.astype(np.int32)),
            queries=torch.from_numpy(queries),
        )

    def attend_ragged(self, q: Any, keys: Any, values: Any, pattern: _Ragged) -> Any:
        # Scores are a product of which only the pattern's elements are computed. The mean of the
        # values is a weighted bag of embeddings. Both kernels read rows in place.
        if pattern.mask is None:
            # Zeros, not uninitialised memory: beta = 0 still multiplies them.
            zeros = torch.zeros(pattern.rows.shape[0], dtype=q.dtype)
            shape = (q.shape[0], keys.shape[0])
            pattern.mask = torch.sparse_csr_tensor(pattern.starts, pattern.rows, zeros, size=shape)
        scores = torch.sparse.sampled_addmm(pattern.mask, q, keys.t(), beta=0.0).values()
        peaks = torch.segment_reduce(scores, "max", offsets=pattern.wide_starts)
        weights = scores.sub_(torch.index_select(peaks, 0, pattern.queries)).exp_()
        totals = torch.segment_reduce(weights, "sum", offsets=pattern.wide_starts)
        sums = F.embedding_bag(
            pattern.rows,
            values,
            pattern.starts,
            mode="sum",
            per_sample_weights=weights,
            include_last_offset=True,
        )
        return sums.div_(totals.unsqueeze(1))

    def tune_allocator(self) -> None:
        tune_malloc()


def library() -> TorchLibrary:
    """The one instance of this process."""
    # torch warns once per process that compressed sparse tensors are new. Trigger it here, where
    # `load` silences warnings.
    starts = torch.tensor([0, 1])
    torch.sparse_csr_tensor(starts, starts[:1], starts[1:].float(), size=(1, 1))
    return TorchLibrary()
