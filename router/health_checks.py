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
from router.answer import Discard
from router.fleet.health import BreakerState
from router.handoff import Failed
from router.placement.values import MemberState
from router.placer import Reservation
from router.upstream import Answer, Attempt

if TYPE_CHECKING:
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


async def _answer(fleet: Fleet, request: GenerateRequest, reservation: Reservation) -> list[int]:
    answer = Answer(Discard(), request.sampling.max_tokens, [])
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
            found = self.half_open()
            if found is not None:
                await self._probe(*found)

    def half_open(self) -> tuple[Member, Member | None] | None:
        """Return a suspended worker that can be tried again; or decode and prefill worker of an
        ejected pair that can, if both are ready."""
        members, now = self._fleet.members, self._fleet.now()
        for member in members.values():
            if member.is_suspect and member.breaker.state(now) is BreakerState.HALF_OPEN:
                return member, None
        for pair in self._fleet.outliers.half_open(now):
            prefill, decode = (members.get(worker_id) for worker_id in pair)
            if (
                prefill is not None
                and decode is not None
                and (prefill.info.role, decode.info.role) == (Role.PREFILL, Role.DECODE)
                and prefill.state is decode.state is MemberState.READY
                and exchange(prefill.kind, decode.kind)
            ):
                return decode, prefill
        return None

    async def _probe(self, decode: Member, prefill: Member | None) -> None:
        fleet, outliers = self._fleet, self._fleet.outliers
        workers = [x.worker_id for x in (prefill, decode) if x is not None]
        failure: PdserveError | None = None
        try:
            await probe(fleet, decode, prefill)
        except PdserveError as error:
            failure = error
            logger.warning("probe of %s: %s", " and ".join(workers), error.message)
        outcome = "passed" if failure is None else "failed"
        name = "worker_probes" if prefill is None else "pair_probes"
        self._metrics.count(name, decode.info.model.name, outcome)
        if prefill is None:
            if failure is None:
                fleet.probed(decode)
            else:
                fleet.failed(decode, failure.message)
            return
        pair = (prefill.worker_id, decode.worker_id)
        if failure is None:
            outliers.probed(pair)
        elif isinstance(failure, TransferCorrupted):
            # The failure of a worker proves nothing about the pair, which is then probed again.
            outliers.corrupted(pair, fleet.now(), failure.message)
