"""A real request through a worker, or through a pair of them, whose answer is checked.

Through a pair, the prefill worker answers it whole first; then both answer it together. The decode
worker has none of the prompt's blocks, so that all of its KV has to come over, and to be right.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from typing import TYPE_CHECKING

from pdserve import deadline as deadlines
from pdserve.errors import InternalError, TransferCorrupted, TransferFailed, WorkerFailed, from_info
from pdserve.types import FinishReason, GenerateRequest, HandoffStyle, SamplingParams
from router.submission import SubmissionBuilder

if TYPE_CHECKING:
    from pdserve.errors import PdserveError
    from pdserve.types import StreamDelta
    from pdserve.v1 import worker_pb2 as w
    from router.fleet import Fleet
    from router.member import Member

ANSWER_TOKENS = 8
# Rounding may flip a tie between two tokens of one answer; hardly of two.
ATTEMPTS = 2


class _Stream:
    """The sink of one stream: its tokens, and its last delta or its error."""

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

    def cancel(self) -> None:
        """Ends what is open or held; without effect on what is gone."""
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


async def prove_alone(fleet: Fleet, worker: Member, *, timeout_s: float) -> None:
    """Raises PdserveError where the worker does not answer, or not in time."""
    try:
        async with asyncio.timeout(timeout_s):
            await _whole(fleet, worker, _request(worker))
    except TimeoutError:
        raise WorkerFailed(f"the canary did not end within {timeout_s:g} s") from None


async def prove(fleet: Fleet, prefill: Member, decode: Member, *, timeout_s: float) -> None:
    """Raises PdserveError where the pair does not answer, or not in time; TransferCorrupted where
    it answers something else than prefill alone."""
    until = deadlines.after(timeout_s)
    try:
        async with deadlines.timeout(until):
            for _ in range(ATTEMPTS):
                request = _request(prefill)
                alone = await _whole(fleet, prefill, request)
                together = await _pair(fleet, prefill, decode, request)
                if alone == together:
                    return
    except TimeoutError:
        raise WorkerFailed(f"the canary did not end within {timeout_s:g} s") from None
    raise TransferCorrupted(f"the canary's answer was {together}, and {alone} by prefill alone")


def _request(prefill: Member) -> GenerateRequest:
    """Tokens that nobody has sent before, over two blocks and a half."""
    info = prefill.info
    length = min(2 * info.block_size + info.block_size // 2 + 1, info.model.max_model_len // 2)
    canary_id = f"canary-{uuid.uuid4().hex}"
    draw = random.Random(canary_id)
    return GenerateRequest(
        request_id=canary_id,
        model=info.model.name,
        prompt_token_ids=tuple(draw.randrange(info.model.vocab_size) for _ in range(length)),
        sampling=SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True),
    )


async def _whole(fleet: Fleet, worker: Member, request: GenerateRequest) -> list[int]:
    stream = _Stream(fleet, worker, SubmissionBuilder(request, None).whole())
    try:
        await stream.last()
    finally:
        stream.cancel()
    return stream.tokens


async def _pair(
    fleet: Fleet, prefill: Member, decode: Member, request: GenerateRequest
) -> list[int]:
    builder, transfer_id = SubmissionBuilder(request, None), uuid.uuid4().hex
    in_turn = prefill.info.kv is not None and prefill.info.kv.handoff is HandoffStyle.SEQUENTIAL
    streams: list[_Stream] = []
    try:
        if not in_turn:
            command = builder.decode(transfer_id, prefill, decode)
            streams.append(_Stream(fleet, decode, command))
        streams.append(_Stream(fleet, prefill, builder.prefill(transfer_id)))
        first = streams[-1]
        last = await first.last()
        if last.finish_reason is not FinishReason.LENGTH or len(first.tokens) != 1:
            raise InternalError("the canary's prefill did not end with one token")
        if in_turn:
            if not last.kv_handle:
                raise TransferFailed("prefill kept no KV")
            resume, handle = tuple(first.tokens), last.kv_handle
            command = builder.decode(transfer_id, prefill, decode, resume=resume, kv_handle=handle)
            streams.append(_Stream(fleet, decode, command))
        rest = next(stream for stream in streams if stream is not first)
        await rest.last()
    finally:
        for stream in streams:
            stream.cancel()
    return first.tokens + rest.tokens
