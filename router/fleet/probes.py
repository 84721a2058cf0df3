"""Active health checks: requests of the router's own, so that no client's request finds a failure.

A suspended worker is probed when its time is over, or else such a pair of workers, or else now and
then a random pair between which no KV has moved for a while. Probes run one at a time, so that
their cost does not grow with the fleet.
"""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from typing import TYPE_CHECKING, Self

from pdserve.errors import (
    InternalError,
    PdserveError,
    TransferCorrupted,
    TransferFailed,
    WorkerFailed,
    from_info,
)
from pdserve.kv_pairs import exchange
from pdserve.types import FinishReason, GenerateRequest, HandoffStyle, Role, SamplingParams
from router.background import Background
from router.fleet.commands import CommandBuilder
from router.fleet.health import BreakerState
from router.placement.values import MemberState

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from pdserve.types import StreamDelta
    from pdserve.v1 import worker_pb2 as w
    from router.fleet.health import OutlierEjection
    from router.fleet.member import Member
    from router.fleet.registry import Fleet
    from router.metrics import RouterMetrics

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
PROBE_TIMEOUT_S = 30.0
# One of this many periods is for a pair that was not used.
IDLE_EVERY = 5
PROBE_TOKENS = 8
# Rounding may flip a tie between two tokens of one answer, hardly of two.
ATTEMPTS = 2


class _Stream:
    """The stream of a probe on one worker."""

    def __init__(self, fleet: Fleet, member: Member, command: w.Command) -> None:
        self.tokens: list[int] = []
        self._ended: asyncio.Future[StreamDelta] = asyncio.get_running_loop().create_future()
        self._link = fleet.link(member)
        command.submit.probe = True
        self._stream_id = self._link.submit(command, self)

    async def last(self) -> StreamDelta:
        """Raises the error that the stream ended with."""
        delta = await self._ended
        if delta.error is not None:
            raise from_info(delta.error)
        return delta

    def close(self) -> None:
        """End the stream and free the KV that it holds. Idempotent."""
        self._link.cancel(self._stream_id, ended=True)
        self._ended.cancel()

    def on_delta(self, delta: StreamDelta) -> None:
        self.tokens += delta.token_ids
        if delta.finish_reason is not None and not self._ended.done():
            self._ended.set_result(delta)

    def on_token(self, token_id: int, text: str) -> None:
        self.tokens.append(token_id)

    def on_lost(self, error: PdserveError) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)


async def probe_worker(fleet: Fleet, worker: Member, *, timeout_s: float) -> None:
    """Raises PdserveError if the worker does not answer in time."""
    try:
        async with asyncio.timeout(timeout_s):
            await _aggregated(fleet, worker, _request(worker))
    except TimeoutError:
        raise WorkerFailed(f"the probe did not end within {timeout_s:g} s") from None


async def probe_pair(fleet: Fleet, prefill: Member, decode: Member, *, timeout_s: float) -> None:
    """Raises PdserveError if the pair does not answer in time, TransferCorrupted if its answer is
    not that of the prefill worker alone."""
    try:
        async with asyncio.timeout(timeout_s):
            for _ in range(ATTEMPTS):
                # The decode worker has no block of this prompt cached: all KV must be transferred.
                request = _request(prefill)
                alone = await _aggregated(fleet, prefill, request)
                together = await _disaggregated(fleet, prefill, decode, request)
                if alone == together:
                    return
    except TimeoutError:
        raise WorkerFailed(f"the probe did not end within {timeout_s:g} s") from None
    raise TransferCorrupted(f"the probe gave {together}, and {alone} by prefill alone")


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


async def _aggregated(fleet: Fleet, worker: Member, request: GenerateRequest) -> list[int]:
    stream = _Stream(fleet, worker, CommandBuilder(request, None).aggregated())
    try:
        await stream.last()
    finally:
        stream.close()
    return stream.tokens


async def _disaggregated(
    fleet: Fleet, prefill: Member, decode: Member, request: GenerateRequest
) -> list[int]:
    commands, transfer_id = CommandBuilder(request, None), uuid.uuid4().hex
    kv = prefill.info.kv
    is_sequential = kv is not None and kv.handoff is HandoffStyle.SEQUENTIAL
    streams: list[_Stream] = []
    try:
        if not is_sequential:
            streams.append(_Stream(fleet, decode, commands.decode(transfer_id, prefill)))
        first = _Stream(fleet, prefill, commands.prefill(transfer_id))
        streams.append(first)
        last = await first.last()
        if last.finish_reason is not FinishReason.LENGTH or len(first.tokens) != 1:
            raise InternalError("the prefill of the probe did not end with one token")
        if is_sequential:
            if not last.kv_handle:
                raise TransferFailed("prefill kept no KV")
            command = commands.decode(
                transfer_id, prefill, resume=first.tokens, kv_handle=last.kv_handle
            )
            streams.append(_Stream(fleet, decode, command))
        rest = next(stream for stream in streams if stream is not first)
        await rest.last()
    finally:
        for stream in streams:
            stream.close()
    return first.tokens + rest.tokens


def half_open_worker(members: Mapping[str, Member], now: float) -> Member | None:
    """Return a suspended worker that can be tried again."""
    for member in members.values():
        if member.is_suspect and member.breaker.state(now) is BreakerState.HALF_OPEN:
            return member
    return None


def half_open_pair(
    members: Mapping[str, Member], outliers: OutlierEjection, now: float
) -> tuple[Member, Member] | None:
    """Return an ejected pair that can be tried again, whose workers are ready."""
    for pair in outliers.half_open(now):
        prefill, decode = (members.get(worker_id) for worker_id in pair)
        if prefill is not None and decode is not None and _can_pair(prefill, decode):
            return prefill, decode
    return None


def unused_pair(
    members: Mapping[str, Member],
    outliers: OutlierEjection,
    now: float,
    *,
    idle_s: float,
    draw: random.Random,
) -> tuple[Member, Member] | None:
    """Return a random pair, or None if it was used in the last `idle_s`, is ejected, or no pair."""
    ready = [m for m in members.values() if m.state is MemberState.READY]
    prefills = [m for m in ready if m.info.role is Role.PREFILL]
    decodes = [m for m in ready if m.info.role is Role.DECODE]
    if not prefills or not decodes:
        return None
    prefill, decode = draw.choice(prefills), draw.choice(decodes)
    pair = prefill.worker_id, decode.worker_id
    if outliers.unused_s(pair, now) < idle_s or pair in outliers.ejected(now):
        return None
    return (prefill, decode) if _can_pair(prefill, decode) else None


def _can_pair(prefill: Member, decode: Member) -> bool:
    return (
        (prefill.info.role, decode.info.role) == (Role.PREFILL, Role.DECODE)
        and prefill.state is decode.state is MemberState.READY
        and exchange(prefill.kind, decode.kind)
    )


class ActiveHealthChecks:
    """Owns the task that sends probes. An async context manager: leaving ends it and its probe.

    Inside it, no client's request is the first on a half-open worker or pair.
    """

    def __init__(
        self, fleet: Fleet, metrics: RouterMetrics, *, idle_s: float, period_s: float = PERIOD_S
    ) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._idle_s = idle_s
        self._period_s = period_s
        self._draw = random.Random()
        self._task = Background("health-checks", self._run)

    async def __aenter__(self) -> Self:
        self._fleet.outliers.by_probe = self._fleet.pool.by_probe = True
        await self._task.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._fleet.outliers.by_probe = self._fleet.pool.by_probe = False
        await self._task.__aexit__(kind, error, trace)

    async def _run(self) -> None:
        fleet, periods, began = self._fleet, 0, self._fleet.now()
        while True:
            await asyncio.sleep(self._period_s)
            members, now = fleet.pool.members, fleet.now()
            worker = half_open_worker(members, now)
            if worker is not None:
                await self._probe_worker(worker)
                continue
            pair = half_open_pair(members, fleet.outliers, now)
            periods += 1
            if pair is None and periods % IDLE_EVERY == 0 and now - began >= self._idle_s:
                pair = unused_pair(
                    members, fleet.outliers, now, idle_s=self._idle_s, draw=self._draw
                )
            if pair is not None:
                await self._probe_pair(*pair)

    async def _probe_worker(self, member: Member) -> None:
        fleet, outcome = self._fleet, "passed"
        fleet.placed(member)
        try:
            await probe_worker(fleet, member, timeout_s=PROBE_TIMEOUT_S)
        except PdserveError as error:
            outcome = "failed"
            logger.warning("probe of worker %s: %s", member.worker_id, error.message)
            fleet.failed(member, error.message)
        else:
            fleet.succeeded(member)
        self._metrics.worker_probe(member.info.model.name, outcome)

    async def _probe_pair(self, prefill: Member, decode: Member) -> None:
        """The failure of a worker proves nothing about the pair, which is then probed again."""
        fleet, outliers = self._fleet, self._fleet.outliers
        pair = prefill.worker_id, decode.worker_id
        is_trial, outcome = outliers.try_once(pair, fleet.now()), "passed"
        try:
            await probe_pair(fleet, prefill, decode, timeout_s=PROBE_TIMEOUT_S)
        except PdserveError as error:
            outcome = "failed"
            logger.warning("probe of workers %s and %s: %s", *pair, error.message)
            if isinstance(error, TransferCorrupted):
                outliers.corrupted(pair, fleet.now(), error.message)
            elif isinstance(error, TransferFailed):
                outliers.failed(pair, fleet.now(), error.message)
        except Exception:
            outcome = "failed"
            logger.exception("probe of workers %s and %s", *pair)
        else:
            outliers.succeeded(pair, fleet.now(), is_trial=is_trial)
            if is_trial:
                logger.info("workers %s and %s are paired again", *pair)
        outliers.probes[outcome] += 1
        self._metrics.pair_probe(prefill.info.model.name, outcome)
