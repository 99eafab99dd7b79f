"""One rank of two that runs target and drafter and prints the drafts after a prompt.

usage: mtp_rank.py FOLDER LIBRARY ADDRESS RANK [token, ...] [METHOD OPTIONS]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(
    folder: str,
    library: str,
    address: str,
    rank: str,
    prompt: str,
    method: str = "mtp",
    options: str = "{}",
) -> None:
    from tests.plugins.mtp_rig import Bench, Feed

    tokens, place = json.loads(prompt), {"rank": int(rank), "tp_size": 2, "address": address}
    bench = Bench(Path(folder), library, 3, json.loads(options), method=method, **place)
    bench.add("a", tokens)
    drafts = bench.step([Feed("a", len(tokens) - 1)])
    logits = [row.tolist() for row in bench.drawn_logits]
    if bench.communicator is not None:
        bench.communicator.close()
    sys.stdout.write(json.dumps({"drafts": drafts.tolist(), "logits": logits}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
