"""What to do with the processes, decided apart from doing it: events in, orders out.

A process that dies before all are ready ends everything: the configuration is at fault, and
starting again would fail again. One that was told to end is started again at once. One that dies
later is started again after a pause that doubles, and given up on after `max_restarts` deaths that
followed each other closely. A stop goes in order: the routers first, which let running requests
finish, then the workers, which drain. Whatever outstays its deadline is killed.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

OK, FAILED, BAD_CONFIG, INTERRUPTED = 0, 1, 2, 130

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
# A process that served for this long has earned a clean record.
FORGIVEN_AFTER_S = 300.0
# For a process that is not serving yet there is nothing to finish.
QUICK_STOP_S = 5.0


@dataclass(frozen=True, slots=True)
class Policy:
    """How patient the supervisor is. The grace periods are those of the processes themselves, with
    room for their own deadlines to act first."""

    start_timeout_s: float
    router_grace_s: float
    worker_grace_s: float
    max_restarts: int


@dataclass(frozen=True, slots=True)
class Start:
    """Start this process."""

    name: str


@dataclass(frozen=True, slots=True)
class Send:
    """Send this signal to this process."""

    name: str
    signal: signal.Signals


@dataclass(frozen=True, slots=True)
class Announce:
    """All are ready: say so, and write the ready file. Again after a restart."""

    first: bool


@dataclass(frozen=True, slots=True)
class Tell:
    """Something that a person should read."""

    text: str
    is_error: bool = False


@dataclass(frozen=True, slots=True)
class Explain:
    """This process died where it should not have: show the end of its log."""

    name: str
    code: int


@dataclass(frozen=True, slots=True)
class Finish:
    """No process is left: end with this exit code."""

    exit_code: int


Order = Start | Send | Announce | Tell | Explain | Finish


class _State(Enum):
    DOWN = auto()
    STARTING = auto()
    READY = auto()


class _Stage(Enum):
    STARTING = auto()
    SERVING = auto()
    STOPPING_ROUTERS = auto()
    STOPPING_WORKERS = auto()
    STOPPING_ALL = auto()
    DONE = auto()


@dataclass(slots=True)
class _Process:
    """Changed by Supervision alone."""

    name: str
    state: _State = _State.DOWN
    deaths: int = 0
    ready_at: float = 0.0
    restart_at: float | None = None
    kill_at: float | None = None


@dataclass(slots=True)
class Supervision:
    """The state of one `pdserve up`. Every method takes the time and returns orders to carry out,
    in order; none does I/O."""

    routers: Collection[str]
    workers: Iterable[str]
    policy: Policy
    router_addresses_known: bool
    _stage: _Stage = _Stage.STARTING
    _processes: dict[str, _Process] = field(default_factory=dict)
    _registered: set[str] = field(default_factory=set)
    _started_at: float = 0.0
    _exit_code: int = OK

    def __post_init__(self) -> None:
        self._processes = {name: _Process(name) for name in (*self.routers, *self.workers)}

    # Questions

    @property
    def is_starting(self) -> bool:
        return self._stage is _Stage.STARTING

    @property
    def awaited(self) -> tuple[str, ...]:
        """Who is not ready, or not registered, yet."""
        return tuple(
            process.name
            for process in self._processes.values()
            if process.state is not _State.READY
            or (process.name not in self.routers and process.name not in self._registered)
        )

    def wake_at(self) -> float | None:
        """When `tick` has something to do even if nothing happens."""
        moments = [self._started_at + self.policy.start_timeout_s] if self.is_starting else []
        for process in self._processes.values():
            moments += [x for x in (process.restart_at, process.kill_at) if x is not None]
        return min(moments, default=None)

    # Events

    def begin(self, now: float) -> list[Order]:
        self._started_at = now
        names = self._processes if self.router_addresses_known else self.routers
        return [self._start(name) for name in names]

    def became_ready(self, name: str, now: float) -> list[Order]:
        process = self._processes[name]
        process.state = _State.READY
        process.ready_at = now
        if self._stage is _Stage.SERVING:
            return [Tell(f"{name} is back"), Announce(first=False)]
        if self._stage is not _Stage.STARTING:
            return []
        orders: list[Order] = []
        if name in self.routers and not self.router_addresses_known:
            serving = (self._processes[x].state is _State.READY for x in self.routers)
            if all(serving):
                orders += [self._start(x) for x in self._worker_names()]
        return orders + self._announce_if_complete()

    def registered(self, names: Collection[str]) -> list[Order]:
        """Every router can place work on these workers."""
        self._registered.update(names)
        return self._announce_if_complete() if self.is_starting else []

    def exited(self, name: str, code: int, now: float) -> list[Order]:
        process = self._processes[name]
        was_ready = process.state is _State.READY
        process.state = _State.DOWN
        process.kill_at = None
        if self._stage is _Stage.STARTING:
            outcome = BAD_CONFIG if code == BAD_CONFIG else FAILED
            return [Explain(name, code), *self._stop_all(outcome, now)]
        if self._stage is _Stage.SERVING:
            return self._restart(process, code, now, was_ready=was_ready)
        return self._go_on_stopping(now)

    def stop_requested(self, now: float) -> list[Order]:
        for process in self._processes.values():
            process.restart_at = None
        if self._stage is _Stage.STARTING:
            return [Tell("stopping"), *self._stop_all(OK, now)]
        if self._stage is _Stage.SERVING:
            self._stage = _Stage.STOPPING_ROUTERS
            grace = self.policy.router_grace_s
            orders: list[Order] = [Tell("stopping: running requests may finish")]
            return orders + self._terminate(self.routers, grace, now) + self._go_on_stopping(now)
        if self._stage is _Stage.DONE:
            return []
        self._exit_code = INTERRUPTED
        self._stage = _Stage.STOPPING_ALL
        return [Tell("stopping at once"), *self._kill(self._alive())]

    def tick(self, now: float) -> list[Order]:
        orders: list[Order] = []
        if self.is_starting and now >= self._started_at + self.policy.start_timeout_s:
            waited = f"{self.policy.start_timeout_s:g} s"
            orders.append(Tell(f"not ready after {waited}: {', '.join(self.awaited)}", True))
            orders += self._stop_all(FAILED, now)
        for process in self._processes.values():
            if process.restart_at is not None and now >= process.restart_at:
                orders.append(self._start(process.name))
            if process.kill_at is not None and now >= process.kill_at:
                orders.append(Tell(f"{process.name} did not stop in time and is killed"))
                orders += self._kill([process])
        return orders

    # Transitions

    def _start(self, name: str) -> Start:
        process = self._processes[name]
        process.state = _State.STARTING
        process.restart_at = None
        return Start(name)

    def _announce_if_complete(self) -> list[Order]:
        if self.awaited:
            return []
        self._stage = _Stage.SERVING
        return [Announce(first=True)]

    def _restart(self, process: _Process, code: int, now: float, *, was_ready: bool) -> list[Order]:
        if was_ready and now - process.ready_at >= FORGIVEN_AFTER_S:
            process.deaths = 0
        if was_ready and code == OK:
            # It was drained and told to stop, by a person or a rollout.
            again = Tell(f"{process.name} has ended and is started again")
            return [again, self._start(process.name)]
        process.deaths += 1
        explain = Explain(process.name, code)
        if process.deaths > self.policy.max_restarts:
            often = "once" if process.deaths == 1 else f"{process.deaths} times"
            given_up = Tell(f"{process.name} died {often}; giving up", True)
            return [explain, given_up, *self._stop_all(FAILED, now)]
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (process.deaths - 1))
        process.restart_at = now + pause
        return [explain, Tell(f"{process.name} is started again in {pause:g} s")]

    def _stop_all(self, exit_code: int, now: float) -> list[Order]:
        self._stage = _Stage.STOPPING_ALL
        self._exit_code = exit_code
        for process in self._processes.values():
            process.restart_at = None
        orders = self._terminate(self._processes, QUICK_STOP_S, now)
        return orders + self._go_on_stopping(now)

    def _go_on_stopping(self, now: float) -> list[Order]:
        orders: list[Order] = []
        any_router = any(self._is_alive(name) for name in self.routers)
        if self._stage is _Stage.STOPPING_ROUTERS and not any_router:
            self._stage = _Stage.STOPPING_WORKERS
            orders += self._terminate(self._worker_names(), self.policy.worker_grace_s, now)
        if self._stage is not _Stage.DONE and not self._alive():
            self._stage = _Stage.DONE
            orders.append(Finish(self._exit_code))
        return orders

    def _terminate(self, names: Iterable[str], grace_s: float, now: float) -> list[Order]:
        orders: list[Order] = []
        for name in names:
            process = self._processes[name]
            if self._is_alive(name):
                is_ready = process.state is _State.READY
                process.kill_at = now + (grace_s if is_ready else min(grace_s, QUICK_STOP_S))
                orders.append(Send(name, signal.SIGTERM))
        return orders

    def _kill(self, processes: Iterable[_Process]) -> list[Order]:
        orders: list[Order] = []
        for process in processes:
            process.kill_at = None
            orders.append(Send(process.name, signal.SIGKILL))
        return orders

    def _worker_names(self) -> list[str]:
        return [name for name in self._processes if name not in self.routers]

    def _is_alive(self, name: str) -> bool:
        return self._processes[name].state is not _State.DOWN

    def _alive(self) -> list[_Process]:
        return [x for x in self._processes.values() if x.state is not _State.DOWN]
