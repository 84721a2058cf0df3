"""The open requests of vLLM's engine, and their deltas. Only the step thread uses them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec import structs
from vllm.exceptions import VLLMClientError
from vllm.v1.request import RequestStatus

from kv_transfer.vllm.connector import start_arrived
from pdserve.errors import (
    InternalError,
    InvalidRequest,
    PdserveError,
    TransferFailed,
    WorkerFailed,
)
from pdserve.types import (
    ErrorInfo,
    FinishReason,
    PhaseReport,
    PositionLogprobs,
    StreamDelta,
    TokenLogprob,
)
from workers.engine import (
    DecodePhase,
    EncodePhase,
    PoolingPhase,
    PrefillPhase,
    check_work,
    ended_by,
    not_exported,
)
from workers.vllm.images import tensors
from workers.vllm.patches.detokenize import mend_start
from workers.vllm.patches.reasoning import set_gate
from workers.vllm.step import sampling
from workers.vllm.step.freeze import is_decoding, set_apart
from workers.vllm.step.kv_params import connector_params
from workers.vllm.step.pooling import pooling_params
from workers.vllm.step.routed_experts import MAX_BYTES, joined

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import SamplingParams

    from kv_transfer.vllm.step import Arrival
    from pdserve.types import TransferReport
    from workers.engine import EngineInfo, Work
    from workers.metering.worker_account import BusyTime
    from workers.vllm.adapters import EngineAdapters
    from workers.vllm.cache.retention import BlockRetention
    from workers.vllm.open import OpenedEngine

# vLLM's names of request fields that we name differently.
_FIELDS = {"prompt": "prompt_token_ids", "structured_outputs": "structured_output"}


@dataclass(slots=True)
class _EngineRequest:
    """An open request. `state` is vLLM's RequestState, `submitted` a monotonic time. `turn` is the
    scheduler's Request, if its blocks may be retained at its end."""

    work: Work
    vllm_id: str
    state: Any
    submitted: float
    turn: Any
    transfer: TransferReport | None = None
    is_stale: bool = False  # some of its KV is of older weights


class EngineStreams:
    """State: the open streams by their id, and the ended prefills whose blocks are held."""

    def __init__(
        self,
        opened: OpenedEngine,
        info: EngineInfo,
        adapters: EngineAdapters,
        retention: BlockRetention | None,
        busy: BusyTime,
    ) -> None:
        """`busy` gets the name that vLLM gives each stream."""
        self._engine, self._scheduler = opened.engine, opened.view.scheduler
        self._connector, self._features = opened.view.connector, opened.view.features
        self._continuations = opened.continuations
        self._world_size = opened.engine.vllm_config.parallel_config.world_size
        self._encodes = opened.encodes
        self._info, self._experts = info, opened.experts
        self._adapters, self._retention, self._busy = adapters, retention, busy
        self._streams: dict[int, _EngineRequest] = {}
        self._held: dict[int, str] = {}  # stream id → vLLM's id

    @property
    def open_ids(self) -> list[int]:
        return list(self._streams)

    def add(self, work: Work, submitted: float) -> list[StreamDelta]:
        """Accept `work`. Return its last delta if it ends here: refused, or already finished."""
        key = f"{work.request_id}/{work.stream_id}"
        try:
            has_kv, unsupported = self._connector is not None, self._info.unsupported_fields
            check_work(work, self._info.model, unsupported, has_kv=has_kv)
            self._check_experts(work)
            if isinstance(work.phase, EncodePhase) is not self._encodes:
                raise InvalidRequest("this engine has another part of the model", field="phase")
            adapter = self._adapters.request_of(work.adapter)
            vllm_id = self._engine.add_request(
                key,
                tensors.to_engine_input(work),
                self._params(work),
                lora_request=adapter,
            )
            self._busy.name(work.stream_id, vllm_id)
            set_gate(self._scheduler, vllm_id, work.reasoning_gate)
            if self._continuations is not None and work.resume_token_ids:
                request = self._scheduler.requests[vllm_id]
                self._continuations.append(request, work.resume_token_ids)
        except (PdserveError, VLLMClientError, ValueError) as error:
            self._engine.abort_request([key])  # vLLM may have registered it before it refused
            if isinstance(work.phase, EncodePhase) and self._encodes:
                self._features.refuse(work.phase.transfer_id, len(work.media))
            return [_refusal(work, error)]
        state = self._engine.output_processor.request_states[vllm_id]
        is_turn = self._retention is not None and work.next_turn_s is not None
        turn = self._scheduler.requests.get(vllm_id) if is_turn else None
        stream = _EngineRequest(work, vllm_id, state, submitted, turn)
        self._streams[work.stream_id] = stream
        if isinstance(work.phase, PoolingPhase):
            return []
        mend_start(state.detokenizer, self._engine.get_tokenizer(), work.prompt_token_ids)
        if stopped := sampling.feed(state, work.resume_token_ids):
            return [self._end_at_seam(stream, stopped)]
        return []

    def _check_experts(self, work: Work) -> None:
        """Raise InvalidRequest if the experts of all tokens exceed a message."""
        if self._experts is None or not work.sampling.routed_experts:
            return
        shape, tokens = self._experts, len(work.prompt_token_ids) + work.sampling.max_tokens
        size = shape.layers * shape.per_token * shape.id_bytes
        if tokens * size > MAX_BYTES:
            text = f"prompt and max_tokens have {tokens} tokens; with the experts of each they may "
            raise InvalidRequest(f"{text}have {MAX_BYTES // size}", field="routed_experts")

    def _params(self, work: Work) -> PoolingParams | SamplingParams:
        """Return vLLM's parameters of `work`. Raises InvalidRequest."""
        if isinstance(work.phase, PoolingPhase):
            length, scores = len(work.prompt_token_ids), self._info.model.cross_encoder
            return pooling_params(self._engine, work.phase, length, scores=scores)
        return sampling.to_vllm(work, connector_params(work))

    def cancel(self, stream_id: int) -> None:
        """Stop a stream without a last delta, or release the blocks of an ended prefill."""
        if (stream := self._streams.pop(stream_id, None)) is not None:
            self._engine.abort_request([stream.vllm_id], internal=True)
            if self._continuations is not None:
                self._continuations.finished(stream.vllm_id)
        elif (held := self._held.pop(stream_id, None)) is not None:
            self._connector.release(held)

    def abort_all(self) -> None:
        """Drop all streams."""
        self._engine.abort_request([x.vllm_id for x in self._streams.values()], internal=True)
        self._streams.clear()

    def export(self, stream_id: int, transfer_id: str) -> list[StreamDelta]:
        """End a stream and hold its blocks for the consumer that presents `transfer_id`. Return its
        last delta; none for an unknown stream."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return []
        request = self._scheduler.requests.get(stream.vllm_id)
        has_kv = request is not None and self._connector is not None and not stream.is_stale
        is_held = has_kv and self._connector.export(request, transfer_id)
        tokens = int(request.num_output_tokens) if is_held else 0
        self.cancel(stream_id)
        if not is_held:
            return [not_exported(stream_id)]
        self._remember_held(stream)
        last = StreamDelta(stream_id, finish_reason=FinishReason.ABORT, exported_tokens=tokens)
        return [structs.replace(last, report=_report(stream))]

    def take_arrivals(self, received: Sequence[Arrival]) -> list[StreamDelta]:
        """Let the next step schedule the requests whose KV every rank has `received`, and put the
        tokens that arrived with it into their text state."""
        if self._connector is None:
            return []
        start_arrived(self._scheduler, received, self._world_size)
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

    def end_uncomputable(self) -> list[StreamDelta]:
        """End preempted streams that the next step would compute, and must not: their images are
        not here, or their KV was of older weights, and routers count it. A step that preempts a
        request does not start it again."""
        lacking = [x for x in self._streams.values() if x.is_stale or not x.work.has_all_media]
        ended = []
        for stream in lacking:
            if self._scheduler.requests[stream.vllm_id].status is RequestStatus.PREEMPTED:
                self.cancel(stream.work.stream_id)
                why = (
                    "its KV was of older weights" if stream.is_stale else "its images are not here"
                )
                error = TransferFailed(f"the request was preempted, and {why}")
                ended.append(ended_by(stream.work.stream_id, error))
        return ended

    def decoding(self, stream_ids: Collection[int]) -> frozenset[int]:
        """Return those of these streams that decode, and have no step under way."""
        requests = self._scheduler.requests
        found = {x: self._streams[x] for x in stream_ids if x in self._streams}
        return frozenset(
            stream_id
            for stream_id, x in found.items()
            if not isinstance(x.work.phase, PrefillPhase) and is_decoding(requests.get(x.vllm_id))
        )

    def grow_stale(self) -> dict[int, int]:
        """Note that the KV of all streams is of older weights now. Return its positions in each."""
        computed = {}
        for stream_id, stream in self._streams.items():
            request = self._scheduler.requests[stream.vllm_id]
            computed[stream_id] = int(request.num_computed_tokens)
            stream.is_stale, stream.turn = True, None  # nobody finds blocks to retain
            set_apart(self._scheduler, request)
        return computed

    def _end_at_seam(self, stream: _EngineRequest, stopped: str) -> StreamDelta:
        self.cancel(stream.work.stream_id)
        return StreamDelta(
            stream.work.stream_id,
            finish_reason=FinishReason.STOP,
            stop_reason=stopped,
            report=PhaseReport(transfer=stream.transfer),
        )

    def delta(self, output: Any) -> StreamDelta:
        """Return what vLLM's `output` of a step adds to its stream."""
        stream = self._streams[int(output.request_id.rpartition("/")[2])]
        if isinstance(stream.work.phase, PoolingPhase):
            return self._embedding(stream, output)
        if isinstance(stream.work.phase, EncodePhase):
            return self._encoded(stream, failed=output.outputs[0].finish_reason == "error")
        work, made = stream.work, output.outputs[0]
        experts, parts = None, stream.state.routed_experts_chunks
        if self._experts is not None and made.token_ids and work.sampling.routed_experts:
            if not parts:
                self.cancel(work.stream_id)
                error = InternalError("the experts of the request's tokens are not known")
                return ended_by(work.stream_id, error)
            experts = joined(self._experts, parts)
        text, finish, report = made.text, None, None
        failure: ErrorInfo | None = None
        if output.finished:
            del self._streams[work.stream_id]
            if self._continuations is not None:
                self._continuations.finished(stream.vllm_id)
            finish = _finish_reason(made.finish_reason)
            report = _report(stream)
            if output.ec_transfer_params is not None:
                report.wanted_images = output.ec_transfer_params["wanted"]
                report.fetched_images = output.ec_transfer_params["fetched"]
            if finish is FinishReason.ERROR:
                failure = self._failure(stream)
            elif isinstance(work.phase, PrefillPhase):
                if finish is FinishReason.LENGTH:
                    text = sampling.held_back(stream.state, text)
                    self._remember_held(stream)
                else:
                    # The scheduler saw an end by max_tokens before the stop string was found.
                    self._connector.release(stream.vllm_id)
            elif self._retention is not None and stream.turn is not None:
                self._retention.retain(stream.turn, work.next_turn_s or 0.0)
        return StreamDelta(
            stream_id=work.stream_id,
            token_ids=tuple(made.token_ids),
            text=text,
            logprobs=sampling.from_vllm_logprobs(made.logprobs, work.sampling.logprobs or 0),
            finish_reason=finish,
            stop_reason=made.stop_reason,
            report=report,
            error=failure,
            prompt_logprobs=self._prompt_logprobs(work, output),
            routed_experts=experts,
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
        if start := work.scored_from:
            return sampling.from_vllm_logprobs(scored[start - 1 :], work.prompt_logprobs)
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
        """Derive the error from the request: vLLM reports only "error"."""
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
    return structs.replace(ended_by(work.stream_id, error), report=PhaseReport())
