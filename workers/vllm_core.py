"""vLLM's engine as its one thread sees it. Nothing here is safe to call from another thread.

The engine core runs in this process (`LLMEngine` without its multiprocess client), so that one
worker is one process, and so that tokens that arrive with KV can be put into the text state of
their request between two steps. Where tensor parallelism is more than 1, vLLM's multiprocess
executor runs the model; its processes watch a pipe to this one and end with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.v1.engine.llm_engine import LLMEngine

from kv_transfer.vllm.connector import handshake_in, snapshot_in
from kv_transfer.vllm.continuation import patch_runner_v1
from pdserve.errors import (
    InvalidRequest,
    PdserveError,
    TransferFailed,
    WorkerFailed,
)
from pdserve.step_moments import StepRecorder
from pdserve.types import (
    ErrorInfo,
    FinishReason,
    HandoffStyle,
    KvEndpoint,
    KvLedger,
    ModelInfo,
    PhaseReport,
    StreamDelta,
)
from workers import sampling, text_state, vllm_cache
from workers.engine import DecodePhase, EngineInfo, PrefillPhase, check_work
from workers.kv_params import handle_of, params_for
from workers.load import LoadBoard, usable_blocks
from workers.vllm_args import engine_args, settings_in_effect, warn_of_cut_context
from workers.vllm_outputs import OpenStream, exported, finish_reason_of, report_of
from workers.vllm_refusals import not_exported, refusal
from workers.vllm_steps import StepWatch

if TYPE_CHECKING:
    from kv_transfer.snapshot import KvSnapshot
    from pdserve.step_moments import StepMoments
    from workers.engine import CacheChange, Work
    from workers.vllm_settings import VllmSettings

KvLook = Callable[[], "KvSnapshot"]


class VllmCore:
    """State: the open streams, changed by `add`, `cancel` and `step`."""

    def __init__(self, settings: VllmSettings, board: LoadBoard) -> None:
        """Loads the model; takes seconds to minutes. Raises ConfigError, or what vLLM raises."""
        if settings.kv is None:
            patch_runner_v1()  # else the connector does, in each process that runs the model
        args = engine_args(settings)
        self._engine = LLMEngine.from_engine_args(
            args, stat_loggers=[board.logger_factory()], enable_multiprocessing=False
        )
        warn_of_cut_context(self._engine.vllm_config)
        core = self._engine.engine_core.engine_core
        self._scheduler = core.scheduler
        self._executor = core.model_executor
        self._connector = self._scheduler.get_kv_connector()
        self._recorder = StepRecorder()
        self._watch = StepWatch(self._scheduler, self._recorder, time.monotonic)
        self._streams: dict[str, OpenStream] = {}
        self._keys: dict[int, str] = {}
        self._held: dict[int, str] = {}  # ended prefills by stream id → vLLM's id, while held
        self.is_idle = False
        self._cache_events = vllm_cache.watch(
            self._scheduler, self._engine.vllm_config, settings.model_name
        )
        try:
            self.info = self._describe(settings)
            kv = self.info.kv
            self._handoff = HandoffStyle.CONCURRENT if kv is None else kv.handoff
        except BaseException:
            self.close()
            raise

    def _describe(self, settings: VllmSettings) -> EngineInfo:
        config = self._engine.vllm_config
        model = config.model_config
        return EngineInfo(
            name=f"vllm {vllm.__version__}",
            model=ModelInfo(
                name=settings.model_name,
                path=str(model.tokenizer),
                max_model_len=model.max_model_len,
                vocab_size=model.get_vocab_size(),
                dtype=str(model.dtype).removeprefix("torch."),
            ),
            block_size=config.cache_config.block_size,
            total_blocks=usable_blocks(config),
            max_num_seqs=config.scheduler_config.max_num_seqs,
            kv=self._endpoint(),
            settings=settings_in_effect(config),
        )

    def _endpoint(self) -> KvEndpoint | None:
        if self._connector is None:
            return None
        first = self._executor.collective_rpc(handshake_in)[0]
        return KvEndpoint(
            addresses=self._connector.addresses,
            compatibility=first.compatibility,
            layout=dict(first.layout),
            transports=tuple(first.transports),
            handoff=first.handoff,
        )

    def on_executor_death(self, callback: Callable[[], None]) -> None:
        """`callback` is called, on a thread of vLLM's, if a process of the executor dies."""
        self._executor.register_failure_callback(callback)

    def wake_on_transfers(self, wake: Callable[[], None]) -> bool:
        """`wake` is called, on a thread of the connector's, when the next step will find that a
        transfer has moved on. False where the connector's worker half is in another process, or
        does not know."""
        return has_kv_transfer_group() and bool(get_kv_transfer_group().wake_with(wake))

    def tick_with(self, on_layer: Callable[[], None]) -> bool:
        """`on_layer` is called after each layer of a step. False where the model runs in another
        process, or its connector does not say."""
        group = get_kv_transfer_group() if has_kv_transfer_group() else None
        tick_with = getattr(group, "tick_with", None)
        return tick_with is not None and bool(tick_with(on_layer))

    def size_with(self, on_size: Callable[[int], None]) -> None:
        """`on_size` is told, in each step that computes something, how many tokens."""
        self._watch.on_size = on_size

    def has_runnable(self) -> bool:
        """Whether a step could compute something: what waits for KV or a grammar cannot, nor what
        may be waiting for blocks that a transfer holds."""
        scheduler = self._scheduler
        if scheduler.running:
            return True
        waiting = len(scheduler.waiting) + len(scheduler.kv_holding_waiting)
        return waiting > len(scheduler.deferred_waiting) and not self.ledger().pinned_blocks

    def kv_look(self) -> KvLook | None:
        """What shows the KV plane to any thread at any time. None where there is none, or where it
        is in other processes: then `kv_ranks`."""
        return get_kv_transfer_group().snapshot if has_kv_transfer_group() else None

    def kv_ranks(self) -> tuple[KvSnapshot, ...]:
        """The KV plane of each process that runs the model; asks them, between two steps."""
        return tuple(self._executor.collective_rpc(snapshot_in))

    @property
    def has_kv(self) -> bool:
        """Whether KV can leave this engine."""
        return self._connector is not None

    def waits_for_transfers_alone(self) -> bool:
        """True when whatever the next step could do hangs on a transfer."""
        if self._connector is None:
            return False
        return bool(self._connector.ledger().transfers == len(self._scheduler.requests))

    def step_moments(self) -> StepMoments:
        """What steps have cost; to any thread at any time."""
        return self._recorder.moments(time.monotonic())

    @property
    def open_streams(self) -> list[int]:
        return list(self._keys)

    def has_work(self) -> bool:
        """True while a step can change something: also while blocks of ended requests are held."""
        return bool(self._scheduler.has_requests())

    def ledger(self) -> KvLedger:
        requests = len(self._scheduler.requests)
        if self._connector is None:
            return KvLedger(engine_requests=requests)
        ledger = self._connector.ledger()
        return KvLedger(
            in_flight_blocks=ledger.in_flight_blocks,
            leased_blocks=ledger.leased_blocks,
            transfers=ledger.transfers,
            engine_requests=requests,
        )

    def add(self, work: Work, submitted: float) -> list[StreamDelta]:
        """Take `work` in. Return its last delta if it ends here: refused, or already finished."""
        key = f"{work.request_id}/{work.stream_id}"
        try:
            check_work(work, self.info.model, has_kv=self._connector is not None)
            if self._connector is None and work.resume_token_ids:
                raise InvalidRequest(
                    "this engine has no KV connector to continue a request with",
                    field="resume_token_ids",
                )
            transfer = params_for(work, self._handoff)
            vllm_id = self._engine.add_request(
                key, tokens_input(list(work.prompt_token_ids)), sampling.to_vllm(work, transfer)
            )
        except (PdserveError, VLLMClientError, ValueError) as error:
            self._engine.abort_request([key])  # what it may have registered before it refused
            return [refusal(work, error)]
        state = self._engine.output_processor.request_states[vllm_id]
        stream = OpenStream(work, vllm_id, state, submitted)
        self._streams[key] = stream
        self._keys[work.stream_id] = key
        if stopped := text_state.feed(stream.state, work.resume_token_ids):
            return [self._end_at_seam(stream, stopped)]
        return []

    def cancel(self, stream_id: int) -> None:
        key = self._keys.pop(stream_id, None)
        if key is not None:
            self._engine.abort_request([self._streams.pop(key).vllm_id], internal=True)
        elif (held := self._held.pop(stream_id, None)) is not None:
            self._connector.release(held)

    def export(self, stream_id: int, transfer_id: str) -> list[StreamDelta]:
        """Ends a stream and holds its blocks for whoever presents `transfer_id`; see promise 9 of
        workers/engine.py. Unknown streams are ignored."""
        key = self._keys.get(stream_id)
        if key is None:
            return []
        stream = self._streams[key]
        request = self._scheduler.requests.get(stream.vllm_id)
        is_ours = self._connector is not None and self._handoff is HandoffStyle.CONCURRENT
        is_held = request is not None and is_ours and self._connector.export(request, transfer_id)
        tokens = int(request.num_output_tokens) if is_held else 0
        self.cancel(stream_id)
        if not is_held:
            return [not_exported(stream_id)]
        self._remember_held(stream)
        return [exported(stream, tokens)]

    def cache_change(self) -> CacheChange | None:
        """What changed in the prefix cache since the last call, or None."""
        return None if self._cache_events is None else self._cache_events.take()

    def step(self) -> list[StreamDelta]:
        """One step of the engine; the deltas of all requests that it moved."""
        outputs = self._engine.step()
        deltas = [self._delta(output) for output in outputs]
        deltas += self._take_arrivals()
        # With nothing running, a step only looks after transfers.
        self.is_idle = not outputs and not self._scheduler.running
        return deltas

    def _take_arrivals(self) -> list[StreamDelta]:
        """Tokens that came with KV go into the text state before the step that continues them."""
        if self._connector is None:
            return []
        by_vllm_id = None
        ended = []
        for arrival in self._connector.take_arrivals():
            if by_vllm_id is None:
                by_vllm_id = {stream.vllm_id: stream for stream in self._streams.values()}
            stream = by_vllm_id.get(arrival.request_id)
            if stream is None:
                continue
            stream.transfer = arrival.report
            if stopped := text_state.feed(stream.state, arrival.token_ids):
                ended.append(self._end_at_seam(stream, stopped))
        return ended

    def _end_at_seam(self, stream: OpenStream, stopped: str) -> StreamDelta:
        self.cancel(stream.work.stream_id)
        return StreamDelta(
            stream.work.stream_id,
            finish_reason=FinishReason.STOP,
            stop_reason=stopped,
            report=PhaseReport(transfer=stream.transfer),
        )

    def _delta(self, output: Any) -> StreamDelta:
        stream = self._streams[output.request_id]
        work, made = stream.work, output.outputs[0]
        text, finish, error, report, handle = made.text, None, None, None, b""
        if output.finished:
            del self._streams[output.request_id], self._keys[work.stream_id]
            finish = finish_reason_of(made.finish_reason)
            report = report_of(stream)
            if finish is FinishReason.ERROR:
                error = self._failure(stream)
            elif isinstance(work.phase, PrefillPhase):
                if finish is FinishReason.LENGTH:
                    text = text_state.held_back(stream.state, text)
                    self._remember_held(stream)
                    handle = handle_of(output.kv_transfer_params)
                else:
                    # A stop string is found after vLLM's scheduler called it a cut at max_tokens.
                    self._connector.release(stream.vllm_id)
        return StreamDelta(
            stream_id=work.stream_id,
            token_ids=tuple(made.token_ids),
            text=text,
            logprobs=sampling.from_vllm_logprobs(
                made.token_ids, made.logprobs, work.sampling.logprobs or 0
            ),
            finish_reason=finish,
            stop_reason=made.stop_reason,
            report=report,
            error=error,
            kv_handle=handle,
        )

    def _remember_held(self, stream: OpenStream) -> None:
        """A late cancel still frees the blocks; those that were taken are forgotten here."""
        holds = self._connector.holds
        self._held = {s: vllm_id for s, vllm_id in self._held.items() if holds(vllm_id)}
        self._held[stream.work.stream_id] = stream.vllm_id

    def _failure(self, stream: OpenStream) -> ErrorInfo:
        """vLLM says "error" and nothing else; which error it can be follows from the work."""
        if isinstance(stream.work.phase, DecodePhase):
            failure: ErrorInfo | None = self._connector.take_failure(stream.vllm_id)
            return failure or ErrorInfo(TransferFailed.code, "the KV blocks did not arrive")
        if stream.work.sampling.structured_output is not None:
            return ErrorInfo(
                InvalidRequest.code,
                "structured_output could not be compiled to a grammar",
                field="structured_output",
            )
        return ErrorInfo(WorkerFailed.code, "the engine failed on this request")

    def close(self) -> None:
        """Ends the engine and its processes; idempotent."""
        self._streams.clear()
        self._keys.clear()
        self._engine.engine_core.shutdown()
