"""Audits of answers: one worker computes prompt and answer again as one prompt, and each token of
the answer must be the likeliest one there, or nearly.

One prefill compares all tokens, each after those that were delivered, so a token that differs does
not hide the later ones. An audit runs on an idle worker, without cached KV, and stops as soon as
that worker gets a request.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter, deque
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct, structs

from pdserve.errors import PdserveError
from pdserve.types import GenerateRequest, Role, SamplingParams, ServiceClass
from router.attempt import specs
from router.attempt.answer import Discard
from router.attempt.attempt import Attempt
from router.attempt.handoff import RETRYABLE, Failed, Finished
from router.attempt.observer import StreamObserver
from router.attempt.placer import Reservation
from router.attempt.streams import Answer
from router.placement.values import MemberState, may_hold
from router.steps.account import charge_all
from router.steps.audit import DIFFERENT, SAME, SKIPPED, Hop
from router.steps.ledger import write_transfers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pdserve.config import AuditConfig
    from pdserve.types import PositionLogprobs
    from router.admission import AdmissionController
    from router.fleet.billing import Billing
    from router.fleet.health import Pair
    from router.fleet.member import Member
    from router.fleet.registry import Fleet
    from router.fleet.worker_link import Links
    from router.steps.audit import AuditedAnswer, AuditQueue, WaitingAudit
    from router.steps.capsule import Capsules
    from router.steps.ledger import ResidencyLedger

logger = logging.getLogger(__name__)

POLL_S = 0.1  # between two looks for an idle worker; idleness is no event
YIELD_POLL_S = 0.01  # between two looks whether the worker got a request
TIMEOUT_S = 60.0
MAX_FAILURES = 3
FORGET_S = 86_400.0
MAX_DIFFERENCES = 1000
# Near ties: rounding of float32 moves a logprob by less than 0.001, of bfloat16 by 0.1 and more.
FLOAT32_MARGIN, MARGIN = 0.01, 0.5
AUDIT = "audit"  # reason of waste, and of capsules


class Comparison(Struct, frozen=True):
    """Result of comparing an answer's tokens with logprobs.

    `at`: index of the first token that differs, None if none does; the worker's likeliest token is
    `expected` there, and its logprob is higher by `gap`. `near_ties`: tokens that are not the
    likeliest ones, by at most the margin; `widest` is the largest difference of one.
    """

    compared: int
    near_ties: int = 0
    widest: float = 0.0
    at: int | None = None
    expected: int = 0
    gap: float = 0.0


class Doubt(NamedTuple):
    """A difference that one worker found."""

    verifier: str
    found: Comparison

    @property
    def at(self) -> int:
        return self.found.at or 0


class AuditDifference(Struct, frozen=True):
    """An answer that an audit did not confirm.

    `verifier` computed it again; with `confirmed_by`, another worker came to the same result.
    `suspects`: the workers that may have computed or moved something wrong, and their `pair`, if KV
    moved between them. If the third worker confirmed the answer, the suspect is the verifier.
    """

    answer: AuditedAnswer
    comparison: Comparison
    verifier: str
    confirmed_by: str
    suspects: tuple[str, ...]
    pair: Pair | None

    @property
    def reason(self) -> str:
        found, by = self.comparison, self.verifier
        return f"an audit by {by} found another token at {found.at} (gap {found.gap:.3g})"


def keep_capsule(capsules: Capsules, difference: AuditDifference) -> None:
    """Have a capsule kept, with the right tokens up to the first wrong one."""
    answer, found = difference.answer, difference.comparison
    if answer.evidence is not None and found.at is not None:
        message = f"{difference.reason}; suspects: {' and '.join(difference.suspects)}"
        evidence = structs.replace(answer.evidence, message=message)
        expected = {answer.index: [*answer.token_ids[: found.at], found.expected]}
        capsules.keep(evidence, AUDIT, expected)


def ignore(difference: AuditDifference) -> None:
    """Record nothing."""


def compare(
    token_ids: Sequence[int], scores: Sequence[PositionLogprobs], margin: float, *, first: int = 0
) -> Comparison:
    """Compare tokens from index `first` on with the logprobs of all of them. Raises ValueError if
    `scores` are of other tokens."""
    if [x.sampled.token_id for x in scores] != list(token_ids):
        raise ValueError("the logprobs are not those of the answer")
    near_ties, widest, compared = 0, 0.0, len(token_ids) - first
    for index, score in enumerate(scores[first:], first):
        best = max(score.top, key=lambda x: x.logprob, default=score.sampled)
        gap = best.logprob - score.sampled.logprob
        if not gap <= margin:  # also if it is not a number
            return Comparison(compared, near_ties, widest, index, best.token_id, gap)
        near_ties, widest = near_ties + (gap > 0), max(widest, gap)
    return Comparison(compared, near_ties, widest)


class Ejections(NamedTuple):
    """What a difference ejects."""

    pair: Pair | None
    workers: tuple[str, ...]


class AuditSuspects:
    """The differences of the last day by place: a pair of workers, or a worker alone."""

    def __init__(self) -> None:
        self._found: deque[tuple[float, str, Hop]] = deque(maxlen=MAX_DIFFERENCES)

    def add(self, model: str, place: Hop, now: float) -> Ejections:
        """Add a difference. The second one of a pair ejects the pair, because either worker or the
        link may be at fault. A worker is ejected if it has differences in two pairs, or two
        alone."""
        self._found.append((now, model, place))
        recent = [x for at, _, x in self._found if now - at < FORGET_S]
        places = Counter((x.workers, x.pair) for x in recent)
        repeated = places[place.workers, place.pair] > 1
        workers = [
            name
            for name in place.workers
            if len([x for x in places if name in x[0]]) > 1 or (repeated and place.pair is None)
        ]
        return Ejections(place.pair if repeated else None, tuple(workers))

    def by_model(self, now: float) -> dict[str, Counter[str]]:
        """Return, by model, the suspects with the number of differences."""
        found: dict[str, Counter[str]] = {}
        for at, model, place in self._found:
            if now - at < FORGET_S:
                found.setdefault(model, Counter())[" and ".join(place.workers)] += 1
        return found


class Auditor:
    """Audits the answers of `queue`, one at a time, in `run`. `record` gets each difference."""

    def __init__(
        self,
        fleet: Fleet,
        links: Links,
        admission: AdmissionController,
        queue: AuditQueue,
        config: AuditConfig,
        billing: Billing,
        ledger: ResidencyLedger,
        count: Callable[..., None],
        record: Callable[[AuditDifference], None] = ignore,
    ) -> None:
        self._fleet, self._links, self._admission = fleet, links, admission
        self._queue, self._config = queue, config
        self._billing, self._ledger, self._count, self._record = billing, ledger, count, record
        self._suspects = AuditSuspects()
        self._doubts: dict[WaitingAudit, Doubt] = {}
        self._results: dict[str, Counter[str]] = {}

    async def run(self) -> None:
        while True:
            await self._queue.until_waiting()
            if not await self._next():
                await asyncio.sleep(POLL_S)

    def texts(self) -> list[tuple[str, str]]:
        """Return, by model, the results so far and the suspects."""
        suspects, texts = self._suspects.by_model(self._fleet.now()), []
        for model, results in sorted(self._results.items()):
            text = ", ".join(f"{results[x]} {x}" for x in (SAME, DIFFERENT, SKIPPED))
            if found := suspects.get(model):
                listed = [f"{name} ({times})" for name, times in found.most_common(3)]
                text = f"{text}; suspects: {', '.join(listed)}"
            texts.append((model, text))
        return texts

    def suspects(self) -> Iterable[tuple[tuple[str, ...], float]]:
        """Return the number of suspects by model, for metrics."""
        found = self._suspects.by_model(self._fleet.now())
        return [((x,), len(found.get(x, ()))) for x in self._fleet.models()]

    async def _next(self) -> bool:
        """Audit the first answer for which a worker is idle. Return False without one."""
        for waiting in list(self._queue.waiting):
            if self._has_ended(waiting):
                continue
            if self._admission.queued:
                return False
            idle = [x for x in self._able(waiting) if _is_idle(x)]
            if idle:
                await self._audit(waiting, idle[0])
                return True
        return False

    def _has_ended(self, waiting: WaitingAudit) -> bool:
        """End an answer that is too old, or whose weights are gone."""
        answer, age_s = waiting.answer, self._fleet.now() - waiting.since
        has_weights = self._fleet.weights_of(answer.model).identity == answer.weights.identity
        if has_weights and age_s < self._config.max_age_s and waiting.failures < MAX_FAILURES:
            return False
        if (doubt := self._doubts.pop(waiting, None)) is None:
            self._end(waiting, SKIPPED)
        else:  # no third worker was idle
            self._differs(waiting, doubt, "", answer.hop_of(doubt.at))
        return True

    def _able(self, waiting: WaitingAudit) -> list[Member]:
        """Return the workers that can compute an answer again, those first that had no part in it.
        A worker that decides about a difference must have had none."""
        answer, doubt = waiting.answer, self._doubts.get(waiting)
        excluded = set() if doubt is None else {*answer.workers, doubt.verifier}
        tokens = len(answer.prompt_token_ids) + len(answer.token_ids) + 1
        able = [
            m
            for m in self._fleet.of_model(answer.model)
            if m.state is MemberState.READY
            and m.worker_id not in excluded
            and may_hold(answer.regions, m.info.topology)
            and m.reported.weights.identity == answer.weights.identity
            and (m.info.revision, _compatibility(m)) == (answer.revision, answer.compatibility)
            and (answer.adapter is None or answer.adapter.key in m.reported.adapters)
            and "prompt_logprobs" not in m.info.unsupported_fields
            and min(m.capacity_tokens, m.info.model.max_model_len) >= tokens
        ]
        # Of a pair, prefill: decode may have read the KV wrongly.
        return sorted(
            able, key=lambda m: (m.worker_id in answer.workers, m.info.role is not Role.PREFILL)
        )

    async def _audit(self, waiting: WaitingAudit, member: Member) -> None:
        answer, margin = waiting.answer, self._config.margin
        if not margin:
            margin = FLOAT32_MARGIN if member.info.model.dtype == "float32" else MARGIN
        try:
            scores = await self._scores(answer, member)
            if scores is None:
                return  # a request came; the answer waits again
            found = compare(answer.token_ids, scores, margin, first=answer.resumed)
        except (PdserveError, ValueError) as error:
            waiting.failures += 1 if isinstance(error, RETRYABLE) else MAX_FAILURES
            logger.info("audit of %s on %s: %s", answer.request_id, member.worker_id, error)
            return
        self._decide(waiting, member.worker_id, found)

    def _decide(self, waiting: WaitingAudit, verifier: str, found: Comparison) -> None:
        """Act on the result of one worker."""
        answer, doubt = waiting.answer, self._doubts.get(waiting)
        if doubt is None and found.at is None:
            self._end(waiting, SAME)
            text = "request %s: an audit by %s confirms %d tokens, %d near ties up to %.3g"
            figures = (found.compared, found.near_ties, found.widest)
            logger.info(text, answer.request_id, verifier, *figures)
        elif doubt is None:
            self._doubts[waiting] = doubt = Doubt(verifier, found)
            if not self._able(waiting):  # else a third worker decides, once it is idle
                self._differs(waiting, doubt, "", answer.hop_of(doubt.at))
        elif found.at is None:
            self._differs(waiting, doubt, verifier, Hop(0, (doubt.verifier,), None))
        else:
            doubt = Doubt(doubt.verifier, found)
            self._differs(waiting, doubt, verifier, answer.hop_of(doubt.at))

    def _differs(self, waiting: WaitingAudit, doubt: Doubt, third: str, place: Hop) -> None:
        """Record a difference, and eject what had one before."""
        fleet, least_s = self._fleet, self._config.eject_s
        answer, now = waiting.answer, self._fleet.now()
        found = AuditDifference(
            answer, doubt.found, doubt.verifier, third, place.workers, place.pair
        )
        self._end(waiting, DIFFERENT)
        logger.error(
            "request %s: %s; suspects: %s",
            answer.request_id,
            found.reason,
            " and ".join(place.workers),
        )
        ejected = self._suspects.add(answer.model, place, now)
        if ejected.pair is not None:
            fleet.outliers.corrupted(ejected.pair, now, found.reason, least_s=least_s)
        for name in ejected.workers:
            member = fleet.members.get(name)
            # A wrong answer is not known to be worse than none: the last worker stays.
            if member is not None and not member.lost and not fleet.is_last(member):
                member.breaker.trip(now, found.reason, least_s=least_s)
        self._record(found)

    def _end(self, waiting: WaitingAudit, result: str) -> None:
        self._queue.waiting.remove(waiting)
        self._doubts.pop(waiting, None)
        self._results.setdefault(waiting.answer.model, Counter())[result] += 1
        self._count("audits", waiting.answer.model, result)

    async def _scores(
        self, answer: AuditedAnswer, member: Member
    ) -> Sequence[PositionLogprobs] | None:
        """Return the logprobs of the answer's tokens on a worker. Return None, and stop, if a
        request needs the worker. Raises PdserveError."""
        computing = asyncio.create_task(self._compute(answer, member), name="audit")
        try:
            while not computing.done():
                await asyncio.wait([computing], timeout=YIELD_POLL_S)
                is_needed = self._admission.queued or member.placed.outstanding_requests > 1
                if is_needed and not computing.done():
                    return None
            return computing.result()
        finally:
            computing.cancel()
            await asyncio.wait([computing])

    async def _compute(self, answer: AuditedAnswer, member: Member) -> Sequence[PositionLogprobs]:
        fleet, audit_id = self._fleet, f"audit-{uuid.uuid4().hex}"
        request = GenerateRequest(
            request_id=audit_id,
            model=answer.model,
            prompt_token_ids=(*answer.prompt_token_ids, *answer.token_ids),
            sampling=SamplingParams(
                max_tokens=1, temperature=0.0, seed=answer.seed, prompt_logprobs=1
            ),
            deadline=fleet.now() + TIMEOUT_S,
            service_class=ServiceClass.BATCH,
            tenant=answer.tenant,
            adapter=answer.adapter,
            cache_salt=audit_id,  # nothing cached is used, nor found by others
            regions=answer.regions,
            storage=frozenset(),
        )
        held, made = Reservation(member), Answer(Discard(), 1, [])
        opened = specs.audit(request, held, len(answer.prompt_token_ids))
        attempt = Attempt(self._links, StreamObserver(fleet), request, held, made, opened)
        try:
            end = await attempt.run()
        finally:
            charge_all(self._billing, [made], "", AUDIT)
            shown = structs.replace(request, request_id=answer.request_id)
            write_transfers(self._ledger, shown, made)
        if isinstance(end, Failed):
            raise end.error
        assert isinstance(end, Finished), "nothing moves an audit"
        # A worker of an earlier version reports the logprobs of the whole prompt.
        return end.delta.prompt_logprobs[-len(answer.token_ids) :]


def _compatibility(member: Member) -> str:
    return "" if member.info.kv is None else member.info.kv.compatibility


def _is_idle(member: Member) -> bool:
    load = member.reported.load
    is_busy = load is None or load.num_running_reqs or load.num_waiting_reqs
    return not (is_busy or member.placed.outstanding_requests)
