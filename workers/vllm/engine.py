"""The Engine on vLLM: the event loop on one side, a thread that steps vLLM on the other.

Requests and cancels go to the thread by an inbox; each step sends one item to `results`. The thread
sleeps while the engine has nothing to do, and polls while only transfers are pending.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pdserve.errors import PdserveError, Unavailable, WorkerFailed
from pdserve.model.weight_deltas import read_weights
from pdserve.model.weights_files import check_same_shapes, read_checkpoint
from pdserve.types import KvLedger
from workers.engine import StepResult, StepResults, check_render, ended_by, ignore_progress
from workers.metering.worker_account import BusyTime
from workers.vllm.grammar.constrained_work import ConstrainedWork
from workers.vllm.grammar.guard import GrammarGuard
from workers.vllm.images.render_pool import RenderPool
from workers.vllm.start import progress
from workers.vllm.start.settings import apply_environment
from workers.vllm.step.inbox import StepInbox
from workers.vllm.step.kv_view import KvView
from workers.vllm.step.sleep import StepSleep

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from kv_transfer.protocol.snapshot import KvState
    from pdserve.model.weight_deltas import WeightFiles
    from pdserve.types import Adapter, WorkerLoad
    from pdserve.v1 import worker_pb2 as w
    from workers.engine import EngineInfo, Work
    from workers.vllm.core import VllmCore
    from workers.vllm.patches.staged_weights import StagedWeights
    from workers.vllm.start.settings import VllmSettings

T = TypeVar("T")
_log = logging.getLogger(__name__)
_POLL_S = 0.001
# How often holds are checked while only transfers are pending and progress wakes the thread.
_TRANSFER_TICK_S = 0.05
_CLOSE_TIMEOUT_S = 60.0
# Allows for reading an adapter from a slow disk.
_ADAPTER_TIMEOUT_S = 120.0
# Allows for reading hundreds of gigabytes.
_WEIGHTS_TIMEOUT_S = 1800.0


class VllmEngine:
    """State shared with the step thread: the inbox, and the view of the KV plane."""

    def __init__(
        self, settings: VllmSettings, on_progress: Callable[[str], None] = ignore_progress
    ) -> None:
        """`on_progress` is called with each phase of the start, on the thread that runs it."""
        self.busy = BusyTime()
        self.results = StepResults()
        self._settings, self._on_progress = settings, on_progress
        self._sleep = StepSleep()
        self._inbox = StepInbox(self._sleep)
        self._closing = False
        self._thread: threading.Thread | None = None
        self._core: VllmCore | None = None  # once loaded
        self._kv = KvView()
        self._constrained: ConstrainedWork | None = None  # once started
        self._renders: RenderPool | None = None  # once started, if the model takes images
        # One thread: a load that nobody waits for any more ends before the next one begins.
        self._loader = ThreadPoolExecutor(1, "weights")
        self._staged: StagedWeights | None = None
        self._loop: asyncio.AbstractEventLoop

    async def start(self) -> EngineInfo:
        """Load the model. Raises ConfigError for our settings, and vLLM's errors."""
        if self._thread is not None:
            raise RuntimeError("this engine was started already")
        self._loop = asyncio.get_running_loop()
        started: Future[EngineInfo] = Future()
        started.set_running_or_notify_cancel()
        run = threading.Thread(target=self._run, args=(started,), name="vllm-step", daemon=True)
        self._thread = run
        run.start()
        info = await asyncio.wrap_future(started)
        assert self._core is not None
        guard = GrammarGuard(self._core.pickled_config)
        self._constrained = ConstrainedWork(guard, self._inbox, self.results)
        if info.model.modalities:
            self._renders = RenderPool(self._core.pickled_config)
        return info

    async def render(self, request: w.RenderRequest) -> w.RenderResponse:
        assert self._core is not None, "start it first"
        check_render(request, self._core.info.model)
        assert self._renders is not None
        return await self._renders.render(request)

    def submit(self, work: Work) -> None:
        submitted, constraint = time.monotonic(), work.sampling.structured_output
        if constraint is not None:
            assert self._constrained is not None, "start it first"
            self._constrained.submit(work, constraint, submitted)
        elif error := self._inbox.add(work, submitted):
            self.results.put(StepResult([ended_by(work.stream_id, error)]))

    def cancel(self, stream_id: int) -> None:
        if self._constrained is not None:
            self._constrained.cancel(stream_id)
        self._inbox.put(lambda core: core.streams.cancel(stream_id))

    def export(self, stream_id: int, transfer_id: str) -> None:
        self._inbox.put(lambda core: core.streams.export(stream_id, transfer_id))

    async def load_adapter(self, adapter: Adapter) -> None:
        await self._do(lambda core: core.adapters.load(adapter))

    async def unload_adapter(self, key: str) -> None:
        await self._do(lambda core: core.adapters.unload(key))

    async def check_weights(self, files: WeightFiles) -> str:
        return await asyncio.to_thread(_digest_of_same, files, self._settings.model_path)

    async def stage_weights(self, files: WeightFiles) -> None:
        found: list[StagedWeights | None] = []
        try:
            await self._do(lambda core: found.append(core.stage_weights(files)))
            if (staged := found[0]) is not None:
                async with asyncio.timeout(_WEIGHTS_TIMEOUT_S):
                    await self._loop.run_in_executor(self._loader, staged.load)
                self._staged = staged
        except Exception as error:  # noqa: BLE001 - of any class, depending on the model
            _log.warning("the weights could not be loaded in advance: %s", error)

    def unstage_weights(self) -> None:
        self._staged = None

    async def freeze(self, stream_ids: Collection[int]) -> frozenset[int]:
        await self._do(lambda core: core.freeze())
        # Steps that are under way put their results before the answer that there are none.
        while (kept := await self._do(lambda core: core.kept(stream_ids))) is None:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        return kept

    def thaw(self) -> None:
        self._inbox.put(lambda core: core.thaw())

    async def update_weights(self, files: WeightFiles) -> dict[int, int]:
        staged, self._staged = self._staged, None
        if staged is not None and staged.files != files:
            staged = None
        return await self._do(lambda core: core.update_weights(files, staged), _WEIGHTS_TIMEOUT_S)

    async def _do(
        self, action: Callable[[VllmCore], T], timeout_s: float = _ADAPTER_TIMEOUT_S
    ) -> T:
        """Run `action` on the step thread, and wait for its result. Raises its error, TimeoutError,
        or Unavailable."""
        done: Future[T] = Future()

        def act(core: VllmCore) -> None:
            try:
                done.set_result(action(core))
            except Exception as error:  # noqa: BLE001 - raised to the caller
                done.set_exception(error)

        if self._inbox.put(act):
            raise Unavailable("the engine has stopped")
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(asyncio.wrap_future(done))

    def load(self) -> WorkerLoad | None:
        if self._core is None:
            return None
        return self._core.steps.add_to(self._core.load, has_more=bool(self._inbox))

    def ledger(self) -> KvLedger:
        return self._kv.ledger

    def kv_state(self) -> KvState | None:
        if self._core is None or self._core.info.kv is None:
            return None
        return self._kv.state(self._inbox)

    async def close(self) -> None:
        self._closing = True
        self._sleep.wake()
        self.unstage_weights()
        self._loader.shutdown(wait=False, cancel_futures=True)
        if self._constrained is not None:
            await self._constrained.close()
        if self._renders is not None:
            self._renders.close()
        if self._thread is not None:
            limit_s = _CLOSE_TIMEOUT_S + self._settings.leave_s
            await asyncio.to_thread(self._thread.join, limit_s)
            if self._thread.is_alive():
                _log.error("the engine did not end within %.0f s", limit_s)
        self._sleep.close()
        self.results.close()

    # Everything below runs on the step thread.

    def _run(self, started: Future[EngineInfo]) -> None:
        try:
            apply_environment(self._settings)
            # Importing vllm takes seconds; the event loop runs on meanwhile.
            from workers.vllm.core import VllmCore

            with progress.reported(self._on_progress):
                core = VllmCore(self._settings, self._sleep.wake, self.busy)
        except BaseException as error:  # noqa: BLE001 - raised by `start`
            self._stop(WorkerFailed("the engine did not start"), [])
            started.set_exception(error)
            return
        self._kv.look, self._core = core.kv_look(), core
        started.set_result(core.info)
        end: PdserveError = Unavailable("the worker is closing")
        failure: Exception | None = None
        try:
            self._serve(core)
        except Exception as error:  # noqa: BLE001 - top of the thread: it ends the engine
            _log.exception("the engine failed")
            end, failure = WorkerFailed("the engine failed"), error
            # vLLM's error only says that the step was cancelled.
            if reason := core.liveness.why_failed():
                failure = RuntimeError(reason)
        self._stop(end, core.streams.open_ids)
        if failure is not None:
            self._emit(StepResult(failure=failure))
        try:
            try:
                if failure is None:
                    core.leave_group(self._settings.leave_s)
            finally:  # a step for the group fails if another rank has ended too early
                core.close()
        except Exception:  # noqa: BLE001 - cleanup
            _log.exception("the engine did not close cleanly")
        self._kv.ledger = KvLedger()

    def _serve(self, core: VllmCore) -> None:
        for descriptor in core.wakeups:
            self._sleep.watch(descriptor)
        while not self._closing:
            if died := core.liveness.died:
                raise RuntimeError(died)
            if ended := self._inbox.take(core):
                self._kv.ledger = core.ledger()  # exported blocks are held
                self._emit(StepResult(ended))
            if not core.has_work():
                self._kv.ledger = core.ledger()
                self._sleep.wait(None)
                continue
            deltas = core.step()
            # Set before the deltas: a reader who has seen them sees this too.
            self._kv.ledger = core.ledger()
            self._emit(StepResult(deltas, core.cache_change()))
            if core.is_idle:
                self._sleep.wait(_TRANSFER_TICK_S if core.is_woken() else _POLL_S)

    def _stop(self, end: PdserveError, open_streams: Sequence[int]) -> None:
        """End all streams with `end`, also those submitted later."""
        waiting = self._inbox.stop(end)
        self._emit(
            StepResult([ended_by(stream_id, end) for stream_id in [*open_streams, *waiting]])
        )

    def _emit(self, result: StepResult) -> None:
        if not (result.deltas or result.cache or result.failure):
            return
        try:
            self._loop.call_soon_threadsafe(self.results.put, result)
        except RuntimeError:  # the loop is closed
            _log.debug("the event loop ended before the engine")


def _digest_of_same(files: WeightFiles, served: str) -> str:
    """Return the digest of a checkpoint. Raises InvalidRequest unless it has the tensors of the one
    in `served`."""
    new = read_weights(files, field="weights.path")
    check_same_shapes(new, read_checkpoint(Path(served), field="model"), field="weights.path")
    return new.digest
