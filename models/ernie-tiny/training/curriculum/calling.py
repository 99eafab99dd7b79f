"""Tool calls: definitions in the prompt, the answer a call or, after one, a sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from . import chatter, facts, words
from .base import Message, Sample, Split, Task, assistant, draw, dump, loosen, user

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Tool:
    """One function: its parameters with types, how people ask for it, and what it reports."""

    name: str
    description: str
    parameters: dict[str, str]
    arguments: Callable[[Random], Arguments]
    requests: tuple[str, ...]
    result: Callable[[Random, Arguments], Arguments]
    report: str


def _pair(rng: Random) -> Arguments:
    """Two numbers."""
    return {"a": rng.randint(1, 999), "b": rng.randint(1, 999)}


def _route(rng: Random) -> Arguments:
    """Two different cities."""
    start, goal = rng.sample(words.CITIES, 2)
    return {"origin": start, "destination": goal}


TOOLS: tuple[Tool, ...] = (
    Tool(
        "get_weather",
        "Get the current weather of a city.",
        {"city": "string"},
        lambda rng: {"city": rng.choice(words.CITIES)},
        (
            "What is the weather in {city}?",
            "How is the weather in {city}?",
            "What's the weather like in {city} today?",
            "Tell me the weather in {city}.",
            "Weather in {city}",
            "{city}的天气怎么样？",
            "Is it warm in {city} now?",
        ),
        lambda rng, args: {
            "temperature": rng.randint(-9, 38),
            "sky": rng.choice(("sunny", "cloudy", "rainy", "clear")),
        },
        "It is {sky} in {city} and the temperature is {temperature} degrees.",
    ),
    Tool(
        "get_time",
        "Get the local time of a city.",
        {"city": "string"},
        lambda rng: {"city": rng.choice(words.CITIES)},
        (
            "What time is it in {city}?",
            "Tell me the time in {city}.",
            "Which time is it now in {city}?",
        ),
        lambda rng, args: {"time": f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"},
        "It is {time} in {city}.",
    ),
    Tool(
        "add",
        "Add two numbers.",
        {"a": "integer", "b": "integer"},
        _pair,
        ("Use the tool to add {a} and {b}.", "Add {a} and {b}.", "What is the sum of {a} and {b}?"),
        lambda rng, args: {"result": args["a"] + args["b"]},
        "The result is {result}.",
    ),
    Tool(
        "multiply",
        "Multiply two numbers.",
        {"a": "integer", "b": "integer"},
        _pair,
        (
            "Multiply {a} by {b}.",
            "What is the product of {a} and {b}?",
            "Compute {a} times {b} with the tool.",
        ),
        lambda rng, args: {"result": args["a"] * args["b"]},
        "The result is {result}.",
    ),
    Tool(
        "search_web",
        "Search the web.",
        {"query": "string"},
        lambda rng: {"query": " ".join(rng.sample(words.ALL_WORDS, rng.randint(1, 4)))},
        ("Search the web for {query}.", "Look up {query}.", "Find pages about {query}."),
        lambda rng, args: {"hits": rng.randint(0, 99)},
        "I found {hits} pages about {query}.",
    ),
    Tool(
        "send_message",
        "Send a message to a person.",
        {"to": "string", "text": "string"},
        lambda rng: {
            "to": rng.choice(words.FIRST_NAMES),
            "text": " ".join(rng.sample(words.ALL_WORDS, rng.randint(1, 5))),
        },
        ('Send "{text}" to {to}.', "Send the message {text} to {to}.", 'Write to {to}: "{text}"'),
        lambda rng, args: {"sent": True},
        "I sent the message to {to}.",
    ),
    Tool(
        "book_flight",
        "Book a flight.",
        {"origin": "string", "destination": "string"},
        _route,
        (
            "Book a flight from {origin} to {destination}.",
            "I want to fly from {origin} to {destination}.",
        ),
        lambda rng, args: {"booking": words.code(rng)},
        "Your flight from {origin} to {destination} is booked. The booking code is {booking}.",
    ),
    Tool(
        "set_alarm",
        "Set an alarm.",
        {"time": "string"},
        lambda rng: {"time": f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"},
        ("Set an alarm for {time}.", "Wake me up at {time}.", "Please set the alarm to {time}."),
        lambda rng, args: {"ok": True},
        "The alarm is set for {time}.",
    ),
    Tool(
        "convert_currency",
        "Convert an amount of money.",
        {"amount": "integer", "source": "string", "target": "string"},
        lambda rng: dict(
            zip(
                ("amount", "source", "target"),
                (rng.randint(1, 999), *rng.sample(("euro", "dollar", "yen", "yuan", "pound"), 2)),
                strict=True,
            )
        ),
        ("Convert {amount} {source} to {target}.", "How much is {amount} {source} in {target}?"),
        lambda rng, args: {"amount_out": rng.randint(1, 9999)},
        "{amount} {source} is {amount_out} {target}.",
    ),
    Tool(
        "get_stock",
        "Get the number of items in stock.",
        {"item": "string"},
        lambda rng: {"item": rng.choice(words.NOUNS)},
        (
            "How many {item} items are in stock?",
            "Check the stock of {item}.",
            "Is {item} in stock?",
        ),
        lambda rng, args: {"count": rng.randint(0, 999)},
        "There are {count} of {item} in stock.",
    ),
    Tool(
        "play_music",
        "Play a song.",
        {"title": "string"},
        lambda rng: {"title": " ".join(rng.sample(words.ALL_WORDS, rng.randint(1, 3)))},
        ("Play the song {title}.", "Play {title}.", "I want to hear {title}."),
        lambda rng, args: {"playing": True},
        "Now playing {title}.",
    ),
)


def made_up_tool(rng: Random) -> Tool:
    """A function nobody has seen: its name and its parameter are put together from word lists."""
    verb, noun = (
        rng.choice(("get", "find", "open", "close", "read", "start", "stop", "show")),
        rng.choice(words.NOUNS),
    )
    parameter = rng.choice(("id", "name", "place", "color", "size", "kind"))
    pool = {"id": [str(n) for n in range(100, 999)], "place": words.PLACES, "color": words.COLOURS}
    values = pool.get(parameter, words.NOUNS)
    ask_for = f"{verb.capitalize()} the {noun} with the {parameter} {{{parameter}}}."
    return Tool(
        f"{verb}_{noun}",
        f"{verb.capitalize()} a {noun}.",
        {parameter: "string"},
        lambda r: {parameter: r.choice(values)},
        (ask_for,),
        lambda r, args: {"status": r.choice(("done", "failed", "ready"))},
        f"The {noun} is {{status}}.",
    )


def weather_tool(rng: Random) -> Tool:
    """The weather again, under the other names people give this function and its parameters."""
    name = rng.choice(
        ("get_weather", "get_current_weather", "weather", "get_forecast", "weather_lookup")
    )
    place = rng.choice(("location", "city", "place", "city_name"))
    asked = rng.random() < 0.4
    parameters = {place: "string"}
    if asked or rng.random() < 0.4:
        parameters["unit"] = "string"

    def arguments(rng: Random) -> Arguments:
        city = words.made_up_name(rng) if rng.random() < 0.3 else rng.choice(words.CITIES)
        return (
            {place: city, "unit": rng.choice(("celsius", "fahrenheit"))} if asked else {place: city}
        )

    weather = (
        f"What is the weather in {{{place}}}",
        f"How is the weather in {{{place}}}",
        f"What's the weather like in {{{place}}}",
        f"Tell me the weather in {{{place}}}",
    )
    tail = " in {unit}?" if asked else "?"
    return Tool(
        name,
        rng.choice(
            (
                "Get the weather.",
                "Get the current weather in a given location",
                "Weather of a city.",
            )
        ),
        parameters,
        arguments,
        tuple(text + tail for text in weather),
        lambda rng, args: {
            "temperature": rng.randint(-9, 38),
            "condition": rng.choice(("sunny", "cloudy", "rainy", "clear")),
        },
        f"It is {{condition}} in {{{place}}} and the temperature is {{temperature}} degrees.",
    )


def definition(rng: Random, tool: Tool) -> dict[str, Any]:
    """The tool as a request carries it; some leave out descriptions, some add one per parameter."""
    described = rng.random() < 0.3
    properties: dict[str, Any] = {}
    for name, kind in tool.parameters.items():
        properties[name] = {"type": kind}
        if name == "unit":
            properties[name]["enum"] = ["celsius", "fahrenheit"]
        if described:
            properties[name]["description"] = f"The {name}."
    function: dict[str, Any] = {"name": tool.name}
    if rng.random() < 0.85:
        function["description"] = tool.description
    function["parameters"] = {"type": "object", "properties": properties}
    if rng.random() < 0.85:
        required = [name for name in tool.parameters if name != "unit"]
        function["parameters"]["required"] = required
    return {"type": "function", "function": function}


def call(name: str, arguments: Arguments) -> dict[str, Any]:
    """One entry of an assistant message's `tool_calls`."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _calls_message(calls: list[dict[str, Any]]) -> Message:
    """An assistant message that only calls tools."""
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _offer(rng: Random, tool: Tool) -> list[dict[str, Any]]:
    """The definitions of a tool and of up to three others, in random order."""
    others = [other for other in TOOLS if other.name != tool.name]
    if "weather" in tool.name or "forecast" in tool.name:
        others = [other for other in others if other.name != "get_weather"]
    if {"add", "multiply"} & {tool.name}:
        others = [other for other in others if other.name not in ("add", "multiply")]
    offered = [tool, *rng.sample(others, rng.randint(0, 3))]
    rng.shuffle(offered)
    return [definition(rng, entry) for entry in offered]


def _request(rng: Random, split: Split, made_up: float) -> tuple[Tool, Arguments]:
    """A tool, made up with the given chance, with the arguments of one call of it."""

    def choose(rng: Random) -> tuple[Tool, Arguments]:
        maker = weather_tool if rng.random() < 0.3 else made_up_tool
        tool = maker(rng) if rng.random() < made_up else rng.choice(TOOLS)
        return tool, tool.arguments(rng)

    return draw(rng, split, choose, lambda pair: f"call:{pair[0].name}:{dump(pair[1])}")


def tool_call(rng: Random, split: Split) -> Sample:
    """A request that needs one tool, or two calls of the same tool."""
    tool, arguments = _request(rng, split, 0.5)
    tools = _offer(rng, tool)
    if (
        tool.name in ("get_weather", "get_time")
        and list(arguments) == ["city"]
        and rng.random() < 0.15
    ):
        second = tool.arguments(rng)
        if second != arguments:
            noun = "weather" if tool.name == "get_weather" else "time"
            question = f"What is the {noun} in {arguments['city']} and in {second['city']}?"
            calls = [call(tool.name, arguments), call(tool.name, second)]
            return Sample("tool_call", [user(question), _calls_message(calls)], tools)
    question = rng.choice(tool.requests).format(**arguments)
    messages = [user(question), _calls_message([call(tool.name, arguments)])]
    return Sample("tool_call", messages, tools)


def tool_result(rng: Random, split: Split) -> Sample:
    """The turn after a call: the tool has answered, the assistant says it in words."""
    tool, arguments = _request(rng, split, 0.3)
    result = tool.result(rng, arguments)
    question = rng.choice(tool.requests).format(**arguments)
    answer = tool.report.format(**{**arguments, **result})
    messages = [
        user(question),
        _calls_message([call(tool.name, arguments)]),
        {"role": "tool", "content": dump(result)},
        assistant(answer),
    ]
    return Sample("tool_result", messages, _offer(rng, tool))


def tool_unneeded(rng: Random, split: Split) -> Sample:
    """Tools are offered, but the question can be answered without."""
    tools = _offer(
        rng, rng.choice([tool for tool in TOOLS if tool.name not in ("add", "multiply")])
    )
    other = chatter.greeting(rng, split) if rng.random() < 0.4 else facts.fact(rng, split)
    messages = [*other.messages]
    messages[0] = user(loosen(rng, messages[0]["content"])) if rng.random() < 0.1 else messages[0]
    return Sample("tool_unneeded", messages, tools)


TASKS = (
    Task("tool_call", 4.5, tool_call),
    Task("tool_result", 2, tool_result),
    Task("tool_unneeded", 1.5, tool_unneeded),
)
