"""The connector's half in vLLM's scheduler process. Tested with vLLM 0.32.0 and 0.33.0 (CPU).

It tracks the requests that take part in a transfer and keeps the ledger: blocks that receive KV,
and blocks held for a consumer that has not acknowledged them. vLLM itself reserves the blocks.

The first token of a decode request comes from prefill and becomes its first output token
(continuation.py). With vLLM's own parameter names (params.py) it is not handed over: vLLM computes
the last prompt token again and samples. Models with state are refused with those parameters,
because their state already includes the last prompt token.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import reduce
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
from kv_transfer.vllm.transfers import Transfer, TransferState
from pdserve.errors import InvalidRequest, TransferFailed
from pdserve.types import ErrorInfo, KvLedger

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kv_transfer.cache.geometry import KvGroup


logger = logging.getLogger(__name__)

_MAX_FAILURES = 1024
_NULL_BLOCK = 0  # replaces blocks that have left a window
_STATE_RESAMPLED = "do_remote_decode and do_remote_prefill: not for models with state-space layers"


class SchedulerHalf:
    """The scheduler half. Requests are keyed by vLLM's internal id. vLLM calls it on one thread.

    `groups` has one group per block table of the engine. `addresses` and `stage_layers`: of this
    engine's ranks (step.py), set once the worker halves have started.
    """

    def __init__(self, groups: Sequence[KvGroup], instance_id: str) -> None:
        self._groups = groups
        self._has_state = any(group.kind is GroupKind.STATE for group in groups)
        self._block_size = min(group.block_size for group in groups)
        self._instance_id = instance_id
        self.addresses: tuple[str, ...] = ()
        self.stage_layers: tuple[tuple[int, ...], ...] = ()
        self._transfers: dict[str, Transfer] = {}
        self._failures: dict[str, ErrorInfo] = {}  # of loads, also after their requests have ended
        self._started: set[str] = set()  # loads that vLLM will report again, see `complete`
        self._continuations = Continuations()
        self._pending = StepMetadata()

    # -- queries of the worker process

    def take_arrivals(self) -> list[Arrival]:
        """Return the arrivals since the last call, with their handed-over tokens."""
        arrivals = []
        for transfer in self._transfers.values():
            if transfer.state is TransferState.ARRIVED and transfer.arrival is not None:
                arrivals.append(transfer.arrival)
                transfer.state = TransferState.OVER
        return arrivals

    def complete(self, arrivals: Iterable[Arrival], ranks: int) -> set[str]:
        """Record loads that succeeded on one rank each, before vLLM reports them. Return the
        requests whose KV is on all `ranks`, which the caller must pass to vLLM's scheduler now."""
        complete = set()
        for arrival in arrivals:
            match self._transfers.get(arrival.request_id):
                case Transfer(state=TransferState.LOADING) as transfer:
                    transfer.early.append(arrival)
                    if len(transfer.early) == ranks:
                        transfer.arrival = reduce(Arrival.merged_with, transfer.early)
                        complete.add(arrival.request_id)
        self._started |= complete
        return complete

    def take_failure(self, request_id: str) -> ErrorInfo | None:
        """Return the error of this request's failed transfer, once; else None."""
        return self._failures.pop(request_id, None)

    def holds(self, request_id: str) -> bool:
        """Return True if an ended request's blocks are held for its consumer."""
        transfer = self._transfers.get(request_id)
        return transfer is not None and transfer.state is TransferState.HELD

    def release(self, request_id: str) -> None:
        """Free the held blocks of an ended request with the next step."""
        match self._transfers.get(request_id):
            case Transfer(part=ProducerParams(transfer_id), state=TransferState.HELD):
                self._pending.released.append(transfer_id)

    def export(self, request: Request, transfer_id: str) -> bool:
        """Turn a running request into a producer. The caller must then end it at once.

        Its KV, for all tokens but the last, is held for the consumer that presents `transfer_id`.
        Return False, with nothing changed, if the request is not decoding or lacks that KV.
        """
        is_computed = self._is_computed(request)
        is_decoding = request.status == RequestStatus.RUNNING and request.num_output_tokens > 0
        transfer = self._transfers.get(request.request_id)
        is_producer = transfer is not None and isinstance(transfer.part, ProducerParams)
        if is_producer or not (is_decoding and is_computed):
            return False
        self._expect(request, ProducerParams(transfer_id)).is_live = True
        return True

    def ledger(self) -> KvLedger:
        """Return the blocks pinned for transfers; the engine fills in `engine_requests`."""
        loading = {TransferState.LOADING, TransferState.CANCELLED}
        in_flight = [x.blocks for x in self._transfers.values() if x.state in loading]
        held = [x.blocks for x in self._transfers.values() if x.state is TransferState.HELD]
        return KvLedger(
            in_flight_blocks=sum(in_flight),
            leased_blocks=sum(held),
            transfers=len(in_flight) + len(held),
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
            refusal = ErrorInfo(error.code, error.message)
            refused = Transfer(request, None, TransferState.REFUSED, error=refusal)
            self._transfers[request.request_id] = refused
            return
        match params.part:
            case ProducerParams() as part:
                if not part.transfer_id:
                    part = replace(part, transfer_id=uuid4().hex)
                self._expect(request, part)
            case ConsumerParams() as part:
                # vLLM splits a request for `n` answers into n requests. The first one uses the
                # transfer; the others find its blocks in the prefix cache, or compute them.
                is_copy = part.resample and any(
                    isinstance(x.part, ConsumerParams) and x.part.transfer_id == part.transfer_id
                    for x in self._transfers.values()
                )
                state = TransferState.OVER if is_copy else TransferState.WAITING
                self._transfers[request.request_id] = Transfer(request, part, state)
        if params.resume:
            self._continuations.append(request, params.resume)

    def matched_tokens(self, request: Request, computed: int) -> tuple[int, bool]:
        """Return (number of tokens whose KV will be received, True if asynchronously)."""
        self._continuations.replay_grammar(request)
        transfer = self._transfers.get(request.request_id)
        match transfer:
            case Transfer(part=ProducerParams(min_cached_tokens=wanted)) if computed < wanted:
                text = f"{computed} tokens are cached, not {wanted}"
                transfer.error = ErrorInfo(TransferFailed.code, text)
                transfer.state = TransferState.REFUSED
        missing = 0
        match transfer:
            case Transfer(state=TransferState.REFUSED):
                missing = request.num_tokens - computed
            case Transfer(part=ConsumerParams() as part, state=TransferState.WAITING):
                if not (part.resample and self._leaves_window(request.num_tokens)):
                    missing = _wanted_tokens(request, part) - computed
        return (missing, True) if missing > 0 else (0, False)

    def after_alloc(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """Start the load of `external` tokens into the blocks that vLLM has just allocated."""
        transfer = self._transfers.get(request.request_id)
        match transfer:
            case Transfer(state=TransferState.REFUSED, error=ErrorInfo() as error):
                logger.warning("request %s refused: %s", request.request_id, error.message)
                if external > 0:
                    self._pending.refused[request.request_id] = error
                else:  # the request wants prompt logprobs: vLLM loads nothing then
                    is_producer = transfer.part is not None
                    transfer.state = TransferState.COMPUTING if is_producer else TransferState.OVER
            case Transfer(part=ConsumerParams() as part, state=TransferState.WAITING):
                if external > 0:
                    self._start_load(transfer, part, blocks.get_block_ids(), external)
                else:
                    transfer.state = TransferState.OVER
                    self._decline(part)

    def step_metadata(self, output: SchedulerOutput) -> StepMetadata:
        """Return the worker half's metadata for the step `output`."""
        metadata, self._pending = self._pending, StepMetadata()
        metadata.resumed = self._continuations.take_resumed(output)
        for transfer in self._transfers.values():
            match transfer:
                case Transfer(part=ProducerParams(transfer_id), state=TransferState.COMPUTING):
                    self._report_progress(transfer, transfer_id, output, metadata)
        return metadata

    def request_finished(
        self, request: Request, tables: Sequence[list[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return (True if vLLM must keep the blocks until released, output parameters)."""
        request_id = request.request_id
        self._continuations.finished(request_id)
        transfer = self._transfers.pop(request_id, None)
        match transfer:
            case Transfer(part=ConsumerParams() as part, state=TransferState.WAITING):
                self._decline(part)
            case Transfer(part=ConsumerParams(transfer_id), state=TransferState.LOADING):
                self._pending.cancels.append(transfer_id)
                transfer.state = TransferState.CANCELLED
                self._transfers[request_id] = transfer
            case Transfer(part=ProducerParams() as part):
                return self._end_producer(transfer, part, [list(table) for table in tables])
        return False, None

    def worker_output(self, output: KVConnectorOutput) -> None:
        """Process the worker half's report on a step."""
        meta = output.kv_connector_worker_meta
        if isinstance(meta, WorkerOutput):
            for request_id, arrival in meta.arrivals.items():
                match self._transfers.get(request_id):
                    case Transfer(state=TransferState.LOADING, arrival=None) as loading:
                        loading.arrival = arrival
                    case (
                        Transfer(state=TransferState.LOADING, arrival=Arrival() as other) as loading
                    ):
                        loading.arrival = other.merged_with(arrival)
            for request_id, error in meta.failures.items():
                logger.warning("the KV of request %s did not arrive: %s", request_id, error.message)
                self._failures.setdefault(request_id, error)
                if (transfer := self._transfers.get(request_id)) is not None:
                    transfer.error = error
            while len(self._failures) > _MAX_FAILURES:  # of requests that were cancelled
                del self._failures[next(iter(self._failures))]
        for request_id in tuple(output.finished_recving or ()):
            if not self._received(request_id):
                output.finished_recving.discard(request_id)
        for request_id in output.finished_sending or ():
            if self.holds(request_id):
                del self._transfers[request_id]

    # -- inside

    def _expect(self, request: Request, part: ProducerParams) -> Transfer:
        transfer = Transfer(request, part, TransferState.COMPUTING)
        self._transfers[request.request_id] = transfer
        self._pending.expected.append(ProducerExpected(part.transfer_id, request.request_id))
        return transfer

    def _start_load(
        self,
        transfer: Transfer,
        part: ConsumerParams,
        tables: Sequence[Sequence[int]],
        external: int,
    ) -> None:
        wanted = _wanted_tokens(transfer.request, part)
        taken = {}
        for group in self._groups:
            needed = group.needed(wanted)
            # Skip blocks from the prefix cache: other requests share them.
            first = max(needed.start, (wanted - external) // group.block_size)
            taken[group.table] = first, list(tables[group.table][first : needed.stop])
        transfer.state = TransferState.LOADING
        transfer.blocks = sum(len(ids) for _, ids in taken.values())
        self._pending.starts.append(
            ConsumerStart(
                part.transfer_id,
                transfer.request.request_id,
                part.producer_addresses,
                part.producer_instance_id,
                wanted,
                taken,
                part.producer_stage_layers,
            )
        )

    def _decline(self, part: ConsumerParams) -> None:
        """Notify the producer that this request needs no KV."""
        self._pending.declined.append(
            ConsumerDeclined(part.transfer_id, part.producer_addresses, part.producer_instance_id)
        )

    def _received(self, request_id: str) -> bool:
        """Finish a load that has ended on every rank, perhaps in different steps. It succeeded if
        no rank has failed. Return False if the scheduler has started the request already."""
        transfer = self._transfers.get(request_id)
        is_loading = transfer is not None and transfer.state is TransferState.LOADING
        if request_id in self._started and not is_loading:
            self._started.discard(request_id)
            return False
        match transfer:
            case Transfer(state=TransferState.CANCELLED):
                del self._transfers[request_id]
            case Transfer(part=ConsumerParams() as part, state=TransferState.LOADING):
                transfer.state = TransferState.OVER
                if transfer.error is None and transfer.arrival is not None:
                    transfer.state = TransferState.ARRIVED
                    transfer.arrival = self._hand_over(transfer.request, part, transfer.arrival)
        return True

    def _hand_over(self, request: Request, part: ConsumerParams, arrival: Arrival) -> Arrival:
        """Append the tokens that the producer sampled. Return the arrival with only the new
        tokens."""
        if part.resample:
            return replace(arrival, token_ids=())
        # The producer sends all output tokens of its request, also those resumed there.
        new = arrival.token_ids[request.num_output_tokens :]
        self._continuations.append(request, new)
        self._continuations.replay_grammar(request)
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

    def _report_progress(
        self, transfer: Transfer, transfer_id: str, output: SchedulerOutput, metadata: StepMetadata
    ) -> None:
        request = transfer.request
        scheduled = output.num_scheduled_tokens.get(request.request_id)
        if scheduled is None:
            if request.status == RequestStatus.PREEMPTED and transfer.reported_blocks >= 0:
                transfer.reported_blocks = -1
                metadata.preempted.append(transfer_id)
            return
        # vLLM advances num_computed_tokens after this call, so add the tokens of this step.
        ready = request.num_computed_tokens + scheduled
        blocks = ready // self._block_size
        if blocks != transfer.reported_blocks or ready >= request.num_prompt_tokens:
            transfer.reported_blocks = blocks
            tables = output.kv_connector_block_state.get_block_ids(request.request_id)
            copies = [list(table) for table in tables]
            metadata.progress.append(ProducerProgress(transfer_id, copies, ready))

    def _end_producer(
        self, transfer: Transfer, part: ProducerParams, tables: list[list[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        request = transfer.request
        # If the first token ends the answer, decode has nothing to continue, unless it samples that
        # token again.
        is_cut = request.status == RequestStatus.FINISHED_LENGTH_CAPPED
        is_stopped = request.status == RequestStatus.FINISHED_STOPPED
        is_wanted = transfer.is_live or is_cut or (is_stopped and part.resample)
        blocks = sum(block != _NULL_BLOCK for table in tables for block in table)
        held = is_wanted and blocks > 0 and self._is_computed(request)
        if transfer.is_live:
            ready = request.num_tokens - 1
            self._pending.computed.append(ProducerProgress(part.transfer_id, tables, ready))
        tokens = tuple(request.output_token_ids)
        ended = ProducerEnded(part.transfer_id, tokens, held, request.request_id)
        self._pending.ended.append(ended)
        if held:
            transfer.state, transfer.blocks = TransferState.HELD, blocks
            self._transfers[request.request_id] = transfer
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


def _wanted_tokens(request: Request, part: ConsumerParams) -> int:
    """Return the number of tokens whose KV the producer computes: prompt and resumed tokens.

    The token sampled next is sent with the KV, except in a live export: its client already has it.
    """
    return int(request.num_tokens) - part.live


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
