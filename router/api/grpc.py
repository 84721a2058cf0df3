"""gRPC API of the router: `pdserve.v1.Generation`."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from google.protobuf.unknown_fields import UnknownFieldSet

from pdserve import deadline, rpc, wire
from pdserve.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    PdserveError,
    UnknownField,
    wait_s,
)
from pdserve.tokenizer import ChatMessage, Conversation
from pdserve.types import ServiceClass
from pdserve.v1 import generation_pb2 as g
from pdserve.v1.generation_pb2_grpc import GenerationServicer
from router.answer import ParsedDelta, served
from router.api import openai
from router.api.auth import EVERYONE
from router.api.bodies import encode, read
from router.api.open_requests import END_S
from router.api.preprocess import (
    CHAT_ROLES,
    OPEN_ENDED,
    ParsedRequest,
    check_request_id,
    new_request_id,
)

if TYPE_CHECKING:
    import grpc
    from google.protobuf.message import Message

    from pdserve.types import GenerateRequest
    from router.answer import AnswerDelta, Generates
    from router.api.auth import Keys
    from router.api.open_requests import OpenRequests
    from router.api.preprocess import Preprocessor, Prompt

    Context = grpc.aio.ServicerContext[Any, Any]

logger = logging.getLogger(__name__)

# Deltas that may wait for a client that reads slower than its answer is made.
MAX_UNSENT_DELTAS = 2048
_CHOICES = {
    g.TOOL_CHOICE_UNSPECIFIED: "auto",
    g.TOOL_CHOICE_AUTO: "auto",
    g.TOOL_CHOICE_NONE: "none",
    g.TOOL_CHOICE_REQUIRED: "required",
}


class Generation(GenerationServicer):
    """The RPC's deadline is the request's. Cancelling the RPC cancels the request."""

    def __init__(
        self,
        generator: Generates,
        preprocessor: Preprocessor,
        open_requests: OpenRequests,
        keys: Keys = EVERYONE,
    ) -> None:
        self._generator = generator
        self._preprocessor = preprocessor
        self._open_requests = open_requests
        self._keys = keys

    # Responses are written, not yielded: a generator that waits at a yield when its RPC is
    # cancelled is left to the garbage collector, with all that the request holds.
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
            made = await self._preprocessor.prepare(
                read_request(request, timeout_s=context.time_remaining()),
                tenant=tenant,
                traceparent=_metadata(context, "traceparent") or "",
            )
            name, resumes = request.request_id, bool(made.resume)
            self._open_requests.claim(open_request, tenant, name, resumes)
            await self._answer(made, context)

    async def _answer(self, made: GenerateRequest, context: Context) -> None:
        queue = _SendQueue()
        serving = asyncio.create_task(self._generator.serve(made, queue))
        serving.add_done_callback(lambda _: queue.close())
        writing = asyncio.create_task(_write_all(queue, made.request_id, context))
        # A write to a client that is gone fails, and nobody asks for it any more.
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
            # What was written before the end goes out; gRPC does not bear a cancelled write well.
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
    """Deltas of one answer that were not written yet."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[AnswerDelta | None] = asyncio.Queue()
        self.close = partial(self._queue.put_nowait, None)
        self.read = self._queue.get

    def write(self, delta: AnswerDelta) -> bool:
        """Return False if the client is too far behind."""
        self._queue.put_nowait(delta)
        return self._queue.qsize() <= MAX_UNSENT_DELTAS


async def _write_all(queue: _SendQueue, request_id: str, context: Context) -> None:
    while (delta := await queue.read()) is not None:
        await context.write(response_of(request_id, delta))


async def _abort(context: Context, error: PdserveError) -> None:
    # gRPC keeps the status for a client that does not read; nothing is held for it here.
    try:
        async with asyncio.timeout(END_S):
            await rpc.abort(context, error)
    except TimeoutError:
        logger.info("Generate: the client does not read its status")


def _metadata(context: Context, name: str) -> str | None:
    for key, value in context.invocation_metadata() or ():
        if key == name and isinstance(value, str):
            return value
    return None


def read_request(request: g.GenerateRequest, *, timeout_s: float | None) -> ParsedRequest:
    """Raises InvalidRequest naming the field."""
    refuse_unknown_fields(request)
    prompt, prompt_field = _prompt(request)
    request_id = request.request_id
    if request_id:
        check_request_id(request_id, field="request_id")
    options: dict[str, Any] = {}
    if isinstance(prompt, Conversation):
        prompt.tools, options = _tools(request)
        if request.HasField("enable_thinking"):
            prompt.variables = {"enable_thinking": request.enable_thinking}
        if request.HasField("include_reasoning"):
            options["include_reasoning"] = request.include_reasoning
    elif request.tools:
        raise InvalidRequest("tools need messages", field="tools")
    return ParsedRequest(
        model=request.adapter or request.model,
        prompt=prompt,
        sampling=wire.sampling_from_pb(request.sampling, default_max_tokens=OPEN_ENDED),
        request_id=request_id or new_request_id("gen-"),
        timeout_s=timeout_s,
        prompt_field=prompt_field,
        priority=request.priority,
        service_class=_service_class(request.service_class),
        resume=tuple(request.resume_token_ids),
        given={field.name for field, _ in request.sampling.ListFields()},
        cache_salt=request.cache_salt,
        parsing_options=options,
    )


def _tools(request: g.GenerateRequest) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return tools and options as the HTTP API reads them, from the fields of its JSON."""
    tools = []
    for i, tool in enumerate(request.tools):
        function: dict[str, Any] = {"name": tool.name}
        if tool.description:
            function["description"] = tool.description
        if tool.parameters_json:
            at = f"tools[{i}].parameters_json"
            function["parameters"] = openai.read_object(tool.parameters_json, at)
        if tool.HasField("strict"):
            function["strict"] = tool.strict
        tools.append({"type": "function", "function": function})
    choice: Any = _CHOICES.get(request.tool_choice)
    if request.tool_choice == g.TOOL_CHOICE_NAMED:
        choice = {"type": "function", "function": {"name": request.tool_name}}
    elif choice is None or request.tool_name:
        field = "tool_choice" if choice is None else "tool_name"
        raise InvalidRequest(f"{field} has a value that is not defined", field=field)
    parallel = request.parallel_tool_calls if request.HasField("parallel_tool_calls") else None
    fields = {"tools": tools or None, "tool_choice": choice, "parallel_tool_calls": parallel}
    body = read(openai.ToolFields, encode(fields))
    return openai.read_tools(body.tools, body.tool_choice, body.parallel_tool_calls)


def _prompt(request: g.GenerateRequest) -> tuple[Prompt, str]:
    match request.WhichOneof("prompt"):
        case "text":
            return request.text, "text"
        case "token_ids":
            return tuple(request.token_ids.ids), "token_ids"
        case "messages":
            return _messages(request.messages), "messages"
        case _:
            raise InvalidRequest("one of text, messages or token_ids is required", field="prompt")


def _service_class(number: g.ServiceClass) -> ServiceClass:
    if number == g.SERVICE_CLASS_UNSPECIFIED:
        return ServiceClass.INTERACTIVE
    if number not in g.ServiceClass.values():
        raise InvalidRequest(f"unknown service_class {number}", field="service_class")
    return ServiceClass[g.ServiceClass.Name(number).removeprefix("SERVICE_CLASS_")]


def _messages(chat: g.ChatMessages) -> Conversation:
    if not chat.messages:
        raise InvalidRequest("'messages' must have at least one message", field="messages")
    for i, message in enumerate(chat.messages):
        if message.role not in CHAT_ROLES:
            field = f"messages[{i}].role"
            raise InvalidRequest(
                f"'{field}' must be one of {', '.join(CHAT_ROLES)}, not {message.role!r}",
                field=field,
            )
    return Conversation([_message(x, f"messages[{i}]") for i, x in enumerate(chat.messages)])


def _message(message: g.ChatMessage, field: str) -> ChatMessage:
    calls = [
        openai.ToolCall(openai.CalledFunction(x.name, x.arguments), x.id).parse(
            f"{field}.tool_calls[{i}]"
        )
        for i, x in enumerate(message.tool_calls)
    ]
    return ChatMessage(
        message.role,
        message.content,
        reasoning=message.reasoning or None,
        tool_calls=calls,
        tool_call_id=message.tool_call_id or None,
    )


def refuse_unknown_fields(message: Message, at: str = "") -> None:
    """Raises UnknownField for a field of newer protos: what it asks for would not happen."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        number = unknown[0].field_number
        raise UnknownField(
            f"{message.DESCRIPTOR.full_name} has no field number {number}", field=f"{at}{number}"
        )
    for descriptor, value in message.ListFields():
        kind = descriptor.message_type
        if kind is None or kind.GetOptions().map_entry:
            continue
        for item in value if descriptor.is_repeated else (value,):
            refuse_unknown_fields(item, f"{at}{descriptor.name}.")


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
