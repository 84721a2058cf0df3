"""An engine without a model: deterministic tokens, scripted latencies and faults, real handoffs.

It keeps every promise of workers/engine.py and needs neither torch nor vllm. Sampling parameters
that shape probabilities (temperature, penalties, ...) do not change its choices; the seed does.
Structured output is refused. KV travels between processes over workers/fake_link.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from kv_transfer.snapshot import KvSnapshot, KvState
from pdserve.errors import ConfigError, TransferFailed, WorkerFailed
from pdserve.step_moments import StepRecorder
from pdserve.types import KvEndpoint, KvLedger, TransferReport
from workers.engine import DecodePhase, EngineInfo, ignore_cache
from workers.fake_core import FakeCore, ended_by
from workers.fake_link import LinkClient, LinkServer
from workers.fake_settings import FakeFaults, FakeSettings
from workers.fake_text import stamped
from workers.fake_tokens import MIN_VOCAB_SIZE
from workers.progress import ProgressBoard

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pdserve.step_moments import StepMoments
    from pdserve.types import ModelInfo, WorkerLoad
    from workers.engine import CacheCallback, FailureCallback, StepCallback, Work
    from workers.fake_sequence import Handoff

_KILLED = "a scripted fault killed the engine"
logger = logging.getLogger(__name__)


class FakeEngine:
    """State beside the core's: the step task, one task a fetch, one timer a lease."""

    def __init__(
        self,
        model: ModelInfo,
        settings: FakeSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        if model.vocab_size < MIN_VOCAB_SIZE:
            raise ConfigError(f"vocab_size must be at least {MIN_VOCAB_SIZE}", field="vocab_size")
        self._model = model
        self._settings = settings or FakeSettings()
        self._clock = clock
        self._sleep = sleep
        kv = self._settings.kv
        self._core = FakeCore(model, self._settings.shape, has_kv=kv is not None)
        self._core.faults = self._settings.faults
        self._link = None if kv is None else LinkServer(self, kv)
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self._stepper: asyncio.Task[None] | None = None
        self._fetches: dict[int, asyncio.Task[None]] = {}
        self._leases: dict[str, asyncio.TimerHandle] = {}
        self._steps = 0
        self._progress = ProgressBoard()
        self._recorder = StepRecorder()
        self._ended = False
        self._on_cache: CacheCallback = ignore_cache
        self._on_step: StepCallback
        self._on_failure: FailureCallback

    def on_cache(self, callback: CacheCallback) -> None:
        self._on_cache = callback

    async def start(self, on_step: StepCallback, on_failure: FailureCallback) -> EngineInfo:
        """Takes `start_s`. Raises OSError when the KV address cannot be listened on."""
        self._on_step, self._on_failure = on_step, on_failure
        await self._sleep(self._settings.timing.start_s)
        shape = self._settings.shape
        endpoint = None
        if self._link is not None:
            endpoint = KvEndpoint(
                addresses=(await self._link.start(),),
                compatibility=f"fake/{self._model.name}/{shape.block_size}",
                layout={"engine": "fake", "block_size": str(shape.block_size)},
                transports=("fake",),
            )
        self._stepper = asyncio.create_task(self._run(), name="fake-engine-steps")
        return EngineInfo(
            name="fake",
            model=self._model,
            block_size=shape.block_size,
            total_blocks=shape.total_blocks,
            max_num_seqs=shape.max_num_seqs,
            kv=endpoint,
            settings={name: f"{x:g}" for name, x in asdict(self._settings.timing).items()},
        )

    def submit(self, work: Work) -> None:
        if self._ended:
            delta = ended_by(work.stream_id, WorkerFailed("the engine has ended"))
            asyncio.get_running_loop().call_soon(self._on_step, [delta])
            return
        self._core.submit(work, self._clock())
        self._wake.set()

    def cancel(self, stream_id: int) -> None:
        fetch = self._fetches.get(stream_id)
        if fetch is not None:
            fetch.cancel()
        self._core.cancel(stream_id)
        self._pulse()

    def export(self, stream_id: int, transfer_id: str) -> None:
        self._core.export(stream_id, transfer_id, self._clock())
        self._start_leases()
        self._pulse()

    def load(self) -> WorkerLoad | None:
        if self._stepper is None:
            return None
        return self._progress.stamp(self._core.load, has_more=self._core.has_runnable)

    def step_moments(self) -> StepMoments | None:
        return None if self._stepper is None else self._recorder.moments(self._clock())

    def ledger(self) -> KvLedger:
        return KvLedger() if self._ended else self._core.ledger

    def kv_state(self) -> KvState | None:
        if self._settings.kv is None:
            return None
        snapshot = KvSnapshot(self._clock(), () if self._ended else self._core.transfers.views())
        return KvState(self.ledger(), (snapshot,))

    async def close(self) -> None:
        self._ended = True
        self._core.end_all(WorkerFailed("the engine was closed"))
        for lease in self._leases.values():
            lease.cancel()
        tasks = list(self._fetches.values())
        if self._stepper is not None:
            tasks.append(self._stepper)
        for task in tasks:
            task.cancel()
        if self._link is not None:
            await self._link.close()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def faults(self) -> FakeFaults:
        return self._core.faults

    @faults.setter
    def faults(self, faults: FakeFaults) -> None:
        """Takes effect at the next step or transfer."""
        self._core.faults = faults
        self._wake.set()

    def crash(self, error: BaseException | None = None) -> None:
        """The engine dies: no delta, no transfer and no answer any more, only `on_failure`."""
        if self._ended or self._stepper is None:
            return
        self._stepper.cancel()
        self._fail(error or WorkerFailed(_KILLED))

    # The prefill side of transfers, as workers/fake_link.py asks for it.

    async def fetch(self, transfer_id: str) -> Handoff:
        assert self._settings.kv is not None
        try:
            async with asyncio.timeout(self._settings.kv.pairing_s):
                while (handoff := self._core.transfers.begin(transfer_id)) is None:
                    await self._changed.wait()
        except TimeoutError:
            self.release(transfer_id, "it was asked for too early")
            raise TransferFailed(f"transfer {transfer_id} is not known") from None
        return handoff

    async def travel(self, transfer_id: str) -> float:
        started_at = self._clock()
        request_id = self._core.transfers.request_id(transfer_id)
        if self._core.faults.drops_transfer(request_id):
            raise TransferFailed("a scripted fault dropped the transfer")
        await self._sleep(self._settings.timing.transfer_s + self._core.faults.delay_transfer_s)
        if not self._core.transfers.is_open(transfer_id):
            raise TransferFailed("the prefill was cancelled")
        return self._clock() - started_at

    def release(self, transfer_id: str, reason: str) -> None:
        lease = self._leases.pop(transfer_id, None)
        if lease is not None:
            lease.cancel()
        self._core.release(transfer_id, reason)
        self._pulse()

    def _expire(self, transfer_id: str) -> None:
        self._leases.pop(transfer_id, None)
        self._core.expire(transfer_id)
        self._pulse()

    def _pulse(self) -> None:
        """Wakes the step task, and whoever waits for a transfer to change."""
        self._wake.set()
        self._changed.set()
        self._changed = asyncio.Event()

    async def _run(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while not self._core.faults.stalls(self._steps + 1) and await self._step():
                    pass
        except Exception as error:
            logger.exception("the fake engine failed")
            self._fail(error)

    async def _step(self) -> bool:
        """Plans and makes one step; False where there is nothing to do until something happens."""
        plan = self._core.plan(self._clock())
        for work in plan.fetches:
            assert isinstance(work.phase, DecodePhase)
            task = asyncio.create_task(self._receive(work, work.phase), name="fake-engine-fetch")
            self._fetches[work.stream_id] = task
        if not plan.has_step:
            return False
        took_s = self._settings.timing.of_step(plan.shape.prefill_tokens)
        self._progress.begin(self._clock(), has_work=True)
        self._progress.sized(plan.shape.prefill_tokens + plan.shape.decode_reqs)
        await self._sleep(took_s)
        self._progress.end(self._clock(), computed=True, has_work=False)
        # As it was told, not as this process came to it: what is learnt of a fake is exact.
        self._recorder.observe(plan.shape, took_s, self._clock())
        self._steps += 1
        if self._steps == self._core.faults.crash_at_step:
            raise WorkerFailed(_KILLED)
        deltas = self._core.step(self._clock())
        if self._settings.shape.clock_text:
            # What it took here to make up tokens is no part of how old they are.
            deltas = stamped(deltas, self._clock())
        self._start_leases()
        self._tell_cache()
        if deltas:
            self._on_step(deltas)
        return True

    def _tell_cache(self) -> None:
        if change := self._core.cache_change():
            self._on_cache(change)

    def _start_leases(self) -> None:
        kv, leased = self._settings.kv, self._core.transfers.take_leased()
        if kv is None or not leased:
            return
        loop = asyncio.get_running_loop()
        for transfer_id in leased:
            self._leases[transfer_id] = loop.call_later(kv.lease_s, self._expire, transfer_id)
        self._pulse()

    def _fail(self, error: BaseException) -> None:
        if self._ended:
            return
        self._ended = True
        for task in self._fetches.values():
            task.cancel()
        for lease in self._leases.values():
            lease.cancel()
        if self._link is not None:
            self._link.stop()
        deltas = self._core.end_all(WorkerFailed("the engine died"))
        if deltas:
            self._on_step(deltas)
        self._on_failure(error)

    async def _receive(self, work: Work, phase: DecodePhase) -> None:
        """Fetches KV and first token; every other end than `receive` is a failed transfer."""
        assert self._settings.kv is not None
        granted_at = self._clock()
        address = phase.producer_addresses[0]  # one rank is all that is played here
        try:
            async with asyncio.timeout(self._settings.kv.receive_timeout_s):
                link = await LinkClient.connect(address)
                try:
                    handoff, exposed_s = await link.fetch(
                        phase.transfer_id, phase.producer_instance_id
                    )
                    await link.acknowledge()
                finally:
                    await link.close()
        except TransferFailed as error:
            self._core.fail_transfer(work.stream_id, error.message)
        except (OSError, TimeoutError, ValueError, KeyError):
            reason = f"the link to {address} broke before the KV had arrived"
            self._core.fail_transfer(work.stream_id, reason)
        else:
            took = self._clock() - granted_at
            size = handoff.blocks * self._settings.shape.block_bytes
            report = TransferReport(took, exposed_s, size, handoff.blocks, "fake")
            self._core.receive(work.stream_id, handoff, report)
            self._tell_cache()
        finally:
            self._fetches.pop(work.stream_id, None)
            self._wake.set()
