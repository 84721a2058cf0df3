"""Scheduling of the fake engine: synchronous, no I/O; time is passed in.

`plan` admits what fits and says what the next step will do; the shell waits as long as that would
take; `step` does it. In between requests come, go and receive KV.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    PdserveError,
    TransferFailed,
    Unavailable,
    UnsupportedField,
    WorkerFailed,
)
from pdserve.step_moments import StepShape
from pdserve.types import ErrorInfo, FinishReason, KvLedger, StreamDelta, WorkerLoad
from workers.engine import AggregatedPhase, PrefillPhase
from workers.fake_cache import FakeCache
from workers.fake_sequence import FakeSequence, Handoff
from workers.fake_settings import FakeFaults, FakeShape
from workers.fake_transfers import SourceTransfers, TransferState
from workers.forks import WaitingForks

if TYPE_CHECKING:
    from pdserve.types import ModelInfo, TransferReport
    from workers.cache_mirror import CacheChange
    from workers.engine import Work


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What `plan` decided: decode requests that now wait for KV, and the step's work, if any."""

    fetches: tuple[Work, ...]
    shape: StepShape
    has_step: bool


class FakeCore:
    """State: requests waiting for room, waiting for KV and running; blocks held for transfers.

    Every block is with exactly one of: the free ones, a sequence, a transfer.
    """

    def __init__(self, model: ModelInfo, shape: FakeShape, *, has_kv: bool) -> None:
        self.faults = FakeFaults()
        self.transfers = SourceTransfers()
        self._model = model
        self._shape = shape
        self._has_kv = has_kv
        self._free = shape.total_blocks
        self._waiting: deque[FakeSequence] = deque()
        self._receiving: dict[int, FakeSequence] = {}
        self._running: dict[int, FakeSequence] = {}
        self._planned: list[int] = []
        self._ended: list[StreamDelta] = []
        self._forks = WaitingForks()
        self._cache = None
        if shape.prefix_cache:
            self._cache = FakeCache(model.name, shape.block_size, shape.total_blocks)

    def cache_change(self) -> CacheChange | None:
        """What changed in the prefix cache since the last call, or None."""
        return None if self._cache is None else self._cache.take()

    def submit(self, work: Work, now: float) -> None:
        try:
            blocks = self._blocks_needed(work)
        except PdserveError as error:
            for stream_id in work.stream_ids:
                self._refuse(stream_id, error)
            return
        self._forks.add(work, now)
        if isinstance(work.phase, PrefillPhase):
            self.transfers.open(work.phase.transfer_id, work.stream_id, work.request_id)
        self._waiting.append(FakeSequence(work, self._model.vocab_size, blocks, now))

    def cancel(self, stream_id: int) -> None:
        """Frees all that the stream holds, here and under a lease."""
        if self._forks.discard(stream_id):
            return
        self._end_forks(stream_id)
        self._free += self.transfers.drop_stream(stream_id, "the prefill was cancelled")
        sequence = self._receiving.pop(stream_id, None) or self._running.pop(stream_id, None)
        if sequence is not None:
            self._free += sequence.give_back()
            return
        for waiting in self._waiting:
            if waiting.work.stream_id == stream_id:
                self._waiting.remove(waiting)
                self._free += waiting.give_back() - waiting.blocks
                return

    def export(self, stream_id: int, transfer_id: str, now: float) -> None:
        """Ends a stream that runs and holds its blocks; one that does not run yet is refused."""
        sequence = self._running.get(stream_id)
        exported = None if sequence is None else sequence.export(now)
        if sequence is None or exported is None:
            if stream_id in self._stream_ids:
                self.cancel(stream_id)
                self._refuse(stream_id, Unavailable("the KV of the stream is not whole here"))
            return
        del self._running[stream_id]
        delta, handoff = exported
        self._ended.append(delta)
        self.transfers.open(transfer_id, stream_id, sequence.work.request_id)
        if not self.transfers.ready(transfer_id, handoff):
            self._free += handoff.blocks

    def plan(self, now: float) -> StepPlan:
        """Admits waiting requests in order while there are blocks and places for them."""
        fetches = []
        while self._waiting and self._has_room(self._waiting[0]):
            sequence = self._waiting.popleft()
            sequence.admitted_at = now
            self._free -= sequence.blocks
            if sequence.is_decode:
                self._receiving[sequence.work.stream_id] = sequence
                fetches.append(sequence.work)
            else:
                if self._cache is not None:
                    sequence.cached_tokens = self._cache.hit(sequence.work.prompt_token_ids)
                self._running[sequence.work.stream_id] = sequence
        self._planned = list(self._running)
        return StepPlan(
            tuple(fetches),
            shape=self._shape_of_step(),
            has_step=bool(self._running or self._ended),
        )

    def _shape_of_step(self) -> StepShape:
        prompts = [x.prefill_tokens for x in self._running.values() if x.prefill_tokens]
        contexts = [x.context for x in self._running.values() if not x.prefill_tokens]
        return StepShape(
            prefill_tokens=sum(prompts),
            prefill_pairs=sum(x * x / 2 for x in prompts),
            prefill_end=max(prompts, default=0),
            decode_reqs=len(contexts),
            decode_kv_tokens=sum(contexts),
        )

    def step(self, now: float) -> list[StreamDelta]:
        """One token for each planned request that is still here, behind what ended otherwise."""
        deltas, self._ended = self._ended, []
        for stream_id in self._planned:
            if stream_id in self._running:
                deltas.append(self._advance(self._running[stream_id], now))
        self._planned = []
        return deltas

    def receive(self, stream_id: int, handoff: Handoff, report: TransferReport) -> None:
        """KV and first token of a decode request are here; it runs from the next step on."""
        sequence = self._receiving.pop(stream_id, None)
        if sequence is not None:
            sequence.receive(handoff, report)
            self._remember(sequence)
            self._running[stream_id] = sequence
            self._begin_forks(sequence)

    def fail_transfer(self, stream_id: int, reason: str) -> None:
        """KV of a decode request will not come."""
        sequence = self._receiving.pop(stream_id, None)
        if sequence is not None:
            self._free += sequence.blocks
            self._refuse(stream_id, TransferFailed(reason))
            self._end_forks(stream_id)

    def release(self, transfer_id: str, reason: str) -> None:
        """The decode worker has the blocks, or gave up: they are free, whatever their state."""
        self._free += self.transfers.drop(transfer_id, reason)

    def expire(self, transfer_id: str) -> None:
        """The lease of a transfer is over."""
        self._free += self.transfers.expire(transfer_id)

    def end_all(self, error: PdserveError) -> list[StreamDelta]:
        """The engine is dead: the last deltas of every stream that had none yet."""
        deltas = self._ended + [ended_by(x, error) for x in self._stream_ids]
        self._ended = []
        self._forks = WaitingForks()
        self._waiting.clear()
        self._receiving.clear()
        self._running.clear()
        return deltas

    @property
    def _stream_ids(self) -> list[int]:
        sequences = (*self._waiting, *self._receiving.values(), *self._running.values())
        return [*(x.work.stream_id for x in sequences), *self._forks.stream_ids]

    @property
    def load(self) -> WorkerLoad:
        total = self._shape.total_blocks
        return WorkerLoad(
            num_waiting_reqs=len(self._waiting) + len(self._receiving),
            num_running_reqs=len(self._running),
            kv_cache_usage=(total - self._free) / total,
            free_blocks=self._free,
        )

    @property
    def has_runnable(self) -> bool:
        """Whether a step could do something; blocks held for transfers may be waited for."""
        return bool(self._running) or (bool(self._waiting) and not self.ledger.pinned_blocks)

    @property
    def ledger(self) -> KvLedger:
        leased = self.transfers.blocks_in(TransferState.LEASED)
        reserved = sum(x.blocks for x in self._receiving.values())
        in_flight = self.transfers.blocks_in(TransferState.IN_FLIGHT) + reserved
        here = len(self._waiting) + len(self._receiving) + len(self._running)
        return KvLedger(
            in_flight_blocks=in_flight,
            leased_blocks=leased,
            transfers=len(self.transfers) + len(self._receiving),
            engine_requests=here + len(self.transfers),
        )

    def _has_room(self, sequence: FakeSequence) -> bool:
        places = self._shape.max_num_seqs - len(self._running) - len(self._receiving)
        return places > 0 and sequence.blocks <= self._free

    def _advance(self, sequence: FakeSequence, now: float) -> StreamDelta:
        work = sequence.work
        if sequence.kv is None and self.faults.fails_prefill(work.request_id):
            self._leave(sequence, None)
            self._end_forks(work.stream_id)
            error = WorkerFailed("a scripted fault failed the prefill")
            return ended_by(work.stream_id, error)
        if sequence.kv is None:
            self._remember(sequence)
        self._begin_forks(sequence)
        delta, handoff = sequence.advance(now)
        if delta.finish_reason is not None:
            self._leave(sequence, handoff)
        return delta

    def _remember(self, sequence: FakeSequence) -> None:
        if self._cache is not None:
            self._cache.store(sequence.work.prompt_token_ids)

    def _leave(self, sequence: FakeSequence, handoff: Handoff | None) -> None:
        phase = sequence.work.phase
        del self._running[sequence.work.stream_id]
        if isinstance(phase, PrefillPhase):
            if handoff is not None and self.transfers.ready(phase.transfer_id, handoff):
                return
            self.transfers.drop(phase.transfer_id, "the answer ended at prefill")
        self._free += sequence.give_back()

    def _begin_forks(self, leader: FakeSequence) -> None:
        """The KV of the leader's prompt is here. A prompt's last token is each answer's own: its
        block is computed again."""
        shared = (len(leader.work.prompt_token_ids) - 1) // self._shape.block_size
        for work, submitted in self._forks.take(leader.work.stream_id):
            fork = FakeSequence(
                work, self._model.vocab_size, self._blocks_needed(work) - shared, submitted
            )
            fork.cached_tokens = shared * self._shape.block_size
            leader.share(fork, shared)
            self._waiting.append(fork)

    def _end_forks(self, leader: int) -> None:
        self._ended += self._forks.end(leader)

    def _refuse(self, stream_id: int, error: PdserveError) -> None:
        self._ended.append(ended_by(stream_id, error))

    def _blocks_needed(self, work: Work) -> int:
        """Blocks of `work` from start to end. Raises the error that refuses it."""
        sampling, prompt = work.sampling, len(work.prompt_token_ids)
        if not isinstance(work.phase, AggregatedPhase):
            self._check_transfer(work.phase.transfer_id, work.phase)
        if sampling.n != 1:
            raise UnsupportedField("n must be 1 at the engine", field="n")
        if sampling.structured_output is not None:
            raise UnsupportedField(
                "structured_output is not supported by the fake engine", field="structured_output"
            )
        if not prompt or max(work.prompt_token_ids) >= self._model.vocab_size:
            raise InvalidRequest(
                f"prompt_token_ids must be tokens below {self._model.vocab_size}, at least one",
                field="prompt_token_ids",
            )
        if len(work.resume_token_ids) >= sampling.max_tokens:
            raise InvalidRequest("resume_token_ids reach max_tokens", field="resume_token_ids")
        if prompt + sampling.max_tokens > self._model.max_model_len:
            raise ContextLengthExceeded(
                f"{prompt} prompt tokens and {sampling.max_tokens} more exceed the model's "
                f"{self._model.max_model_len}",
                field="max_tokens",
            )
        is_prefill = isinstance(work.phase, PrefillPhase)
        kept = len(work.resume_token_ids) if is_prefill else sampling.max_tokens
        blocks = self._shape.blocks_for(prompt + kept)
        if blocks > self._shape.total_blocks:
            raise ContextLengthExceeded(
                f"the request needs {blocks} blocks; this worker has {self._shape.total_blocks}",
                field="max_tokens",
            )
        return blocks

    def _check_transfer(self, transfer_id: str, phase: object) -> None:
        if not self._has_kv:
            raise InvalidRequest("KV cannot leave or enter this worker", field="phase")
        if not transfer_id:
            raise InvalidRequest("transfer_id is missing", field="transfer_id")
        if isinstance(phase, PrefillPhase) and self.transfers.is_open(transfer_id):
            raise InvalidRequest(f"transfer {transfer_id} exists already", field="transfer_id")


def ended_by(stream_id: int, error: PdserveError) -> StreamDelta:
    info = ErrorInfo(error.code, error.message, error.field, error.retry_after_s)
    return StreamDelta(stream_id, finish_reason=FinishReason.ERROR, error=info)
