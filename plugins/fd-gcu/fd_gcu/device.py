"""What is particular about Enflame S60, as PaddlePaddle's custom device `gcu`."""

from __future__ import annotations

from fd_accelerator.paddle_device import PaddleDevice, PaddleFacts
from fd_accelerator.torch_device import TorchFacts

from fastdeploy_core.contracts.device import DeviceLimits

FACTS = PaddleFacts(
    name="gcu",
    type_name="gcu",
    limits=DeviceLimits(
        dtypes=("bfloat16", "float16", "float32"),
        default_block_size=64,
        # FastDeploy 2.x gave every sequence a run of blocks of its own; sharing was never tried.
        block_sharing=False,
        max_tensor_parallel_size=8,
    ),
    packages=("paddle-custom-gcu",),
    tested_versions=(("3.1.0a0", "3.1.0"),),
    visible_env=("TOPS_VISIBLE_DEVICES",),
    install="pip install paddlepaddle==3.1.0a0 paddle-custom-gcu==3.1.0",
    exercised_on="simulated device",
)


TORCH = TorchFacts(
    name=FACTS.name,
    type_name="gcu",
    limits=FACTS.limits,
    collectives="eccl",
    module="torch_gcu",
    visible_env=FACTS.visible_env,
    install="the vendor's torch 2.8 and torch_gcu",
)


class GcuDevice(PaddleDevice):
    """One S60."""

    name, facts, on_torch = FACTS.name, FACTS, TORCH
