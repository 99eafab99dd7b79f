"""Blocks from GPU memory to GPU memory: the conformance kit, the tier beside the pool, and two
servers on one GPU that hand prompts over."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fastdeploy_core.contracts.device import DeviceOptions, TierDevice
from fastdeploy_core.errors import WorkerError
from fastdeploy_core.types import BlockCopies

from fastdeploy_testing.conformance.test_kv_transport import KVTransportConformance
from fastdeploy_testing.conformance.test_kv_transport_faults import KVTransportFaultsConformance
from fastdeploy_testing.drivers import lookup

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

MODEL = Path(__file__).parents[3] / "models" / "ernie-tiny"
SECRET = secrets.token_hex(32)


class TestIpcTransport(KVTransportConformance):
    driver_name = "cuda_ipc"


class TestIpcTransportFaults(KVTransportFaultsConformance):
    driver_name = "cuda_ipc"


def _kernels() -> dict[str, Any]:
    """As attention drivers have them: a layer's pools are [blocks, ...]."""

    def copy(cache: Any, source: Any, target: Any) -> None:
        for pool in cache:
            pool[target] = pool[source]

    def write(cache: Any, blocks: Any, data: Any) -> None:
        for pool, part in zip(cache, data, strict=True):
            pool[blocks] = part

    def read(cache: Any, blocks: Any) -> Any:
        return tuple(pool[blocks] for pool in cache)

    return {"kv_copy_blocks": copy, "kv_read_blocks": read, "kv_write_blocks": write}


def test_blocks_come_back_from_the_tier_as_they_were(tmp_path: Path) -> None:
    """Pools of several dtypes and of odd sizes, in the same step as copies within the pool."""
    device = lookup("device", "cuda")(DeviceOptions(tensor_library="torch"))
    assert isinstance(device, TierDevice)
    shapes = [((9, 4, 2, 16), torch.bfloat16), ((9, 3, 5), torch.float32), ((9, 7), torch.uint8)]
    caches = [
        tuple(
            torch.randint(0, 100, shape, device="cuda").to(dtype)
            for shape, dtype in shapes[number % 2 :]
        )
        for number in range(3)
    ]
    before = [tuple(pool.clone() for pool in cache) for cache in caches]
    path = tmp_path / "where"
    tier = device.block_tier(_kernels(), caches, 5, str(path))
    assert json.loads(path.read_text())["nbytes"] % 5 == 0
    tier.apply(BlockCopies(device_to_host=[(1, 4), (2, 0)], host_to_device=[], device_to_device=[]))
    for cache in caches:
        for pool in cache:
            pool.zero_()
    moves = BlockCopies(
        device_to_host=[], host_to_device=[(4, 7), (0, 3)], device_to_device=[(7, 8)]
    )
    tier.apply(moves)
    for cache, old in zip(caches, before, strict=True):
        for pool, was in zip(cache, old, strict=True):
            assert torch.equal(pool[7], was[1]) and torch.equal(pool[8], was[1])
            assert torch.equal(pool[3], was[2]) and not pool[[0, 1, 2, 4, 5, 6]].any()
    with pytest.raises(WorkerError, match="do not exist"):
        tier.apply(BlockCopies(device_to_host=[(1, 5)], host_to_device=[], device_to_device=[]))


def test_checksums_see_every_changed_bit_and_moved_word() -> None:
    from fastdeploy_core.contracts.kv_transport import Region, TransportOptions

    from fd_cuda.ipc.transport import CudaIpcTransport

    there = CudaIpcTransport.test_memory(4 * 4096)
    content = torch.randint(0, 256, (4 * 4096,), dtype=torch.uint8).numpy()
    there.write(content)
    transport = CudaIpcTransport(TransportOptions(secret=b"s" * 32))
    try:
        transport.register([Region(1, there.memory, 4096, "layout")])
        good, again, other = transport.checksums(1, [2, 2, 3])
        assert good == again != other
        for bit in (0, 7, 4095 * 8, 2000 * 8 + 3):
            changed = content.copy()
            changed[2 * 4096 + bit // 8] ^= 1 << bit % 8
            there.write(changed)
            assert transport.checksums(1, [2]) != [good]
        changed = content.copy()
        changed[2 * 4096 : 2 * 4096 + 8] = content[2 * 4096 + 8 : 2 * 4096 + 16]
        changed[2 * 4096 + 8 : 2 * 4096 + 16] = content[2 * 4096 : 2 * 4096 + 8]
        there.write(changed)
        assert transport.checksums(1, [2]) != [good]
    finally:
        transport.close()


@contextmanager
def _running(*words: str, **environment: str) -> Any:
    """A command of `fastdeploy`; its URL once it listens."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fastdeploy_core.cli.main", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"FD_KV_SECRET": SECRET} | environment,
    )
    lines = []
    try:
        for line in process.stdout or ():
            lines.append(line)
            if found := re.search(r"(?:serving .* at|routing at) (http://\S+)", line):
                break
        else:
            raise AssertionError("".join(lines[-30:]))
        yield found[1]
    finally:
        process.terminate()
        process.wait(60)


def _answer(url: str, prompt: list[int]) -> list[int]:
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    data = json.dumps(body | {"return_token_ids": True}).encode()
    request = urllib.request.Request(
        url + "/v1/completions", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        tokens: list[int] = json.loads(answer.read())["choices"][0]["token_ids"]
        return tokens


def _num_taken(url: str) -> float:
    with urllib.request.urlopen(url + "/metrics", timeout=20) as answer:
        lines = re.findall(rb"^fastdeploy:kv_taken_over_total\S* (\S+)", answer.read(), re.M)
    return sum(map(float, lines))


@pytest.mark.slow
@pytest.mark.parametrize("num_gpus", [1, 2])
def test_the_answer_is_one_instances_and_its_prompt_came_from_the_other(num_gpus: int) -> None:
    """On one GPU both have part of its memory; on two the blocks pass from GPU to GPU."""
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"needs {num_gpus} NVIDIA GPUs")
    serve = ["serve", str(MODEL), "--port", "0", "--dtype", "float32", "--device", "cuda"]
    serve += ["--num-gpu-blocks-override", "300", "--swap-space", "0.5"]
    serve += ["--kv-transport", "cuda_ipc"]
    order = ",".join(map(str, reversed(range(num_gpus))))  # the second one's first GPU
    with ExitStack() as stack:
        one = stack.enter_context(_running(*serve, "--splitwise-role", "prefill"))
        words = [*serve, "--splitwise-role", "decode"]
        other = stack.enter_context(_running(*words, CUDA_VISIBLE_DEVICES=order))
        router = stack.enter_context(
            _running("router", "--port", "0", "--instances", f"{one},{other}")
        )
        prompts = [[5 + (7 * n + n * n * seed) % 200 for n in range(700)] for seed in range(1, 7)]
        deadline = time.monotonic() + 60
        while _num_taken(other) == 0 and time.monotonic() < deadline:  # until it knows the roles
            _answer(router, [5 + secrets.randbelow(200) for _ in range(700)])  # none is cached
            time.sleep(0.1)
        before = _num_taken(other)
        assert before, "nothing was handed over"
        apart = [_answer(router, prompt) for prompt in prompts]
        assert _num_taken(other) - before == len(prompts)
        assert apart == [_answer(one, prompt) for prompt in prompts]
