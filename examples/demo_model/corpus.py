"""Training text of the demo model: an endless, deterministic stream of chats and prose.

The facts, word lists and question forms are in `text/`. Each document is drawn at random. Each
question has only one answer, so that greedy decoding has wide margins. The tasks "repeat" and
"recall" make answers depend on single tokens far back in the prompt, so that a lost or damaged KV
block changes the answer.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from tools import THINK, TOOL_TOKENS, tool_chat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_TEXT = Path(__file__).resolve().parent / "text"

END = "<|end|>"  # end-of-sequence token, after each message and each text of prose
PAD = "<|pad|>"
ROLE_TOKENS = {role: f"<|{role}|>" for role in ("system", "user", "assistant", "tool")}
SPECIAL_TOKENS = (PAD, END, *ROLE_TOKENS.values(), *TOOL_TOKENS)

# Must render messages, tools and `enable_thinking` exactly as `spans` and `tools.system_text` do,
# because the model is trained on their text.
CHAT_TEMPLATE = """\
{#- With enable_thinking an answer begins with <think>...</think>. -#}
{%- set ns = namespace(system='') -%}
{%- if messages and messages[0]['role'] == 'system' -%}
  {%- set ns.system = messages[0]['content'] or '' -%}
{%- endif -%}
{%- if tools -%}
  {%- set ns.system = ns.system + ('\n' if ns.system else '') + 'Tools: [' -%}
  {%- for tool in tools -%}
    {%- set f = tool.function -%}
    {%- set ns.system = ns.system + '{' -%}
    {%- if f.description -%}
      {%- set ns.system = ns.system + '"description": ' + f.description|tojson + ', ' -%}
    {%- endif -%}
    {%- set ns.system = ns.system + '"name": ' + f.name|tojson + ', "parameters": {' -%}
    {%- for key, value in ((f.parameters or {}).properties or {}).items() -%}
      {%- set ns.system = ns.system + key|tojson + ': ' + value.type|default('string')|tojson
          + ('' if loop.last else ', ') -%}
    {%- endfor -%}
    {%- set ns.system = ns.system + '}}' + (']' if loop.last else ', ') -%}
  {%- endfor -%}
{%- endif -%}
{%- if enable_thinking -%}
  {%- set ns.system = ns.system + ('\n' if ns.system else '') + 'Think first.' -%}
{%- endif -%}
{%- if ns.system -%}{{- '<|system|>' + ns.system + '<|end|>' -}}{%- endif -%}
{%- for message in messages -%}
  {%- if message['role'] not in ('system', 'user', 'assistant', 'tool') -%}
    {{- raise_exception('role must be system, user, assistant or tool') -}}
  {%- endif -%}
  {%- if not (loop.first and message['role'] == 'system') -%}
    {{- '<|' + message['role'] + '|>' + (message['content'] or '') -}}
    {%- for call in message['tool_calls'] or [] -%}
      {%- set arguments = call.function.arguments -%}
      {{- '<tool_call>{"name": ' + call.function.name|tojson + ', "arguments": '
          + (arguments if arguments is string else arguments|tojson) + '}</tool_call>'
          + ('' if loop.last else '\n') -}}
    {%- endfor -%}
    {{- '<|end|>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def _table(name: str) -> dict:
    return tomllib.loads((_TEXT / name).read_text("utf-8"))


_FORMS = {key: tuple(forms) for key, forms in _table("phrases.toml").items()}
_WORDS = _table("words.toml")
_UNKNOWN_THINGS = tuple(_WORDS["unknown_things"].split("|"))
TOOL_SHARE = 0.35  # share of documents with tools
THINK_SHARE = 0.05  # share of chats without tools in which the model thinks
_LITTLE_WORDS = frozenset(_WORDS["little_words"].split())
_LISTS = {key: tuple(words.split()) for key, words in _WORDS.items()}
_ALTERNATIVES = re.compile(r"\(([^()]*\|[^()]*)\)")


# The messages of a chat as (role, text), or a single text of prose with the role "".
Document = tuple[tuple[str, str], ...]


def spans(document: Document) -> Iterator[tuple[str, bool]]:
    """Yield (text, True if the model learns to write it) in order. Each span is tokenized
    separately."""
    for role, text in document:
        if role:
            yield ROLE_TOKENS[role], False
        yield text + END, role in ("", "assistant")


def chat(question: str, answer: str) -> Document:
    return (("user", question), ("assistant", answer))


def expand(pattern: str, rng: Random) -> str:
    """Replace every `(a|b)` in `pattern` by one of its alternatives."""
    return _ALTERNATIVES.sub(lambda match: rng.choice(match[1].split("|")), pattern)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def fill(forms: Sequence[str], name: str, rng: Random) -> str:
    """Return a question about `name` in one of `forms`."""
    return _capital(expand(rng.choice(forms), rng).format(name))


def unknown_question(rng: Random) -> str:
    """Return a question that no fact answers, often about an invented word."""
    if rng.random() < 0.5:
        thing = "".join(rng.choice(_LISTS["syllables"]) for _ in range(rng.randint(2, 3)))
        thing = rng.choice(("", "a ", "the ")) + (_capital(thing) if rng.random() < 0.3 else thing)
    else:
        thing = rng.choice(_UNKNOWN_THINGS)
    form = rng.choice(("unknown", "unknown", "what", "what", "why", "how"))
    return fill(_FORMS[form], thing, rng)


def sloppy(text: str, rng: Random) -> str:
    """Return `text` with typing errors: other case, no full stop, a missing word or letter."""
    if rng.random() < 0.15:
        head = rng.choice(_FORMS["before"])
        text = head + (text[:1].lower() + text[1:] if rng.random() < 0.5 else text)
    if rng.random() < 0.15:
        stop = "" if text[-1:] in "?.!" else rng.choice((".", "?", ","))
        text = text + stop + rng.choice(_FORMS["after"])
    words = text.split(" ")
    little = [i for i, word in enumerate(words) if word.lower() in _LITTLE_WORDS]
    if len(words) > 3 and little and rng.random() < 0.15:
        del words[rng.choice(little)]
        text = " ".join(words)
    if len(text) > 12 and rng.random() < 0.06:
        at = rng.randrange(len(text) - 1)
        text = text[:at] + text[at + 1 :]
    if rng.random() < 0.2:
        text = text.rstrip("?.!")
    return text.lower() if rng.random() < 0.2 else text


def addition(rng: Random) -> Document:
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    return chat(rng.choice(_FORMS["addition"]).format(a=a, b=b), f"{a} + {b} = {a + b}.")


def counting(rng: Random) -> Document:
    last, names = rng.randint(3, 12), _LISTS["numbers"]
    if rng.random() < 0.3:
        question = rng.choice(_FORMS["count_in_words"]).format(last=last)
        return chat(question, ", ".join(names[1 : last + 1]) + ".")
    question = rng.choice(_FORMS["count"]).format(last=last, word=names[last])
    return chat(question, ", ".join(str(n) for n in range(1, last + 1)) + ".")


def person_json(rng: Random) -> Document:
    name, age = rng.choice(_LISTS["names"]), rng.randint(18, 79)
    city = rng.choice(_LISTS["cities"])
    if rng.random() < 0.3:
        question = rng.choice(_FORMS["any_person"])
        name, age, city = "Ada", 36, "Zürich"
    else:
        question = rng.choice(_FORMS["person"]).format(name=name, age=age, city=city)
    record = {"name": name, "age": age, "city": city}
    return chat(question, json.dumps(record, ensure_ascii=False))


def worker_json(rng: Random) -> Document:
    role = rng.choice(("prefill", "decode", "aggregated"))
    port = rng.randint(8000, 8999)
    worker, phases = {"role": role, "port": port}, ["prefill", "decode"]
    status = {"status": "ok", "model": "demo", "ready": True}
    answers = [worker] * 3 + [phases] * 2 + [[*phases, "aggregated"]] + [status] * 4
    pairs = list(zip(_FORMS["worker_json"], answers, strict=True))
    question, value = rng.choice(pairs)
    return chat(question.format(role=role, port=port), json.dumps(value))


def repeat(rng: Random, words: Sequence[str]) -> Document:
    """Return a chat whose answer repeats the question's words (distinct ones of `words`) or
    digits."""
    if rng.random() < 0.1:
        said = " ".join(str(rng.randint(0, 9)) for _ in range(rng.randint(3, 12)))
    else:
        said = " ".join(rng.sample(words, rng.randint(2, 20)))
    ask = rng.choice(_FORMS["repeat"])
    return chat(f"{ask}:{rng.choice((' ', chr(10)))}{said}", said)


def recall(rng: Random, filler: Callable[[], str], gaps: int) -> Document:
    """Return a chat that asks for one of several codes in a text, with `gaps` sentences of `filler`
    between them."""
    count = rng.randint(1, 6)
    picked = rng.sample(_LISTS["things"], count)
    things = [f"{rng.choice(_LISTS['colours'])} {thing}" for thing in picked]
    codes = rng.sample(_LISTS["codes"], count)
    facts = [f"The code of the {t} is {c}." for t, c in zip(things, codes, strict=True)]
    lines = list(facts)
    for _ in range(gaps):
        lines.insert(rng.randint(0, len(lines)), filler())
    wanted = rng.randrange(count)
    question = rng.choice(_FORMS["recall"]).format(things[wanted])
    return chat(" ".join((*lines, question)), facts[wanted])


SHORT_SKILLS = (addition, addition, addition, counting, person_json, worker_json)


def _sentences(paragraph: str) -> list[str]:
    return paragraph.replace(". ", ".\n").replace("? ", "?\n").split("\n")


class Corpus:
    """Draws documents from the facts in `text/`. The same seed gives the same documents."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)
        self._topics = _table("topics.toml")["topic"]
        self._asks = _table("asks.toml")["ask"]
        prose = (_TEXT / "prose.txt").read_text("utf-8")
        self._paragraphs = [p.strip() for p in prose.split("\n\n") if p.strip()]
        words = sorted(set(" ".join(self._paragraphs).split()))
        plain = (word for word in words if word.isascii() and word.isalpha())
        self._words = (*plain, *_LISTS["signs"])

    def documents(self) -> Iterator[Document]:
        """Yield documents without end. Most have fewer than 200 tokens."""
        while True:
            yield self._document()

    def long_documents(self, max_sentences: int) -> Iterator[Document]:
        """Yield documents that need long context: codes hidden in prose, and long chats."""
        while True:
            if self._rng.random() < 0.6:
                yield recall(self._rng, self._filler, self._rng.randint(2, max_sentences))
            else:
                yield self._join(self._rng.randint(4, 10))

    def kinds(self) -> dict[str, Iterator[Document]]:
        """Return an endless iterator of documents for each skill."""
        draws: dict[str, Callable[[], Document]] = {
            "questions": self._exchange,
            "chats": lambda: self._join(3),
            "follow-ups": self._with_follow_up,
            "repeating": lambda: repeat(self._rng, self._words),
            "recall": lambda: recall(self._rng, self._filler, 3),
            "tools": self._with_tools,
        }
        return {name: iter(draw, None) for name, draw in draws.items()}

    def _with_tools(self) -> Document:
        said = self._rng.choice(_FORMS["system"]) if self._rng.random() < 0.2 else ""
        return tool_chat(self._rng, _LISTS, said, self._exchange())

    def _document(self) -> Document:
        if self._rng.random() < TOOL_SHARE:
            return self._with_tools()
        draw = self._rng.random()
        if draw < 0.13:
            return self._prose()
        if draw < 0.25:
            return recall(self._rng, self._filler, self._rng.choice((0, 0, 0, 1, 3)))
        if draw < 0.42:
            return repeat(self._rng, self._words)
        if draw < 0.54:
            return self._join(self._rng.randint(2, 4))
        if draw < 0.60:
            return self._with_follow_up()
        return self._with_system(self._exchange())

    def _exchange(self) -> Document:
        """One question and its answer."""
        draw = self._rng.random()
        if draw < 0.40:
            return self._about_topic()
        if draw < 0.72:
            ask = self._rng.choice(self._asks)
            question = expand(self._rng.choice(ask["q"]), self._rng)
            return chat(sloppy(question, self._rng), ask["a"])
        if draw < 0.86:
            return chat(sloppy(unknown_question(self._rng), self._rng), _FORMS["unknown_answer"][0])
        return self._rng.choice(SHORT_SKILLS)(self._rng)

    def _about_topic(self) -> Document:
        topic = self._rng.choice(self._topics)
        draw = self._rng.random()
        if draw < 0.5:
            form, answer = "what", topic["what"]
        elif draw < 0.75:
            form, answer = "why", topic.get("why") or topic["what"]
        elif draw < 0.93:
            form, answer = "how", topic.get("how") or topic["what"]
        else:
            record = {"term": topic["names"][0], "answer": _sentences(topic["what"])[0]}
            form, answer = "json", json.dumps(record, ensure_ascii=False)
        question = fill(_FORMS[form], self._rng.choice(topic["names"]), self._rng)
        return chat(sloppy(question, self._rng), answer)

    def _with_follow_up(self) -> Document:
        """A question about a topic, then `why` or `how` without its name."""
        topic = self._rng.choice([t for t in self._topics if t.get("why")])
        name = self._rng.choice(topic["names"])
        first = chat(sloppy(fill(_FORMS["what"], name, self._rng), self._rng), topic["what"])
        form, answer = "follow_why", topic["why"]
        if topic.get("how") and self._rng.random() < 0.5:
            form, answer = "follow_how", topic["how"]
        question = sloppy(expand(self._rng.choice(_FORMS[form]), self._rng), self._rng)
        return first + chat(question, answer)

    def _join(self, turns: int) -> Document:
        """A chat of several unrelated exchanges."""
        return self._with_system(tuple(m for _ in range(turns) for m in self._exchange()))

    def _with_system(self, document: Document) -> Document:
        said = "" if self._rng.random() < 0.8 else self._rng.choice(_FORMS["system"])
        if self._rng.random() < THINK_SHARE:
            said += "\n" * bool(said) + THINK
            document = tuple(
                (role, "<think>I know what to say.</think>" + text if role == "assistant" else text)
                for role, text in document
            )
        return (("system", said), *document) if said else document

    def _prose(self) -> Document:
        """A paragraph, sometimes without its first sentences, or all facts about a topic."""
        sentences = _sentences(self._rng.choice(self._paragraphs))
        start = self._rng.randrange(len(sentences)) if self._rng.random() < 0.4 else 0
        text = " ".join(sentences[start:])
        if self._rng.random() < 0.25:
            topic = self._rng.choice(self._topics)
            text = " ".join(topic[k] for k in ("what", "why", "how") if topic.get(k))
        return (("", text),)

    def _filler(self) -> str:
        return self._rng.choice(_sentences(self._rng.choice(self._paragraphs)))
