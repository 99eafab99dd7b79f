"""The documented subset means the same on both libraries: each function against numpy."""

from __future__ import annotations

import inspect
import math
import mmap
import subprocess
import sys
import tempfile

import numpy as np
import pytest

from fastdeploy_core import tensor
from fastdeploy_core.errors import ConfigError
from fastdeploy_core.tensor import DTYPE_BYTES, TensorLibrary


@pytest.fixture(scope="module")
def xp(tensor_library):
    return tensor.load(tensor_library)


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def check(xp, result, expected, limit=1e-6):
    got = xp.to_numpy(result)
    assert got.shape == np.shape(expected)
    if got.dtype.kind == "f":
        np.testing.assert_allclose(got, expected, rtol=limit, atol=limit)
    else:
        assert np.array_equal(got, expected)


def test_library_offers_everything_it_documents(xp):
    for name in TensorLibrary.__annotations__:
        assert getattr(xp, name) is not None, name
    for name, function in vars(TensorLibrary).items():
        if inspect.isfunction(function) and not name.startswith("_"):
            assert callable(getattr(xp, name)), name


@pytest.mark.parametrize("name", DTYPE_BYTES)
def test_dtype_names_go_both_ways(xp, name):
    x = xp.zeros([3], dtype=xp.float32).to(xp.dtype(name))
    assert xp.dtype_name(x) == xp.dtype_name(x.dtype) == name
    assert xp.dtype(name) == getattr(xp, name) == x.dtype
    assert (xp.size(x), xp.nbytes(x)) == (3, 3 * DTYPE_BYTES[name])


def test_unknown_dtype_is_refused(xp):
    with pytest.raises(ConfigError, match=r"'int4'.*float8_e4m3fn"):
        xp.dtype("int4")


@pytest.mark.parametrize("name", [n for n in DTYPE_BYTES if not n.startswith(("bf", "float8"))])
def test_numpy_arrays_go_both_ways_and_share_memory(xp, name):
    array = np.arange(6).reshape(2, 3).astype(name)
    x = xp.from_numpy(array)
    assert xp.dtype_name(x) == name
    assert np.array_equal(xp.to_numpy(x), array)
    if name != "bool":
        array[1, 1] = 100
        assert xp.to_numpy(x)[1, 1] == 100
    assert list(xp.from_numpy(np.zeros((0, 3), name)).shape) == [0, 3]


def test_read_only_and_strided_arrays_are_copied(xp):
    array = numbers(4, 6)
    array.flags.writeable = False
    check(xp, xp.from_numpy(array), array)
    check(xp, xp.from_numpy(array[::2, ::3]), array[::2, ::3])


def test_bfloat16_travels_as_its_bits(xp):
    bits = np.array([0x3F80, 0xC000, 0x7F80, 0x0001], np.uint16)
    x = xp.from_numpy(bits, xp.bfloat16)
    assert x.to(xp.float32).tolist()[:3] == [1.0, -2.0, float("inf")]
    back = xp.to_numpy(x)
    assert back.dtype == np.uint16 and np.array_equal(back, bits)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_travels_as_its_bits(xp, name):
    bits = np.arange(120, dtype=np.uint8)
    x = xp.from_numpy(bits, xp.dtype(name))
    exponent, bias = (4, 7) if name == "float8_e4m3fn" else (5, 15)
    mantissa = 7 - exponent
    high, low = bits >> mantissa, bits & (2**mantissa - 1)
    value = np.where(
        high == 0,
        low * 2.0 ** (1 - bias - mantissa),
        (1 + low / 2**mantissa) * 2.0 ** (high.astype(float) - bias),
    )
    check(xp, x.to(xp.float32), value.astype(np.float32))
    assert np.array_equal(xp.to_numpy(x), bits)


def test_buffers_of_a_file_become_tensors(xp):
    values = numbers(3, 4)
    check(xp, xp.from_buffer(values.tobytes(), "float32", [3, 4]), values)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    x = xp.from_buffer(bits.tobytes(), "bfloat16", [3, 4])
    assert np.array_equal(xp.to_numpy(x), bits)
    assert list(xp.from_buffer(b"", "float32", [0, 4]).shape) == [0, 4]
    with tempfile.TemporaryFile() as file:
        file.write(values.tobytes())
        file.flush()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
            x = xp.from_buffer(memoryview(mapped)[16:48], "float32", [2, 4])
            check(xp, x, values[1:])
            del x


def test_making_tensors(xp):
    check(xp, xp.zeros([2, 3]), np.zeros((2, 3)))
    check(xp, xp.ones((2,), dtype=xp.int32), np.ones(2))
    check(xp, xp.full([2], -np.inf, dtype=xp.float32, device="cpu"), np.full(2, -np.inf))
    assert list(xp.empty([4, 2], dtype=xp.bool).shape) == [4, 2]
    check(xp, xp.arange(5), np.arange(5))
    check(xp, xp.arange(2, 11, 3, dtype=xp.uint8), np.arange(2, 11, 3))
    assert xp.dtype_name(xp.arange(3)) == xp.dtype_name(xp.tensor([1, 2])) == "int64"
    assert xp.dtype_name(xp.tensor([1.5])) == xp.dtype_name(xp.zeros([1])) == "float32"
    check(xp, xp.tensor([[1, 2], [3, 4]], dtype=xp.float32), [[1, 2], [3, 4]])
    check(xp, xp.zeros_like(xp.ones([3], dtype=xp.int64)), np.zeros(3))


def test_joining_and_splitting(xp):
    a, b = numbers(2, 3), numbers(2, 3, seed=1)
    x, y = xp.tensor(a), xp.tensor(b)
    check(xp, xp.cat((x, y), 1), np.concatenate((a, b), 1))
    check(xp, xp.stack([x, y], 0), np.stack((a, b)))
    first, second = xp.split(x, [1, 2], 1)
    check(xp, first, a[:, :1])
    check(xp, second, a[:, 1:])
    parts = xp.split(xp.arange(7), 3)
    assert [p.tolist() for p in parts] == [[0, 1, 2], [3, 4, 5], [6]]
    check(xp, xp.where(x > 0, x, y), np.where(a > 0, a, b))


def test_choosing_and_writing(xp):
    a = numbers(5, 4)
    x, index = xp.tensor(a), xp.tensor([4, 0, 4])
    check(xp, xp.index_select(x, 0, index), a[[4, 0, 4]])
    check(xp, xp.index_select(x, 1, xp.tensor([3, 1])), a[:, [3, 1]])
    columns = np.array([[3, 0], [1, 1], [2, 3], [0, 0], [3, 2]])
    check(xp, xp.gather(x, 1, xp.tensor(columns)), np.take_along_axis(a, columns, 1))
    fewer = xp.gather(x, 1, xp.tensor(columns[:2]))
    check(xp, fewer, np.take_along_axis(a[:2], columns[:2], 1))
    put = a.copy()
    np.put_along_axis(put, columns[:, :1], np.float32(7), 1)
    check(xp, xp.scatter(x, 1, xp.tensor(columns[:, :1]), xp.full([5, 1], 7.0)), put)
    check(xp, x, a)
    target = xp.zeros([5, 4])
    xp.index_copy_(target, 0, xp.tensor([3, 1]), x[:2])
    check(xp, target[3], a[0])
    check(xp, target[0], np.zeros(4))
    total = xp.zeros([2, 4])
    xp.index_add_(total, 0, xp.tensor([1, 1, 0]), x[:3])
    check(xp, total, np.stack((a[2], a[0] + a[1])))
    check(xp, xp.repeat_interleave(xp.arange(3), xp.tensor([2, 0, 1])), [0, 0, 2])
    check(xp, xp.nonzero(xp.tensor([0, 5, 0, 1])), [[1], [3]])


def test_index_copy_writes_through_a_view(xp):
    pool = xp.zeros([3, 2, 4])
    xp.index_copy_(pool.view([6, 4]), 0, xp.tensor([5]), xp.ones([1, 4]))
    assert pool[2, 1].tolist() == [1.0] * 4 and float(pool.sum()) == 4.0


def test_products(xp):
    a, b, bias = numbers(3, 4), numbers(5, 4, seed=1), numbers(5, seed=2)
    x, y = xp.tensor(a), xp.tensor(b)
    check(xp, xp.matmul(x, y.t()), a @ b.T, 1e-5)
    check(xp, xp.matmul_nt(x, y), a @ b.T, 1e-5)
    check(xp, xp.linear(x, y, xp.tensor(bias)), a @ b.T + bias, 1e-5)
    check(xp, xp.linear(x, y), a @ b.T, 1e-5)
    check(xp, xp.addmm(xp.tensor(bias), x, y.t()), bias + a @ b.T, 1e-5)
    check(xp, xp.outer(x[0], y[0]), np.outer(a[0], b[0]))
    batch = numbers(2, 3, 4)
    check(xp, xp.matmul_nt(xp.tensor(batch), xp.tensor(batch)), batch @ batch.swapaxes(1, 2), 1e-5)


@pytest.mark.parametrize(
    "name", ["exp", "log", "log1p", "sqrt", "sin", "cos", "abs", "isfinite", "isnan"]
)
def test_elementwise(xp, name):
    a = np.array([0.5, 1.0, 3.25, np.inf, np.nan], np.float32)
    with np.errstate(all="ignore"):
        expected = getattr(np, name)(a)
    check(xp, getattr(xp, name)(xp.tensor(a)), expected)


def test_more_elementwise(xp):
    a, b = numbers(50) * 5, numbers(50, seed=1)
    x, y = xp.tensor(a), xp.tensor(b)
    check(xp, xp.sigmoid(x), 1 / (1 + np.exp(-a)))
    check(xp, xp.silu(x), a / (1 + np.exp(-a)))
    check(xp, xp.tanh(x), np.tanh(a))
    erf = np.vectorize(math.erf)
    check(xp, xp.erf(x), erf(a), 1e-5)
    check(xp, xp.gelu(x), a * (1 + erf(a / math.sqrt(2))) / 2, 1e-5)
    inner = math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)
    check(xp, xp.gelu(x, "tanh"), a * (1 + np.tanh(inner)) / 2, 1e-5)
    check(xp, xp.rsqrt(xp.abs(x)), 1 / np.sqrt(np.abs(a)), 1e-5)
    check(xp, xp.maximum(x, y), np.maximum(a, b))
    check(xp, xp.minimum(x, y), np.minimum(a, b))
    check(xp, xp.clamp(x, -1.0, 1.0), np.clip(a, -1, 1))
    check(xp, xp.clamp(x, None, 0.5), np.minimum(a, 0.5))
    check(xp, xp.clamp(x, 0.5), np.maximum(a, 0.5))


@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_bit_operations_take_tensors_and_integers(xp, dtype):
    a = np.array([5, -8, 2**30 + 1, -(2**31)], dtype)
    x, c = xp.tensor(a), xp.tensor(np.array([3, 1, 2, 4], dtype))
    check(xp, xp.bitwise_and(x, 255), a & 255)
    check(xp, xp.bitwise_or(x, c), a | [3, 1, 2, 4])
    check(xp, xp.bitwise_xor(x, c), a ^ [3, 1, 2, 4])
    check(xp, xp.right_shift(x, 3), a >> 3)
    check(xp, xp.right_shift(x, c), a >> np.array([3, 1, 2, 4]))
    check(xp, xp.left_shift(xp.tensor(np.array([1, 3], dtype)), 4), [16, 48])
    assert xp.dtype_name(xp.bitwise_and(x, 255)) == dtype


def test_integers_wrap_at_64_bits(xp):
    a = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 100)
    with np.errstate(over="ignore"):
        check(xp, xp.tensor(a) * xp.tensor(a[::-1].copy()), a * a[::-1])
        check(xp, xp.tensor(a) + xp.tensor(a), a + a)


def test_along_one_dimension(xp):
    a = numbers(4, 30) * 4
    x = xp.tensor(a)
    weights = np.exp(a - a.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    check(xp, xp.softmax(x, -1), weights)
    check(xp, xp.log_softmax(x, -1), np.log(weights), 1e-5)
    total = np.log(np.exp(a).sum(1))
    check(xp, xp.logsumexp(x), total, 1e-5)
    check(xp, xp.logsumexp(x, 1, keepdim=True), total[:, None], 1e-5)
    check(xp, xp.cumsum(x, 0), np.cumsum(a, 0), 1e-5)
    check(xp, xp.argmax(x), a.argmax(1))
    check(xp, xp.amax(x, 0), a.max(0))
    check(xp, xp.amax(x, 1, keepdim=True), a.max(1, keepdims=True))
    values, index = xp.topk(x, 3)
    check(xp, values, -np.sort(-a, 1)[:, :3])
    check(xp, index, np.argsort(-a, 1)[:, :3])
    values, index = xp.sort(x, 0)
    check(xp, values, np.sort(a, 0))
    check(xp, index, np.argsort(a, 0))
    check(xp, xp.argsort(x, -1, descending=True), np.argsort(-a, 1))
    keys = np.array([2, 0, 2, 1, 0, 2])
    check(xp, xp.argsort(xp.tensor(keys), 0, stable=True), np.argsort(keys, kind="stable"))
    check(xp, xp.bincount(xp.tensor(keys), minlength=5), [2, 1, 3, 0, 0])
    edges = xp.tensor([1.0, 2.0, 2.0, 5.0])
    check(xp, xp.searchsorted(edges, xp.tensor([2.0, 9.0])), [1, 4])
    check(xp, xp.searchsorted(edges, xp.tensor([2.0, 9.0]), right=True), [3, 4])


def test_log_softmax_of_a_masked_row(xp):
    x = xp.tensor([[0.0, -np.inf, 0.0]])
    check(xp, xp.log_softmax(x), [[np.log(0.5), -np.inf, np.log(0.5)]])


def test_nan_wins_argmax(xp):
    assert xp.argmax(xp.tensor([[1.0, np.nan, np.inf], [0.0, 3.0, 1.0]])).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("dtype", "has_fused_norm"), [("float32", True), ("float32", False), ("bfloat16", True)]
)
def test_rms_norm(xp, dtype, has_fused_norm, monkeypatch):
    if xp.name == "paddle" and not has_fused_norm:  # as on a processor without AVX512
        monkeypatch.setattr("fastdeploy_core.tensor._paddle._HAS_FUSED_NORM", False)
    a, weight = numbers(3, 2, 64) * 3, numbers(64, seed=1)
    x = xp.tensor(a).to(xp.dtype(dtype))
    exact = x.to(xp.float32)
    got = xp.rms_norm(x, xp.tensor(weight).to(xp.dtype(dtype)), 1e-6)
    assert xp.dtype_name(got) == dtype
    a = xp.to_numpy(exact).astype(np.float64)
    weight = xp.to_numpy(xp.tensor(weight).to(xp.dtype(dtype)).to(xp.float32))
    expected = a / np.sqrt((a * a).mean(-1, keepdims=True) + 1e-6) * weight
    check(xp, got.to(xp.float32), expected, 1e-5 if dtype == "float32" else 1e-2)


def test_no_grad_and_threads(xp):
    with xp.no_grad():
        x = xp.ones([2])
        x.add_(x)
    assert x.tolist() == [2.0, 2.0]
    before = xp.get_num_threads()
    xp.set_num_threads(1)
    assert xp.get_num_threads() == 1
    xp.set_num_threads(before)


def test_shared_tensor_methods(xp):
    """What tensor/__init__.py promises of the tensors themselves."""
    a = numbers(2, 3, 4)
    x = xp.tensor(a)
    check(xp, x.view([6, 4]), a.reshape(6, 4))
    check(xp, x.reshape(6, 4), a.reshape(6, 4))
    check(xp, x.view(-1, 4), a.reshape(6, 4))
    check(xp, x.transpose(0, 1).contiguous(), a.swapaxes(0, 1))
    check(xp, x.permute(2, 0, 1), a.transpose(2, 0, 1))
    check(xp, x[0].t(), a[0].T)
    check(xp, x.unsqueeze(1).expand([2, 5, 3, 4]), np.broadcast_to(a[:, None], (2, 5, 3, 4)))
    check(xp, x[:1].squeeze(0).flatten(), a[0].reshape(-1))
    check(xp, x.sum(dim=-1, keepdim=True), a.sum(-1, keepdims=True), 1e-5)
    check(xp, x.mean(dim=1), a.mean(1), 1e-5)
    check(xp, x.amax(dim=-1), a.max(-1))
    check(xp, (x > 0).all(dim=-1), (a > 0).all(-1))
    check(xp, (x > 0).any(dim=-1), (a > 0).any(-1))
    check(xp, x.cumsum(dim=1), a.cumsum(1), 1e-5)
    check(xp, x.argmax(dim=-1), a.argmax(-1))
    check(xp, x.masked_fill(x > 0, -1.0), np.where(a > 0, np.float32(-1), a))
    check(xp, x.clamp(min=0.0).long(), np.maximum(a, 0).astype(np.int64))
    y = x.clone()
    check(xp, y.mul_(x).sub_(x).div_(xp.full([1], 2.0)).exp_(), np.exp((a * a - a) / 2), 1e-5)
    y[0, 1:3] = 5.0
    y[1].copy_(xp.zeros([3, 4]))
    check(xp, y[0, 1:], np.full((2, 4), 5.0))
    check(xp, y[1], np.zeros((3, 4)))
    check(xp, x[xp.tensor([1, 0])], a[[1, 0]])
    check(xp, x[x > 0], a[a > 0])
    check(xp, x.float().to(xp.float64) // 2, a.astype(np.float64) // 2)
    assert x.ndim == 3 and list(x.shape) == [2, 3, 4] and x.is_contiguous()
    assert isinstance(x.data_ptr(), int) and x.element_size() == 4
    assert x[0, 0, 0].item() == a[0, 0, 0] and len(x.tolist()) == 2
    assert y.zero_().fill_(3.0).min().item() == 3.0


def test_every_thread_that_loads_it_computes(tensor_library: str) -> None:
    """Also when the first import happened in a thread that is gone."""
    program = f"""
import threading
from fastdeploy_core import tensor

def use():
    found.append(int(tensor.load({tensor_library!r}).ones([2]).sum()))

found = []
for _ in range(2):
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
use()
assert found == [2, 2, 2], found
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_layer_norm_is_computed_in_float32(xp, dtype, eps):
    # The mean of a row is a hundred times what its values differ by.
    x = xp.from_numpy(numbers(3, 40, seed=1) + 100).to(xp.dtype(dtype))
    weight, bias = numbers(40, seed=2), numbers(40, seed=3)
    a = xp.to_numpy(x.float()).astype(np.float64)
    normed = (a - a.mean(-1, keepdims=True)) / np.sqrt(a.var(-1, keepdims=True) + eps) * weight
    limit = 1e-4 if dtype == "float32" else 2e-2
    for own, expected in ((xp.from_numpy(bias), normed + bias), (None, normed)):
        result = xp.layer_norm(x, xp.from_numpy(weight), own, eps)
        assert xp.dtype_name(result) == dtype
        check(xp, result.float(), expected, limit)
