"""Autoscaler of roles: decides from the load how many workers prefill and how many decode.

Needs are in workers: a need of 1.5 keeps one and a half workers busy. The load of a phase is its
need divided by its workers, and the load of a split is the higher of its phases' loads. The wanted
split has the lowest load. One worker at a time changes its role, if

* the load of the split is over MIN_LOAD and would fall by MIN_IMPROVEMENT,
* this holds for a window, with loads averaged over about a window, and
* for a cooldown no worker joined, left or changed its role, and no role change failed.
"""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from pdserve.errors import InvalidRequest, PdserveError, Unavailable
from pdserve.types import Role
from router.control.role_change import RoleChanger, partner_for
from router.placement.cost import Batch
from router.placement.values import MemberState

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from pdserve.config import RolesConfig
    from router.admission import AdmissionController
    from router.fleet.member import Member
    from router.fleet.registry import Fleet
    from router.placement.cost import CostModel, RequestMeans, StepModel

logger = logging.getLogger(__name__)

MIN_LOAD = 0.7
MIN_IMPROVEMENT = 0.15
# A change of a role's number of workers by this share starts a new cooldown. A share, because in a
# large fleet workers join and leave all the time.
CHANGED = 0.1
COOLDOWN = 2.0  # in windows
MAX_COOLDOWN_S = 3600.0
DRAIN_TIMEOUT_S = 30.0
# Seconds within which queued requests should be done, which converts their work into a need.
CATCH_UP_S = 10.0


@dataclass(frozen=True, slots=True)
class Loads:
    """Ready workers of each role, and the number of workers that the current load keeps busy."""

    prefill_workers: int
    decode_workers: int
    prefill_need: float
    decode_need: float

    @property
    def needs(self) -> dict[Role, float]:
        return {Role.PREFILL: self.prefill_need, Role.DECODE: self.decode_need}

    @property
    def prefill(self) -> float:
        """Load of prefill: 1 is the capacity of its workers; infinite without workers."""
        return self.prefill_need / self.prefill_workers if self.prefill_workers else math.inf

    @property
    def decode(self) -> float:
        return self.decode_need / self.decode_workers if self.decode_workers else math.inf

    @property
    def highest(self) -> float:
        return max(self.prefill, self.decode)

    def best(self) -> Loads:
        """Return the same need on the split with the lowest load. Each role keeps a worker. Of
        equal splits, the one with the fewest role changes wins."""
        workers, before = self.prefill_workers + self.decode_workers, self.prefill_workers
        splits = [
            replace(self, prefill_workers=count, decode_workers=workers - count)
            for count in range(1, workers)
        ]
        key = lambda x: (x.highest, abs(x.prefill_workers - before))  # noqa: E731
        return min(splits, key=key, default=self)

    def __str__(self) -> str:
        parts = []
        for role, count, load in (
            (Role.PREFILL, self.prefill_workers, self.prefill),
            (Role.DECODE, self.decode_workers, self.decode),
        ):
            loaded = f" loaded {load:.2f}" if count else ""
            parts.append(f"{count} {role} worker{'' if count == 1 else 's'}{loaded}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The wanted split and the reason. `role`: the role that one worker should change to now."""

    stance: Literal["balanced", "waiting", "move"]
    loads: Loads
    wanted: Loads
    text: str
    role: Role | None = None


@dataclass(slots=True)
class RoleState:
    """State of one model.

    `mean`: averaged needs, and the workers at `changed_at`. `wanted`: the role that needs more
    workers, since `wanted_since`. `failed`: workers of consecutive failed role changes; `failure`:
    reason of the last one.
    """

    mean: Loads
    changed_at: float
    seen_at: float
    wanted: Role | None = None
    wanted_since: float = 0.0
    paused_until: float = -math.inf
    failed: list[str] = field(default_factory=list)
    failure: str = ""

    def decide(self, now_loads: Loads, now: float, config: RolesConfig) -> Verdict:
        """Add the loads at time `now` to the averages and return the verdict."""
        loads = self._average(now_loads, now, config.window_s)
        best, role = loads.best(), None
        is_better = best.highest <= loads.highest * (1.0 - MIN_IMPROVEMENT)
        if loads.highest > MIN_LOAD and is_better and best != loads:
            more_prefill = best.prefill_workers > loads.prefill_workers
            role = Role.PREFILL if more_prefill else Role.DECODE
        # The window starts again whenever another role is wanted.
        if role is not self.wanted:
            self.wanted, self.wanted_since = role, now
        if role is None:
            return Verdict("balanced", loads, loads, f"{loads}; no change is needed")
        text = f"{loads}; {best.prefill_workers} and {best.decode_workers} are wanted"
        waits = {
            "workers have changed": self.changed_at + COOLDOWN * config.window_s - now,
            f"the last role change failed ({self.failure})": self.paused_until - now,
            "it must stay so": self.wanted_since + config.window_s - now,
        }
        why, wait_s = max(waits.items(), key=lambda item: item[1])
        if wait_s > 0:
            return Verdict("waiting", loads, best, f"{text}; waits {wait_s:.0f} s: {why}")
        return Verdict("move", loads, best, f"{text}; one worker becomes a {role} worker", role)

    def _average(self, loads: Loads, now: float, window_s: float) -> Loads:
        """Return `loads` with averaged needs. The averages restart when the workers change."""
        before = self.mean
        prefill_change = abs(loads.prefill_workers - before.prefill_workers)
        decode_change = abs(loads.decode_workers - before.decode_workers)
        if (
            prefill_change > CHANGED * before.prefill_workers
            or decode_change > CHANGED * before.decode_workers
        ):
            self.changed_at, self.wanted, before = now, None, loads
        kept = math.exp(-(now - self.seen_at) / window_s)
        prefill_need = kept * before.prefill_need + (1 - kept) * loads.prefill_need
        decode_need = kept * before.decode_need + (1 - kept) * loads.decode_need
        # Keep the old numbers of workers, so that small changes add up to a counted one.
        self.mean = replace(before, prefill_need=prefill_need, decode_need=decode_need)
        self.seen_at = now
        return replace(loads, prefill_need=prefill_need, decode_need=decode_need)

    def moved(self, worker_id: str, failure: str, now: float, config: RolesConfig) -> None:
        """Record the end of a role change. The pause doubles with each failure in a row."""
        self.failure = failure
        if not failure:
            self.failed = []
            return
        pause_s = COOLDOWN * config.window_s * 2.0 ** min(32, len(self.failed))
        self.paused_until = now + min(MAX_COOLDOWN_S, pause_s)
        self.failed = [*self.failed, worker_id][-64:]


def loads_of(
    members: Sequence[Member],
    *,
    queued: int,
    means: RequestMeans | None,
    step_model: Callable[[str], StepModel | None],
    tpot_s: float,
) -> Loads:
    """Return the loads of one model's workers.

    `queued`: number of its requests that wait in the router. They are weighted by `means`, the mean
    times of recent requests, and ignored while these are unknown.
    """
    ready = [m for m in members if m.state is MemberState.READY]
    prefill = [m for m in ready if m.info.role is Role.PREFILL]
    decode = [m for m in ready if m.info.role is Role.DECODE]
    prefill_need = sum(_busy(m, means) for m in prefill)
    decode_need = sum(_occupied(m, step_model(m.worker_id), tpot_s) for m in decode)
    if queued and means is not None:
        running = sum(_running(m) for m in decode)
        slots = sum(m.info.limits.max_num_seqs for m in decode)
        each = decode_need / running if running else len(decode) / max(1, slots)
        prefill_need += queued * means.prefill_s.value / CATCH_UP_S
        decode_need += queued * each * means.decode_s.value / CATCH_UP_S
    return Loads(len(prefill), len(decode), prefill_need, decode_need)


def _busy(member: Member, means: RequestMeans | None) -> float:
    """Return the need of a prefill worker: 0 if idle, 1 with a prompt, more if prompts wait."""
    load, tokens = member.reported.load, member.placed.outstanding_tokens
    # Prompts of other routers show only in the reported load.
    if not tokens and (load is None or not load.num_running_reqs + load.num_waiting_reqs):
        return 0.0
    if means is None:
        return 1.0
    waiting = max(0.0, tokens / max(1.0, means.prompt_tokens.value) - 1.0)
    return 1.0 + waiting * means.prefill_s.value / CATCH_UP_S


def _running(member: Member) -> int:
    load = member.reported.load
    return member.placed.outstanding_requests if load is None else load.num_running_reqs


def _occupied(member: Member, model: StepModel | None, tpot_s: float) -> float:
    """Return the need of a decode worker: the highest of the used shares of its slots, KV blocks
    and TPOT limit. Blocks of requests that wait for their prefill do not count."""
    info, load, running = member.info, member.reported.load, _running(member)
    if not running:
        return 0.0
    share = running / (running + (0 if load is None else load.num_waiting_reqs))
    blocks = member.used_blocks * share
    used = max(running / info.limits.max_num_seqs, blocks / info.total_blocks)
    empty_s = math.inf
    if model is not None and model.knows_decode:
        empty_s = model.decode_step_s(Batch())
    if model is None or empty_s >= tpot_s:
        return used
    if load is not None:
        blocks = (info.total_blocks - load.free_blocks) * share
    step_s = model.decode_step_s(Batch(running, round(blocks * info.block_size)))
    return max(used, (step_s - empty_s) / (tpot_s - empty_s))


def spare_for(members: Sequence[Member], role: Role, failed: Collection[str]) -> Member | None:
    """Return the worker of one model that can become a `role` worker at the lowest cost, or None.
    A worker in `failed` is selected only if there is no other."""

    def cost(member: Member) -> tuple[bool, int, int, int, str]:
        has_failed, blocks = member.worker_id in failed, member.placed.reserved_blocks
        tokens, name = member.placed.outstanding_tokens, member.worker_id
        return has_failed, tokens, _running(member), blocks, name

    for member in sorted(members, key=cost):
        # Raised for a worker that cannot change, such as the last one of its role.
        with suppress(InvalidRequest, Unavailable):
            partner_for(members, member.worker_id, role)
            return member
    return None


class Autoscaler:
    """Computes the loads of each model, and changes roles if `config.auto` is set. `verdicts`: the
    last verdict of each model, with averaged loads. `loads`: the last loads, not averaged."""

    def __init__(
        self,
        fleet: Fleet,
        costs: CostModel,
        admission: AdmissionController,
        changer: RoleChanger,
        config: RolesConfig,
    ) -> None:
        self.verdicts: dict[str, Verdict] = {}
        self.loads: dict[str, Loads] = {}
        self._fleet = fleet
        self._costs = costs
        self._admission = admission
        self._changer = changer
        self._config = config
        self._states: dict[str, RoleState] = {}

    @property
    def targets(self) -> Mapping[str, Verdict]:
        """The verdicts that are executed; empty unless `config.auto` is set."""
        return self.verdicts if self._config.auto else {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._config.window_s / 30)
            # Include models whose workers are gone, so that their metrics become 0.
            for model in [*{**self._states, **self._fleet.models()}]:
                await self._look(model)

    async def _look(self, model: str) -> None:
        members, config, now = self._fleet.of_model(model), self._config, self._fleet.now()
        loads = loads_of(
            members,
            queued=self._admission.queued_of(model),
            means=self._costs.means(model),
            step_model=self._costs.step_model,
            tpot_s=self._costs.slo.tpot_s,
        )
        state = self._states.setdefault(model, RoleState(loads, now, now))
        verdict, before = state.decide(loads, now, config), self.verdicts.get(model)
        self.verdicts[model], self.loads[model] = verdict, loads
        # Loads and verdict are kept without `auto` too: an external scaler reads them as metrics.
        if not config.auto:
            return
        if before is None or before.stance != verdict.stance:
            logger.info("roles of %s: %s", model, verdict.text)
        if verdict.role is None:
            return
        worker = spare_for(members, verdict.role, state.failed)
        worker_id = "" if worker is None else worker.worker_id
        failure = await self._change(worker_id, verdict.role)
        if failure:
            logger.warning("roles of %s: %s", model, failure)
        state.moved(worker_id, failure, self._fleet.now(), config)

    async def _change(self, worker_id: str, role: Role) -> str:
        """Change a worker's role. Return why it failed, or ""."""
        if not worker_id:
            return f"no worker can become a {role} worker"
        try:
            done = await self._changer.change(worker_id, role, drain_timeout_s=DRAIN_TIMEOUT_S)
        except PdserveError as error:
            return error.message
        return done.failure


def role_loads(verdicts: Mapping[str, Verdict]) -> Iterator[tuple[tuple[str, str], float]]:
    for model, verdict in sorted(verdicts.items()):
        loads = verdict.loads
        # Without workers, report the load of a single one, so that a scaler knows how many to
        # start.
        yield (model, Role.PREFILL.value), loads.prefill_need / max(1, loads.prefill_workers)
        yield (model, Role.DECODE.value), loads.decode_need / max(1, loads.decode_workers)


def roles_wanted(verdicts: Mapping[str, Verdict]) -> Iterator[tuple[tuple[str, str], float]]:
    for model, verdict in sorted(verdicts.items()):
        yield (model, Role.PREFILL.value), verdict.wanted.prefill_workers
        yield (model, Role.DECODE.value), verdict.wanted.decode_workers
