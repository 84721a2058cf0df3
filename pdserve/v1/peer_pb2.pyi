from pdserve.v1 import generation_pb2 as _generation_pb2
from pdserve.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ForwardRequest(_message.Message):
    __slots__ = ("request", "model", "tokenizer", "tenant", "priority", "service_class", "session", "regions", "from_region", "stale_kv")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SERVICE_CLASS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    FROM_REGION_FIELD_NUMBER: _ClassVar[int]
    STALE_KV_FIELD_NUMBER: _ClassVar[int]
    request: _worker_pb2.Submit
    model: str
    tokenizer: str
    tenant: str
    priority: int
    service_class: _generation_pb2.ServiceClass
    session: str
    regions: _containers.RepeatedScalarFieldContainer[str]
    from_region: str
    stale_kv: str
    def __init__(self, request: _Optional[_Union[_worker_pb2.Submit, _Mapping]] = ..., model: _Optional[str] = ..., tokenizer: _Optional[str] = ..., tenant: _Optional[str] = ..., priority: _Optional[int] = ..., service_class: _Optional[_Union[_generation_pb2.ServiceClass, str]] = ..., session: _Optional[str] = ..., regions: _Optional[_Iterable[str]] = ..., from_region: _Optional[str] = ..., stale_kv: _Optional[str] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RegionLoad(_message.Message):
    __slots__ = ("region", "draining", "models")
    REGION_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    region: str
    draining: bool
    models: _containers.RepeatedCompositeFieldContainer[ModelLoad]
    def __init__(self, region: _Optional[str] = ..., draining: _Optional[bool] = ..., models: _Optional[_Iterable[_Union[ModelLoad, _Mapping]]] = ...) -> None: ...

class ModelLoad(_message.Message):
    __slots__ = ("info", "workers", "ttft_s", "adapters", "weights")
    class TtftSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    INFO_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    info: _worker_pb2.ModelInfo
    workers: int
    ttft_s: _containers.ScalarMap[int, float]
    adapters: _containers.RepeatedScalarFieldContainer[str]
    weights: str
    def __init__(self, info: _Optional[_Union[_worker_pb2.ModelInfo, _Mapping]] = ..., workers: _Optional[int] = ..., ttft_s: _Optional[_Mapping[int, float]] = ..., adapters: _Optional[_Iterable[str]] = ..., weights: _Optional[str] = ...) -> None: ...

class GetModelTokenizerRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...
