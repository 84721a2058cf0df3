"""pdserve's own gRPC face as a target."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import grpc.aio

from benchmarks.errors import BenchError, TargetError
from benchmarks.records import Answer
from benchmarks.targets import PROBE_TIMEOUT_S, ServedModel, pick_model
from pdserve import rpc, wire
from pdserve.v1 import common_pb2, generation_pb2, generation_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.records import Timeline
    from pdserve.rpc import Dialer


class GrpcTarget:
    """The ``Generation`` service at ``address`` (host:port).

    Owns its channel. It calls the stub itself rather than through a client, so that a request is
    encoded before the clock starts. Must be made inside a running loop.
    """

    kind = "grpc"

    def __init__(self, address: str, dialer: Dialer = rpc.PLAIN) -> None:
        check_address(address)
        self.address = address
        self._channel = dialer.open_channel(address)
        self._metadata = dialer.metadata
        self._stub = generation_pb2_grpc.GenerationStub(self._channel)

    async def model(self, name: str | None) -> ServedModel:
        """Ask ``ListModels``; raises :class:`BenchError` if that fails or lacks ``name``."""
        try:
            listing = await self._stub.ListModels(
                generation_pb2.ListModelsRequest(),
                timeout=PROBE_TIMEOUT_S,
                wait_for_ready=False,
                metadata=self._metadata,
            )
        except grpc.aio.AioRpcError as error:
            raise BenchError(
                f"cannot list models at {self.address}: {_reason(error)}; is pdserve's gRPC face "
                "there?"
            ) from None
        models = [
            ServedModel(
                name=card.name,
                max_model_len=card.max_model_len or None,
                vocab_size=card.vocab_size or None,
            )
            for card in listing.models
        ]
        return pick_model(models, name)

    def prepare(
        self, model: ServedModel, request_id: str, prompt: Sequence[int], output_tokens: int
    ) -> generation_pb2.GenerateRequest:
        """Build one greedy request of exactly ``output_tokens`` tokens."""
        return generation_pb2.GenerateRequest(
            request_id=request_id,
            model=model.name,
            token_ids=generation_pb2.TokenIds(ids=prompt),
            sampling=common_pb2.SamplingParams(
                max_tokens=output_tokens,
                min_tokens=output_tokens,
                ignore_eos=True,
                temperature=0.0,
            ),
        )

    async def send(self, prepared: generation_pb2.GenerateRequest, timeline: Timeline) -> None:
        """Call ``Generate`` and read its stream; the caller's deadline is the only one."""
        answer: Answer | None = None
        timeline.mark_sent()
        try:
            async for delta in self._stub.Generate(prepared, metadata=self._metadata):
                if delta.token_ids:
                    timeline.add_chunk(timeline.now(), len(delta.token_ids))
                if delta.HasField("usage"):
                    answer = _answer(delta)
        except grpc.aio.AioRpcError as error:
            raise TargetError(_reason(error)) from None
        if answer is None:
            raise TargetError("no usage in the stream")
        timeline.complete(answer)

    async def aclose(self) -> None:
        """Close the channel."""
        await self._channel.close()


def check_address(address: str) -> None:
    """Raises :class:`BenchError` for what is no host:port."""
    if "/" in address or not address.rpartition(":")[2].isdecimal():
        raise BenchError(f"--grpc {address!r} is not like 127.0.0.1:50051")


def _answer(delta: generation_pb2.GenerateResponse) -> Answer:
    has_receipt = delta.HasField("receipt")
    receipt = asdict(wire.receipt_from_pb(delta.receipt)) if has_receipt else None
    if receipt is not None:
        # As JSON has it, so that a result reads the same from its file.
        receipt["fallbacks"] = list(receipt["fallbacks"])
    return Answer(
        prompt_tokens=delta.usage.prompt_tokens,
        completion_tokens=delta.usage.completion_tokens,
        cached_tokens=delta.usage.cached_tokens,
        receipt=receipt,
    )


def _reason(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {rpc.error_from_rpc(error).message}"
