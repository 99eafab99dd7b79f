"""What is particular about MetaX C550, as PaddlePaddle's custom device `metax_gpu`."""

from __future__ import annotations

from fd_accelerator.paddle_device import PaddleDevice, PaddleFacts
from fd_accelerator.torch_device import TorchFacts

from fastdeploy_core.contracts.device import DeviceLimits

FACTS = PaddleFacts(
    name="metax",
    type_name="metax_gpu",
    limits=DeviceLimits(
        dtypes=("bfloat16", "float16", "float32"),
        default_block_size=64,
        graph_capture=True,
        max_tensor_parallel_size=8,
    ),
    packages=("paddle-metax-gpu",),
    tested_versions=(("3.3.0", "3.3.0"),),
    visible_env=("MACA_VISIBLE_DEVICES",),
    kv_memory_env="FD_METAX_KVCACHE_MEM",
    install="pip install paddlepaddle==3.3.0 paddle-metax-gpu==3.3.0 (from the maca index)",
    exercised_on="simulated device",
)


TORCH = TorchFacts(
    name=FACTS.name,
    type_name="cuda",
    limits=FACTS.limits,
    collectives="nccl",
    version_mark="+metax",  # as in 2.6.0+metax3.3.0.2
    visible_env=FACTS.visible_env,
    pinned_memory=True,
    install="the vendor's torch (mcPytorch)",
)


class MetaxDevice(PaddleDevice):
    """One C550."""

    name, facts, on_torch = FACTS.name, FACTS, TORCH
