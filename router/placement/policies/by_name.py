"""The policies by the names that the configuration gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from router.placement.policies.always_local import always_local
from router.placement.policies.least_loaded import least_loaded
from router.placement.policies.power_of_two import power_of_two
from router.placement.policies.prefix_aware import prefix_aware
from router.placement.policies.round_robin import round_robin
from router.placement.policies.slo_aware import slo_aware

if TYPE_CHECKING:
    from router.placement.context import PlacementContext
    from router.placement.values import Candidate, Decision, Demand

# A policy places a demand among the candidates of its model: `turn` counts placements, breaks ties
# and seeds draws. Equal arguments give equal decisions. A decision without a placement means that
# room must be waited for. Raises Unavailable where waiting would not help.
Policy = Callable[[Sequence["Candidate"], "Demand", int, "PlacementContext"], "Decision"]

POLICIES: Mapping[str, Policy] = {
    "always_local": always_local,
    "least_loaded": least_loaded,
    "power_of_two": power_of_two,
    "prefix_aware": prefix_aware,
    "round_robin": round_robin,
    "slo_aware": slo_aware,
}

# They ask what is cached of the prompt.
BY_PREFIX = frozenset((always_local, prefix_aware, slo_aware))
# It is fair only over all workers.
OF_ALL = frozenset((round_robin,))
