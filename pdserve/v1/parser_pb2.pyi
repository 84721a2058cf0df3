from pdserve.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ParserCommand(_message.Message):
    __slots__ = ("stream_id", "open", "input", "close")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    open: OpenParser
    input: ParserInput
    close: CloseParser
    def __init__(self, stream_id: _Optional[int] = ..., open: _Optional[_Union[OpenParser, _Mapping]] = ..., input: _Optional[_Union[ParserInput, _Mapping]] = ..., close: _Optional[_Union[CloseParser, _Mapping]] = ...) -> None: ...

class OpenParser(_message.Message):
    __slots__ = ("tokenizer", "tool_parser", "reasoning_parser", "request_json", "prompt_token_ids", "resume_token_ids")
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    TOOL_PARSER_FIELD_NUMBER: _ClassVar[int]
    REASONING_PARSER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_JSON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    tokenizer: str
    tool_parser: str
    reasoning_parser: str
    request_json: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    resume_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokenizer: _Optional[str] = ..., tool_parser: _Optional[str] = ..., reasoning_parser: _Optional[str] = ..., request_json: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., resume_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ParserInput(_message.Message):
    __slots__ = ("index", "token_ids", "text", "finished")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    finished: bool
    def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., finished: _Optional[bool] = ...) -> None: ...

class CloseParser(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ParserReply(_message.Message):
    __slots__ = ("stream_id", "plan", "output", "error")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    plan: ParserPlan
    output: ParserOutput
    error: _common_pb2.Error
    def __init__(self, stream_id: _Optional[int] = ..., plan: _Optional[_Union[ParserPlan, _Mapping]] = ..., output: _Optional[_Union[ParserOutput, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

class ParserPlan(_message.Message):
    __slots__ = ("structured_output", "after_reasoning")
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    AFTER_REASONING_FIELD_NUMBER: _ClassVar[int]
    structured_output: _common_pb2.StructuredOutput
    after_reasoning: bool
    def __init__(self, structured_output: _Optional[_Union[_common_pb2.StructuredOutput, _Mapping]] = ..., after_reasoning: _Optional[bool] = ...) -> None: ...

class ParserOutput(_message.Message):
    __slots__ = ("index", "reasoning", "content", "tool_calls", "reasoning_tokens", "content_tokens")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    index: int
    reasoning: str
    content: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[_common_pb2.ToolCallDelta]
    reasoning_tokens: int
    content_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, index: _Optional[int] = ..., reasoning: _Optional[str] = ..., content: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[_common_pb2.ToolCallDelta, _Mapping]]] = ..., reasoning_tokens: _Optional[int] = ..., content_tokens: _Optional[_Iterable[int]] = ...) -> None: ...
