"""An engine without a model: deterministic tokens, simulated step times, real transfers of "KV".

It implements the contract of workers/engine.py without torch or vllm. It steps on the event loop,
by the loop's clock. Sampling parameters that shape probabilities (temperature, penalties) have no
effect on its tokens; the seed has. Structured output is refused.

Each block is free, or belongs to one sequence or one transfer. What an engine refuses, and with
which error, is workers/engine.py's. The rest stands for vLLM's scheduler, not for its streams
(workers/vllm/streams.py).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from msgspec import structs

from kv_transfer.protocol.snapshot import KvState
from pdserve.config import SessionRetentionConfig
from pdserve.errors import (
    ConfigError,
    ContextLengthExceeded,
    InvalidRequest,
    PdserveError,
    TransferFailed,
    WorkerFailed,
)
from pdserve.model.weight_deltas import read_weights
from pdserve.types import (
    EngineLimits,
    FinishReason,
    KvLedger,
    StreamDelta,
    TransferReport,
    WorkerLoad,
)
from workers.cache.retention import RetainedBlocks
from workers.engine import (
    NO_LORA,
    AggregatedPhase,
    DecodePhase,
    EngineInfo,
    PrefillPhase,
    StepResult,
    StepResults,
    check_render,
    check_work,
    ended_by,
    not_exported,
)
from workers.fake import model
from workers.fake.prefix_cache import PrefixCache
from workers.fake.producer import FakeProducer, fetch
from workers.fake.render import render
from workers.fake.sequence import Sequence
from workers.fake.settings import FakeSettings, matches
from workers.metering.worker_account import BusyTime, StepWork

if TYPE_CHECKING:
    from collections.abc import Collection, Coroutine

    from kv_transfer.settings import ConnectorConfig
    from pdserve.model.weight_deltas import WeightFiles
    from pdserve.types import Adapter, ModelInfo
    from pdserve.v1 import worker_pb2 as w
    from workers.engine import Work
    from workers.fake.lockstep import FakeLockstep
    from workers.fake.settings import FakeFaults

_BLOCK_BYTES = 4096  # as transfers report it
_UNSUPPORTED = ("structured_output",)
_GENERATING = DecodePhase | AggregatedPhase
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Steps:
    """`done`: their number. `now_s`: duration of the one under way, 0.0 without one. `turn`: held
    during a step."""

    done: int = 0
    now_s: float = 0.0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_frozen: bool = False


@dataclass(slots=True)
class _LoadedWeights:
    """`digest`: of loaded weights, a part of each token's seed; "" for those of the start.
    `staged`: files that are loaded in advance."""

    digest: str = ""
    staged: WeightFiles | None = None


class FakeEngine:
    """State: sequences that wait for room, wait for KV, or run; KV that is held for transfers; the
    last deltas to report with the next step. `faults` may be set at any time."""

    def __init__(
        self,
        info: ModelInfo,
        settings: FakeSettings | None = None,
        kv: ConnectorConfig | None = None,
        instance_id: str = "",
        lockstep: FakeLockstep | None = None,
        retention: SessionRetentionConfig | None = None,
    ) -> None:
        """Without `kv`, KV cannot leave the engine; with it, peers know it by `instance_id`.
        Engines with the same `lockstep` step together."""
        if info.vocab_size < model.MIN_VOCAB_SIZE:
            raise ConfigError(
                f"vocab_size must be at least {model.MIN_VOCAB_SIZE}", field="vocab_size"
            )
        self._settings = settings = settings or FakeSettings()
        images = {"image": settings.max_images} if settings.max_images else {}
        self._model = info = replace(info, modalities=images)
        self._lockstep = lockstep
        self._producer = FakeProducer(settings, instance_id, kv)
        self._waiting: dict[int, Sequence] = {}
        self._receiving: dict[int, Sequence] = {}
        self._running: dict[int, Sequence] = {}
        self._ended: list[StreamDelta] = []
        self.weights = _LoadedWeights()
        self._cache: PrefixCache | None = None
        if settings.prefix_cache:
            retention, total = retention or SessionRetentionConfig(), settings.total_blocks
            retained = RetainedBlocks(int(retention.share * total), retention.max_s)
            self._cache = PrefixCache(info.name, settings.block_size, total, retained)
        self.steps = _Steps()
        self.busy = BusyTime()
        self.results = StepResults()
        self._is_over = False
        self._tasks: set[asyncio.Task[None]] = set()  # the step loop and fetches

    async def start(self) -> EngineInfo:
        """Start, in `start_s`. Raises OSError if the KV address cannot be listened on."""
        settings = self._settings
        await asyncio.sleep(settings.start_s)
        if settings.cannot_compute:
            raise WorkerFailed("the engine cannot compute: a scripted fault")
        endpoint = await self._producer.listen(self._model.name)
        self._spawn(self._run(), "fake-engine-steps")
        times = ("start_s", "prefill_s", "step_s", "transfer_s")
        return EngineInfo(
            name="fake",
            model=self._model,
            block_size=settings.block_size,
            total_blocks=settings.total_blocks,
            limits=EngineLimits(settings.max_num_seqs, max_loras=settings.max_loras),
            kv=endpoint,
            settings={name: f"{getattr(settings, name):g}" for name in times},
        )

    def _spawn(self, action: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(action, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @property
    def faults(self) -> FakeFaults:
        return self._producer.faults

    @faults.setter
    def faults(self, faults: FakeFaults) -> None:
        self._producer.faults = faults
        self._producer.pool.changed.set()

    async def render(self, request: w.RenderRequest) -> w.RenderResponse:
        check_render(request, self._model)
        return render(request, self._model.vocab_size)

    def submit(self, work: Work) -> None:
        try:
            if self._is_over:
                raise WorkerFailed("the engine has ended")
            blocks = self._blocks_needed(work)
        except PdserveError as error:
            self._ended.append(ended_by(work.stream_id, error))
            if self._is_over:
                self._report_ended()
        else:
            if isinstance(work.phase, PrefillPhase):
                self._producer.open(work.phase.transfer_id, work)
            weights = (
                f"{self.weights.digest} wrong"
                if self.faults.computes_wrong
                else self.weights.digest
            )
            vocab_size = self._model.vocab_size
            sequence = Sequence(work, vocab_size, blocks, self._now(), weights=weights)
            self._waiting[work.stream_id] = sequence
        self._producer.pool.changed.set()

    def cancel(self, stream_id: int) -> None:
        self._producer.cancel(stream_id)
        self._waiting.pop(stream_id, None)
        sequence = self._receiving.pop(stream_id, None) or self._running.pop(stream_id, None)
        if sequence is not None:
            self._producer.pool.free += sequence.blocks
            if sequence.fetch is not None:
                sequence.fetch.cancel()
        self._producer.pool.changed.set()

    def export(self, stream_id: int, transfer_id: str) -> None:
        sequence = self._running.get(stream_id)
        if sequence is None or sequence.is_stale or not self._decodes(sequence):
            if stream_id in self._stream_ids:
                self.cancel(stream_id)
                self._ended.append(not_exported(stream_id))
            return
        del self._running[stream_id]
        last = StreamDelta(stream_id, exported_tokens=len(sequence.generated))
        self._ended.append(sequence.end(last, FinishReason.ABORT, self._now(), goes_on=True))
        self._producer.open(transfer_id, sequence.work)
        self._producer.hold(transfer_id, sequence.handoff)
        self._producer.pool.changed.set()

    @staticmethod
    def _decodes(sequence: Sequence) -> bool:
        return sequence.kv is not None and isinstance(sequence.work.phase, _GENERATING)

    def load(self) -> WorkerLoad:
        total = self._settings.total_blocks
        waits_for_room = bool(self._waiting) and not self.ledger().pinned_blocks
        load = WorkerLoad(
            num_waiting_reqs=len(self._waiting) + len(self._receiving),
            num_running_reqs=len(self._running),
            kv_cache_usage=(total - self._producer.pool.free) / total,
            free_blocks=self._producer.pool.free,
            progress=self.steps.done,
            has_work=not self.steps.is_frozen and (bool(self._running) or waits_for_room),
            step_allowance_s=4 * self.steps.now_s,
        )
        return load if self._cache is None else self._cache.retained.added_to(load)

    def ledger(self) -> KvLedger:
        if self._is_over:
            return KvLedger()
        held, receiving = self._producer.ledger(), self._receiving.values()
        return replace(
            held,
            in_flight_blocks=held.in_flight_blocks + sum(x.blocks for x in receiving),
            transfers=held.transfers + len(receiving),
            engine_requests=held.engine_requests + len(self._stream_ids),
        )

    def kv_state(self) -> KvState | None:
        return None if self._producer.kv is None else KvState(self.ledger())

    async def load_adapter(self, adapter: Adapter) -> None:
        if not self._settings.max_loras:
            raise InvalidRequest(NO_LORA, field="lora_name")

    async def unload_adapter(self, key: str) -> None:
        """An adapter is only a seed of its tokens: nothing is loaded."""

    async def check_weights(self, files: WeightFiles) -> str:
        found = await asyncio.to_thread(read_weights, files, field="weights.path")
        return found.digest

    async def stage_weights(self, files: WeightFiles) -> None:
        self.weights.staged = files

    def unstage_weights(self) -> None:
        self.weights.staged = None

    async def freeze(self, stream_ids: Collection[int]) -> frozenset[int]:
        if self._lockstep is not None:
            return frozenset()
        async with self.steps.turn:
            self.steps.is_frozen = True
        running = self._running
        return frozenset(x for x in stream_ids if x in running and self._decodes(running[x]))

    def thaw(self) -> None:
        self.steps.is_frozen = False
        self._producer.pool.changed.set()

    async def update_weights(self, files: WeightFiles) -> dict[int, int]:
        self.weights.staged = None
        if self.faults.fail_weights:
            raise WorkerFailed("a scripted fault failed the update")
        self.weights.digest = await self.check_weights(files)
        if self._cache is not None:
            self._cache.clear()
        for sequence in self._running.values():
            sequence.weights, sequence.is_stale = self.weights.digest, True
        return {stream_id: x.context - 1 for stream_id, x in self._running.items()}

    async def close(self) -> None:
        self._end(WorkerFailed("the engine was closed"))
        self._ended.clear()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.results.close()

    def crash(self) -> None:
        """Simulate a crash: streams end with an error, transfers fail."""
        if not self._is_over:
            self._end(WorkerFailed("the engine died"))
            self._report_ended()
            self.results.put(StepResult(failure=WorkerFailed("the fake engine died")))

    def _end(self, error: PdserveError) -> None:
        self._is_over = True
        for task in self._tasks:
            task.cancel()
        self._ended += [ended_by(x, error) for x in self._stream_ids]
        for table in (self._waiting, self._receiving, self._running):
            table.clear()
        self._producer.close(error.message)

    def _report_ended(self) -> None:
        ended, self._ended = self._ended, []
        if ended:
            self.results.put(StepResult(ended))

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    @property
    def _stream_ids(self) -> list[int]:
        return [*self._waiting, *self._receiving, *self._running]

    # Steps.

    async def _run(self) -> None:
        try:
            while True:
                self._producer.pool.changed.clear()
                async with self.steps.turn:
                    is_idle = self.faults.stalls(self.steps.done + 1) or not await self._step()
                if is_idle:
                    await self._producer.pool.changed.wait()
        except Exception:
            logger.exception("the fake engine failed")
            self.crash()

    async def _step(self) -> bool:
        """Make one step. Return False if there is nothing to do until something happens."""
        if self.steps.is_frozen:
            self._report_ended()
            return False
        if self._lockstep is not None:
            await self._lockstep.between_rounds()
        if self._cache is not None:
            self._cache.expire(self._now())
        self._admit()
        if not (self._running or self._ended):
            return False
        settings, work, planned = self._settings, self._step_work(), list(self._running)
        shape = work.shape
        self.steps.now_s = settings.step_s + settings.prefill_s * shape.prefill_tokens
        self.steps.now_s += settings.decode_s * shape.decode_reqs
        if (token := self.faults.kill_on_token) and any(
            token in x.work.prompt_token_ids for x in self._running.values()
        ):
            os.kill(os.getpid(), signal.SIGKILL)
        if planned:
            self.busy.begin(self._now())
        if self._lockstep is None:
            await asyncio.sleep(self.steps.now_s)
        else:
            self.steps.now_s = await self._lockstep.step(self.steps.now_s)
        # The scripted time, not the measured one: routers get exact step times.
        if planned:
            self.busy.step(work, self.steps.now_s, self._now())
        self.steps.now_s = 0.0
        self.steps.done += 1
        if self.steps.done == self.faults.crash_at_step:
            raise WorkerFailed("a scripted fault killed the engine")
        deltas, self._ended = self._ended, []
        deltas += [self._advance(self._running[x]) for x in planned if x in self._running]
        if settings.clock_text:
            stamp = f"{time.monotonic():.6f} "
            deltas = [structs.replace(x, text=stamp) if x.token_ids else x for x in deltas]
        change = None if self._cache is None else self._cache.take()
        if deltas or change:
            self.results.put(StepResult(deltas, change))
        return True

    def _admit(self) -> None:
        """Start waiting requests in order while there are blocks and slots for them."""
        while self._waiting:
            stream_id, sequence = next(iter(self._waiting.items()))
            slots = self._settings.max_num_seqs - len(self._running) - len(self._receiving)
            if slots <= 0 or sequence.blocks > self._producer.pool.free:
                return
            del self._waiting[stream_id]
            phase = sequence.work.phase
            is_decode = isinstance(phase, DecodePhase)
            cached = 0 if self._cache is None or is_decode else self._cache.hit(sequence.work)
            if isinstance(phase, PrefillPhase) and cached < phase.min_cached_tokens:
                text = f"{cached} tokens are cached, not {phase.min_cached_tokens}"
                self._producer.drop(phase.transfer_id, text)
                self._ended.append(ended_by(stream_id, TransferFailed(text)))
                continue
            self._producer.pool.free -= sequence.blocks
            sequence.admitted_at = self._now()
            if isinstance(phase, DecodePhase):
                self._receiving[stream_id] = sequence
                sequence.fetch = self._spawn(self._receive(sequence, phase), "fake-engine-fetch")
            else:
                sequence.cached_tokens = cached
                self._running[stream_id] = sequence

    def _step_work(self) -> StepWork:
        running = self._running.items()
        prompts = [
            (i, x.context - x.cached_tokens, x.cached_tokens) for i, x in running if x.kv is None
        ]
        return StepWork(prompts, [(i, x.context) for i, x in running if x.kv is not None])

    def _advance(self, sequence: Sequence) -> StreamDelta:
        work = sequence.work
        if sequence.kv is None and matches(self.faults.fail_prefill, work.request_id):
            delta = ended_by(work.stream_id, WorkerFailed("a scripted fault failed the prefill"))
        else:
            if sequence.kv is None and self._cache is not None:
                self._cache.keep(work)
            delta = sequence.advance(self._now())
        if delta.finish_reason is None:
            return delta
        del self._running[work.stream_id]
        if isinstance(work.phase, PrefillPhase):
            if delta.report is not None and work.phase.embeddings is not None:
                delta.report.wanted_images = delta.report.fetched_images = len(work.media)
            if delta.finish_reason is FinishReason.LENGTH:
                self._producer.hold(work.phase.transfer_id, sequence.handoff)
                return delta
            self._producer.drop(work.phase.transfer_id, "the answer ended at prefill")
        self._producer.pool.free += sequence.blocks
        if self._cache is not None and delta.error is None and not sequence.is_stale:
            self._cache.keep(work, sequence.generated[:-1])
            if work.next_turn_s is not None and isinstance(work.phase, _GENERATING):
                self._cache.retain(work, sequence.generated[:-1], self._now())
        return delta

    def _blocks_needed(self, work: Work) -> int:
        """Return the blocks that `work` holds at its end. Raises the error that refuses it."""
        has_kv = self._producer.kv is not None
        check_work(work, self._model, _UNSUPPORTED, has_kv=has_kv)
        generated = work.sampling.max_tokens
        if isinstance(work.phase, PrefillPhase):
            if self._producer.is_open(work.phase.transfer_id):
                raise InvalidRequest("this transfer exists already", field="transfer_id")
            generated = len(work.resume_token_ids)
        total = self._settings.total_blocks
        blocks = -(-(len(work.prompt_token_ids) + generated) // self._settings.block_size)
        if blocks > total:
            raise ContextLengthExceeded(
                f"the request needs {blocks} blocks; this worker has {total}", field="max_tokens"
            )
        return blocks

    # Transfers, as the consumer.

    async def _receive(self, sequence: Sequence, phase: DecodePhase) -> None:
        """Fetch KV and the first token; any error fails the transfer."""
        assert self._producer.kv is not None
        stream_id, began = sequence.work.stream_id, self._now()
        address = phase.producer_addresses[0]
        try:
            async with asyncio.timeout(self._producer.kv.receive_timeout_s):
                handoff = await fetch(address, phase)
                if matches(self._settings.far_producers, phase.producer_instance_id):
                    far_s = self._settings.far_transfer_s
                    await asyncio.sleep(far_s)
                    handoff = structs.replace(handoff, exposed_s=handoff.exposed_s + far_s)
        except (TransferFailed, OSError, TimeoutError, ValueError) as error:
            if not isinstance(error, TransferFailed):
                error = TransferFailed(f"the link to {address} broke before the KV had arrived")
            self._producer.pool.free += sequence.blocks
            self._ended.append(ended_by(stream_id, error))
        else:
            size = handoff.blocks * _BLOCK_BYTES
            took_s, exposed_s = self._now() - began, handoff.exposed_s
            report = TransferReport(took_s, exposed_s, size, handoff.blocks, "fake")
            producer, wrong = phase.producer_instance_id, self.faults.wrong_kv_from
            sequence.receive(handoff, report, is_wrong=matches(wrong, producer))
            self._running[stream_id] = sequence
            if self._cache is not None:
                self._cache.keep(sequence.work)
        del self._receiving[stream_id]
        sequence.fetch = None
        self._producer.pool.changed.set()
