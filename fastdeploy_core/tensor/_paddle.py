"""PaddlePaddle as a TensorLibrary, with torch's spelling. Imported by `tensor.load` only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ._bits import (
    BIT_CARRIERS,
    as_carrier,
    choose_blas_code,
    hidden_module,
    kept_logging,
    kept_variable,
    processor_features,
    restore_signals,
    tune_malloc,
)
from ._same import SameNames

choose_blas_code()  # must run before the library checks the processor
# On import, paddle asks tvm_ffi (a part of xgrammar) for its version, which imports torch: one or
# two seconds, half a gigabyte and a second thread pool, without use. It also sets OMP_NUM_THREADS=1
# if the operator did not set it, although a device of this host may use more threads. It sets the
# root logger to INFO, and takes signals: SIGTERM would print a crash report and end the process.
with hidden_module("tvm_ffi"), kept_variable("OMP_NUM_THREADS"), kept_logging():
    import paddle
    import paddle.nn.functional as F

    from ._paddle_rows import BYTES, NARROW, bits_of, words_of

paddle.disable_signal_handler()
restore_signals()

# Paddle keeps its eager mode in the importing thread. When that thread ends, the mode would end for
# all threads.
_eager_mode = paddle.base.framework.global_var._functional_dygraph_context_manager
_fused_rms_norm = paddle.incubate.nn.functional.fused_rms_norm
# Its CPU code uses AVX512 registers without checking the processor: on others the process dies.
_HAS_FUSED_NORM = "avx512f" in processor_features()


_CPU = paddle.CPUPlace()


class PaddleLibrary(SameNames, module=paddle):
    """Adapts PaddlePaddle to torch's interface; the comments name the differences."""

    name = "paddle"
    version = paddle.__version__
    tensor_type = paddle.Tensor
    cpu_matmul_dtypes = ("float32",)
    has_ragged_attention = False

    split = staticmethod(paddle.compat.split)  # paddle.split counts pieces instead of sizes
    sigmoid = staticmethod(F.sigmoid)
    silu = staticmethod(F.silu)
    clamp = staticmethod(paddle.clip)

    def __init__(self) -> None:
        self._constants: dict[tuple[int, Any, str], Any] = {}
        self._swaps: dict[tuple[int, bool, str], Any] = {}

    def dtype_name(self, dtype: Any) -> str:
        return str(getattr(dtype, "dtype", dtype)).rpartition(".")[2]

    def size(self, x: Any) -> int:
        return int(x.size)

    def nbytes(self, x: Any) -> int:
        return int(x.size * x.element_size())

    def to_device(self, x: Any, device: str) -> Any:
        return x.to(device)

    def enter_thread(self) -> None:
        # Eager execution is a setting of each thread. The importing thread has it, and threads that
        # the main thread starts after an import there; other threads build graphs instead.
        if not paddle.in_dynamic_mode():
            paddle.disable_static()

    def no_grad(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = paddle.no_grad()
        return context

    def set_num_threads(self, count: int) -> None:
        # paddle's own loops read the flag; the call is for the matrix library.
        paddle.set_flags({"FLAGS_paddle_num_threads": count})
        paddle.base.core.set_num_threads(count)

    def get_num_threads(self) -> int:
        return int(paddle.get_flags("FLAGS_paddle_num_threads")["FLAGS_paddle_num_threads"])

    def arange(
        self,
        start: int,
        end: int | None = None,
        step: int = 1,
        dtype: Any = None,
        device: str | None = None,
    ) -> Any:
        first, last = (0, start) if end is None else (start, end)
        # Few dtypes have kernels; uint8 has none.
        x = paddle.arange(first, last, step, dtype=paddle.int64, device=device)
        return x if dtype in (None, paddle.int64) else x.astype(dtype)

    def tensor(self, data: Any, dtype: Any = None, device: str | None = None) -> Any:
        if isinstance(data, paddle.Tensor):
            return paddle.tensor(data, dtype=dtype, device=device)
        array = np.array(data)
        if array.dtype == np.float64 and not isinstance(data, np.ndarray | np.generic):
            array = array.astype(np.float32)  # Python's floats
        x = self.from_numpy(array, dtype)
        return x if device is None else self.to_device(x, device)

    def from_numpy(self, array: np.ndarray, dtype: Any = None) -> Any:
        bits, carrier = as_carrier(array, "" if dtype is None else self.dtype_name(dtype))
        # Each call of from_dlpack, to_tensor or Tensor(...) would lose some 100 bytes for ever.
        x = paddle._C_ops.empty([0], paddle.uint8, _CPU)
        x.get_tensor().set(bits, _CPU, True)  # the array's memory and its dtype
        if carrier:
            return x.view(dtype)
        return x if dtype is None or dtype == x.dtype else x.astype(dtype)

    def to_numpy(self, x: Any) -> np.ndarray:
        carrier = BIT_CARRIERS.get(self.dtype_name(x))
        if carrier == "uint8":
            x = x.view("uint8")
        array: np.ndarray = x.numpy()  # paddle returns bfloat16 as uint16
        return array

    def from_buffer(self, buffer: Any, dtype: str, shape: Sequence[int]) -> Any:
        carrier = BIT_CARRIERS.get(dtype, dtype)
        array = np.frombuffer(buffer, dtype=carrier).reshape(tuple(shape))
        return self.from_numpy(array, self.dtype(dtype))

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        dtype = getattr(a, "dtype", None)
        if dtype in BYTES and not a.place.is_cpu_place():  # no accelerator's kernel moves bytes
            carrier = paddle.int8 if dtype == paddle.int8 else paddle.uint8
            a, b = (x.view(carrier).astype(paddle.int32) for x in (a, b))
            return paddle.where(condition, a, b).astype(carrier).view(dtype)
        return paddle.where(condition, a, b)

    def index_select(self, x: Any, dim: int, index: Any) -> Any:
        if x.dtype in NARROW and x.place.is_cpu_place():
            whole = x.contiguous()
            return self.from_numpy(np.take(bits_of(whole), index.numpy(), dim)).view(x.dtype)
        words = words_of(x) if dim == 0 else None
        if words is not None:
            return paddle.gather(words, index, 0).view(x.dtype)
        # Three to eight times as fast, for dimension 0.
        return paddle.gather(x, index, 0) if dim == 0 else paddle.index_select(x, index, dim)

    def gather(self, x: Any, dim: int, index: Any) -> Any:
        return paddle.take_along_axis(x, index, dim, broadcast=False)

    def scatter(self, x: Any, dim: int, index: Any, source: Any) -> Any:
        if x.place.is_cpu_place():
            return paddle.put_along_axis(x, index, source, dim, broadcast=False)
        # Without paddle's check of the index, which would wait for the accelerator.
        return paddle._C_ops.put_along_axis(x, index, source, dim, "assign", True)

    def index_copy_(self, x: Any, dim: int, index: Any, source: Any) -> Any:
        if dim != 0:
            raise ValueError(f"index_copy_ works along dimension 0 only, got {dim}")
        if x.dtype in NARROW and x.place.is_cpu_place():
            source = source.contiguous()
            bits_of(x)[index.numpy()] = bits_of(source)
            return x
        words = words_of(x)
        if words is not None:
            paddle.scatter_(words, index, source.contiguous().view(words.dtype))
            return x
        return paddle.scatter_(x, index, source)

    def index_add_(self, x: Any, dim: int, index: Any, source: Any) -> Any:
        return paddle.index_add_(x, index, dim, source)

    def repeat_interleave(self, x: Any, repeats: Any, dim: int = 0) -> Any:
        return paddle.repeat_interleave(x, repeats, dim)

    def matmul_nt(self, a: Any, b: Any) -> Any:
        return paddle.matmul(a, b, transpose_y=True)

    def linear(self, x: Any, weight: Any, bias: Any = None) -> Any:
        y = paddle.matmul(x, weight, transpose_y=True)  # paddle's own linear takes [K, N]
        return y if bias is None else y.add_(bias)

    def bitwise_and(self, a: Any, b: Any) -> Any:
        return paddle.bitwise_and(a, self._operand(a, b))

    def bitwise_or(self, a: Any, b: Any) -> Any:
        return paddle.bitwise_or(a, self._operand(a, b))

    def bitwise_xor(self, a: Any, b: Any) -> Any:
        return paddle.bitwise_xor(a, self._operand(a, b))

    def left_shift(self, a: Any, b: Any) -> Any:
        return paddle.bitwise_left_shift(a, self._operand(a, b))

    def right_shift(self, a: Any, b: Any) -> Any:
        return paddle.bitwise_right_shift(a, self._operand(a, b))

    def softmax(self, x: Any, dim: int = -1) -> Any:
        return F.softmax(x, dim)

    def log_softmax(self, x: Any, dim: int = -1) -> Any:
        # paddle's own takes time quadratic in the width.
        shifted = x - paddle.max(x, dim, True)
        return shifted.sub_(paddle.log(paddle.exp(shifted).sum(dim, keepdim=True)))

    def logsumexp(self, x: Any, dim: int = -1, keepdim: bool = False) -> Any:
        peak = paddle.max(x, dim, True)  # paddle's own is several times slower
        total = paddle.log(paddle.exp(x - peak).sum(dim, keepdim=True)).add_(peak)
        return total if keepdim else total.squeeze(dim)

    def cumsum(self, x: Any, dim: int = -1) -> Any:
        return paddle.cumsum(x, dim)

    def argmax(self, x: Any, dim: int = -1) -> Any:
        # numpy's is several times as fast and treats NaN as the largest.
        if dim == -1 and x.ndim and x.dtype == paddle.float32 and x.place.is_cpu_place():
            return self.from_numpy(np.asarray(x.numpy().argmax(-1)))
        index = paddle.argmax(x, dim)
        # paddle's skips NaN; torch's treats it as the largest. On the CPU the sum shows cheaply
        # whether there may be one; elsewhere asking would wait for the device.
        if x.is_floating_point() and x.size:
            if x.place.is_cpu_place() and not math.isnan(float(x.sum())):
                return index
            odd = paddle.isnan(x)
            index = paddle.where(odd.any(dim), paddle.argmax(odd.astype(paddle.int32), dim), index)
        return index

    def amax(self, x: Any, dim: int = -1, keepdim: bool = False) -> Any:
        return paddle.max(x, dim, keepdim)  # paddle.amax is slower

    def bincount(self, x: Any, minlength: int = 0) -> Any:
        return paddle.bincount(x, minlength=minlength)

    def topk(self, x: Any, k: int, dim: int = -1) -> tuple[Any, Any]:
        values, indices = paddle.topk(x, k, dim)
        return values, indices

    def sort(
        self, x: Any, dim: int = -1, descending: bool = False, stable: bool = False
    ) -> tuple[Any, Any]:
        order = paddle.argsort(x, dim, descending, stable)
        return paddle.take_along_axis(x, order, dim), order

    def argsort(self, x: Any, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
        return paddle.argsort(x, dim, descending, stable)

    def searchsorted(self, sorted_values: Any, values: Any, right: bool = False) -> Any:
        return paddle.searchsorted(sorted_values, values, right=right)

    def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
        if _HAS_FUSED_NORM and x.dtype == paddle.float32 and x.place.is_cpu_place():
            return _fused_rms_norm(x, weight, None, eps, x.ndim - 1)[0]
        wide = x.astype(paddle.float32)
        scale = paddle.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
        return (wide * scale * weight.astype(paddle.float32)).astype(x.dtype)

    def gelu(self, x: Any, approximate: str = "none") -> Any:
        return F.gelu(x, approximate=approximate == "tanh")

    def layer_norm(self, x: Any, weight: Any, bias: Any, eps: float) -> Any:
        wide = x.astype(paddle.float32)
        centred = wide - wide.mean(-1, keepdim=True)
        scale = paddle.rsqrt((centred * centred).mean(-1, keepdim=True) + eps)
        normed = centred * scale * weight.astype(paddle.float32)
        return (normed if bias is None else normed + bias.astype(paddle.float32)).astype(x.dtype)

    def silu_and_mul(self, x: Any) -> Any:
        return F.swiglu(x)

    def rotate(self, x: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
        # Slices of the last dimension and broadcasting over a middle one are ten times as slow as
        # equal shapes, so the swap is a product with a signed permutation.
        wide = x.astype(paddle.float32)
        swap = self._swap(wide.shape[-1], interleaved, wide.place)
        if interleaved:
            cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
        else:
            cos, sin = paddle.concat((cos, cos), -1), paddle.concat((sin, sin), -1)
        shape = wide.shape
        turned = paddle.matmul(wide, swap).multiply_(sin.expand(shape).contiguous())
        return turned.add_(wide * cos.expand(shape).contiguous()).astype(x.dtype)

    def attend(self, q: Any, k: Any, v: Any, mask: Any, scale: float) -> Any:
        heads, group, tokens, width = q.shape
        rows = [heads, group * tokens, width]
        scores = paddle.matmul((q * scale).reshape(rows), k, transpose_y=True)
        if mask is not None:
            scores = scores.view([heads, group, tokens, k.shape[1]]).add_(mask)
            scores = scores.view([heads, group * tokens, k.shape[1]])
        out = paddle.matmul(F.softmax(scores, -1), v)
        return out.view([heads, group, tokens, v.shape[2]])

    def ragged_pattern(self, offsets: np.ndarray, rows: np.ndarray) -> Any:
        raise NotImplementedError("has_ragged_attention is False: paddle lacks sparse CPU products")

    def attend_ragged(self, q: Any, keys: Any, values: Any, pattern: Any) -> Any:
        raise NotImplementedError("has_ragged_attention is False: paddle lacks sparse CPU products")

    def tune_allocator(self) -> None:
        tune_malloc()

    def _swap(self, width: int, interleaved: bool, place: Any) -> Any:
        """[width, width]: for each pair (a, b), x @ swap holds -b in a's place, a in b's."""
        key = (width, interleaved, str(place))
        swap = self._swaps.get(key)
        if swap is None:
            first = np.arange(0, width, 2) if interleaved else np.arange(width // 2)
            second = first + (1 if interleaved else width // 2)
            matrix = np.zeros((width, width), dtype=np.float32)
            matrix[second, first] = -1
            matrix[first, second] = 1
            swap = self._swaps[key] = self.from_numpy(matrix).to(place)
        return swap

    def _operand(self, a: Any, b: Any) -> Any:
        """Bit operations only take tensors; small constants are cached."""
        if not isinstance(b, int):
            return b
        key = (b, a.dtype, str(a.place))
        constant = self._constants.get(key)
        if constant is None:
            constant = self.tensor([b]).astype(a.dtype)
            constant = self._constants[key] = constant.to(a.place)
        return constant


_paddle_copy = paddle.Tensor.copy_


def _queued_copy(target: Any, source: Any, blocking: bool | None = None) -> Any:
    """Tensor.copy_ with torch's behaviour: a copy within a device is queued. paddle's waits for the
    whole device, which also makes it impossible in a graph."""
    if blocking is None:
        blocking = target.place != source.place
    return _paddle_copy(target, source, blocking)


def _device_name(x: Any) -> Any:
    """Tensor.device; paddle 3.3's own raises on every custom device."""
    place = x.place
    if place.is_custom_place():
        return f"{place.custom_device_type()}:{place.custom_device_id()}"
    return paddle.device(place)


def library() -> PaddleLibrary:
    """The one instance of this process."""
    paddle.Tensor.copy_ = _queued_copy
    paddle.Tensor.device = property(_device_name)
    return PaddleLibrary()
