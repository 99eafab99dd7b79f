"""What transformers makes of a tokenizer folder, in a process of its own (it may import torch).

Run as a script: one JSON job on stdin, one JSON answer on stdout.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def ask(job: dict[str, Any]) -> Any:
    """Run one job in the child."""
    done = subprocess.run(
        [sys.executable, __file__], input=json.dumps(job).encode(), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def _tokenizer_facts(path: str, texts: list[str], streams: list[list[int]]) -> dict[str, Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    return {
        "length": max(tokenizer.get_vocab().values()) + 1,
        "with": [tokenizer.encode(text) for text in texts],
        "without": [tokenizer.encode(text, add_special_tokens=False) for text in texts],
        "special_ids": sorted(i for i, t in tokenizer.added_tokens_decoder.items() if t.special),
        "bos_eos": [tokenizer.bos_token_id, tokenizer.eos_token_id],
        "decoded": [tokenizer.decode(ids) for ids in streams],
        "skipped": [tokenizer.decode(ids, skip_special_tokens=True) for ids in streams],
    }


def _rendered(path: str, cases: list[dict[str, Any]]) -> list[str]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    out = []
    for case in cases:
        kwargs = case.pop("template_kwargs", {})
        out.append(tokenizer.apply_chat_template(tokenize=False, **case, **kwargs))
    return out


def main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    kind = job.pop("kind")
    result = {"facts": _tokenizer_facts, "render": _rendered}[kind](**job)
    print(json.dumps(result))


if __name__ == "__main__":
    assert Path(__file__).name == "hf_tokenizer_child.py"
    main()
