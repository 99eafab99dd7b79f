"""What a tensor library offers: the documented subset, spelled as in torch.

`_torch.py` and `_paddle.py` implement it. Shapes are tuples or lists, `dim` may be negative, dtypes
are the library's own objects (`xp.float32`, `xp.dtype("float32")`), devices are strings.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    import numpy as np

# Every dtype name the project uses, with its width.
DTYPE_BYTES: Final[dict[str, int]] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

Shape = Sequence[int]


class TensorLibrary(Protocol):
    """torch or paddle with one interface. Its only state are the library's own settings."""

    name: str  # "torch" or "paddle"
    version: str
    # The library's own class, for isinstance.
    tensor_type: type
    # Whether ragged_pattern and attend_ragged exist: fast on a CPU, float32 only.
    has_ragged_attention: builtins.bool
    # dtypes that its CPU kernels can multiply; the reference device offers no others.
    cpu_matmul_dtypes: tuple[str, ...]

    float64: Any
    float32: Any
    float16: Any
    bfloat16: Any
    float8_e4m3fn: Any
    float8_e5m2: Any
    int64: Any
    int32: Any
    int16: Any
    int8: Any
    uint8: Any
    bool: Any

    # -- dtypes, devices, memory ------------------------------------------------------------------

    def dtype(self, name: str) -> Any:
        """The dtype of that name; ConfigError names the possible ones."""

    def dtype_name(self, dtype: Any) -> str:
        """ "float32" and so on; takes a dtype or a tensor."""

    def size(self, x: Any) -> int:
        """Number of elements."""

    def nbytes(self, x: Any) -> int:
        """Bytes of its elements."""

    def to_device(self, x: Any, device: str) -> Any:
        """x on that device, x itself if it is there."""

    def enter_thread(self) -> None:
        """Make the library usable in this thread; `load` does so for its caller."""

    def no_grad(self) -> AbstractContextManager[Any]:
        """A context that records no gradients. Use a new one for every forward pass."""

    def set_num_threads(self, count: int) -> None:
        """CPU threads of this process's tensor operations."""

    def get_num_threads(self) -> int:
        """CPU threads in use."""

    # -- making tensors ---------------------------------------------------------------------------

    def zeros(self, shape: Shape, *, dtype: Any = None, device: str | None = None) -> Any:
        """Zeros; float32 unless said otherwise."""

    def ones(self, shape: Shape, *, dtype: Any = None, device: str | None = None) -> Any:
        """Ones."""

    def empty(self, shape: Shape, *, dtype: Any = None, device: str | None = None) -> Any:
        """Uninitialised memory."""

    def full(
        self, shape: Shape, value: Any, *, dtype: Any = None, device: str | None = None
    ) -> Any:
        """`value` everywhere; give the dtype."""

    def zeros_like(self, x: Any) -> Any:
        """Zeros of x's shape and dtype."""

    def empty_like(self, x: Any) -> Any:
        """Uninitialised, of x's shape and dtype."""

    def arange(
        self,
        start: int,
        end: int | None = None,
        step: int = 1,
        *,
        dtype: Any = None,
        device: str | None = None,
    ) -> Any:
        """start, start + step, ... below end; one argument counts from 0. int64 by default."""

    def tensor(self, data: Any, *, dtype: Any = None, device: str | None = None) -> Any:
        """A copy of a number, a (nested) list or a numpy array."""

    def from_numpy(self, array: np.ndarray, dtype: Any = None) -> Any:
        """A CPU tensor that shares the array's memory when the array is writable and contiguous.

        uint16 arrays are bfloat16 bits when dtype is bfloat16, uint8 arrays are float8 bits when it
        is a float8; otherwise dtype converts.
        """

    def to_numpy(self, x: Any) -> np.ndarray:
        """A host array that may share memory: bfloat16 as uint16 bits, float8 as uint8 bits."""

    def from_buffer(self, buffer: Any, dtype: str, shape: Shape) -> Any:
        """A CPU tensor over raw little-endian bytes, such as one tensor of a safetensors file.

        A writable buffer (mmap with ACCESS_COPY) is shared, a read-only one is copied.
        """

    # -- joining, splitting, choosing -------------------------------------------------------------

    def cat(self, tensors: Sequence[Any], dim: int = 0) -> Any:
        """Joined along an existing dimension."""

    def stack(self, tensors: Sequence[Any], dim: int = 0) -> Any:
        """Joined along a new dimension."""

    def split(self, x: Any, sizes: int | Sequence[int], dim: int = 0) -> Sequence[Any]:
        """Pieces of `sizes` elements each (an int: equal pieces, the last may be shorter)."""

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        """a where condition else b; a and b may be scalars."""

    def index_select(self, x: Any, dim: int, index: Any) -> Any:
        """Slices of x along dim; index 1-D int32 or int64."""

    def gather(self, x: Any, dim: int, index: Any) -> Any:
        """torch.gather: out[i][j] = x[i][index[i][j]] for dim 1."""

    def scatter(self, x: Any, dim: int, index: Any, source: Any) -> Any:
        """torch.scatter, a new tensor; source is of index's shape. No duplicate targets."""

    def index_copy_(self, x: Any, dim: int, index: Any, source: Any) -> Any:
        """x[index[i]] = source[i] along dim 0, in place. dim must be 0."""

    def index_add_(self, x: Any, dim: int, index: Any, source: Any) -> Any:
        """x[index[i]] += source[i] along dim, in place; duplicates add up, in order on a CPU."""

    def repeat_interleave(self, x: Any, repeats: Any, dim: int = 0) -> Any:
        """Each slice repeated; repeats an int or a 1-D tensor."""

    def nonzero(self, x: Any) -> Any:
        """Indices of true or non-zero elements, [n, ndim] int64."""

    # -- products ---------------------------------------------------------------------------------

    def matmul(self, a: Any, b: Any) -> Any:
        """Matrix product, batched over leading dimensions."""

    def matmul_nt(self, a: Any, b: Any) -> Any:
        """a times b with b's last two dimensions swapped, without copying b."""

    def linear(self, x: Any, weight: Any, bias: Any = None) -> Any:
        """x [..., K] with weight [N, K]: [..., N]."""

    def addmm(self, c: Any, a: Any, b: Any) -> Any:
        """c + a b for matrices."""

    def outer(self, a: Any, b: Any) -> Any:
        """Outer product of two vectors."""

    # -- elementwise ------------------------------------------------------------------------------

    def exp(self, x: Any) -> Any:
        """e to the x."""

    def log(self, x: Any) -> Any:
        """Natural logarithm."""

    def log1p(self, x: Any) -> Any:
        """log(1 + x), accurate near 0."""

    def sqrt(self, x: Any) -> Any:
        """Square root."""

    def rsqrt(self, x: Any) -> Any:
        """One over square root."""

    def sin(self, x: Any) -> Any:
        """Sine."""

    def cos(self, x: Any) -> Any:
        """Cosine."""

    def sigmoid(self, x: Any) -> Any:
        """Logistic function."""

    def tanh(self, x: Any) -> Any:
        """Hyperbolic tangent."""

    def erf(self, x: Any) -> Any:
        """Error function."""

    def gelu(self, x: Any, approximate: str = "none") -> Any:
        """x times the normal distribution's Phi(x); "tanh": the approximation with tanh
        (Hendrycks and Gimpel, arXiv 1606.08415)."""

    def silu(self, x: Any) -> Any:
        """x times sigmoid(x)."""

    def abs(self, x: Any) -> Any:
        """Magnitude."""

    def maximum(self, a: Any, b: Any) -> Any:
        """Larger of two tensors."""

    def minimum(self, a: Any, b: Any) -> Any:
        """Smaller of two tensors."""

    def clamp(self, x: Any, low: Any = None, high: Any = None) -> Any:
        """Limit to low and high (scalars)."""

    def isfinite(self, x: Any) -> Any:
        """Neither infinite nor NaN."""

    def isnan(self, x: Any) -> Any:
        """Not a number."""

    # -- integers; the second operand is a tensor or a Python int within int64 --------------------

    def bitwise_and(self, a: Any, b: Any) -> Any:
        """a & b."""

    def bitwise_or(self, a: Any, b: Any) -> Any:
        """a | b."""

    def bitwise_xor(self, a: Any, b: Any) -> Any:
        """a ^ b."""

    def left_shift(self, a: Any, b: Any) -> Any:
        """a << b."""

    def right_shift(self, a: Any, b: Any) -> Any:
        """a >> b, arithmetic: the sign is kept."""

    # -- along one dimension ----------------------------------------------------------------------

    def softmax(self, x: Any, dim: int = -1) -> Any:
        """Softmax in x's dtype; float32 first if it must be exact."""

    def log_softmax(self, x: Any, dim: int = -1) -> Any:
        """log of softmax."""

    def logsumexp(self, x: Any, dim: int = -1, keepdim: bool = False) -> Any:
        """log of the sum of exponentials."""

    def cumsum(self, x: Any, dim: int = -1) -> Any:
        """Running sum."""

    def argmax(self, x: Any, dim: int = -1) -> Any:
        """Index of the largest element, int64; the first among equals on a CPU, NaN above all."""

    def amax(self, x: Any, dim: int = -1, keepdim: bool = False) -> Any:
        """Largest element."""

    def topk(self, x: Any, k: int, dim: int = -1) -> tuple[Any, Any]:
        """The k largest elements, largest first, and their indices. Order among equals is open."""

    def sort(
        self, x: Any, dim: int = -1, descending: bool = False, stable: bool = False
    ) -> tuple[Any, Any]:
        """Sorted values and their original indices."""

    def argsort(self, x: Any, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
        """The original indices of the sorted values."""

    def searchsorted(self, sorted_values: Any, values: Any, right: bool = False) -> Any:
        """The index at which each value would be inserted, int64."""

    def bincount(self, x: Any, minlength: int = 0) -> Any:
        """How often each integer occurs."""

    # -- fused where the library has it -----------------------------------------------------------

    def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
        """x / rms(x) * weight over the last dimension, computed in float32, result in x's dtype."""

    def layer_norm(self, x: Any, weight: Any, bias: Any, eps: float) -> Any:
        """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension, computed in
        float32, result in x's dtype; bias may be None."""

    def silu_and_mul(self, x: Any) -> Any:
        """silu of the first half of the last dimension times the second half."""

    def rotate(self, x: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
        """x [..., R] rotated pairwise by angles whose cos and sin [..., R / 2] broadcast; float32
        inside. Pairs are (0, 1), (2, 3)... when interleaved, else (0, R/2), (1, R/2 + 1)..."""

    def attend(self, q: Any, k: Any, v: Any, mask: Any, scale: float) -> Any:
        """softmax(q k^T * scale + mask) v with grouped heads.

        q [kv_heads, group, tokens, dim], k [kv_heads, keys, dim], v [kv_heads, keys, v_dim], mask
        [tokens, keys] in q's dtype or None: [kv_heads, group, tokens, v_dim].
        """

    def ragged_pattern(self, offsets: np.ndarray, rows: np.ndarray) -> Any:
        """Which key rows each query of attend_ragged reads: rows[offsets[i]:offsets[i + 1]]."""

    def attend_ragged(self, q: Any, keys: Any, values: Any, pattern: Any) -> Any:
        """softmax(q_i . keys_j) values_j over the pattern's rows j of each query i, unscaled.

        q [n, dim], keys [rows, dim], values [rows, v_dim]: [n, v_dim]. Nothing is copied or padded.
        """

    def tune_allocator(self) -> None:
        """Keep freed host memory: mapping new pages costs more than small operations."""
