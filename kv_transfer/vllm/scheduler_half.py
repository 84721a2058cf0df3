"""The connector's half in vLLM's scheduler process. Tested with vLLM 0.32.0 and 0.33.0 (CPU).

It tracks the requests that take part in a transfer and keeps the ledger: blocks that receive KV,
and blocks held for a consumer that has not acknowledged them. vLLM itself reserves the blocks.

The first token of a decode request comes from prefill and becomes its first output token
(continuation.py). With vLLM's own parameter names (params.py) it is not handed over: vLLM computes
the last prompt token again and samples. Models with state are refused in that form, because their
state already includes the last prompt token.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from vllm.v1.request import RequestStatus

from kv_transfer.cache.geometry import GroupKind
from kv_transfer.vllm.continuation import Continuations
from kv_transfer.vllm.params import (
    ConsumerParams,
    ProducerParams,
    TransferParams,
    parse,
    prompt_digest_of,
)
from kv_transfer.vllm.step import (
    Arrival,
    ConsumerDeclined,
    ConsumerStart,
    ProducerEnded,
    ProducerExpected,
    ProducerProgress,
    StepMetadata,
    WorkerOutput,
)
from pdserve.errors import InvalidRequest, TransferFailed
from pdserve.types import ErrorInfo, KvLedger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kv_transfer.cache.geometry import KvGroup


logger = logging.getLogger(__name__)

_MAX_FAILURES = 1024
_NULL_BLOCK = 0  # replaces blocks that have left a window
_STATE_RESAMPLED = "do_remote_decode and do_remote_prefill: not for models with state-space layers"


class _LoadState(Enum):
    """State of a consumer request's load."""

    WAITING = "waiting"  # no blocks yet
    LOADING = "loading"  # blocks are reserved, KV is in flight
    OVER = "over"  # loaded, failed, or nothing was needed


@dataclass(slots=True)
class _ConsumerRequest:
    request: Request
    part: ConsumerParams
    load: _LoadState = _LoadState.WAITING


@dataclass(slots=True)
class _ProducerRequest:
    request: Request
    part: ProducerParams
    reported_blocks: int = -1
    is_live: bool = False  # exported while decoding


@dataclass(frozen=True, slots=True)
class _Lease:
    """Blocks of an ended request, held for the consumer."""

    transfer_id: str
    blocks: int


class SchedulerHalf:
    """The scheduler half. Requests are keyed by vLLM's internal id. vLLM calls it on one thread.

    `groups` has one group per block table of the engine. `addresses` and `stage_layers` are those
    of this engine's ranks (step.py), once the worker halves have started.
    """

    def __init__(self, groups: Sequence[KvGroup], instance_id: str) -> None:
        self._groups = groups
        self._has_state = any(group.kind is GroupKind.STATE for group in groups)
        self._block_size = min(group.block_size for group in groups)
        self._instance_id = instance_id
        self.addresses: tuple[str, ...] = ()
        self.stage_layers: tuple[tuple[int, ...], ...] = ()
        self._producers: dict[str, _ProducerRequest] = {}
        self._consumers: dict[str, _ConsumerRequest] = {}
        self._in_flight: dict[str, int] = {}  # number of blocks that receive KV
        self._leased: dict[str, _Lease] = {}
        self._continuations = Continuations()
        self._pending = StepMetadata()
        self._refused: dict[str, ErrorInfo] = {}  # by request, until vLLM lets a load fail
        self._arrivals: dict[str, Arrival] = {}  # of open requests, until taken
        self._failures: dict[str, ErrorInfo] = {}
        # Loads that have ended on some ranks: their arrivals, and the requests with a failed rank.
        self._arriving: dict[str, Arrival] = {}
        self._failed_ranks: set[str] = set()

    # -- queries of the worker process

    def take_arrivals(self) -> list[Arrival]:
        """Return the arrivals since the last call, with their handed-over tokens."""
        arrivals, self._arrivals = self._arrivals, {}
        return list(arrivals.values())

    def take_failure(self, request_id: str) -> ErrorInfo | None:
        """Return the error of this request's failed transfer, once; else None."""
        return self._failures.pop(request_id, None)

    def holds(self, request_id: str) -> bool:
        """Return True if an ended request's blocks are held for its consumer."""
        return request_id in self._leased

    def release(self, request_id: str) -> None:
        """Free the held blocks of an ended request with the next step."""
        lease = self._leased.get(request_id)
        if lease is not None:
            self._pending.released.append(lease.transfer_id)

    def export(self, request: Request, transfer_id: str) -> bool:
        """Turn a running request into a producer. The caller must then end it at once.

        Its KV, for all tokens but the last, is held for the consumer that presents `transfer_id`.
        Return False, with nothing changed, if the request is not decoding or lacks that KV.
        """
        request_id = request.request_id
        is_computed = self._is_computed(request)
        is_decoding = request.status == RequestStatus.RUNNING and request.num_output_tokens > 0
        if request_id in self._producers or not (is_decoding and is_computed):
            return False
        self._producers[request_id] = _ProducerRequest(
            request, ProducerParams(transfer_id), is_live=True
        )
        self._pending.expected.append(ProducerExpected(transfer_id, request_id))
        return True

    def ledger(self) -> KvLedger:
        """Return the blocks pinned for transfers; the engine fills in `engine_requests`."""
        return KvLedger(
            in_flight_blocks=sum(self._in_flight.values()),
            leased_blocks=sum(lease.blocks for lease in self._leased.values()),
            transfers=len(self._in_flight) + len(self._leased),
        )

    # -- vLLM's calls, in the order of a request's life

    def on_new_request(self, request: Request) -> None:
        """Record a request that enters the scheduler. An exception here would end the engine, so
        invalid parameters become a failing load instead."""
        try:
            params = _params_of(request)
            if self._has_state and getattr(params.part, "resample", False):
                raise InvalidRequest(_STATE_RESAMPLED, field="kv_transfer_params")
        except InvalidRequest as error:
            self._refused[request.request_id] = ErrorInfo(error.code, error.message)
            return
        match params.part:
            case ProducerParams() as part:
                if not part.transfer_id:
                    part = replace(part, transfer_id=uuid4().hex)
                self._producers[request.request_id] = _ProducerRequest(request, part)
                self._pending.expected.append(
                    ProducerExpected(part.transfer_id, request.request_id)
                )
            case ConsumerParams() as part:
                self._consumers[request.request_id] = self._new_consumer(request, part)
        if params.resume:
            self._continuations.append(request, params.resume)

    def matched_tokens(self, request: Request, computed: int) -> tuple[int, bool]:
        """Return (number of tokens whose KV will be received, True if asynchronously)."""
        self._continuations.replay_grammar(request)
        producer = self._producers.get(request.request_id)
        if producer is not None and computed < producer.part.min_cached_tokens:
            text = f"{computed} tokens are cached, not {producer.part.min_cached_tokens}"
            self._refused[request.request_id] = ErrorInfo(TransferFailed.code, text)
        if request.request_id in self._refused:
            return int(request.num_tokens) - computed, True
        consumer = self._consumers.get(request.request_id)
        if consumer is None or consumer.load is not _LoadState.WAITING:
            return 0, False
        missing = self._wanted(consumer) - computed
        if consumer.part.resample and self._leaves_window(request.num_tokens):
            return 0, False
        return (missing, True) if missing > 0 else (0, False)

    def after_alloc(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """Start the load of `external` tokens into the blocks that vLLM has just allocated."""
        request_id = request.request_id
        refusal = self._refused.pop(request_id, None)
        if refusal is not None:
            logger.warning("request %s refused: %s", request_id, refusal.message)
            if external > 0:  # 0 if the request wants prompt logprobs: vLLM loads nothing then
                self._pending.refused[request_id] = refusal
        consumer = self._consumers.get(request_id)
        if consumer is None or consumer.load is not _LoadState.WAITING:
            return
        part = consumer.part
        if external <= 0:
            consumer.load = _LoadState.OVER
            self._decline(part)
            return
        wanted = self._wanted(consumer)
        tables = blocks.get_block_ids()
        taken = {}
        for group in self._groups:
            needed = group.needed(wanted)
            # Skip blocks from the prefix cache: other requests share them.
            first = max(needed.start, (wanted - external) // group.block_size)
            taken[group.table] = first, list(tables[group.table][first : needed.stop])
        consumer.load = _LoadState.LOADING
        self._in_flight[request_id] = sum(len(ids) for _, ids in taken.values())
        self._pending.starts.append(
            ConsumerStart(
                part.transfer_id,
                request_id,
                part.producer_addresses,
                part.producer_instance_id,
                wanted,
                taken,
                part.producer_stage_layers,
            )
        )

    def step_metadata(self, output: SchedulerOutput) -> StepMetadata:
        """Return the worker half's metadata for the step `output`."""
        metadata, self._pending = self._pending, StepMetadata()
        metadata.resumed = self._continuations.take_resumed(output)
        for request_id, producer in self._producers.items():
            self._report_progress(request_id, producer, output, metadata)
        return metadata

    def request_finished(
        self, request: Request, tables: Sequence[list[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return (True if vLLM must keep the blocks until released, output parameters)."""
        request_id = request.request_id
        self._continuations.finished(request_id)
        self._refused.pop(request_id, None)
        self._arrivals.pop(request_id, None)
        consumer = self._consumers.pop(request_id, None)
        if consumer is not None and consumer.load is _LoadState.WAITING:
            self._decline(consumer.part)
        elif consumer is not None and request_id in self._in_flight:
            self._pending.cancels.append(consumer.part.transfer_id)
        producer = self._producers.pop(request_id, None)
        if producer is None:
            return False, None
        return self._end_producer(request, producer, [list(table) for table in tables])

    def worker_output(self, output: KVConnectorOutput) -> None:
        """Process the worker half's report on a step."""
        meta = output.kv_connector_worker_meta
        if isinstance(meta, WorkerOutput):
            for request_id, arrival in meta.arrivals.items():
                earlier = self._arriving.get(request_id)
                self._arriving[request_id] = (
                    arrival if earlier is None else earlier.merged_with(arrival)
                )
            for request_id, error in meta.failures.items():
                logger.warning("the KV of request %s did not come: %s", request_id, error.message)
                self._failures.setdefault(request_id, error)
                self._failed_ranks.add(request_id)
            while len(self._failures) > _MAX_FAILURES:  # of requests that were cancelled
                del self._failures[next(iter(self._failures))]
        for request_id in output.finished_recving or ():
            self._received(request_id)
        for request_id in output.finished_sending or ():
            self._leased.pop(request_id, None)

    # -- inside

    def _new_consumer(self, request: Request, part: ConsumerParams) -> _ConsumerRequest:
        # vLLM splits a request for `n` answers into n requests. The first one uses the transfer;
        # the others find its blocks in the prefix cache, or compute them.
        is_known = any(c.part.transfer_id == part.transfer_id for c in self._consumers.values())
        is_copy = part.resample and is_known
        return _ConsumerRequest(request, part, _LoadState.OVER if is_copy else _LoadState.WAITING)

    def _decline(self, part: ConsumerParams) -> None:
        """Notify the producer that this request needs no KV."""
        self._pending.declined.append(
            ConsumerDeclined(part.transfer_id, part.producer_addresses, part.producer_instance_id)
        )

    def _received(self, request_id: str) -> None:
        """Finish a load that has ended on every rank, perhaps in different steps. It succeeded if
        no rank has failed."""
        self._in_flight.pop(request_id, None)
        arrival = self._arriving.pop(request_id, None)
        has_failed = request_id in self._failed_ranks
        self._failed_ranks.discard(request_id)
        consumer = self._consumers.get(request_id)
        if consumer is None:
            return
        if arrival is not None and not has_failed and consumer.load is _LoadState.LOADING:
            self._arrivals[request_id] = self._hand_over(consumer, arrival)
        consumer.load = _LoadState.OVER

    def _hand_over(self, consumer: _ConsumerRequest, arrival: Arrival) -> Arrival:
        """Append the tokens that the producer sampled. Return the arrival with only the new
        tokens."""
        if consumer.part.resample:
            return replace(arrival, token_ids=())
        # The producer sends all output tokens of its request, also those resumed there.
        new = arrival.token_ids[consumer.request.num_output_tokens :]
        self._continuations.append(consumer.request, new)
        self._continuations.replay_grammar(consumer.request)
        return replace(arrival, token_ids=new)

    def _is_computed(self, request: Request) -> bool:
        """Return True if the KV of all tokens but the last is computed. For models with state, the
        state must also be after exactly these tokens: a step in flight would advance it."""
        computed, wanted = request.num_computed_tokens, request.num_tokens - 1
        is_exact = computed == wanted and not request.num_in_flight_tokens
        return is_exact if self._has_state else bool(computed >= wanted)

    def _leaves_window(self, num_tokens: int) -> bool:
        """Return True if the last token needs a block that the next token does not. vLLM allocates
        no such block, so it must compute the prompt itself."""
        return any(
            group.needed(num_tokens - 1).start < group.needed(num_tokens).start
            for group in self._groups
        )

    def _wanted(self, consumer: _ConsumerRequest) -> int:
        """Return the number of tokens whose KV the producer computes: prompt and resumed tokens.

        The token sampled next is sent with the KV, except in a live export: its client already has
        it.
        """
        return int(consumer.request.num_tokens) - consumer.part.live

    def _report_progress(
        self,
        request_id: str,
        producer: _ProducerRequest,
        output: SchedulerOutput,
        metadata: StepMetadata,
    ) -> None:
        request, transfer_id = producer.request, producer.part.transfer_id
        scheduled = output.num_scheduled_tokens.get(request_id)
        if scheduled is None:
            if request.status == RequestStatus.PREEMPTED and producer.reported_blocks >= 0:
                producer.reported_blocks = -1
                metadata.preempted.append(transfer_id)
            return
        # vLLM advances num_computed_tokens after this call, so add the tokens of this step.
        ready = request.num_computed_tokens + scheduled
        blocks = ready // self._block_size
        if blocks != producer.reported_blocks or ready >= request.num_prompt_tokens:
            producer.reported_blocks = blocks
            tables = output.kv_connector_block_state.get_block_ids(request_id)
            copies = [list(table) for table in tables]
            metadata.progress.append(ProducerProgress(transfer_id, copies, ready))

    def _end_producer(
        self, request: Request, producer: _ProducerRequest, tables: list[list[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        part, request_id = producer.part, request.request_id
        # If the first token ends the answer, decode has nothing to continue, unless it samples that
        # token again.
        is_cut = request.status == RequestStatus.FINISHED_LENGTH_CAPPED
        is_stopped = request.status == RequestStatus.FINISHED_STOPPED
        is_wanted = producer.is_live or is_cut or (is_stopped and part.resample)
        blocks = sum(block != _NULL_BLOCK for table in tables for block in table)
        held = is_wanted and blocks > 0 and self._is_computed(request)
        if producer.is_live:
            ready = request.num_tokens - 1
            self._pending.computed.append(ProducerProgress(part.transfer_id, tables, ready))
        self._pending.ended.append(
            ProducerEnded(part.transfer_id, tuple(request.output_token_ids), held, request_id)
        )
        if held:
            self._leased[request_id] = _Lease(part.transfer_id, blocks)
        if not (held and part.resample):
            return held, None
        for_consumer = ConsumerParams(
            part.transfer_id,
            self.addresses,
            self._instance_id,
            resample=True,
            prompt_digest=prompt_digest_of(request.prompt_token_ids or ()),
            producer_stage_layers=self.stage_layers,
        )
        return True, TransferParams(for_consumer).to_dict()


def _params_of(request: Request) -> TransferParams:
    """Parse the request's parameters. Raises InvalidRequest if they are invalid or belong to
    another prompt."""
    params = parse(request.kv_transfer_params)
    digest = params.part.prompt_digest if isinstance(params.part, ConsumerParams) else ""
    if digest and digest != prompt_digest_of(request.prompt_token_ids or ()):
        raise InvalidRequest(
            "kv_transfer_params.prompt_digest is that of another prompt",
            field="kv_transfer_params.prompt_digest",
        )
    return params
