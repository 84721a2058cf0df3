"""A request that the router of another region serves: as messages, and its answer as deltas.

It is forwarded as tokens, after parsing and tokenising: one form for all dialects, for batches and
gRPC, and one that can continue after the tokens that were delivered.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc.aio

from pdserve import wire
from pdserve.errors import (
    Cancelled,
    DeadlineExceeded,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from pdserve.model.pixels import Pixels
from pdserve.net import deadline, rpc
from pdserve.types import GenerateRequest, ReasoningGate, ServiceClass, StaleKv
from pdserve.v1 import generation_pb2 as g
from pdserve.v1 import peer_pb2 as p
from router.attempt.answer import AnswerDelta
from router.attempt.specs import SubmitInputs, complete
from router.attempt.streams import Answer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.errors import PdserveError
    from pdserve.types import Adapter
    from router.attempt.answer import Out
    from router.fleet.peers import Peer


async def request_to_pb(
    request: GenerateRequest, *, tokenizer: str, from_region: str
) -> p.ForwardRequest:
    """Return the message of a request that leaves `from_region`. `tokenizer`: digest of the one
    that made its prompt. Raises OSError if the images are lost."""
    found = p.ForwardRequest(
        model=request.model,
        tokenizer=tokenizer,
        tenant=request.tenant,
        priority=request.priority,
        service_class=f"SERVICE_CLASS_{request.service_class.name}",
        session=request.session,
        regions=sorted(request.regions or ()),
        from_region=from_region,
        stale_kv=request.stale_kv or "",
    )
    media = () if request.pixels is None else await request.pixels.read()
    complete(found.request, request, SubmitInputs(request.resume, media, ()))
    found.request.prompt_token_ids.extend(request.prompt_token_ids)
    return found


def request_from_pb(
    message: p.ForwardRequest, adapters: Mapping[str, Adapter], timeout_s: float | None
) -> GenerateRequest:
    """Return the request in `message`. `adapters`: by key. Raises InvalidRequest naming the field,
    and Unavailable if its adapter is not served."""
    sent, adapter, gate = message.request, None, None
    if sent.adapter and (adapter := adapters.get(sent.adapter)) is None:
        raise Unavailable(f"adapter {sent.adapter} is not loaded")
    if sent.HasField("reasoning_gate"):
        gate = ReasoningGate(sent.reasoning_gate.parser, sent.reasoning_gate.kwargs_json)
    media = wire.media_from_pb(sent.media, len(sent.prompt_token_ids))
    is_batch = message.service_class == g.SERVICE_CLASS_BATCH
    return GenerateRequest(
        request_id=sent.request_id,
        model=message.model,
        prompt_token_ids=tuple(sent.prompt_token_ids),
        sampling=wire.sampling_from_pb(sent.sampling, default_max_tokens=1),
        deadline=deadline.after(timeout_s),
        priority=message.priority,
        service_class=ServiceClass.BATCH if is_batch else ServiceClass.INTERACTIVE,
        tenant=message.tenant,
        traceparent=sent.traceparent,
        resume=tuple(sent.resume_token_ids),
        adapter=adapter,
        cache_salt=sent.cache_salt,
        reasoning_gate=gate,
        media=tuple([x.without_data() for x in media]),
        pixels=Pixels(media) if media else None,
        session=message.session,
        regions=frozenset(message.regions) or None,
        from_region=message.from_region,
        stale_kv=StaleKv(message.stale_kv) if message.stale_kv in set(StaleKv) else None,
    )


def new_answers(request: GenerateRequest, out: Out) -> list[Answer]:
    """Return the answers of a request that is forwarded, without tokens but its resumed ones."""
    sampling = request.sampling
    return [Answer(out, sampling.max_tokens, list(request.resume), x) for x in range(sampling.n)]


async def forward(
    peer: Peer, message: p.ForwardRequest, answers: Sequence[Answer], until: float | None
) -> AnswerDelta:
    """Have a region serve a request, until the loop time `until`. Write all deltas but the last,
    which has usage and receipt, and is returned.

    Raises the errors of that region's router, and Unavailable if it is lost. If the client leaves,
    the request ends there too.
    """
    call = peer.stub.Forward(message, timeout=deadline.remaining(until), metadata=peer.metadata)
    reading = asyncio.create_task(_read(call, answers))
    lost = asyncio.create_task(peer.lost.wait())
    region = peer.config.region
    try:
        await asyncio.wait({reading, lost}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            raise Unavailable(f"region {region} does not answer any more")
        return reading.result()
    except grpc.aio.AioRpcError as error:
        raise _error_of(error, region) from None
    finally:
        call.cancel()  # no effect if the call has ended
        reading.cancel()
        lost.cancel()
        await asyncio.wait({reading, lost})


async def _read(
    call: grpc.aio.UnaryStreamCall[p.ForwardRequest, g.GenerateResponse],
    answers: Sequence[Answer],
) -> AnswerDelta:
    now = asyncio.get_running_loop().time
    async for response in call:
        if response.index >= len(answers):
            raise Unavailable(f"the answer has no output {response.index}")
        answer, delta = answers[response.index], delta_from_pb(response)
        answer.tokens += delta.token_ids
        if answer.first_token_at is None and delta.token_ids:
            answer.first_token_at = now()
        if delta.finish_reason is not None:
            answer.finish_reason = delta.finish_reason.value
        if delta.usage is not None and delta.receipt is not None:
            return delta
        # What is cut is read to its end, because the other answers go on.
        if not answer.out.write(delta) and answer.cut is None:
            raise Cancelled("the client does not read its answer")
    raise Unavailable("the answer ended without its usage")


def _error_of(error: grpc.aio.AioRpcError, region: str) -> PdserveError:
    found = rpc.error_from_rpc(error)
    # The client has the credentials that it needs; those of this router are not its concern.
    refused = isinstance(found, Unauthenticated | PermissionDenied)
    if refused or not (rpc.has_error(error) or isinstance(found, DeadlineExceeded)):
        found = Unavailable(found.message)
    found.message = f"region {region}: {found.message}"
    return found


def delta_from_pb(message: g.GenerateResponse) -> AnswerDelta:
    """Return the delta in a message without reasoning and tool calls, which are parsed later."""
    delta = AnswerDelta(
        tuple(message.token_ids),
        message.text,
        wire.logprobs_from_pb(message.logprobs),
        wire.finish_from_pb(message.finish_reason),
        wire.stop_reason_from_pb(message.stop_reason),
        wire.usage_from_pb(message.usage) if message.HasField("usage") else None,
        wire.receipt_from_pb(message.receipt) if message.HasField("receipt") else None,
        message.index,
        wire.logprobs_from_pb(message.prompt_logprobs),
    )
    if message.HasField("routed_experts"):
        delta.routed_experts = wire.experts_from_pb(message.routed_experts)
    return delta
