"""An explorer of all orders of events of a model, here called a world.

An action is one possible next step of one party of the world. A fault is also an action; each world
has a budget of faults.
"""

from __future__ import annotations

import io
import itertools
import pickle
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import pytest

from kv_transfer.protocol.producer import Producer

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    Defect: TypeAlias = tuple[object, str, Callable[..., Any]]
    """A planted defect: the attribute of this object is replaced by this function."""

FAULT_CHANCE = 0.08

Action = tuple[Any, ...]
Path = tuple[Any, Action] | None
"""The actions so far, the last one first."""


class World(Protocol):
    """A whole state, which can be pickled. Its methods raise AssertionError if a promise is
    broken."""

    def enabled(self) -> list[Action]:
        """Return all possible next actions, without faults."""

    def possible_faults(self) -> list[Action]: ...

    def without_effect(self) -> Action | None:
        """Return an action whose order does not matter, which is done first; or None."""

    def do(self, action: Action) -> None: ...

    def settle(self) -> None:
        """Run until everything has ended, and check that nothing is left."""


@dataclass(frozen=True)
class Explored:
    states: int
    transitions: int
    ends: int
    depth: int


def explore(start: World) -> Explored:
    """Explore every order of actions, each state once. Raises AssertionError with the actions that
    led to a broken promise, or to a state from which no end can be reached."""
    first_key = _key(start)
    paths: dict[bytes, Path] = {first_key: None}
    before: dict[bytes, list[bytes]] = {first_key: []}
    waiting: list[tuple[bytes, bytes, int]] = [(first_key, pickle.dumps(start, -1), 0)]
    ends: list[bytes] = []
    transitions = deepest = 0
    while waiting:
        here, state, depth = waiting.pop()
        path, deepest = paths[here], max(deepest, depth)
        world: World = pickle.loads(state)
        normal = world.enabled()
        first = world.without_effect()
        actions = normal + world.possible_faults() if first is None else [first]
        if not normal:
            ends.append(here)
            _checked(path, world.settle)
        for action in actions:
            world = pickle.loads(state)
            transitions += 1
            _checked((path, action), partial(world.do, action))
            key = _key(world)
            if key not in paths:
                paths[key], before[key] = (path, action), []
                waiting.append((key, pickle.dumps(world, -1), depth + 1))
            before[key].append(here)
    _check_ends(ends, paths, before)
    return Explored(len(paths), transitions, len(ends), deepest)


def _check_ends(
    ends: list[bytes], paths: dict[bytes, Path], before: dict[bytes, list[bytes]]
) -> None:
    """Check that from every state an end can be reached. `before`: the states before each one."""
    reached, waiting = set(ends), list(ends)
    while waiting:
        new = [key for key in before[waiting.pop()] if key not in reached]
        reached.update(new)
        waiting += new
    for key, path in paths.items():
        if key not in reached:
            _checked(path, _fail)


def _fail() -> None:
    raise AssertionError("no order of events ends this")


def _keeps_hold(self: Producer, now: float) -> list[Any]:
    return []


# A producer whose holds never end.
KEEPS_HOLD = (Producer, "tick", _keeps_hold)


def assert_finds(monkeypatch: pytest.MonkeyPatch, defect: Defect, said: str, world: World) -> None:
    """Plant a defect, and assert that the exploration of `world` fails with the pattern `said`."""
    monkeypatch.setattr(*defect)
    with pytest.raises(AssertionError, match=said):
        explore(world)


def walk(world: World, dice: random.Random) -> int:
    """Run one random order of actions to its end, with occasional faults. Return its length."""
    path: Path = None
    for length in itertools.count():
        actions = world.enabled()
        if not actions:
            _checked(path, world.settle)
            return length
        faults = world.possible_faults()
        action = dice.choice(faults if faults and dice.random() < FAULT_CHANCE else actions)
        path = (path, action)
        _checked(path, partial(world.do, action))
    raise AssertionError("unreachable")


def _checked(path: Path, step: Callable[[], None]) -> None:
    """Run a step. If it fails, raise with the actions that led to it."""
    try:
        step()
    except Exception as error:
        steps = []
        while path is not None:
            path, action = path
            steps.append(action)
        lines = "\n".join(f"  {x}" for x in reversed(steps))
        raise AssertionError(f"{type(error).__name__}: {error} after\n{lines}") from error


def _key(world: World) -> bytes:
    """Return a digest of the state. Equal states must serialize equally, so no object is written as
    a reference to an earlier one."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, -1)
    pickler.fast = True
    pickler.dump(world)
    return blake2b(file.getbuffer(), digest_size=16).digest()
