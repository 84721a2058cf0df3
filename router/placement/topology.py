"""How far workers are from each other and from the router, by their labels."""

from __future__ import annotations

from collections.abc import Mapping

from pdserve.config import TopologyConfig

Topology = Mapping[str, str]
"""Labels by level; levels without a label are left out."""

# The farthest first.
LEVELS = TopologyConfig.__struct_fields__
# Seconds that KV, or a router's message, is assumed to take longer between workers whose labels
# differ from this level on, until transfers between workers as far apart were measured. The order
# matters, not the figures.
PRIOR_S: Mapping[str, float] = {"": 0.0, "host": 0.002, "rack": 0.005, "zone": 0.02, "region": 0.2}
_HALF_S = 0.05


def apart(one: Topology, other: Topology) -> str:
    """Return the farthest level at which both have a label and differ; "" if there is none."""
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
