"""What you learn: offer the model a function, run the call it asks for, and let it answer.

pip install ./plugins/fd-parsers
python examples/tool_call.py [model folder]
"""

import json
import sys
from pathlib import Path

from fastdeploy import LLM, SamplingParams

DEMO = Path(__file__).resolve().parents[1] / "models" / "ernie-tiny"
MODEL = sys.argv[1] if len(sys.argv) > 1 else DEMO
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]


def get_weather(city: str) -> dict[str, object]:
    """Stands for a call to a service."""
    return {"temperature": 21, "sky": "sunny", "city": city}


def main() -> None:
    """Question, call, result, answer."""
    messages: list[dict[str, object]] = [
        {"role": "user", "content": "What is the weather in Paris?"}
    ]
    params = SamplingParams(temperature=0, max_tokens=96)
    with LLM(MODEL, tool_call_parser="hermes") as llm:
        answer = llm.chat(messages, params, use_tqdm=False, tools=TOOLS)[0].outputs[0]
        print("text:", answer.text, "\ncalls:", answer.tool_calls)
        for call in answer.tool_calls or []:
            result = get_weather(**json.loads(call["function"]["arguments"]))
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "content": json.dumps(result)})
        if answer.tool_calls:
            print(llm.chat(messages, params, use_tqdm=False, tools=TOOLS)[0].outputs[0].text)


if __name__ == "__main__":
    main()
