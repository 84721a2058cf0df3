"""The task that keeps the split between prefill and decode workers fit for the load."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from pdserve.errors import PdserveError
from router.background import Background
from router.roles.controller import Stance, begin, flipped, look
from router.roles.phase_load import loads_of
from router.roles.rules import spare_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from pdserve.role_config import RolesConfig
    from pdserve.types import Role
    from router.cost.book import CostBook
    from router.fleet import Fleet
    from router.roles.controller import Loads, Verdict, Watch
    from router.roles.flips import Flips

logger = logging.getLogger(__name__)


class Rebalancer:
    """Owns the task; every wait in it is an interval or a flip, whose steps have deadlines. An
    async context manager: leaving ends the task, and a flip that is under way is taken back.

    State: what is watched of each model, and the last verdicts; `on_verdict` is told each. `queued`
    says how many requests of a model wait in the router.
    """

    def __init__(
        self,
        fleet: Fleet,
        flips: Flips,
        costs: CostBook,
        config: RolesConfig,
        *,
        queued: Callable[[str], int],
        on_verdict: Callable[[str, Verdict], None] = lambda model, verdict: None,
    ) -> None:
        self._fleet = fleet
        self._flips = flips
        self._costs = costs
        self._config = config
        self._queued = queued
        self._on_verdict = on_verdict
        self._watches: dict[str, Watch] = {}
        self._verdicts: dict[str, Verdict] = {}
        self._looking = Background("role-rebalancer", self._run)

    async def __aenter__(self) -> Self:
        await self._looking.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._looking.__aexit__(kind, error, trace)

    @property
    def verdicts(self) -> Mapping[str, Verdict]:
        """The last one of each model that has prefill or decode workers."""
        return self._verdicts

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._config.interval_s)
            models = self._fleet.pool.models()
            for gone in self._watches.keys() - models.keys():
                del self._watches[gone], self._verdicts[gone]
            for model in models:
                await self._look(model)

    async def _look(self, model: str) -> None:
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
        if verdict.role is not None:
            worker_id, failure = await self._move(model, verdict.role, watch.failed)
            now = self._fleet.now()
            self._watches[model] = flipped(watch, worker_id, failure, now, self._config)

    def _loads(self, model: str) -> Loads:
        return loads_of(
            self._fleet.pool.of_model(model),
            queued=self._queued(model),
            pace=self._costs.pace(model),
            step_model=self._costs.step_model,
            tpot_s=self._costs.slo.tpot_s,
        )

    async def _move(self, model: str, role: Role, failed: tuple[str, ...]) -> tuple[str, str]:
        """The worker that was to change, and why it did not."""
        member = spare_for(self._fleet.pool.of_model(model), role, failed)
        if member is None:
            logger.warning("roles of %s: no worker can become a %s worker", model, role)
            return "", f"no worker can become a {role} worker"
        verdict = self._verdicts[model]
        text = f"{verdict.text}: {member.worker_id} does now"
        self._verdicts[model] = replace(verdict, text=text)
        drain_s = self._config.drain_timeout_s
        try:
            done = await self._flips.flip(member.worker_id, role, drain_timeout_s=drain_s)
        except PdserveError as error:
            failure = error.message
        else:
            failure = done.failure
        if failure:
            logger.warning("worker %s is no %s worker: %s", member.worker_id, role, failure)
        return member.worker_id, failure
