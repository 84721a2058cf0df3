"""Scorers and pickers.

A scorer gives each candidate 0 to 1, the best. A worker's unreported load scores as the mean of the
reported ones, 0.5 without any; what this router placed itself is always known.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum

from router.placement.values import Candidate, Demand, Scoreboard, Weights

UNKNOWN = 0.5

# Scores that differ by less are equal: sums of ratios differ in the last bit.
_EQUAL = 1e-9
_MASK = (1 << 64) - 1

# Of a larger pool this many workers are scored for each phase. The best of 64 random ones is among
# the best twentieth of all but once in 27 times (0.95^64), and scoring does not grow with the pool.
MOST_SCORED = 64
MOST_CACHED = 16


def room(
    candidates: Sequence[Candidate], _demand: Demand, _cached: Mapping[str, int]
) -> list[float]:
    """Share of KV blocks that are neither reserved by this router nor reported as used."""
    placed = [1 - c.reserved_blocks / c.info.total_blocks for c in candidates]
    return _lower(
        placed,
        [None if c.load is None else c.load.free_blocks / c.info.total_blocks for c in candidates],
    )


def slots(
    candidates: Sequence[Candidate], _demand: Demand, _cached: Mapping[str, int]
) -> list[float]:
    """Share of slots (max_num_seqs) without a request, running or waiting."""
    placed = [1 - c.outstanding_requests / c.info.max_num_seqs for c in candidates]
    return _lower(
        placed,
        [
            None
            if c.load is None
            else 1 - (c.load.num_running_reqs + c.load.num_waiting_reqs) / c.info.max_num_seqs
            for c in candidates
        ],
    )


def outstanding(
    candidates: Sequence[Candidate], demand: Demand, _cached: Mapping[str, int]
) -> list[float]:
    """1 without prompt tokens that wait for prefill, 0 at the most there would be with this
    prompt."""
    if not candidates:
        return []
    most = max(c.outstanding_tokens for c in candidates) + max(1, demand.prompt_tokens)
    return [1 - c.outstanding_tokens / most for c in candidates]


def queue_length(
    candidates: Sequence[Candidate], _demand: Demand, _cached: Mapping[str, int]
) -> list[float]:
    """1 without requests that wait in the engine, 1/2 with one, 1/3 with two."""
    return _fill(
        [None if c.load is None else 1 / (1 + c.load.num_waiting_reqs) for c in candidates]
    )


def cached_share(
    candidates: Sequence[Candidate], demand: Demand, cached: Mapping[str, int]
) -> list[float]:
    """Share of the prompt that the worker has cached."""
    tokens = max(1, demand.prompt_tokens)
    return [min(1.0, cached.get(c.worker_id, 0) / tokens) for c in candidates]


def _lower(placed: list[float], reported: list[float | None]) -> list[float]:
    return [max(0.0, min(pair)) for pair in zip(placed, _fill(reported), strict=True)]


def _fill(known: list[float | None]) -> list[float]:
    found = [x for x in known if x is not None]
    if len(found) == len(known):
        return found
    unknown = sum(found) / len(found) if found else UNKNOWN
    return [unknown if x is None else x for x in known]


def score(
    candidates: Sequence[Candidate], weights: Weights, demand: Demand, cached: Mapping[str, int]
) -> Scoreboard:
    totals, columns = dict.fromkeys(candidates, 0.0 if weights else 1.0), []
    for scorer, weight in weights:
        column = scorer(candidates, demand, cached)
        columns.append(column)
        for candidate, value in zip(candidates, column, strict=True):
            totals[candidate] += weight * value
    return Scoreboard(weights, candidates, columns, totals)


def best(totals: Mapping[Candidate, float], among: Sequence[Candidate], turn: int) -> Candidate:
    """Return the candidate with the highest total; equal ones take turns."""
    highest = max(map(totals.__getitem__, among))
    equals = [c for c in among if highest - totals[c] < _EQUAL]
    return equals[turn % len(equals)]


class Phase(IntEnum):
    """Each phase draws its own random numbers."""

    DECODE = 0
    PREFILL = 1


Draw = Callable[[list[Candidate], int, Phase, Mapping[str, int]], list[Candidate]]
"""Chooses the candidates to score, from the turn and the cached prompt tokens by worker id."""


def draw_next(
    candidates: list[Candidate], turn: int, _phase: Phase, _cached: Mapping[str, int]
) -> list[Candidate]:
    """Return the one whose turn it is."""
    return [candidates[turn % len(candidates)]] if candidates else []


def draw_two(
    candidates: list[Candidate], turn: int, phase: Phase, _cached: Mapping[str, int]
) -> list[Candidate]:
    """Return two different ones at random, seeded by `turn`."""
    count = len(candidates)
    if count <= 2:
        return candidates
    bits = mix(2 * turn + phase)
    first = (bits & 0xFFFFFFFF) % count
    second = (first + 1 + (bits >> 32) % (count - 1)) % count
    return [candidates[first], candidates[second]]


def draw_many(
    candidates: list[Candidate], turn: int, phase: Phase, cached: Mapping[str, int]
) -> list[Candidate]:
    """Return all; of a large pool those with the most cached tokens, and others at random, seeded
    by `turn`."""
    if len(candidates) <= MOST_SCORED:
        return candidates
    holders = [c for c in candidates if c.worker_id in cached] if cached else []
    if len(holders) > MOST_CACHED:
        holders = heapq.nlargest(MOST_CACHED, holders, key=lambda c: cached[c.worker_id])
    chance = random.Random(mix(2 * turn + phase))
    return list(dict.fromkeys(holders + chance.sample(candidates, MOST_SCORED - len(holders))))


def mix(turn: int) -> int:
    """Return 64 random bits for `turn`: the finaliser of SplitMix64 (Steele et al., 2014)."""
    z = (turn * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
