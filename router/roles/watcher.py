"""What the loads of each model say of its roles, look by look. A router looks once in a while, and
so does a simulation: whoever moves workers asks this which."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from router.roles.controller import Stance, begin, flipped, look
from router.roles.phase_load import loads_of
from router.roles.rules import spare_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pdserve.config import RolesConfig
    from pdserve.types import Role
    from router.cost.book import CostBook
    from router.fleet.member import Member
    from router.fleet.registry import Fleet
    from router.roles.controller import Loads, Verdict, Watch

logger = logging.getLogger(__name__)


class RoleWatcher:
    """State: what is watched of each model, and the last verdicts; `on_verdict` is told each.
    `queued` says how many requests of a model wait in the router."""

    def __init__(
        self,
        fleet: Fleet,
        costs: CostBook,
        config: RolesConfig,
        *,
        queued: Callable[[str], int],
        on_verdict: Callable[[str, Verdict], None] = lambda model, verdict: None,
    ) -> None:
        self._fleet = fleet
        self._costs = costs
        self._config = config
        self._queued = queued
        self._on_verdict = on_verdict
        self._watches: dict[str, Watch] = {}
        self._verdicts: dict[str, Verdict] = {}

    @property
    def verdicts(self) -> Mapping[str, Verdict]:
        """The last one of each model that is served."""
        return self._verdicts

    def models(self) -> Iterable[str]:
        """Those to look at now; what is gone is forgotten."""
        models = list(self._fleet.pool.models())
        for gone in self._watches.keys() - models:
            del self._watches[gone], self._verdicts[gone]
        return models

    def look(self, model: str) -> Member | None:
        """Another look at a model's workers. A worker that is to have the other role now, if one
        is: then `ended` has to be told what came of it, before the next look."""
        now, loads = self._fleet.now(), self._loads(model)
        watch = self._watches.get(model) or begin(loads, now)
        watch, verdict = look(watch, loads, now, self._config)
        before = self._verdicts.get(model)
        self._watches[model], self._verdicts[model] = watch, verdict
        self._on_verdict(model, verdict)
        if before is None or before.stance is not verdict.stance:
            calm = verdict.stance in (Stance.CALM, Stance.BALANCED)
            logger.log(
                logging.DEBUG if calm else logging.INFO, "roles of %s: %s", model, verdict.text
            )
        return None if verdict.role is None else self._spare(model, verdict, verdict.role)

    def _spare(self, model: str, verdict: Verdict, role: Role) -> Member | None:
        failed = self._watches[model].failed
        member = spare_for(self._fleet.pool.of_model(model), role, failed)
        if member is None:
            logger.warning("roles of %s: no worker can become a %s worker", model, role)
            self.ended(model, "", f"no worker can become a {role} worker")
            return None
        text = f"{verdict.text}: {member.worker_id} does now"
        self._verdicts[model] = replace(verdict, text=text)
        return member

    def ended(self, model: str, worker_id: str, failure: str) -> None:
        """The worker has changed its role, or not, for `failure`."""
        watch = self._watches[model]
        self._watches[model] = flipped(watch, worker_id, failure, self._fleet.now(), self._config)

    def _loads(self, model: str) -> Loads:
        return loads_of(
            self._fleet.pool.of_model(model),
            queued=self._queued(model),
            pace=self._costs.pace(model),
            step_model=self._costs.step_model,
            tpot_s=self._costs.slo.tpot_s,
        )
