"""Vendors' devices give the tokens that transformers gives: float32, 64 greedy tokens, nothing
detours over the CPU while decoding, streams are late at random, the host cannot read device
memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import NUM_GREEDY, build, reference
from tests.vendors.conftest import DEVICES
from tests.vendors.engines import engine, greedy

# test_serve.py has all of them, over HTTP.
CASES = [("gcu", "qwen3"), ("iluvatar", "ernie-moe"), ("gaudi", "deepseek")]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("checkpoints"), [model for _, model in CASES])


@pytest.mark.parametrize(("device", "model"), CASES)
def test_64_greedy_tokens_equal_transformers(
    panels: Path, checkpoints: Path, device: str, model: str
) -> None:
    from fd_accelerator import paddle_place
    from fd_simdevice.panel import Panel

    folder, answers = checkpoints / model, reference(checkpoints / model)
    prompts = [answer["prompt"].tolist() for answer in answers]
    panel = Panel(panels, DEVICES[device])
    panel.set(delay_us=200, random_delay=1)
    with (
        engine(folder, device) as running,
        paddle_place.without_fallback(),
        panel.counting() as counted,
    ):
        tokens = greedy(running, prompts, NUM_GREEDY)
    panel.set(delay_us=60)
    assert tokens == [answer["greedy"].tolist() for answer in answers]
    assert counted["launches"] > 20 * NUM_GREEDY and "kernel_errors" not in counted
    # What waits holding the interpreter lock is never used.
    assert "device_syncs" not in counted and "event_syncs" not in counted


def test_memory_really_is_unreadable(panels: Path) -> None:
    """Control for the above: the address of a device tensor is nothing to the host."""
    import subprocess
    import sys

    program = (
        "import ctypes, numpy as np\n"
        "from fastdeploy_core.contracts.device import DeviceOptions\n"
        "from fastdeploy_core.plugins.drivers import lookup\n"
        "device = lookup('device', 'gcu')(DeviceOptions())\n"
        "x = device.to_device(np.ones(4, 'float32'))\n"
        "print(device.to_host(x).tolist(), flush=True)\n"
        "ctypes.string_at(x.data_ptr(), 4)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert "[1.0, 1.0, 1.0, 1.0]" in done.stdout, done.stderr[-2000:]
    assert done.returncode in (-11, 139)
