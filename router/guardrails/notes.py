"""Records the verdicts of guards: in metrics, in the audit log, and for `pdserve explain`. Never
the texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.guardrails.guard import GuardVerdict, NotedVerdict

if TYPE_CHECKING:
    from pdserve.observe.audit import AuditLog
    from router.guardrails.guard import Subject
    from router.metrics import RouterMetrics
    from router.placement.decisions import RecentRequests

_MAX_OF_ONE_REQUEST = 32


class VerdictNotes:
    """`recent` keeps the verdicts of the last requests."""

    def __init__(
        self, metrics: RouterMetrics, audit: AuditLog, recent: RecentRequests[NotedVerdict]
    ) -> None:
        self._metrics, self._audit, self.recent = metrics, audit, recent

    def note(
        self, guard: str, subject: Subject, verdict: GuardVerdict, took_s: float | None, reason: str
    ) -> None:
        """Record a verdict that took `took_s` seconds, None if that was not measured."""
        place = subject.place.value
        self._metrics.count("guard_verdicts", guard, place, verdict.value)
        if took_s is not None:
            self._metrics.observe("guard_seconds", took_s, guard, place)
        known = self.recent.entries(subject.request_id)
        key = (guard, place, verdict.value)
        noted = next((x for x in known if (x.guard, x.place, x.verdict) == key), None)
        if noted is None:
            noted = NotedVerdict(*key)
            known = [*known, noted][-_MAX_OF_ONE_REQUEST:]
        noted.count, noted.seconds = noted.count + 1, noted.seconds + (took_s or 0.0)
        noted.reason = reason or noted.reason
        self.recent.keep(subject.request_id, known)
        if verdict is not GuardVerdict.PASS:
            self._audit.entry(
                "guard",
                guard=guard,
                place=place,
                verdict=verdict.value,
                tenant=subject.tenant,
                model=subject.model,
                request_id=subject.request_id,
            )

    def refused(self, subject: Subject, code: str, reason: str) -> None:
        """Count a prompt that was refused before it was placed."""
        if subject.place == "prompt":
            self._metrics.refused(subject.model, subject.tenant, code, reason)
