"""Distance between workers, and between a worker and the router, by their labels."""

from __future__ import annotations

from collections.abc import Mapping

from pdserve.config import TopologyConfig

Topology = Mapping[str, str]
"""Labels by level; levels without a label are left out."""

# From the farthest level to the nearest.
LEVELS = TopologyConfig.__struct_fields__
# Assumed extra seconds for KV, or for a router's message, between workers whose labels differ from
# this level on. Used until transfers over this distance were measured. Only the order of the
# figures matters.
PRIOR_S: Mapping[str, float] = {"": 0.0, "host": 0.002, "zone": 0.02, "region": 0.2}
_HALF_S = 0.05


def distance(one: Topology, other: Topology) -> str:
    """Return the farthest level at which both have a label and the labels differ, or ""."""
    if not one or not other:
        return ""
    for level in LEVELS:
        labels = one.get(level), other.get(level)
        if all(labels) and labels[0] != labels[1]:
            return level
    return ""


def nearness(seconds: float) -> float:
    """Return a score for a distance in seconds: 1 for none, 1/2 for 50 ms."""
    return _HALF_S / (_HALF_S + seconds)
