"""Active health checks: requests of the router's own, so that no client's request finds a failure.

Only a probe brings a suspended worker or an ejected pair of workers back, when its time is over.
Probes run one at a time, so that their cost does not grow with the fleet.
"""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from typing import TYPE_CHECKING

from pdserve.errors import PdserveError, TransferCorrupted, WorkerFailed
from pdserve.kv_pairs import exchange
from pdserve.types import GenerateRequest, Role, SamplingParams
from router.fleet.health import BreakerState
from router.handoff import Failed
from router.placement.values import MemberState
from router.placer import Reservation
from router.upstream import Answer, Attempt

if TYPE_CHECKING:
    from router.answer import AnswerDelta
    from router.fleet.member import Member
    from router.fleet.registry import Fleet
    from router.metrics import RouterMetrics

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
PROBE_TIMEOUT_S = 30.0
PROBE_TOKENS = 8
# Rounding may flip a tie between two tokens of one answer, hardly of two.
ATTEMPTS = 2


async def probe(fleet: Fleet, decode: Member, prefill: Member | None = None) -> None:
    """Send a request through one worker, or through a pair.

    Raises PdserveError if there is no answer in time, TransferCorrupted if a pair does not give the
    answer of its prefill worker alone. The decode worker has no block of the prompt cached, so all
    KV must be transferred.
    """
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            for _ in range(ATTEMPTS):
                request = _request(decode)
                alone = await _answer(fleet, request, Reservation(prefill or decode))
                if prefill is None:
                    return
                together = await _answer(fleet, request, Reservation(decode, prefill=prefill))
                if alone == together:
                    return
    except TimeoutError:
        raise WorkerFailed(f"the probe did not end within {PROBE_TIMEOUT_S:g} s") from None
    raise TransferCorrupted(f"the probe gave {together}, and {alone} by prefill alone")


class _Discard:
    """The reader of a probe, whose tokens are in its `Answer`."""

    def write(self, delta: AnswerDelta) -> bool:
        return True


async def _answer(fleet: Fleet, request: GenerateRequest, reservation: Reservation) -> list[int]:
    answer = Answer(_Discard(), request.sampling.max_tokens, [])
    with Attempt(fleet, request, reservation, answer, is_probe=True) as attempt:
        end = await attempt.pump()
    if isinstance(end, Failed):
        raise end.error
    return answer.tokens


def _request(worker: Member) -> GenerateRequest:
    """Return a request with a random prompt of two and a half blocks."""
    info = worker.info
    length = min(2 * info.block_size + info.block_size // 2 + 1, info.model.max_model_len // 2)
    probe_id = f"probe-{uuid.uuid4().hex}"
    draw = random.Random(probe_id)
    return GenerateRequest(
        request_id=probe_id,
        model=info.model.name,
        prompt_token_ids=tuple(draw.randrange(info.model.vocab_size) for _ in range(length)),
        sampling=SamplingParams(max_tokens=PROBE_TOKENS, temperature=0.0, ignore_eos=True),
    )


class ActiveHealthChecks:
    """Sends the probes of `run`."""

    def __init__(self, fleet: Fleet, metrics: RouterMetrics) -> None:
        self._fleet = fleet
        self._metrics = metrics

    async def run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            worker, pair = self.half_open_worker(), self.half_open_pair()
            if worker is not None:
                await self._probe_worker(worker)
            elif pair is not None:
                await self._probe_pair(*pair)

    def half_open_worker(self) -> Member | None:
        """Return a suspended worker that can be tried again."""
        now = self._fleet.now()
        for member in self._fleet.members.values():
            if member.is_suspect and member.breaker.state(now) is BreakerState.HALF_OPEN:
                return member
        return None

    def half_open_pair(self) -> tuple[Member, Member] | None:
        """Return an ejected pair that can be tried again, whose workers are ready."""
        members = self._fleet.members
        for pair in self._fleet.outliers.half_open(self._fleet.now()):
            prefill, decode = (members.get(worker_id) for worker_id in pair)
            if (
                prefill is not None
                and decode is not None
                and (prefill.info.role, decode.info.role) == (Role.PREFILL, Role.DECODE)
                and prefill.state is decode.state is MemberState.READY
                and exchange(prefill.kind, decode.kind)
            ):
                return prefill, decode
        return None

    async def _probe_worker(self, member: Member) -> None:
        outcome = "passed"
        try:
            await probe(self._fleet, member)
            self._fleet.probed(member)
        except PdserveError as error:
            outcome = "failed"
            logger.warning("probe of worker %s: %s", member.worker_id, error.message)
            self._fleet.failed(member, error.message)
        self._metrics.count("worker_probes", member.info.model.name, outcome)

    async def _probe_pair(self, prefill: Member, decode: Member) -> None:
        """The failure of a worker proves nothing about the pair, which is then probed again."""
        fleet, outliers = self._fleet, self._fleet.outliers
        pair, outcome = (prefill.worker_id, decode.worker_id), "passed"
        try:
            await probe(fleet, decode, prefill)
            outliers.probed(pair)
        except PdserveError as error:
            outcome = "failed"
            logger.warning("probe of workers %s and %s: %s", *pair, error.message)
            if isinstance(error, TransferCorrupted):
                outliers.corrupted(pair, fleet.now(), error.message)
        outliers.probes[outcome] += 1
        self._metrics.count("pair_probes", prefill.info.model.name, outcome)
