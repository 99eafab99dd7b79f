"""Rounding to int4 with error feedback, against rounding each number for itself."""

from __future__ import annotations

import numpy as np
import pytest
from fd_quant_formats.feedback import quantize_int4_with_feedback

from fastdeploy_core import tensor
from fastdeploy_testing.conformance.test_quantized_ops import make_packed


@pytest.fixture(scope="module")
def xp(tensor_library):
    return tensor.load(tensor_library)


def test_error_feedback_beats_rounding_where_it_counts(xp):
    """The error of outputs on correlated inputs, group by group; scales are those of whole
    groups."""
    rng = np.random.default_rng(5)
    mixing = rng.standard_normal((128, 128)) * 0.2 + np.eye(128)
    inputs = rng.standard_normal((2000, 128)) @ mixing
    hessian = (inputs.T @ inputs / 2000).astype(np.float32)
    weight = rng.standard_normal((48, 128)).astype(np.float32)

    def outputs(rounded):
        error = weight - rounded
        return np.trace(error @ hessian @ error.T) / np.trace(weight @ hessian @ weight.T)

    for group in (0, 32):
        number, scale = quantize_int4_with_feedback(weight, hessian, group)
        assert number.max() <= 15 and scale.shape == (48, 128 // (group or 128))
        fed = (number.astype(np.float32) - 8) * np.repeat(scale, group or 128, 1)
        plain = make_packed(xp, "wint4", xp.from_numpy(weight.copy()), group).dequantize()
        assert outputs(fed) < 0.7 * outputs(xp.to_numpy(plain))


def test_an_input_that_calibration_never_saw_does_no_harm():
    hessian = np.eye(32, dtype=np.float32)
    hessian[3, 3] = 0
    weight = np.random.default_rng(6).standard_normal((8, 32)).astype(np.float32)
    number, scale = quantize_int4_with_feedback(weight, hessian)
    assert np.isfinite(scale).all()
    assert np.abs((number.astype(np.float32) - 8) * scale - weight).max() < scale.max() * 1.6
