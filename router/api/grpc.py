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
from router.api.auth import EVERYONE
from router.api.body_process import GENERATE, put_prompts
from router.api.dialects.fields import check_rest
from router.api.grpc_requests import read_request
from router.api.open_requests import END_S
from router.api.session_ids import check_session_id
from router.request.answer import ParsedDelta, served

if TYPE_CHECKING:
    import grpc

    from pdserve.types import GenerateRequest
    from router.admission import Door
    from router.api.auth import Keys
    from router.api.body_process import LargeBodies
    from router.api.open_requests import OpenRequests
    from router.api.preprocess import ParsedRequest, Preprocessor
    from router.request.answer import AnswerDelta, Generates

    Context = grpc.aio.ServicerContext[Any, Any]

logger = logging.getLogger(__name__)

# Deltas queued at most for a client that reads slower than they are generated.
MAX_UNSENT_DELTAS = 2048


class GenerationService(GenerationServicer):
    """Servicer of the gRPC API. The RPC's deadline is the request's. Cancelling the RPC cancels the
    request."""

    def __init__(
        self,
        generator: Generates,
        preprocessor: Preprocessor,
        open_requests: OpenRequests,
        *,
        door: Door,
        large: LargeBodies,
        keys: Keys = EVERYONE,
    ) -> None:
        self._generator = generator
        self._preprocessor = preprocessor
        self._open_requests = open_requests
        self._door = door
        self._large = large
        self._keys = keys

    # Responses are written, not yielded: if an RPC is cancelled, grpc leaves a generator that is
    # suspended at a yield to the garbage collector, with everything that the request holds.
    async def Generate(  # type: ignore[override]  # noqa: N802
        self, request: g.GenerateRequest, context: Context
    ) -> None:
        try:
            await self._generate(request, context)
        except PdserveError as error:
            error.retry_after_s = wait_s(error) or error.retry_after_s
            await _abort(context, error)
        except Exception:
            logger.exception("Generate")
            await _abort(context, InternalError("internal error; see the router's log"))

    async def _generate(self, request: g.GenerateRequest, context: Context) -> None:
        with self._open_requests.enter() as open_request:
            tenant = self._keys.tenant_of(_metadata(context, "authorization"))
            if name := request.adapter:
                adapter = self._generator.adapters().get(name)
                if adapter is None or request.model not in ("", adapter.model):
                    text = f"adapter {name!r} of model {request.model!r} is not served"
                    raise ModelNotFound(text, field="adapter")
            size, images = request.ByteSize(), _image_bytes(request)
            with self._door.charge(tenant, size, images=images):
                parsed = await self._read(request, tenant, context.time_remaining())
                session = _metadata(context, "x-session-id") or ""
                parsed.session = check_session_id(session, field="x-session-id")
                made = await self._preprocessor.prepare(
                    parsed,
                    tenant=tenant,
                    traceparent=_metadata(context, "traceparent") or "",
                )
            name, resumes = request.request_id, bool(made.resume)
            self._open_requests.claim(open_request, tenant, name, resumes)
            await self._answer(made, context)

    async def _read(
        self, request: g.GenerateRequest, tenant: str, timeout_s: float | None
    ) -> ParsedRequest:
        if request.ByteSize() <= self._large.larger_than:
            return read_request(request, timeout_s=timeout_s)
        data, kind = request.SerializeToString(), request.WhichOneof("prompt")
        if kind is not None:
            request.ClearField(kind)
            check_rest(request.ByteSize())
        done = await self._large.read(GENERATE, data, request.adapter or request.model, tenant)
        match kind:  # a placeholder prompt: some fields are valid with one kind of prompt only
            case "messages":
                request.messages.messages.add(role="user", content="-")
            case "token_ids":
                request.token_ids.ids.append(0)
            case _:
                request.text = "-"
        parsed = read_request(request, timeout_s=timeout_s)
        put_prompts([parsed], done)
        return parsed

    async def _answer(self, made: GenerateRequest, context: Context) -> None:
        queue = _SendQueue()
        serving = asyncio.create_task(self._generator.serve(made, queue))
        serving.add_done_callback(lambda _: queue.close())
        writing = asyncio.create_task(_write_all(queue, made.request_id, context))
        # A write to a client that has left fails. Without this, asyncio logs an exception that was
        # never retrieved.
        writing.add_done_callback(lambda task: task.cancelled() or task.exception())
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
                for name, (model, adapter) in served(self._generator).items()
            ]
        )


class _SendQueue:
    """Deltas of one answer that are not written yet."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[AnswerDelta | None] = asyncio.Queue()
        self.close = partial(self._queue.put_nowait, None)
        self.read = self._queue.get

    def write(self, delta: AnswerDelta) -> bool:
        """Queue a delta. Return False if the client is too far behind."""
        self._queue.put_nowait(delta)
        return self._queue.qsize() <= MAX_UNSENT_DELTAS


async def _write_all(queue: _SendQueue, request_id: str, context: Context) -> None:
    while (delta := await queue.read()) is not None:
        await context.write(response_of(request_id, delta))


async def _abort(context: Context, error: PdserveError) -> None:
    # A client may not read. gRPC keeps the status for it; the router waits no longer than END_S.
    try:
        async with asyncio.timeout(END_S):
            await rpc.abort(context, error)
    except TimeoutError:
        logger.info("Generate: the client does not read its status")


def _image_bytes(request: g.GenerateRequest) -> int:
    """Return how many bytes of a request are images."""
    parts = [part for x in request.messages.messages for part in x.parts]
    return sum([len(x.image.data) + len(x.image.url) for x in parts if x.HasField("image")])


def _metadata(context: Context, name: str) -> str | None:
    for key, value in context.invocation_metadata() or ():
        if key == name and isinstance(value, str):
            return value
    return None


def response_of(request_id: str, delta: AnswerDelta) -> g.GenerateResponse:
    response = g.GenerateResponse(
        request_id=request_id, index=delta.index, token_ids=delta.token_ids, text=delta.text
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
