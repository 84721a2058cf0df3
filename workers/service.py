"""One engine and the routers that it works for.

A router opens a link: one connection over which its commands arrive in order, and over which it
gets one frame an engine step for all its requests. State changes are synchronous.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import structs

from pdserve import wire
from pdserve.errors import (
    Cancelled,
    EngineDied,
    InternalError,
    InvalidRequest,
    PdserveError,
    Unavailable,
    WeightsChanging,
)
from pdserve.types import StreamDelta, WeightsSwitch
from pdserve.v1 import worker_pb2 as w
from workers.cache.updates import CachedBlocks, change_to_pb
from workers.control.loaded_adapters import LoadedAdapters
from workers.control.worker_intake import work_from_pb
from workers.engine import PrefillPhase, StepResult, ended_by
from workers.metering.worker_account import WorkerAccount

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from kv_transfer.protocol.snapshot import KvState
    from pdserve.observe.telemetry import Span, Tracing
    from pdserve.types import KvLedger, ModelWeights, WorkerLoad
    from workers.control.worker_intake import WorkerIntake
    from workers.engine import CacheChange, Engine, EngineInfo, Work
    from workers.link.router_link import RouterLink

logger = logging.getLogger(__name__)

# Minimum time between two reports of step costs to one router.
STEPS_PERIOD_S = 0.5
# The reason of waste of an active health check.
_PROBE = "probe"
# Limit of ended prefills whose blocks a drain releases; others end with their hold.
_MAX_HELD = 4096


def report_nothing() -> None:
    """Do nothing: the worker has no routers."""


@dataclass(frozen=True, slots=True)
class _Stream:
    link: RouterLink
    router_stream_id: int
    is_prefill: bool
    is_probe: bool
    span: Span | None
    adapter: str
    keeps_kv: bool


class WorkerService:
    """State: links by router, and open streams by the engine's stream id.

    `failed` gets the error of an engine that died.
    """

    def __init__(
        self,
        engine: Engine,
        intake: WorkerIntake,
        *,
        renew: Callable[[], None] = report_nothing,
        tracing: Tracing | None = None,
    ) -> None:
        """`renew` reports the worker's state to routers."""
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self.account = WorkerAccount(engine.busy, asyncio.get_running_loop().time())
        self.cache = CachedBlocks()
        self.adapters = LoadedAdapters(engine, renew)
        self.exported_streams = 0  # number of streams that other workers took over with their KV
        self._engine = engine
        self._intake = intake
        self._renew = renew
        self._tracing = tracing
        self._links: dict[str, RouterLink] = {}
        self._streams: dict[int, _Stream] = {}
        self._held: deque[int] = deque(maxlen=_MAX_HELD)  # ended prefills, by engine stream id
        self._reader: asyncio.Task[None] | None = None  # once started

    async def start(self) -> EngineInfo:
        """Start the engine. Raises its errors."""
        info = await self._engine.start()
        self._reader = asyncio.create_task(self._read_results(), name="engine-results")
        return info

    async def _read_results(self) -> None:
        try:
            async for result in self._engine.results:
                if result.cache:
                    self._on_cache(result.cache)
                self._on_step(result.deltas)
                if result.failure is not None:
                    self._on_failure(result.failure)
        except Exception as error:
            # A worker that loses tokens must not continue.
            logger.exception("the results of a step could not be delivered")
            self._on_failure(error)

    # -- Reports

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    def load(self) -> WorkerLoad | None:
        return self._engine.load()

    def ledger(self) -> KvLedger:
        return self._engine.ledger()

    def kv_state(self) -> KvState | None:
        return self._engine.kv_state()

    # Links.

    def attach(self, link: RouterLink) -> None:
        """Accept a link. Close an older one of the same router."""
        older = self._links.get(link.router_id)
        if older is not None:
            older.close(Unavailable(f"router {link.router_id} opened another link"))
            self.detach(older)
        self._links[link.router_id] = link
        link.send(self._frame(link))

    def detach(self, link: RouterLink) -> None:
        """Cancel all requests of a link that has ended. Idempotent."""
        if self._links.get(link.router_id) is link:
            del self._links[link.router_id]
            self._renew()  # a restarted router does not know this worker yet
        for stream_id in list(link.streams):
            self.cancel(stream_id, "router_lost")

    def watch_cache(self, link: RouterLink) -> None:
        """Send a snapshot of the prefix cache, in parts, and its changes from now on."""
        link.reported.watches_cache = True
        for part in self.cache.snapshot():
            link.send(w.StepFrame(cache=part))

    def _on_cache(self, change: CacheChange) -> None:
        self.cache.apply(change)
        watching = [link for link in self._links.values() if link.reported.watches_cache]
        if watching:
            frame = w.StepFrame(cache=change_to_pb(change))
            for link in watching:
                link.send(frame)

    # Requests.

    async def render(self, request: w.RenderRequest) -> w.RenderResponse:
        """Render a prompt with images beside the engine. Raises the engine's errors."""
        began = time.monotonic()
        response = await self._engine.render(request)
        response.seconds = time.monotonic() - began
        return response

    def submit(self, link: RouterLink, submit: w.Submit) -> None:
        """Submit a request to the engine, or end it with the error of a refusal."""
        stream_id = link.first_stream_id + submit.stream_id
        try:
            if stream_id in self._streams:
                raise InvalidRequest("stream_id is in use on this link", field="stream_id")
            self._check_accepts(submit)
            work = work_from_pb(submit, stream_id, self._intake.role, self._intake.weights)
        except PdserveError as error:
            self._refuse(link, submit.stream_id, error)
            return
        span = _begin_span(self._tracing, submit, work)
        is_prefill = isinstance(work.phase, PrefillPhase)
        self._streams[stream_id] = _Stream(
            link, submit.stream_id, is_prefill, submit.probe, span, work.adapter, submit.keeps_kv
        )
        link.streams.add(stream_id)
        if work.adapter:
            self.adapters.acquire(work.adapter)
        self._engine.busy.open(stream_id)
        try:
            self._engine.submit(work)
        except Exception:
            logger.exception("request %s could not be submitted", work.request_id)
            failure = InternalError("the worker failed on this request")
            self._refuse(link, submit.stream_id, failure)

    def _check_accepts(self, submit: w.Submit) -> None:
        if not self._intake.accepts(is_probe=submit.probe):
            if self._intake.updating:
                raise WeightsChanging("the weights of this worker change")
            raise Unavailable("this worker is draining")
        # The worker of the other phase checks the same, so KV never meets other weights.
        ours = self._intake.weights
        if (asked := (submit.weights_sequence, submit.weights_digest)) != ours.identity:
            text = f"this worker has the weights of update {ours.sequence} ({ours.digest})"
            raise WeightsChanging(f"{text}, not of {asked[0]} ({asked[1]})")
        if submit.adapter and submit.adapter not in self.adapters.usable:
            raise Unavailable(f"adapter {submit.adapter} is not loaded on this worker")

    def _refuse(self, link: RouterLink, router_stream_id: int, error: PdserveError) -> None:
        stream_id = link.first_stream_id + router_stream_id
        if stream_id in self._streams:
            self.cancel(stream_id, error.code)
        link.send(_error_frame(router_stream_id, error))

    def cancel(self, stream_id: int, reason: str) -> None:
        """Stop a request without a last delta, or release the blocks of an ended prefill. Unknown
        streams are ignored."""
        self._forget(stream_id)
        self._engine.cancel(stream_id)
        self.account.waste(stream_id, reason)

    def export(self, stream_id: int, transfer_id: str) -> None:
        """End a request whose KV another worker will fetch. Unknown streams are ignored."""
        self._engine.export(stream_id, transfer_id)

    def _on_step(self, deltas: Sequence[StreamDelta]) -> None:
        """Send each router one frame with the step's output for its requests."""
        frames: dict[RouterLink, w.StepFrame] = {}
        plain: dict[RouterLink, list[tuple[int, int, str]]] = {}
        for delta in deltas:
            stream = self._streams.get(delta.stream_id)
            if stream is None:
                continue
            link = stream.link
            frame = frames.get(link)
            if frame is None:
                frame = frames[link] = self._frame(link)
            if wire.is_plain(delta):
                row = (stream.router_stream_id, delta.token_ids[0], delta.text)
                plain.setdefault(link, []).append(row)
                continue
            if delta.finish_reason is not None:
                self._settle(stream, delta)
            own = structs.replace(delta, stream_id=stream.router_stream_id)
            frame.deltas.append(wire.delta_to_pb(own))
            if delta.finish_reason is not None:
                if stream.is_prefill or delta.exported_tokens:
                    self._held.append(delta.stream_id)
                self.exported_streams += delta.exported_tokens > 0
                self._forget(delta.stream_id, delta)
        for link, frame in frames.items():
            if link in plain:
                frame.tokens.CopyFrom(wire.plain_to_pb(plain[link]))
            link.send(frame)

    def _settle(self, stream: _Stream, last: StreamDelta) -> None:
        """Add the request's share of engine time to its report, or to waste if no answer uses its
        work."""
        if stream.is_probe or last.error is not None or last.report is None:
            reason = Cancelled.code if last.error is None else last.error.code
            self.account.waste(last.stream_id, _PROBE if stream.is_probe else reason)
            return
        share, last.report.energy_j = self.account.settle(last.stream_id)
        last.report.prefill_busy_s, last.report.decode_busy_s = share.prefill_s, share.decode_s

    def _frame(self, link: RouterLink) -> w.StepFrame:
        """Return a frame with the load, and with step costs if they are due."""
        link.reported.load = load = self.load()
        frame = w.StepFrame(load=None if load is None else wire.load_to_pb(load))
        now = asyncio.get_running_loop().time()
        if now - link.reported.steps_at >= STEPS_PERIOD_S:
            recorder = self._engine.busy.recorder
            moments = recorder.moments(now)
            if moments.prefill.steps or moments.decode.steps:
                before, link.reported.steps_at = link.reported.steps_at, now
                frame.steps.CopyFrom(wire.moments_to_pb(moments))
                new = [step for step in recorder.recent() if step.ended_at > before]
                frame.recent_steps.CopyFrom(wire.recent_steps_to_pb(new, now))
        return frame

    def beat(self, link: RouterLink) -> None:
        """Send a heartbeat if the router has open requests, or if the load has changed, because
        cancelled requests leave the engine some time later."""
        if link.streams or self.load() != link.reported.load:
            link.send(self._frame(link))

    def _on_failure(self, error: BaseException) -> None:
        self._intake.close()
        failure = EngineDied("the worker's engine died")
        for stream_id, stream in list(self._streams.items()):
            self._forget(stream_id, ended_by(stream_id, failure))
            self.account.waste(stream_id, failure.code)
            stream.link.send(_error_frame(stream.router_stream_id, failure))
        if not self.failed.done():
            self.failed.set_result(error)

    def _forget(self, stream_id: int, last: StreamDelta | None = None) -> None:
        stream = self._streams.pop(stream_id, None)
        if stream is None:
            return
        if stream.span is not None:
            _end_span(stream.span, last)
        if stream.adapter:
            self.adapters.release(stream.adapter)
        stream.link.streams.discard(stream_id)

    def abandon(self, error: PdserveError, kept: Collection[int] = ()) -> None:
        """End every open stream but those `kept` with `error`, and release the blocks of ended
        prefills."""
        for stream_id, stream in list(self._streams.items()):
            if stream_id not in kept:
                self._refuse(stream.link, stream.router_stream_id, error)
        self.release_held()

    def keeping(self) -> list[int]:
        """Return the open streams that keep their KV if the weights change."""
        return [stream_id for stream_id, x in self._streams.items() if x.keeps_kv]

    def switched(self, weights: ModelWeights, computed: Mapping[int, int]) -> None:
        """Report the new weights to the streams that continue with them. `computed`: the positions
        of each with KV of older ones. In order with the tokens sampled before."""
        deltas = [
            StreamDelta(x, weights_switch=WeightsSwitch(weights, n)) for x, n in computed.items()
        ]
        self._engine.results.put(StepResult(deltas))

    def release_held(self) -> None:
        """Release the blocks of ended prefills. Consumers that have not fetched them fail."""
        while self._held:
            self._engine.cancel(self._held.popleft())

    def fail(self, error: BaseException) -> None:
        """End the worker as if its engine had died."""
        self._on_failure(error)

    async def close(self) -> None:
        """Cancel all requests and end the engine. Idempotent."""
        self._intake.close()
        for link in list(self._links.values()):
            self.detach(link)
        await self._engine.close()
        if self._reader is not None:
            await self._reader


def _error_frame(router_stream_id: int, error: PdserveError) -> w.StepFrame:
    return w.StepFrame(deltas=[wire.delta_to_pb(ended_by(router_stream_id, error))])


def _begin_span(tracing: Tracing | None, submit: w.Submit, work: Work) -> Span | None:
    """Begin the span of a stream, below its router's. Return None if the request is not traced."""
    if tracing is None or not submit.traceparent:
        return None
    attributes: dict[str, str | int] = {
        "pdserve.request_id": work.request_id,
        "pdserve.prompt_tokens": len(work.prompt_token_ids),
        "pdserve.resumed_tokens": len(work.resume_token_ids),
    }
    return tracing.begin(f"{submit.WhichOneof('phase')}_stream", submit.traceparent, attributes)


def _end_span(span: Span, last: StreamDelta | None) -> None:
    """End a span with a child for each phase. `last` is the engine's last delta, None if the stream
    was cancelled. Reports have durations only: phases follow one another from the start, and
    decoding ends with the span."""
    report = None if last is None else last.report
    if last is None or report is None:
        span.end(Cancelled("the router cancelled it") if last is None else last.error)
        return
    at_s = 0.0
    transfer_s = 0.0 if report.transfer is None else report.transfer.transfer_s
    phases = (("queue", report.queue_s), ("prefill", report.prefill_s), ("kv_transfer", transfer_s))
    for name, seconds in phases:
        if seconds:
            span.phase(name, at_s, seconds)
            at_s += seconds
    if report.decode_s:
        span.phase("decode", max(at_s, span.elapsed_s() - report.decode_s), report.decode_s)
    span.end(last.error)
