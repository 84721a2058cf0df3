"""Small tasks whose answers are computed: sums, counting, JSON, repeating, and recall.

Repeating and recall make the answer depend on single tokens far back in the prompt. That is what
lets a test notice that a block of the KV cache was lost, swapped or changed.
"""

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Final

from pdserve.demo.documents import Document, chat
from pdserve.demo.texts import read_words

_COLOURS: Final = read_words("colours")
_THINGS: Final = read_words("things")
_NAMES: Final = read_words("names")
_CITIES: Final = read_words("cities")
_CODES: Final = read_words("codes")
_NUMBERS: Final = read_words("numbers")


def addition(rng: Random) -> Document:
    """`a + b` for small numbers, written in several ways."""
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    question = rng.choice(
        (
            f"What is {a} + {b}?",
            f"{a} + {b}",
            f"{a} + {b} = ?",
            f"How much is {a} plus {b}?",
            f"What is {a} plus {b}?",
            f"Calculate {a} + {b}",
            f"Add {a} and {b}",
        )
    )
    return chat(question, f"{a} + {b} = {a + b}.")


def counting(rng: Random) -> Document:
    """Count up from one, in digits or in words."""
    last = rng.randint(3, 12)
    if rng.random() < 0.3:
        question = rng.choice((f"Count to {last} in words", f"Count in words from one to {last}"))
        return chat(question, ", ".join(_NUMBERS[1 : last + 1]) + ".")
    question = rng.choice(
        (
            f"Count to {last}",
            f"Count from 1 to {last}",
            f"Please count up to {last}.",
            f"Can you count to {last}?",
            f"Count from one to {_NUMBERS[last]}",
        )
    )
    return chat(question, ", ".join(str(n) for n in range(1, last + 1)) + ".")


def person_json(rng: Random) -> Document:
    """A person as a JSON object, with the fields given or invented."""
    name, age, city = rng.choice(_NAMES), rng.randint(18, 79), rng.choice(_CITIES)
    if rng.random() < 0.3:
        question = rng.choice(
            (
                "Give me a person as JSON",
                "Return a JSON object with name, age and city",
                "Make up a person in JSON",
                "Write a JSON object that describes a person",
            )
        )
        name, age, city = "Ada", 36, "Zürich"
    else:
        question = rng.choice(
            (
                f"{name} is {age} years old and lives in {city}. Answer in JSON.",
                f"Write JSON: {name}, {age}, {city}",
                f"Make a JSON object for {name}, age {age}, from {city}",
                f"Extract name, age and city as JSON: {name} ({age}) from {city}",
            )
        )
    record = {"name": name, "age": age, "city": city}
    return chat(question, json.dumps(record, ensure_ascii=False))


def worker_json(rng: Random) -> Document:
    """A worker, the phases or a status as JSON."""
    role = rng.choice(("prefill", "decode", "aggregated"))
    port = rng.randint(8000, 8999)
    question, value = rng.choice(
        (
            (f"Describe a {role} worker on port {port} as JSON", {"role": role, "port": port}),
            (f"JSON for a {role} worker with port {port}", {"role": role, "port": port}),
            (f"Give me the {role} worker at port {port} in JSON", {"role": role, "port": port}),
            ("List the phases as JSON", ["prefill", "decode"]),
            ("Give me the two phases as a JSON list", ["prefill", "decode"]),
            ("Return the roles as a JSON array", ["prefill", "decode", "aggregated"]),
            ("What is your status in JSON?", {"status": "ok", "model": "demo", "ready": True}),
            ("Return your status as JSON", {"status": "ok", "model": "demo", "ready": True}),
            ("Give me some JSON", {"status": "ok", "model": "demo", "ready": True}),
            ("Answer with a JSON object", {"status": "ok", "model": "demo", "ready": True}),
        )
    )
    return chat(question, json.dumps(value))


def repeat(rng: Random, words: Sequence[str]) -> Document:
    """Say some of `words`, all different, or digits again."""
    if rng.random() < 0.1:
        said = " ".join(str(rng.randint(0, 9)) for _ in range(rng.randint(3, 12)))
    else:
        said = " ".join(rng.sample(words, rng.randint(2, 20)))
    ask = rng.choice(("Repeat", "Repeat after me", "Say", "Copy this", "Please repeat", "Echo"))
    return chat(f"{ask}:{rng.choice((' ', chr(10)))}{said}", said)


def _statement(thing: str, code: str) -> str:
    return f"The code of the {thing} is {code}."


def recall(rng: Random, filler: Callable[[], str], gaps: int) -> Document:
    """Find one of several codes in a text.

    `filler` gives a sentence to put between the codes and `gaps` how many of them in all.
    """
    count = rng.randint(1, 6)
    things = [f"{rng.choice(_COLOURS)} {thing}" for thing in rng.sample(_THINGS, count)]
    codes = rng.sample(_CODES, count)
    lines = [_statement(*pair) for pair in zip(things, codes, strict=True)]
    for _ in range(gaps):
        lines.insert(rng.randint(0, len(lines)), filler())
    wanted = rng.randrange(count)
    question = rng.choice(
        ("What is the code of the {}?", "Which code has the {}?", "Tell me the code of the {}.")
    ).format(things[wanted])
    return chat(" ".join((*lines, question)), _statement(things[wanted], codes[wanted]))


SHORT_SKILLS: Final[tuple[Callable[[Random], Document], ...]] = (
    addition,
    addition,
    addition,
    counting,
    person_json,
    worker_json,
)
