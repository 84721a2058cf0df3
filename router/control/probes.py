"""Active health checks: probe requests of the router, so that client requests do not test failed
workers. Only a probe returns a suspended worker or an ejected pair to use, after its ejection has
ended. Probes run one at a time, so that their cost does not grow with the fleet. Healthy pairs are
not probed, because a client's request detects a failure as well, and its retry loses no token.
"""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from typing import TYPE_CHECKING

from pdserve.errors import PdserveError, TransferCorrupted, WorkerFailed
from pdserve.kv_compatibility import exchange
from pdserve.types import GenerateRequest, SamplingParams
from router.attempt import specs
from router.attempt.answer import Discard
from router.attempt.attempt import Attempt
from router.attempt.handoff import Failed
from router.attempt.observer import StreamObserver
from router.attempt.placer import Reservation
from router.attempt.streams import Answer
from router.fleet.health import BreakerState
from router.placement.values import MemberState

if TYPE_CHECKING:
    from router.fleet.member import Member
    from router.fleet.registry import Fleet
    from router.fleet.worker_link import Links
    from router.metrics import RouterMetrics

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
PROBE_TIMEOUT_S = 30.0
PROBE_TOKENS = 8
# Rounding may flip a near tie between two tokens in one answer, but rarely in two.
ATTEMPTS = 2


async def probe(fleet: Fleet, links: Links, decode: Member, prefill: Member | None = None) -> None:
    """Send a request through one worker or through a pair.

    Raises PdserveError if there is no answer in time, and TransferCorrupted if a pair's answer
    differs from its prefill worker's.
    """
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            for _ in range(ATTEMPTS):
                request = _request(decode)
                # The prefill worker answers alone, because the decode worker must not have the
                # prompt cached: the pair would transfer no KV.
                alone = await _answer(fleet, links, request, Reservation(prefill or decode))
                if prefill is None:
                    return
                together = await _answer(
                    fleet, links, request, Reservation(decode, prefill=prefill)
                )
                if alone == together:
                    return
    except TimeoutError:
        raise WorkerFailed(f"the probe did not end within {PROBE_TIMEOUT_S:g} s") from None
    raise TransferCorrupted(f"the probe gave {together}, and {alone} by prefill alone")


async def _answer(
    fleet: Fleet, links: Links, request: GenerateRequest, reservation: Reservation
) -> list[int]:
    answer = Answer(Discard(), request.sampling.max_tokens, [])
    observer, opened = StreamObserver(fleet), specs.probe(request, reservation)
    end = await Attempt(links, observer, request, reservation, answer, opened).run()
    if isinstance(end, Failed):
        raise end.error
    return answer.tokens


def _request(worker: Member) -> GenerateRequest:
    """Return a request with a random prompt of two and a half blocks. A fixed prompt would be
    cached, and transfer nothing."""
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
    """Probes suspended workers and ejected pairs, in `run`."""

    def __init__(
        self, fleet: Fleet, links: Links, metrics: RouterMetrics, *, period_s: float = PERIOD_S
    ) -> None:
        self._fleet, self._links = fleet, links
        self._period_s = period_s
        self._metrics = metrics

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            # One probe per period; other due workers and pairs follow in the next periods.
            found = self.half_open()
            if found is not None:
                await self._probe(*found)

    def half_open(self) -> tuple[Member, Member | None] | None:
        """Return a suspended worker whose breaker is half open; or the decode and prefill worker of
        an ejected pair whose breaker is, if both are ready. Return None without either."""
        members, now = self._fleet.members, self._fleet.now()
        for member in members.values():
            if member.is_suspect and member.breaker.state(now) is BreakerState.HALF_OPEN:
                return member, None
        for pair in self._fleet.outliers.half_open(now):
            prefill, decode = (members.get(worker_id) for worker_id in pair)
            if (
                prefill is not None
                and decode is not None
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
            await probe(fleet, self._links, decode, prefill)
        except PdserveError as error:
            failure = error
            logger.warning("probe of %s failed: %s", " and ".join(workers), error.message)
        outcome = "passed" if failure is None else "failed"
        name = "worker_probes" if prefill is None else "pair_probes"
        self._metrics.count(name, decode.info.model.name, outcome)
        if prefill is None:
            if failure is None:
                logger.info("worker %s passed its probe and gets requests again", decode.worker_id)
                decode.breaker.close()
                fleet.capacity_changed()
            else:
                decode.failed(fleet.now(), failure.message)
            return
        pair = (prefill.worker_id, decode.worker_id)
        if failure is None:
            outliers.probed(pair)
        elif isinstance(failure, TransferCorrupted):
            # Other failures may be a worker's, and are no evidence about the pair. It stays half
            # open and is probed again.
            outliers.corrupted(pair, fleet.now(), failure.message)
