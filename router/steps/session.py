"""Sessions: state of a conversation that the router keeps between turns. A session prefers the
workers of its last turn (`session` in router/placement/policies.py), because they have its history
cached, also if the router cannot see a worker's cache.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import merge
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct, field, structs

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.types import GenerateRequest, Usage
    from router.metrics import RouterMetrics
    from router.walk import Answered, Proceed, Walk

SESSIONS_KEPT = 10_000  # of one tenant, under 1 KiB each
NO_WORKERS: frozenset[str] = frozenset()


class Pauses(Struct, gc=False):
    """Pauses between turns of a session or tenant, estimated as TCP estimates a round trip (RFC
    6298): mean and mean deviation in seconds, weighted towards recent pauses. Both are 0 before the
    first pause."""

    mean_s: float = 0.0
    deviation_s: float = 0.0

    def add(self, seconds: float) -> None:
        if not self.mean_s:
            self.mean_s, self.deviation_s = seconds, seconds / 2
            return
        self.deviation_s += (abs(seconds - self.mean_s) - self.deviation_s) / 4
        self.mean_s += (seconds - self.mean_s) / 8

    @property
    def most_s(self) -> float:
        """Upper estimate of a pause in seconds, which few exceed; 0 if unknown."""
        return self.mean_s + 4 * self.deviation_s


class SessionHistory(Struct, gc=False):
    """A conversation of one tenant with one model.

    `used`: time of its last answer. `turns`: its answers. `prompt_tokens`, `cached_tokens`: sums
    over its turns. `recomputed_tokens`: tokens of earlier turns that were computed again.
    `history`: tokens of the last turn's prompt and answer. `workers`: ids of the workers that
    computed it. `is_paused`: no request has arrived since.
    """

    used: float
    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    history: int = 0
    workers: frozenset[str] = NO_WORKERS
    is_paused: bool = True
    pauses: Pauses = field(default_factory=Pauses)


class SessionName(NamedTuple):
    """Key of a session. An agent may use several models under one id; each has its own history."""

    tenant: str
    model: str
    adapter: str
    session: str


_Sessions = OrderedDict[SessionName, SessionHistory]


class Sessions:
    """The sessions of each tenant by model, adapter and id, the least recently used first.

    A tenant can neither name nor displace the sessions of another tenant. `idle_s`: time after
    which a session without an answer is forgotten; 0 disables sessions.
    """

    def __init__(
        self, clock: Callable[[], float], *, idle_s: float, most: int = SESSIONS_KEPT
    ) -> None:
        self._now, self._idle_s, self._most = clock, idle_s, most
        self._tenants: dict[str, _Sessions] = {}
        self._pauses: dict[str, Pauses] = {}  # by tenant

    def __len__(self) -> int:
        for sessions in self._tenants.values():
            self._expire(sessions)
        return sum(map(len, self._tenants.values()))

    def last(self, most: int) -> list[tuple[SessionName, SessionHistory]]:
        """Return the `most` sessions with the latest answers, newest first."""
        newest_first = (reversed(sessions.items()) for sessions in self._tenants.values())
        merged = merge(*newest_first, key=lambda x: x[1].used, reverse=True)
        return list(islice(merged, most))

    def find(self, request: GenerateRequest) -> SessionHistory | None:
        """Return the session of a request. Return None without a session, and in its first turn."""
        sessions = self._tenants.get(request.tenant) if request.session else None
        if sessions is None:
            return None
        self._expire(sessions)
        return sessions.get(_name(request))

    def workers_of(self, request: GenerateRequest) -> frozenset[str]:
        """Return the ids of the workers of the session's last turn."""
        found = self.find(request)
        return NO_WORKERS if found is None else found.workers

    def arrived(self, request: GenerateRequest) -> float:
        """Record that a turn begins. Return the time within which the next turn is expected, from
        the pauses of this session, else of its tenant's sessions; 0 if there were none."""
        session = self.find(request)
        of_tenant = self._pauses.get(request.tenant)
        if session is not None and session.is_paused:
            session.is_paused, pause_s = False, self._now() - session.used
            session.pauses.add(pause_s)
            if of_tenant is None:
                of_tenant = self._pauses[request.tenant] = Pauses()
            of_tenant.add(pause_s)
        if session is not None and (seconds := session.pauses.most_s):
            return seconds
        return 0.0 if of_tenant is None else of_tenant.most_s

    def answered(self, request: GenerateRequest, usage: Usage, workers: frozenset[str]) -> int:
        """Add a turn to the session of `request`. Return the number of prompt tokens computed
        again: tokens of the last turn that were not cached, assuming the prompt begins with that
        turn. The number is too high if the client shortens its history.
        """
        if not (request.session and self._idle_s):
            return 0
        sessions = self._tenants.setdefault(request.tenant, OrderedDict())
        self._expire(sessions)
        key, now = _name(request), self._now()
        session = sessions.get(key)
        if session is None:
            session = sessions[key] = SessionHistory(now)
            if len(sessions) > self._most:
                sessions.popitem(last=False)
        else:
            sessions.move_to_end(key)
        known = min(session.history, usage.prompt_tokens)
        recomputed = max(0, known - usage.cached_tokens)
        session.used, session.workers, session.is_paused = now, workers, True
        session.turns += 1
        session.prompt_tokens += usage.prompt_tokens
        session.cached_tokens += usage.cached_tokens
        session.recomputed_tokens += recomputed
        session.history = usage.prompt_tokens + usage.completion_tokens
        return recomputed

    def _expire(self, sessions: _Sessions) -> None:
        before = self._now() - self._idle_s
        while sessions and next(iter(sessions.values())).used < before:
            sessions.popitem(last=False)


def _name(request: GenerateRequest) -> SessionName:
    return SessionName(request.tenant, request.model, request.adapter_key, request.session)


class SessionStep:
    """Prefers the workers of a session's last turn, and records the turn."""

    def __init__(self, sessions: Sessions, metrics: RouterMetrics) -> None:
        self._sessions, self._metrics = sessions, metrics

    async def __call__(self, walk: Walk, proceed: Proceed) -> Answered:
        request, sessions = walk.request, self._sessions
        if not request.session:
            return await proceed(walk)
        last = sessions.workers_of(request)
        request = structs.replace(request, next_turn_s=sessions.arrived(request))
        done = await proceed(structs.replace(walk, request=request, last_workers=last))
        usage, receipt = done.usage, done.receipt
        if usage is not None and receipt is not None:
            workers = frozenset((receipt.prefill_worker, receipt.decode_worker)) - {""}
            walk.record.recomputed_tokens = sessions.answered(request, usage, workers)
            self._metrics.count("session_turns", request.model)
            self._metrics.count(
                "recomputed_tokens", request.model, by=walk.record.recomputed_tokens
            )
        return done
