"""An engine without a model: deterministic tokens, simulated step times, real transfers of "KV".

It keeps the promises of workers/engine.py and needs neither torch nor vllm. It steps on the event
loop, by the loop's clock. Sampling parameters that shape probabilities (temperature, penalties)
have no effect on its tokens; the seed has. Structured output is refused.

Every block is with exactly one of: the free ones, a sequence, a transfer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections import OrderedDict
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import structs

from kv_transfer.protocol.snapshot import KvState
from pdserve.config import SessionLeaseConfig
from pdserve.errors import (
    ConfigError,
    ContextLengthExceeded,
    InvalidRequest,
    PdserveError,
    TransferFailed,
    Unavailable,
    UnsupportedField,
    WorkerFailed,
)
from pdserve.model import prefix_hash
from pdserve.types import (
    EngineLimits,
    FinishReason,
    KvEndpoint,
    KvLedger,
    PhaseReport,
    StreamDelta,
    TransferReport,
    WorkerLoad,
)
from workers.cache_mirror import CacheMirror
from workers.engine import (
    NO_LORA,
    DecodePhase,
    EncodePhase,
    EngineInfo,
    PoolingPhase,
    PrefillPhase,
    StepResult,
    StepResults,
    check_render,
    check_work,
    ended_by,
)
from workers.fake import link, model
from workers.fake.link import FakeKv
from workers.fake.render import render
from workers.fake.settings import FakeSettings, matches
from workers.metering.accounting import BusyTime, StepWork
from workers.session_leases import SessionLeases

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterable

    from kv_transfer.settings import ConnectorConfig
    from pdserve.types import Adapter, ModelInfo, PositionLogprobs
    from pdserve.v1 import worker_pb2 as w
    from workers.engine import Work
    from workers.fake.lockstep import FakeLockstep
    from workers.fake.settings import FakeFaults

_MAX_REMEMBERED = 4096
_BLOCK_BYTES = 4096  # as transfers report it
logger = logging.getLogger(__name__)

# The started engines of this process by KV address: they fetch from one another without a socket.
_local: dict[str, FakeEngine] = {}


@dataclass(slots=True)
class Sequence:
    """One request. `kv` covers the prompt and all of `generated` but the last token; it is None
    until it was computed or received."""

    work: Work
    vocab_size: int
    blocks: int = 0
    submitted_at: float = 0.0
    admitted_at: float = 0.0
    first_at: float = 0.0
    cached_tokens: int = 0
    kv: bytes | None = None
    generated: list[int] = field(init=False)
    text: model.Text = field(init=False)
    fetch: asyncio.Task[None] | None = None
    transfer: TransferReport | None = None

    def __post_init__(self) -> None:
        self.generated = list(self.work.resume_token_ids)
        self.text = model.Text(self.work.sampling)
        self.text.resume(self.generated)

    @property
    def context(self) -> int:
        return len(self.work.prompt_token_ids) + len(self.generated)

    @property
    def handoff(self) -> FakeKv:
        """What another engine needs to continue after the last token."""
        assert self.kv is not None
        return FakeKv(self.kv, self.blocks, self.generated[-1])

    def receive(self, handoff: FakeKv, report: TransferReport) -> None:
        """Take KV and first token from a prefill, or the KV alone from an engine that decoded."""
        phase = self.work.phase
        if not (isinstance(phase, DecodePhase) and phase.live):
            self.generated.append(handoff.token)
            self.text.resume([handoff.token])
        self.kv, self.transfer = handoff.kv, report

    def advance(self, now: float) -> StreamDelta:
        """Generate one token."""
        sampling, stream_id = self.work.sampling, self.work.stream_id
        if len(self.generated) >= sampling.max_tokens:
            return self.end(StreamDelta(stream_id), FinishReason.LENGTH, now)
        if is_first := self.kv is None:
            kv = model.kv_of(self.work.prompt_token_ids, self.work.adapter, self.work.media)
            self.kv = model.extend(kv, self.generated)
        else:
            self.kv = model.extend(self.kv, self.generated[-1:])
        is_early = len(self.generated) < sampling.min_tokens
        forbidden = {model.EOS, *sampling.stop_token_ids} if is_early else ()
        token = model.next_token(self.kv, sampling.seed, self.vocab_size, forbidden)
        self.generated.append(token)
        self.first_at = self.first_at or now
        is_eos = token == model.EOS and not sampling.ignore_eos
        is_stop_token = token in sampling.stop_token_ids and not is_eos
        silent = is_stop_token and not sampling.include_stop_str_in_output
        stop_string = self.text.push(token, silent=silent)
        stop = token if is_stop_token else stop_string
        logprobs: tuple[PositionLogprobs, ...] = ()
        if sampling.logprobs is not None:
            logprobs = (model.logprobs_of(token, sampling.logprobs),)
        delta = StreamDelta(stream_id, (token,), logprobs=logprobs, stop_reason=stop)
        if is_first and (count := self.work.prompt_logprobs) is not None:
            delta.prompt_logprobs = model.prompt_logprobs_of(self.work.prompt_token_ids, count)
        if stop is not None or is_eos:
            return self.end(delta, FinishReason.STOP, now)
        is_full = len(self.generated) >= sampling.max_tokens
        if is_full or isinstance(self.work.phase, PrefillPhase | EncodePhase):
            return self.end(delta, FinishReason.LENGTH, now, goes_on=not is_full)
        return replace(delta, text=self.text.take(finished=False))

    def end(
        self, last: StreamDelta, reason: FinishReason, now: float, *, goes_on: bool = False
    ) -> StreamDelta:
        """Return the last delta. With `goes_on`, text that may become a stop string is kept."""
        first = self.first_at or now
        is_decode = isinstance(self.work.phase, DecodePhase)
        report = PhaseReport(
            queue_s=self.admitted_at - self.submitted_at,
            prefill_s=0.0 if is_decode else first - self.admitted_at,
            decode_s=now - first,
            cached_tokens=self.cached_tokens,
            transfer=self.transfer,
        )
        text = self.text.take(finished=not goes_on)
        return replace(last, text=text, finish_reason=reason, report=report)


class _Transfer:
    """Blocks for a consumer: `handoff` is what was computed, and `gone` why the transfer ended.
    Until the prefill is submitted, only the consumer is known."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.work: Work | None = None
        self.handoff: asyncio.Future[FakeKv] = loop.create_future()
        self.gone: asyncio.Future[str] = loop.create_future()
        self.lease: asyncio.TimerHandle | None = None
        self.is_in_flight = False

    @property
    def blocks(self) -> int:
        return self.handoff.result().blocks if self.handoff.done() else 0

    async def wait(self, seconds: float, *what: asyncio.Future[FakeKv]) -> None:
        """Wait for `what`, or for the time. Raises TransferFailed if the transfer ends first."""
        futures: set[asyncio.Future[Any]] = {self.gone, *what}
        await asyncio.wait(futures, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if self.gone.done():
            raise TransferFailed(self.gone.result())


class PrefixCache(CacheMirror):
    """A prefix cache of `max_blocks`, whose keys are the chain hashes. As vLLM's cache it evicts
    the least recently used blocks, and the last blocks of a prompt before its first; those under
    `leases` after all others. State: the others and the leased ones, the least recently used first.
    """

    def __init__(
        self, name: str, block_size: int, max_blocks: int, leases: SessionLeases | None = None
    ) -> None:
        super().__init__(name, block_size)
        self._max_blocks = max_blocks
        self._recent: OrderedDict[int, None] = OrderedDict()
        self._leased: OrderedDict[int, None] = OrderedDict()
        self.leases = leases or SessionLeases(0, 0.0)

    def hit(self, work: Work) -> int:
        """Return how many tokens of the prompt need not be computed."""
        count = prefix_hash.usable_blocks(len(work.prompt_token_ids), self._block_size)
        chain = self._chain(work, work.prompt_token_ids, count)
        return sum(x in self for x in chain) * self._block_size

    def keep(self, work: Work, generated: Iterable[int] = ()) -> None:
        """Cache the blocks of a prompt that was computed or received, and of tokens after it."""
        token_ids = (*work.prompt_token_ids, *generated)
        chain = self._chain(work, token_ids, self._max_blocks)
        cached, media = token_ids[: len(chain) * self._block_size], self._media_of(work)
        self.store(chain, None, cached, work.adapter, work.cache_salt, media)
        for chain_hash in chain:
            self._place(self.leases.touched(chain_hash))
        self._place(reversed(chain))
        while len(self._recent) + len(self._leased) > self._max_blocks:
            evicted, _ = (self._recent or self._leased).popitem(last=False)
            self.leases.taken(evicted)
            self.remove(evicted)

    def lease(self, work: Work, generated: Iterable[int], now: float) -> None:
        """Put the cached blocks of a session's turn that has ended under a lease."""
        token_ids = (*work.prompt_token_ids, *generated)
        blocks = [x for x in reversed(self._chain(work, token_ids, self._max_blocks)) if x in self]
        self._place(self.leases.grant(blocks, now, work.next_turn_s or 0.0))
        self._place(blocks)

    def expire(self, now: float) -> None:
        """End the leases whose time is over."""
        self._place(self.leases.expire(now))

    def _place(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._recent.pop(block, None)
            self._leased.pop(block, None)
            (self._leased if block in self.leases else self._recent)[block] = None

    def _chain(self, work: Work, token_ids: tuple[int, ...], count: int) -> list[int]:
        root, media = self.root(work.adapter, work.cache_salt), self._media_of(work)
        return prefix_hash.chain(token_ids, self._block_size, root, blocks=count, media=media)

    def _media_of(self, work: Work) -> dict[int, list[prefix_hash.MediaKey]]:
        items = [(x.hash, x.offset, x.length) for x in work.media]
        return prefix_hash.media_keys(items, self._block_size)


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
        session_lease: SessionLeaseConfig | None = None,
    ) -> None:
        """Without `kv`, KV cannot leave the engine; with it, peers know it by `instance_id`. The
        engine steps together with those that have the same `lockstep`."""
        lease = session_lease or SessionLeaseConfig()
        if info.vocab_size < model.MIN_VOCAB_SIZE:
            raise ConfigError(
                f"vocab_size must be at least {model.MIN_VOCAB_SIZE}", field="vocab_size"
            )
        self._settings = settings = settings or FakeSettings()
        images = {"image": settings.max_images} if settings.max_images else {}
        self._model = info = replace(info, modalities=images)
        self._kv = kv
        self._instance_id = instance_id
        self._lockstep = lockstep
        self._faults: FakeFaults = settings
        self._free = settings.total_blocks
        self._waiting: dict[int, Sequence] = {}
        self._receiving: dict[int, Sequence] = {}
        self._running: dict[int, Sequence] = {}
        self._ended: list[StreamDelta] = []
        self._transfers: dict[str, _Transfer] = {}
        self._gone: OrderedDict[str, str] = OrderedDict()  # why transfers ended
        self._cache: PrefixCache | None = None
        if settings.prefix_cache:
            total = settings.total_blocks
            leases = SessionLeases(int(lease.share * total), lease.max_s)
            self._cache = PrefixCache(info.name, settings.block_size, total, leases)
        self._steps = 0
        self._step_s = 0.0  # of the step under way
        self.busy = BusyTime()
        self.results = StepResults()
        self._is_over = False
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()  # the step loop and fetches
        self._server: asyncio.Server | None = None
        self._address = ""

    async def start(self) -> EngineInfo:
        """Take `start_s`. Raises OSError if the KV address cannot be listened on."""
        settings = self._settings
        await asyncio.sleep(settings.start_s)
        if settings.cannot_compute:
            raise WorkerFailed("the engine cannot compute: a scripted fault")
        endpoint = await self._listen(self._kv) if self._kv else None
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

    async def _listen(self, kv: ConnectorConfig) -> KvEndpoint:
        self._address = f"local:{self._instance_id}"
        if self._settings.listens:
            self._server = await asyncio.start_server(partial(link.serve, self.lend), kv.host, 0)
            self._address = f"{kv.host}:{self._server.sockets[0].getsockname()[1]}"
        _local[self._address] = self
        block_size = self._settings.block_size
        return KvEndpoint(
            addresses=(self._address,),
            compatibility=f"fake/{self._model.name}/{block_size}",
            layout={"engine": "fake", "block_size": str(block_size)},
            transports=("fake",),
            embedding_bytes=4,  # routers read it of encode workers alone
            copies=True,
        )

    def _spawn(self, action: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(action, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @property
    def faults(self) -> FakeFaults:
        return self._faults

    @faults.setter
    def faults(self, faults: FakeFaults) -> None:
        self._faults = faults
        self._wake.set()

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
                self._open_transfer(work.phase.transfer_id, work)
            sequence = Sequence(work, self._model.vocab_size, blocks, self._now())
            self._waiting[work.stream_id] = sequence
        self._wake.set()

    def cancel(self, stream_id: int) -> None:
        for transfer_id, transfer in list(self._transfers.items()):
            if transfer.work is not None and transfer.work.stream_id == stream_id:
                self._drop(transfer_id, "the prefill was cancelled")
        self._waiting.pop(stream_id, None)
        sequence = self._receiving.pop(stream_id, None) or self._running.pop(stream_id, None)
        if sequence is not None:
            self._free += sequence.blocks
            if sequence.fetch is not None:
                sequence.fetch.cancel()
        self._wake.set()

    def export(self, stream_id: int, transfer_id: str) -> None:
        sequence = self._running.get(stream_id)
        is_prefill = sequence is not None and isinstance(sequence.work.phase, PrefillPhase)
        if sequence is None or sequence.kv is None or is_prefill:
            if stream_id in self._stream_ids:
                self.cancel(stream_id)
                error = Unavailable("the KV of the stream is not complete here")
                self._ended.append(ended_by(stream_id, error))
            return
        del self._running[stream_id]
        last = StreamDelta(stream_id, exported_tokens=len(sequence.generated))
        self._ended.append(sequence.end(last, FinishReason.ABORT, self._now(), goes_on=True))
        self._open_transfer(transfer_id, sequence.work)
        self._lease(transfer_id, sequence.handoff)
        self._wake.set()

    def load(self) -> WorkerLoad:
        total = self._settings.total_blocks
        waits_for_room = bool(self._waiting) and not self.ledger().pinned_blocks
        load = WorkerLoad(
            num_waiting_reqs=len(self._waiting) + len(self._receiving),
            num_running_reqs=len(self._running),
            kv_cache_usage=(total - self._free) / total,
            free_blocks=self._free,
            progress=self._steps,
            has_work=bool(self._running) or waits_for_room,
            step_allowance_s=4 * self._step_s,
        )
        return load if self._cache is None else self._cache.leases.added_to(load)

    def ledger(self) -> KvLedger:
        if self._is_over:
            return KvLedger()
        held = [x for x in self._transfers.values() if x.handoff.done()]
        in_flight = sum(x.blocks for x in held if x.is_in_flight)
        return KvLedger(
            in_flight_blocks=in_flight + sum(x.blocks for x in self._receiving.values()),
            leased_blocks=sum(x.blocks for x in held if not x.is_in_flight),
            transfers=len(held) + len(self._receiving),
            engine_requests=len(self._stream_ids) + len(held),
        )

    def kv_state(self) -> KvState | None:
        return None if self._kv is None else KvState(self.ledger())

    async def load_adapter(self, adapter: Adapter) -> None:
        if not self._settings.max_loras:
            raise InvalidRequest(NO_LORA, field="lora_name")

    async def unload_adapter(self, key: str) -> None:
        """An adapter is only a seed of its tokens: nothing is loaded."""

    async def close(self) -> None:
        self._end(WorkerFailed("the engine was closed"))
        self._ended.clear()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.results.close()

    def crash(self) -> None:
        """The engine dies: its streams end with an error, its transfers fail."""
        if not self._is_over:
            self._end(WorkerFailed("the engine died"))
            self._report_ended()
            self.results.put(StepResult(failure=WorkerFailed("the fake engine died")))

    def _end(self, error: PdserveError) -> None:
        self._is_over = True
        _local.pop(self._address, None)
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        self._ended += [ended_by(x, error) for x in self._stream_ids]
        for table in (self._waiting, self._receiving, self._running):
            table.clear()
        for transfer_id in list(self._transfers):
            self._drop(transfer_id, error.message)

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
                self._wake.clear()
                if self._faults.stalls(self._steps + 1) or not await self._step():
                    await self._wake.wait()
        except Exception:
            logger.exception("the fake engine failed")
            self.crash()

    async def _step(self) -> bool:
        """Make one step. Return False if there is nothing to do until something happens."""
        if self._lockstep is not None:
            await self._lockstep.between_rounds()
        if self._cache is not None:
            self._cache.expire(self._now())
        self._admit()
        if not (self._running or self._ended):
            return False
        settings, work, planned = self._settings, self._step_work(), list(self._running)
        shape = work.shape
        self._step_s = settings.step_s + settings.prefill_s * shape.prefill_tokens
        self._step_s += settings.decode_s * shape.decode_reqs
        if (token := self._faults.kill_on_token) and any(
            token in x.work.prompt_token_ids for x in self._running.values()
        ):
            os.kill(os.getpid(), signal.SIGKILL)
        if planned:
            self.busy.begin(self._now())
        if self._lockstep is None:
            await asyncio.sleep(self._step_s)
        else:
            self._step_s = await self._lockstep.step(self._step_s)
        # The scripted time, not the measured one: what routers learn of a fake engine is exact.
        if planned:
            self.busy.step(work, self._step_s, self._now())
        self._step_s = 0.0
        self._steps += 1
        if self._steps == self._faults.crash_at_step:
            raise WorkerFailed("a scripted fault killed the engine")
        deltas, self._ended = self._ended, []
        deltas += [self._advance(self._running[x]) for x in planned if x in self._running]
        if settings.clock_text:
            stamp = f"{time.monotonic():.6f} "
            deltas = [replace(x, text=stamp) if x.token_ids else x for x in deltas]
        change = None if self._cache is None else self._cache.take()
        if deltas or change:
            self.results.put(StepResult(deltas, change))
        return True

    def _admit(self) -> None:
        """Start waiting requests in order while there are blocks and slots for them."""
        while self._waiting:
            stream_id, sequence = next(iter(self._waiting.items()))
            slots = self._settings.max_num_seqs - len(self._running) - len(self._receiving)
            if slots <= 0 or sequence.blocks > self._free:
                return
            del self._waiting[stream_id]
            if isinstance(phase := sequence.work.phase, PrefillPhase) and phase.min_cached_tokens:
                cached = 0 if self._cache is None else self._cache.hit(sequence.work)
                if cached < phase.min_cached_tokens:
                    text = f"{cached} tokens are cached, not {phase.min_cached_tokens}"
                    self._drop(phase.transfer_id, text)
                    self._ended.append(ended_by(stream_id, TransferFailed(text)))
                    continue
            self._free -= sequence.blocks
            sequence.admitted_at = self._now()
            if isinstance(sequence.work.phase, DecodePhase):
                self._receiving[stream_id] = sequence
                fetch = self._receive(sequence, sequence.work.phase)
                sequence.fetch = self._spawn(fetch, "fake-engine-fetch")
            else:
                if self._cache is not None:
                    sequence.cached_tokens = self._cache.hit(sequence.work)
                self._running[stream_id] = sequence

    def _step_work(self) -> StepWork:
        running = self._running.items()
        prompts = [
            (i, x.context - x.cached_tokens, x.cached_tokens) for i, x in running if x.kv is None
        ]
        return StepWork(prompts, [(i, x.context) for i, x in running if x.kv is not None])

    def _advance(self, sequence: Sequence) -> StreamDelta:
        work = sequence.work
        if sequence.kv is None and matches(self._faults.fail_prefill, work.request_id):
            delta = ended_by(work.stream_id, WorkerFailed("a scripted fault failed the prefill"))
        else:
            if sequence.kv is None and self._cache is not None:
                self._cache.keep(work)
            delta = sequence.advance(self._now())
            if isinstance(work.phase, EncodePhase):
                return self._encoded(delta, sequence)
            if isinstance(work.phase, PoolingPhase):
                delta = replace(
                    delta,
                    token_ids=(),
                    text="",
                    finish_reason=FinishReason.STOP,
                    embedding=model.embedding_of(work.prompt_token_ids),
                )
        if delta.finish_reason is None:
            return delta
        del self._running[work.stream_id]
        if isinstance(work.phase, PrefillPhase):
            if delta.report is not None and work.phase.embeddings is not None:
                delta.report.fetched_images = len(work.media)
            if delta.finish_reason is FinishReason.LENGTH:
                self._lease(work.phase.transfer_id, sequence.handoff)
                return delta
            self._drop(work.phase.transfer_id, "the answer ended at prefill")
        self._free += sequence.blocks
        if self._cache is not None and delta.error is None:
            self._cache.keep(work, sequence.generated[:-1])
            if work.next_turn_s is not None and not isinstance(work.phase, PrefillPhase):
                self._cache.lease(work, sequence.generated[:-1], self._now())
        return delta

    def _encoded(self, delta: StreamDelta, sequence: Sequence) -> StreamDelta:
        """End a stream that computes embeddings. They are made and fetched in name only."""
        del self._running[delta.stream_id]
        self._free += sequence.blocks
        report = delta.report or PhaseReport()
        encoded = PhaseReport(queue_s=report.queue_s, encode_s=report.prefill_s)
        return StreamDelta(delta.stream_id, finish_reason=FinishReason.STOP, report=encoded)

    def _blocks_needed(self, work: Work) -> int:
        """Return the blocks that `work` holds at its end. Raises the error that refuses it."""
        check_work(work, self._model, has_kv=self._kv is not None)
        sampling, generated = work.sampling, work.sampling.max_tokens
        if sampling.structured_output is not None:
            raise UnsupportedField(
                "structured_output is not supported by the fake engine", field="structured_output"
            )
        if isinstance(work.phase, PrefillPhase):
            transfer = self._transfers.get(work.phase.transfer_id)
            if transfer is not None and transfer.work is not None:
                raise InvalidRequest("this transfer exists already", field="transfer_id")
            generated = len(work.resume_token_ids)
        total = self._settings.total_blocks
        blocks = -(-(len(work.prompt_token_ids) + generated) // self._settings.block_size)
        if blocks > total:
            raise ContextLengthExceeded(
                f"the request needs {blocks} blocks; this worker has {total}", field="max_tokens"
            )
        return blocks

    # Transfers, as the producer.

    def _open_transfer(self, transfer_id: str, work: Work) -> None:
        if transfer_id not in self._gone:  # its consumer may have given up before
            self._transfers.setdefault(transfer_id, _Transfer()).work = work

    def _lease(self, transfer_id: str, handoff: FakeKv) -> None:
        """Hold computed blocks for the consumer until the lease ends."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or self._kv is None:
            self._free += handoff.blocks
            return
        transfer.handoff.set_result(handoff)
        loop, reason = asyncio.get_running_loop(), "its lease has ended"
        transfer.lease = loop.call_later(self._kv.lease_s, self._drop, transfer_id, reason)

    def _drop(self, transfer_id: str, reason: str) -> None:
        """End a transfer in any state, also one that is not open yet."""
        self._gone.setdefault(transfer_id, reason)
        if len(self._gone) > _MAX_REMEMBERED:
            self._gone.popitem(last=False)
        transfer = self._transfers.pop(transfer_id, None)
        if transfer is not None:
            self._free += transfer.blocks
            transfer.gone.set_result(f"transfer {transfer_id}: {reason}")
            if transfer.lease is not None:
                transfer.lease.cancel()
        self._wake.set()

    @asynccontextmanager
    async def lend(self, transfer_id: str, instance_id: str) -> AsyncIterator[FakeKv]:
        """Yield the KV of a transfer once it is computed and has "arrived"; release its blocks at
        the end, whatever the end is. Raises TransferFailed."""
        if self._kv is None or instance_id != self._instance_id:
            raise TransferFailed("the prefill worker was restarted")
        if transfer_id in self._gone:
            raise TransferFailed(f"transfer {transfer_id}: {self._gone[transfer_id]}")
        transfer = self._transfers.setdefault(transfer_id, _Transfer())
        if transfer.is_in_flight:
            raise TransferFailed(f"transfer {transfer_id} is in flight already")
        try:
            await transfer.wait(self._settings.pairing_s, transfer.handoff)
            if transfer.work is None or not transfer.handoff.done():
                raise TransferFailed(f"transfer {transfer_id}: it is not known")
            transfer.is_in_flight = True
            if transfer.lease is not None:
                transfer.lease.cancel()
            request_id, began = transfer.work.request_id, self._now()
            if matches(self._faults.drop_transfer, request_id):
                raise TransferFailed("a scripted fault dropped the transfer")
            await transfer.wait(self._settings.transfer_s + self._faults.delay_transfer_s)
            handoff = structs.replace(transfer.handoff.result(), exposed_s=self._now() - began)
            yield handoff
        finally:
            self._drop(transfer_id, "the consumer has it, or gave it up")

    # Transfers, as the consumer.

    async def _receive(self, sequence: Sequence, phase: DecodePhase) -> None:
        """Fetch KV and first token. Every other outcome is a failed transfer."""
        assert self._kv is not None
        stream_id, began, address = (
            sequence.work.stream_id,
            self._now(),
            phase.producer_addresses[0],
        )
        try:
            async with asyncio.timeout(self._kv.receive_timeout_s):
                handoff = await _fetch(address, phase)
                if matches(self._settings.far_producers, phase.producer_instance_id):
                    far_s = self._settings.far_transfer_s
                    await asyncio.sleep(far_s)
                    handoff = structs.replace(handoff, exposed_s=handoff.exposed_s + far_s)
        except (TransferFailed, OSError, TimeoutError, ValueError) as error:
            if not isinstance(error, TransferFailed):
                error = TransferFailed(f"the link to {address} broke before the KV had arrived")
            self._free += sequence.blocks
            self._ended.append(ended_by(stream_id, error))
        else:
            size = handoff.blocks * _BLOCK_BYTES
            took_s, exposed_s = self._now() - began, handoff.exposed_s
            report = TransferReport(took_s, exposed_s, size, handoff.blocks, "fake")
            sequence.receive(handoff, report)
            self._running[stream_id] = sequence
            if self._cache is not None:
                self._cache.keep(sequence.work)
        del self._receiving[stream_id]
        sequence.fetch = None
        self._wake.set()


async def _fetch(address: str, phase: DecodePhase) -> FakeKv:
    """Raises TransferFailed, OSError, ValueError."""
    transfer_id, instance_id = phase.transfer_id, phase.producer_instance_id
    if producer := _local.get(address):
        async with producer.lend(transfer_id, instance_id) as handoff:
            return handoff
    return await link.fetch(address, transfer_id, instance_id)
