"""The demo model's training text: an endless, deterministic stream of chats and prose.

The facts are in `text/`; the ways to ask for them are drawn anew for every document. A question
has one answer, so that greedy choices have wide margins.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Final

from pdserve.demo import phrasing, skills
from pdserve.demo.documents import Document, Message, chat
from pdserve.demo.texts import read_table, read_text, read_words

_SYSTEM_PROMPTS: Final = (
    "You are a helpful assistant.",
    "You are the demo model of pdserve.",
    "You are a helpful assistant. Answer briefly.",
    "You answer questions about serving language models.",
    "Be friendly and short.",
    "You are a careful expert for inference systems. Answer in plain English.",
    "",
)


@dataclass(frozen=True, slots=True)
class Topic:
    """A term, the ways to name it, and what there is to say about it (empty: nothing special)."""

    names: tuple[str, ...]
    what: str
    why: str
    how: str


@dataclass(frozen=True, slots=True)
class Ask:
    """Patterns of a question, and its answer."""

    patterns: tuple[str, ...]
    answer: str


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that the corpus is made from."""

    topics: tuple[Topic, ...]
    asks: tuple[Ask, ...]
    paragraphs: tuple[str, ...]


def load_facts() -> Facts:
    """Read the text files beside this module."""
    topics = read_table("topics.toml")["topic"]
    asks = read_table("asks.toml")["ask"]
    prose = read_text("prose.txt")
    return Facts(
        tuple(
            Topic(tuple(t["names"]), t["what"], t.get("why", ""), t.get("how", "")) for t in topics
        ),
        tuple(Ask(tuple(a["q"]), a["a"]) for a in asks),
        tuple(paragraph.strip() for paragraph in prose.split("\n\n") if paragraph.strip()),
    )


def _sentences(paragraph: str) -> list[str]:
    return paragraph.replace(". ", ".\n").replace("? ", "?\n").split("\n")


class Corpus:
    """Draws documents from the facts. Owns its random state: each call moves it on."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)
        self._facts = load_facts()
        prose = sorted(set(" ".join(self._facts.paragraphs).split()))
        plain = (word for word in prose if word.isascii() and word.isalpha())
        self._words = (*plain, *read_words("signs"))

    def documents(self) -> Iterator[Document]:
        """Documents of mostly less than 200 tokens, for ever."""
        while True:
            yield self._document()

    def long_documents(self, max_sentences: int) -> Iterator[Document]:
        """Documents that need a long look back: codes hidden in prose, and chats of many turns."""
        while True:
            if self._rng.random() < 0.6:
                gaps = self._rng.randint(2, max_sentences)
                yield skills.recall(self._rng, self._filler, gaps)
            else:
                yield self._join(self._rng.randint(4, 10))

    def _document(self) -> Document:
        draw = self._rng.random()
        if draw < 0.13:
            return self._prose()
        if draw < 0.25:
            return skills.recall(self._rng, self._filler, self._rng.choice((0, 0, 0, 1, 3)))
        if draw < 0.42:
            return skills.repeat(self._rng, self._words)
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
            ask = self._rng.choice(self._facts.asks)
            question = phrasing.expand(self._rng.choice(ask.patterns), self._rng)
            return chat(phrasing.sloppy(question, self._rng), ask.answer)
        if draw < 0.86:
            question = phrasing.unknown_question(self._rng)
            return chat(phrasing.sloppy(question, self._rng), phrasing.UNKNOWN_ANSWER)
        return self._rng.choice(skills.SHORT_SKILLS)(self._rng)

    def _about_topic(self) -> Document:
        topic = self._rng.choice(self._facts.topics)
        draw = self._rng.random()
        if draw < 0.5:
            forms, answer = phrasing.WHAT, topic.what
        elif draw < 0.75:
            forms, answer = phrasing.WHY, topic.why or topic.what
        elif draw < 0.93:
            forms, answer = phrasing.HOW, topic.how or topic.what
        else:
            sentence = _sentences(topic.what)[0]
            record = {"term": topic.names[0], "answer": sentence}
            forms, answer = phrasing.JSON, json.dumps(record, ensure_ascii=False)
        question = phrasing.fill(forms, self._rng.choice(topic.names), self._rng)
        return chat(phrasing.sloppy(question, self._rng), answer)

    def _with_follow_up(self) -> Document:
        """A topic, then `why` or `how` without its name."""
        topic = self._rng.choice([t for t in self._facts.topics if t.why])
        name = self._rng.choice(topic.names)
        first = chat(
            phrasing.sloppy(phrasing.fill(phrasing.WHAT, name, self._rng), self._rng), topic.what
        )
        forms, answer = phrasing.FOLLOW_WHY, topic.why
        if topic.how and self._rng.random() < 0.5:
            forms, answer = phrasing.FOLLOW_HOW, topic.how
        question = phrasing.sloppy(phrasing.expand(self._rng.choice(forms), self._rng), self._rng)
        return Document((*first.messages, *chat(question, answer).messages))

    def _join(self, turns: int) -> Document:
        """A chat of several exchanges that have nothing to do with each other."""
        messages = [m for _ in range(turns) for m in self._exchange().messages]
        return self._with_system(Document(tuple(messages)))

    def _with_system(self, document: Document) -> Document:
        if self._rng.random() < 0.8:
            return document
        system = Message("system", self._rng.choice(_SYSTEM_PROMPTS))
        return Document((system, *document.messages))

    def _prose(self) -> Document:
        """A paragraph, sometimes from a later sentence on, sometimes with another one after it."""
        sentences = _sentences(self._rng.choice(self._facts.paragraphs))
        start = self._rng.randrange(len(sentences)) if self._rng.random() < 0.4 else 0
        text = " ".join(sentences[start:])
        if self._rng.random() < 0.25:
            topic = self._rng.choice(self._facts.topics)
            text = " ".join(part for part in (topic.what, topic.why, topic.how) if part)
        return Document(prose=text)

    def _filler(self) -> str:
        return self._rng.choice(_sentences(self._rng.choice(self._facts.paragraphs)))
