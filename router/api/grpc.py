"""gRPC API of the router: `pdserve.v1.Generation`."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from pdserve import wire
from pdserve.errors import (
    DeadlineExceeded,
    InternalError,
    ModelNotFound,
    PdserveError,
    wait_s,
)
from pdserve.net import deadline, rpc
from pdserve.v1 import generation_pb2 as g
from pdserve.v1.generation_pb2_grpc import GenerationServicer
from router.api.open_requests import END_S, ApiCall, check_request_id, new_request_id
from router.attempt.answer import ParsedDelta, served
from router.dialects.generation_rpc import GenerateMessage
from router.dialects.session_ids import check_session_id
from router.intake.intake import Origin
from router.placement.residency import HEADER, narrowest
from router.virtual.chooser import OVERRIDE_HEADER

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    import grpc

    from pdserve.types import GenerateRequest
    from router.api.open_requests import CallLog
    from router.api.shared import SharedParts
    from router.attempt.answer import AnswerDelta, Models, Out
    from router.virtual.chooser import Prepared

    Context = grpc.aio.ServicerContext[Any, Any]

logger = logging.getLogger(__name__)

_GENERATE = "/pdserve.v1.Generation/Generate"
# Deltas queued at most for a client that reads slower than they are generated.
MAX_UNSENT_DELTAS = 2048


class GenerationService(GenerationServicer):
    """Servicer of the gRPC API. The RPC's deadline is the request's. Cancelling the RPC cancels the
    request."""

    def __init__(self, models: Models, shared: SharedParts) -> None:
        self._models, self._chooser = models, shared.chooser
        self._intake, self._keys = shared.intake, shared.keys
        self._open_requests, self._calls = shared.open_requests, shared.calls

    # Responses are written, not yielded: if an RPC is cancelled, grpc leaves a generator that is
    # suspended at a yield to the garbage collector, with everything that the request holds.
    async def Generate(  # type: ignore[override]  # noqa: N802
        self, request: g.GenerateRequest, context: Context
    ) -> None:
        call = ApiCall(
            route=_GENERATE,
            client=str(context.peer()),
            user_agent=_metadata(context, "user-agent") or "",
            request_id=request.request_id,
            model=request.adapter or request.model,
            generates=True,
        )
        await answer_call(self._calls, call, context, self._generate(request, context, call))

    async def _generate(self, request: g.GenerateRequest, context: Context, call: ApiCall) -> None:
        with self._open_requests.enter() as open_request:
            tenant = call.tenant = self._keys.tenant_of(_metadata(context, "authorization"))
            if name := request.adapter:
                adapter = self._models.adapters().get(name)
                if adapter is None or request.model not in ("", adapter.model):
                    text = f"adapter {name!r} of model {request.model!r} is not served"
                    raise ModelNotFound(text, field="adapter")
            if name := request.request_id:
                check_request_id(name, field="request_id")
            session = _metadata(context, "x-session-id") or ""
            header = {HEADER: _metadata(context, HEADER) or ""}
            origin = Origin(
                name or new_request_id("gen-"),
                tenant,
                check_session_id(session, field="x-session-id"),
                _metadata(context, "traceparent") or "",
                narrowest(request.inference_geo, header),
                _metadata(context, OVERRIDE_HEADER) or "",
                timeout_s=context.time_remaining(),
            )
            read = await self._intake.read_message(
                GenerateMessage(request), tenant, origin.timeout_s
            )
            read = await self._intake.checked(read, origin)
            prepared = await self._chooser.prepare(read, origin)
            self._open_requests.claim(open_request, tenant, name, bool(read.parsed[0].resume))
            serve = partial(self._serve, prepared)
            await write_answer(serve, prepared.made[0], context)

    async def _serve(self, prepared: Prepared, queue: SendQueue) -> None:
        def opened(made: Sequence[GenerateRequest]) -> Out:
            # Of a virtual model: the model that continues the answer.
            queue.model = "" if prepared.virtual is None else made[0].served_name
            return queue

        await self._chooser.serve(prepared, opened)

    async def ListModels(  # noqa: N802
        self, request: g.ListModelsRequest, context: Context
    ) -> g.ListModelsResponse:
        try:
            self._keys.tenant_of(_metadata(context, "authorization"))
        except PdserveError as error:
            await rpc.abort(context, error)
        return g.ListModelsResponse(
            models=[
                g.ModelCard(
                    name=name,
                    max_model_len=model.max_model_len,
                    vocab_size=model.vocab_size,
                    parent="" if adapter is None else adapter.model,
                )
                for name, (model, adapter) in served(self._models).items()
            ]
            + [
                g.ModelCard(name=name, max_model_len=context_len)
                for name, context_len in self._chooser.virtual_models()
            ]
        )


async def answer_call(
    calls: CallLog, call: ApiCall, context: Context, work: Awaitable[None]
) -> None:
    """Do the work of a call, and log it. Its errors end the RPC."""
    with calls.logged(call):
        try:
            await work
            call.status = "OK"
        except PdserveError as error:
            error.retry_after_s = wait_s(error) or error.retry_after_s
            await _abort(context, error, call)
        except Exception:
            logger.exception("%s", call.route)
            await _abort(context, InternalError("internal error; see the router's log"), call)


async def write_answer(
    serve: Callable[[SendQueue], Coroutine[Any, Any, None]], made: GenerateRequest, context: Context
) -> None:
    """Call `serve`, and write what it puts into the queue to the RPC of the request `made`."""
    queue = SendQueue()
    serving = asyncio.create_task(serve(queue))
    serving.add_done_callback(lambda _: queue.close())
    serving.add_done_callback(_read_exception)
    writing = asyncio.create_task(_write_all(queue, made.request_id, context))
    writing.add_done_callback(_read_exception)
    try:
        await asyncio.wait({serving, writing}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
            # A client that does not read must not keep a request open past its deadline.
            await asyncio.wait({writing}, timeout=deadline.remaining(made.deadline))
        if writing.done():
            writing.result()
        else:
            raise DeadlineExceeded("the client did not read its answer before the deadline")
    finally:
        serving.cancel()
        await asyncio.wait({serving})
        # Send the queued deltas first: gRPC does not handle a cancelled write well.
        await asyncio.wait({writing}, timeout=END_S)
        writing.cancel()


class SendQueue:
    """Deltas of one answer that are not written yet."""

    def __init__(self) -> None:
        self.model = ""  # to be named in the first message
        self._queue: asyncio.Queue[AnswerDelta | None] = asyncio.Queue()
        self.close = partial(self._queue.put_nowait, None)
        self.read = self._queue.get

    def write(self, delta: AnswerDelta) -> bool:
        """Queue a delta. Return False if the client is too far behind."""
        self._queue.put_nowait(delta)
        return self._queue.qsize() <= MAX_UNSENT_DELTAS


def _read_exception(task: asyncio.Task[None]) -> None:
    """Retrieve a task's exception, if any: asyncio logs one that nobody awaits. A write to a client
    that has left fails, and serving may fail while its call is cancelled."""
    if not task.cancelled():
        task.exception()


async def _write_all(queue: SendQueue, request_id: str, context: Context) -> None:
    while (delta := await queue.read()) is not None:
        response, queue.model = response_of(request_id, delta, queue.model), ""
        await context.write(response)


async def _abort(context: Context, error: PdserveError, call: ApiCall) -> None:
    call.status = error.grpc_status.name
    call.fail(error)
    # A client may not read. gRPC keeps the status for it; the router waits no longer than END_S.
    try:
        async with asyncio.timeout(END_S):
            await rpc.abort(context, error)
    except TimeoutError:
        logger.info("%s: the client does not read its status", call.route)


def _metadata(context: Context, name: str) -> str | None:
    for key, value in context.invocation_metadata() or ():
        if key == name and isinstance(value, str):
            return value
    return None


def response_of(request_id: str, delta: AnswerDelta, model: str = "") -> g.GenerateResponse:
    response = g.GenerateResponse(
        request_id=request_id,
        index=delta.index,
        token_ids=delta.token_ids,
        text=delta.text,
        model=model,
    )
    if isinstance(delta, ParsedDelta):
        response.reasoning = delta.reasoning
        for call in delta.tool_calls:
            response.tool_calls.add(
                index=call.index, id=call.id, name=call.name, arguments=call.arguments
            )
    if delta.logprobs:
        response.logprobs.extend(wire.logprobs_to_pb(delta.logprobs))
    if delta.prompt_logprobs:
        response.prompt_logprobs.extend(wire.logprobs_to_pb(delta.prompt_logprobs))
    if delta.routed_experts is not None:
        response.routed_experts.CopyFrom(wire.experts_to_pb(delta.routed_experts))
    if delta.finish_reason is not None:
        response.finish_reason = wire.finish_to_pb(delta.finish_reason)
    reason = wire.stop_reason_to_pb(delta.stop_reason)
    if reason is not None:
        response.stop_reason.CopyFrom(reason)
    if delta.usage is not None:
        response.usage.CopyFrom(wire.usage_to_pb(delta.usage))
    if delta.receipt is not None:
        response.receipt.CopyFrom(wire.receipt_to_pb(delta.receipt))
    return response
