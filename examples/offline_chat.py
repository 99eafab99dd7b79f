"""What you learn: chat from Python, keep a conversation going, and see the model's thinking.

pip install ./plugins/fd-parsers
python examples/offline_chat.py [model folder]
"""

import sys
from pathlib import Path

from fastdeploy import LLM, SamplingParams

DEMO = Path(__file__).resolve().parents[1] / "models" / "ernie-tiny"
MODEL = sys.argv[1] if len(sys.argv) > 1 else DEMO
QUESTIONS = ["Hello! My name is Lin.", "Where is the capital of China?", "What is my name?"]


def main() -> None:
    """A short conversation, then one question with thinking switched on."""
    params = SamplingParams(temperature=0, max_tokens=64)
    messages: list[dict[str, str]] = []
    # The parser removes <think>...</think> from the text.
    with LLM(MODEL, reasoning_parser="qwen3") as llm:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            (output,) = llm.chat(messages, params, use_tqdm=False)
            answer = output.outputs[0].text
            messages.append({"role": "assistant", "content": answer})
            # The conversation so far was computed before, so it is found in the prefix cache.
            print(f"> {question}\n{answer}   [{output.num_cached_tokens} tokens cached]")

        (output,) = llm.chat(
            [{"role": "user", "content": "What is 17 + 25?"}],
            SamplingParams(temperature=0, max_tokens=128),
            use_tqdm=False,
            chat_template_kwargs={"enable_thinking": True},
        )
        print("> What is 17 + 25?")
        print("thinking:", output.outputs[0].reasoning_content)
        print("answer:", output.outputs[0].text)


if __name__ == "__main__":
    main()
