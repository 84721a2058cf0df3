"""Values shared by router and workers. This module uses no I/O, clock or protobuf."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from itertools import compress
from operator import attrgetter, ne
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct, structs

from pdserve.errors import ErrorInfo as ErrorInfo  # part of this vocabulary
from pdserve.errors import InvalidRequest, UnsupportedField

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import IO


class Role(StrEnum):
    """The role of a worker: the phases that it runs."""

    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "aggregated"
    POOLING = "pooling"
    ENCODE = "encode"


# The roles that generate tokens.
GENERATING = (Role.PREFILL, Role.DECODE, Role.AGGREGATED)


class ServiceClass(StrEnum):
    """Priority class of a request. Interactive requests are served before batch requests."""

    INTERACTIVE = "interactive"
    BATCH = "batch"


class FinishReason(StrEnum):
    """Why a stream ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    CONTENT_FILTER = "content_filter"  # a guard refused the answer


class Constraint(StrEnum):
    """Kinds of structured output that vLLM supports."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"  # JSON of an xgrammar structural tag, from vLLM's parsers


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A constraint on the answer. `value` is the JSON text of a schema, a pattern or a grammar; the
    kind CHOICE has `choices` instead."""

    kind: Constraint
    value: str = ""
    choices: tuple[str, ...] = ()


def _refuse(field_name: str, reason: str) -> None:
    raise InvalidRequest(f"{field_name} {reason}", field=field_name)


@dataclass(slots=True)
class SamplingParams:
    """Sampling parameters as in vLLM. Construction raises InvalidRequest naming the invalid
    field."""

    max_tokens: int = 16
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    structured_output: StructuredOutput | None = None
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    routed_experts: bool = False

    def __post_init__(self) -> None:
        values = _RANGED(self)
        is_set = map(ne, values, _RANGED_DEFAULTS)  # few are, in most requests
        for value, (name, low, high) in compress(zip(values, RANGES, strict=True), is_set):
            # A NaN fails both comparisons.
            if value is not None and not low <= value <= high:
                _refuse(name, f"must be between {low:g} and {high:g}, not {value}")
        if self.top_p <= 0:
            _refuse("top_p", f"must be above 0, not {self.top_p}")
        if self.repetition_penalty <= 0:
            _refuse("repetition_penalty", f"must be above 0, not {self.repetition_penalty}")
        if self.min_tokens > self.max_tokens:
            _refuse("min_tokens", f"is {self.min_tokens}, more than max_tokens ({self.max_tokens})")
        if not all(self.stop):
            _refuse("stop", "must not hold an empty string")
        if len(self.stop) > MAX_STOP_STRINGS:
            _refuse("stop", f"has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are taken")
        if self.logit_bias and any(not -100 <= x <= 100 for x in self.logit_bias.values()):
            _refuse("logit_bias", "values must be between -100 and 100")
        if self.routed_experts and self.n > MAX_ANSWERS_WITH_EXPERTS:
            most = MAX_ANSWERS_WITH_EXPERTS
            _refuse("n", f"must be at most {most} with routed_experts, not {self.n}")
        if self.n > 1 and self._has_seed and not 0 <= (self.seed or 0) <= MAX_SEED - self.n:
            _refuse("seed", f"must be between 0 and {MAX_SEED - self.n} where n is {self.n}")

    @property
    def _has_seed(self) -> bool:
        # vLLM treats a seed of -1 as no seed.
        return self.seed is not None and self.seed != -1

    def of_choice(self, index: int) -> SamplingParams:
        """Return the parameters of the answer with this index of `n`. Its seed is `seed + index`,
        as in vLLM (ParentRequest in vllm/v1/engine/parallel_sampling.py)."""
        seed = (self.seed or 0) + index if self._has_seed else None
        prompt_logprobs = None if index else self.prompt_logprobs
        return replace(self, n=1, seed=seed, prompt_logprobs=prompt_logprobs)

    def check_supported(self, unsupported_fields: tuple[str, ...]) -> None:
        """Raise UnsupportedField if one of these fields is set."""
        for field_name in unsupported_fields:
            is_set = self._has_seed if field_name == "seed" else getattr(self, field_name, None)
            if is_set:
                text = f"'{field_name}' is not supported by the engine of this model"
                raise UnsupportedField(text, field=field_name)


MAX_STOP_STRINGS = 16
MAX_ANSWERS_WITH_EXPERTS = 16  # a router keeps the experts of each until it ends
MODALITIES = ("image",)
MAX_MEDIA_HASH = 128  # characters
MAX_MEDIA_METADATA = 2048  # bytes of one item
MAX_SEED = (1 << 63) - 1
MAX_LOGPROBS = 20
RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_tokens", 1, 1 << 30),
    ("n", 1, 128),
    ("temperature", 0, 100),
    ("top_p", 0, 1),
    ("top_k", -1, 1 << 30),
    ("min_p", 0, 1),
    ("seed", -(1 << 63), MAX_SEED),
    ("min_tokens", 0, 1 << 30),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("repetition_penalty", 0, 100),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)
_RANGED = attrgetter(*(name for name, _, _ in RANGES))
_DEFAULTS = {x.name: x.default for x in fields(SamplingParams)}
_RANGED_DEFAULTS = tuple(_DEFAULTS[name] for name, _, _ in RANGES)


class TokenLogprob(Struct, frozen=True):
    """One token at one position. `rank` 1 is the most likely token. Rank 0 marks the first prompt
    token, which has no logprob."""

    token_id: int
    text: str
    logprob: float
    rank: int


class PositionLogprobs(Struct, frozen=True):
    """The sampled token or prompt token, and the requested alternatives, best first."""

    sampled: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The experts of successive tokens of a mixture-of-experts model: for each token and layer the
    ids of `per_token` experts, each of `id_bytes` bytes, little-endian."""

    layers: int
    per_token: int
    id_bytes: int
    ids: bytes = field(default=b"", repr=False)


class TransferReport(Struct):
    """A finished KV transfer. `transfer_s`: time during which bytes were moved. `exposed_s`: the
    part of it after prefill ended. `digest_mismatches`: chunks that were sent again."""

    transfer_s: float
    exposed_s: float
    bytes: int
    blocks: int
    transport: str
    digest_mismatches: int = 0

    def merged_with(self, other: TransferReport) -> TransferReport:
        """Return the report of a transfer whose two halves filled the same blocks concurrently."""
        return TransferReport(
            max(self.transfer_s, other.transfer_s),
            max(self.exposed_s, other.exposed_s),
            self.bytes + other.bytes,
            max(self.blocks, other.blocks),
            "+".join(sorted({*self.transport.split("+"), *other.transport.split("+")})),
            self.digest_mismatches + other.digest_mismatches,
        )


class PhaseReport(Struct):
    """The cost of a request on one worker. `prefill_busy_s` and `decode_busy_s` are its shares of
    the engine's steps, `energy_j` of their energy; None if energy is not measured. `encode_s`: time
    for its images on an encode worker. `wanted_images`: images whose embeddings a prefill worker
    requested, because its caches lacked them; `fetched_images`: how many arrived."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    cached_tokens: int = 0
    transfer: TransferReport | None = None
    prefill_busy_s: float = 0.0
    decode_busy_s: float = 0.0
    energy_j: float | None = None
    encode_s: float = 0.0
    fetched_images: int = 0
    wanted_images: int = 0


class StreamDelta(Struct):
    """The output of one engine step for one request. `prompt_logprobs`, if requested, are in the
    first delta of a prefill. The last delta has a finish reason and a report. That of an exported
    stream also has the number of output tokens (`exported_tokens`). A pooling request has a single
    delta, with the `embedding` (float32, little-endian). `routed_experts`, if requested,
    are those of the token before each of `token_ids`, and with the first token of an answer those
    of its whole prompt. A delta with `weights_switch` has nothing else."""

    stream_id: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    report: PhaseReport | None = None
    error: ErrorInfo | None = None
    exported_tokens: int = 0
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    embedding: bytes = b""
    routed_experts: RoutedExperts | None = None
    weights_switch: WeightsSwitch | None = None


class ToolCallDelta(Struct, frozen=True):
    """A piece of a tool call. The first delta of a call has its id and name. The `arguments` of all
    deltas together are one JSON text."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class Usage(Struct):
    """Token counts as defined by the OpenAI API."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0  # part of completion_tokens, if reasoning is parsed
    inference_geo: str = ""  # the regions of the receipt as one word


class TokenSpan(Struct, frozen=True):
    """The tokens of an answer from `start` to before `end` were sampled by `worker` with the
    weights `version`. `answer`: its index among the answers of the request. `stale_kv_tokens`:
    positions of prompt and answer that these tokens attended to, with KV of older weights."""

    version: str
    worker: str
    start: int
    end: int
    answer: int = 0
    stale_kv_tokens: int = 0


class ModelChoice(Struct, frozen=True):
    """The model that a virtual model chose, by the rule with this name. `skipped`: the rules before
    it, and models that failed, with the reasons. `discarded_model`: its answer was held back and
    did not pass; `discarded_cost` is predicted if that answer was stopped."""

    virtual_model: str = ""
    model: str = ""
    rule: str = ""
    skipped: tuple[str, ...] = ()
    discarded_model: str = ""
    discarded_reason: str = ""
    discarded_tokens: int = 0
    discarded_cost: float | None = None
    discarded_cost_is_predicted: bool = False


class Receipt(Struct):
    """The cost of one request by phase, and the workers that ran it. `predicted_ttft_s`: predicted
    time from placement to the first token, 0 if unknown. `cost`: in the unit of router.prices, None
    if a worker has no price. `energy_j`: None if a worker measures no energy. `images`: number of
    images in the prompt. `render_s`: time to fetch and render them, before the request was queued.
    `fetched_tokens`: tokens that were not computed, because their KV was copied from the cache of
    `fetched_from` before prefill, in `fetch_s`.
    `fetched_images`: number of images whose embeddings `encode_worker` sent; encoding took
    `encode_s`. `regions`: the labels of all workers that had data of the request. `forwarded_to`:
    the other region that served it, or "". `spans`: who sampled the answer's tokens, if the weights
    of its model have been updated. `stale_kv_tokens`: the most of an answer's spans; of several
    answers the sum.
    `model_choice`: of a request for a virtual model; `cost` is of the model that answered.
    """

    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    exposed_transfer_s: float = 0.0
    decode_s: float = 0.0
    transfer_bytes: int = 0
    transfer_blocks: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""
    transport: str = ""
    cached_tokens: int = 0
    first_token_source: str = ""
    fallbacks: tuple[str, ...] = ()
    predicted_ttft_s: float = 0.0
    cost: float | None = None
    energy_j: float | None = None
    images: int = 0
    render_s: float = 0.0
    fetched_tokens: int = 0
    fetched_blocks: int = 0
    fetched_from: str = ""
    fetch_s: float = 0.0
    fetched_images: int = 0
    encode_worker: str = ""
    encode_s: float = 0.0
    regions: tuple[str, ...] = ()
    forwarded_to: str = ""
    spans: tuple[TokenSpan, ...] = ()
    model_choice: ModelChoice | None = None
    stale_kv_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Adapter:
    """One revision of a LoRA adapter of `model`. `digest`: of the files in `path`."""

    name: str
    digest: str
    path: str
    model: str

    @property
    def key(self) -> str:
        """The name in engines and prefix hashes. It includes the digest, so that another revision
        cannot reuse KV of this one."""
        return f"{self.name}@{self.digest}"


class QuiesceMode(StrEnum):
    """What happens to open answers while the weights of their workers change. WAIT: they end by
    themselves. ABORT: they end with the tokens that they have. KEEP: they continue after the
    update, computed again."""

    WAIT = "wait"
    ABORT = "abort"
    KEEP = "keep"


class StaleKv(StrEnum):
    """What happens to an answer with tokens of older weights. RECOMPUTE: it continues with the new
    weights, its prompt and tokens computed again. ALLOW: it continues with the KV that it has, and
    is computed again where that is lost. ABORT: it ends with the tokens that it has."""

    RECOMPUTE = "recompute"
    ALLOW = "allow"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """The weights of a model after an update in place. `sequence`: number of updates, 0 at the
    start. `version`: the name that the trainer gave them. `digest`: of the files in `path`."""

    sequence: int = 0
    version: str = ""
    path: str = ""
    digest: str = ""

    @property
    def identity(self) -> tuple[int, str]:
        """Order of updates, and what two workers need to have in common to exchange KV."""
        return self.sequence, self.digest

    @property
    def cache_prefix(self) -> str:
        """Prefix of the cache salt of requests, so that KV of other weights is never found. A
        client's salt has no NUL character, and a region's name is not empty."""
        return f"\0{self.sequence} {self.version} {self.digest}\0" if self.sequence else ""


@dataclass(frozen=True, slots=True)
class WeightsSwitch:
    """Later tokens of a stream are sampled with `weights`. The KV of its first `stale_kv_tokens`
    positions, of prompt and answer, is of older ones."""

    weights: ModelWeights
    stale_kv_tokens: int


@dataclass(frozen=True, slots=True)
class MediaItem:
    """A processed image of a prompt. `hash` identifies its content and the processor's options.

    `offset`, `length`: its placeholder tokens in the prompt. `is_embed`: which of these tokens get
    embeddings, one bit each, lowest bit first; empty means all. `metadata`: the fields that decode
    needs. `data`: all fields, empty if only decode gets the item.
    """

    modality: str
    hash: str
    offset: int
    length: int
    is_embed: bytes = b""
    metadata: bytes = field(default=b"", repr=False)
    data: bytes = field(default=b"", repr=False)

    def without_data(self) -> MediaItem:
        """Return the item as sent to decode workers."""
        return replace(self, data=b"")


class ImageData(Protocol):
    """The data of a prompt's images (pdserve/model/pixels.py)."""

    @property
    def size(self) -> int: ...
    def move_to(self, file: IO[bytes]) -> None: ...
    async def read(self) -> tuple[MediaItem, ...]: ...


@dataclass(frozen=True, slots=True)
class ReasoningGate:
    """Delays the constraint on an answer until its reasoning has ended. `parser` is the name of the
    vLLM reasoning parser that finds the end, `kwargs_json` its arguments."""

    parser: str
    kwargs_json: str


@dataclass(frozen=True, slots=True)
class Parsing:
    """Parameters for parsing tool calls and reasoning in an answer. `tool_parser` and
    `reasoning_parser` are names of vLLM's parsers, "" for none. `tokenizer` is
    ModelInfo.tokenizer, `tokenizer_files` are its files. `request_json` is the body of vLLM's chat
    request without the conversation. `reasoning_kwargs_json` are the reasoning parser's
    arguments."""

    tokenizer: str
    tokenizer_files: Mapping[str, bytes] = field(repr=False)
    tool_parser: str
    reasoning_parser: str
    request_json: str
    reasoning_kwargs_json: str


Regions = frozenset[str] | None
"""The regions in which the bytes of a request may be; None: anywhere."""


class GenerateRequest(Struct, frozen=True):
    """A tokenised and validated request in the router. `deadline` is a time on the event loop's
    clock (see pdserve.net.deadline). A lower `priority` is served earlier, as in vLLM. `tenant` is
    empty if no API keys are required. `resume` are answer tokens that the client already has from
    another router; `resume_text` is their text, if guards check answers. Only requests with the
    same `cache_salt` share cached prefixes. `media`: the prompt's images without their data, which
    `pixels` reads; it took `render_s` to fetch and render them. `session`: the client's id of the
    conversation, empty if it sent none; `next_turn_s`: expected time until its next turn, 0 if not
    known. `regions`: see router/placement/values.py. `storage`: where its KV may be kept in
    tiers. `from_region`: the region whose router forwarded it here, or "". `stale_kv`: None for
    `router.weights.stale_kv`."""

    request_id: str
    model: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    deadline: float | None = None
    priority: int = 0
    service_class: ServiceClass = ServiceClass.INTERACTIVE
    tenant: str = ""
    traceparent: str = ""  # from the client, or of the router's own span
    resume: tuple[int, ...] = ()
    resume_text: str = ""
    adapter: Adapter | None = None
    cache_salt: str = ""
    parsing: Parsing | None = None
    reasoning_gate: ReasoningGate | None = None
    second_text_at: int = 0  # token index of the second text of a pair, for a cross-encoder
    media: tuple[MediaItem, ...] = ()
    pixels: ImageData | None = None
    render_s: float = 0.0
    session: str = ""
    next_turn_s: float = 0.0
    regions: Regions = None
    storage: Regions = None
    from_region: str = ""
    stale_kv: StaleKv | None = None

    def __repr__(self) -> str:
        return f"GenerateRequest {self.request_id}"  # prompts and salts must not get into logs

    @property
    def served_name(self) -> str:
        """The requested name: the adapter's if there is one, else the model's."""
        return self.model if self.adapter is None else self.adapter.name

    @property
    def adapter_key(self) -> str:
        return "" if self.adapter is None else self.adapter.key

    def under(self, traceparent: str) -> GenerateRequest:
        """Return a copy of the request with another parent span."""
        return structs.replace(self, traceparent=traceparent)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A served model. `path`: location of the tokenizer's files on the worker. `tokenizer`: their
    digest (tokenizer.py), empty if there are none. `aliases`: further names of the model.
    `sampling_defaults`: sampling parameters for requests that do not set them. `cross_encoder`: it
    scores pairs of texts and has no embeddings. `modalities`: limit of items in one prompt by kind
    of media; empty if the model accepts only text."""

    name: str
    path: str
    max_model_len: int
    vocab_size: int
    dtype: str
    aliases: tuple[str, ...] = ()
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    tokenizer: str = ""
    cross_encoder: bool = False
    modalities: Mapping[str, int] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


@dataclass(frozen=True, slots=True)
class KvEndpoint:
    """The endpoint of a worker's KV transfers. `addresses`: by rank, ordered by pipeline stage,
    then tensor-parallel rank. `stage_layers`: number of layers of each KV-cache group on each
    stage; empty for one stage. Only workers with equal `compatibility` exchange KV; `layout`
    explains its value. `embedding_bytes`: on an encode worker, which offers embeddings of images
    instead of KV, the size of one token's embedding. `copies`: cached KV may be copied from it and
    to it before a prompt is computed."""

    addresses: tuple[str, ...]
    compatibility: str
    layout: Mapping[str, str]
    transports: tuple[str, ...]
    stage_layers: tuple[tuple[int, ...], ...] = ()
    embedding_bytes: int = 0
    copies: bool = False


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of an engine step, under vLLM's names: requests, tokens (0: a prompt of any length is
    one step), and LoRA adapters (0: the engine supports none)."""

    max_num_seqs: int
    max_num_batched_tokens: int = 0
    max_loras: int = 0


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker's registration.

    `instance_id` changes at every start of the process. `address` serves gRPC (control),
    `session_address` the sessions of routers, `debug_address` HTTP ("" if there is none).
    `settings`: other effective engine settings that affect speed, for display.
    `unsupported_fields`: sampling parameters that the engine rejects. `topology`: the configured
    labels of region, zone and host. `revision`: the deployed revision, or "". `device`: name of
    the GPUs, or "cpu". `devices`: number of GPUs or cores. `energy`: the energy meter, "nvml" or
    "rapl", or the reason why there is none. `cores`, `gpus`: CPU cores and NVML indexes of GPUs
    that it may use, empty for all. `group`: its data-parallel group, whose ranks step in lockstep,
    or "".
    """

    worker_id: str
    instance_id: str
    role: Role
    model: ModelInfo
    address: str
    kv: KvEndpoint | None
    block_size: int
    total_blocks: int
    limits: EngineLimits
    pid: int = 0
    engine: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    debug_address: str = ""
    session_address: str = ""
    unsupported_fields: tuple[str, ...] = ()
    topology: Mapping[str, str] = field(default_factory=dict)
    revision: str = ""
    device: str = ""
    devices: int = 0
    energy: str = ""
    cores: int = 0
    gpus: tuple[int, ...] = ()
    group: str = ""


@dataclass(slots=True)
class WorkerLoad:
    """A worker's load, under vLLM's names. `progress` grows while the engine makes steps.
    `step_allowance_s`: expected upper bound of the current step. `tier_token_s`: mean time to load
    a prompt token from host memory, 0 before the first load. `session_blocks`: blocks retained
    for sessions; `retentions_ended`: number of ended retentions by reason. `starved_s`: seconds
    since the last progress in which the engine waited for a CPU. `preemptions`, `draft_tokens` and
    `accepted_draft_tokens` count since the start of the engine."""

    num_waiting_reqs: int
    num_running_reqs: int
    kv_cache_usage: float
    free_blocks: int
    progress: int = 0
    has_work: bool = False
    step_allowance_s: float = 0.0
    tier_token_s: float = 0.0
    session_blocks: int = 0
    retentions_ended: Mapping[str, int] = field(default_factory=dict)
    starved_s: float = 0.0
    preemptions: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


# The Account kind for time without work.
IDLE = "idle"


@dataclass(frozen=True, slots=True)
class Account:
    """A worker's resource use since its last report to any router, in seconds and joules by kind:
    IDLE, or the reason why the work was wasted. Excludes the PhaseReports of finished requests.
    `open_s`: shares of open requests, which are lost if the worker dies. `busy_s`: total of all
    steps since the start."""

    seconds: Mapping[str, float]
    energy_j: Mapping[str, float]
    open_s: float
    busy_s: float


@dataclass(frozen=True, slots=True)
class KvLedger:
    """Blocks that are pinned for transfers now. `leased_blocks`: held for a consumer."""

    in_flight_blocks: int = 0
    leased_blocks: int = 0
    transfers: int = 0
    engine_requests: int = 0

    @property
    def pinned_blocks(self) -> int:
        return self.in_flight_blocks + self.leased_blocks

    @property
    def is_empty(self) -> bool:
        return self.has_only(0)

    def has_only(self, requests: int) -> bool:
        """Return True if there are no transfers, and at most so many requests in the engine."""
        return not (self.pinned_blocks or self.transfers or self.engine_requests > requests)


@dataclass(frozen=True, slots=True)
class KvReport:
    """Statistics of a worker's KV transfers. `links`: number of connected links by transport.
    `totals`: counters since the worker started, by name. `quarantined_slots`: a slot is a peer's
    access to this worker's memory, or a transport's staging buffer. It is quarantined if it is
    unused but a peer may still write to it. `held_bytes`: device memory of transports besides the
    KV cache. `downgrades`: links that use a slower transport than they could, by the producer's
    instance id, with the transport and the reason."""

    ledger: KvLedger
    quarantined_slots: int = 0
    links: Mapping[str, int] = field(default_factory=dict)
    totals: Mapping[str, float] = field(default_factory=dict)
    held_bytes: int = 0
    downgrades: Mapping[str, str] = field(default_factory=dict)
