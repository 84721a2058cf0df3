"""Drives one engine in a test: submits work, gathers deltas by stream, waits for ends."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pdserve.types import ErrorInfo, FinishReason, SamplingParams, StreamDelta
from tests.patience import WAIT_S
from workers.engine import AggregatedPhase, DecodePhase, Phase, PrefillPhase, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from workers.engine import Engine, EngineInfo

PLAIN = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def prompt(length: int, *, start: int = 20) -> tuple[int, ...]:
    """A prompt of `length` tokens, another one for each `start`."""
    return tuple(20 + (start + 7 * i) % 40 for i in range(length))


@dataclass(slots=True)
class Stream:
    """What one stream has said so far."""

    deltas: list[StreamDelta] = field(default_factory=list)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(x for d in self.deltas for x in d.token_ids)

    @property
    def text(self) -> str:
        return "".join(d.text for d in self.deltas)

    @property
    def last(self) -> StreamDelta:
        return self.deltas[-1]

    @property
    def error(self) -> ErrorInfo:
        assert self.last.error is not None, self.last
        return self.last.error

    @property
    def is_finished(self) -> bool:
        return bool(self.deltas) and self.last.finish_reason is not None


class EngineDriver:
    """Owns one engine between `start` and `close`. `steps` has every on_step call as it came."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.streams: dict[int, Stream] = {}
        self.steps: list[list[StreamDelta]] = []
        self.info: EngineInfo
        self._changed = asyncio.Event()
        self._ids = 0

    async def start(self) -> EngineDriver:
        self.info = await self.engine.start(self._on_step, self._on_failure)
        return self

    def submit(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams = PLAIN,
        phase: Phase | None = None,
        *,
        resume: Sequence[int] = (),
        request_id: str = "request",
    ) -> int:
        """The stream id of what was submitted."""
        self._ids += 1
        phase = phase or AggregatedPhase()
        work = Work(self._ids, request_id, tuple(token_ids), sampling, phase, tuple(resume))
        self.streams[self._ids] = Stream()
        self.engine.submit(work)
        return self._ids

    async def run(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams = PLAIN,
        phase: Phase | None = None,
        *,
        resume: Sequence[int] = (),
    ) -> Stream:
        return await self.finish(self.submit(token_ids, sampling, phase, resume=resume))

    async def finish(self, stream_id: int) -> Stream:
        stream = self.streams[stream_id]
        await self.until(lambda: stream.is_finished)
        return stream

    async def until(self, condition: Callable[[], object]) -> None:
        """Waits until `condition` holds; it is looked at after each step, and in between."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._changed.clear()
                try:
                    await asyncio.wait_for(self._changed.wait(), 0.005)
                except TimeoutError:
                    continue

    async def until_empty(self) -> None:
        """Waits until no block is pinned and no request is held: the ledger must come to that."""
        await self.until(lambda: self.engine.ledger().is_empty)

    async def close(self) -> None:
        await self.engine.close()

    def _on_step(self, deltas: Sequence[StreamDelta]) -> None:
        self.steps.append(list(deltas))
        for delta in deltas:
            self.streams[delta.stream_id].deltas.append(delta)
        self._changed.set()

    def _on_failure(self, error: BaseException) -> None:
        self._changed.set()


@dataclass(slots=True)
class Pair:
    """A prefill and a decode engine that can reach each other."""

    prefill: EngineDriver
    decode: EngineDriver
    producer_instance_id: str
    _transfers: int = 0

    def phases(self) -> tuple[PrefillPhase, DecodePhase]:
        """Both parts of a new transfer."""
        self._transfers += 1
        transfer_id = f"transfer-{self._transfers}"
        assert self.prefill.info.kv is not None
        addresses = self.prefill.info.kv.addresses
        decode = DecodePhase(transfer_id, addresses, self.producer_instance_id)
        return PrefillPhase(transfer_id), decode

    async def run(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams = PLAIN,
        *,
        resume: Sequence[int] = (),
    ) -> Stream:
        """The whole answer: what prefill said, and then what decode said."""
        prefill_phase, decode_phase = self.phases()
        decoding = self.decode.submit(token_ids, sampling, decode_phase, resume=resume)
        first = await self.prefill.run(token_ids, sampling, prefill_phase, resume=resume)
        if first.last.finish_reason is not FinishReason.LENGTH:
            self.decode.engine.cancel(decoding)
            return first
        rest = await self.decode.finish(decoding)
        head = replace(first.last, finish_reason=None, report=None)
        return Stream([*first.deltas[:-1], head, *rest.deltas])
