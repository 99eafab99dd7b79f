"""Engines that share experts, each on a GPU of its own: tokens of one GPU, whoever has work, and
while experts move."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.server.test_shared_experts import DEMO, EPLB, REQUESTS, ask, ask_all, of_each
from tests.server_process import serving

pytestmark = [pytest.mark.device("cuda"), pytest.mark.slow]

OPTIONS = ("--device", "cuda", "--dtype", "float32", "--max-model-len", "512")
ROOM = ("--max-num-seqs", "8", "--max-num-batched-tokens", "96", "--num-gpu-blocks-override", "64")
SHARED = ("--data-parallel-size", "2", "--enable-expert-parallel")


@pytest.fixture(scope="module", autouse=True)
def _two_gpus() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 NVIDIA GPUs")
    if not list(DEMO.glob("*.safetensors")):
        pytest.skip("this tree holds no demo weights (models/ernie-tiny/*.safetensors)")


@pytest.fixture(scope="module")
def alone() -> Iterator[list[list[int]]]:
    """What one GPU answers, to one request after the other."""
    with serving(DEMO, *OPTIONS, *ROOM) as one:
        yield [ask(one, *request) for request in REQUESTS]


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--enforce-eager",),
        ("--expert-communicator", "all_gather"),
        EPLB,
        (*EPLB, "--enforce-eager"),
    ],
    ids=lambda more: "-".join(word.strip("-") for word in more if word[:2] == "--") or "captured",
)
def test_tokens_are_those_of_one_gpu(more: tuple[str, ...], alone: list[list[int]]) -> None:
    with serving(DEMO, *OPTIONS, *ROOM, *SHARED, *more) as server:
        # One request at a time: the other engine has nothing of its own.
        assert [ask(server, *request) for request in REQUESTS[:4]] == alone[:4]
        for _ in range(3):
            assert ask_all(server) == alone
        assert min(of_each(server, "generation_tokens_total")) > 0
        if "--enable-eplb" in more:
            assert "places change" in server.log
        server.signal()
        assert server.wait() == 0
    assert ("captured decode steps: none" in server.log) == ("--enforce-eager" in more)
    assert "experts are divided over 2 ranks of 2 engines" in server.log
    assert not re.search(r"Traceback|ERROR|CRITICAL", server.log)
