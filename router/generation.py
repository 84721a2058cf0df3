"""The gRPC face of the router: `pdserve.v1.Generation`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from google.protobuf.unknown_fields import UnknownFieldSet

from pdserve import rpc, wire
from pdserve.errors import InternalError, InvalidRequest, PdserveError, UnknownField, wait_s
from pdserve.tokenizer import ChatMessage
from pdserve.tracing import TRACEPARENT
from pdserve.types import ServiceClass
from pdserve.v1 import generation_pb2 as g
from pdserve.v1.generation_pb2_grpc import GenerationServicer
from router.auth import EVERYONE
from router.intake import (
    CHAT_ROLES,
    OPEN_ENDED,
    Ask,
    ChatPrompt,
    TextPrompt,
    TokenPrompt,
    check_request_id,
    new_request_id,
)
from router.open_requests import CUT_S

if TYPE_CHECKING:
    from typing import Any

    import grpc
    from google.protobuf.message import Message

    from pdserve.types import GenerateRequest
    from router.answer import AnswerDelta, Generates
    from router.auth import Keys
    from router.intake import Intake, Prompt
    from router.open_requests import Interruption, OpenRequests

    Context = grpc.aio.ServicerContext[Any, Any]

logger = logging.getLogger(__name__)


class Generation(GenerationServicer):
    """Reads requests, writes deltas; no state of its own. The RPC's own deadline is the request's,
    and its cancellation leaves the answer, which releases everything."""

    def __init__(
        self,
        generator: Generates,
        intake: Intake,
        open_requests: OpenRequests,
        keys: Keys = EVERYONE,
    ) -> None:
        self._generator = generator
        self._intake = intake
        self._open_requests = open_requests
        self._keys = keys

    # Written, not yielded: a generator that waits at a yield when its RPC is cancelled is left to
    # the garbage collector, and with it all that the answer holds.
    async def Generate(  # type: ignore[override]  # noqa: N802
        self, request: g.GenerateRequest, context: Context
    ) -> None:
        try:
            async with self._open_requests.enter() as interruption:
                await self._generate(request, context, interruption)
        except PdserveError as error:
            error.retry_after_s = wait_s(error) or error.retry_after_s
            # A client that does not read its answer does not read its error either: gRPC keeps that
            # until it does, or leaves; we hold nothing for it any more.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CUT_S):
                    await rpc.abort(context, error)
        except Exception:
            logger.exception("Generate")
            await rpc.abort(context, InternalError("internal error; the router's log has it"))

    async def _generate(
        self, request: g.GenerateRequest, context: Context, interruption: Interruption
    ) -> None:
        tenant = self._keys.tenant_of(_metadata(context, "authorization"))
        ask = read_request(request, timeout_s=context.time_remaining())
        traceparent = _metadata(context, TRACEPARENT) or ""
        made = await self._intake.make(ask, tenant=tenant, traceparent=traceparent)
        name, resumes = request.request_id, bool(made.resume)
        named = self._open_requests.named(tenant, name, interruption, resumes=resumes)
        timer = interruption.at(made.deadline)
        try:
            with named:
                await self._answer(made, context, interruption)
        finally:
            if timer is not None:
                timer.cancel()

    async def _answer(
        self, made: GenerateRequest, context: Context, interruption: Interruption
    ) -> None:
        async with self._generator.generate(made) as answer:
            answer.cut_with(interruption.interrupt)
            async for delta in answer:
                await context.write(response_of(made.request_id, delta))

    async def ListModels(  # noqa: N802
        self, request: g.ListModelsRequest, context: Context
    ) -> g.ListModelsResponse:
        try:
            self._keys.tenant_of(_metadata(context, "authorization"))
        except PdserveError as error:
            await rpc.abort(context, error)
        models = self._generator.models()
        return g.ListModelsResponse(
            models=[
                g.ModelCard(
                    name=name,
                    max_model_len=models[name].max_model_len,
                    vocab_size=models[name].vocab_size,
                )
                for name in sorted(models)
            ]
        )


def _metadata(context: Context, name: str) -> str | None:
    """The first of that name, as HTTP's header."""
    for key, value in context.invocation_metadata() or ():
        if key == name and isinstance(value, str):
            return value
    return None


def read_request(request: g.GenerateRequest, *, timeout_s: float | None) -> Ask:
    """Raises InvalidRequest naming the field at fault."""
    refuse_unknown_fields(request)
    prompt, prompt_field = _prompt(request)
    request_id = request.request_id
    return Ask(
        model=request.model,
        prompt=prompt,
        sampling=wire.sampling_from_pb(request.sampling, default_max_tokens=OPEN_ENDED),
        request_id=check_request_id(request_id, field="request_id")
        if request_id
        else new_request_id("gen-"),
        fills_context=not request.sampling.HasField("max_tokens"),
        timeout_s=timeout_s,
        prompt_field=prompt_field,
        priority=request.priority,
        service_class=_service_class(request.service_class),
        resume=tuple(request.resume_token_ids),
    )


def _prompt(request: g.GenerateRequest) -> tuple[Prompt, str]:
    match request.WhichOneof("prompt"):
        case "text":
            return TextPrompt(request.text), "text"
        case "token_ids":
            return TokenPrompt(tuple(request.token_ids.ids)), "token_ids"
        case "messages":
            return ChatPrompt(_messages(request.messages)), "messages"
        case _:
            raise InvalidRequest("prompt: text, messages or token_ids is needed", field="prompt")


def _service_class(number: g.ServiceClass) -> ServiceClass:
    if number == g.SERVICE_CLASS_UNSPECIFIED:
        return ServiceClass.INTERACTIVE
    if number not in g.ServiceClass.values():
        raise InvalidRequest(f"service_class {number} is not known", field="service_class")
    return ServiceClass[g.ServiceClass.Name(number).removeprefix("SERVICE_CLASS_")]


def _messages(chat: g.ChatMessages) -> tuple[ChatMessage, ...]:
    if not chat.messages:
        raise InvalidRequest("messages must hold at least one message", field="messages")
    for i, message in enumerate(chat.messages):
        if message.role not in CHAT_ROLES:
            raise InvalidRequest(
                f"messages[{i}].role must be one of {', '.join(CHAT_ROLES)}, not {message.role!r}",
                field=f"messages[{i}].role",
            )
    return tuple(ChatMessage(message.role, message.content) for message in chat.messages)


def refuse_unknown_fields(message: Message, at: str = "") -> None:
    """Raises UnknownField for a field that this server's protos do not have: a newer client asks
    for something that would not happen."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        path = f"{at}{unknown[0].field_number}"
        raise UnknownField(
            f"{message.DESCRIPTOR.full_name} has no field with the number "
            f"{unknown[0].field_number} here",
            field=path,
        )
    for descriptor, value in message.ListFields():
        kind = descriptor.message_type
        if kind is None or kind.GetOptions().map_entry:
            continue
        for item in value if descriptor.is_repeated else (value,):
            refuse_unknown_fields(item, f"{at}{descriptor.name}.")


def response_of(request_id: str, delta: AnswerDelta) -> g.GenerateResponse:
    """The message that carries `delta`."""
    response = g.GenerateResponse(
        request_id=request_id, index=delta.index, token_ids=delta.token_ids, text=delta.text
    )
    if delta.logprobs:
        response.logprobs.extend(wire.logprobs_to_pb(delta.logprobs))
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
