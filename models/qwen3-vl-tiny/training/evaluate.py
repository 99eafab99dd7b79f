"""Measure qwen3-vl-tiny through transformers: exact answers to questions about held-out pictures.

    python evaluate.py
    python evaluate.py --count 50 --tasks word number

An answer counts when it is the expected one, character by character, decoded greedily.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoTokenizer, Qwen2VLImageProcessorPil, Qwen3VLForConditionalGeneration

import chat
from tokenizer import FOLDER


class Reader:
    """The model in a folder, as transformers runs it."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
        model: Any = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=dtype)
        self.model = model.to(device).eval()
        self.image = self.tokenizer.convert_tokens_to_ids("<|image_pad|>")

    @torch.inference_mode()
    def answer(self, pictures: list[Image.Image], question: str, limit: int = 48) -> list[int]:
        """The tokens of the answer, without that of its end."""
        content = [{"type": "image"} for _ in pictures] + [{"type": "text", "text": question}]
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        seen = self.processor(pictures, return_tensors="pt")
        counts = (seen["image_grid_thw"].prod(1) // 4).tolist()
        ids = []
        for token in self.tokenizer(text, add_special_tokens=False)["input_ids"]:
            ids += [token] * (counts.pop(0) if token == self.image else 1)
        tokens = torch.tensor([ids])
        given = {"input_ids": tokens, "mm_token_type_ids": (tokens == self.image).int(), **seen}
        out = self.model.generate(
            **{k: v.to(self.model.device) for k, v in given.items()},
            attention_mask=torch.ones_like(tokens).to(self.model.device),
            max_new_tokens=limit,
            do_sample=False,
        )
        found: list[int] = out[0, len(ids) :].tolist()
        end = self.tokenizer.eos_token_id
        return found[: found.index(end)] if end in found else found

    def say(self, pictures: list[Image.Image], question: str) -> str:
        """The answer."""
        text: str = self.tokenizer.decode(self.answer(pictures, question))
        return text


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=FOLDER)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--count", type=int, default=200, help="samples of a task")
    parser.add_argument("--tasks", nargs="*", default=chat.SCORED)
    parser.add_argument("--show-wrong", type=int, default=0, help="wrong answers to print per task")
    options = parser.parse_args()
    reader = Reader(options.model, getattr(torch, options.dtype))
    begin = time.monotonic()
    print(f"{options.dtype} on {reader.model.device.type}")
    print("| task | exact, % | of the first 10 |\n|---|---|---|")
    for task in options.tasks:
        right, wrong = [], []
        for pictures, question, answer in chat.samples(task, options.count):
            said = reader.say(pictures, question)
            right.append(said == answer)
            if said != answer:
                wrong.append((question, answer, said))
        percent = 100 * sum(right) / len(right)
        print(f"| {task} | {percent:.1f} | {sum(right[:10])} |", flush=True)
        for question, answer, said in wrong[: options.show_wrong]:
            print(f"    {question}\n    wanted {answer}\n    said   {said}")
    print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
