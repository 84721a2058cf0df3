"""What is wanted of the roles, as the registry lists it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pdserve.v1 import worker_pb2 as w

if TYPE_CHECKING:
    from collections.abc import Mapping

    from router.roles.controller import Verdict


def roles_to_pb(verdicts: Mapping[str, Verdict]) -> list[w.ModelRoles]:
    """One for each model that is watched."""
    return [
        w.ModelRoles(
            model=model,
            text=verdict.text,
            state=verdict.stance.value,
            prefill_workers=verdict.loads.prefill_workers,
            decode_workers=verdict.loads.decode_workers,
            wanted_prefill_workers=verdict.wanted.prefill_workers,
            wanted_decode_workers=verdict.wanted.decode_workers,
            prefill_load=_finite(verdict.loads.prefill),
            decode_load=_finite(verdict.loads.decode),
        )
        for model, verdict in sorted(verdicts.items())
    ]


def _finite(load: float) -> float | None:
    return load if math.isfinite(load) else None
