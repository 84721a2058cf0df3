"""vLLM's engine, as the step thread uses it. Nothing here may be called from another thread, unless
it says so.

The engine core runs in this process (`LLMEngine` without its multiprocess client), so that tokens
that arrive with KV can be put into the text state of their request between two steps. With several
ranks vLLM's multiprocess executor runs the model; its processes end with this one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.ec_transfer import get_ec_transfer
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.entrypoints.pooling.scoring.utils import compress_token_type_ids
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.pooling_params import PoolingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.request import RequestStatus

from kv_transfer.vllm.connector import first_of, handshake_in, snapshot_in, tier_token_s
from kv_transfer.vllm.continuation import patch_runner_v1
from kv_transfer.vllm.kv_layout import check_model
from pdserve.errors import (
    InvalidRequest,
    PdserveError,
    TransferFailed,
    Unavailable,
    WorkerFailed,
)
from pdserve.model.tokenizer import digest_of, read_files
from pdserve.types import (
    EngineLimits,
    ErrorInfo,
    FinishReason,
    HandoffStyle,
    KvEndpoint,
    KvLedger,
    ModelInfo,
    PhaseReport,
    PositionLogprobs,
    StreamDelta,
    TokenLogprob,
    WorkerLoad,
)
from workers.engine import (
    NO_LORA,
    DecodePhase,
    EncodePhase,
    EngineInfo,
    PoolingPhase,
    PrefillPhase,
    check_work,
    ended_by,
)
from workers.vllm import cache, leased_blocks, media, sampling
from workers.vllm.args import (
    check_on_cpu,
    is_cross_encoder,
    make_config,
    settings_in_effect,
    warn_of_cut_context,
)
from workers.vllm.experts import expert_tokens, mend_experts
from workers.vllm.kv_params import connector_params, handle_of
from workers.vllm.lockstep import LockstepEngine
from workers.vllm.lora import load_in, mend_lora
from workers.vllm.pipeline import mend_pipeline
from workers.vllm.rank_links import RankLinks
from workers.vllm.reasoning import set_gate
from workers.vllm.rotary import mend_rotary
from workers.vllm.self_test import check_computes, measure_steps
from workers.vllm.speculation import mend_sampling, unsupported_fields
from workers.vllm.steps import IdleSteps, StepWatch
from workers.vllm.tokenizer import path_for_router

if TYPE_CHECKING:
    from kv_transfer.protocol.snapshot import KvSnapshot
    from pdserve.types import Adapter, TransferReport
    from workers.engine import CacheChange, Work
    from workers.metering.accounting import BusyTime
    from workers.vllm.leased_blocks import BlockLeases
    from workers.vllm.settings import VllmSettings

KvLook = Callable[[], "KvSnapshot"]


# Longer than a step that a process computes before it answers.
_RANKS_ANSWER_S = 60.0
# After a step has failed because a rank of the group is lost, for the links to tell which.
_LOST_S = 1.0
# vLLM's names of request fields that we name differently.
_FIELDS = {"prompt": "prompt_token_ids", "structured_outputs": "structured_output"}


@dataclass(slots=True)
class _EngineRequest:
    """An open request. `state` is vLLM's RequestState, `submitted` a monotonic time. `turn` is the
    scheduler's Request, if a lease of a session may follow it."""

    work: Work
    vllm_id: str
    state: Any
    submitted: float
    turn: Any
    transfer: TransferReport | None = None


class VllmCore:
    """State: the open streams by their id, changed by `add`, `cancel`, `export` and `step`.

    `steps` and `load`, the load after the last step, may be read by any thread.
    """

    def __init__(self, settings: VllmSettings, wake: Callable[[], None], busy: BusyTime) -> None:
        """Load the model. `wake` is called, on any thread, when the engine has died; steps are
        counted in `busy`. Raises ConfigError, or what vLLM raises."""
        if settings.kv is None:
            patch_runner_v1()  # else the connector does, in each process that runs the model
        # The context's defaults suit a server.
        context = UsageContext.OPENAI_API_SERVER
        config = make_config(settings, context)
        if settings.kv is not None and not settings.encodes:
            check_model(config)
        if current_platform.is_cpu():
            check_on_cpu(config)
        # As vLLM gives it to processes; with the engine, it will hold the model.
        self.pickled_config = bytes(ForkingPickler.dumps(config))
        self._group: LockstepEngine | None = None
        if config.parallel_config.data_parallel_size > 1:
            self._group = LockstepEngine(config, context, wake, self._has_runnable)
        self._engine = self._group or LLMEngine(
            config, Executor.get_class(config), log_stats=True, usage_context=context
        )
        core = self._engine.engine_core.engine_core
        warn_of_cut_context(config)
        self._core = core
        self._scheduler = core.scheduler
        self._executor = core.model_executor
        if current_platform.is_cpu():
            self._mend()
        has_kv = settings.kv is not None and not settings.encodes
        # Of embeddings: of an encode worker the half that runs with the model.
        self._embeddings: Any = None
        if config.ec_transfer_config is not None:
            is_producer = settings.encodes
            self._embeddings = get_ec_transfer() if is_producer else self._scheduler.ec_connector
        self._connector: Any = first_of(self._scheduler.get_kv_connector()) if has_kv else None
        # The connector's half that runs with the model, if that is in this process.
        is_here = has_kv and has_kv_transfer_group()
        self._runner_half: Any = first_of(get_kv_transfer_group()) if is_here else None
        self._streams: dict[int, _EngineRequest] = {}
        self._held: dict[int, str] = {}  # ended prefills by stream id → vLLM's id, while held
        self._adapters: dict[str, LoRARequest] = {}
        self._adapter_ids = itertools.count(1)
        self._wake = wake
        self._ranks: RankLinks | None = None
        self._tokenizer_dir = TemporaryDirectory(prefix="pdserve-tokenizer-")
        self.is_idle = False
        self._idle = IdleSteps(in_flight=core.batch_queue_size)
        self._executor_died = ""  # how, once it has
        self._busy = busy
        self._leases: BlockLeases | None = None  # none before the self-test
        try:
            self.info = self._describe(settings)
            self.load = self._read_load()
            kv = self.info.kv
            self._handoff = HandoffStyle.CONCURRENT if kv is None else kv.handoff
            self._encodes = settings.encodes
            nodes = settings.nodes
            # Descriptors that are readable when a step would find that a transfer ended; () if the
            # connector has none.
            self.wakeups: tuple[int, ...] = ()
            if self._runner_half is not None and self._runner_half.wakeup is not None:
                self.wakeups = (self._runner_half.wakeup,)
            if isinstance(self._executor, MultiprocExecutor):
                host = nodes.host if nodes.count > 1 else "127.0.0.1"
                self._ranks = RankLinks(self._executor, host, self._note_lost_rank)
                self.wakeups = self._ranks.wakeups
            is_pooling = config.model_config.runner_type == "pooling"
            check_computes(self._engine, self._pooling_of if is_pooling else None)
            if not (is_pooling or settings.encodes):
                measure_steps(self._engine, busy.recorder)
            # From here on steps count as work, and the prefix cache is reported.
            self.steps = StepWatch(self._scheduler, busy, self._runner_half)
            self._cache_events = cache.watch(self._scheduler, config, settings.model_names[0])
            self._leases = leased_blocks.watch(self._scheduler, settings.session_lease)
            self._executor.register_failure_callback(self._note_executor_death)
        except BaseException:
            self.close()
            raise

    def _mend(self) -> None:
        """Replace parts of vLLM's CPU build that do not work, where the model runs."""
        config = self._engine.vllm_config
        parallel = config.parallel_config
        if config.model_config.use_mla:
            self._executor.collective_rpc(mend_rotary)
        if config.speculative_config is not None:
            self._executor.collective_rpc(mend_sampling)
        if config.lora_config is not None:
            self._executor.collective_rpc(mend_lora)
        if parallel.pipeline_parallel_size > 1:
            self._executor.collective_rpc(mend_pipeline)
        if parallel.data_parallel_size > 1 or parallel.enable_expert_parallel:
            self._executor.collective_rpc(mend_experts)

    @property
    def died(self) -> str:
        """How the processes that run the model died; empty while they live."""
        lost = None if self._group is None else self._group.links.lost
        if lost is not None:
            return f"rank {lost} of this data-parallel group has ended"
        return self._executor_died

    def why_failed(self) -> str:
        """Return how the processes that run the model died, after a step failed; empty if they
        live. A step of a group fails as soon as a rank is lost, often before the links tell it."""
        if self._group is not None:
            self._group.links.until_lost(_LOST_S)
        return self.died

    def _note_executor_death(self) -> None:
        self._executor_died = self._executor_died or "a process of the executor died"
        self._wake()

    def _note_lost_rank(self, rank: int) -> None:
        """End the ranks of this node, if vLLM does not do that because of `rank` itself: then it
        frees the step that waits for them. A worker without a step fails at once, too."""
        if rank >= self._executor.local_world_size:
            self._executor_died = f"rank {rank} on another node ended, or cannot be reached"
            for handle in self._executor.workers:
                handle.proc.kill()
            self._wake()

    def _describe(self, settings: VllmSettings) -> EngineInfo:
        config = self._engine.vllm_config
        model, is_cpu = config.model_config, config.device_config.device_type == "cpu"
        directory, made = Path(model.tokenizer), Path(self._tokenizer_dir.name)
        path = path_for_router(self._engine.get_tokenizer(), directory, made)
        return EngineInfo(
            name=f"vllm {vllm.__version__}",
            model=ModelInfo(
                name=settings.model_names[0],
                path=str(path),
                max_model_len=model.max_model_len,
                vocab_size=model.get_vocab_size(),
                dtype=str(model.dtype).removeprefix("torch."),
                aliases=settings.model_names[1:],
                sampling_defaults=model.get_diff_sampling_param(),
                tokenizer=digest_of(read_files(path)),
                cross_encoder=is_cross_encoder(model),
                modalities=media.limits_of(self._engine),
            ),
            block_size=config.cache_config.block_size,
            # Less the null block, which is all that a model without a KV cache has.
            total_blocks=max(1, int(config.cache_config.num_gpu_blocks) - 1),
            limits=EngineLimits(
                config.scheduler_config.max_num_seqs,
                config.scheduler_config.max_num_batched_tokens,
                config.lora_config.max_loras if config.lora_config else 0,
            ),
            kv=self._endpoint(settings),
            settings=settings_in_effect(config),
            unsupported_fields=unsupported_fields(
                speculates=config.speculative_config is not None,
                is_runner_v1_on_gpu=not (is_cpu or config.use_v2_model_runner),
            ),
            device="cpu" if is_cpu else current_platform.get_device_name(),
            gpus=0 if is_cpu else config.parallel_config.world_size,
        )

    def _endpoint(self, settings: VllmSettings) -> KvEndpoint | None:
        if settings.encodes:
            plane = self._embeddings.plane
            return KvEndpoint(
                addresses=(plane.address,),
                compatibility=plane.compatibility,
                layout=plane.layout,
                transports=plane.transports,
                embedding_bytes=self._embeddings.row_bytes,
            )
        if self._connector is None:
            return None
        first = self._executor.collective_rpc(handshake_in)[0]
        return KvEndpoint(
            addresses=self._connector.addresses,
            compatibility=first.compatibility,
            layout=dict(first.layout),
            transports=tuple(first.transports),
            handoff=first.handoff,
            stage_layers=first.stage_layers,
            copies=first.handoff is HandoffStyle.CONCURRENT,
        )

    def _read_load(self) -> WorkerLoad:
        running, waiting = self._scheduler.get_request_counts()
        usage, total = self._scheduler.get_kv_cache_usage(), self.info.total_blocks
        load_s = tier_token_s(self._scheduler.get_kv_connector())
        load = WorkerLoad(
            waiting, running, usage, round((1.0 - usage) * total), tier_token_s=load_s
        )
        return load if self._leases is None else self._leases.table.added_to(load)

    def _has_runnable(self) -> bool:
        """Return whether a step could compute something: not for requests that wait for KV, for a
        grammar, or for blocks that a transfer holds."""
        scheduler = self._scheduler
        if scheduler.running:
            return True
        waiting = len(scheduler.waiting) + len(scheduler.kv_holding_waiting)
        blocked = len(scheduler.deferred_waiting)
        if self._embeddings is not None:
            blocked += self._embeddings.waiting_requests
        return waiting > blocked and not self.ledger().pinned_blocks

    def kv_look(self) -> KvLook | None:
        """Return a function that any thread may call for the state of KV transfers; None if that is
        in other processes: then `kv_ranks`."""
        if self._encodes:
            look: KvLook = self._embeddings.plane.snapshot
            return look
        return None if self._runner_half is None else self._runner_half.snapshot

    def kv_ranks(self) -> tuple[KvSnapshot, ...]:
        """Ask every process that runs the model for the state of its KV transfers. Raises
        TimeoutError: vLLM waits for a process on a host that is cut off without an end."""
        return tuple(self._executor.collective_rpc(snapshot_in, timeout=_RANKS_ANSWER_S))

    def is_woken(self) -> bool:
        """Return True if all requests wait for transfers, whose ends `wakeups` show."""
        if not self.wakeups or self._connector is None:
            return False
        return bool(self._connector.ledger().transfers == len(self._scheduler.requests))

    @property
    def open_streams(self) -> list[int]:
        return list(self._streams)

    def has_work(self) -> bool:
        """Return whether a step can change something, such as blocks that ended requests hold."""
        is_called = self._group is not None and self._group.is_called
        return bool(is_called or self._scheduler.has_requests() or self._core.batch_queue)

    def ledger(self) -> KvLedger:
        requests = len(self._scheduler.requests)
        if self._connector is None:
            return KvLedger(engine_requests=requests)
        ledger: KvLedger = self._connector.ledger()
        return replace(ledger, engine_requests=requests)

    def add(self, work: Work, submitted: float) -> list[StreamDelta]:
        """Take `work` in. Return its last delta if it ends here: refused, or already finished."""
        key = f"{work.request_id}/{work.stream_id}"
        try:
            check_work(work, self.info.model, has_kv=self._connector is not None)
            if isinstance(work.phase, EncodePhase) is not self._encodes:
                raise InvalidRequest("this engine has another part of the model", field="phase")
            work.sampling.check_supported(self.info.unsupported_fields)
            if self._connector is None and work.resume_token_ids:
                raise InvalidRequest(
                    "this engine has no KV connector to continue a request with",
                    field="resume_token_ids",
                )
            adapter = self._adapters.get(work.adapter)
            if work.adapter and adapter is None:
                raise InvalidRequest(f"adapter {work.adapter} is not loaded", field="adapter")
            transfer = connector_params(work, self._handoff)
            phase = work.phase
            vllm_id = self._engine.add_request(
                key,
                media.to_engine_input(work),
                self._pooling(phase, len(work.prompt_token_ids))
                if isinstance(phase, PoolingPhase)
                else sampling.to_vllm(work, transfer),
                lora_request=adapter,
            )
            self._busy.name(work.stream_id, vllm_id)
            set_gate(self._scheduler, vllm_id, work.reasoning_gate)
        except (PdserveError, VLLMClientError, ValueError) as error:
            self._engine.abort_request([key])  # vLLM may have registered it before it refused
            if isinstance(work.phase, EncodePhase) and self._encodes:
                self._embeddings.refuse(work.phase.transfer_id, len(work.media))
            return [_refusal(work, error)]
        state = self._engine.output_processor.request_states[vllm_id]
        is_turn = self._leases is not None and work.next_turn_s is not None
        turn = self._scheduler.requests.get(vllm_id) if is_turn else None
        stream = _EngineRequest(work, vllm_id, state, submitted, turn)
        self._streams[work.stream_id] = stream
        if isinstance(phase, PoolingPhase):
            return []
        if stopped := sampling.feed(state, work.resume_token_ids):
            return [self._end_at_seam(stream, stopped)]
        return []

    def _pooling_of(self, length: int) -> PoolingParams:
        return self._pooling(PoolingPhase(second_text_at=length // 2), length)

    def _pooling(self, phase: PoolingPhase, length: int) -> PoolingParams:
        if not self.info.model.cross_encoder:
            return PoolingParams(task="embed")
        params = PoolingParams(task="classify")
        if "token_type_ids" in self._engine.get_tokenizer().model_input_names:
            second_at = phase.second_text_at
            types = compress_token_type_ids([0] * second_at + [1] * (length - second_at))
            params.extra_kwargs = {"compressed_token_type_ids": types}
        return params

    def cancel(self, stream_id: int) -> None:
        if (stream := self._streams.pop(stream_id, None)) is not None:
            self._engine.abort_request([stream.vllm_id], internal=True)
        elif (held := self._held.pop(stream_id, None)) is not None:
            self._connector.release(held)

    def export(self, stream_id: int, transfer_id: str) -> list[StreamDelta]:
        """End a stream and hold its blocks for the consumer that presents `transfer_id`. Return its
        last delta; none for an unknown stream."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return []
        request = self._scheduler.requests.get(stream.vllm_id)
        is_ours = self._connector is not None and self._handoff is HandoffStyle.CONCURRENT
        is_held = request is not None and is_ours and self._connector.export(request, transfer_id)
        tokens = int(request.num_output_tokens) if is_held else 0
        self.cancel(stream_id)
        if not is_held:
            return [ended_by(stream_id, Unavailable("the KV of the stream is not complete here"))]
        self._remember_held(stream)
        last = StreamDelta(stream_id, finish_reason=FinishReason.ABORT, exported_tokens=tokens)
        return [replace(last, report=_report(stream))]

    def load_adapter(self, adapter: Adapter) -> None:
        """Load a LoRA adapter, if it is not. Raises InvalidRequest with vLLM's reason."""
        config = self._engine.vllm_config.lora_config
        if config is None:
            raise InvalidRequest(NO_LORA, field="lora_name")
        if adapter.key in self._adapters:
            return
        if len(self._adapters) >= config.max_cpu_loras:
            raise InvalidRequest(
                f"{len(self._adapters)} adapters are loaded, as many as "
                f"worker.engine_args.max_cpu_loras allows",
                field="lora_name",
            )
        request = LoRARequest(adapter.key, next(self._adapter_ids), adapter.path)
        self.steps.pause()
        results = self._executor.collective_rpc(load_in, args=(request,))
        if error := next(filter(None, results), ""):
            self._engine.remove_lora(request.lora_int_id)
            text = f"adapter {adapter.name} cannot be loaded from {adapter.path}: {error}"
            raise InvalidRequest(text, field="lora_path")
        self._adapters[adapter.key] = request

    def unload_adapter(self, key: str) -> None:
        """Unload an adapter that no request uses."""
        if (request := self._adapters.pop(key, None)) is not None:
            self._engine.remove_lora(request.lora_int_id)

    def cache_change(self) -> CacheChange | None:
        """Return what changed in the prefix cache since the last call, or None."""
        return None if self._cache_events is None else self._cache_events.take()

    def step(self) -> list[StreamDelta]:
        """Make one step; return the deltas of all requests in it."""
        self.steps.begin(has_work=self._has_runnable())
        if self._leases is not None:
            self._leases.expire()
        outputs = self._engine.step()
        deltas = [self._delta(output) for output in outputs]
        deltas += self._take_arrivals()
        deltas += self._end_uncomputable()
        self.load, self._busy.expert_tokens = self._read_load(), expert_tokens()
        # With nothing running, a step only looks after transfers.
        computed = bool(outputs or self._scheduler.running)
        can_start = bool(self._scheduler.finished_recving_kv_req_ids)
        in_wave = self._group is not None and self._group.wave.is_running
        self.is_idle = self._idle.after_step(computed=computed or can_start or in_wave)
        self.steps.end(computed=computed, has_work=self._has_runnable())
        return deltas

    def _take_arrivals(self) -> list[StreamDelta]:
        """Put tokens that came with KV into the text state, before the step that continues them."""
        if self._connector is None:
            return []
        ended = []
        if arrivals := self._connector.take_arrivals():
            by_vllm_id = {stream.vllm_id: stream for stream in self._streams.values()}
            for arrival in arrivals:
                stream = by_vllm_id.get(arrival.request_id)
                if stream is None:
                    continue
                stream.transfer = arrival.report
                if stopped := sampling.feed(stream.state, arrival.token_ids):
                    ended.append(self._end_at_seam(stream, stopped))
        return ended

    def _end_uncomputable(self) -> list[StreamDelta]:
        """End preempted streams whose images are not here: the next step would compute them. A step
        that preempts a request does not start it again."""
        lacking = [x for x in self._streams.values() if not x.work.has_all_media]
        ended = []
        for stream in lacking:
            if self._scheduler.requests[stream.vllm_id].status is RequestStatus.PREEMPTED:
                self.cancel(stream.work.stream_id)
                error = TransferFailed("the request was preempted, and its images are not here")
                ended.append(ended_by(stream.work.stream_id, error))
        return ended

    def _end_at_seam(self, stream: _EngineRequest, stopped: str) -> StreamDelta:
        self.cancel(stream.work.stream_id)
        return StreamDelta(
            stream.work.stream_id,
            finish_reason=FinishReason.STOP,
            stop_reason=stopped,
            report=PhaseReport(transfer=stream.transfer),
        )

    def _delta(self, output: Any) -> StreamDelta:
        stream = self._streams[int(output.request_id.rpartition("/")[2])]
        if isinstance(stream.work.phase, PoolingPhase):
            return self._embedding(stream, output)
        if isinstance(stream.work.phase, EncodePhase):
            return self._encoded(stream, failed=output.outputs[0].finish_reason == "error")
        work, made = stream.work, output.outputs[0]
        text, finish, error, report, handle = made.text, None, None, None, b""
        if output.finished:
            del self._streams[work.stream_id]
            finish = _finish_reason(made.finish_reason)
            report = _report(stream)
            if output.ec_transfer_params is not None:
                report.fetched_images = output.ec_transfer_params["fetched"]
            if finish is FinishReason.ERROR:
                error = self._failure(stream)
            elif isinstance(work.phase, PrefillPhase):
                if finish is FinishReason.LENGTH:
                    text = sampling.held_back(stream.state, text)
                    self._remember_held(stream)
                    handle = handle_of(output.kv_transfer_params)
                else:
                    # The scheduler saw an end by max_tokens before the stop string was found.
                    self._connector.release(stream.vllm_id)
            elif self._leases is not None and stream.turn is not None:
                self._leases.grant(stream.turn, work.next_turn_s or 0.0)
        return StreamDelta(
            stream_id=work.stream_id,
            token_ids=tuple(made.token_ids),
            text=text,
            logprobs=sampling.from_vllm_logprobs(made.logprobs, work.sampling.logprobs or 0),
            finish_reason=finish,
            stop_reason=made.stop_reason,
            report=report,
            error=error,
            kv_handle=handle,
            prompt_logprobs=self._prompt_logprobs(work, output),
        )

    def _embedding(self, stream: _EngineRequest, output: Any) -> StreamDelta:
        stream_id = stream.work.stream_id
        del self._streams[stream_id]
        vector = output.outputs.data.float().cpu().numpy().astype("<f4", copy=False)
        return StreamDelta(
            stream_id,
            finish_reason=FinishReason.STOP,
            report=_report(stream),
            embedding=vector.tobytes(),
        )

    def _encoded(self, stream: _EngineRequest, *, failed: bool) -> StreamDelta:
        stream_id, started = stream.work.stream_id, stream.state.stats.scheduled_ts
        del self._streams[stream_id]
        if failed:
            return ended_by(stream_id, WorkerFailed("the engine failed on this request"))
        queue_s, encode_s = max(0.0, started - stream.submitted), time.monotonic() - started
        report = PhaseReport(queue_s=queue_s, encode_s=encode_s)
        return StreamDelta(stream_id, finish_reason=FinishReason.STOP, report=report)

    def _prompt_logprobs(self, work: Work, output: Any) -> tuple[PositionLogprobs, ...]:
        if work.prompt_logprobs is None or not output.prompt_logprobs:
            return ()
        _, *scored = output.prompt_logprobs
        token_id, tokenizer = work.prompt_token_ids[0], self._engine.get_tokenizer()
        first = TokenLogprob(token_id, tokenizer.decode([token_id]), 0.0, 0)
        others = sampling.from_vllm_logprobs(scored, work.prompt_logprobs)
        return (PositionLogprobs(first), *others)

    def _remember_held(self, stream: _EngineRequest) -> None:
        """Let a late cancel release the blocks. Forget streams whose blocks were fetched."""
        holds = self._connector.holds
        self._held = {s: vllm_id for s, vllm_id in self._held.items() if holds(vllm_id)}
        self._held[stream.work.stream_id] = stream.vllm_id

    def _failure(self, stream: _EngineRequest) -> ErrorInfo:
        """vLLM reports only "error"; the request tells which error it can be."""
        phase = stream.work.phase
        is_copy = isinstance(phase, PrefillPhase) and phase.min_cached_tokens > 0
        if is_copy or isinstance(phase, DecodePhase):
            failure: ErrorInfo | None = self._connector.take_failure(stream.vllm_id)
            return failure or ErrorInfo(TransferFailed.code, "the KV blocks did not arrive")
        if stream.work.sampling.structured_output is not None:
            return ErrorInfo(
                InvalidRequest.code,
                "structured_output could not be compiled to a grammar",
                field="structured_output",
            )
        return ErrorInfo(WorkerFailed.code, "the engine failed on this request")

    def leave_group(self, limit_s: float) -> None:
        """Drop all streams, and serve the other ranks of the group until they end, too."""
        if self._group is not None:
            self._engine.abort_request([x.vllm_id for x in self._streams.values()], internal=True)
            self._streams.clear()
            self._group.leave(limit_s)

    def close(self) -> None:
        """End the engine and its processes. Idempotent."""
        self._streams.clear()
        if self._ranks is not None:
            self._ranks.close()
        if self._group is not None:
            self._group.links.close()
        self._engine.engine_core.shutdown()
        self._tokenizer_dir.cleanup()


def _finish_reason(reason: str) -> FinishReason:
    # vLLM can also end an answer that repeats itself; clients see that as a stop.
    return FinishReason.STOP if reason == "repetition" else FinishReason(reason)


def _report(stream: _EngineRequest) -> PhaseReport:
    """Return the durations of the phases from vLLM's monotonic time stamps, 0 if not reached."""
    marks = stream.state.stats
    if not marks.scheduled_ts:
        return PhaseReport(transfer=stream.transfer)
    queue_s = max(0.0, marks.scheduled_ts - stream.submitted)
    if isinstance(stream.work.phase, DecodePhase):
        return PhaseReport(
            queue_s=queue_s,
            decode_s=max(0.0, marks.last_token_ts - marks.scheduled_ts),
            transfer=stream.transfer,
        )
    return PhaseReport(
        queue_s=queue_s,
        prefill_s=max(0.0, marks.first_token_ts - marks.scheduled_ts),
        decode_s=max(0.0, marks.last_token_ts - marks.first_token_ts),
        cached_tokens=stream.state.num_cached_tokens or 0,
    )


def _refusal(work: Work, error: Exception) -> StreamDelta:
    """Return the last delta of a request that vLLM or we refuse."""
    if not isinstance(error, PdserveError):
        # The rest of vLLM's text is the parameter and its whole value.
        message, parameter = str(next(iter(error.args), error)), getattr(error, "parameter", None)
        field = _FIELDS.get(parameter or "", parameter or "")
        if not field and work.sampling.structured_output is not None:
            field = "structured_output"  # once prompt and numbers are checked, only the grammar
        error = InvalidRequest(message, field=field)
    return replace(ended_by(work.stream_id, error), report=PhaseReport())
