"""Copies of cached KV before a prompt is computed. Another worker, the holder, may have cached
blocks of the prompt that the chosen worker lacks: earlier answers on a decode worker, or a prefix
on another prefill worker. If the cost model predicts that copying them takes less time than
computing them, the router first copies them with a separate request: a prefill phase at the holder,
which computes only the token after the cached ones, and a decode phase at the worker. The holder's
blocks are leased during the copy, and their digests are checked, as in every transfer. If a copy
fails or is late, the prompt is computed.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING

from msgspec import structs

from pdserve.errors import DeadlineExceeded
from pdserve.types import SamplingParams
from router.attempt.answer import Discard
from router.attempt.attempt import Attempt
from router.attempt.handoff import Failed, Finished, Side
from router.attempt.placer import Reservation
from router.attempt.specs import pair
from router.attempt.streams import Answer, Fetched
from router.placement.values import MemberState, may_hold

if TYPE_CHECKING:
    from pdserve.types import GenerateRequest
    from router.attempt.observer import StreamObserver
    from router.fleet.registry import Fleet
    from router.fleet.worker_link import Links
    from router.metrics import RouterMetrics
    from router.placement.cost import CostModel

logger = logging.getLogger(__name__)

# Copy timeout: LIMIT_FACTOR x predicted, capped by the compute time, at least MIN_LIMIT_S, because
# the first copy between two workers opens their link.
LIMIT_FACTOR = 3.0
MIN_LIMIT_S = 0.25
# The holder samples the first token. The second one proves that the worker has the KV.
_SAMPLING = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)


class PrefixFetcher:
    """Copies cached KV between workers. State: the running copies, by receiving worker and hash of
    the last block."""

    def __init__(
        self,
        fleet: Fleet,
        links: Links,
        observer: StreamObserver,
        costs: CostModel,
        metrics: RouterMetrics,
    ) -> None:
        self._fleet, self._links, self._observer = fleet, links, observer
        self._costs, self._metrics = costs, metrics
        self._running: dict[tuple[str, int], asyncio.Future[None]] = {}

    async def fetch(
        self, request: GenerateRequest, answer: Answer, reservation: Reservation
    ) -> None:
        """Copy cached KV as `reservation` plans, before its attempt. Record the copy in `answer`.
        If the client leaves meanwhile, `reservation` is released."""
        try:
            fetched = await self._fetch(request, answer.tokens, reservation)
        except BaseException:
            reservation.release()
            raise
        if fetched is not None:
            answer.fetched = fetched
            answer.copies += fetched.streams

    async def _fetch(
        self, request: GenerateRequest, tokens: list[int], reservation: Reservation
    ) -> Fetched | None:
        """Copy the blocks that `reservation` plans to the worker that computes the prompt.
        `tokens`: generated so far. Return the result when the copy has ended, at the latest after
        its timeout. Return None if nothing was sent.
        """
        plan, loop = reservation.fetch, asyncio.get_running_loop()
        worker = reservation.members[0]
        if plan is None:
            return None
        limit_s = max(MIN_LIMIT_S, min(plan.compute_s, LIMIT_FACTOR * plan.copy_s))
        began, key = loop.time(), (worker.worker_id, plan.last_block)
        if (running := self._running.get(key)) is not None:
            # Prompts with a common prefix arrive together. One copy serves them all.
            await asyncio.wait([running], timeout=limit_s)
            return None
        holder = self._fleet.members.get(plan.holder)
        if holder is None or holder.state is not MemberState.READY:
            return None
        if not may_hold(request.regions, holder.info.topology):  # it registered anew elsewhere
            return None
        # One token more than is cached, because an engine computes the last token of any prompt.
        token_ids = (*request.prompt_token_ids, *tokens)[: plan.tokens + 1]
        copied = structs.replace(
            request,
            prompt_token_ids=token_ids,
            resume=(),
            sampling=_SAMPLING,
            deadline=min(began + limit_s, request.deadline or math.inf),
            reasoning_gate=None,
            session="",  # not a turn of the session
        )
        answer = Answer(Discard(), _SAMPLING.max_tokens, [])
        held = Reservation(worker, prefill=holder)
        # Some engines use one block less than they have cached.
        least = max(1, plan.tokens - holder.info.block_size)
        streams = pair(copied, held, min_cached_tokens=least)
        attempt = Attempt(self._links, self._observer, copied, held, answer, streams)
        self._running[key] = done = loop.create_future()
        try:
            end = await attempt.run()
        finally:
            del self._running[key]
            done.set_result(None)
        made = Fetched(plan.holder, answer.streams, loop.time() - began)
        report, model, count = answer.streams[-1].report, request.model, self._metrics.count
        if isinstance(end, Finished) and report is not None and report.transfer is not None:
            made.tokens, made.blocks = plan.missing, report.transfer.blocks
            self._metrics.observe("kv_fetch_seconds", made.seconds, model)
            count("kv_fetched_tokens", model, by=made.tokens)
            count("kv_fetched_blocks", model, by=made.blocks)
        result = _result_of(end) if isinstance(end, Failed) else "fetched"
        count("kv_fetches", model, result)
        if result in {"fetched", "late"}:
            self._costs.fetched(model, worker.worker_id, plan, made.seconds)
        if isinstance(end, Failed):
            message = "request %s: computed, since a copy of %d tokens from %s failed: %s"
            logger.info(message, request.request_id, plan.missing, plan.holder, end.error.message)
        return made


def _result_of(end: Failed) -> str:
    if isinstance(end.error, DeadlineExceeded):
        return "late"
    # The holder refuses evicted blocks; any other failure is the worker's.
    is_gone = end.side is Side.PREFILL and end.error.code == "transfer_failed"
    return "gone" if is_gone else "failed"
