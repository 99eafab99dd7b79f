"""Answers at start-up. Light: a tensor library is imported only when a runtime is installed."""

from __future__ import annotations

from fd_accelerator.paddle_device import probe

from fastdeploy_core.contracts import Candidate, hookimpl
from fastdeploy_core.contracts.device import DeviceQuestion

from .device import FACTS, TORCH


@hookimpl
def fd_device_probe(question: DeviceQuestion) -> Candidate:
    """Is a chip here, and does PaddlePaddle or torch see it?"""
    return probe(FACTS, question, TORCH)
