"""A sample of a large fleet for one placement, so that its cost does not grow with the fleet.
Workers of each role take turns, the ones near the router first. Full workers are not looked at
again before they have more room. A placement that needs more compares all workers.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from pdserve.types import Role
from router.placement.values import NO_TOKENS_CACHED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from router.fleet.member import Member
    from router.placement.values import Cached, Candidate, Demand

# All workers are compared up to this number of each role.
MOST_COMPARED = 8
# Workers drawn for each role in a larger fleet: the best of two is nearly as good as the best of
# all (Mitzenmacher, 2001).
MOST_DRAWN = 2
# Limit of workers examined to draw these.
MOST_LOOKED_AT = 64
# Workers of each role added for having the most of the prompt cached.
MOST_CACHED = 4
# Workers drawn at each place other than the chosen one.
DRAWN_ELSEWHERE = 2

_PREFILLING, _DECODING = (Role.PREFILL, Role.AGGREGATED), (Role.DECODE, Role.AGGREGATED)
_FARNESS = {"": 0, "host": 0, "zone": 1, "region": 2}

Place = tuple[str, str]
"""Region and zone of a worker; a host has too few workers to draw from."""
Size = tuple[int, int]
"""What a request takes of a worker of one role: tokens of KV, tokens to prefill. A worker that is
too full for a request is so for every larger one."""


class Wanted(NamedTuple):
    """The workers to draw. `most`: of each role. `roles`: empty for all. `serves` is False for
    workers that the request may not use, `has_room` for those that are too full for it now.
    `cached`, `last`: prompt tokens by worker, and workers of the session's last turn, which are
    drawn too."""

    most: int
    serves: Callable[[Candidate], bool]
    has_room: Callable[[Candidate], bool]
    roles: tuple[Role, ...] = ()
    cached: Cached = NO_TOKENS_CACHED
    last: frozenset[str] = frozenset()


class Sample(NamedTuple):
    """`is_whole`: each role has a worker among the candidates. `is_full`: no worker can prefill or
    none can decode, because all are full; some of these are among the candidates."""

    candidates: list[Candidate]
    is_whole: bool
    is_full: bool


@dataclass(slots=True)
class _Ring:
    """Workers of one role at one place. The next draw begins after `at`. `full`: workers that were
    too full for a request of this size, and are not among `members` until they have more room.
    `largest`: of these sizes."""

    members: list[Member] = field(default_factory=list)
    at: int = -1
    full: dict[Member, Size] = field(default_factory=dict)
    largest: Size = (0, 0)

    def draw(self, count: int, size: Size, wanted: Wanted) -> tuple[list[Candidate], bool]:
        """Return the next workers that fit, at most `count`, and whether no other one fits."""
        if size[0] < self.largest[0] or size[1] < self.largest[1]:
            self._reopen_larger(size)
        members, found, full, looked = self.members, [], [], 0
        total, serves, has_room = len(members), wanted.serves, wanted.has_room
        for looked in range(1, min(total, MOST_LOOKED_AT) + 1):
            candidate = (member := members[(self.at + looked) % total]).snapshot()
            if not serves(candidate):
                continue
            if not has_room(candidate):
                full.append(member)
                continue
            found.append(candidate)
            if len(found) == count:
                break
        is_all = looked == total
        # Half of these workers are in the next draw again, so that competitors change.
        self.at = (self.at + looked - count // 2) % (total or 1)
        for member in full:
            members.remove(member)
            self.full[member] = size
            self.largest = (max(self.largest[0], size[0]), max(self.largest[1], size[1]))
        return found, is_all

    def _reopen_larger(self, size: Size) -> None:
        """Look again at workers that were too full for larger requests alone."""
        kept = {m: x for m, x in self.full.items() if x[0] <= size[0] and x[1] <= size[1]}
        self.members += [m for m in self.full if m not in kept]
        self.full = kept
        most_kv = max((kv for kv, _ in kept.values()), default=0)
        self.largest = (most_kv, max((prompt for _, prompt in kept.values()), default=0))

    def reopen(self, member: Member) -> None:
        if self.full.pop(member, None) is not None:
            self.members.append(member)


class Shortlist:
    """Workers of one model, by role and place. State: the next worker of each ring, and which are
    full. `is_short`: all workers may be compared instead. `is_drawn`: `draw` was called."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = {m.worker_id: m for m in members}
        self._rings: dict[Role, dict[Place, _Ring]] = {}
        farness: dict[Place, int] = {}
        for m in members:
            place = _place_of(m)
            self._rings.setdefault(m.info.role, {}).setdefault(place, _Ring()).members.append(m)
            farness[place] = _FARNESS[m.router_distance]
        nearest = min(farness.values(), default=0)
        self._near = [x for x in farness if farness[x] == nearest]
        sizes = Counter(m.info.role for m in members)
        self.is_short = max(sizes.values(), default=0) <= MOST_COMPARED
        self.is_drawn = False

    def __len__(self) -> int:
        return len(self._members)

    def reopen(self, members: Iterable[Member]) -> None:
        """Look again at workers that have more room."""
        for m in members:
            if m.worker_id in self._members:
                self._rings[m.info.role][_place_of(m)].reopen(m)

    def draw(self, demand: Demand, turn: int, wanted: Wanted) -> Sample:
        """Return workers of each role that fit, among them the ones that served the session or have
        the most of the prompt cached. Some workers of both phases are at one place."""
        self.is_drawn = True
        found: list[Candidate] = []
        free: set[Role] = set()
        is_whole, near = True, self._near[turn % len(self._near)]
        for role, rings in self._rings.items():
            if wanted.roles and role not in wanted.roles:
                continue
            own, is_all = self._of_role(role, near, demand, turn, wanted)
            if own or not is_all:
                free.add(role)
            else:
                # A few stand for all of them in the decision, which says why the request waits.
                own = _some_full(rings.values(), wanted)
            is_whole = is_whole and bool(own)
            found += own
        is_full = free.isdisjoint(_PREFILLING) or free.isdisjoint(_DECODING)
        return Sample(found, is_whole, is_full)

    def _of_role(
        self, role: Role, near: Place, demand: Demand, turn: int, wanted: Wanted
    ) -> tuple[list[Candidate], bool]:
        rings, most = self._rings[role], wanted.most
        size = (
            0 if role is Role.PREFILL else demand.kv_tokens,
            0 if role is Role.DECODE else demand.prompt_tokens,
        )
        found: list[Candidate] = []
        is_all = True
        others = [x for x in rings if x != near]
        others = others[(start := turn % (len(others) or 1)) :] + others[:start]
        for place in [near, *others] if near in rings else others:
            if len(found) >= most:
                break
            if demand.regions is not None and place[0] not in demand.regions:
                continue
            ring = rings[place]
            if place != near:
                count = min(most - len(found), DRAWN_ELSEWHERE)
            else:
                count = -(-most // 2) if len(rings) > 1 else most
            drawn, is_whole = ring.draw(count, size, wanted)
            is_all = is_all and is_whole
            found += drawn
        if wanted.last or wanted.cached:
            names = [*wanted.last, *self._most_cached(role, wanted.cached)]
            known = (self._members[x].snapshot() for x in names if x in self._members)
            added = {c.worker_id: c for c in found}
            fit = (c for c in known if c.role is role and wanted.serves(c) and wanted.has_room(c))
            added |= {c.worker_id: c for c in fit}
            found = list(added.values())
        return found, is_all

    def _most_cached(self, role: Role, cached: Cached) -> list[str]:
        names = (x for x in cached if x in self._members)
        holders = (x for x in names if self._members[x].info.role is role)
        return heapq.nlargest(MOST_CACHED, holders, key=cached.__getitem__)


def _place_of(member: Member) -> Place:
    labels = member.info.topology
    return labels.get("region", ""), labels.get("zone", "")


def _some_full(rings: Iterable[_Ring], wanted: Wanted) -> list[Candidate]:
    members = islice((m for ring in rings for m in ring.full), MOST_LOOKED_AT)
    candidates = (m.snapshot() for m in members)
    return [*islice(filter(wanted.serves, candidates), wanted.most)]
