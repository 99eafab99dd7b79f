"""What is particular about Intel Gaudi2, as PaddlePaddle's custom device `intel_hpu`.

Every new shape compiles for seconds to minutes, so steps are padded to a few numbers of tokens and all
of these run once at start-up.
"""

from __future__ import annotations

import os

from fastdeploy_core.contracts.device import DeviceLimits
from fastdeploy_core.contracts.paddle_device import PaddleDevice, PaddleFacts
from fastdeploy_core.errors import ConfigError

MIB = 1024**2
# FastDeploy 2.x's names and defaults: prompts in steps of 128 tokens up to this length, decodes in
# steps of 4 sequences.
PREFILL_STEP, DECODE_STEP, MOST_DECODES = "SEQUENCE_STEP_PREFILL", "BATCH_STEP_DECODE", 64
LONGEST = "HPU_WARMUP_MODEL_LEN"
DEFAULTS = {PREFILL_STEP: 128, DECODE_STEP: 4, LONGEST: 4096}


def token_buckets() -> tuple[int, ...]:
    """1, then decodes in small steps, then prompts in large ones that double."""
    prefill, decode, longest = (_setting(name) for name in (PREFILL_STEP, DECODE_STEP, LONGEST))
    buckets = {1, *range(decode, MOST_DECODES + 1, decode)}
    size = prefill
    while size < longest:
        buckets.add(size)
        size *= 2
    return tuple(sorted(buckets | {longest}))


def _setting(name: str) -> int:
    text = os.environ.get(name, "")
    if not text:
        return DEFAULTS[name]
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"environment variable {name} cannot be read: got {text!r:.40}; expected a whole number "
            f"above 0; unset it for the default ({DEFAULTS[name]})"
        )
    return int(text)


FACTS = PaddleFacts(
    name="gaudi",
    type_name="intel_hpu",
    limits=DeviceLimits(
        dtypes=("bfloat16", "float32"),
        block_sizes=(128,),
        default_block_size=128,
        mixed_batches=False,
        token_buckets=token_buckets(),
        max_tensor_parallel_size=8,
    ),
    packages=("paddle-intel-hpu",),
    tested_versions=(("3.1.1", ""),),
    visible_env=("INTEL_HPU_VISIBLE_DEVICES", "HPU_VISIBLE_DEVICES"),
    environment=(("FLAGS_intel_hpu_recipe_cache_num", "20480"),),
    memory_command="hl-smi -i {index} -Q memory.free,memory.total -f csv,noheader,nounits",
    install="the vendor's PaddlePaddle plugin and its custom_ops, built from source",
    exercised_on="simulated device",
)


class GaudiDevice(PaddleDevice):
    """One Gaudi2."""

    name, facts = FACTS.name, FACTS

    @staticmethod
    def parse_memory(output: str) -> tuple[int, int]:
        """Two numbers of MiB."""
        free, total = output.strip().splitlines()[0].split(",")
        return int(free) * MIB, int(total) * MIB
