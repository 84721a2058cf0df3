"""Coverage-guided fuzzing of a target: `python -m tests.fuzz TARGET [OPTION or FOLDER ...]`.

Options are those of libFuzzer, such as `-max_total_time=60`.
"""

from __future__ import annotations

import logging
import random
import sys
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import atheris

with atheris.instrument_imports(include=["pdserve", "router", "kv_transfer", "aiohttp", "jinja2"]):
    from tests.fuzz.targets import TARGETS

if TYPE_CHECKING:
    from tests.fuzz.targets import Form

HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 1 << 31, 1 << 62, 0.5, -0.0, 1e300),
    *("", "a", "\x00", "<|end|>", "\U0001f600", "{", "user", "x" * 300, [], {}, [[]], [None]),
)


def spots(value: Any) -> list[tuple[Any, Any]]:
    """Return each position in a nested value as (container, key)."""
    found: list[tuple[Any, Any]] = []
    left = [value]
    while left:
        at = left.pop()
        keys = at.keys() if isinstance(at, dict) else range(len(at)) if isinstance(at, list) else ()
        found += [(at, key) for key in keys]
        left += [at[key] for key in keys]
    return found


def mutate(form: Form, data: bytes, max_size: int, seed: int) -> bytes:
    """Mutate a decoded value, or bytes as libFuzzer does. Mutated bytes alone are rarely valid."""
    dice = random.Random(seed)
    body = data[form.before :]
    try:
        value = form.decode(body)
        places = spots(value)
    except (ValueError, RecursionError):
        places = []
    if not places or dice.random() < 0.2:
        mutated: bytes = atheris.Mutate(data, max_size)
        return mutated
    for _ in range(dice.randint(1, 3)):
        at, key = dice.choice(places)
        other, name = dice.choice(places)
        if key not in at and not isinstance(at, list):
            continue
        match dice.randrange(4):
            case 0 if isinstance(at, dict):
                del at[key]
            case 1 if isinstance(at, list):
                at.append(dice.choice(HOSTILE))
            case 2 if isinstance(other, dict) and name in other:
                at[key] = form.decode(form.encode(other[name]))
            case _:
                at[key] = dice.choice(HOSTILE)
    made = data[: form.before] + form.encode(value)
    return made if len(made) <= max_size else data


def main() -> None:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")  # aiohttp warns about headers
    _, name, *options = sys.argv
    target = TARGETS[name]
    more = {} if target.form is None else {"custom_mutator": partial(mutate, target.form)}
    atheris.Setup([f"fuzz-{name}", *options], target, **more)
    atheris.Fuzz()


main()
