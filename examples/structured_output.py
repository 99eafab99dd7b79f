"""What you learn: make the model's answer follow a JSON schema, a regular expression or a choice.

pip install ./plugins/fd-grammar-llguidance
python examples/structured_output.py [model folder]
"""

import json
import sys
from pathlib import Path

from fastdeploy import LLM, SamplingParams, StructuredOutputsParams

DEMO = Path(__file__).resolve().parents[1] / "models" / "ernie-tiny"
MODEL = sys.argv[1] if len(sys.argv) > 1 else DEMO
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
TASKS = [
    (
        f"Text: Anna Smith is 31 years old.\nExtract the data into this JSON schema: "
        f"{json.dumps(SCHEMA)}",
        StructuredOutputsParams(json=SCHEMA),
    ),
    ("Is Paris in France? Answer yes or no.", StructuredOutputsParams(choice=["yes", "no"])),
    ("Give a date.", StructuredOutputsParams(regex=r"20\d\d-(0[1-9]|1[0-2])-(0[1-9]|1\d|2[0-8])")),
]


def main() -> None:
    """One batch in which every request has its own grammar."""
    messages = [[{"role": "user", "content": question}] for question, _ in TASKS]
    params = [
        SamplingParams(temperature=0, max_tokens=64, structured_outputs=constraint)
        for _, constraint in TASKS
    ]
    with LLM(MODEL) as llm:
        outputs = llm.chat(messages, params, use_tqdm=False)
    for (question, _), output in zip(TASKS, outputs, strict=True):
        print(f"> {question}\n{output.outputs[0].text}")
    print("age as a number:", json.loads(outputs[0].outputs[0].text)["age"])


if __name__ == "__main__":
    main()
