"""The interface between a worker and its inference engine, and the engine's promises.

tests/unit/workers/test_fake_engine.py tests these promises on the fake engine, tests/e2e on vLLM:

1.  After `submit`, exactly one delta of the stream has a finish reason, and it is the last delta.
    After `cancel` there may be none.
2.  The deltas of a stream arrive in order. All deltas of one engine step are in one item of
    `results`.
3.  `submit` never blocks. A refused request ends with FinishReason.ERROR and an error that names
    the field.
4.  A prefill samples exactly one token, reports it, and holds its blocks until the decode worker
    has them or cancels, or the hold ends. If that token ends the answer, the finish reason is
    `stop` and the blocks are released at once. Otherwise the finish reason is `length`. A prefill
    that needs `min_cached_tokens`, and finds fewer, fails with a `transfer_failed` error instead.
5.  A decode reserves its blocks, then waits for the KV and the first token from the producer. Its
    first delta has the next token. If the transfer fails, the stream ends with a `transfer_failed`
    error and no tokens; the engine never recomputes the prompt by itself.
6.  `resume_token_ids` count as generated: they are not reported again, and penalties, seeds, stop
    strings, grammars, minimum and maximum lengths continue as if this engine had sampled them.
    Prompt logprobs are reported with the first token of a prefill, never by a decode or with
    resumed tokens.
7.  `cancel` is idempotent, releases the stream's blocks on both sides of a transfer, and ignores
    unknown streams.
8.  `export` ends a stream. Its last delta has no tokens, finish reason `abort`, and the total
    number of generated tokens in `exported_tokens`. Its blocks are then held like those of a
    prefill, with the KV of all tokens but the last. If they cannot be held, the last delta has an
    `unavailable` error. A stream that has ended meanwhile keeps its own last delta.
9.  `start` returns after a self-test: one prompt, and several in one step. It raises WorkerFailed
    with the reason if that fails. Its steps count for predictions, and leave no other trace.
10. An encode engine computes no tokens. The stream of an `EncodePhase` ends with finish reason
    `stop` and a report when all embeddings are on offer, or with an error.
11. After `freeze` the engine computes nothing until `thaw`, and a stream that it has kept continues
    then, also if the weights were changed meanwhile. Its KV of before stays as it is; nobody finds
    blocks that it caches later, no tier stores them, and it is not exported.
12. `close` ends all streams and returns when no thread or process of the engine is left.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from pdserve.errors import ContextLengthExceeded, InvalidRequest, TransferFailed, Unavailable
from pdserve.types import ErrorInfo, FinishReason, StreamDelta

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from kv_transfer.image_features import ImageFeatureSource
    from kv_transfer.protocol.snapshot import KvState
    from pdserve.errors import PdserveError
    from pdserve.model.weight_deltas import WeightFiles
    from pdserve.types import (
        Adapter,
        EngineLimits,
        KvEndpoint,
        KvLedger,
        MediaItem,
        ModelInfo,
        ReasoningGate,
        SamplingParams,
        WorkerLoad,
    )
    from pdserve.v1 import worker_pb2 as w
    from workers.metering.worker_account import BusyTime


@dataclass(frozen=True, slots=True)
class PrefillPhase:
    """Compute the prompt's KV and one token for the decode worker that presents `transfer_id`.
    Fetch the embeddings of the prompt's images from `embeddings`; compute missing ones. With fewer
    than `min_cached_tokens` of the prompt cached, compute nothing and fail. Such a request only
    copies cached KV to another worker.
    """

    transfer_id: str
    min_cached_tokens: int = 0
    embeddings: ImageFeatureSource | None = None


@dataclass(frozen=True, slots=True)
class DecodePhase:
    """Receive KV and first token from the worker at `producer_addresses`, then continue.
    `producer_stage_layers`: of a producer with several pipeline stages (KvEndpoint). With `live`
    the producer has decoded all `resume_token_ids`; it sends the KV of all except the last, and no
    token.
    """

    transfer_id: str
    producer_addresses: tuple[str, ...]
    producer_instance_id: str
    live: bool = False
    producer_stage_layers: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class AggregatedPhase:
    """Prefill and decode on this worker."""


@dataclass(frozen=True, slots=True)
class PoolingPhase:
    """Compute the prompt's embedding, or a cross-encoder's score of two texts. The second text
    starts at token `second_text_at`."""

    second_text_at: int = 0


@dataclass(frozen=True, slots=True)
class EncodePhase:
    """Compute the embeddings of the prompt's images for the worker that presents `transfer_id`
    (ImageFeatureSource)."""

    transfer_id: str


Phase = PrefillPhase | DecodePhase | AggregatedPhase | PoolingPhase | EncodePhase


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
    cache_salt: str = field(default="", repr=False)  # a cached prefix needs an equal salt
    reasoning_gate: ReasoningGate | None = None
    media: tuple[MediaItem, ...] = ()  # in order of their offsets
    # Expected time until the session's next turn, 0 if unknown. None without a session.
    next_turn_s: float | None = None
    no_tiers: bool = False  # its KV must not be stored in tiers
    scored_from: int = 0  # first prompt token whose logprob is reported

    @property
    def has_all_media(self) -> bool:
        """True if all media have their data, so that an engine can compute the prompt."""
        return all(item.data for item in self.media)

    @property
    def prompt_logprobs(self) -> int | None:
        """Number of alternatives to report for each prompt token; None for no prompt logprobs."""
        is_new = not self.resume_token_ids and not isinstance(self.phase, DecodePhase)
        return self.sampling.prompt_logprobs if is_new else None

    @property
    def needs_whole_prompt(self) -> bool:
        """True if the experts of all prompt tokens are wanted. An engine knows those that it
        computes, so it must not use cached KV."""
        is_new = not self.resume_token_ids and not isinstance(self.phase, DecodePhase)
        return self.sampling.routed_experts and is_new


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Description of a started engine.

    `kv` is None if KV cannot leave the engine. `settings`: other effective engine settings that
    affect speed, for display. `unsupported_fields`: sampling parameters that the engine refuses.
    `device`: name of its GPUs. `gpus`: their number, 0 if it computes on CPUs.
    """

    name: str
    model: ModelInfo
    block_size: int
    total_blocks: int
    limits: EngineLimits
    kv: KvEndpoint | None
    settings: Mapping[str, str] = field(default_factory=dict)
    unsupported_fields: tuple[str, ...] = ()
    device: str = "cpu"
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class CacheChange:
    """A change of the prefix cache, by the chain hashes of blocks (pdserve/model/prefix_hash.py).

    Apply `removed` before `stored`; each stored block follows its parent. `removed` has only blocks
    that were reported as stored. `tier_removed` and `tier_stored` are blocks in host memory.
    """

    removed: tuple[int, ...] = ()
    stored: tuple[int, ...] = ()
    tier_removed: tuple[int, ...] = ()
    tier_stored: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.removed or self.stored or self.tier_removed or self.tier_stored)


@dataclass(frozen=True, slots=True)
class StepResult:
    """One report of an engine. Apply `cache`, a change of the prefix cache, before the deltas;
    engines that do not know their changes never report one. `failure`: reported once, by an engine
    that died; later results only refuse work."""

    deltas: Sequence[StreamDelta] = ()
    cache: CacheChange | None = None
    failure: BaseException | None = None


class StepResults:
    """The results of an engine, an asynchronous iterator for one reader, which ends when the engine
    is closed. Used on the event loop only."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[StepResult | None] = asyncio.Queue()

    def put(self, result: StepResult) -> None:
        self._queue.put_nowait(result)

    def close(self) -> None:
        """End the iteration. Idempotent."""
        self._queue.put_nowait(None)

    def __aiter__(self) -> StepResults:
        return self

    async def __anext__(self) -> StepResult:
        result = await self._queue.get()
        if result is None:
            raise StopAsyncIteration
        return result


def ignore_progress(what: str) -> None:
    """Do nothing. A callback for the progress of an engine's start."""


class Engine(Protocol):
    """An inference engine. See the promises at the top of this file. The engine adds the duration
    of every step to `busy`; the worker opens and closes the shares of requests there."""

    @property
    def busy(self) -> BusyTime: ...

    @property
    def results(self) -> StepResults: ...

    async def start(self) -> EngineInfo:
        """Load the model. Afterwards `results` yields."""
        ...

    def submit(self, work: Work) -> None: ...

    def cancel(self, stream_id: int) -> None:
        """Stop a stream. Deltas in flight may still arrive."""
        ...

    def export(self, stream_id: int, transfer_id: str) -> None:
        """End a stream and hold its blocks for the consumer that presents `transfer_id`."""
        ...

    def load(self) -> WorkerLoad | None:
        """Return the load after the last step, or None before the first report."""
        ...

    def ledger(self) -> KvLedger:
        """Return the blocks currently pinned for transfers."""
        ...

    def kv_state(self) -> KvState | None:
        """Return the latest known state of KV transfers without waiting; None if KV cannot leave
        the engine."""
        ...

    async def render(self, request: w.RenderRequest) -> w.RenderResponse:
        """Turn a prompt with images into tokens and processed images. Raises InvalidRequest naming
        a bad image, and Overloaded if too many prompts wait."""
        ...

    async def load_adapter(self, adapter: Adapter) -> None:
        """Load a LoRA adapter and keep it until `unload_adapter`. Raises InvalidRequest if the
        engine cannot load it."""
        ...

    async def unload_adapter(self, key: str) -> None:
        """Unload an adapter that no request uses. Ignore an unknown key."""
        ...

    async def check_weights(self, files: WeightFiles) -> str:
        """Return the digest of a checkpoint. Raises InvalidRequest if the engine cannot take its
        weights."""
        ...

    async def stage_weights(self, files: WeightFiles) -> None:
        """Load checked weights beside those in use, if the engine can and has the memory, so that
        `update_weights` takes less time. Requests are served meanwhile. It keeps them until
        `update_weights` or `unstage_weights`."""
        ...

    def unstage_weights(self) -> None:
        """Free weights that were loaded in advance. Idempotent."""
        ...

    async def freeze(self, stream_ids: Collection[int]) -> frozenset[int]:
        """Compute nothing until `thaw`. Return those of these streams that decode here, and can
        therefore keep their KV if the weights change: none if the engine cannot do that. Returns
        after the results of all steps have been put."""
        ...

    def thaw(self) -> None:
        """Compute again. Idempotent."""
        ...

    async def update_weights(self, files: WeightFiles) -> Mapping[int, int]:
        """Load weights, and forget all cached KV. The engine has no streams but those that it keeps
        since `freeze`: return the number of positions of each whose KV is computed. After an error
        the weights are unknown."""
        ...

    async def close(self) -> None:
        """End all streams and release the engine. Idempotent."""
        ...


NO_LORA = "the engine takes no LoRA adapters; set worker.engine_args.enable_lora to true"


def check_work(
    work: Work, model: ModelInfo, unsupported_fields: tuple[str, ...], *, has_kv: bool
) -> None:
    """Raise an error if no engine of this model can run `work`."""
    sampling, prompt = work.sampling, len(work.prompt_token_ids)
    if not prompt:
        raise InvalidRequest("prompt_token_ids is empty", field="prompt_token_ids")
    for name in ("prompt_token_ids", "resume_token_ids"):
        ids = getattr(work, name)
        if ids and not 0 <= min(ids) <= max(ids) < model.vocab_size:
            raise InvalidRequest(
                f"{name} has a token outside the vocabulary of {model.vocab_size}", field=name
            )
    answer = 0 if isinstance(work.phase, PoolingPhase) else sampling.max_tokens
    if prompt + answer > model.max_model_len:
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
    _check_media(Counter(item.modality for item in work.media), model, field="media")
    if not isinstance(work.phase, DecodePhase) and not work.has_all_media:
        raise TransferFailed("the prompt must be computed, and media has no data", field="media")
    if sampling.n != 1:
        raise InvalidRequest(f"n must be 1 on a worker, not {sampling.n}", field="n")
    sampling.check_supported(unsupported_fields)
    if not has_kv and isinstance(work.phase, PrefillPhase | DecodePhase):
        raise InvalidRequest("this worker's engine cannot exchange KV", field="phase")


def check_render(request: w.RenderRequest, model: ModelInfo) -> None:
    """Raise an error if no engine of this model can render the prompt."""
    if request.WhichOneof("prompt") is None:
        raise InvalidRequest("prompt is missing", field="prompt")
    if request.WhichOneof("prompt") == "chat":
        chat = request.chat
        _check_json(chat.messages_json, list[_Message], field="messages_json")
        _check_json(chat.tools_json or "[]", list[dict[str, Any]], field="tools_json")
        _check_json(chat.variables_json or "{}", dict[str, Any], field="variables_json")
    _check_media(Counter(image=len(request.images)), model, field="images")


class _ContentPart(msgspec.Struct):
    type: str
    text: str = ""


class _Message(msgspec.Struct):
    """The fields of a message that every engine reads. Chat templates may read more."""

    role: str
    content: str | list[_ContentPart] | None = None


def _check_json(text: str, shape: Any, *, field: str) -> None:
    try:
        msgspec.json.decode(text, type=shape)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"chat.{field}: {error}", field=f"chat.{field}") from error


def _check_media(counts: Counter[str], model: ModelInfo, *, field: str) -> None:
    for modality, count in counts.items():
        if count > (most := model.modalities.get(modality, 0)):
            text = f"the prompt has {count} items of modality {modality}; the model takes {most}"
            raise InvalidRequest(text, field=field)


def ended_by(stream_id: int, error: PdserveError) -> StreamDelta:
    """Return the last delta of a stream that ends with `error`."""
    info = ErrorInfo(error.code, error.message, error.field, error.retry_after_s)
    return StreamDelta(stream_id, finish_reason=FinishReason.ERROR, error=info)


def not_exported(stream_id: int) -> StreamDelta:
    """Return the last delta of a stream whose blocks cannot be held."""
    return ended_by(stream_id, Unavailable("the KV of the stream is not complete here"))
