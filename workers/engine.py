"""What a worker asks of an inference engine, and what it promises in return.

Promises of every implementation (tests/unit/workers/test_engine_contract.py holds them to it):

1.  After `submit` returned, exactly one delta of that stream carries a finish reason, and it is
    the last one, unless `cancel` came first: then there may be none. Nothing is lost in silence.
2.  Deltas of one stream arrive in order. All deltas of one engine step arrive in one call of
    `on_step`, on the event loop that called `start`.
3.  `submit` never blocks. A request that the engine refuses ends with FinishReason.ERROR and an
    error that names the field.
4.  Prefill work samples exactly one token, reports it, and holds its blocks until the decode worker
    has them, gave up, or the lease ran out. If that token ends the answer, with a finish reason of
    `stop`, the blocks are freed at once. If it does not, the finish reason is `length`.
5.  Decode work reserves its blocks, then waits for KV and first token from the source. Its first
    delta is the token after those handed over. If the transfer fails, the stream ends with a
    `transfer_failed` error and without tokens: it is never recomputed in silence.
6.  `resume_token_ids` count as generated: they are not reported again, and penalties, seeds, stop
    strings, grammars, minimum and maximum lengths go on as if this engine had sampled them.
7.  `cancel` is idempotent, frees the stream's blocks on both sides of a transfer, and may be called
    for a stream that is not known.
8.  A fork begins, from the bare prompt, when the prompt's KV is in this engine, and shares its
    blocks; from then on it is a stream like any other. Where its leader ends before that, the fork
    ends with a `transfer_failed` error and without tokens.
9.  `export` ends a stream: its last delta has no tokens and says how many it has had in all, as
    `exported_tokens`, with a finish reason of `abort`. Its blocks are held then, as those of
    prefill work are, with the KV of all tokens but the last. Where they cannot be held the last
    delta has an `unavailable` error, and where the stream has ended meanwhile, it is its own.
10. `close` ends everything, at once, and returns with no thread or process of the engine alive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kv_transfer.snapshot import KvState
    from pdserve.step_moments import StepMoments
    from pdserve.types import (
        KvEndpoint,
        KvLedger,
        ModelInfo,
        SamplingParams,
        StreamDelta,
        WorkerLoad,
    )
    from workers.cache_mirror import CacheChange


@dataclass(frozen=True, slots=True)
class PrefillPhase:
    """Compute the prompt's KV and one token for the decode worker that presents `transfer_id`."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class DecodePhase:
    """Receive KV and first token from the worker at `producer_addresses`, then go on.
    Where the handoff is in turn there is `kv_handle`, which the prefill's last delta said, and the
    token is one of `resume_token_ids`. With `live` the source has decoded all of
    `resume_token_ids`: the KV of all before the last of them comes, and no token."""

    transfer_id: str
    producer_addresses: tuple[str, ...]
    producer_instance_id: str
    kv_handle: bytes = field(default=b"", repr=False)
    live: bool = False


@dataclass(frozen=True, slots=True)
class AggregatedPhase:
    """Prefill and decode here."""


Phase = PrefillPhase | DecodePhase | AggregatedPhase


@dataclass(frozen=True, slots=True)
class Fork:
    """One more answer to the same prompt, as a stream of its own."""

    stream_id: int
    seed: int | None


@dataclass(frozen=True, slots=True)
class Work:
    """One request as an engine gets it. `stream_id` is unique in this engine's process. Prefill
    work has no forks."""

    stream_id: int
    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    phase: Phase
    resume_token_ids: tuple[int, ...] = ()
    forks: tuple[Fork, ...] = ()

    @property
    def stream_ids(self) -> list[int]:
        """Its own, and those of its forks."""
        return [self.stream_id, *(fork.stream_id for fork in self.forks)]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a started engine is. `kv` is None where KV cannot leave the engine; `settings` are what
    else bears on its speed, as it is in effect."""

    name: str
    model: ModelInfo
    block_size: int
    total_blocks: int
    max_num_seqs: int
    kv: KvEndpoint | None
    settings: Mapping[str, str] = field(default_factory=dict)


StepCallback = Callable[[Sequence["StreamDelta"]], None]
FailureCallback = Callable[[BaseException], None]
CacheCallback = Callable[["CacheChange"], None]


def ignore_cache(change: CacheChange) -> None:
    """For who does not want to know."""


class Engine(Protocol):
    """See the promises at the top of this file."""

    def on_cache(self, callback: CacheCallback) -> None:
        """Called before `start`: `callback` is called, on the loop, with every change of the prefix
        cache; before the deltas of the step that made it. Never where the cache cannot be told."""
        ...

    async def start(self, on_step: StepCallback, on_failure: FailureCallback) -> EngineInfo:
        """Load the model. `on_failure` is called once, on the loop, if the engine dies later."""
        ...

    def submit(self, work: Work) -> None:
        """Queue `work`; its outcome comes through `on_step`."""
        ...

    def cancel(self, stream_id: int) -> None:
        """Stop a stream; deltas that are on their way may still arrive."""
        ...

    def export(self, stream_id: int, transfer_id: str) -> None:
        """End a stream and hold its blocks for whoever presents `transfer_id`."""
        ...

    def load(self) -> WorkerLoad | None:
        """The load of the last step, or None before the engine has said anything."""
        ...

    def ledger(self) -> KvLedger:
        """Blocks pinned for transfers now."""
        ...

    def kv_state(self) -> KvState | None:
        """The KV plane now, or as it was last seen; None where KV cannot leave the engine. Cheap,
        and nothing waits for it."""
        ...

    def step_moments(self) -> StepMoments | None:
        """What its steps have cost, as far as it remembers; None before it has started. Cheap."""
        ...

    async def close(self) -> None:
        """End everything; idempotent."""
        ...
