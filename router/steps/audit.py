"""Chooses answers that are computed again later, and keeps them until a worker is idle.

router/control/audits.py computes them. One in N answers is chosen, at random. What may have gone
wrong on its way is chosen more probably: an answer whose KV was handed over, moved or copied.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from pdserve.types import SamplingParams
from router.attempt.handoff import Side
from router.attempt.receipt import sampled_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pdserve.config import AuditConfig
    from pdserve.types import Adapter, GenerateRequest, ModelWeights, Receipt, Regions
    from router.attempt.streams import Answer
    from router.fleet.health import Pair
    from router.steps.evidence import Evidence
    from router.walk import Answered, Proceed, Walk

SAME, DIFFERENT, SKIPPED = "same", "different", "skipped"
# How much more probably an answer is chosen for each thing that may have gone wrong.
RISK = 4.0
# Sampling parameters that change which token a greedy answer takes. The audit sees logprobs before
# they apply.
_SHAPING = (
    *("min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "structured_output"),
)
_PLAIN = SamplingParams()


class Hop(NamedTuple):
    """Tokens of an answer from `start` to the next hop. `workers` computed them; `pair` are the
    workers that exchanged KV for them, None if none moved."""

    start: int
    workers: tuple[str, ...]
    pair: Pair | None


class AuditedAnswer(Struct, frozen=True, eq=False):
    """An answer, and what decides which worker can compute it again.

    `token_ids`: the answer; its first `resumed` tokens came from the client. `kinds`: what may have
    gone wrong (`kinds_of`). `compatibility`: of the KV of its workers; workers with another one may
    honestly give other tokens. `index`: among the answers of its request. `evidence`: for a
    capsule, if those are kept.
    """

    request_id: str
    model: str
    tenant: str
    prompt_token_ids: Sequence[int]
    token_ids: tuple[int, ...]
    resumed: int
    seed: int | None
    adapter: Adapter | None
    weights: ModelWeights
    compatibility: str
    revision: str
    regions: Regions
    hops: tuple[Hop, ...]
    kinds: tuple[str, ...] = ()
    index: int = 0
    evidence: Evidence | None = None

    def __repr__(self) -> str:
        return f"AuditedAnswer {self.request_id}"  # tokens must not get into logs

    @property
    def workers(self) -> frozenset[str]:
        return frozenset(name for hop in self.hops for name in hop.workers)

    def hop_of(self, index: int) -> Hop:
        """Return the hop of a token."""
        return next(x for x in reversed(self.hops) if x.start <= index or x is self.hops[0])


@dataclass(slots=True, eq=False)
class WaitingAudit:
    """An answer that waits for an audit. `since`: when it was chosen, on the event loop's clock.
    `failures`: audits that a worker failed."""

    answer: AuditedAnswer
    since: float
    failures: int = 0


@dataclass(slots=True)
class AuditQueue:
    """The answers that wait, oldest first, at most `most`. Prompts are kept here alone."""

    most: int
    waiting: deque[WaitingAudit] = field(default_factory=deque)
    _added: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, answer: AuditedAnswer, now: float) -> None:
        self.waiting.append(WaitingAudit(answer, now))
        self._added.set()

    async def until_waiting(self) -> None:
        """Wait until an answer waits."""
        while not self.waiting:
            self._added.clear()
            await self._added.wait()


@dataclass(slots=True)
class _Weights:
    """Sum and number of the weights of a model's answers."""

    total: float = 0.0
    count: int = 0


class AuditStep:
    """Outside of account, which adds the receipt. `evidence` returns what is known of an ended
    request, None if nobody wants it. State: mean weight of answers by model."""

    def __init__(
        self,
        config: AuditConfig,
        queue: AuditQueue,
        count: Callable[..., None],
        now: Callable[[], float],
        random: Callable[[], float],
        evidence: Callable[[Walk], Evidence] | None = None,
    ) -> None:
        self._config, self._queue, self._count = config, queue, count
        self._now, self._random, self._evidence = now, random, evidence
        self._weights: dict[str, _Weights] = {}

    async def __call__(self, walk: Walk, proceed: Proceed) -> Answered:
        done = await proceed(walk)
        if done.receipt is not None:
            for answer in done.answers:
                self._consider(walk, answer, done.receipt)
        return done

    def _consider(self, walk: Walk, answer: Answer, receipt: Receipt) -> None:
        request = walk.request
        one_in = self.one_in(request)
        if not one_in:
            return
        kinds = tuple(kinds_of(request, answer, receipt))
        is_possible = not why_not(request, answer, self._config.max_tokens)
        # Where all are to be audited, none is left out for being plain.
        share = self._share(request.model, kinds, is_possible=is_possible)
        if one_in > 1 and self._random() >= share / one_in:
            return
        if is_possible and len(self._queue.waiting) < self._queue.most:
            evidence = None if self._evidence is None else self._evidence(walk)
            self._queue.add(audited(request, answer, kinds, evidence), self._now())
        else:
            self._count("audits", request.model, SKIPPED)

    def one_in(self, request: GenerateRequest) -> int:
        config = self._config
        by_model = config.models.get(request.model, config.one_in)
        return config.tenants.get(request.tenant, by_model)

    def _share(self, model: str, kinds: Sequence[str], *, is_possible: bool) -> float:
        """Return how probable it is to choose this answer, relative to the mean answer. An answer
        that cannot be audited does not count in the mean."""
        if not is_possible:
            return 1.0
        weight, known = 1 + RISK * len(kinds), self._weights.setdefault(model, _Weights())
        known.total, known.count = known.total + weight, known.count + 1
        return weight * known.count / known.total


def kinds_of(request: GenerateRequest, answer: Answer, receipt: Receipt) -> Iterator[str]:
    """Yield what may have gone wrong with an answer. KV from tiers counts as cached."""
    if any(x.pair is not None for x in answer.streams):
        yield "handed_over"
    if answer.retries:
        yield "retried"
    if receipt.fetched_tokens:
        yield "copied"
    if receipt.cached_tokens:
        yield "cached"
    if request.resume:
        yield "resumed"


def why_not(request: GenerateRequest, answer: Answer, max_tokens: int) -> str:
    """Return why an answer cannot be audited, or "". An audit computes the logprobs of the answer's
    tokens, so the tokens must be the likeliest ones."""
    sampling, computed = request.sampling, len(answer.tokens) - len(request.resume)
    if sampling.temperature:
        return "sampled"
    shaped = [x for x in _SHAPING if getattr(sampling, x) != getattr(_PLAIN, x)]
    if shaped or request.reasoning_gate is not None:
        return "shaped"
    if request.media:
        return "media"
    if computed <= 0 or len(request.prompt_token_ids) + len(answer.tokens) > max_tokens:
        return "length"
    streams = [x for x in answer.streams if x.side is not Side.ENCODE]
    weights = {y.identity for x in streams for y in (x.weights, x.newest) if y is not None}
    return "" if len(weights) == 1 else "weights"


def audited(
    request: GenerateRequest,
    answer: Answer,
    kinds: tuple[str, ...],
    evidence: Evidence | None = None,
) -> AuditedAnswer:
    """Return the answer with what an audit needs to know of its streams."""
    sampled = sampled_by(answer.streams, len(answer.tokens))
    first, _, _ = sampled[0]
    assert first.weights is not None, "sampled_by leaves out what was not sent"
    copied = None
    if answer.fetched is not None and answer.fetched.tokens:
        copied = (answer.fetched.holder, first.worker_id)
    hops = []
    for stream, start, _ in sampled:
        # Prefill samples before any KV has moved to decode, but may use a copy of cached KV.
        pair = stream.pair if stream.side is Side.DECODE else None
        pair = pair or (copied if stream.worker_id == first.worker_id else None)
        hops.append(Hop(start, pair or (stream.worker_id,), pair))
    info = first.member.info
    return AuditedAnswer(
        request_id=request.request_id,
        model=request.model,
        tenant=request.tenant,
        prompt_token_ids=request.prompt_token_ids,
        token_ids=tuple(answer.tokens),
        resumed=len(request.resume),
        seed=request.sampling.seed,
        adapter=request.adapter,
        weights=first.weights,
        compatibility="" if info.kv is None else info.kv.compatibility,
        revision=info.revision,
        regions=request.regions,
        hops=tuple(hops),
        kinds=kinds,
        index=answer.index,
        evidence=evidence,
    )
