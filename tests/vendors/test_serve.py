"""`fastdeploy serve` on every vendor's device gives over HTTP the tokens that transformers gives.

Streams are late at random, the host cannot read device memory, and PaddlePaddle may not detour over
the CPU from the first moment of the process on.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.checkpoints import NUM_GREEDY, ask, build, reference
from tests.vendors.conftest import DEVICES
from tests.vendors.servers import (
    FALLBACK_LINE,
    FALLBACK_LOG,
    NO_FALLBACK,
    complete,
    server_on,
    single_root,
)

DEMO = Path(__file__).resolve().parents[2] / "models" / "ernie-tiny"
# Model -> copies to the host per step: the token, and of each layer with experts who goes to whom.
MODELS = {"demo": 1, "qwen3": 1, "deepseek": 1, "ernie-moe": 1}
SMALL = (
    "--max-model-len",
    "128",
    "--num-gpu-blocks-override",
    "48",
    "--served-model-name",
    "tested",
)
QUICK = {("dcu", "ernie-moe"), ("metax", "qwen3")}
CASES = [
    pytest.param(device, model, marks=() if (device, model) in QUICK else pytest.mark.slow)
    for device in DEVICES
    for model in MODELS
]
Answers = list[dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Answers]]:
    """Of each model its folder, and what transformers says."""
    folder = build(tmp_path_factory.mktemp("checkpoints"), list(MODELS)[1:])
    found = {name: (folder / name, reference(folder / name)) for name in list(MODELS)[1:]}
    return found | {"demo": (DEMO, ask(DEMO, tmp_path_factory.mktemp("demo")))}


@pytest.mark.parametrize(("device", "model"), CASES)
def test_64_greedy_tokens_equal_transformers(
    panels: Path, checkpoints: dict[str, Any], device: str, model: str
) -> None:
    from fd_simdevice.panel import Panel

    folder, answers = checkpoints[model]
    prompts = [answer["prompt"].tolist() for answer in answers]
    expected = [answer["greedy"].tolist() for answer in answers]
    environment = single_root(panels, DEVICES[device]) | NO_FALLBACK
    late = {"SIM_DELAY_US": "200", "SIM_RANDOM_DELAY": "1"}
    tokenizer = ("--tokenizer", str(DEMO))
    with server_on(device, folder, *SMALL, *tokenizer, **environment, **late) as server:
        with ThreadPoolExecutor(len(prompts)) as pool:
            found = list(pool.map(lambda p: complete(server, p, NUM_GREEDY), prompts))
        assert found == expected
        panel = Panel(Path(environment["SIM_PANEL"]), DEVICES[device])
        assert panel.get("delay_us") == 200 and panel.get("random_delay") == 1
        with panel.counting() as counted:
            assert complete(server, prompts[0], NUM_GREEDY) == expected[0]
    graphs = counted.get("graph_launches", 0)  # a captured step is one launch
    assert counted["launches"] + 20 * graphs > 20 * NUM_GREEDY and "kernel_errors" not in counted
    assert graphs >= NUM_GREEDY - 2 if device == "metax" else not graphs
    # A detour would bring its operation's tensors to the host.
    assert counted["d2h"] == MODELS[model] * NUM_GREEDY, counted
    # What waits holding the interpreter lock is never used.
    assert "device_syncs" not in counted and "event_syncs" not in counted


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_no_detour_is_taken_where_it_may_be(
    panels: Path, checkpoints: dict[str, Any], device: str
) -> None:
    """The counter that real devices have, too: PaddlePaddle's own word for every detour."""
    folder, answers = checkpoints["ernie-moe"]
    environment = single_root(panels, DEVICES[device]) | FALLBACK_LOG
    with server_on(device, folder, *SMALL, "--tokenizer", str(DEMO), **environment) as server:
        prompt = answers[0]["prompt"].tolist()
        assert complete(server, prompt, NUM_GREEDY) == answers[0]["greedy"].tolist()
        assert "visible devices count" in server.log, "PaddlePaddle's log is not in the server's"
        detours = [line for line in server.lines if FALLBACK_LINE in line]
    assert not detours, detours[:3]


def test_the_log_tells_of_a_detour(panels: Path) -> None:
    """Control for the above."""
    import os
    import subprocess
    import sys

    program = (
        "import os, paddle\n"
        "paddle.set_device('gcu:0')\n"
        "x = paddle.linalg.cholesky(paddle.to_tensor([[4.0, 1.0], [1.0, 3.0]])).numpy()\n"
        # with this log and a custom device PaddlePaddle 3.3.1 frees memory twice when it ends
        "os._exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, **FALLBACK_LOG},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "missing gcu kernel: cholesky" in done.stderr and FALLBACK_LINE in done.stderr


@pytest.mark.slow
def test_engines_of_one_server_take_one_chip_each(
    panels: Path, checkpoints: dict[str, Any]
) -> None:
    folder, answers = checkpoints["demo"]
    prompts = [answer["prompt"].tolist() for answer in answers]
    expected = [answer["greedy"].tolist() for answer in answers]
    environment = single_root(panels, DEVICES["dcu"])
    two = (*SMALL, "--data-parallel-size", "2")
    with (
        server_on("dcu", folder, *two, **environment) as server,
        ThreadPoolExecutor(2 * len(prompts)) as pool,
    ):
        found = list(pool.map(lambda p: complete(server, p, NUM_GREEDY), [*prompts, *prompts]))
        assert found == [*expected, *expected]
        text = httpx.get(f"{server.url}/metrics").text
        made = re.findall(r'^fastdeploy:generation_tokens_total{engine="\d",.*} (\S+)$', text, re.M)
        assert len(made) == 2 and min(map(float, made)) > 0
    # there are two chips, so the third engine is refused, and with it the start
    three = (*SMALL, "--data-parallel-size", "3")
    with server_on("dcu", folder, *three, **environment) as server:
        assert server.wait(120) == 2
        assert "engine 2: device 'dcu' has no chip 2: 2 visible" in server.log
