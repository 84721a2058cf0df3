"""Guards, what they check, and what they say of it."""

from __future__ import annotations

import asyncio
import logging
import time
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from msgspec import Struct

from pdserve.errors import ContentFiltered, PdserveError, Refusal, Unavailable
from router.placement.decisions import RecentRequests
from router.placement.values import may_hold

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pdserve.config import GuardConfig
    from pdserve.security.patterns import Patterns
    from pdserve.types import Regions

logger = logging.getLogger(__name__)

# Longer texts are searched in a thread, so that they do not delay the tokens of other requests.
_INLINE_CHARS = 512


class GuardPlace(StrEnum):
    PROMPT = "prompt"
    ANSWER = "answer"


class GuardVerdict(StrEnum):
    """`FAILED`: no verdict; router.guards[].on_failure decides."""

    PASS = "pass"
    REDACT = "redact"
    REFUSE = "refuse"
    LOG = "log"
    FAILED = "failed"


class Subject(Struct, frozen=True):
    """The request that a text belongs to. `model`: the name of the model or adapter. `regions`:
    where its data may be."""

    place: GuardPlace
    request_id: str
    tenant: str
    model: str
    regions: Regions = None


class GuardedText(NamedTuple):
    """A text to check. `kind`: in a prompt, the role of its message, "prompt" without messages, or
    "tools"; in an answer "text", "reasoning", or "tool_call" (JSON of the arguments)."""

    kind: str
    text: str


class Checked(NamedTuple):
    """A verdict. `texts`: with REDACT, what stands in place of each piece. `reason`: of a
    service."""

    verdict: GuardVerdict
    texts: Sequence[str] = ()
    reason: str = ""


PASSED = Checked(GuardVerdict.PASS)


class GuardCheckFailed(Exception):
    """A guard gave no verdict that can be used."""


class Checker(Protocol):
    """Checks pieces. Raises GuardCheckFailed, and PdserveError of a worker."""

    async def check(self, subject: Subject, pieces: Sequence[GuardedText]) -> Checked: ...


class Notes(Protocol):
    """Records verdicts (notes.py)."""

    def note(
        self, guard: str, subject: Subject, verdict: GuardVerdict, took_s: float | None, reason: str
    ) -> None: ...
    def refused(self, subject: Subject, code: str, reason: str) -> None: ...


class PatternChecker:
    """Searches for patterns and words."""

    def __init__(self, patterns: Patterns, verdict: GuardVerdict, replacement: str) -> None:
        self.patterns, self.verdict, self.replacement = patterns, verdict, replacement

    async def check(self, subject: Subject, pieces: Sequence[GuardedText]) -> Checked:
        if sum([len(x.text) for x in pieces]) <= _INLINE_CHARS:
            return self._check(pieces)
        return await asyncio.to_thread(self._check, pieces)

    def _check(self, pieces: Sequence[GuardedText]) -> Checked:
        found = [self.patterns.scan(x.text)[0] for x in pieces]
        if not any(found):
            return PASSED
        if self.verdict is not GuardVerdict.REDACT:
            return Checked(self.verdict)
        return Checked(
            self.verdict, [self._redacted(x.text, y) for x, y in zip(pieces, found, strict=True)]
        )

    def _redacted(self, text: str, matches: Sequence[tuple[int, int]]) -> str:
        kept, at = [], 0
        for begin, end in matches:
            kept += [text[at:begin], self.replacement]
            at = end
        return "".join([*kept, text[at:]])


class Guardrail:
    """One item of router.guards. State: the calls in flight."""

    def __init__(self, config: GuardConfig, checker: Checker, notes: Notes) -> None:
        self.config, self.name = config, config.name
        self._checker, self.notes = checker, notes
        self._turns = asyncio.Semaphore(config.max_calls)

    @property
    def built_in(self) -> PatternChecker | None:
        """The patterns of the guard, which need no call."""
        return self._checker if isinstance(self._checker, PatternChecker) else None

    def watches(self, place: GuardPlace, tenant: str, models: Collection[str | None]) -> bool:
        config = self.config
        return (
            place in config.places
            and (not config.tenants or tenant in config.tenants)
            and (not config.models or not {*models}.isdisjoint(config.models))
        )

    def note(
        self, subject: Subject, verdict: GuardVerdict, took_s: float | None = None, reason: str = ""
    ) -> None:
        """Record a verdict. `took_s`: None if it took no call."""
        self.notes.note(self.name, subject, verdict, took_s, reason)

    async def check(self, subject: Subject, pieces: Sequence[GuardedText]) -> Checked:
        """Return the verdict. Raises Unavailable if the guard fails closed."""
        began = time.monotonic()
        try:
            self._check_region(subject)
            async with asyncio.timeout(None if self.built_in else self.config.timeout_s):
                async with self._turns:
                    checked = await self._checker.check(subject, pieces)
        except (GuardCheckFailed, TimeoutError, PdserveError) as error:
            reason = "no verdict in time" if isinstance(error, TimeoutError) else str(error)
            logger.warning("guard %s failed: %s", self.name, reason)
            self.note(subject, GuardVerdict.FAILED, time.monotonic() - began, reason)
            if self.config.on_failure == "open":
                return PASSED
            self.notes.refused(subject, Unavailable.code, Refusal.GUARD_FAILED)
            text = f"the guard {self.name!r} gave no verdict on the {subject.place}"
            raise Unavailable(text, reason=Refusal.GUARD_FAILED, retry_after_s=1.0) from None
        self.note(subject, checked.verdict, time.monotonic() - began, checked.reason)
        return checked

    def _check_region(self, subject: Subject) -> None:
        """Raise GuardCheckFailed if the texts may not be where the service is."""
        region = self.config.region
        if region and not may_hold(subject.regions, {"region": region}):
            raise GuardCheckFailed(f"it is in {region!r}, where data of the request may not be")


class NotedVerdict(Struct):
    """How often a guard gave a verdict in one place of a request, in how many seconds. `reason`:
    the last one of a service."""

    guard: str
    place: str
    verdict: str
    reason: str = ""
    count: int = 0
    seconds: float = 0.0


class Guards:
    """All guards, in order. `verdicts`: of the last requests."""

    def __init__(
        self, guards: Sequence[Guardrail], verdicts: RecentRequests[NotedVerdict] | None = None
    ) -> None:
        self._guards = guards
        self.verdicts = verdicts or RecentRequests[NotedVerdict](0)

    def __bool__(self) -> bool:
        return bool(self._guards)

    def of(self, place: GuardPlace, tenant: str, models: Collection[str | None]) -> list[Guardrail]:
        """Return the guards of a request. `models`: the names of its model and adapter."""
        return [x for x in self._guards if x.watches(place, tenant, models)]


NO_GUARDS = Guards(())


async def check_prompt(
    guards: Sequence[Guardrail], subject: Subject, pieces: Sequence[GuardedText], field: str
) -> dict[str, str]:
    """Return what stands in place of redacted texts, by text. Raises ContentFiltered naming
    `field` for a prompt that is refused, and Unavailable for a guard that fails closed."""
    texts = [x.text for x in pieces]
    for guard in guards:
        now = [x._replace(text=y) for x, y in zip(pieces, texts, strict=True)]
        checked = await guard.check(subject, now)
        if checked.verdict is GuardVerdict.REFUSE:
            guard.notes.refused(subject, ContentFiltered.code, Refusal.GUARD)
            text = f"the guard {guard.name!r} refuses '{field}'"
            raise ContentFiltered(text, field=field, reason=Refusal.GUARD)
        if checked.verdict is GuardVerdict.REDACT:
            texts = list(checked.texts)
    return {x.text: y for x, y in zip(pieces, texts, strict=True) if x.text != y}
