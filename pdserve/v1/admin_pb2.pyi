from pdserve.v1 import common_pb2 as _common_pb2
from pdserve.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListCapsulesRequest(_message.Message):
    __slots__ = ("tenant", "model")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    model: str
    def __init__(self, tenant: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class ListCapsulesResponse(_message.Message):
    __slots__ = ("capsules",)
    CAPSULES_FIELD_NUMBER: _ClassVar[int]
    capsules: _containers.RepeatedCompositeFieldContainer[CapsuleEntry]
    def __init__(self, capsules: _Optional[_Iterable[_Union[CapsuleEntry, _Mapping]]] = ...) -> None: ...

class CapsuleEntry(_message.Message):
    __slots__ = ("request_id", "tenant", "model", "reason", "code", "unix_time_s", "region", "size", "key")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    UNIX_TIME_S_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    model: str
    reason: str
    code: str
    unix_time_s: float
    region: str
    size: int
    key: str
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ..., reason: _Optional[str] = ..., code: _Optional[str] = ..., unix_time_s: _Optional[float] = ..., region: _Optional[str] = ..., size: _Optional[int] = ..., key: _Optional[str] = ...) -> None: ...

class GetCapsuleRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class GetCapsuleResponse(_message.Message):
    __slots__ = ("capsule", "content")
    CAPSULE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    capsule: CapsuleEntry
    content: bytes
    def __init__(self, capsule: _Optional[_Union[CapsuleEntry, _Mapping]] = ..., content: _Optional[bytes] = ...) -> None: ...

class UpdateCheckpointRequest(_message.Message):
    __slots__ = ("model", "path", "version", "mode", "timeout_s")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    model: str
    path: str
    version: str
    mode: str
    timeout_s: float
    def __init__(self, model: _Optional[str] = ..., path: _Optional[str] = ..., version: _Optional[str] = ..., mode: _Optional[str] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class PauseModelRequest(_message.Message):
    __slots__ = ("model", "mode", "timeout_s")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    model: str
    mode: str
    timeout_s: float
    def __init__(self, model: _Optional[str] = ..., mode: _Optional[str] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class ResumeModelRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class GetCheckpointRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class CheckpointStatus(_message.Message):
    __slots__ = ("model", "weights", "phase", "phase_s", "laggards", "updating")
    class LaggardsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class UpdatingEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PHASE_S_FIELD_NUMBER: _ClassVar[int]
    LAGGARDS_FIELD_NUMBER: _ClassVar[int]
    UPDATING_FIELD_NUMBER: _ClassVar[int]
    model: str
    weights: _worker_pb2.ModelWeights
    phase: str
    phase_s: float
    laggards: _containers.ScalarMap[str, str]
    updating: _containers.ScalarMap[str, str]
    def __init__(self, model: _Optional[str] = ..., weights: _Optional[_Union[_worker_pb2.ModelWeights, _Mapping]] = ..., phase: _Optional[str] = ..., phase_s: _Optional[float] = ..., laggards: _Optional[_Mapping[str, str]] = ..., updating: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainedRequest(_message.Message):
    __slots__ = ("request_id", "decisions", "choices", "guards")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    GUARDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    decisions: _containers.RepeatedCompositeFieldContainer[PlacementDecision]
    choices: _containers.RepeatedCompositeFieldContainer[_common_pb2.ModelChoice]
    guards: _containers.RepeatedCompositeFieldContainer[GuardVerdict]
    def __init__(self, request_id: _Optional[str] = ..., decisions: _Optional[_Iterable[_Union[PlacementDecision, _Mapping]]] = ..., choices: _Optional[_Iterable[_Union[_common_pb2.ModelChoice, _Mapping]]] = ..., guards: _Optional[_Iterable[_Union[GuardVerdict, _Mapping]]] = ...) -> None: ...

class GuardVerdict(_message.Message):
    __slots__ = ("guard", "place", "verdict", "count", "seconds", "reason")
    GUARD_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    guard: str
    place: str
    verdict: str
    count: int
    seconds: float
    reason: str
    def __init__(self, guard: _Optional[str] = ..., place: _Optional[str] = ..., verdict: _Optional[str] = ..., count: _Optional[int] = ..., seconds: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class PlacementDecision(_message.Message):
    __slots__ = ("unix_time_s", "cause", "policy", "model", "prompt_tokens", "kv_tokens", "prefill_only", "avoid", "excluded", "candidates", "asked_prefix", "predictions", "decode", "prefill", "refused", "adapter", "revision", "spilled_from", "images", "session", "session_workers", "encoder", "encoder_reason", "not_drawn", "forwarded_to", "peers")
    class PeersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    UNIX_TIME_S_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ONLY_FIELD_NUMBER: _ClassVar[int]
    AVOID_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    ASKED_PREFIX_FIELD_NUMBER: _ClassVar[int]
    PREDICTIONS_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    SPILLED_FROM_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SESSION_WORKERS_FIELD_NUMBER: _ClassVar[int]
    ENCODER_FIELD_NUMBER: _ClassVar[int]
    ENCODER_REASON_FIELD_NUMBER: _ClassVar[int]
    NOT_DRAWN_FIELD_NUMBER: _ClassVar[int]
    FORWARDED_TO_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    unix_time_s: float
    cause: str
    policy: str
    model: str
    prompt_tokens: int
    kv_tokens: int
    prefill_only: bool
    avoid: _containers.RepeatedScalarFieldContainer[str]
    excluded: _containers.RepeatedCompositeFieldContainer[ExcludedPair]
    candidates: _containers.RepeatedCompositeFieldContainer[PlacementCandidate]
    asked_prefix: bool
    predictions: _containers.RepeatedCompositeFieldContainer[PlacementPrediction]
    decode: str
    prefill: str
    refused: str
    adapter: str
    revision: str
    spilled_from: str
    images: int
    session: str
    session_workers: _containers.RepeatedScalarFieldContainer[str]
    encoder: str
    encoder_reason: str
    not_drawn: int
    forwarded_to: str
    peers: _containers.ScalarMap[str, str]
    def __init__(self, unix_time_s: _Optional[float] = ..., cause: _Optional[str] = ..., policy: _Optional[str] = ..., model: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., prefill_only: _Optional[bool] = ..., avoid: _Optional[_Iterable[str]] = ..., excluded: _Optional[_Iterable[_Union[ExcludedPair, _Mapping]]] = ..., candidates: _Optional[_Iterable[_Union[PlacementCandidate, _Mapping]]] = ..., asked_prefix: _Optional[bool] = ..., predictions: _Optional[_Iterable[_Union[PlacementPrediction, _Mapping]]] = ..., decode: _Optional[str] = ..., prefill: _Optional[str] = ..., refused: _Optional[str] = ..., adapter: _Optional[str] = ..., revision: _Optional[str] = ..., spilled_from: _Optional[str] = ..., images: _Optional[int] = ..., session: _Optional[str] = ..., session_workers: _Optional[_Iterable[str]] = ..., encoder: _Optional[str] = ..., encoder_reason: _Optional[str] = ..., not_drawn: _Optional[int] = ..., forwarded_to: _Optional[str] = ..., peers: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ExcludedPair(_message.Message):
    __slots__ = ("prefill", "decode")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    prefill: str
    decode: str
    def __init__(self, prefill: _Optional[str] = ..., decode: _Optional[str] = ...) -> None: ...

class PlacementCandidate(_message.Message):
    __slots__ = ("worker_id", "state", "load", "outstanding_requests", "outstanding_tokens", "reserved_blocks", "cached_tokens", "why_not", "scores", "totals", "role", "total_blocks", "topology", "tier_tokens", "fetch")
    class TotalsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class TopologyEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WHY_NOT_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    TIER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    state: str
    load: _worker_pb2.WorkerLoad
    outstanding_requests: int
    outstanding_tokens: int
    reserved_blocks: int
    cached_tokens: int
    why_not: str
    scores: _containers.RepeatedCompositeFieldContainer[PlacementScore]
    totals: _containers.ScalarMap[str, float]
    role: _worker_pb2.Role
    total_blocks: int
    topology: _containers.ScalarMap[str, str]
    tier_tokens: int
    fetch: PrefixFetch
    def __init__(self, worker_id: _Optional[str] = ..., state: _Optional[str] = ..., load: _Optional[_Union[_worker_pb2.WorkerLoad, _Mapping]] = ..., outstanding_requests: _Optional[int] = ..., outstanding_tokens: _Optional[int] = ..., reserved_blocks: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., why_not: _Optional[str] = ..., scores: _Optional[_Iterable[_Union[PlacementScore, _Mapping]]] = ..., totals: _Optional[_Mapping[str, float]] = ..., role: _Optional[_Union[_worker_pb2.Role, str]] = ..., total_blocks: _Optional[int] = ..., topology: _Optional[_Mapping[str, str]] = ..., tier_tokens: _Optional[int] = ..., fetch: _Optional[_Union[PrefixFetch, _Mapping]] = ...) -> None: ...

class PrefixFetch(_message.Message):
    __slots__ = ("holder", "tokens", "copy_s", "compute_s", "pays")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    COPY_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    PAYS_FIELD_NUMBER: _ClassVar[int]
    holder: str
    tokens: int
    copy_s: float
    compute_s: float
    pays: bool
    def __init__(self, holder: _Optional[str] = ..., tokens: _Optional[int] = ..., copy_s: _Optional[float] = ..., compute_s: _Optional[float] = ..., pays: _Optional[bool] = ...) -> None: ...

class PlacementScore(_message.Message):
    __slots__ = ("phase", "scorer", "weight", "score")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    SCORER_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    phase: str
    scorer: str
    weight: float
    score: float
    def __init__(self, phase: _Optional[str] = ..., scorer: _Optional[str] = ..., weight: _Optional[float] = ..., score: _Optional[float] = ...) -> None: ...

class PlacementPrediction(_message.Message):
    __slots__ = ("prefill", "decode", "seconds")
    class SecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    prefill: str
    decode: str
    seconds: _containers.ScalarMap[str, float]
    def __init__(self, prefill: _Optional[str] = ..., decode: _Optional[str] = ..., seconds: _Optional[_Mapping[str, float]] = ...) -> None: ...

class ChangeRoleRequest(_message.Message):
    __slots__ = ("worker_id", "role", "drain_timeout_s")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: _worker_pb2.Role
    drain_timeout_s: float
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[_worker_pb2.Role, str]] = ..., drain_timeout_s: _Optional[float] = ...) -> None: ...

class ChangeRoleResponse(_message.Message):
    __slots__ = ("failure", "drain_s", "probe_s", "total_s", "moved_streams")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_S_FIELD_NUMBER: _ClassVar[int]
    PROBE_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    MOVED_STREAMS_FIELD_NUMBER: _ClassVar[int]
    failure: str
    drain_s: float
    probe_s: float
    total_s: float
    moved_streams: int
    def __init__(self, failure: _Optional[str] = ..., drain_s: _Optional[float] = ..., probe_s: _Optional[float] = ..., total_s: _Optional[float] = ..., moved_streams: _Optional[int] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "timeout_s", "force", "stop")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    timeout_s: float
    force: bool
    stop: bool
    def __init__(self, worker_id: _Optional[str] = ..., timeout_s: _Optional[float] = ..., force: _Optional[bool] = ..., stop: _Optional[bool] = ...) -> None: ...

class DrainProgress(_message.Message):
    __slots__ = ("open_streams", "pinned_blocks", "seconds", "done", "drained", "moved_streams")
    OPEN_STREAMS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    MOVED_STREAMS_FIELD_NUMBER: _ClassVar[int]
    open_streams: int
    pinned_blocks: int
    seconds: float
    done: bool
    drained: bool
    moved_streams: int
    def __init__(self, open_streams: _Optional[int] = ..., pinned_blocks: _Optional[int] = ..., seconds: _Optional[float] = ..., done: _Optional[bool] = ..., drained: _Optional[bool] = ..., moved_streams: _Optional[int] = ...) -> None: ...

class UndrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class UndrainWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRouterRequest(_message.Message):
    __slots__ = ("timeout_s", "force")
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    timeout_s: float
    force: bool
    def __init__(self, timeout_s: _Optional[float] = ..., force: _Optional[bool] = ...) -> None: ...

class UndrainRouterRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UndrainRouterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetWeightsRequest(_message.Message):
    __slots__ = ("model", "weights")
    class WeightsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    model: str
    weights: _containers.ScalarMap[str, float]
    def __init__(self, model: _Optional[str] = ..., weights: _Optional[_Mapping[str, float]] = ...) -> None: ...

class ListRevisionsRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ListRevisionsResponse(_message.Message):
    __slots__ = ("revisions",)
    REVISIONS_FIELD_NUMBER: _ClassVar[int]
    revisions: _containers.RepeatedCompositeFieldContainer[Revision]
    def __init__(self, revisions: _Optional[_Iterable[_Union[Revision, _Mapping]]] = ...) -> None: ...

class Revision(_message.Message):
    __slots__ = ("name", "share", "ready", "counts")
    class ReadyEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class CountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    share: float
    ready: _containers.ScalarMap[str, int]
    counts: _containers.ScalarMap[str, int]
    def __init__(self, name: _Optional[str] = ..., share: _Optional[float] = ..., ready: _Optional[_Mapping[str, int]] = ..., counts: _Optional[_Mapping[str, int]] = ...) -> None: ...
