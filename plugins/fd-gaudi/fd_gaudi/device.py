"""What is particular about Intel Gaudi2, as PaddlePaddle's custom device `intel_hpu`.

Every new shape compiles for seconds to minutes, so steps are padded to a few rectangles and all of
these run once at start-up.
"""

from __future__ import annotations

import os

from fd_accelerator.paddle_device import PaddleDevice, PaddleFacts
from fd_accelerator.torch_device import TorchFacts

from fastdeploy_core.contracts.device import DeviceLimits, StepBuckets
from fastdeploy_core.errors import ConfigError

MIB = 1024**2
BLOCK_SIZE, MOST_DECODES = 128, 64
# FastDeploy 2.x's names and defaults, and the most shapes that are compiled at start-up.
PROMPTS, PROMPT_TOKENS, LONGEST = "MAX_PREFILL_NUM", "SEQUENCE_STEP_PREFILL", "HPU_WARMUP_MODEL_LEN"
DECODES, SHAPES = "BATCH_STEP_DECODE", "FD_GAUDI_SHAPES"
DEFAULTS = {PROMPTS: 3, PROMPT_TOKENS: 128, LONGEST: 4096, DECODES: 4, SHAPES: 48}


def step_buckets() -> StepBuckets:
    """Up to so many prompts of lengths that double, tables that double, and decodes in as small
    steps as FD_GAUDI_SHAPES leaves room for."""
    longest, decodes = _setting(LONGEST), _setting(DECODES)
    prompts = range(1, _setting(PROMPTS) + 1)
    lengths = _doubled(_setting(PROMPT_TOKENS), longest)
    tables = _doubled(1, -(-longest // BLOCK_SIZE))
    rungs = (_setting(SHAPES) - len(prompts) * len(lengths)) // len(tables)
    rows = tuple(range(decodes, max(decodes, MOST_DECODES) + 1, decodes))
    return StepBuckets(
        prompt_rows=tuple(prompts),
        prompt_tokens=lengths,
        decode_rows=_thinned(rows, max(rungs, 1)),
        table_blocks=tables,
    )


def _thinned(rows: tuple[int, ...], most: int) -> tuple[int, ...]:
    """At most so many of them, the last included, each about as many times the one before."""
    if len(rows) <= most:
        return rows
    growth = (rows[-1] / rows[0]) ** (1 / max(most - 1, 1))
    wanted = [rows[-1] / growth**n for n in range(most)]
    return tuple(sorted({next(r for r in rows if r >= w - 1e-6) for w in wanted}))


def _doubled(first: int, last: int) -> tuple[int, ...]:
    sizes = [min(first, last)]
    while sizes[-1] < last:
        sizes.append(min(2 * sizes[-1], last))
    return tuple(sizes)


def _setting(name: str) -> int:
    text = os.environ.get(name, "")
    if not text:
        return DEFAULTS[name]
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"environment variable {name} cannot be read: got {text!r:.40}; expected a whole "
            f"number above 0; unset it for the default ({DEFAULTS[name]})"
        )
    return int(text)


FACTS = PaddleFacts(
    name="gaudi",
    type_name="intel_hpu",
    limits=DeviceLimits(
        dtypes=("bfloat16", "float32"),
        block_sizes=(BLOCK_SIZE,),
        default_block_size=BLOCK_SIZE,
        mixed_batches=False,
        step_buckets=step_buckets(),
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


TORCH = TorchFacts(
    name=FACTS.name,
    type_name="hpu",
    limits=FACTS.limits,
    collectives="hccl",
    module="habana_frameworks.torch.core",
    visible_env=("HABANA_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES"),
    environment=(("PT_HPU_LAZY_MODE", "0"),),  # operations run when they are called
    install="the vendor's torch 2.7.1 and habana_frameworks",
)


class GaudiDevice(PaddleDevice):
    """One Gaudi2."""

    name, facts, on_torch = FACTS.name, FACTS, TORCH

    @staticmethod
    def parse_memory(output: str) -> tuple[int, int]:
        """Two numbers of MiB."""
        free, total = output.strip().splitlines()[0].split(",")
        return int(free) * MIB, int(total) * MIB
