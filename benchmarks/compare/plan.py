"""In which order arms are measured, and with which part of the trace. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Kind = Literal["warmup", "round", "probe"]
WARMUP_REQUESTS: Final = 8
MAX_PROBE_REQUESTS: Final = 2000
_SEEDS_PER_KIND: Final = 10_000


@dataclass(frozen=True, slots=True)
class Replay:
    """One replay of a part of the trace against one arm.

    Replays of one kind and number send the same to every arm. Their ``seed`` is theirs alone, so
    that no prompt was seen before by a prefix cache.
    """

    arm: str
    kind: Kind
    number: int
    rate_per_s: float
    requests: int
    skip: int
    seed: int


def in_turn(arms: Sequence[str], number: int) -> list[str]:
    """Who goes first changes with every round (A B, B A, A B, ...), so that a machine that gets
    slower or faster meanwhile favours nobody."""
    return list(arms) if number % 2 == 0 else list(reversed(arms))


def warmups(arms: Sequence[str], rate_per_s: float, requests: int, seed: int) -> Iterator[Replay]:
    """A short replay for each arm that no figure is taken from."""
    for arm in arms:
        yield Replay(
            arm,
            "warmup",
            0,
            rate_per_s,
            requests=max(2, min(WARMUP_REQUESTS, requests)),
            skip=0,
            seed=_seed(seed, "warmup", 0),
        )


def rounds(
    arms: Sequence[str], rate_per_s: float, requests: int, count: int, seed: int
) -> Iterator[Replay]:
    """``count`` rounds; each takes the next ``requests`` of the trace, the same for every arm."""
    for number in range(count):
        for arm in in_turn(arms, number):
            yield Replay(
                arm,
                "round",
                number,
                rate_per_s,
                requests=requests,
                skip=number * requests,
                seed=_seed(seed, "round", number),
            )


def probe(
    arm: str, number: int, rate_per_s: float, *, requests: int, least_s: float, seed: int
) -> Replay:
    """One probe of a sweep: the start of the trace, at least ``least_s`` of it at ``rate_per_s``,
    so that a queue has the time to grow."""
    enough = min(MAX_PROBE_REQUESTS, ceil(rate_per_s * least_s))
    return Replay(
        arm,
        "probe",
        number,
        rate_per_s,
        requests=max(requests, enough),
        skip=0,
        seed=_seed(seed, "probe", number),
    )


def repeat(replay: Replay) -> Replay:
    """The same replay with prompts of its own."""
    return replace(replay, seed=replay.seed + _SEEDS_PER_KIND // 2)


def _seed(seed: int, kind: Kind, number: int) -> int:
    return (3 * seed + ("warmup", "round", "probe").index(kind)) * _SEEDS_PER_KIND + number
