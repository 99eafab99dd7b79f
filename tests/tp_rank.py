"""One tensor-parallel rank as a program: runs a model and prints what it computed.

usage: tp_rank.py FOLDER LIBRARY RANK SIZE ADDRESS EXPERTS < {"prompts": ..., "num_tokens": ...}
EXPERTS is empty where ranks share every expert, else "in place" or a communicator's name; with
" eplb" after it experts move with every few steps.
Prints {"tokens": ..., "logits": ..., "versions": ...} as JSON; logits are those of the first
prompt's last token, versions say how often the experts of each block have moved.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def run_ranks(
    folder: Path,
    library: str,
    size: int,
    address: Path,
    prompts: dict[str, list[int]],
    count: int,
    experts: str = "",
) -> list[dict[str, Any]]:
    """Start `size` processes and return what each printed."""
    address.mkdir(mode=0o700)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [
                *(sys.executable, __file__, str(folder), library),
                *(str(rank), str(size), str(address), experts),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(size)
    ]
    question = json.dumps({"prompts": prompts, "num_tokens": count})
    try:
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write(question)
            rank.stdin.close()
            rank.stdin = None
        answers = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    failed = [err for rank, (_, err) in zip(ranks, answers, strict=True) if rank.returncode]
    if failed:
        raise RuntimeError(f"a rank failed:\n{failed[0][-4000:]}")
    return [json.loads(out.splitlines()[-1]) for out, _ in answers]


def main(arguments: list[str]) -> None:
    from tests.paged import PagedModel, load_driver, with_quantizer

    folder, library, rank, size, address, experts = arguments
    moves = experts.endswith(" eplb")
    experts = experts.removesuffix(" eplb")
    question = json.load(sys.stdin)
    is_file = Path(folder).is_file()  # a GGUF file, whose matrices stay packed
    config = {} if is_file else json.loads((Path(folder) / "config.json").read_text())
    method = config.get("quantization_config", {}).get("quantization", "gguf" if is_file else "")
    model = PagedModel(
        Path(folder),
        library,
        rank=int(rank),
        tp_size=int(size),
        address=address,
        experts=experts,
        eplb={"step_interval": 3} if moves else None,
        drivers=with_quantizer(method) if method else load_driver,
        quantization="gguf" if is_file else None,
    )
    first = next(iter(question["prompts"].values()))
    tokens = model.greedy(question["prompts"], question["num_tokens"])
    logits = model.step([("logits", first)])[0][-1]
    balance = getattr(model.loaded.builder.expert_ranks, "balance", None)
    versions = [block.version for block in balance.blocks] if balance is not None else []
    model.close()
    found = {"tokens": tokens, "logits": logits.tolist(), "versions": versions}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
