"""Which revision of a model's workers gets a request.

While a model has weights, a request and its KV stay with the workers of one revision. Without
weights all its workers are one pool, and nothing here is called.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec import structs
from xxhash import xxh3_64_intdigest

from pdserve.errors import InvalidRequest
from router.placement.filters import able

if TYPE_CHECKING:
    from pdserve.types import Role
    from router.placement.values import Candidate, Demand

Shares = Mapping[str, float]
"""Shares of new requests by revision; they sum to 1."""


def shares_of(weights: Mapping[str, float]) -> Shares:
    """Raises InvalidRequest, naming the field, for a weight that is none."""
    for revision, weight in weights.items():
        if not 0 <= weight < math.inf:
            text = f"the weight of revision {revision!r} must not be below 0, but is {weight:g}"
            raise InvalidRequest(text, field=f"weights.{revision}")
    total = sum(weights.values())
    if not 0 < total < math.inf:
        raise InvalidRequest("one of the weights must be above 0", field="weights")
    return {x: weights[x] / total for x in sorted(weights)}


def draw(shares: Shares, request_id: str) -> str:
    """Return the revision of a new request. The id seeds the draw: every router draws the same."""
    left = xxh3_64_intdigest(request_id.encode()) / 2**64
    for revision, share in shares.items():
        left -= share
        if left < 0:
            return revision
    return max(shares, key=shares.__getitem__)  # rounding left nothing


def cohort(
    demand: Demand,
    candidates: list[Candidate],
    shares: Shares,
    failed: frozenset[str] = frozenset(),
) -> tuple[Demand, list[Candidate]]:
    """Return `demand` for the revision that is to serve it now, and the workers of that: its own;
    if that has no worker, or none but `failed` ones of a role, the one with the highest weight."""
    own = demand.revision
    if own is None:  # the request is older than the weights
        own = draw(shares, demand.request_id)
    roles: dict[str, set[Role]] = {}
    left: dict[str, set[Role]] = {}
    for c in able(candidates, demand):
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
    """Return `demand` for one revision, and the workers of that."""
    if demand.revision != revision or demand.spilled_from is not None:
        demand = structs.replace(demand, revision=revision, spilled_from=None)
    return demand, [c for c in candidates if c.info.revision == revision]
