"""Decisions about which processes to start and stop, and on which nodes. No I/O."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from pdserve.deploy.ray.spec import PACK, place_of, pool_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Set

_ROUTER = "router"


class Steps(NamedTuple):
    """Names of processes to start and to stop."""

    start: set[str]
    stop: set[str]


def next_steps(
    wanted: Set[str], present: Set[str], serving: Collection[str], *, settled: bool
) -> Steps:
    """Return the next steps from the `present` processes towards the `wanted` ones. `present`
    includes processes that are stopping. `serving`: ready routers, and workers that all routers
    know. `settled`: all routers know every ready worker.

    Workers of a pool are replaced one at a time: the new one serves before the old one stops. A
    router stops before its successor starts, because the successor needs its ports. All other
    routers must serve then.
    """
    start, stop = set[str](), set[str]()
    old = present - wanted
    replaced = {place_of(name) for name in old}
    places = {place_of(name) for name in wanted}
    stop |= {name for name in old if place_of(name) not in places}
    busy = {_pool(name) for name in wanted & present if place_of(name) in replaced}
    absent = {place_of(x) for x in wanted if _pool(x) == _ROUTER} - {*map(place_of, serving)}
    for name in sorted(wanted):
        place, pool = place_of(name), _pool(name)
        before = {x for x in old if place_of(x) == place}
        if not before:
            start |= {name} - present
        elif pool == _ROUTER:
            if settled and absent <= {place} and _ROUTER not in busy:
                stop |= before
                busy.add(pool)
        elif name in serving:
            stop |= before
        elif name not in present and pool not in busy:
            start.add(name)
            busy.add(pool)
    return Steps(start, stop)


def _pool(name: str) -> str:
    return pool_of(place_of(name))


class Placed(NamedTuple):
    """A process, its node, and the resources that it uses there."""

    name: str
    node: str
    bundle: Mapping[str, float]


def choose_node(
    name: str,
    bundle: Mapping[str, float],
    strategy: str,
    nodes: Mapping[str, Mapping[str, float]],
    placed: Iterable[Placed],
) -> str | None:
    """Return the node for a process, or None if no node has room beside the `placed` processes. The
    strategy SPREAD chooses the node with the fewest processes of the pool, then of the service.
    PACK chooses the node with the most of the service. `nodes` has each node's total resources."""
    free = {node: dict(resources) for node, resources in nodes.items()}
    ours, same = Counter[str](), Counter[str]()
    for other in placed:
        ours[other.node] += 1
        same[other.node] += _pool(other.name) == _pool(name)
        for kind, amount in other.bundle.items():
            if other.node in free:
                free[other.node][kind] = free[other.node].get(kind, 0.0) - amount
    fits = [x for x in sorted(free) if all(free[x].get(k, 0.0) >= n for k, n in bundle.items())]
    if strategy == PACK:
        return max(fits, key=lambda x: ours[x], default=None)
    return min(fits, key=lambda x: (same[x], ours[x]), default=None)
