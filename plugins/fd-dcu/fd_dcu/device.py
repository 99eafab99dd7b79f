"""What is particular about Hygon K100AI: a ROCm build of PaddlePaddle that calls itself `gpu`."""

from __future__ import annotations

import json

from fd_accelerator.paddle_device import PaddleDevice, PaddleFacts
from fd_accelerator.torch_device import TorchFacts

from fastdeploy_core.contracts.device import DeviceLimits

FACTS = PaddleFacts(
    name="dcu",
    type_name="dcu_stand_in",  # PaddlePaddle takes no custom device called dcu
    builtin_check="is_compiled_with_rocm",
    builtin_type="gpu",
    builtin_module="cuda",  # its module of paddle.device keeps that name
    limits=DeviceLimits(
        dtypes=("bfloat16", "float16", "float32"),
        default_block_size=64,
        max_tensor_parallel_size=8,
    ),
    packages=("paddlepaddle-dcu", "paddlepaddle-rocm"),
    tested_versions=(("3.1.0", "3.1.0"),),
    visible_env=("HIP_VISIBLE_DEVICES",),
    memory_command="rocm-smi --showmeminfo vram --json -d {index}",
    install="pip install paddlepaddle-dcu==3.1.0",
)


TORCH = TorchFacts(
    name=FACTS.name,
    type_name="cuda",
    limits=FACTS.limits,
    collectives="nccl",
    version_mark="+das",  # as in 2.9.0+das.opt1.dtk2604
    visible_env=FACTS.visible_env,
    pinned_memory=True,
    install="the vendor's torch (DTK)",
)


class DcuDevice(PaddleDevice):
    """One K100AI."""

    name, facts, on_torch = FACTS.name, FACTS, TORCH

    @staticmethod
    def parse_memory(output: str) -> tuple[int, int]:
        """rocm-smi's JSON: bytes as text, by card."""
        card = next(iter(json.loads(output).values()))
        total = int(card["VRAM Total Memory (B)"])
        return total - int(card["VRAM Total Used Memory (B)"]), total
