"""Chats in which the model calls tools, reads their results, and thinks first if requested.

Calls have the Hermes format, which many models of the hub use: a JSON object with `name` and
`arguments` between `<tool_call>` and `</tool_call>`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from random import Random

    Document = tuple[tuple[str, str], ...]

TOOL_TOKENS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
THINK = "Think first."

_VERBS = ("get", "find", "read", "look_up", "fetch", "check", "show", "query", "search", "list")
_NOUNS = (
    *("weather", "time", "code", "price", "worker", "block", "city", "person", "queue", "token"),
    *("lease", "colour", "age", "news", "status", "load", "name", "size", "date", "road"),
)
_KEYS = {
    "city": "cities",
    "location": "cities",
    "name": "names",
    "thing": "things",
    "colour": "colours",
    "code": "codes",
    "query": "things",
}
_ASKS = (
    *("What is the {noun} of {value}?", "{noun} of {value}?", "What's the {noun} in {value}?"),
    *("Tell me the {noun} for {key} {value}.", "Use a tool: {noun}, {key} {value}"),
    *("I want the {noun} of {value}, please.", "Can you {verb} the {noun} of {value}?"),
    *("Call {tool} with {key} {value}.", "{verb} the {noun} for {value}"),
)
_DESCRIPTIONS = ("{verb} the {noun}", "{verb} the {noun} of a {key}", "{noun}", "The {noun}.", "")
_RESULTS = (
    *("ok", "ready", "12", "blue", "7", "busy", "rain", "open", "sun", "42", "cold", "late"),
    *("3 of 8", "Paris", "full", "empty", "108", "no", "yes", "snow", "fast"),
)


class ExampleTool(NamedTuple):
    """A function with one argument."""

    name: str
    noun: str
    key: str
    description: str

    def shown(self) -> str:
        """Return the tool's text in the chat template. The description is first, so that the words
        that a question refers to are right before the tool's name."""
        kind = "integer" if self.key == "id" else "string"
        text = f'"description": {json.dumps(self.description)}, ' if self.description else ""
        return f'{{{text}"name": "{self.name}", "parameters": {{"{self.key}": "{kind}"}}}}'

    def call(self, value: str | int) -> str:
        call = {"name": self.name, "arguments": {self.key: value}}
        return f"<tool_call>{json.dumps(call, ensure_ascii=False)}</tool_call>"


def system_text(said: str, tools: Sequence[ExampleTool], *, thinks: bool) -> str:
    """Return the system message as the chat template renders it from its parts."""
    shown = f"Tools: [{', '.join(tool.shown() for tool in tools)}]" if tools else ""
    return "\n".join(part for part in (said, shown, THINK if thinks else "") if part)


def _tools(rng: Random) -> list[ExampleTool]:
    tools = []
    for noun in rng.sample(_NOUNS, rng.choice((1, 2, 2, 3, 4))):
        verb, key = rng.choice(_VERBS), rng.choice((*_KEYS, "id"))
        parts = {"verb": verb.replace("_", " "), "noun": noun, "key": key}
        description = rng.choice(_DESCRIPTIONS).format(**parts)
        tools.append(ExampleTool(f"{verb}_{noun}", noun, key, description))
    return tools


def _value(rng: Random, key: str, words: Mapping[str, Sequence[str]]) -> str | int:
    return rng.randint(1, 99) if key == "id" else rng.choice(words[_KEYS[key]])


def _two_values(
    rng: Random, key: str, words: Mapping[str, Sequence[str]]
) -> tuple[str | int, str | int]:
    first = second = _value(rng, key, words)
    while second == first:
        second = _value(rng, key, words)
    return first, second


def tool_chat(
    rng: Random, words: Mapping[str, Sequence[str]], said: str, other: Document
) -> Document:
    """Return a chat with tools: one or two calls, with or without their results and the final
    answer. `said`: the user's system message, or "". `other`: an exchange without tools, which is
    before the call, after it, instead of it, or left out."""
    tools, thinks = _tools(rng), rng.random() < 0.3
    tool = rng.choice(tools)

    def thought(text: str) -> str:
        return f"<think>{text}</think>" if thinks else ""

    system = ("system", system_text(said, tools, thinks=thinks))
    answered = tuple(
        (role, thought("I need no tool.") + text if role == "assistant" else text)
        for role, text in other
    )
    draw = rng.random()
    if draw < 0.12:
        return (system, *answered)
    values = _two_values(rng, tool.key, words)
    values = values if rng.random() < 0.25 else values[:1]
    if len(values) == 2:
        question = f"What is the {tool.noun} of {values[0]} and of {values[1]}?"
        both = f"{values[0]} and of {values[1]}"
        why = f"I need the {tool.noun} of {both}, so I call {tool.name} twice."
    else:
        parts = {"noun": tool.noun, "value": values[0], "key": tool.key, "tool": tool.name}
        verb = tool.name.removesuffix("_" + tool.noun).replace("_", " ")
        question = rng.choice(_ASKS).format(**parts, verb=verb)
        why = f"I need the {tool.noun} of {values[0]}, so I call {tool.name}."
    if rng.random() < 0.2:
        question = question[:1].upper() + question[1:]
    call = "\n".join(tool.call(value) for value in values)
    messages = [system, ("user", question), ("assistant", thought(why) + call)]
    if draw < 0.2:
        messages[1:1] = answered
    if draw > 0.5:
        results = [rng.choice(_RESULTS) for _ in values]
        form = rng.choice(("json", "json", "plain"))
        for result in results:
            shown = json.dumps({tool.noun: result}) if form == "json" else result
            messages.append(("tool", shown))
        facts = zip(values, results, strict=True)
        answer = " ".join(f"The {tool.noun} of {value} is {result}." for value, result in facts)
        messages.append(("assistant", thought(f"The tool says {', '.join(results)}.") + answer))
        if draw > 0.9:
            messages += answered
    return tuple(messages)
