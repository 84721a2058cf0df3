"""Guards that are services: over HTTP, and over gRPC in the form of Envoy's external processing.

Both get the same JSON, the fields of `CheckBody`: `messages` have the role and content of the texts
of a prompt, or of a piece of an answer. Both may send texts back in the same form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import aiohttp
import grpc
import msgspec
from grpc.aio import EOF
from msgspec import Struct

from pdserve.v1 import ext_proc_pb2 as p
from router.guardrails.guard import PASSED, Checked, GuardCheckFailed, GuardPlace, GuardVerdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from router.guardrails.guard import GuardedText, Subject

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
# Beyond the size of what was sent.
_MAX_MORE_BYTES = 1 << 20
_CHUNK = 1 << 16
_MAX_REASON_CHARS = 256


class CheckMessage(Struct):
    """`role`: as in GuardedText, but for answers always "assistant", with a `kind`."""

    content: str
    role: str = ""
    kind: str = ""


class CheckBody(Struct, kw_only=True):
    """What a service gets."""

    request_id: str
    tenant: str
    model: str
    place: str
    messages: list[CheckMessage]


class ServiceAnswer(Struct):
    """What an HTTP service answers. `messages`: as many as it got, with the verdict redact."""

    verdict: GuardVerdict
    messages: list[CheckMessage] = []
    reason: str = ""


class ChangedBody(Struct):
    """What a gRPC service puts in place of the body that it got."""

    messages: list[CheckMessage]


_ANSWER, _BODY = msgspec.json.Decoder(ServiceAnswer), msgspec.json.Decoder(ChangedBody)


def body_of(subject: Subject, pieces: Sequence[GuardedText]) -> bytes:
    """Return the JSON that services get."""
    is_prompt = subject.place is GuardPlace.PROMPT
    messages = [
        CheckMessage(x.text, x.kind) if is_prompt else CheckMessage(x.text, "assistant", x.kind)
        for x in pieces
    ]
    fields = {name: getattr(subject, name) for name in ("request_id", "tenant", "model")}
    return msgspec.json.encode(CheckBody(place=subject.place, messages=messages, **fields))


def _redacted(
    messages: Sequence[CheckMessage], pieces: Sequence[GuardedText], reason: str
) -> Checked:
    if len(messages) != len(pieces):
        raise GuardCheckFailed(f"it sent {len(messages)} messages for {len(pieces)}")
    return Checked(GuardVerdict.REDACT, [x.content for x in messages], reason)


class HttpService:
    """Posts to `url`."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url, self._session = url, session

    async def check(self, subject: Subject, pieces: Sequence[GuardedText]) -> Checked:
        data = body_of(subject, pieces)
        try:
            answer = _ANSWER.decode(await self._post(data))
        except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            raise GuardCheckFailed(str(error)) from error
        reason = answer.reason[:_MAX_REASON_CHARS]
        if answer.verdict is GuardVerdict.REDACT:
            return _redacted(answer.messages, pieces, reason)
        if answer.verdict is GuardVerdict.FAILED:
            raise GuardCheckFailed(reason)
        return Checked(answer.verdict, (), reason)

    async def _post(self, data: bytes) -> bytes:
        headers = {"content-type": "application/json"}
        posting = self._session.post(self._url, data=data, headers=headers, allow_redirects=False)
        found = bytearray()
        async with posting as answer:
            if answer.status != 200:
                raise GuardCheckFailed(f"it answered with status {answer.status}")
            async for chunk in answer.content.iter_chunked(_CHUNK):
                found += chunk
                if len(found) > len(data) + _MAX_MORE_BYTES:
                    raise GuardCheckFailed("its answer is too long")
        return bytes(found)


class ExtProcService:
    """Sends headers and body of a request (a prompt) or response (a piece of an answer) on a new
    stream, without waiting between them. An immediate response refuses; a body that differs
    replaces the texts. A stream that the service ends in order lets them pass, as in Envoy."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._process = channel.stream_stream(
            PROCESS,
            request_serializer=p.ProcessingRequest.SerializeToString,
            response_deserializer=p.ProcessingResponse.FromString,
        )

    async def check(self, subject: Subject, pieces: Sequence[GuardedText]) -> Checked:
        call: Any = self._process()
        try:
            for message in _messages(subject, body_of(subject, pieces)):
                await call.write(message)
            await call.done_writing()
            return await _verdict(call, pieces)
        except grpc.aio.AioRpcError as error:
            raise GuardCheckFailed(f"{error.code().name}: {error.details()}") from error
        except (grpc.aio.UsageError, msgspec.DecodeError) as error:
            raise GuardCheckFailed(str(error)) from error
        finally:
            call.cancel()


def _messages(subject: Subject, body: bytes) -> Iterator[p.ProcessingRequest]:
    is_prompt = subject.place is GuardPlace.PROMPT
    names = {
        **({":method": "POST", ":path": "/"} if is_prompt else {":status": "200"}),
        "content-type": "application/json",
        "x-request-id": subject.request_id,
        "x-pdserve-tenant": subject.tenant,
        "x-pdserve-model": subject.model,
    }
    values = [p.HeaderValue(key=name, raw_value=x.encode()) for name, x in names.items()]
    headers = p.HttpHeaders(headers=p.HeaderMap(headers=values))
    content = p.HttpBody(body=body, end_of_stream=True)
    mode = p.ProtocolConfiguration(
        request_body_mode=p.BUFFERED,
        response_body_mode=p.BUFFERED,
        send_body_without_waiting_for_header_response=True,
    )
    if is_prompt:
        yield p.ProcessingRequest(request_headers=headers, protocol_config=mode)
        yield p.ProcessingRequest(request_body=content)
    else:
        yield p.ProcessingRequest(response_headers=headers, protocol_config=mode)
        yield p.ProcessingRequest(response_body=content)


async def _verdict(call: Any, pieces: Sequence[GuardedText]) -> Checked:
    """Read until the service has decided."""
    streamed = b""
    while True:
        reply = await call.read()
        if reply is EOF:
            return PASSED
        reply = cast("p.ProcessingResponse", reply)
        kind = reply.WhichOneof("response")
        if kind == "immediate_response":
            refusal = reply.immediate_response
            return Checked(GuardVerdict.REFUSE, (), refusal.details[:_MAX_REASON_CHARS])
        if kind is None:
            raise GuardCheckFailed("it sent a response that is not supported")
        response = getattr(reply, kind).response
        if kind.endswith("headers") and response.status != p.CommonResponse.CONTINUE_AND_REPLACE:
            continue
        mutation = response.body_mutation
        match mutation.WhichOneof("mutation"):
            case "body":
                return _replaced(mutation.body, pieces)
            case "clear_body" if mutation.clear_body:
                return Checked(GuardVerdict.REDACT, [""] * len(pieces))
            case "streamed_response":
                streamed += mutation.streamed_response.body
                if len(streamed) > _MAX_MORE_BYTES + 8 * sum(len(x.text) for x in pieces):
                    raise GuardCheckFailed("its body is too long")
                if mutation.streamed_response.end_of_stream:
                    return _replaced(streamed, pieces)
            case _:
                return PASSED


def _replaced(body: bytes, pieces: Sequence[GuardedText]) -> Checked:
    found = _redacted(_BODY.decode(body).messages, pieces, "")
    return PASSED if [x.text for x in pieces] == list(found.texts) else found
