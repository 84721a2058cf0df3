"""Revisions: selects the revision of a model's workers that serves a request.

While a model has weights, a request and its KV stay with the workers of one revision. Without
weights, all workers of the model are one pool, and nothing here is called.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec import structs
from xxhash import xxh3_64_intdigest

from pdserve.errors import InvalidRequest
from router.placement.filters import feasible

if TYPE_CHECKING:
    from pdserve.types import Role
    from router.placement.values import Candidate, Demand

Shares = Mapping[str, float]
"""Shares of new requests by revision; they sum to 1."""


class RevisionShares:
    """Shares of new requests by revision, in `by_model` for each model that has weights."""

    def __init__(self) -> None:
        self._by_model: dict[str, Shares] = {}
        self.by_model: Mapping[str, Shares] = self._by_model

    def set(self, model: str, weights: Mapping[str, float]) -> bool:
        """Set the weights of a model's revisions; without `weights`, remove them. Return True if
        the shares have changed. Raises InvalidRequest, naming the field, for an invalid weight."""
        before, now = self._by_model.pop(model, None), shares_of(weights) if weights else None
        if now is not None:
            self._by_model[model] = now
        return now != before


def shares_of(weights: Mapping[str, float]) -> Shares:
    """Return the weights scaled to a sum of 1. Raises InvalidRequest, naming the field, for an
    invalid weight."""
    for revision, weight in weights.items():
        if not 0 <= weight < math.inf:
            text = f"the weight of revision {revision!r} must not be below 0, but is {weight:g}"
            raise InvalidRequest(text, field=f"weights.{revision}")
    total = sum(weights.values())
    if not 0 < total < math.inf:
        raise InvalidRequest("one of the weights must be above 0", field="weights")
    # Sorted, because `draw` goes through them in order and must agree on all routers.
    return {x: weights[x] / total for x in sorted(weights)}


def draw(shares: Shares, request_id: str) -> str:
    """Return the revision of a new request. The request id seeds the draw, so that all routers draw
    the same revision."""
    left = xxh3_64_intdigest(request_id.encode()) / 2**64
    for revision, share in shares.items():
        left -= share
        if left < 0:
            return revision
    return max(shares, key=shares.__getitem__)  # the shares sum to slightly less than 1


def cohort(
    demand: Demand,
    candidates: list[Candidate],
    shares: Shares,
    failed: frozenset[str] = frozenset(),
) -> tuple[Demand, list[Candidate]]:
    """Return `demand` with the revision that serves it now, and the workers of that revision.

    This is the request's own revision. If some role of it has no worker, or only `failed` ones, it
    is the usable revision with the highest weight.
    """
    own = demand.revision
    if own is None:  # the request is older than the weights
        own = draw(shares, demand.request_id)
    roles: dict[str, set[Role]] = {}
    left: dict[str, set[Role]] = {}
    for c in feasible(candidates, demand):
        roles.setdefault(c.info.revision, set()).add(c.role)
        if c.worker_id not in failed:
            left.setdefault(c.info.revision, set()).add(c.role)
    usable = [x for x, found in roles.items() if left.get(x) == found] or list(left)
    if own in usable or not usable:
        return of_revision(demand, candidates, own)
    other = min(usable, key=lambda x: (-shares.get(x, 0.0), x))
    demand, candidates = of_revision(demand, candidates, other)
    return structs.replace(demand, spilled_from=own), candidates


def of_revision(
    demand: Demand, candidates: list[Candidate], revision: str
) -> tuple[Demand, list[Candidate]]:
    """Return `demand` with `revision`, and the workers of that revision."""
    return bound_to(demand, revision), [c for c in candidates if c.info.revision == revision]


def bound_to(demand: Demand, revision: str | None) -> Demand:
    """Return `demand` for workers of `revision`, None for all."""
    if demand.revision == revision and demand.spilled_from is None:
        return demand
    return structs.replace(demand, revision=revision, spilled_from=None)
