"""Whom a flight tells of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.types import Receipt, Usage
    from router.flight import Flight
    from router.handoff_actions import Resubmit
    from router.leg_stream import LegStream
    from router.member import Member
    from router.prefix import PrefixMetrics


class TenantObserver(Protocol):
    """Who is told what a tenant used."""

    def answered(self, tenant: str, usage: Usage) -> None: ...


class Observer(Protocol):
    """Who is told what a request cost and how it ended."""

    @property
    def tenants(self) -> TenantObserver: ...

    @property
    def prefix(self) -> PrefixMetrics: ...

    def fell_back(self, model: str, step: str, reason: str) -> None: ...

    def continued(self, model: str, source: str) -> None: ...

    def answered(
        self, model: str, usage: Usage, receipt: Receipt, *, ttft_s: float, e2e_s: float
    ) -> None: ...

    def ended(self, model: str, outcome: str) -> None: ...


class Siblings(Protocol):
    """The other answers to the same prompt. One of all leads: its KV is theirs."""

    def join(self, flight: Flight, member: Member) -> Sequence[LegStream]:
        """The streams of those that are to fork from `flight` on `member`."""
        ...

    def spoke(self, flight: Flight) -> None:
        """The KV of `flight` is where it decodes."""
        ...

    def defers(self, flight: Flight, action: Resubmit) -> bool:
        """Whether `flight` waits for its leader instead of going on by itself."""
        ...
