"""What a worker asks of an inference engine, and what the engine promises.

tests/unit/workers/test_fake_engine.py tests these promises on the fake engine, tests/e2e on vLLM:

1.  After `submit`, exactly one delta of the stream carries a finish reason, and it is the last one,
    unless `cancel` came first: then there may be none.
2.  The deltas of a stream arrive in order. All deltas of one engine step arrive in one call of
    `on_step`, on the event loop that called `start`.
3.  `submit` never blocks. A request that the engine refuses ends with FinishReason.ERROR and an
    error that names the field.
4.  A prefill samples exactly one token, reports it, and holds its blocks until the decode worker
    has them, gave up, or the lease ended. If that token ends the answer, with finish reason `stop`,
    the blocks are released at once. Otherwise the finish reason is `length`.
5.  A decode reserves its blocks, then waits for the KV and the first token from the producer. Its
    first delta is the token after that one. If the transfer fails, the stream ends with a
    `transfer_failed` error and without tokens; the engine never recomputes by itself.
6.  `resume_token_ids` count as generated: they are not reported again, and penalties, seeds, stop
    strings, grammars, minimum and maximum lengths continue as if this engine had sampled them.
    Logprobs of the prompt are reported with the first token of a prefill, never of a decode or with
    resumed tokens.
7.  `cancel` is idempotent, releases the stream's blocks on both sides of a transfer, and ignores
    unknown streams.
8.  `export` ends a stream. Its last delta has no tokens, `exported_tokens` set to the number of
    tokens it generated in all, and finish reason `abort`. Its blocks are then held as those of a
    prefill, with the KV of all tokens but the last. If they cannot be held, the last delta has an
    `unavailable` error; if the stream has ended meanwhile, it has its own last delta.
9.  `close` ends everything and returns when no thread or process of the engine is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from pdserve.errors import ContextLengthExceeded, InvalidRequest
from pdserve.types import ErrorInfo, FinishReason, StreamDelta

if TYPE_CHECKING:
    from kv_transfer.snapshot import KvState
    from pdserve.errors import PdserveError
    from pdserve.types import (
        Adapter,
        KvEndpoint,
        KvLedger,
        ModelInfo,
        ReasoningGate,
        SamplingParams,
        WorkerLoad,
    )
    from workers.accounting import BusyTime


@dataclass(frozen=True, slots=True)
class PrefillPhase:
    """Compute the prompt's KV and one token for the decode worker that presents `transfer_id`."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class DecodePhase:
    """Receive KV and first token from the worker at `producer_addresses`, then continue.

    Where prefill and decode run one after the other, `kv_handle` is what the prefill's last delta
    said, and the first token is in `resume_token_ids`. With `live` the producer has decoded all of
    `resume_token_ids`: the KV of all but the last of them comes, and no token.
    """

    transfer_id: str
    producer_addresses: tuple[str, ...]
    producer_instance_id: str
    kv_handle: bytes = field(default=b"", repr=False)
    live: bool = False


@dataclass(frozen=True, slots=True)
class AggregatedPhase:
    """Prefill and decode here."""


@dataclass(frozen=True, slots=True)
class PoolingPhase:
    """Compute the prompt's embedding, or a cross-encoder's score of a pair of texts; the second one
    begins at the token `second_text_at`."""

    second_text_at: int = 0


Phase = PrefillPhase | DecodePhase | AggregatedPhase | PoolingPhase


@dataclass(frozen=True, slots=True)
class Work:
    """One request for an engine. `stream_id` is unique in the engine's process."""

    stream_id: int
    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    phase: Phase
    resume_token_ids: tuple[int, ...] = ()
    adapter: str = ""  # key of a loaded LoRA adapter
    cache_salt: str = field(default="", repr=False)  # requests with another share no cached prefix
    reasoning_gate: ReasoningGate | None = None

    @property
    def prompt_logprobs(self) -> int | None:
        """How many alternatives to report for each token of the prompt, None for no logprobs."""
        is_new = not self.resume_token_ids and not isinstance(self.phase, DecodePhase)
        return self.sampling.prompt_logprobs if is_new else None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a started engine is. `kv` is None if KV cannot leave the engine; `settings` are other
    settings in effect that bear on its speed; `max_loras` is how many LoRA adapters run at a time,
    0 if it takes none; `unsupported_fields` are sampling parameters that it refuses."""

    name: str
    model: ModelInfo
    block_size: int
    total_blocks: int
    max_num_seqs: int
    kv: KvEndpoint | None
    settings: Mapping[str, str] = field(default_factory=dict)
    max_loras: int = 0
    unsupported_fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CacheChange:
    """A change of the prefix cache, by the chain hashes of blocks (pdserve/prefix_hash.py).

    First `removed` go, then `stored` come, each block after its parent. `removed` holds only blocks
    that were reported as stored. `tier_removed` and `tier_stored` are of blocks in host memory.
    """

    removed: tuple[int, ...] = ()
    stored: tuple[int, ...] = ()
    tier_removed: tuple[int, ...] = ()
    tier_stored: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.removed or self.stored or self.tier_removed or self.tier_stored)


StepCallback = Callable[[Sequence[StreamDelta]], None]
FailureCallback = Callable[[BaseException], None]
CacheCallback = Callable[[CacheChange], None]


def ignore_cache(change: CacheChange) -> None:
    """A CacheCallback that does nothing."""


def ignore_progress(what: str) -> None:
    """Ignore what the start of an engine does."""


class Engine(Protocol):
    """See the promises at the top of this file. `busy` gets the duration of every step; its owner
    opens and closes the shares of requests."""

    @property
    def busy(self) -> BusyTime: ...

    def on_cache(self, callback: CacheCallback) -> None:
        """Report every change of the prefix cache to `callback`, on the loop, before the deltas of
        the step that made it. Called before `start`. Engines that cannot tell never call it."""
        ...

    async def start(self, on_step: StepCallback, on_failure: FailureCallback) -> EngineInfo:
        """Load the model. `on_failure` is called once, on the loop, if the engine dies later."""
        ...

    def submit(self, work: Work) -> None: ...

    def cancel(self, stream_id: int) -> None:
        """Stop a stream; deltas that are on their way may still arrive."""
        ...

    def export(self, stream_id: int, transfer_id: str) -> None:
        """End a stream and hold its blocks for whoever presents `transfer_id`."""
        ...

    def load(self) -> WorkerLoad | None:
        """Return the load after the last step, or None before the first report."""
        ...

    def ledger(self) -> KvLedger:
        """Return the blocks that are pinned for transfers now."""
        ...

    def kv_state(self) -> KvState | None:
        """Return the state of KV transfers as last seen, without waiting; None if KV cannot leave
        the engine."""
        ...

    async def load_adapter(self, adapter: Adapter) -> None:
        """Load a LoRA adapter and keep it until it is unloaded. Raises InvalidRequest if the engine
        cannot take it."""
        ...

    async def unload_adapter(self, key: str) -> None:
        """Unload an adapter that no request uses. Unknown ones are ignored."""
        ...

    async def close(self) -> None:
        """End everything. Idempotent."""
        ...


NO_LORA = "the engine takes no LoRA adapters; set worker.engine_args.enable_lora to true"


def check_work(work: Work, model: ModelInfo, *, has_kv: bool) -> None:
    """Raise the error that refuses `work` on any engine of this model."""
    sampling, prompt = work.sampling, len(work.prompt_token_ids)
    if not prompt:
        raise InvalidRequest("prompt_token_ids is empty", field="prompt_token_ids")
    for name in ("prompt_token_ids", "resume_token_ids"):
        ids = getattr(work, name)
        if ids and not 0 <= min(ids) <= max(ids) < model.vocab_size:
            raise InvalidRequest(
                f"{name} has a token outside the vocabulary of {model.vocab_size}", field=name
            )
    if prompt + sampling.max_tokens > model.max_model_len:
        raise ContextLengthExceeded(
            f"the prompt has {prompt} tokens and max_tokens is {sampling.max_tokens}, "
            f"which together exceed the model's context of {model.max_model_len}",
            field="prompt_token_ids" if prompt >= model.max_model_len else "max_tokens",
        )
    if len(work.resume_token_ids) >= sampling.max_tokens:
        raise InvalidRequest(
            f"resume_token_ids has {len(work.resume_token_ids)} tokens, and max_tokens is "
            f"{sampling.max_tokens}",
            field="resume_token_ids",
        )
    if sampling.n != 1:
        raise InvalidRequest(f"n must be 1 on a worker, not {sampling.n}", field="n")
    if not has_kv and isinstance(work.phase, PrefillPhase | DecodePhase):
        raise InvalidRequest("this worker's engine cannot exchange KV", field="phase")


def ended_by(stream_id: int, error: PdserveError) -> StreamDelta:
    """Return the last delta of a stream that ends with `error`."""
    info = ErrorInfo(error.code, error.message, error.field, error.retry_after_s)
    return StreamDelta(stream_id, finish_reason=FinishReason.ERROR, error=info)
