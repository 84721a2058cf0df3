"""Coverage-guided fuzzing of targets, one after the other, each in a fork of this process, because
imports with instrumentation take longer than a short search: `python -m tests.fuzz FOLDER [OPTION
...] TARGET ...`. Inputs of a target are kept in FOLDER/TARGET; findings go to its corpus.

Options are those of libFuzzer, such as `-max_total_time=60`.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import atheris

with atheris.instrument_imports(include=["pdserve", "router", "kv_transfer", "aiohttp", "jinja2"]):
    from tests.fuzz.targets import CORPUS, TARGETS

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


def fuzz(name: str, folder: Path, options: list[str]) -> NoReturn:
    """Fuzz a target, and exit as libFuzzer does."""
    target = TARGETS[name]
    more = {} if target.form is None else {"custom_mutator": partial(mutate, target.form)}
    kept = CORPUS / name
    folder.mkdir(parents=True)
    words = [f"fuzz-{name}", *options, f"-artifact_prefix={kept}/", str(folder), str(kept)]
    atheris.Setup(words, target, **more)
    atheris.Fuzz()
    sys.exit()


def main() -> None:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")  # aiohttp warns about headers
    folder, *words = sys.argv[1:]
    options = [x for x in words if x.startswith("-")]
    for name in words[len(options) :]:
        print(f"fuzzing {name}", flush=True)  # noqa: T201
        if not (pid := os.fork()):
            fuzz(name, Path(folder, name), options)
        if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            sys.exit(f"the target {name} ended with {code}")


main()
