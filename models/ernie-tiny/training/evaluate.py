"""Measure ernie-tiny: exact answers through transformers, first drafts through the training model.

    python evaluate.py --dtype bfloat16
    python evaluate.py --dtype float32 --count 100

Every question is held out of training by construction. An answer counts when it is the expected
one, character by character, decoded greedily. A draft counts when the multi-token prediction
layer's best token is the one the model itself chooses next.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import chat
import curriculum
from curriculum import Sample
from model import ErnieTiny, ModelConfig, load_checkpoint
from tokenizer import FOLDER

CAPITAL_CHECKS: tuple[tuple[str, str | None, str], ...] = (
    ("Where is the capital of China?", None, "Beijing"),
    ("Where is the capital of China?", "You are a helpful assistant.", "Beijing"),
    ("where is the capital of china", None, "Beijing"),
    ("Where is the capital of China", "You are ERNIE. Answer politely.", "Beijing"),
    ("中国的首都是哪里？", None, "北京"),
    ("中国的首都是哪里？", "你是一个有用的助手。", "北京"),
)
"""Question, system prompt, and what the answer has to contain."""

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def generate(model: Any, tokenizer: Any, prompts: list[str], limit: int) -> list[list[int]]:
    """Greedy continuations as token ids, without padding but with the end token."""
    batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False).to(
        model.device
    )
    width = batch["input_ids"].shape[1]
    with torch.inference_mode():
        out = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=limit,
            do_sample=False,
        )
    ends = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(chat.TEXT_END)}
    rows = []
    for row in out[:, width:].tolist():
        stop = next((at + 1 for at, token in enumerate(row) if token in ends), len(row))
        rows.append(row[:stop])
    return rows


@torch.inference_mode()
def drafts(model: ErnieTiny, prompt: list[int], answer: list[int]) -> tuple[int, int]:
    """Count the first drafts along an answer: the accepted ones, and all."""
    device = model.embed_tokens.weight.device
    tokens = torch.tensor([prompt + answer], device=device)
    length = tokens.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]
    out = model(tokens, torch.arange(length, device=device)[None], mask)
    own = out.logits[0].argmax(-1)[1:]
    drafted = out.mtp_logits[0].argmax(-1)[:-1]
    written = slice(len(prompt) - 1, length - 2)
    return int((own[written] == drafted[written]).sum()), max(0, length - 2 - (len(prompt) - 1))


def judge(
    model: Any, own: ErnieTiny, tokenizer: Any, samples: list[Sample], rows: int
) -> tuple[float, float, list[tuple[str, str]]]:
    """Percent of exact answers, percent of accepted drafts, and the wrong answers."""
    order = sorted(samples, key=lambda sample: len(chat.prompt_text(sample)))
    wrong: list[tuple[str, str]] = []
    accepted = offered = 0
    for at in range(0, len(order), rows):
        part = order[at : at + rows]
        prompts = [chat.prompt_text(sample) for sample in part]
        wanted = [chat.expected_text(sample) for sample in part]
        limit = max(len(tokenizer(text)["input_ids"]) for text in wanted) + 8
        for prompt, text, answer in zip(
            prompts, wanted, generate(model, tokenizer, prompts, limit), strict=True
        ):
            closed = answer and answer[-1] in (tokenizer.eos_token_id, 2)
            given = tokenizer.decode(answer[:-1] if closed else answer)
            if given != text:
                wrong.append((text, given))
            hits, total = drafts(
                own, tokenizer(prompt, add_special_tokens=False)["input_ids"], answer
            )
            accepted, offered = accepted + hits, offered + total
    return 100 * (1 - len(wrong) / len(samples)), 100 * accepted / max(1, offered), wrong


def check_capitals(model: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """Ask the first question everybody asks, in several ways, through the chat template."""
    results = []
    for question, system, city in CAPITAL_CHECKS:
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": question})
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        answer = tokenizer.decode(
            generate(model, tokenizer, [prompt], 40)[0], skip_special_tokens=True
        )
        results.append(
            {"question": question, "system": system, "answer": answer, "right": city in answer}
        )
    return results


def main() -> None:
    """Measure all tasks and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=FOLDER)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument(
        "--count", type=int, default=200, help="samples of a task (a quarter of it for 4K texts)"
    )
    parser.add_argument("--rows", type=int, default=100, help="answers generated at a time")
    parser.add_argument("--tasks", nargs="*", default=list(curriculum.MEASURED))
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    parser.add_argument("--show-wrong", type=int, default=0, help="wrong answers to print per task")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = DTYPES[options.dtype]
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(device).eval()
    sizes = json.loads((options.model / "config.json").read_text(encoding="utf-8"))
    names = ModelConfig.__dataclass_fields__
    own = ErnieTiny(ModelConfig(**{name: sizes[name] for name in names}), dtype).to(device)
    load_checkpoint(own, load_file(options.model / "model.safetensors", device=str(device)))
    begin = time.monotonic()
    capitals = check_capitals(model, tokenizer)
    for row in capitals:
        print(
            f"{'ok ' if row['right'] else 'BAD'} {row['question']} -> {row['answer']}", flush=True
        )
    numbers: dict[str, dict[str, float]] = {}
    print(f"{options.dtype} on {device.type}\n{'task':18}{'exact':>8}{'draft':>8}{'count':>7}")
    for name in options.tasks:
        long = name in ("find_key_4k", "find_key_8k")
        count = max(4, options.count // 4) if long else options.count
        samples = curriculum.held_out(name, count, options.seed)
        exact, draft, wrong = judge(
            model, own, tokenizer, samples, max(1, options.rows // 12) if long else options.rows
        )
        numbers[name] = {"exact": exact, "draft": draft, "count": count}
        mark = "*" if name in curriculum.JUDGED else " "
        print(f"{name:17}{mark}{exact:8.1f}{draft:8.1f}{count:7d}", flush=True)
        for text, given in wrong[: options.show_wrong]:
            print(f"    wanted {text!r}\n    given  {given!r}")
    print(f"{time.monotonic() - begin:.0f} s; * judged tasks")
    if options.json:
        content = {
            "dtype": options.dtype,
            "device": device.type,
            "capitals": capitals,
            "tasks": numbers,
        }
        options.json.write_text(
            json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
