"""transformers' beam search, in a process of its own: it needs torch, whatever the engine runs on.

python oracle.py MODEL < CASES > ANSWERS    # both JSON; each answer: [[token ids, score], ...]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

Answer = list[tuple[list[int], float]]


def ask(model: Path, cases: list[dict[str, Any]]) -> list[Answer]:
    """The best continuations of each case, best first, with their scores."""
    done = subprocess.run(
        [sys.executable, __file__, str(model)],
        input=json.dumps(cases),
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers = json.loads(done.stdout)
    return [[(tokens, score) for tokens, score in answer] for answer in answers]


def _answer(model: Any, case: dict[str, Any]) -> list[Any]:
    import torch

    prompt = torch.tensor([case["prompt"]])
    said = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        num_beams=case["width"],
        num_return_sequences=case["width"],
        max_new_tokens=case["max_tokens"],
        length_penalty=case["length_penalty"],
        early_stopping=case["early_stopping"],
        eos_token_id=case["stop_ids"],
        pad_token_id=0,
        repetition_penalty=1.0,
        temperature=None,
        top_p=None,
        top_k=None,
        return_dict_in_generate=True,
        output_scores=True,
    )
    found = []
    for row, score in zip(said.sequences.tolist(), said.sequences_scores.tolist(), strict=True):
        tokens = row[prompt.shape[1] :]
        ends = [place for place, token in enumerate(tokens) if token in case["stop_ids"]]
        found.append((tokens[: ends[0] + 1] if ends else tokens, score))
    return found


if __name__ == "__main__":
    import transformers

    asked = json.load(sys.stdin)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="float32")
    json.dump([_answer(loaded.eval(), case) for case in asked], sys.stdout)
