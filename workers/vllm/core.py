"""vLLM's engine, as the step thread uses it. Other threads may call only what is documented for
them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from kv_transfer.vllm.connector import snapshot_in, tier_token_s
from pdserve.types import KvLedger, StreamDelta, WorkerLoad
from workers.engine import PoolingPhase
from workers.vllm.adapters import EngineAdapters
from workers.vllm.cache import events, retention
from workers.vllm.open import OpenedEngine, describe, open_engine
from workers.vllm.patches.experts import expert_tokens
from workers.vllm.patches.reload import reload_in
from workers.vllm.patches.staged_weights import StagedWeights, stage_in
from workers.vllm.ranks.liveness import Liveness
from workers.vllm.start.self_test import check_computes, measure_steps
from workers.vllm.step.freeze import forget_prefixes, pause, unpause
from workers.vllm.step.pooling import pooling_params
from workers.vllm.step.watch import IdleSteps, Starvation, StepWatch
from workers.vllm.streams import EngineStreams

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from vllm.pooling_params import PoolingParams

    from kv_transfer.protocol.snapshot import KvSnapshot
    from kv_transfer.vllm.step import Arrival
    from pdserve.model.weight_deltas import WeightFiles
    from pdserve.observe.step_costs import StepRecorder
    from workers.engine import CacheChange, EngineInfo
    from workers.metering.worker_account import BusyTime
    from workers.vllm.ranks.rank_links import RankLinks
    from workers.vllm.start.settings import VllmSettings

KvLook = Callable[[], "KvSnapshot"]

# A rank answers between steps, so this exceeds the longest step.
_RANKS_ANSWER_S = 60.0


class VllmCore:
    """The engine's steps, and what they say of it. `streams`, `adapters` and `liveness` are the
    parts that `VllmEngine` also calls.

    `steps` and `load`, the load after the last step, may be read by any thread.
    """

    def __init__(self, settings: VllmSettings, wake: Callable[[], None], busy: BusyTime) -> None:
        """Load the model. `wake` is called, on any thread, when the engine has died; steps are
        counted in `busy`. Raises ConfigError, or what vLLM raises."""
        with ExitStack() as stack:
            directory = TemporaryDirectory(prefix="pdserve-tokenizer-")
            made = Path(stack.enter_context(directory))
            opened = self._opened = open_engine(settings, wake, stack)
            self.info = describe(opened, settings, made)
            host = settings.host if settings.nodes.count > 1 else "127.0.0.1"
            self.liveness = Liveness(opened.executor, opened.group, host, wake)
            stack.callback(self.liveness.close)
            _self_test(opened, self.info, busy.recorder)
            # From here on steps count as work, and the prefix cache is reported.
            config, scheduler = opened.engine.vllm_config, opened.view.scheduler
            ranks = getattr(opened.executor, "workers", ())  # on this node
            self.steps = StepWatch(
                scheduler,
                busy,
                opened.runner_half if current_platform.is_cpu() else None,
                starvation=Starvation(handle.proc.pid for handle in ranks),
            )
            self._cache_events = events.watch(scheduler, config, settings.model_names[0])
            self._retention = retention.watch(scheduler, settings.retention)
            self.adapters = EngineAdapters(opened, self.steps)
            self.streams = EngineStreams(opened, self.info, self.adapters, self._retention, busy)
            self.load, self.is_idle = self._read_load(), False
            self._idle = IdleSteps(in_flight=opened.core.batch_queue_size)
            self._busy = busy
            self.liveness.watch_executor()
            self._closing = stack.pop_all()

    def has_work(self) -> bool:
        """Return whether a step can change something, such as blocks that ended requests hold."""
        opened = self._opened
        is_called = opened.group is not None and opened.group.is_called
        return bool(is_called or opened.view.scheduler.has_requests() or opened.core.batch_queue)

    def step(self) -> list[StreamDelta]:
        """Make one step; return the deltas of all requests in it."""
        opened, scheduler = self._opened, self._opened.view.scheduler
        self.steps.begin(has_work=opened.view.has_runnable())
        if self._retention is not None:
            self._retention.expire()
        deltas = self.streams.take_arrivals(self._received())
        outputs = opened.engine.step()
        deltas += [self.streams.delta(output) for output in outputs]
        deltas += self.streams.end_uncomputable()
        self.load, self._busy.expert_tokens = self._read_load(), expert_tokens()
        # With nothing running, a step only processes transfers.
        computed = bool(outputs or (scheduler.running and not scheduler.pause_state))
        can_start = bool(scheduler.finished_recving_kv_req_ids)
        in_wave = opened.group is not None and opened.group.wave.is_running
        self.is_idle = self._idle.after_step(computed=computed or can_start or in_wave)
        self.steps.end(computed=computed, has_work=opened.view.has_runnable())
        return deltas

    def _received(self) -> Sequence[Arrival]:
        """Return the loads of KV that have succeeded since the last call, each once per rank."""
        if self._opened.view.connector is None:
            return ()
        source: RankLinks | Any = self.liveness.ranks or self._opened.runner_half
        received: Sequence[Arrival] = source.take_received()
        return received

    def stage_weights(self, files: WeightFiles) -> StagedWeights | None:
        """Return what loads weights beside those in use, on any thread; None if that cannot be."""
        opened = self._opened
        if opened.engine.vllm_config.parallel_config.world_size > 1:
            return None
        self.steps.pause()
        staged: StagedWeights | None = opened.executor.collective_rpc(stage_in, args=(files,))[0]
        return staged

    def freeze(self) -> None:
        """Start no step until `thaw`, but for the ends of requests and transfers."""
        if self._can_freeze:
            pause(self._opened.view.scheduler)
            self.steps.freeze()

    def kept(self, stream_ids: Collection[int]) -> frozenset[int] | None:
        """Return those of these streams that a frozen engine keeps; None while steps are under
        way."""
        if not self._can_freeze:
            return frozenset()
        return None if self._opened.core.batch_queue else self.streams.decoding(stream_ids)

    @property
    def _can_freeze(self) -> bool:
        """False for a rank of a data-parallel group, without which the others cannot compute; for
        pipeline stages, which have several steps under way; and with speculation, because drafts
        have states of their own."""
        config = self._opened.engine.vllm_config
        is_plain = config.speculative_config is None
        stages = config.parallel_config.pipeline_parallel_size
        return is_plain and self._opened.group is None and stages == 1

    def thaw(self) -> None:
        """Start steps again. Idempotent."""
        unpause(self._opened.view.scheduler)
        self.steps.thaw()

    def update_weights(self, files: WeightFiles, staged: StagedWeights | None) -> dict[int, int]:
        """Load weights, or take those that are `staged`, and forget all cached KV. The engine has
        only streams that it keeps: return the number of positions of each whose KV is computed.
        Raises RuntimeError, and any error if it cannot take the weights."""
        opened = self._opened
        self.steps.pause()
        if staged is not None:
            staged.exchange()
        elif failed := [x for x in opened.executor.collective_rpc(reload_in, args=(files,)) if x]:
            raise RuntimeError(failed[0])
        computed, scheduler = self.streams.grow_stale(), opened.view.scheduler
        if scheduler.pause_state:
            forget_prefixes(scheduler)
        elif not opened.engine.reset_prefix_cache():
            raise RuntimeError("blocks of the prefix cache are in use")
        # Also the scheduler's list of the images that are encoded, and the turns of sessions.
        opened.engine.reset_encoder_cache()
        if self._retention is not None:
            self._retention.forget()
        return computed

    def cache_change(self) -> CacheChange | None:
        """Return what changed in the prefix cache since the last call, or None."""
        return None if self._cache_events is None else self._cache_events.take()

    def ledger(self) -> KvLedger:
        view = self._opened.view
        return replace(view.ledger(), engine_requests=len(view.scheduler.requests))

    def _read_load(self) -> WorkerLoad:
        scheduler, totals = self._opened.view.scheduler, self._opened.totals
        running, waiting = scheduler.get_request_counts()
        usage = scheduler.get_kv_cache_usage()
        load = WorkerLoad(
            waiting,
            running,
            usage,
            round((1.0 - usage) * self.info.total_blocks),
            tier_token_s=tier_token_s(scheduler.get_kv_connector()),
            preemptions=totals.preemptions,
            draft_tokens=totals.draft_tokens,
            accepted_draft_tokens=totals.accepted_draft_tokens,
        )
        return load if self._retention is None else self._retention.table.added_to(load)

    @property
    def pickled_config(self) -> bytes:
        """vLLM's configuration, as vLLM gives it to processes."""
        return self._opened.pickled_config

    @property
    def compiled_code(self) -> str:
        """The folder of the model's compiled code, "" if it runs eagerly."""
        folder: str = self._opened.engine.vllm_config.compilation_config.local_cache_dir or ""
        return folder

    @property
    def wakeups(self) -> tuple[int, ...]:
        """Descriptors, readable while the end of a transfer awaits a step; () if the connector
        has none."""
        half = self._opened.runner_half
        is_here = half is not None and half.wakeup is not None
        return self.liveness.wakeups or ((half.wakeup,) if is_here else ())

    def is_woken(self) -> bool:
        """Return True if every request waits for a transfer; `wakeups` then signal its end."""
        view = self._opened.view
        if not self.wakeups or view.connector is None:
            return False
        return view.ledger().transfers == len(view.scheduler.requests)

    def kv_look(self) -> KvLook | None:
        """Return a function that any thread may call for the state of KV transfers; None if that is
        in other processes: then `kv_ranks`."""
        if self._opened.encodes:
            look: KvLook = self._opened.view.features.plane.snapshot
            return look
        half = self._opened.runner_half
        return None if half is None else half.snapshot

    def kv_ranks(self) -> tuple[KvSnapshot, ...]:
        """Request the state of KV transfers from each process that runs the model. Raises
        TimeoutError, because vLLM itself waits without limit for a process on an unreachable
        host."""
        executor = self._opened.executor
        return tuple(executor.collective_rpc(snapshot_in, timeout=_RANKS_ANSWER_S))

    def leave_group(self, limit_s: float) -> None:
        """Drop all streams, and serve the other ranks of the group until they end, too."""
        if self._opened.group is not None:
            self.streams.abort_all()
            self._opened.group.leave(limit_s)

    def close(self) -> None:
        """End the engine and its processes. Idempotent."""
        self._closing.close()


def _self_test(opened: OpenedEngine, info: EngineInfo, recorder: StepRecorder) -> None:
    """Compute a few prompts, and record their steps if the engine generates."""
    engine, scores = opened.engine, info.model.cross_encoder
    is_pooling = engine.model_config.runner_type == "pooling"

    def pooling(length: int) -> PoolingParams:
        phase = PoolingPhase(second_text_at=length // 2)
        return pooling_params(engine, phase, length, scores=scores)

    check_computes(engine, pooling if is_pooling else None)
    if not (is_pooling or opened.encodes):
        measure_steps(engine, recorder)
