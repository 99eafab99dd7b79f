"""What transformers makes of a tokenizer folder, in a process of its own (it may import torch).

Run as a script: the kind of job as argument, JSON jobs on stdin, JSON answers on stdout.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def ask(kind: str, jobs: list[dict[str, Any]]) -> Any:
    """Run jobs of one kind in the child; one answer each."""
    done = subprocess.run(
        [sys.executable, __file__, kind],
        input=json.dumps(jobs).encode(),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def _facts(path: str, texts: list[str], streams: list[list[int]]) -> dict[str, Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    added = tokenizer.added_tokens_decoder
    return {
        "length": max(tokenizer.get_vocab().values()) + 1,
        "with": [tokenizer.encode(text) for text in texts],
        "without": [tokenizer.encode(text, add_special_tokens=False) for text in texts],
        "special_ids": sorted(token_id for token_id, token in added.items() if token.special),
        "bos_eos": [tokenizer.bos_token_id, tokenizer.eos_token_id],
        "decoded": [tokenizer.decode(ids) for ids in streams],
        "skipped": [tokenizer.decode(ids, skip_special_tokens=True) for ids in streams],
    }


def _render(path: str, **case: Any) -> str:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    kwargs = case.pop("template_kwargs", {})
    messages = case.pop("messages")
    return tokenizer.apply_chat_template(messages, tokenize=False, **case, **kwargs)


def called(tokenizer: Any, text: str, messages: Any) -> list[Any]:
    """What users' programs ask of a tokenizer, of either class."""
    ids = tokenizer.encode(text)
    asked = {"tokenize": True, "add_generation_prompt": True, "return_dict": False}
    return [
        tokenizer(text).input_ids,
        tokenizer([text, text])["attention_mask"],
        tokenizer.tokenize(text),
        tokenizer.batch_decode([ids, ids[:3]], skip_special_tokens=True),
        tokenizer.convert_ids_to_tokens(ids),
        tokenizer.convert_tokens_to_ids(tokenizer.convert_ids_to_tokens(ids[1])),
        tokenizer.eos_token_id,
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),
        tokenizer.apply_chat_template([messages, messages], **asked),
        tokenizer.apply_chat_template(messages, enable_thinking=True, **asked),
    ]


def _called(path: str, **asked: Any) -> list[Any]:
    from transformers import AutoTokenizer

    return called(AutoTokenizer.from_pretrained(path), **asked)


def main() -> None:
    """One kind of job, many jobs."""
    function = {"facts": _facts, "render": _render, "called": _called}[sys.argv[1]]
    jobs = json.loads(sys.stdin.buffer.read())
    print(json.dumps([function(**job) for job in jobs]))


if __name__ == "__main__":
    main()
