"""The Engine on vLLM: the event loop on one side, a thread that steps vLLM on the other.

Requests and cancels go to the thread by an inbox; deltas come back in one call of `on_step` a step.
The thread sleeps while the engine has nothing to do, and polls while only transfers are pending.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING

from kv_transfer.snapshot import KvState
from pdserve.errors import Unavailable, WorkerFailed
from pdserve.types import KvLedger
from workers.accounting import BusyTime
from workers.engine import ended_by, ignore_cache, ignore_progress
from workers.vllm import progress
from workers.vllm.settings import apply_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kv_transfer.snapshot import KvSnapshot
    from pdserve.errors import PdserveError
    from pdserve.types import Adapter, StreamDelta, WorkerLoad
    from workers.engine import CacheCallback, EngineInfo, FailureCallback, StepCallback, Work
    from workers.vllm.core import KvLook, VllmCore
    from workers.vllm.settings import VllmSettings

    # Run by the step thread; returns last deltas of streams that it ended.
    _Action = Callable[[VllmCore], Sequence[StreamDelta] | None]

_log = logging.getLogger(__name__)
_POLL_S = 0.001
# How often leases are checked while only transfers are pending and progress wakes the thread.
_TRANSFER_TICK_S = 0.05
_CLOSE_TIMEOUT_S = 60.0
# For an adapter to be read from a slow disk.
_ADAPTER_TIMEOUT_S = 120.0


class VllmEngine:
    """State shared with the step thread, under `_lock`: the inbox, and `_end`, the error that ends
    requests once the thread has stopped."""

    def __init__(
        self, settings: VllmSettings, on_progress: Callable[[str], None] = ignore_progress
    ) -> None:
        """`on_progress` is called with what the start does, on the threads that do it."""
        self.busy = BusyTime()
        self._settings, self._on_progress = settings, on_progress
        self._lock = threading.Lock()
        self._inbox: deque[tuple[_Action, int | None]] = deque()  # with the id of a new stream
        self._end: PdserveError | None = None
        self._wake = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._core: VllmCore | None = None  # once loaded
        self._ledger = KvLedger()
        self._kv_look: KvLook | None = None
        self._kv_ranks: tuple[KvSnapshot, ...] = ()
        self._is_looking = False
        self._on_cache: CacheCallback = ignore_cache
        self._loop: asyncio.AbstractEventLoop
        self._on_step: StepCallback
        self._on_failure: FailureCallback

    def on_cache(self, callback: CacheCallback) -> None:
        self._on_cache = callback

    async def start(self, on_step: StepCallback, on_failure: FailureCallback) -> EngineInfo:
        """Load the model. Raises ConfigError for our settings, and vLLM's errors."""
        if self._thread is not None:
            raise RuntimeError("this engine was started already")
        self._loop = asyncio.get_running_loop()
        self._on_step, self._on_failure = on_step, on_failure
        started: Future[EngineInfo] = Future()
        started.set_running_or_notify_cancel()
        run = threading.Thread(target=self._run, args=(started,), name="vllm-step", daemon=True)
        self._thread = run
        run.start()
        return await asyncio.wrap_future(started)

    def submit(self, work: Work) -> None:
        submitted = time.monotonic()
        if not self._put(lambda core: core.add(work, submitted), work.stream_id):
            assert self._end is not None
            self._loop.call_soon(self._on_step, [ended_by(work.stream_id, self._end)])

    def cancel(self, stream_id: int) -> None:
        self._put(lambda core: core.cancel(stream_id))

    def export(self, stream_id: int, transfer_id: str) -> None:
        self._put(lambda core: core.export(stream_id, transfer_id))

    async def load_adapter(self, adapter: Adapter) -> None:
        await self._do(lambda core: core.load_adapter(adapter))

    async def unload_adapter(self, key: str) -> None:
        await self._do(lambda core: core.unload_adapter(key))

    async def _do(self, action: Callable[[VllmCore], None]) -> None:
        """Have the step thread do `action`, and wait for it. Raises its error, TimeoutError, or
        Unavailable."""
        done: Future[None] = Future()

        def act(core: VllmCore) -> None:
            try:
                action(core)
                done.set_result(None)
            except Exception as error:  # noqa: BLE001 - raised to the caller
                done.set_exception(error)

        if not self._put(act):
            raise Unavailable("the engine has stopped")
        async with asyncio.timeout(_ADAPTER_TIMEOUT_S):
            await asyncio.shield(asyncio.wrap_future(done))

    def _put(self, action: _Action, new_stream_id: int | None = None) -> bool:
        """Have the step thread do `action`. Return False if the thread has stopped."""
        with self._lock:
            if self._end is not None:
                return False
            self._inbox.append((action, new_stream_id))
        self._wake.set()
        return True

    def load(self) -> WorkerLoad | None:
        if self._core is None:
            return None
        return self._core.steps.add_to(self._core.load, has_more=bool(self._inbox))

    def ledger(self) -> KvLedger:
        return self._ledger

    def kv_state(self) -> KvState | None:
        if self._core is None or self._core.info.kv is None:
            return None
        if self._kv_look is not None:
            return KvState(self._ledger, (self._kv_look(),))
        # Only the step thread may ask other processes: return the last answer, ask for a new one.
        if not self._is_looking:
            self._is_looking = self._put(self._look_at_ranks)
        return KvState(self._ledger, self._kv_ranks)

    async def close(self) -> None:
        self._closing = True
        self._wake.set()
        if self._thread is None:
            return
        await asyncio.to_thread(self._thread.join, _CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            _log.error("the engine did not end within %.0f s", _CLOSE_TIMEOUT_S)

    # Everything below runs on the step thread.

    def _run(self, started: Future[EngineInfo]) -> None:
        try:
            apply_environment(self._settings)
            # Importing vllm takes seconds; the event loop runs on meanwhile.
            from workers.vllm.core import VllmCore

            with progress.reported(self._on_progress):
                core = VllmCore(self._settings, self._wake.set, self.busy)
        except BaseException as error:  # noqa: BLE001 - raised by `start`
            self._stop(WorkerFailed("the engine did not start"), [])
            started.set_exception(error)
            return
        self._kv_look, self._core = core.kv_look(), core
        started.set_result(core.info)
        end: PdserveError = Unavailable("the worker is closing")
        failure: Exception | None = None
        try:
            self._serve(core)
        except Exception as error:  # noqa: BLE001 - top of the thread: it ends the engine
            _log.exception("the engine failed")
            end, failure = WorkerFailed("the engine failed"), error
            if core.executor_died:  # vLLM's error only says that the step was cancelled
                failure = RuntimeError(core.executor_died)
        self._stop(end, core.open_streams)
        if failure is not None:
            self._call(self._on_failure, failure)
        try:
            core.close()
        except Exception:  # noqa: BLE001 - cleanup
            _log.exception("the engine did not close cleanly")
        self._ledger = KvLedger()

    def _serve(self, core: VllmCore) -> None:
        while not self._closing:
            if core.executor_died:
                raise RuntimeError(core.executor_died)
            if ended := self._take_inbox(core):
                self._ledger = core.ledger()  # exported blocks are held
                self._emit(ended)
            if not core.has_work():
                self._ledger = core.ledger()
                self._pause(None)
                continue
            deltas = core.step()
            # Set before the deltas: a reader who has seen them sees this too.
            self._ledger = core.ledger()
            if change := core.cache_change():
                self._call(self._on_cache, change)
            self._emit(deltas)
            if core.is_idle:
                self._pause(_TRANSFER_TICK_S if core.is_woken() else _POLL_S)

    def _pause(self, timeout_s: float | None) -> None:
        self._wake.wait(timeout_s)
        self._wake.clear()  # before the inbox is read, so that no item is missed

    def _take_inbox(self, core: VllmCore) -> list[StreamDelta]:
        with self._lock:
            items = list(self._inbox)
            self._inbox.clear()
        return [delta for action, _ in items for delta in action(core) or ()]

    def _look_at_ranks(self, core: VllmCore) -> None:
        self._kv_ranks, self._is_looking = core.kv_ranks(), False

    def _stop(self, end: PdserveError, open_streams: Sequence[int]) -> None:
        """End all streams with `end`, also those submitted later."""
        with self._lock:
            self._end = end
            waiting = [stream_id for _, stream_id in self._inbox if stream_id is not None]
            self._inbox.clear()
        self._emit([ended_by(stream_id, end) for stream_id in [*open_streams, *waiting]])

    def _emit(self, deltas: Sequence[StreamDelta]) -> None:
        if deltas:
            self._call(self._on_step, deltas)

    def _call(self, function: object, *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)  # type: ignore[arg-type]
        except RuntimeError:  # the loop is closed
            _log.debug("the event loop ended before the engine")
