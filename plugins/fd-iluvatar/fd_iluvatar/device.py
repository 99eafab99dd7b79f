"""What is particular about Iluvatar BI-V150, as PaddlePaddle's custom device `iluvatar_gpu`."""

from __future__ import annotations

from fd_accelerator.paddle_device import PaddleDevice, PaddleFacts
from fd_accelerator.torch_device import TorchFacts

from fastdeploy_core.contracts.device import DeviceLimits

FACTS = PaddleFacts(
    name="iluvatar",
    type_name="iluvatar_gpu",
    limits=DeviceLimits(
        dtypes=("bfloat16", "float16", "float32"),
        block_sizes=(16,),
        default_block_size=16,
        # The vendor's prefill operator sees one whole prompt and nothing that was computed before.
        block_sharing=False,
        chunked_prefill=False,
        max_tensor_parallel_size=16,
    ),
    packages=("paddle-iluvatar-gpu",),
    tested_versions=(("3.3.0", "3.3.0"),),
    visible_env=("ILUVATAR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    kv_memory_env="FD_ILUVATAR_KVCACHE_MEM",
    kv_memory_gib=3.0,
    install="pip install paddlepaddle==3.3.0 paddle-iluvatar-gpu==3.3.0 (from the ixuca index)",
    exercised_on="simulated device",
)


TORCH = TorchFacts(
    name=FACTS.name,
    type_name="cuda",
    limits=FACTS.limits,
    collectives="nccl",
    version_mark="+corex",  # as in 2.7.1+corex.4.4.0
    visible_env=FACTS.visible_env,
    pinned_memory=True,
    install="the vendor's torch (corex)",
)


class IluvatarDevice(PaddleDevice):
    """One of a card's two dies."""

    name, facts, on_torch = FACTS.name, FACTS, TORCH
