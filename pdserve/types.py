"""Values shared by router and workers. No I/O, clock or protobuf."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from operator import attrgetter
from typing import TYPE_CHECKING

from pdserve.errors import ErrorInfo as ErrorInfo  # part of this vocabulary
from pdserve.errors import InvalidRequest, UnsupportedField

if TYPE_CHECKING:
    from collections.abc import Mapping


class Role(StrEnum):
    """The phases that a worker runs."""

    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "aggregated"
    POOLING = "pooling"


class ServiceClass(StrEnum):
    """Interactive requests are served before batch requests."""

    INTERACTIVE = "interactive"
    BATCH = "batch"


class FinishReason(StrEnum):
    """Why a stream ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Constraint(StrEnum):
    """Kinds of structured output that vLLM supports."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"  # JSON of one of xgrammar's, which vLLM's parsers make


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A constraint on the answer: the JSON text of a schema, a pattern or a grammar in `value`, or
    `choices`."""

    kind: Constraint
    value: str = ""
    choices: tuple[str, ...] = ()


def _refuse(field_name: str, reason: str) -> None:
    raise InvalidRequest(f"{field_name} {reason}", field=field_name)


@dataclass(slots=True)
class SamplingParams:
    """Sampling parameters as in vLLM. Raises InvalidRequest naming the field."""

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

    def __post_init__(self) -> None:
        for value, (name, low, high) in zip(_RANGED(self), RANGES, strict=True):
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
        if self.n > 1 and self._has_seed and not 0 <= (self.seed or 0) <= MAX_SEED - self.n:
            _refuse("seed", f"must be between 0 and {MAX_SEED - self.n} where n is {self.n}")

    @property
    def _has_seed(self) -> bool:
        # vLLM reads -1 as none.
        return self.seed is not None and self.seed != -1

    def of_choice(self, index: int) -> SamplingParams:
        """Return the parameters of one of the `n` answers. Each has the next seed, as in vLLM
        (ParentRequest in vllm/v1/engine/parallel_sampling.py)."""
        seed = (self.seed or 0) + index if self._has_seed else None
        prompt_logprobs = None if index else self.prompt_logprobs
        return replace(self, n=1, seed=seed, prompt_logprobs=prompt_logprobs)

    def check_supported(self, unsupported_fields: tuple[str, ...]) -> None:
        """Raise UnsupportedField if one of these parameters asks for something."""
        for field_name in unsupported_fields:
            if getattr(self, field_name, None):
                text = f"'{field_name}' is not supported by the engine of this model"
                raise UnsupportedField(text, field=field_name)


MAX_STOP_STRINGS = 16
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


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token at one position. `rank` 1 is the likeliest, 0 the first of a prompt, which has no
    logprob."""

    token_id: int
    text: str
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The sampled token, or that of the prompt, and the requested alternatives, best first."""

    sampled: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(slots=True)
class TransferReport:
    """A finished transfer. `transfer_s` is the time during which bytes were moved, `exposed_s` the
    part after prefill ended. `digest_mismatches` counts chunks that were sent again."""

    transfer_s: float
    exposed_s: float
    bytes: int
    blocks: int
    transport: str
    digest_mismatches: int = 0

    def beside(self, other: TransferReport) -> TransferReport:
        """Return the report of a transfer whose two halves filled the same blocks concurrently."""
        return TransferReport(
            max(self.transfer_s, other.transfer_s),
            max(self.exposed_s, other.exposed_s),
            self.bytes + other.bytes,
            max(self.blocks, other.blocks),
            "+".join(sorted({*self.transport.split("+"), *other.transport.split("+")})),
            self.digest_mismatches + other.digest_mismatches,
        )


@dataclass(slots=True)
class PhaseReport:
    """The cost of a request on one worker. The last three are its shares of the engine's steps and
    of their energy, which is None if it is not measured."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    cached_tokens: int = 0
    transfer: TransferReport | None = None
    prefill_busy_s: float = 0.0
    decode_busy_s: float = 0.0
    energy_j: float | None = None


@dataclass(slots=True)
class StreamDelta:
    """The output of one engine step for one request. The first one of a prefill has
    `prompt_logprobs`, if they were asked for. The last one has a finish reason and a report, for a
    prefill with sequential handoff a `kv_handle`, and for an exported stream the number of
    its output tokens as `exported_tokens`. A pooling request has one, with the `embedding`
    (float32, little-endian)."""

    stream_id: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    report: PhaseReport | None = None
    error: ErrorInfo | None = None
    kv_handle: bytes = field(default=b"", repr=False)
    exported_tokens: int = 0
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    embedding: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call. The first one of a call has its id and name; `arguments` are pieces
    of one JSON text."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class Usage:
    """Token counts as the OpenAI API counts them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0  # of the completion, where reasoning is parsed


@dataclass(slots=True)
class Receipt:
    """The cost of one request by phase, and the workers that ran it. `predicted_ttft_s` is the
    predicted time from placement to the first token, or 0 if unknown. `cost` is in the unit of
    router.prices, None if a worker has no price; `energy_j` is None if one measures none."""

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


@dataclass(frozen=True, slots=True)
class Adapter:
    """One revision of a LoRA adapter of `model`. `digest` is that of the files in `path`."""

    name: str
    digest: str
    path: str
    model: str

    @property
    def key(self) -> str:
        """Its name in engines and in prefix hashes: another revision finds no KV of this one."""
        return f"{self.name}@{self.digest}"


@dataclass(frozen=True, slots=True)
class ReasoningGate:
    """The constraint on an answer holds after its reasoning, whose end vLLM's reasoning parser of
    this name finds. `kwargs_json` are the parser's arguments."""

    parser: str
    kwargs_json: str


@dataclass(frozen=True, slots=True)
class Parsing:
    """How tool calls and reasoning are found in an answer: by vLLM's parsers of these names, "" for
    none. `tokenizer` is ModelInfo.tokenizer, and `tokenizer_files` its files. `request_json` is the
    body of vLLM's chat request without the conversation, and `reasoning_kwargs_json` are the
    arguments of its reasoning parser."""

    tokenizer: str
    tokenizer_files: Mapping[str, bytes] = field(repr=False)
    tool_parser: str
    reasoning_parser: str
    request_json: str
    reasoning_kwargs_json: str


@dataclass(slots=True)
class GenerateRequest:
    """One request as the router works on it: tokenised, checked, with its deadline as a point on
    the event loop's clock (see pdserve.deadline). A lower `priority` is served earlier, as in vLLM;
    `tenant` is empty where no API keys are asked for. `resume` are tokens of the answer that the
    client has from elsewhere already. Only requests with the same `cache_salt` share cached
    prefixes."""

    request_id: str
    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    deadline: float | None = None
    priority: int = 0
    service_class: ServiceClass = ServiceClass.INTERACTIVE
    tenant: str = ""
    traceparent: str = ""  # of the client, or of the router's own span
    resume: tuple[int, ...] = ()
    adapter: Adapter | None = None
    cache_salt: str = field(default="", repr=False)
    parsing: Parsing | None = None
    reasoning_gate: ReasoningGate | None = None
    second_text_at: int = 0  # in the tokens of a pair of texts, for a cross-encoder

    @property
    def served_name(self) -> str:
        """The name that the client asked for: of the adapter, or of the model."""
        return self.model if self.adapter is None else self.adapter.name

    @property
    def adapter_key(self) -> str:
        return "" if self.adapter is None else self.adapter.key

    def under(self, traceparent: str) -> GenerateRequest:
        """Return a copy within another span."""
        return replace(self, traceparent=traceparent)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A served model. `path` is where its worker has the files of its tokenizer, and `tokenizer`
    their digest (tokenizer.py), empty if it has none. `aliases` are further names that it answers
    to, and `sampling_defaults` the sampling parameters of requests that do not set them. A
    `cross_encoder` scores pairs of texts, and has no embeddings."""

    name: str
    path: str
    max_model_len: int
    vocab_size: int
    dtype: str
    aliases: tuple[str, ...] = ()
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    tokenizer: str = ""
    cross_encoder: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


class HandoffStyle(StrEnum):
    """When the decode worker gets a request: together with the prefill worker, so that KV is
    transferred while it is computed, or after prefill has ended with a `kv_handle`."""

    CONCURRENT = "concurrent"
    SEQUENTIAL = "sequential"


@dataclass(frozen=True, slots=True)
class KvEndpoint:
    """Where a worker's KV is reached: `addresses` by tensor-parallel rank. Only workers with equal
    `compatibility` exchange KV."""

    addresses: tuple[str, ...]
    compatibility: str
    layout: Mapping[str, str]
    transports: tuple[str, ...]
    handoff: HandoffStyle = HandoffStyle.CONCURRENT


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker as it registers.

    `instance_id` changes at every start of its process. `address` serves gRPC (control), and
    `session_address` the sessions of routers. `settings` are what else of its engine bears on
    speed; `debug_address` is its HTTP listener's, or "". `max_loras` is how many LoRA adapters run
    at a time, 0 if the engine takes none. `unsupported_fields` are sampling parameters that the
    engine refuses. `topology` has the labels of where it runs: region, zone, rack and host, as far
    as they are configured. `revision` names what it was deployed from, "" if nothing does. `device`
    is the name of its GPUs, or "cpu", and `devices` the number of GPUs or cores; `energy` is what
    counts their energy, "nvml" or "rapl", or why nothing does.
    """

    worker_id: str
    instance_id: str
    role: Role
    model: ModelInfo
    address: str
    kv: KvEndpoint | None
    block_size: int
    total_blocks: int
    max_num_seqs: int
    pid: int = 0
    engine: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    debug_address: str = ""
    session_address: str = ""
    max_loras: int = 0
    unsupported_fields: tuple[str, ...] = ()
    topology: Mapping[str, str] = field(default_factory=dict)
    revision: str = ""
    device: str = ""
    devices: int = 0
    energy: str = ""


@dataclass(slots=True)
class WorkerLoad:
    """Load with vLLM's names. `progress` grows while the engine makes steps. `step_allowance_s` is
    the expected upper bound of the current step, `tier_token_s` the mean time to load a prompt
    token from host memory, 0 before the first load."""

    num_waiting_reqs: int
    num_running_reqs: int
    kv_cache_usage: float
    free_blocks: int
    progress: int = 0
    has_work: bool = False
    step_allowance_s: float = 0.0
    tier_token_s: float = 0.0


# The kind of an Account's time without work.
IDLE = "idle"


@dataclass(frozen=True, slots=True)
class Account:
    """What a worker used since it last told a router, as far as no report of a request has it:
    seconds and joules by kind, IDLE or why no answer needs the work. `open_s` are the shares of
    open requests, which are lost with the worker; `busy_s` the seconds of all steps so far."""

    seconds: Mapping[str, float]
    energy_j: Mapping[str, float]
    open_s: float
    busy_s: float


@dataclass(frozen=True, slots=True)
class KvLedger:
    """Blocks pinned for transfers now. pinned = in flight + leased."""

    in_flight_blocks: int = 0
    leased_blocks: int = 0
    transfers: int = 0
    engine_requests: int = 0

    @property
    def pinned_blocks(self) -> int:
        return self.in_flight_blocks + self.leased_blocks

    @property
    def is_empty(self) -> bool:
        return not (self.pinned_blocks or self.transfers or self.engine_requests)


@dataclass(frozen=True, slots=True)
class KvReport:
    """A worker's KV plane in figures. `links` counts those that are up, by transport; `downgrades`
    has those that use a slower transport than they should, by the producer's instance id: which
    one, and why. `totals` is what has happened since the worker started, by name. A quarantined
    slot is a peer's way into this worker's memory, or staging of a transport, that was given up and
    is not known to be idle.
    `held_bytes` is what transports hold beside the KV cache, on its device."""

    ledger: KvLedger
    quarantined_slots: int = 0
    links: Mapping[str, int] = field(default_factory=dict)
    totals: Mapping[str, float] = field(default_factory=dict)
    held_bytes: int = 0
    downgrades: Mapping[str, str] = field(default_factory=dict)
