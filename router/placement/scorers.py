"""Scorers: one figure in [0, 1] a candidate, 1 the best. Pure.

What this router has placed itself is always known; what a worker reports may not be. A load that is
not known scores as the mean of those that are, never as an idle worker's, and 0.5 where none is;
the router's own account is then what tells workers apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.placement.values import Candidate, Demand

UNKNOWN = 0.5

Scorer = Callable[[Sequence["Candidate"], "Demand", Mapping[str, int]], list[float]]
"""Of candidates, for a demand, with the tokens of its prompt that are cached by worker id."""


def room(
    candidates: Sequence[Candidate], _demand: Demand, _cached: Mapping[str, int]
) -> list[float]:
    """1 with all KV blocks free. A full cache preempts. Blocks that this router has promised count
    as taken although no request may have reached them yet."""
    reported = _fill(
        [None if c.load is None else c.load.free_blocks / c.info.total_blocks for c in candidates]
    )
    return [
        max(0.0, min(1 - c.reserved_blocks / c.info.total_blocks, free))
        for c, free in zip(candidates, reported, strict=True)
    ]


def seats(
    candidates: Sequence[Candidate], _demand: Demand, _cached: Mapping[str, int]
) -> list[float]:
    """1 with no request running or waiting, 0 with as many as the engine batches."""
    reported = _fill(
        [
            None
            if c.load is None
            else 1 - (c.load.num_running_reqs + c.load.num_waiting_reqs) / c.info.max_num_seqs
            for c in candidates
        ]
    )
    return [
        max(0.0, min(1 - c.outstanding_requests / c.info.max_num_seqs, free))
        for c, free in zip(candidates, reported, strict=True)
    ]


def outstanding(
    candidates: Sequence[Candidate], demand: Demand, _cached: Mapping[str, int]
) -> list[float]:
    """1 without prompt tokens that wait for their prefill; the scale ends at the most there would
    be with this prompt."""
    if not candidates:
        return []
    most = max(c.outstanding_tokens for c in candidates) + max(1, demand.prompt_tokens)
    return [1 - c.outstanding_tokens / most for c in candidates]


def quiet(
    candidates: Sequence[Candidate], _demand: Demand, _cached: Mapping[str, int]
) -> list[float]:
    """1 without requests waiting in the engine, half with one, a third with two."""
    return _fill(
        [None if c.load is None else 1 / (1 + c.load.num_waiting_reqs) for c in candidates]
    )


def cached_share(
    candidates: Sequence[Candidate], demand: Demand, cached: Mapping[str, int]
) -> list[float]:
    """1 with the whole prompt cached, 0 with none of it or where nobody knows."""
    tokens = max(1, demand.prompt_tokens)
    return [min(1.0, cached.get(c.worker_id, 0) / tokens) for c in candidates]


def _fill(known: list[float | None]) -> list[float]:
    found = [x for x in known if x is not None]
    if len(found) == len(known):
        return found
    unknown = sum(found) / len(found) if found else UNKNOWN
    return [unknown if x is None else x for x in known]
