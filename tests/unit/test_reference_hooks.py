"""The reference's answers at start-up, and its kernel table, without a tensor library."""

from __future__ import annotations

import importlib
import inspect
from collections import defaultdict

import pytest

from fastdeploy_core.contracts.attention import AttentionQuestion, AttentionSpec
from fastdeploy_core.contracts.base import Accept, Decline
from fastdeploy_core.contracts.device import DeviceQuestion
from fastdeploy_core.contracts.moe import MoEQuestion, MoESpec, RoutingSpec
from fastdeploy_core.contracts.ops import OPERATIONS, QUANTIZED_OPERATIONS
from fastdeploy_core.reference import hooks
from fastdeploy_core.reference.kernels import TABLE
from fastdeploy_testing.conformance.signatures import signature


def attention(kv_dtype="auto"):
    spec = AttentionSpec("gqa", 4, 2, 32, 32, 0.2, "float32")
    return AttentionQuestion("cpu", "torch", spec, 64, kv_dtype)


def test_table_has_every_operation_of_the_contract():
    assert set(TABLE) == set(OPERATIONS) | set(QUANTIZED_OPERATIONS)


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_kernel_has_the_arguments_the_contract_names(operation):
    cell = TABLE[operation]
    module, _, name = (cell if isinstance(cell, str) else cell.target).partition(":")
    function = getattr(importlib.import_module(module), name)
    if not isinstance(cell, str) and cell.composes:
        function = function(defaultdict(object))  # what it is made of is looked up, not called
    declared = [argument.name for argument in signature(OPERATIONS[operation]).arguments]
    assert list(inspect.signature(function).parameters) == declared


def test_processor_is_offered_with_the_library_asked_for():
    answer = hooks.fd_device_probe(DeviceQuestion())
    assert answer.name == "cpu" and isinstance(answer.verdict, Accept)
    assert "docs/how-to/cpu.md says how to get native kernels" in answer.verdict.note
    assert answer.details["tensor_library"] in answer.details["installed"]


def test_processor_declines_without_a_library(monkeypatch):
    monkeypatch.setattr(hooks, "available", lambda: [])
    verdict = hooks.fd_device_probe(DeviceQuestion()).verdict
    assert (
        isinstance(verdict, Decline) and 'pip install "fastdeploy-core[paddle]"' in verdict.reason
    )
    verdict = hooks.fd_device_probe(DeviceQuestion(tensor_library="torch")).verdict
    assert isinstance(verdict, Decline) and "fastdeploy-core[torch]" in verdict.reason


def test_processor_declines_an_unknown_library():
    verdict = hooks.fd_device_probe(DeviceQuestion(tensor_library="jax")).verdict
    assert isinstance(verdict, Decline)
    assert "'jax'" in verdict.reason and "pip install" not in verdict.reason


def test_attention_declines_a_cache_in_another_dtype():
    assert isinstance(hooks.fd_attention_backends(attention())[0].verdict, Accept)
    for name in ("float8_e4m3fn", "fp8", "int8", "int4_zp"):
        assert isinstance(hooks.fd_attention_backends(attention(name))[0].verdict, Accept)
    verdict = hooks.fd_attention_backends(attention("turbo3"))[0].verdict
    assert isinstance(verdict, Decline) and "turbo3" in verdict.reason


def test_moe_serves_experts_of_any_format():
    spec = MoESpec(RoutingSpec(8, 2), 64, 32, "float32")
    assert isinstance(hooks.fd_moe_backends(MoEQuestion("cpu", "torch", spec))[0].verdict, Accept)
    verdict = hooks.fd_moe_backends(MoEQuestion("cpu", "torch", spec, "wint2"))[0].verdict
    assert isinstance(verdict, Accept) and "wint2" in verdict.note
