"""Copies of cached KV, made before a prompt is computed.

Another worker, the holder, may have blocks of a prompt that the worker lacks which computes it: the
model's own former answers on a decode worker, or a prefix on another prefill worker. If the cost
model says that copying them takes less time than computing them, the router has them copied first,
by a request of its own: a prefill phase at the holder, which computes only the token after the
cached ones, and a decode phase at the worker. The holder's blocks are under a lease while they
move, and their digests are checked, as in every transfer.

No copy is needed: if one fails or is late, the prompt is computed.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from pdserve.errors import DeadlineExceeded
from pdserve.types import SamplingParams
from router.placement.values import MemberState
from router.request.answer import Discard
from router.request.attempt import Answer, Attempt, Fetched
from router.request.handoff import Failed, Finished, Side
from router.request.placer import Reservation

if TYPE_CHECKING:
    from pdserve.types import GenerateRequest
    from router.fleet.connection import Links
    from router.fleet.registry import Fleet
    from router.metrics import RouterMetrics
    from router.placement.cost import CostModel

logger = logging.getLogger(__name__)

# A copy may take so many times its predicted time, but not longer than computing the tokens would
# take, and always MIN_LIMIT_S: the first copy between two workers opens their link.
LIMIT_FACTOR = 3.0
MIN_LIMIT_S = 0.25
# The holder samples the first token. With the second one the worker shows that it has the KV.
_SAMPLING = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)


class PrefixFetcher:
    """Has workers copy cached KV. State: the running copies, by the worker that receives one and
    the hash of its last block."""

    def __init__(
        self, fleet: Fleet, links: Links, costs: CostModel, metrics: RouterMetrics
    ) -> None:
        self._fleet, self._links = fleet, links
        self._costs, self._metrics = costs, metrics
        self._running: dict[tuple[str, int], asyncio.Future[None]] = {}

    async def fetch(
        self, request: GenerateRequest, tokens: list[int], reservation: Reservation
    ) -> Fetched | None:
        """Copy the blocks that `reservation` plans to copy to the worker that computes the prompt.

        `tokens`: those generated so far. Return what was copied when the copy has ended, at the
        latest after the time that it may take. Return None if nothing was sent.
        """
        plan, loop = reservation.fetch, asyncio.get_running_loop()
        worker = reservation.members[0]
        if plan is None:
            return None
        limit_s = max(MIN_LIMIT_S, min(plan.compute_s, LIMIT_FACTOR * plan.copy_s))
        began, key = loop.time(), (worker.worker_id, plan.last_block)
        if (running := self._running.get(key)) is not None:
            # Prompts that begin alike arrive together. One copy serves them all.
            await asyncio.wait([running], timeout=limit_s)
            return None
        holder = self._fleet.members.get(plan.holder)
        if holder is None or holder.state is not MemberState.READY:
            return None
        # One token more than is cached, because an engine computes the last token of any prompt.
        token_ids = (*request.prompt_token_ids, *tokens)[: plan.tokens + 1]
        copied = replace(
            request,
            prompt_token_ids=token_ids,
            resume=(),
            sampling=_SAMPLING,
            deadline=min(began + limit_s, request.deadline or math.inf),
            reasoning_gate=None,
            session="",  # this is no turn of it
        )
        answer = Answer(Discard(), _SAMPLING.max_tokens, [])
        attempt = Attempt(
            self._fleet,
            self._links,
            copied,
            Reservation(worker, prefill=holder),
            answer,
            # Some engines use one block less than they have cached.
            min_cached_tokens=max(1, plan.tokens - holder.info.block_size),
        )
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
    # The holder refuses what it has not cached any more; other failures come from the worker.
    is_gone = end.side is Side.PREFILL and end.error.code == "transfer_failed"
    return "gone" if is_gone else "failed"
