"""The connector's half in vLLM's scheduler process. Tried on vLLM 0.32.0.

It knows which requests take part in a transfer, reserves nothing itself (vLLM does), and keeps the
ledger: blocks granted to a source and not yet filled, blocks held for a target and not yet
acknowledged.

The handed-over token becomes the first output token of the decode request (continuation.py). Where
the parameters are in vLLM's own names (params.py) it is not handed over: vLLM computes the last
prompt token again and samples.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from vllm.v1.request import RequestStatus

from kv_transfer.vllm.continuation import Continuations
from kv_transfer.vllm.params import (
    SourceParams,
    TargetParams,
    TransferParams,
    digest_of,
    parse,
)
from kv_transfer.vllm.step import (
    Arrival,
    SourceEnded,
    SourceExpected,
    SourceProgress,
    StepMetadata,
    TargetStart,
    Unneeded,
    WorkerOutput,
)
from pdserve.errors import InvalidRequest
from pdserve.types import KvLedger

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from pdserve.types import ErrorInfo


logger = logging.getLogger(__name__)

_MAX_FAILURES = 1024


class _Load(Enum):
    """Where a target request stands."""

    WAITING = "waiting"  # no blocks yet
    LOADING = "loading"  # granted; blocks are in flight
    OVER = "over"  # loaded, failed, or nothing was needed


@dataclass(slots=True)
class _Target:
    request: Request
    part: TargetParams
    load: _Load = _Load.WAITING


@dataclass(frozen=True, slots=True)
class _Lease:
    transfer_id: str
    blocks: int  # held for the target


@dataclass(slots=True)
class _Source:
    request: Request
    part: SourceParams
    reported_blocks: int = -1
    is_live: bool = False  # it was decoding when its KV was asked for


class SchedulerHalf:
    """State: requests by their vLLM-internal id. Changed only by vLLM's calls, on one thread.

    `instance_id` and `addresses` say where this engine's KV is reached; the addresses are those of
    its tensor-parallel ranks, once their worker halves are up.
    """

    def __init__(self, block_size: int, instance_id: str) -> None:
        self._block_size = block_size
        self._instance_id = instance_id
        self.addresses: tuple[str, ...] = ()
        self._sources: dict[str, _Source] = {}
        self._targets: dict[str, _Target] = {}
        self._in_flight: dict[str, int] = {}  # request id → blocks its source may write to
        self._leased: dict[str, _Lease] = {}  # by request id
        self._continuations = Continuations()
        self._pending = StepMetadata()
        self._refused: dict[str, str] = {}  # by request id, why; until vLLM lets it be said
        self._arrivals: dict[str, Arrival] = {}  # of requests that are open, not yet taken
        self._failures: dict[str, ErrorInfo] = {}
        # Requests whose load has ended on some ranks: what came, and which of them have failed.
        self._arriving: dict[str, Arrival] = {}
        self._broken: set[str] = set()

    # -- what the worker process asks

    def take_arrivals(self) -> list[Arrival]:
        """Handed-over tokens that came with the last steps, each once."""
        arrivals, self._arrivals = self._arrivals, {}
        return list(arrivals.values())

    def take_failure(self, request_id: str) -> ErrorInfo | None:
        """Why the transfer of this request failed, once."""
        return self._failures.pop(request_id, None)

    def holds(self, request_id: str) -> bool:
        """Whether an ended request's blocks are held for its target."""
        return request_id in self._leased

    def release(self, request_id: str) -> None:
        """Gives up an ended request whose blocks are held; the next step frees them."""
        lease = self._leased.get(request_id)
        if lease is not None:
            self._pending.released.append(lease.transfer_id)

    def export(self, request: Request, transfer_id: str) -> bool:
        """From its end on, which is to follow at once, a running request's blocks are held for
        whoever presents `transfer_id`: with the KV of all its tokens but the last. False, with
        nothing changed, where they do not have that."""
        request_id = request.request_id
        is_computed = request.num_computed_tokens >= request.num_tokens - 1
        is_decoding = request.status == RequestStatus.RUNNING and request.num_output_tokens > 0
        if request_id in self._sources or not (is_decoding and is_computed):
            return False
        self._sources[request_id] = _Source(request, SourceParams(transfer_id), is_live=True)
        self._pending.expected.append(SourceExpected(transfer_id, request_id))
        return True

    def ledger(self) -> KvLedger:
        """Blocks pinned for transfers now; `engine_requests` is the engine's to fill in."""
        in_flight = sum(self._in_flight.values())
        leased = sum(lease.blocks for lease in self._leased.values())
        return KvLedger(
            in_flight_blocks=in_flight,
            leased_blocks=leased,
            transfers=len(self._in_flight) + len(self._leased),
        )

    # -- vLLM's calls, in the order of a request's life

    def on_new_request(self, request: Request) -> None:
        """Called as the request enters the scheduler, before anything else. Nothing may be raised
        here: it would end the engine. What cannot be read becomes a load that fails."""
        try:
            params = _params_of(request)
        except InvalidRequest as error:
            self._refused[request.request_id] = error.message
            return
        match params.part:
            case SourceParams() as part:
                if not part.transfer_id:
                    part = replace(part, transfer_id=uuid4().hex)
                self._sources[request.request_id] = _Source(request, part)
                self._pending.expected.append(SourceExpected(part.transfer_id, request.request_id))
            case TargetParams() as part:
                self._targets[request.request_id] = self._new_target(request, part)
        if params.resume:
            self._continuations.append(request, params.resume)

    def matched_tokens(self, request: Request, computed: int) -> tuple[int, bool]:
        """(tokens whose KV comes from outside, whether it comes asynchronously)."""
        self._continuations.replay_grammar(request)
        if request.request_id in self._refused:
            return int(request.num_tokens) - computed, True
        target = self._targets.get(request.request_id)
        if target is None or target.load is not _Load.WAITING:
            return 0, False
        missing = self._wanted(target) - computed
        return (missing, True) if missing > 0 else (0, False)

    def after_alloc(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """vLLM has allocated the request's blocks; `external` tokens are to be loaded into them."""
        refusal = self._refused.pop(request.request_id, None)
        if refusal is not None:
            logger.warning("request %s refused: %s", request.request_id, refusal)
            if external > 0:  # vLLM loads nothing where prompt logprobs are wanted
                self._pending.refused[request.request_id] = refusal
        target = self._targets.get(request.request_id)
        if target is None or target.load is not _Load.WAITING:
            return
        part = target.part
        if external <= 0:
            target.load = _Load.OVER
            self._pending.unneeded.append(
                Unneeded(
                    part.transfer_id,
                    part.producer_addresses,
                    part.producer_instance_id,
                )
            )
            return
        wanted = self._wanted(target)
        first = (wanted - external) // self._block_size
        last = -(-wanted // self._block_size)
        ids = list(blocks.get_block_ids()[0][first:last])
        target.load = _Load.LOADING
        self._in_flight[request.request_id] = len(ids)
        self._pending.starts.append(
            TargetStart(
                part.transfer_id,
                request.request_id,
                part.producer_addresses,
                part.producer_instance_id,
                first,
                wanted,
                ids,
            )
        )

    def step_metadata(self, output: SchedulerOutput) -> StepMetadata:
        """What the worker half needs for the step that `output` describes."""
        metadata, self._pending = self._pending, StepMetadata()
        metadata.resumed = self._continuations.take_resumed(output)
        for request_id, source in self._sources.items():
            self._source_progress(request_id, source, output, metadata)
        return metadata

    def request_finished(
        self, request: Request, block_ids: Iterable[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """(whether vLLM must keep the blocks until we say so, parameters for the output)."""
        request_id = request.request_id
        self._continuations.finished(request_id)
        self._refused.pop(request_id, None)
        self._arrivals.pop(request_id, None)
        target = self._targets.pop(request_id, None)
        if target is not None:
            self._target_finished(request_id, target)
        source = self._sources.pop(request_id, None)
        if source is None:
            return False, None
        # A first token that ends the answer leaves nothing to continue, unless its target samples
        # it for itself.
        part, blocks = source.part, list(block_ids)
        is_cut = request.status == RequestStatus.FINISHED_LENGTH_CAPPED
        is_stopped = request.status == RequestStatus.FINISHED_STOPPED
        is_wanted = source.is_live or is_cut or (is_stopped and part.resample)
        held = is_wanted and len(blocks) > 0
        if source.is_live:
            ready = request.num_tokens - 1
            self._pending.computed.append(SourceProgress(part.transfer_id, blocks, ready))
        self._pending.ended.append(
            SourceEnded(part.transfer_id, tuple(request.output_token_ids), held, request_id)
        )
        if held:
            self._leased[request_id] = _Lease(part.transfer_id, len(blocks))
        if not (held and part.resample):
            return held, None
        for_target = TargetParams(
            part.transfer_id,
            self.addresses,
            self._instance_id,
            resample=True,
            prompt_digest=digest_of(request.prompt_token_ids or ()),
        )
        return True, TransferParams(for_target).to_dict()

    def worker_output(self, output: KVConnectorOutput) -> None:
        """What the worker half reported with the step."""
        meta = output.kv_connector_worker_meta
        if isinstance(meta, WorkerOutput):
            for request_id, arrival in meta.arrivals.items():
                earlier = self._arriving.get(request_id)
                self._arriving[request_id] = arrival if earlier is None else earlier.beside(arrival)
            for request_id, error in meta.failures.items():
                logger.warning("the KV of request %s did not come: %s", request_id, error.message)
                self._failures.setdefault(request_id, error)
                self._broken.add(request_id)
            while len(self._failures) > _MAX_FAILURES:  # of requests nobody asks for any more
                del self._failures[next(iter(self._failures))]
        for request_id in output.finished_recving or ():
            self._received(request_id)
        for request_id in output.finished_sending or ():
            self._leased.pop(request_id, None)

    # -- inside

    def _new_target(self, request: Request, part: TargetParams) -> _Target:
        # vLLM makes n requests of one that asks for n answers. A transfer is for one of them; the
        # others find its blocks in the prefix cache, or compute.
        is_known = any(t.part.transfer_id == part.transfer_id for t in self._targets.values())
        is_copy = part.resample and is_known
        return _Target(request, part, _Load.OVER if is_copy else _Load.WAITING)

    def _take_over(self, target: _Target, arrival: Arrival) -> Arrival:
        """Gives the request what its source has sampled, where it takes that; returns the part that
        is new."""
        if target.part.resample:
            return replace(arrival, token_ids=())
        # The source tells all output tokens of its request, also those resumed there.
        new = arrival.token_ids[target.request.num_output_tokens :]
        self._continuations.append(target.request, new)
        self._continuations.replay_grammar(target.request)
        return replace(arrival, token_ids=new)

    def _received(self, request_id: str) -> None:
        """The request's load has ended on every rank, at different steps maybe. What came counts
        when none of them has failed."""
        self._in_flight.pop(request_id, None)
        arrival, is_broken = self._arriving.pop(request_id, None), request_id in self._broken
        self._broken.discard(request_id)
        target = self._targets.get(request_id)
        if target is None:
            return
        if arrival is not None and not is_broken and target.load is _Load.LOADING:
            self._arrivals[request_id] = self._take_over(target, arrival)
        target.load = _Load.OVER

    def _wanted(self, target: _Target) -> int:
        """Tokens whose KV the source computes: the prompt and what was resumed on both sides. The
        token that it samples after them comes along; a live source has said it already."""
        return int(target.request.num_tokens) - target.part.live

    def _source_progress(
        self, request_id: str, source: _Source, output: SchedulerOutput, metadata: StepMetadata
    ) -> None:
        request, transfer_id = source.request, source.part.transfer_id
        scheduled = output.num_scheduled_tokens.get(request_id)
        if scheduled is None:
            if request.status == RequestStatus.PREEMPTED and source.reported_blocks >= 0:
                source.reported_blocks = -1
                metadata.preempted.append(transfer_id)
            return
        # num_computed_tokens is advanced after this call, so the step's own tokens are added.
        ready = request.num_computed_tokens + scheduled
        blocks = ready // self._block_size
        if blocks != source.reported_blocks or ready >= request.num_prompt_tokens:
            source.reported_blocks = blocks
            state = output.kv_connector_block_state
            ids = list(state.get_block_ids(request_id)[0])
            metadata.progress.append(SourceProgress(transfer_id, ids, ready))

    def _target_finished(self, request_id: str, target: _Target) -> None:
        part = target.part
        if target.load is _Load.WAITING:
            self._pending.unneeded.append(
                Unneeded(
                    part.transfer_id,
                    part.producer_addresses,
                    part.producer_instance_id,
                )
            )
        elif request_id in self._in_flight:
            self._pending.cancels.append(part.transfer_id)


def _params_of(request: Request) -> TransferParams:
    """Raises InvalidRequest where the parameters cannot be read or are another prompt's."""
    params = parse(request.kv_transfer_params)
    digest = params.part.prompt_digest if isinstance(params.part, TargetParams) else ""
    if digest and digest != digest_of(request.prompt_token_ids or ()):
        raise InvalidRequest(
            "kv_transfer_params.prompt_digest is of another prompt",
            field="kv_transfer_params.prompt_digest",
        )
    return params
