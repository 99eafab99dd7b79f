"""What you learn: continue several prompts at once from Python, each with its own parameters.

python examples/offline_generate.py [model folder]
"""

import sys
from pathlib import Path

from fastdeploy import LLM, SamplingParams

DEMO = Path(__file__).resolve().parents[1] / "models" / "ernie-tiny"
MODEL = sys.argv[1] if len(sys.argv) > 1 else DEMO


def main() -> None:
    """Two prompts in one batch, then one prompt as a stream."""
    prompts = ["The capital of France is", "Count from one to ten: one, two,"]
    params = [
        SamplingParams(temperature=0, max_tokens=16),
        # Equal seeds give equal answers, independent of the other requests in the batch.
        SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=32, stop=["\n"]),
    ]
    with LLM(MODEL) as llm:
        # Outputs come in the order of the prompts.
        for output in llm.generate(prompts, params):
            answer = output.outputs[0]
            print(f"{output.prompt!r} -> {answer.text!r} ({answer.finish_reason})")

        print("streamed: ", end="")
        for piece in llm.generate(prompts[0], params[0], stream=True):
            print(piece.outputs[0].text, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
