"""What is particular about Kunlunxin P800: a place of its own in the vendor's PaddlePaddle."""

from __future__ import annotations

from fd_accelerator.paddle_device import PaddleDevice, PaddleFacts

from fastdeploy_core.contracts.device import DeviceLimits

FACTS = PaddleFacts(
    name="xpu",
    type_name="xpu_stand_in",  # PaddlePaddle takes no custom device called xpu
    builtin_type="xpu",
    builtin_check="is_compiled_with_xpu",
    builtin_module="xpu",
    limits=DeviceLimits(
        dtypes=("bfloat16", "float16", "float32"),
        default_block_size=64,
        kv_layout="NHD",  # HND with attention driver xpu_block
        max_prefills_per_step=1,
        max_tensor_parallel_size=8,
    ),
    packages=("paddlepaddle-xpu",),
    tested_versions=(("3.3.0", "3.3.0"),),
    visible_env=("XPU_VISIBLE_DEVICES",),
    # Four cards are wired to each other only in these sets.
    groups=((4, ((0, 1, 2, 3), (4, 5, 6, 7))),),
    install="pip install paddlepaddle-xpu==3.3.0 (from the xpu-p800 index)",
)


class XpuDevice(PaddleDevice):
    """One P800."""

    name, facts = FACTS.name, FACTS
