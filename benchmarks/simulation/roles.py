"""Modelled workers that change their role: the router's own watcher looks and decides, and what a
flip does to a worker is modelled.

    drains ─► goes on elsewhere what has not ended in time ─► registers anew ─► takes `flip_s`
    ─► is given work again
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from router.roles.rules import other_role

if TYPE_CHECKING:
    from benchmarks.simulation.service import Service
    from pdserve.role_config import RolesConfig
    from router.member import Member
    from router.roles.watcher import RoleWatcher

# Of virtual time, between two looks at a worker that drains.
_DRAIN_LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class FlipMade:
    """A worker was moved to `role`: asked at `at_s`, it was empty after `drain_s`, and given work
    again after `total_s`. `moved` requests went on elsewhere."""

    at_s: float
    worker: str
    role: str
    drain_s: float
    total_s: float
    moved: int


class RoleMoves:
    """State: the flips that were made. One worker is moved at a time, as in the router."""

    def __init__(
        self, service: Service, watcher: RoleWatcher, config: RolesConfig, flip_s: float
    ) -> None:
        self.made: list[FlipMade] = []
        self._service = service
        self._clock = service.clock
        self._watcher = watcher
        self._config = config
        self._flip_s = flip_s

    def start(self) -> None:
        """Look for the first time after an interval, and so on for good."""
        self._clock.after(self._config.interval_s, self._look)

    def _look(self) -> None:
        for model in self._watcher.models():
            member = self._watcher.look(model)
            if member is not None:
                self._begin(member)
                return
        self.start()

    def _begin(self, member: Member) -> None:
        self._service.fleet.renew(member.worker_id, member.info.epoch, load=None, draining=True)
        self._drain(member, self._clock.now_s)

    def _drain(self, member: Member, began_s: float, moved: int = 0) -> None:
        engine, now = self._service.engine_of(member), self._clock.now_s
        if now - began_s >= self._config.drain_timeout_s:
            moved += self._service.leave(engine)
        if engine.is_empty and not member.outstanding_requests:
            self._become(member, began_s, moved)
        else:
            self._clock.after(_DRAIN_LOOK_S, lambda: self._drain(member, began_s, moved))

    def _become(self, member: Member, began_s: float, moved: int) -> None:
        drain_s = self._clock.now_s - began_s
        role = other_role(member.info.role)
        info = replace(member.info, role=role, epoch=str(int(member.info.epoch) + 1))
        self._service.open(info, draining=True)
        made = FlipMade(began_s, info.worker_id, role.value, drain_s, drain_s + self._flip_s, moved)
        self._clock.after(self._flip_s, lambda: self._join(info.epoch, made))

    def _join(self, epoch: str, made: FlipMade) -> None:
        self._service.fleet.renew(made.worker, epoch, load=None, draining=False)
        self.made.append(made)
        model = self._service.members[made.worker].info.model.name
        self._watcher.ended(model, made.worker, "")
        self.start()
