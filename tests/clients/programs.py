"""What users of each client library write, with nothing changed but the address: chat, stream,
tools, structured output, pictures, embeddings, loads. Runs in an environment that has the client
and not FastDeploy.

    python programs.py CLIENT URL MODEL URL MODEL URL MODEL    # reads, sees pictures, embeds

Prints a line for each task: its name, then ok or what failed.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

QUESTION = "Where is the capital of China?"
WEATHER = "What is the weather in Paris?"
# As the demo model was taught to be asked.
PERSON = (
    "Text: Anna Smith is 31 years old.\nExtract the data into this JSON schema: "
    '{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, '
    '"required": ["name", "age"]}'
)
REPOSITORY = Path(__file__).resolve().parents[2]
MODELS, PICTURE = REPOSITORY / "models", REPOSITORY / "examples" / "shapes.png"
DATA = base64.b64encode(PICTURE.read_bytes()).decode()
ASKED = "What color is the star?"
PARTS = [
    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{DATA}"}},
    {"type": "text", "text": ASKED},
]
TEXTS = ["a red circle", "the capital of China", "a red circle"]
KEY = "none"
LIMIT = 200  # tokens; the demo model may not stop in texts that it was never shown


class Person(BaseModel):
    """Bounded, so that any model comes to an end."""

    name: Annotated[str, Field(max_length=20)]
    age: Annotated[int, Field(ge=0, le=150)]


def get_weather(city: str) -> str:
    """Get the weather of a city.

    Args:
        city: Name of the city.
    """
    return f"21 degrees and sunny in {city}"


def noting(called: list[str]) -> Callable[[str], str]:
    """get_weather, which also notes the cities that it is asked for."""

    def noted(city: str) -> str:
        """Get the weather of a city."""
        called.append(city)
        return get_weather(city)

    noted.__name__ = "get_weather"
    return noted


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def says_beijing(text: Any) -> None:
    assert "Beijing" in str(text), repr(text)


def says_blue(text: Any) -> None:
    assert "blue" in str(text), repr(text)


def is_streamed(pieces: list[str]) -> None:
    assert len([piece for piece in pieces if piece]) > 1, pieces
    says_beijing("".join(pieces))


def calls_weather(name: str, arguments: str | dict[str, Any]) -> None:
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert (name, given) == ("get_weather", {"city": "Paris"}), (name, arguments)


def is_anna(person: Any) -> None:
    assert person == Person(name="Anna Smith", age=31), person


def are_embeddings(vectors: Any) -> None:
    """Of TEXTS, whose first and last are the same."""
    first, other, again = vectors
    assert len(first) == len(other) > 1
    assert max(abs(a - b) for a, b in zip(first, again, strict=True)) < 1e-4
    assert max(abs(a - b) for a, b in zip(first, other, strict=True)) > 1e-3


def runs(command: str, *arguments: str | Path) -> None:
    """A command of the client's own environment."""
    line = [Path(sys.executable).with_name(command), *arguments]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]


class OpenAI:
    package = "openai"

    def __init__(self, url: str, model: str) -> None:
        import openai

        client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY)
        self.api, self.fields = client.chat.completions, {"model": model, "temperature": 0}
        self.embeddings, self.model = client.embeddings, model

    def chat(self) -> None:
        answer = self.api.create(messages=[{"role": "user", "content": QUESTION}], **self.fields)
        says_beijing(answer.choices[0].message.content)

    def stream(self) -> None:
        asked = [{"role": "user", "content": QUESTION}]
        chunks = self.api.create(messages=asked, stream=True, **self.fields)
        is_streamed([c.choices[0].delta.content or "" for c in chunks if c.choices])

    def tools(self) -> None:
        asked = [{"role": "user", "content": WEATHER}]
        message = self.api.create(messages=asked, tools=[TOOL], **self.fields).choices[0].message
        (call,) = message.tool_calls
        calls_weather(call.function.name, call.function.arguments)

    def structured(self) -> None:
        asked = [{"role": "user", "content": PERSON}]
        answer = self.api.parse(messages=asked, response_format=Person, **self.fields)
        is_anna(answer.choices[0].message.parsed)

    def picture(self) -> None:
        answer = self.api.create(messages=[{"role": "user", "content": PARTS}], **self.fields)
        says_blue(answer.choices[0].message.content)

    def embed(self) -> None:
        answer = self.embeddings.create(input=TEXTS, model=self.model)
        are_embeddings([entry.embedding for entry in answer.data])


class LiteLLM:
    package = "litellm"

    def __init__(self, url: str, model: str) -> None:
        import litellm

        self.complete = litellm.completion
        self.fields = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": KEY}
        self.fields["temperature"] = 0

    def chat(self) -> None:
        answer = self.complete(messages=[{"role": "user", "content": QUESTION}], **self.fields)
        says_beijing(answer.choices[0].message.content)

    def stream(self) -> None:
        asked = [{"role": "user", "content": QUESTION}]
        chunks = self.complete(messages=asked, stream=True, **self.fields)
        is_streamed([c.choices[0].delta.content or "" for c in chunks])

    def tools(self) -> None:
        asked = [{"role": "user", "content": WEATHER}]
        answer = self.complete(messages=asked, tools=[TOOL], **self.fields)
        (call,) = answer.choices[0].message.tool_calls
        calls_weather(call.function.name, call.function.arguments)

    def structured(self) -> None:
        asked = [{"role": "user", "content": PERSON}]
        answer = self.complete(messages=asked, response_format=Person, **self.fields)
        is_anna(Person.model_validate_json(answer.choices[0].message.content))

    def picture(self) -> None:
        answer = self.complete(messages=[{"role": "user", "content": PARTS}], **self.fields)
        says_blue(answer.choices[0].message.content)

    def embed(self) -> None:
        import litellm

        place = {name: self.fields[name] for name in ("model", "api_base", "api_key")}
        answer = litellm.embedding(input=TEXTS, **place)
        are_embeddings([entry["embedding"] for entry in answer.data])


class LangChain:
    package = "langchain-openai"

    def __init__(self, url: str, model: str) -> None:
        from langchain_openai import ChatOpenAI, OpenAIEmbeddings

        place = {"base_url": f"{url}/v1", "api_key": KEY, "model": model}
        self.embeddings = OpenAIEmbeddings(**place, check_embedding_ctx_length=False)
        self.llm = ChatOpenAI(base_url=f"{url}/v1", api_key=KEY, model=model, temperature=0)

    def chat(self) -> None:
        says_beijing(self.llm.invoke(QUESTION).content)

    def stream(self) -> None:
        is_streamed([chunk.content for chunk in self.llm.stream(QUESTION)])

    def tools(self) -> None:
        (call,) = self.llm.bind_tools([get_weather]).invoke(WEATHER).tool_calls
        calls_weather(call["name"], call["args"])

    def structured(self) -> None:
        is_anna(self.llm.with_structured_output(Person).invoke(PERSON))

    def picture(self) -> None:
        """In the API's form, and in the library's own."""
        from langchain_core.messages import HumanMessage

        own = {"type": "image", "base64": DATA, "mime_type": "image/png"}
        for part in (PARTS[0], own):
            asked = HumanMessage(content=[part, PARTS[1]])
            says_blue(self.llm.invoke([asked]).content)

    def embed(self) -> None:
        are_embeddings(self.embeddings.embed_documents(TEXTS))


class LlamaIndex:
    package = "llama-index-llms-openai-like"

    def __init__(self, url: str, model: str) -> None:
        from llama_index.core.llms import ChatMessage
        from llama_index.llms.openai_like import OpenAILike

        self.llm = OpenAILike(
            model=model,
            api_base=f"{url}/v1",
            api_key=KEY,
            is_chat_model=True,
            is_function_calling_model=True,
            should_use_structured_outputs=True,
            temperature=0,
            max_tokens=LIMIT,
            context_window=1024,
        )
        self.ask = lambda text: [ChatMessage(role="user", content=text)]

    def chat(self) -> None:
        says_beijing(self.llm.chat(self.ask(QUESTION)).message.content)

    def stream(self) -> None:
        is_streamed([r.delta or "" for r in self.llm.stream_chat(self.ask(QUESTION))])

    def tools(self) -> None:
        from llama_index.core.tools import FunctionTool

        tool = FunctionTool.from_defaults(get_weather)
        answer = self.llm.chat_with_tools([tool], user_msg=WEATHER)
        (call,) = self.llm.get_tool_calls_from_response(answer)
        calls_weather(call.tool_name, call.tool_kwargs)

    def structured(self) -> None:
        is_anna(self.llm.as_structured_llm(Person).chat(self.ask(PERSON)).raw)

    def picture(self) -> None:
        from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock

        blocks = [ImageBlock(path=PICTURE), TextBlock(text=ASKED)]
        says_blue(self.llm.chat([ChatMessage(role="user", blocks=blocks)]).message.content)


class Instructor:
    package = "instructor"

    def __init__(self, url: str, model: str) -> None:
        import instructor
        import openai

        client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY)
        self.of = lambda mode: instructor.from_openai(client, mode=getattr(instructor.Mode, mode))
        self.fields = {"model": model, "temperature": 0, "max_tokens": LIMIT}
        self.fields["messages"] = [{"role": "user", "content": PERSON}]

    def tools(self) -> None:
        found = self.of("TOOLS").chat.completions.create(response_model=Person, **self.fields)
        assert isinstance(found, Person)  # a forced call of a function that the model never saw

    def structured(self) -> None:
        api = self.of("JSON_SCHEMA").chat.completions
        assert isinstance(api.create(response_model=Person, **self.fields), Person)

    def stream(self) -> None:
        api = self.of("JSON_SCHEMA").chat.completions
        parts = list(api.create_partial(response_model=Person, **self.fields))
        assert len(parts) > 1 and parts[-1].age is not None

    def chat(self) -> None:
        fields = {**self.fields, "messages": [{"role": "user", "content": QUESTION}]}
        answer = self.of("TOOLS").chat.completions.create(response_model=None, **fields)
        says_beijing(answer.choices[0].message.content)

    def picture(self) -> None:
        import instructor

        shown = instructor.Image.from_path(PICTURE)
        fields = {**self.fields, "messages": [{"role": "user", "content": [shown, ASKED]}]}
        answer = self.of("TOOLS").chat.completions.create(response_model=None, **fields)
        says_blue(answer.choices[0].message.content)


class PydanticAI:
    package = "pydantic-ai-slim"

    def __init__(self, url: str, model: str) -> None:
        from pydantic_ai import Agent, NativeOutput
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        provider = OpenAIProvider(base_url=f"{url}/v1", api_key=KEY)
        chat = OpenAIChatModel(model, provider=provider)
        settings = {"temperature": 0, "max_tokens": LIMIT}
        self.agent = lambda **more: Agent(chat, model_settings=settings, **more)
        self.native = NativeOutput(Person)
        self.place = {"model_name": model, "provider": provider}

    def chat(self) -> None:
        says_beijing(self.agent().run_sync(QUESTION).output)

    async def stream(self) -> None:
        async with self.agent().run_stream(QUESTION) as answer:
            pieces = [text async for text in answer.stream_text(delta=True, debounce_by=None)]
        is_streamed(pieces)

    def tools(self) -> None:
        called: list[str] = []
        self.agent(tools=[noting(called)]).run_sync(WEATHER)
        assert called == ["Paris"], called

    def structured(self) -> None:
        is_anna(self.agent(output_type=self.native).run_sync(PERSON).output)

    def picture(self) -> None:
        from pydantic_ai import BinaryContent

        shown = BinaryContent(data=PICTURE.read_bytes(), media_type="image/png")
        says_blue(self.agent().run_sync([shown, ASKED]).output)

    async def embed(self) -> None:
        from pydantic_ai import Embedder
        from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel

        embedder = Embedder(OpenAIEmbeddingModel(**self.place))
        are_embeddings((await embedder.embed_documents(TEXTS)).embeddings)


class OpenAIAgents:
    package = "openai-agents"

    def __init__(self, url: str, model: str) -> None:
        import agents
        import openai

        agents.set_tracing_disabled(True)
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY)
        chat = agents.OpenAIChatCompletionsModel(model=model, openai_client=client)
        settings = agents.ModelSettings(temperature=0, max_tokens=LIMIT)
        self.agents = agents
        self.agent = lambda **more: agents.Agent(
            name="a", model=chat, model_settings=settings, **more
        )

    async def chat(self) -> None:
        says_beijing((await self.agents.Runner.run(self.agent(), QUESTION)).final_output)

    async def stream(self) -> None:
        run = self.agents.Runner.run_streamed(self.agent(), QUESTION)
        pieces = [
            event.data.delta
            async for event in run.stream_events()
            if event.type == "raw_response_event"
            and event.data.type == "response.output_text.delta"
        ]
        is_streamed(pieces)

    async def tools(self) -> None:
        called: list[str] = []
        tool = self.agents.function_tool(noting(called))
        await self.agents.Runner.run(self.agent(tools=[tool]), WEATHER)
        assert called == ["Paris"], called

    async def structured(self) -> None:
        run = await self.agents.Runner.run(self.agent(output_type=Person), PERSON)
        is_anna(run.final_output)

    async def picture(self) -> None:
        shown = {"type": "input_image", "image_url": PARTS[0]["image_url"]["url"], "detail": "auto"}
        parts = [shown, {"type": "input_text", "text": ASKED}]
        asked = [{"role": "user", "content": parts}]
        says_blue((await self.agents.Runner.run(self.agent(), asked)).final_output)


class DSPy:
    package = "dspy"

    def __init__(self, url: str, model: str) -> None:
        import dspy

        options = {"temperature": 0, "max_tokens": LIMIT, "cache": False}
        place = {"api_base": f"{url}/v1", "api_key": KEY}
        self.lm = dspy.LM(f"openai/{model}", **place, **options)
        self.embedder = dspy.Embedder(f"openai/{model}", caching=False, **place)

    def chat(self) -> None:
        (answer,) = self.lm(messages=[{"role": "user", "content": QUESTION}])
        says_beijing(answer if isinstance(answer, str) else answer["text"])

    async def stream(self) -> None:
        import dspy

        class Ask(dspy.Module):
            async def aforward(self, lm: Any) -> Any:
                asked = [{"role": "user", "content": QUESTION}]
                return dspy.Prediction(answer=await lm.aforward(messages=asked))

        with dspy.context(lm=self.lm):
            program = dspy.streamify(Ask(), is_async_program=True)
            pieces = [piece async for piece in program(lm=self.lm)]
        chunks = [piece for piece in pieces if not isinstance(piece, dspy.Prediction)]
        is_streamed([chunk.choices[0].delta.content or "" for chunk in chunks])

    def picture(self) -> None:
        (answer,) = self.lm(messages=[{"role": "user", "content": PARTS}])
        says_blue(answer if isinstance(answer, str) else answer["text"])

    def tools(self) -> None:
        """A tool call in the function-calling form of the API."""
        (answer,) = self.lm(messages=[{"role": "user", "content": WEATHER}], tools=[TOOL])
        (call,) = answer["tool_calls"]
        calls_weather(call.function.name, call.function.arguments)

    def structured(self) -> None:
        asked = [{"role": "user", "content": PERSON}]
        (answer,) = self.lm(messages=asked, response_format=Person)
        text = answer if isinstance(answer, str) else answer["text"]
        is_anna(Person.model_validate_json(text))

    def embed(self) -> None:
        are_embeddings(self.embedder(TEXTS).tolist())


class Haystack:
    package = "haystack-ai"

    def __init__(self, url: str, model: str) -> None:
        from haystack.components.generators.chat import OpenAIChatGenerator
        from haystack.dataclasses import ChatMessage
        from haystack.utils import Secret

        settings = {"temperature": 0, "max_tokens": LIMIT}
        self.generator = lambda **more: OpenAIChatGenerator(
            api_key=Secret.from_token(KEY),
            model=model,
            api_base_url=f"{url}/v1",
            generation_kwargs={**settings, **more.pop("settings", {})},
            **more,
        )
        self.ask = lambda text: [ChatMessage.from_user(text)]
        self.place = {"model": model, "api_base_url": f"{url}/v1"}

    def chat(self) -> None:
        says_beijing(self.generator().run(self.ask(QUESTION))["replies"][0].text)

    def picture(self) -> None:
        from haystack.dataclasses import ChatMessage, ImageContent

        shown = ImageContent(base64_image=DATA, mime_type="image/png")
        asked = ChatMessage.from_user(content_parts=[shown, ASKED])
        says_blue(self.generator().run([asked])["replies"][0].text)

    def stream(self) -> None:
        pieces: list[str] = []
        self.generator(streaming_callback=lambda chunk: pieces.append(chunk.content or "")).run(
            self.ask(QUESTION)
        )
        is_streamed(pieces)

    def tools(self) -> None:
        from haystack.tools import Tool

        function = TOOL["function"]
        tool = Tool(
            name=function["name"],
            description=function["description"],
            parameters=function["parameters"],
            function=get_weather,
        )
        (call,) = self.generator(tools=[tool]).run(self.ask(WEATHER))["replies"][0].tool_calls
        calls_weather(call.tool_name, call.arguments)

    def structured(self) -> None:
        generator = self.generator(settings={"response_format": Person})
        text = generator.run(self.ask(PERSON))["replies"][0].text
        is_anna(Person.model_validate_json(text))

    def embed(self) -> None:
        from haystack.components.embedders import OpenAITextEmbedder
        from haystack.utils import Secret

        embedder = OpenAITextEmbedder(api_key=Secret.from_token(KEY), **self.place)
        are_embeddings([embedder.run(text)["embedding"] for text in TEXTS])


class MistralAI:
    package = "mistralai"

    def __init__(self, url: str, model: str) -> None:
        from mistralai.client import Mistral

        client = Mistral(server_url=url, api_key=KEY)
        self.api, self.embeddings = client.chat, client.embeddings
        self.fields, self.model = {"model": model, "temperature": 0}, model

    def chat(self) -> None:
        """A second turn, too, with the first one's thinking given back as the library has it."""
        asked = [{"role": "user", "content": QUESTION}]
        for _ in range(2):
            answer = self.api.complete(messages=asked, **self.fields).choices[0].message.content
            says_beijing(answer)
            thought = {"type": "thinking", "thinking": [{"type": "text", "text": "I know this."}]}
            said = {"role": "assistant", "content": [thought, {"type": "text", "text": answer}]}
            asked = [*asked, said, *asked]

    def stream(self) -> None:
        asked = [{"role": "user", "content": QUESTION}]
        events = self.api.stream(messages=asked, **self.fields)
        is_streamed([event.data.choices[0].delta.content or "" for event in events])

    def tools(self) -> None:
        asked = [{"role": "user", "content": WEATHER}]
        for choice in ("auto", "any"):
            answer = self.api.complete(
                messages=asked, tools=[TOOL], tool_choice=choice, **self.fields
            )
            (call,) = answer.choices[0].message.tool_calls
            calls_weather(call.function.name, call.function.arguments)

    structured = OpenAI.structured  # the same call

    def picture(self) -> None:
        answer = self.api.complete(messages=[{"role": "user", "content": PARTS}], **self.fields)
        says_blue(answer.choices[0].message.content)

    def embed(self) -> None:
        answer = self.embeddings.create(model=self.model, inputs=TEXTS)
        are_embeddings([entry.embedding for entry in answer.data])


class Cohere:
    package = "cohere"

    def __init__(self, url: str, model: str) -> None:
        import cohere

        self.client, self.model = cohere.ClientV2(api_key=KEY, base_url=url), model

    def embed(self) -> None:
        """And the texts ranked by their likeness to the first one."""
        asked = {"input_type": "search_document", "embedding_types": ["float"]}
        are_embeddings(self.client.embed(model=self.model, texts=TEXTS, **asked).embeddings.float_)
        ranked = self.client.rerank(model=self.model, query=TEXTS[0], documents=TEXTS)
        assert {result.index for result in ranked.results[:2]} == {0, 2}, ranked


class Smolagents:
    package = "smolagents"

    def __init__(self, url: str, model: str) -> None:
        from smolagents import ChatMessage, OpenAIServerModel

        self.model = OpenAIServerModel(
            model_id=model, api_base=f"{url}/v1", api_key=KEY, temperature=0, max_tokens=LIMIT
        )
        self.ask = lambda text: [ChatMessage(role="user", content=[{"type": "text", "text": text}])]

    def chat(self) -> None:
        says_beijing(self.model.generate(self.ask(QUESTION)).content)

    def stream(self) -> None:
        is_streamed([d.content or "" for d in self.model.generate_stream(self.ask(QUESTION))])

    def tools(self) -> None:
        from smolagents import tool

        answer = self.model.generate(self.ask(WEATHER), tools_to_call_from=[tool(get_weather)])
        call, *_ = answer.tool_calls  # it forces calls and does not say how many
        calls_weather(call.function.name, call.function.arguments)

    def structured(self) -> None:
        schema = {"name": "person", "schema": Person.model_json_schema()}
        wanted = {"type": "json_schema", "json_schema": schema}
        answer = self.model.generate(self.ask(PERSON), response_format=wanted)
        is_anna(Person.model_validate_json(answer.content))

    def picture(self) -> None:
        from PIL import Image
        from smolagents import ChatMessage

        parts = [{"type": "image", "image": Image.open(PICTURE)}, {"type": "text", "text": ASKED}]
        says_blue(self.model.generate([ChatMessage(role="user", content=parts)]).content)


class Anthropic:
    package = "anthropic"

    def __init__(self, url: str, model: str) -> None:
        import anthropic

        self.api = anthropic.Anthropic(base_url=url, api_key=KEY).messages
        self.fields = {"model": model, "max_tokens": LIMIT, "extra_body": {"temperature": 0}}

    def chat(self) -> None:
        answer = self.api.create(messages=[{"role": "user", "content": QUESTION}], **self.fields)
        says_beijing(answer.content[0].text)

    def stream(self) -> None:
        asked = [{"role": "user", "content": QUESTION}]
        with self.api.stream(messages=asked, **self.fields) as stream:
            is_streamed(list(stream.text_stream))

    def tools(self) -> None:
        function = TOOL["function"]
        tool = {k: function[k] for k in ("name", "description")}
        tool["input_schema"] = function["parameters"]
        asked = [{"role": "user", "content": WEATHER}]
        answer = self.api.create(messages=asked, tools=[tool], **self.fields)
        (call,) = (block for block in answer.content if block.type == "tool_use")
        calls_weather(call.name, call.input)

    def structured(self) -> None:
        asked = [{"role": "user", "content": PERSON}]
        answer = self.api.parse(messages=asked, output_format=Person, **self.fields)
        is_anna(answer.parsed_output)

    def picture(self) -> None:
        source = {"type": "base64", "media_type": "image/png", "data": DATA}
        parts = [{"type": "image", "source": source}, {"type": "text", "text": ASKED}]
        answer = self.api.create(messages=[{"role": "user", "content": parts}], **self.fields)
        says_blue(answer.content[0].text)


class LMEval:
    """Scores and generates through the API, tokenizing through the server's own routes."""

    package = "lm-eval"

    def __init__(self, url: str, model: str) -> None:
        from lm_eval.api.instance import Instance
        from lm_eval.models.openai_completions import LocalCompletionsAPI

        self.lm = LocalCompletionsAPI(
            model=model,
            base_url=f"{url}/v1/completions",
            tokenizer_backend="remote",
            tokenized_requests=False,
            max_length=1024,
        )
        self.instance = Instance

    def score(self) -> None:
        pairs = [("The capital of China is", " Beijing"), ("The capital of China is", " Berlin")]
        asked = [
            self.instance(request_type="loglikelihood", doc={}, arguments=pair, idx=i)
            for i, pair in enumerate(pairs)
        ]
        (beijing, _), (berlin, _) = self.lm.loglikelihood(asked)
        assert beijing > berlin, (beijing, berlin)

    def generate(self) -> None:
        arguments = ("The capital of China is", {"until": ["."], "max_gen_toks": 16})
        asked = self.instance(request_type="generate_until", doc={}, arguments=arguments, idx=0)
        says_beijing(self.lm.generate_until([asked])[0])


class Guidance:
    """Its class for OpenAI's API; grammars through the one for vLLM's."""

    package = "guidance"

    def __init__(self, url: str, model: str) -> None:
        from guidance import models
        from guidance.models.experimental import VLLMModel

        place = {"base_url": f"{url}/v1", "api_key": KEY, "echo": False}
        self.model = models.OpenAI(model, **place)
        self.of_vllm = VLLMModel(model=model, **place)

    def _said(self, text: str, step: Any, model: Any = None) -> Any:
        from guidance import assistant, user

        state = self.model if model is None else model  # an empty one is false
        with user():
            state += text
        with assistant():
            state += step
        return state

    def chat(self) -> None:
        from guidance import gen

        says_beijing(self._said(QUESTION, gen("answer", max_tokens=24))["answer"])

    def stream(self) -> None:
        from guidance import gen, guidance

        @guidance(dedent=False)  # a function within a function
        def talk(state: Any) -> Any:
            return self._said(QUESTION, gen("answer"), state)

        states = list(self.model.stream() + talk())
        assert len(states) > 2, len(states)
        says_beijing(states[-1]["answer"])

    def tools(self) -> None:
        from guidance import gen

        called: list[str] = []

        def get_weather(city: str) -> str:
            """Get the weather of a city."""
            called.append(city)
            return "21 degrees"

        self._said(WEATHER, gen(tools=[get_weather]))
        assert called == ["Paris"], called

    def structured(self) -> None:
        import guidance

        state = self._said(PERSON, guidance.json("person", schema=Person))
        is_anna(Person.model_validate_json(state["person"]))
        age = guidance.gen("age", regex="[0-9]{2}")
        state = self._said("How old is Anna Smith?", age, self.of_vllm)
        assert state["age"].isdecimal() and len(state["age"]) == 2, state["age"]


class Outlines:
    """Its class for OpenAI's API; regular expressions and grammars through the one for vLLM's."""

    package = "outlines"

    def __init__(self, url: str, model: str) -> None:
        import openai
        import outlines

        client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY)
        self.models = outlines.from_openai(client, model), outlines.from_vllm(client, model)
        self.fields = {"temperature": 0, "max_tokens": LIMIT}

    def chat(self) -> None:
        for model in self.models:
            says_beijing(model(QUESTION, **self.fields))

    def stream(self) -> None:
        for model in self.models:
            is_streamed(list(model.stream(QUESTION, **self.fields)))

    def structured(self) -> None:
        from typing import Literal

        from outlines.types import CFG, Regex

        for model in self.models:
            is_anna(Person.model_validate_json(model(PERSON, Person, **self.fields)))
        of_vllm = self.models[1]
        digits = of_vllm("How old is Anna Smith?", Regex("[0-9]{2}"), **self.fields)
        assert digits.isdecimal() and len(digits) == 2, digits
        assert of_vllm("Yes or no?", Literal["yes", "no"], **self.fields) in ("yes", "no")
        answer = of_vllm("Say ab.", CFG('start: "a" "b"'), **self.fields)
        assert answer == "ab", answer

    def picture(self) -> None:
        import outlines
        from PIL import Image

        shown = outlines.inputs.Image(Image.open(PICTURE))
        for model in self.models:
            says_blue(model([ASKED, shown], **self.fields))


class InspectAI:
    package = "inspect-ai"

    def __init__(self, url: str, model: str) -> None:
        from inspect_ai.model import GenerateConfig, get_model

        config = GenerateConfig(temperature=0, max_tokens=LIMIT)
        self.with_config = lambda **more: get_model(
            f"openai-api/fastdeploy/{model}",
            base_url=f"{url}/v1",
            api_key=KEY,
            config=config,
            memoize=False,
            **more,
        )
        self.of_vllm = lambda: get_model(
            f"vllm/{model}", base_url=f"{url}/v1", api_key=KEY, config=config
        )

    async def chat(self) -> None:
        for model in (self.with_config(), self.of_vllm()):
            says_beijing((await model.generate(QUESTION)).completion)

    async def stream(self) -> None:
        says_beijing((await self.with_config(stream=True).generate(QUESTION)).completion)

    async def tools(self) -> None:
        from inspect_ai.tool import ToolDef

        tool = ToolDef(
            get_weather,
            "get_weather",
            "Get the weather of a city.",
            parameters={"city": "Name of the city."},
        )
        answer = await self.with_config().generate(WEATHER, tools=[tool])
        (call,) = answer.message.tool_calls
        calls_weather(call.function, call.arguments)

    async def structured(self) -> None:
        from inspect_ai.model import GenerateConfig, ResponseSchema
        from inspect_ai.util import json_schema

        wanted = ResponseSchema(name="person", json_schema=json_schema(Person))
        config = GenerateConfig(response_schema=wanted)
        answer = await self.with_config().generate(PERSON, config=config)
        is_anna(Person.model_validate_json(answer.completion))

    async def picture(self) -> None:
        from inspect_ai.model import ChatMessageUser, ContentImage, ContentText

        shown = ContentImage(image=PARTS[0]["image_url"]["url"])
        asked = ChatMessageUser(content=[shown, ContentText(text=ASKED)])
        says_blue((await self.with_config().generate([asked])).completion)

    async def score(self) -> None:
        """An evaluation of one question."""
        from inspect_ai import Task, eval_async
        from inspect_ai.dataset import Sample
        from inspect_ai.scorer import includes

        task = Task(dataset=[Sample(input=QUESTION, target="Beijing")], scorer=includes())
        (log,) = await eval_async(task, model=self.with_config(), log_dir=tempfile.mkdtemp())
        assert log.status == "success", log.error
        assert log.results.scores[0].metrics["accuracy"].value == 1.0


class GuideLLM:
    """A short load, with its tokenizer made from the model's folder."""

    package = "guidellm"

    def __init__(self, url: str, model: str) -> None:
        self.url, self.model = url, model

    def load(self) -> None:
        folder = Path(tempfile.mkdtemp())
        for kind in ("/v1/chat/completions", "/v1/completions"):
            backend = f"kind=openai_http,target={self.url},model={self.model},request_format={kind}"
            runs(
                *("guidellm", "run", "--backend", backend, "--disable-console"),
                *("--profile", "kind=concurrent,streams=2"),
                *("--constraint", "kind=max_requests,count=6"),
                *("--tokenizer", f"kind=hf_auto,model={MODELS / self.model}"),
                *("--data", "kind=synthetic_text,prompt_tokens=24,output_tokens=8"),
                *("--output", f"kind=json,path={folder / 'report.json'}"),
            )
            (report,) = json.loads((folder / "report.json").read_text())["benchmarks"]
            made = report["metrics"]["request_totals"]
            assert made["successful"] >= 6 and not made["errored"], made


class AIPerf:
    """Short loads, with its tokenizer made from the model's folder."""

    package = "aiperf"

    def __init__(self, url: str, model: str) -> None:
        self.url, self.model = url, model

    def load(self) -> None:
        for kind in ("chat", "messages"):
            self._profile(kind, "--streaming")

    def embed(self) -> None:
        self._profile("embeddings")

    def _profile(self, kind: str, *more: str) -> None:
        folder = Path(tempfile.mkdtemp())
        runs(
            *("aiperf", "profile", "-m", self.model, "-u", self.url, "--endpoint-type", kind),
            *("--tokenizer", MODELS / self.model, "--concurrency", "2", "--request-count", "6"),
            *("--isl", "24", "--osl", "8", "--ui", "none", "--artifact-dir", folder, *more),
        )
        (file,) = folder.glob("**/profile_export_aiperf.json")
        report = json.loads(file.read_text())
        assert report["request_count"]["avg"] == 6, report["request_count"]
        assert not report.get("error_summary"), report["error_summary"]


CLIENTS: dict[str, Callable[[str, str], Any]] = {
    client.package: client
    for client in (
        *(OpenAI, LiteLLM, LangChain, LlamaIndex, Instructor, PydanticAI, OpenAIAgents, DSPy),
        *(Haystack, Smolagents, Anthropic, LMEval, Guidance, Outlines, InspectAI, GuideLLM),
        *(AIPerf, MistralAI, Cohere),
    )
}
TASKS = ("chat", "stream", "tools", "structured", "score", "generate", "picture", "embed", "load")


def main(name: str, *places: str) -> int:
    """Run every task that the client has; 1 if one failed. places: see above."""
    print(f"version {version(name)}", flush=True)
    reads, sees, embeds = (CLIENTS[name](*places[at : at + 2]) for at in (0, 2, 4))
    others = {"picture": sees, "embed": embeds}
    failed = False
    loop = asyncio.new_event_loop()  # one for all: clients keep connections
    for task in TASKS:
        if (run := getattr(others.get(task, reads), task, None)) is None:
            continue
        try:
            done = run()
            if inspect.isawaitable(done):
                loop.run_until_complete(done)
        except Exception as error:
            failed = True
            traceback.print_exc()
            print(
                f"\n{task} {type(error).__name__}: {' '.join(str(error).split())[:200]}", flush=True
            )
        else:
            print(f"\n{task} ok", flush=True)  # a library may have left a line unfinished
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
