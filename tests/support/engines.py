"""Engines for tests, one process each, because vLLM's state is process-wide."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pdserve.config import SessionRetentionConfig, TiersConfig
from pdserve.errors import PdserveError
from pdserve.model import prefix_hash
from pdserve.types import SamplingParams
from pdserve.v1 import worker_pb2 as w
from tests.support.engine_process import read_frame, write_frame
from tests.support.processes import start_python
from tests.support.timeouts import START_S, WAIT_S
from workers.engine import AggregatedPhase, DecodePhase, Phase, Work
from workers.vllm.start.settings import VllmSettings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from kv_transfer.protocol.snapshot import KvState
    from kv_transfer.settings import ConnectorConfig
    from pdserve.model.weight_deltas import WeightFiles
    from pdserve.process.forkserver import Process
    from pdserve.types import (
        Adapter,
        ErrorInfo,
        FinishReason,
        KvLedger,
        MediaItem,
        PhaseReport,
        PositionLogprobs,
        StreamDelta,
        WorkerLoad,
    )
    from workers.engine import EngineInfo


def settings(
    model: Path,
    *,
    kv: ConnectorConfig | None = None,
    instance_id: str = "",
    tiers: TiersConfig | None = None,
    retention: SessionRetentionConfig | None = None,
    **engine_args: Any,
) -> VllmSettings:
    """Return settings of a test engine: a small KV cache, and float32, so that rounding does not
    change which token wins."""
    args = {"dtype": "float32", "kv_cache_memory_bytes": 64 << 20, **engine_args}
    return VllmSettings(
        str(model),
        ("tiny",),
        threads=1,
        kv=kv,
        instance_id=instance_id,
        tiers=tiers or TiersConfig(),
        retention=retention or SessionRetentionConfig(),
        engine_args=args,
    )


class EngineGone(Exception):
    """The engine's process ended."""


@dataclass(slots=True)
class EngineAnswer:
    """The joined deltas of one stream so far."""

    deltas: list[StreamDelta] = field(default_factory=list)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(t for delta in self.deltas for t in delta.token_ids)

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def logprobs(self) -> tuple[PositionLogprobs, ...]:
        return tuple(position for delta in self.deltas for position in delta.logprobs)

    @property
    def experts(self) -> bytes:
        return b"".join(x.routed_experts.ids for x in self.deltas if x.routed_experts is not None)

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.deltas[-1].finish_reason if self.deltas else None

    @property
    def stop_reason(self) -> str | int | None:
        return self.deltas[-1].stop_reason if self.deltas else None

    @property
    def report(self) -> PhaseReport | None:
        return self.deltas[-1].report if self.deltas else None

    @property
    def error(self) -> ErrorInfo | None:
        return self.deltas[-1].error if self.deltas else None


class EngineProcess:
    """One engine in a child process. State: the streams, changed only by the reader task.

    Used from one event loop. The child ends with this process, because its socket closes.
    """

    def __init__(
        self,
        process: Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader, self._writer = reader, writer
        self._ids = itertools.count(1)
        self._answers: dict[int, EngineAnswer] = {}
        self._changed = asyncio.Event()
        self._replies: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self._gone = False
        self._task: asyncio.Task[None] | None = None
        self.failure: str | None = None
        self.instance_id = ""
        self.info: EngineInfo

    @classmethod
    async def start(
        cls,
        settings: VllmSettings,
        *,
        env: Mapping[str, str] | None = None,
        core: int | None = None,
    ) -> EngineProcess:
        """Start the engine and wait until it is ready. `core` pins it to one CPU core. Raises
        RuntimeError with the child's error if it does not start."""
        ours, theirs = socket.socketpair()
        process = await start_python("tests.support.engine_process", env=env, fds=[theirs.fileno()])
        theirs.close()
        if core is not None:
            os.sched_setaffinity(process.pid, {core})
        reader, writer = await asyncio.open_connection(sock=ours)
        self = cls(process, reader, writer)
        self.instance_id = settings.instance_id
        write_frame(writer, settings)
        try:
            kind, value = await asyncio.wait_for(read_frame(reader), START_S)
        except (asyncio.IncompleteReadError, TimeoutError) as error:
            await self._end()
            raise RuntimeError("the engine process ended before it was ready") from error
        if kind != "started":
            await self._end()
            raise RuntimeError(value)
        self.info = value
        self._task = asyncio.create_task(self._read())
        return self

    def decode_phase(self, transfer_id: str) -> DecodePhase:
        """Return the decode phase for a prefill on this engine."""
        assert self.info.kv is not None
        stages = self.info.kv.stage_layers
        return DecodePhase(
            transfer_id, self.addresses, self.instance_id, producer_stage_layers=stages
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def addresses(self) -> tuple[str, ...]:
        """KV addresses of this engine."""
        assert self.info.kv is not None
        return self.info.kv.addresses

    async def _read(self) -> None:
        try:
            while True:
                kind, value = await read_frame(self._reader)
                if kind == "deltas":
                    for delta in value:
                        self._answers.setdefault(delta.stream_id, EngineAnswer()).deltas.append(
                            delta
                        )
                elif kind == "engine_failed":
                    self.failure = value
                else:
                    self._replies.put_nowait((kind, value))
                self._notify()
        except (asyncio.IncompleteReadError, ConnectionError):
            self._gone = True
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        phase: Phase | None = None,
        *,
        resume: Sequence[int] = (),
        request_id: str = "",
        adapter: str = "",
        media: Sequence[MediaItem] = (),
        next_turn_s: float | None = None,
        no_tiers: bool = False,
        scored_from: int = 0,
    ) -> int:
        """Submit work and return its stream id."""
        stream_id = next(self._ids)
        work = Work(
            stream_id=stream_id,
            request_id=request_id or f"test-{stream_id}",
            prompt_token_ids=tuple(prompt),
            sampling=sampling or SamplingParams(temperature=0.0),
            phase=phase or AggregatedPhase(),
            resume_token_ids=tuple(resume),
            adapter=adapter,
            media=tuple(media),
            next_turn_s=next_turn_s,
            no_tiers=no_tiers,
            scored_from=scored_from,
        )
        self._answers[stream_id] = EngineAnswer()
        write_frame(self._writer, ("submit", work))
        return stream_id

    def cancel(self, stream_id: int) -> None:
        write_frame(self._writer, ("cancel", stream_id))

    def export(self, stream_id: int, transfer_id: str) -> None:
        write_frame(self._writer, ("export", stream_id, transfer_id))

    def answer(self, stream_id: int) -> EngineAnswer:
        """Return the answer of a stream so far."""
        return self._answers[stream_id]

    async def collect(self, stream_id: int, timeout_s: float = WAIT_S) -> EngineAnswer:
        """Wait for the end of a stream and return its answer."""
        answer = self._answers[stream_id]
        await self.until(lambda: answer.finish_reason is not None, timeout_s)
        return answer

    async def until(self, condition: Any, timeout_s: float = WAIT_S) -> None:
        """Wait for `condition()`, checked after each frame. Raises EngineGone, TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                if self._gone:
                    raise EngineGone(f"engine process {self.pid} ended")
                await self._changed.wait()

    async def run(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        phase: Phase | None = None,
        *,
        resume: Sequence[int] = (),
        adapter: str = "",
        media: Sequence[MediaItem] = (),
        next_turn_s: float | None = None,
    ) -> EngineAnswer:
        """Submit work and wait for its end."""
        stream_id = self.submit(
            prompt,
            sampling,
            phase,
            resume=resume,
            adapter=adapter,
            media=media,
            next_turn_s=next_turn_s,
        )
        return await self.collect(stream_id)

    async def load_adapter(self, adapter: Adapter) -> None:
        """Load an adapter. Raises the engine's error."""
        if (error := await self._ask("load_adapter", WAIT_S, adapter)) is not None:
            raise error

    async def stage_weights(self, files: WeightFiles) -> bool:
        """Load weights in advance. Return whether the engine could."""
        found: bool = await self._ask("stage_weights", START_S, files)
        return found

    async def update_weights(self, files: WeightFiles) -> None:
        await self._ask("update_weights", START_S, files)

    async def render(self, request: w.RenderRequest) -> w.RenderResponse:
        """Render a prompt with images. Raises the engine's error."""
        found = await self._ask("render", WAIT_S, request.SerializeToString())
        if isinstance(found, PdserveError):
            raise found
        return w.RenderResponse.FromString(found)

    async def status(self) -> tuple[WorkerLoad | None, KvLedger]:
        """Return the current load and ledger."""
        value: tuple[WorkerLoad | None, KvLedger] = await self._ask("status", WAIT_S)
        return value

    async def kv_state(self) -> KvState | None:
        """Return the latest known state of the KV plane of each process that runs the model."""
        value: KvState | None = await self._ask("kv", WAIT_S)
        return value

    async def cached_blocks(self) -> set[int]:
        """Return the chain hashes of the blocks in the prefix cache, according to its events."""
        return set(await self._ask("cache", WAIT_S))

    async def expected_hit(self, ids: Sequence[int], media: Sequence[MediaItem] = ()) -> int:
        """Return how many tokens of a prompt a router expects to be cached."""
        cached, size = await self.cached_blocks(), self.info.block_size
        places = prefix_hash.media_keys([(x.hash, x.offset, x.length) for x in media], size)
        chain = prefix_hash.chain(
            ids,
            size,
            prefix_hash.root(self.info.model.name, size),
            blocks=prefix_hash.usable_blocks(len(ids), size),
            media=places,
        )
        reached = [x in cached for x in chain]
        # Closed: nothing is said to be cached that no lookup reaches.
        assert reached == sorted(reached, reverse=True)
        return sum(reached) * size

    async def until_empty(self, timeout_s: float = WAIT_S) -> tuple[WorkerLoad | None, KvLedger]:
        """Wait until the ledger is empty. Raises TimeoutError with the ledger."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    load, ledger = await self.status()
                    if ledger.is_empty and load is not None and load.kv_cache_usage == 0.0:
                        return load, ledger
        except TimeoutError:
            raise TimeoutError(f"not empty: {await self.status()}") from None

    async def _ask(self, what: str, timeout_s: float, *values: object) -> Any:
        write_frame(self._writer, (what, *values))
        await self.until(lambda: not self._replies.empty(), timeout_s)
        return self._replies.get_nowait()[1]

    async def close(self) -> list[str]:
        """Close the engine, then end the process. Return the engine threads left after the
        close."""
        left: list[str] = []
        if self._process.returncode is None and not self._gone:
            with contextlib.suppress(EngineGone):
                left = await self._ask("close", WAIT_S)
        await self._end()
        return left

    async def kill(self) -> None:
        """Kill the engine with SIGKILL."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)
        await self._end()

    async def _end(self) -> None:
        self._writer.close()
        if self._task is not None:
            await self._task
        try:
            await asyncio.wait_for(self._process.wait(), WAIT_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
