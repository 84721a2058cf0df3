from pdserve.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_AGGREGATED: _ClassVar[Role]
    ROLE_POOLING: _ClassVar[Role]
    ROLE_ENCODE: _ClassVar[Role]

class WeightsStage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WEIGHTS_STAGE_UNSPECIFIED: _ClassVar[WeightsStage]
    WEIGHTS_STAGE_PREPARE: _ClassVar[WeightsStage]
    WEIGHTS_STAGE_QUIESCE: _ClassVar[WeightsStage]
    WEIGHTS_STAGE_COMMIT: _ClassVar[WeightsStage]
    WEIGHTS_STAGE_RESUME: _ClassVar[WeightsStage]
    WEIGHTS_STAGE_HOLD: _ClassVar[WeightsStage]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ROLE_AGGREGATED: Role
ROLE_POOLING: Role
ROLE_ENCODE: Role
WEIGHTS_STAGE_UNSPECIFIED: WeightsStage
WEIGHTS_STAGE_PREPARE: WeightsStage
WEIGHTS_STAGE_QUIESCE: WeightsStage
WEIGHTS_STAGE_COMMIT: WeightsStage
WEIGHTS_STAGE_RESUME: WeightsStage
WEIGHTS_STAGE_HOLD: WeightsStage

class ModelInfo(_message.Message):
    __slots__ = ("name", "path", "max_model_len", "vocab_size", "dtype", "aliases", "sampling_defaults", "tokenizer", "cross_encoder", "modalities")
    class SamplingDefaultsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class ModalitiesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    CROSS_ENCODER_FIELD_NUMBER: _ClassVar[int]
    MODALITIES_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    max_model_len: int
    vocab_size: int
    dtype: str
    aliases: _containers.RepeatedScalarFieldContainer[str]
    sampling_defaults: _containers.ScalarMap[str, float]
    tokenizer: str
    cross_encoder: bool
    modalities: _containers.ScalarMap[str, int]
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., dtype: _Optional[str] = ..., aliases: _Optional[_Iterable[str]] = ..., sampling_defaults: _Optional[_Mapping[str, float]] = ..., tokenizer: _Optional[str] = ..., cross_encoder: _Optional[bool] = ..., modalities: _Optional[_Mapping[str, int]] = ...) -> None: ...

class StageLayers(_message.Message):
    __slots__ = ("layers",)
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layers: _Optional[_Iterable[int]] = ...) -> None: ...

class KvEndpoint(_message.Message):
    __slots__ = ("addresses", "compatibility", "layout", "transports", "handoff", "stage_layers", "embedding_bytes", "copies")
    class LayoutEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    STAGE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_BYTES_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    compatibility: str
    layout: _containers.ScalarMap[str, str]
    transports: _containers.RepeatedScalarFieldContainer[str]
    handoff: str
    stage_layers: _containers.RepeatedCompositeFieldContainer[StageLayers]
    embedding_bytes: int
    copies: bool
    def __init__(self, addresses: _Optional[_Iterable[str]] = ..., compatibility: _Optional[str] = ..., layout: _Optional[_Mapping[str, str]] = ..., transports: _Optional[_Iterable[str]] = ..., handoff: _Optional[str] = ..., stage_layers: _Optional[_Iterable[_Union[StageLayers, _Mapping]]] = ..., embedding_bytes: _Optional[int] = ..., copies: _Optional[bool] = ...) -> None: ...

class EngineLimits(_message.Message):
    __slots__ = ("max_num_seqs", "max_num_batched_tokens", "max_loras")
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_LORAS_FIELD_NUMBER: _ClassVar[int]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_loras: int
    def __init__(self, max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., max_loras: _Optional[int] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("worker_id", "instance_id", "role", "model", "address", "kv", "block_size", "total_blocks", "pid", "engine", "settings", "debug_address", "session_address", "unsupported_fields", "topology", "revision", "device", "devices", "energy", "limits", "cores", "gpus", "group")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class TopologyEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    DEBUG_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SESSION_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    UNSUPPORTED_FIELDS_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    ENERGY_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    instance_id: str
    role: Role
    model: ModelInfo
    address: str
    kv: KvEndpoint
    block_size: int
    total_blocks: int
    pid: int
    engine: str
    settings: _containers.ScalarMap[str, str]
    debug_address: str
    session_address: str
    unsupported_fields: _containers.RepeatedScalarFieldContainer[str]
    topology: _containers.ScalarMap[str, str]
    revision: str
    device: str
    devices: int
    energy: str
    limits: EngineLimits
    cores: int
    gpus: _containers.RepeatedScalarFieldContainer[int]
    group: str
    def __init__(self, worker_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., model: _Optional[_Union[ModelInfo, _Mapping]] = ..., address: _Optional[str] = ..., kv: _Optional[_Union[KvEndpoint, _Mapping]] = ..., block_size: _Optional[int] = ..., total_blocks: _Optional[int] = ..., pid: _Optional[int] = ..., engine: _Optional[str] = ..., settings: _Optional[_Mapping[str, str]] = ..., debug_address: _Optional[str] = ..., session_address: _Optional[str] = ..., unsupported_fields: _Optional[_Iterable[str]] = ..., topology: _Optional[_Mapping[str, str]] = ..., revision: _Optional[str] = ..., device: _Optional[str] = ..., devices: _Optional[int] = ..., energy: _Optional[str] = ..., limits: _Optional[_Union[EngineLimits, _Mapping]] = ..., cores: _Optional[int] = ..., gpus: _Optional[_Iterable[int]] = ..., group: _Optional[str] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "digest", "path", "model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    path: str
    model: str
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., path: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("num_waiting_reqs", "num_running_reqs", "kv_cache_usage", "free_blocks", "progress", "has_work", "step_allowance_s", "tier_token_s", "session_blocks", "retentions_ended", "starved_s", "preemptions", "draft_tokens", "accepted_draft_tokens")
    class RetentionsEndedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NUM_WAITING_REQS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_REQS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_USAGE_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    HAS_WORK_FIELD_NUMBER: _ClassVar[int]
    STEP_ALLOWANCE_S_FIELD_NUMBER: _ClassVar[int]
    TIER_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    SESSION_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RETENTIONS_ENDED_FIELD_NUMBER: _ClassVar[int]
    STARVED_S_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_waiting_reqs: int
    num_running_reqs: int
    kv_cache_usage: float
    free_blocks: int
    progress: int
    has_work: bool
    step_allowance_s: float
    tier_token_s: float
    session_blocks: int
    retentions_ended: _containers.ScalarMap[str, int]
    starved_s: float
    preemptions: int
    draft_tokens: int
    accepted_draft_tokens: int
    def __init__(self, num_waiting_reqs: _Optional[int] = ..., num_running_reqs: _Optional[int] = ..., kv_cache_usage: _Optional[float] = ..., free_blocks: _Optional[int] = ..., progress: _Optional[int] = ..., has_work: _Optional[bool] = ..., step_allowance_s: _Optional[float] = ..., tier_token_s: _Optional[float] = ..., session_blocks: _Optional[int] = ..., retentions_ended: _Optional[_Mapping[str, int]] = ..., starved_s: _Optional[float] = ..., preemptions: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_draft_tokens: _Optional[int] = ...) -> None: ...

class KvLedger(_message.Message):
    __slots__ = ("pinned_blocks", "in_flight_blocks", "leased_blocks", "transfers", "engine_requests")
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    pinned_blocks: int
    in_flight_blocks: int
    leased_blocks: int
    transfers: int
    engine_requests: int
    def __init__(self, pinned_blocks: _Optional[int] = ..., in_flight_blocks: _Optional[int] = ..., leased_blocks: _Optional[int] = ..., transfers: _Optional[int] = ..., engine_requests: _Optional[int] = ...) -> None: ...

class KvReport(_message.Message):
    __slots__ = ("ledger", "quarantined_slots", "links", "totals", "held_bytes", "downgrades")
    class LinksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class TotalsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class DowngradesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    DOWNGRADES_FIELD_NUMBER: _ClassVar[int]
    ledger: KvLedger
    quarantined_slots: int
    links: _containers.ScalarMap[str, int]
    totals: _containers.ScalarMap[str, float]
    held_bytes: int
    downgrades: _containers.ScalarMap[str, str]
    def __init__(self, ledger: _Optional[_Union[KvLedger, _Mapping]] = ..., quarantined_slots: _Optional[int] = ..., links: _Optional[_Mapping[str, int]] = ..., totals: _Optional[_Mapping[str, float]] = ..., held_bytes: _Optional[int] = ..., downgrades: _Optional[_Mapping[str, str]] = ...) -> None: ...

class GpuHealth(_message.Message):
    __slots__ = ("index", "name", "temperature_c", "memory_used_bytes", "memory_total_bytes", "ecc_errors", "utilization_percent", "power_w", "energy_j", "clock_mhz", "throttled_by", "xid", "fault")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_C_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    ECC_ERRORS_FIELD_NUMBER: _ClassVar[int]
    UTILIZATION_PERCENT_FIELD_NUMBER: _ClassVar[int]
    POWER_W_FIELD_NUMBER: _ClassVar[int]
    ENERGY_J_FIELD_NUMBER: _ClassVar[int]
    CLOCK_MHZ_FIELD_NUMBER: _ClassVar[int]
    THROTTLED_BY_FIELD_NUMBER: _ClassVar[int]
    XID_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    index: int
    name: str
    temperature_c: int
    memory_used_bytes: int
    memory_total_bytes: int
    ecc_errors: int
    utilization_percent: int
    power_w: float
    energy_j: float
    clock_mhz: int
    throttled_by: str
    xid: int
    fault: str
    def __init__(self, index: _Optional[int] = ..., name: _Optional[str] = ..., temperature_c: _Optional[int] = ..., memory_used_bytes: _Optional[int] = ..., memory_total_bytes: _Optional[int] = ..., ecc_errors: _Optional[int] = ..., utilization_percent: _Optional[int] = ..., power_w: _Optional[float] = ..., energy_j: _Optional[float] = ..., clock_mhz: _Optional[int] = ..., throttled_by: _Optional[str] = ..., xid: _Optional[int] = ..., fault: _Optional[str] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TokenizerFiles(_message.Message):
    __slots__ = ("files",)
    class FilesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    FILES_FIELD_NUMBER: _ClassVar[int]
    files: _containers.ScalarMap[str, bytes]
    def __init__(self, files: _Optional[_Mapping[str, bytes]] = ...) -> None: ...

class RenderRequest(_message.Message):
    __slots__ = ("chat", "text", "images")
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    chat: ChatPrompt
    text: str
    images: _containers.RepeatedCompositeFieldContainer[EncodedImage]
    def __init__(self, chat: _Optional[_Union[ChatPrompt, _Mapping]] = ..., text: _Optional[str] = ..., images: _Optional[_Iterable[_Union[EncodedImage, _Mapping]]] = ...) -> None: ...

class ChatPrompt(_message.Message):
    __slots__ = ("messages_json", "tools_json", "variables_json", "add_generation_prompt", "continue_final_message", "add_special_tokens")
    MESSAGES_JSON_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_JSON_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    messages_json: str
    tools_json: str
    variables_json: str
    add_generation_prompt: bool
    continue_final_message: bool
    add_special_tokens: bool
    def __init__(self, messages_json: _Optional[str] = ..., tools_json: _Optional[str] = ..., variables_json: _Optional[str] = ..., add_generation_prompt: _Optional[bool] = ..., continue_final_message: _Optional[bool] = ..., add_special_tokens: _Optional[bool] = ...) -> None: ...

class EncodedImage(_message.Message):
    __slots__ = ("data", "detail")
    DATA_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    detail: str
    def __init__(self, data: _Optional[bytes] = ..., detail: _Optional[str] = ...) -> None: ...

class RenderResponse(_message.Message):
    __slots__ = ("prompt_token_ids", "media", "seconds")
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    media: _containers.RepeatedCompositeFieldContainer[MediaItem]
    seconds: float
    def __init__(self, prompt_token_ids: _Optional[_Iterable[int]] = ..., media: _Optional[_Iterable[_Union[MediaItem, _Mapping]]] = ..., seconds: _Optional[float] = ...) -> None: ...

class MediaItem(_message.Message):
    __slots__ = ("modality", "hash", "offset", "length", "is_embed", "metadata", "data")
    MODALITY_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    IS_EMBED_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    modality: str
    hash: str
    offset: int
    length: int
    is_embed: bytes
    metadata: bytes
    data: bytes
    def __init__(self, modality: _Optional[str] = ..., hash: _Optional[str] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., is_embed: _Optional[bytes] = ..., metadata: _Optional[bytes] = ..., data: _Optional[bytes] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("worker", "draining", "adapters", "weights", "updating")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    UPDATING_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerInfo
    draining: bool
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    weights: ModelWeights
    updating: str
    def __init__(self, worker: _Optional[_Union[WorkerInfo, _Mapping]] = ..., draining: _Optional[bool] = ..., adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., weights: _Optional[_Union[ModelWeights, _Mapping]] = ..., updating: _Optional[str] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("lease_s", "router_id")
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    lease_s: float
    router_id: str
    def __init__(self, lease_s: _Optional[float] = ..., router_id: _Optional[str] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("worker_id", "instance_id", "load", "draining", "kv", "unhealthy", "moving", "adapters", "gpus", "account", "weights", "updating", "number")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    UNHEALTHY_FIELD_NUMBER: _ClassVar[int]
    MOVING_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    ACCOUNT_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    UPDATING_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    instance_id: str
    load: WorkerLoad
    draining: bool
    kv: KvReport
    unhealthy: str
    moving: bool
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    gpus: _containers.RepeatedCompositeFieldContainer[GpuHealth]
    account: Account
    weights: ModelWeights
    updating: str
    number: int
    def __init__(self, worker_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., draining: _Optional[bool] = ..., kv: _Optional[_Union[KvReport, _Mapping]] = ..., unhealthy: _Optional[str] = ..., moving: _Optional[bool] = ..., adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., gpus: _Optional[_Iterable[_Union[GpuHealth, _Mapping]]] = ..., account: _Optional[_Union[Account, _Mapping]] = ..., weights: _Optional[_Union[ModelWeights, _Mapping]] = ..., updating: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class ModelWeights(_message.Message):
    __slots__ = ("sequence", "version", "path", "digest")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    version: str
    path: str
    digest: str
    def __init__(self, sequence: _Optional[int] = ..., version: _Optional[str] = ..., path: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class Account(_message.Message):
    __slots__ = ("seconds", "energy_j", "open_s", "busy_s")
    class SecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class EnergyJEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    ENERGY_J_FIELD_NUMBER: _ClassVar[int]
    OPEN_S_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    seconds: _containers.ScalarMap[str, float]
    energy_j: _containers.ScalarMap[str, float]
    open_s: float
    busy_s: float
    def __init__(self, seconds: _Optional[_Mapping[str, float]] = ..., energy_j: _Optional[_Mapping[str, float]] = ..., open_s: _Optional[float] = ..., busy_s: _Optional[float] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("lease_s", "number")
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    lease_s: float
    number: int
    def __init__(self, lease_s: _Optional[float] = ..., number: _Optional[int] = ...) -> None: ...

class DeregisterRequest(_message.Message):
    __slots__ = ("worker_id", "instance_id", "account", "failure")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ACCOUNT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    instance_id: str
    account: Account
    failure: str
    def __init__(self, worker_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., account: _Optional[_Union[Account, _Mapping]] = ..., failure: _Optional[str] = ...) -> None: ...

class DeregisterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CrashLoop(_message.Message):
    __slots__ = ("worker_id", "role", "model", "reason")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: Role
    model: str
    reason: str
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., model: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class ReportCrashLoopsRequest(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[CrashLoop]
    def __init__(self, workers: _Optional[_Iterable[_Union[CrashLoop, _Mapping]]] = ...) -> None: ...

class ReportCrashLoopsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers", "ejected_pairs", "roles", "disaggregation", "topology", "needs", "on_demand", "tools", "peers", "draining", "audits")
    class TopologyEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    EJECTED_PAIRS_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    DISAGGREGATION_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    NEEDS_FIELD_NUMBER: _ClassVar[int]
    ON_DEMAND_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    AUDITS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerEntry]
    ejected_pairs: _containers.RepeatedCompositeFieldContainer[EjectedPair]
    roles: _containers.RepeatedCompositeFieldContainer[ModelNote]
    disaggregation: _containers.RepeatedCompositeFieldContainer[ModelNote]
    topology: _containers.ScalarMap[str, str]
    needs: _containers.RepeatedCompositeFieldContainer[RoleNeed]
    on_demand: _containers.RepeatedCompositeFieldContainer[ModelNote]
    tools: _containers.RepeatedCompositeFieldContainer[ModelNote]
    peers: _containers.RepeatedCompositeFieldContainer[PeerEntry]
    draining: bool
    audits: _containers.RepeatedCompositeFieldContainer[ModelNote]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerEntry, _Mapping]]] = ..., ejected_pairs: _Optional[_Iterable[_Union[EjectedPair, _Mapping]]] = ..., roles: _Optional[_Iterable[_Union[ModelNote, _Mapping]]] = ..., disaggregation: _Optional[_Iterable[_Union[ModelNote, _Mapping]]] = ..., topology: _Optional[_Mapping[str, str]] = ..., needs: _Optional[_Iterable[_Union[RoleNeed, _Mapping]]] = ..., on_demand: _Optional[_Iterable[_Union[ModelNote, _Mapping]]] = ..., tools: _Optional[_Iterable[_Union[ModelNote, _Mapping]]] = ..., peers: _Optional[_Iterable[_Union[PeerEntry, _Mapping]]] = ..., draining: _Optional[bool] = ..., audits: _Optional[_Iterable[_Union[ModelNote, _Mapping]]] = ...) -> None: ...

class PeerEntry(_message.Message):
    __slots__ = ("region", "address", "reason", "delay_s", "models")
    REGION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DELAY_S_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    region: str
    address: str
    reason: str
    delay_s: float
    models: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, region: _Optional[str] = ..., address: _Optional[str] = ..., reason: _Optional[str] = ..., delay_s: _Optional[float] = ..., models: _Optional[_Iterable[str]] = ...) -> None: ...

class RoleNeed(_message.Message):
    __slots__ = ("model", "role", "workers")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    model: str
    role: Role
    workers: float
    def __init__(self, model: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., workers: _Optional[float] = ...) -> None: ...

class ModelNote(_message.Message):
    __slots__ = ("model", "text")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class EjectedPair(_message.Message):
    __slots__ = ("prefill_worker", "decode_worker", "remaining_s", "failures", "reason")
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    REMAINING_S_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    prefill_worker: str
    decode_worker: str
    remaining_s: float
    failures: int
    reason: str
    def __init__(self, prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., remaining_s: _Optional[float] = ..., failures: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Breaker(_message.Message):
    __slots__ = ("state", "reason", "remaining_s", "failures")
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REMAINING_S_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    state: str
    reason: str
    remaining_s: float
    failures: int
    def __init__(self, state: _Optional[str] = ..., reason: _Optional[str] = ..., remaining_s: _Optional[float] = ..., failures: _Optional[int] = ...) -> None: ...

class WorkerEntry(_message.Message):
    __slots__ = ("info", "load", "state", "outstanding_requests", "outstanding_tokens", "breaker", "unhealthy", "adapters", "revision_share", "reason", "weights_version")
    INFO_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BREAKER_FIELD_NUMBER: _ClassVar[int]
    UNHEALTHY_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    REVISION_SHARE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    info: WorkerInfo
    load: WorkerLoad
    state: str
    outstanding_requests: int
    outstanding_tokens: int
    breaker: Breaker
    unhealthy: str
    adapters: _containers.RepeatedScalarFieldContainer[str]
    revision_share: float
    reason: str
    weights_version: str
    def __init__(self, info: _Optional[_Union[WorkerInfo, _Mapping]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., state: _Optional[str] = ..., outstanding_requests: _Optional[int] = ..., outstanding_tokens: _Optional[int] = ..., breaker: _Optional[_Union[Breaker, _Mapping]] = ..., unhealthy: _Optional[str] = ..., adapters: _Optional[_Iterable[str]] = ..., revision_share: _Optional[float] = ..., reason: _Optional[str] = ..., weights_version: _Optional[str] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("hello", "submit", "cancel", "export", "watch_cache", "ping", "renewed")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    EXPORT_FIELD_NUMBER: _ClassVar[int]
    WATCH_CACHE_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    RENEWED_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    submit: Submit
    cancel: Cancel
    export: Export
    watch_cache: WatchCache
    ping: int
    renewed: RenewResponse
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., export: _Optional[_Union[Export, _Mapping]] = ..., watch_cache: _Optional[_Union[WatchCache, _Mapping]] = ..., ping: _Optional[int] = ..., renewed: _Optional[_Union[RenewResponse, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("router_id", "instance_id", "token")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    instance_id: str
    token: str
    def __init__(self, router_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., token: _Optional[str] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("stream_id", "request_id", "prompt_token_ids", "sampling", "resume_token_ids", "prefill", "decode", "aggregated", "pooling", "encode", "probe", "traceparent", "adapter", "cache_salt", "reasoning_gate", "media", "next_turn_s", "weights_sequence", "weights_digest", "no_tiers", "scored_from", "keeps_kv")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    AGGREGATED_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    ENCODE_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    REASONING_GATE_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    NEXT_TURN_S_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NO_TIERS_FIELD_NUMBER: _ClassVar[int]
    SCORED_FROM_FIELD_NUMBER: _ClassVar[int]
    KEEPS_KV_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingParams
    resume_token_ids: _containers.RepeatedScalarFieldContainer[int]
    prefill: PrefillPhase
    decode: DecodePhase
    aggregated: AggregatedPhase
    pooling: PoolingPhase
    encode: EncodePhase
    probe: bool
    traceparent: str
    adapter: str
    cache_salt: str
    reasoning_gate: ReasoningGate
    media: _containers.RepeatedCompositeFieldContainer[MediaItem]
    next_turn_s: float
    weights_sequence: int
    weights_digest: str
    no_tiers: bool
    scored_from: int
    keeps_kv: bool
    def __init__(self, stream_id: _Optional[int] = ..., request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., resume_token_ids: _Optional[_Iterable[int]] = ..., prefill: _Optional[_Union[PrefillPhase, _Mapping]] = ..., decode: _Optional[_Union[DecodePhase, _Mapping]] = ..., aggregated: _Optional[_Union[AggregatedPhase, _Mapping]] = ..., pooling: _Optional[_Union[PoolingPhase, _Mapping]] = ..., encode: _Optional[_Union[EncodePhase, _Mapping]] = ..., probe: _Optional[bool] = ..., traceparent: _Optional[str] = ..., adapter: _Optional[str] = ..., cache_salt: _Optional[str] = ..., reasoning_gate: _Optional[_Union[ReasoningGate, _Mapping]] = ..., media: _Optional[_Iterable[_Union[MediaItem, _Mapping]]] = ..., next_turn_s: _Optional[float] = ..., weights_sequence: _Optional[int] = ..., weights_digest: _Optional[str] = ..., no_tiers: _Optional[bool] = ..., scored_from: _Optional[int] = ..., keeps_kv: _Optional[bool] = ...) -> None: ...

class ReasoningGate(_message.Message):
    __slots__ = ("parser", "kwargs_json")
    PARSER_FIELD_NUMBER: _ClassVar[int]
    KWARGS_JSON_FIELD_NUMBER: _ClassVar[int]
    parser: str
    kwargs_json: str
    def __init__(self, parser: _Optional[str] = ..., kwargs_json: _Optional[str] = ...) -> None: ...

class PrefillPhase(_message.Message):
    __slots__ = ("transfer_id", "min_cached_tokens", "embeddings")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    MIN_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    min_cached_tokens: int
    embeddings: EmbeddingSource
    def __init__(self, transfer_id: _Optional[str] = ..., min_cached_tokens: _Optional[int] = ..., embeddings: _Optional[_Union[EmbeddingSource, _Mapping]] = ...) -> None: ...

class EmbeddingSource(_message.Message):
    __slots__ = ("transfer_id", "address", "instance_id", "row_bytes")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ROW_BYTES_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    address: str
    instance_id: str
    row_bytes: int
    def __init__(self, transfer_id: _Optional[str] = ..., address: _Optional[str] = ..., instance_id: _Optional[str] = ..., row_bytes: _Optional[int] = ...) -> None: ...

class EncodePhase(_message.Message):
    __slots__ = ("transfer_id",)
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    def __init__(self, transfer_id: _Optional[str] = ...) -> None: ...

class DecodePhase(_message.Message):
    __slots__ = ("transfer_id", "producer_addresses", "producer_instance_id", "live", "producer_stage_layers")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_STAGE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    producer_addresses: _containers.RepeatedScalarFieldContainer[str]
    producer_instance_id: str
    live: bool
    producer_stage_layers: _containers.RepeatedCompositeFieldContainer[StageLayers]
    def __init__(self, transfer_id: _Optional[str] = ..., producer_addresses: _Optional[_Iterable[str]] = ..., producer_instance_id: _Optional[str] = ..., live: _Optional[bool] = ..., producer_stage_layers: _Optional[_Iterable[_Union[StageLayers, _Mapping]]] = ...) -> None: ...

class AggregatedPhase(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PoolingPhase(_message.Message):
    __slots__ = ("second_text_at",)
    SECOND_TEXT_AT_FIELD_NUMBER: _ClassVar[int]
    second_text_at: int
    def __init__(self, second_text_at: _Optional[int] = ...) -> None: ...

class WatchCache(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("stream_id", "reason")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    reason: str
    def __init__(self, stream_id: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Export(_message.Message):
    __slots__ = ("stream_id", "transfer_id")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    transfer_id: str
    def __init__(self, stream_id: _Optional[int] = ..., transfer_id: _Optional[str] = ...) -> None: ...

class StepFrame(_message.Message):
    __slots__ = ("deltas", "load", "tokens", "steps", "closed", "cache", "recent_steps", "pong", "renewal")
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    RECENT_STEPS_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    RENEWAL_FIELD_NUMBER: _ClassVar[int]
    deltas: _containers.RepeatedCompositeFieldContainer[StreamDelta]
    load: WorkerLoad
    tokens: PlainTokens
    steps: StepMoments
    closed: _common_pb2.Error
    cache: CacheUpdate
    recent_steps: RecentSteps
    pong: int
    renewal: RenewRequest
    def __init__(self, deltas: _Optional[_Iterable[_Union[StreamDelta, _Mapping]]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., tokens: _Optional[_Union[PlainTokens, _Mapping]] = ..., steps: _Optional[_Union[StepMoments, _Mapping]] = ..., closed: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., cache: _Optional[_Union[CacheUpdate, _Mapping]] = ..., recent_steps: _Optional[_Union[RecentSteps, _Mapping]] = ..., pong: _Optional[int] = ..., renewal: _Optional[_Union[RenewRequest, _Mapping]] = ...) -> None: ...

class RecentSteps(_message.Message):
    __slots__ = ("age_s", "took_s", "prefill_tokens", "decode_reqs")
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    TOOK_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_REQS_FIELD_NUMBER: _ClassVar[int]
    age_s: _containers.RepeatedScalarFieldContainer[float]
    took_s: _containers.RepeatedScalarFieldContainer[float]
    prefill_tokens: _containers.RepeatedScalarFieldContainer[int]
    decode_reqs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, age_s: _Optional[_Iterable[float]] = ..., took_s: _Optional[_Iterable[float]] = ..., prefill_tokens: _Optional[_Iterable[int]] = ..., decode_reqs: _Optional[_Iterable[int]] = ...) -> None: ...

class StepMoments(_message.Message):
    __slots__ = ("prefill", "decode")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    prefill: Moments
    decode: Moments
    def __init__(self, prefill: _Optional[_Union[Moments, _Mapping]] = ..., decode: _Optional[_Union[Moments, _Mapping]] = ...) -> None: ...

class Moments(_message.Message):
    __slots__ = ("steps", "end", "sums")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    steps: float
    end: int
    sums: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, steps: _Optional[float] = ..., end: _Optional[int] = ..., sums: _Optional[_Iterable[float]] = ...) -> None: ...

class PlainTokens(_message.Message):
    __slots__ = ("stream_ids", "token_ids", "texts")
    STREAM_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    stream_ids: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, stream_ids: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., texts: _Optional[_Iterable[str]] = ...) -> None: ...

class StreamDelta(_message.Message):
    __slots__ = ("stream_id", "token_ids", "text", "logprobs", "finish_reason", "stop_reason", "report", "error", "exported_tokens", "prompt_logprobs", "embedding", "routed_experts", "weights_switch")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    EXPORTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_SWITCH_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.PositionLogprobs]
    finish_reason: _common_pb2.FinishReason
    stop_reason: _common_pb2.StopReason
    report: PhaseReport
    error: _common_pb2.Error
    exported_tokens: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.PositionLogprobs]
    embedding: bytes
    routed_experts: _common_pb2.RoutedExperts
    weights_switch: WeightsSwitch
    def __init__(self, stream_id: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.PositionLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., stop_reason: _Optional[_Union[_common_pb2.StopReason, _Mapping]] = ..., report: _Optional[_Union[PhaseReport, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., exported_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_common_pb2.PositionLogprobs, _Mapping]]] = ..., embedding: _Optional[bytes] = ..., routed_experts: _Optional[_Union[_common_pb2.RoutedExperts, _Mapping]] = ..., weights_switch: _Optional[_Union[WeightsSwitch, _Mapping]] = ...) -> None: ...

class WeightsSwitch(_message.Message):
    __slots__ = ("weights", "stale_kv_tokens")
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    STALE_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    weights: ModelWeights
    stale_kv_tokens: int
    def __init__(self, weights: _Optional[_Union[ModelWeights, _Mapping]] = ..., stale_kv_tokens: _Optional[int] = ...) -> None: ...

class PhaseReport(_message.Message):
    __slots__ = ("queue_s", "prefill_s", "decode_s", "cached_tokens", "transfer", "prefill_busy_s", "decode_busy_s", "energy_j", "encode_s", "fetched_images", "wanted_images")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    PREFILL_BUSY_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_BUSY_S_FIELD_NUMBER: _ClassVar[int]
    ENERGY_J_FIELD_NUMBER: _ClassVar[int]
    ENCODE_S_FIELD_NUMBER: _ClassVar[int]
    FETCHED_IMAGES_FIELD_NUMBER: _ClassVar[int]
    WANTED_IMAGES_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    prefill_s: float
    decode_s: float
    cached_tokens: int
    transfer: TransferReport
    prefill_busy_s: float
    decode_busy_s: float
    energy_j: float
    encode_s: float
    fetched_images: int
    wanted_images: int
    def __init__(self, queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., cached_tokens: _Optional[int] = ..., transfer: _Optional[_Union[TransferReport, _Mapping]] = ..., prefill_busy_s: _Optional[float] = ..., decode_busy_s: _Optional[float] = ..., energy_j: _Optional[float] = ..., encode_s: _Optional[float] = ..., fetched_images: _Optional[int] = ..., wanted_images: _Optional[int] = ...) -> None: ...

class TransferReport(_message.Message):
    __slots__ = ("transfer_s", "exposed_s", "bytes", "blocks", "transport", "digest_mismatches")
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_MISMATCHES_FIELD_NUMBER: _ClassVar[int]
    transfer_s: float
    exposed_s: float
    bytes: int
    blocks: int
    transport: str
    digest_mismatches: int
    def __init__(self, transfer_s: _Optional[float] = ..., exposed_s: _Optional[float] = ..., bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., transport: _Optional[str] = ..., digest_mismatches: _Optional[int] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("info", "load", "ledger", "draining", "gpus", "open_streams", "kv", "uptime_s")
    INFO_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    OPEN_STREAMS_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    info: WorkerInfo
    load: WorkerLoad
    ledger: KvLedger
    draining: bool
    gpus: _containers.RepeatedCompositeFieldContainer[GpuHealth]
    open_streams: int
    kv: KvReport
    uptime_s: float
    def __init__(self, info: _Optional[_Union[WorkerInfo, _Mapping]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., ledger: _Optional[_Union[KvLedger, _Mapping]] = ..., draining: _Optional[bool] = ..., gpus: _Optional[_Iterable[_Union[GpuHealth, _Mapping]]] = ..., open_streams: _Optional[int] = ..., kv: _Optional[_Union[KvReport, _Mapping]] = ..., uptime_s: _Optional[float] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_s", "stop")
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    timeout_s: float
    stop: bool
    def __init__(self, timeout_s: _Optional[float] = ..., stop: _Optional[bool] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("drained", "ledger", "moved_streams")
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    MOVED_STREAMS_FIELD_NUMBER: _ClassVar[int]
    drained: bool
    ledger: KvLedger
    moved_streams: int
    def __init__(self, drained: _Optional[bool] = ..., ledger: _Optional[_Union[KvLedger, _Mapping]] = ..., moved_streams: _Optional[int] = ...) -> None: ...

class UndrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UndrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CacheUpdate(_message.Message):
    __slots__ = ("reset", "more", "removed", "stored", "tier_removed", "tier_stored")
    RESET_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    TIER_REMOVED_FIELD_NUMBER: _ClassVar[int]
    TIER_STORED_FIELD_NUMBER: _ClassVar[int]
    reset: bool
    more: bool
    removed: bytes
    stored: bytes
    tier_removed: bytes
    tier_stored: bytes
    def __init__(self, reset: _Optional[bool] = ..., more: _Optional[bool] = ..., removed: _Optional[bytes] = ..., stored: _Optional[bytes] = ..., tier_removed: _Optional[bytes] = ..., tier_stored: _Optional[bytes] = ...) -> None: ...

class SetRoleRequest(_message.Message):
    __slots__ = ("role", "drain_timeout_s")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    role: Role
    drain_timeout_s: float
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., drain_timeout_s: _Optional[float] = ...) -> None: ...

class SetRoleResponse(_message.Message):
    __slots__ = ("drain_s", "moved_streams")
    DRAIN_S_FIELD_NUMBER: _ClassVar[int]
    MOVED_STREAMS_FIELD_NUMBER: _ClassVar[int]
    drain_s: float
    moved_streams: int
    def __init__(self, drain_s: _Optional[float] = ..., moved_streams: _Optional[int] = ...) -> None: ...

class SettleRoleRequest(_message.Message):
    __slots__ = ("keep",)
    KEEP_FIELD_NUMBER: _ClassVar[int]
    keep: bool
    def __init__(self, keep: _Optional[bool] = ...) -> None: ...

class SettleRoleResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    digest: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    def __init__(self, adapter: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UpdateWeightsRequest(_message.Message):
    __slots__ = ("transaction", "owner", "stage", "weights", "mode", "timeout_s", "hold_s")
    TRANSACTION_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    HOLD_S_FIELD_NUMBER: _ClassVar[int]
    transaction: str
    owner: str
    stage: WeightsStage
    weights: ModelWeights
    mode: str
    timeout_s: float
    hold_s: float
    def __init__(self, transaction: _Optional[str] = ..., owner: _Optional[str] = ..., stage: _Optional[_Union[WeightsStage, str]] = ..., weights: _Optional[_Union[ModelWeights, _Mapping]] = ..., mode: _Optional[str] = ..., timeout_s: _Optional[float] = ..., hold_s: _Optional[float] = ...) -> None: ...

class UpdateWeightsResponse(_message.Message):
    __slots__ = ("weights", "ended_streams")
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ENDED_STREAMS_FIELD_NUMBER: _ClassVar[int]
    weights: ModelWeights
    ended_streams: int
    def __init__(self, weights: _Optional[_Union[ModelWeights, _Mapping]] = ..., ended_streams: _Optional[int] = ...) -> None: ...
