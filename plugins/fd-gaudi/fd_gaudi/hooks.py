"""Answers at start-up. Light: a tensor library is imported only when a runtime is installed."""

from __future__ import annotations

from fd_accelerator.paddle_device import probe

from fastdeploy_core.contracts import Candidate, hookimpl
from fastdeploy_core.contracts.attention import AttentionQuestion
from fastdeploy_core.contracts.device import DeviceQuestion
from fastdeploy_core.contracts.moe import MoEQuestion

from .device import FACTS, TORCH
from .operators import answer_attention, answer_moe


@hookimpl
def fd_device_probe(question: DeviceQuestion) -> Candidate:
    """Is a chip here, and does PaddlePaddle or torch see it?"""
    return probe(FACTS, question, TORCH)


@hookimpl
def fd_attention_backends(question: AttentionQuestion) -> list[Candidate]:
    """The vendor's fused blocks, where its operators are installed."""
    return [answer_attention(question)]


@hookimpl
def fd_moe_backends(question: MoEQuestion) -> list[Candidate]:
    """The vendor's fused experts, where its operators are installed."""
    return [answer_moe(question)]
