"""Request and response bodies of the OpenAI-compatible HTTP API.

The structs validate bodies (router/api/bodies.py) and generate `/openapi.json`.
"""

from __future__ import annotations

import time
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from pdserve.errors import ClientError, InternalError
from pdserve.tokenizer import ChatMessage, Conversation
from pdserve.types import (
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_STOP_STRINGS,
    Constraint,
    FinishReason,
    Receipt,
    SamplingParams,
    ServiceClass,
    StructuredOutput,
    ToolCallDelta,
)
from router.answer import AnswerDelta, ParsedDelta
from router.api.bodies import (
    KNOWN,
    KNOWN_OF_CHAT,
    KNOWN_OF_COMPLETIONS,
    Body,
    Count,
    FollowsSchema,
    GenerateBody,
    Ignored,
    Share,
    Strict,
    Text,
    TokenId,
    TokenIds,
    TopK,
    encode,
    knows,
    not_supported,
    refuse,
)
from router.api.preprocess import OPEN_ENDED, ParsedRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdserve.errors import PdserveError
    from pdserve.types import GenerateRequest, PositionLogprobs, TokenLogprob, Usage
    from router.api.preprocess import Prompt
    from router.api.sinks import Writer

# Answers to one request: prompts times n.
MAX_ANSWERS = 128
# OpenAI's default length of a completion.
DEFAULT_MAX_TOKENS = 16
# JSON has no infinity. OpenAI writes this for a token that is all but impossible.
MIN_LOGPROB = -9999.0

_Logprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Bias = Annotated[float, Meta(ge=-100, le=100)]
_Empty = Annotated[list[Any], Meta(max_length=0)]


class StreamOptions(Strict):
    include_usage: Annotated[
        bool | None, Meta(description="End the stream with a chunk that has the usage.")
    ] = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: Annotated[
        bool | None,
        Meta(description="With include_usage: every chunk has the usage so far."),
    ] = None


class TextFormat(Strict, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(Strict, tag_field="type", tag="json_object"):
    pass


class JsonSchema(Strict, kw_only=True):
    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: Annotated[
        bool | None, Meta(description="Without effect: the answer always follows the schema.")
    ] = None


class JsonSchemaFormat(Strict, tag_field="type", tag="json_schema"):
    json_schema: JsonSchema


class StructuredOutputs(Strict):
    """vLLM's constraints on the answer. Exactly one is given."""

    json: Annotated[
        dict[str, Any] | str | None, Meta(description="A JSON schema, or its JSON text.")
    ] = None
    json_object: bool | None = None
    regex: Text | None = None
    choice: Annotated[list[Text], Meta(min_length=1)] | None = None
    grammar: Annotated[Text, Meta(description="A grammar in EBNF.")] | None = None


class OpenAiBody(GenerateBody, kw_only=True):
    """Fields of all of OpenAI's endpoints that generate."""

    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Share | None = None
    top_k: TopK = None
    priority: (
        Annotated[
            int,
            Meta(ge=-MAX_SEED - 1, le=MAX_SEED, description="Lower values are served earlier."),
        ]
        | None
    ) = None
    service_tier: Annotated[
        Literal["auto", "default", "flex", "priority"] | None,
        Meta(
            description="flex requests are batch work: they wait for interactive ones. The others "
            "are the same."
        ),
    ] = None
    cache_salt: Annotated[
        Text | None, Meta(description="Only requests with the same salt share cached prefixes.")
    ] = None
    user: Ignored = None

    def _request(
        self, prompt: Prompt, request_id: str, max_tokens: int | None, given: dict[str, Any]
    ) -> ParsedRequest:
        """Return the request. `given` are the sampling parameters that the client set."""
        flex = self.service_tier == "flex"
        return ParsedRequest(
            model=self.model or "",
            prompt=prompt,
            sampling=SamplingParams(max_tokens=max_tokens or OPEN_ENDED, **given),
            request_id=request_id,
            priority=self.priority or 0,
            service_class=ServiceClass.BATCH if flex else ServiceClass.INTERACTIVE,
            given=given.keys(),
            cache_salt=self.cache_salt or "",
        )


class _TextBody(OpenAiBody, kw_only=True):
    """Fields of chat and completions."""

    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=128, description="Number of answers.")] | None = None
    min_p: Share | None = None
    seed: Annotated[int, Meta(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=1 << 30)] | None = None
    stop: Text | Annotated[list[Text], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0, le=100)] | None = None
    logit_bias: dict[TokenId, _Bias] | None = None
    skip_special_tokens: bool | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool | None = None
    resume_token_ids: Annotated[
        TokenIds | None, Meta(description="Tokens of this answer that the client already has.")
    ] = None
    request_id: Annotated[
        str | None, Meta(description="As the header X-Request-Id, which comes first.")
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        Meta(description="Whether the tokenizer adds its own, such as BOS. By default to text."),
    ] = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def usage_in_chunks(self) -> bool:
        options = self.stream_options
        return options is not None and self.include_usage and bool(options.continuous_usage_stats)

    @property
    def constraint_field(self) -> str:
        return "structured_outputs" if self.structured_outputs is not None else "response_format"

    def named_id(self) -> str | None:
        return self.request_id

    def writer(self, request_id: str, made: Sequence[GenerateRequest]) -> Writer:
        body: Any = self
        first = made[0]
        if not self.stream:
            return WholeAnswer(body, request_id, first.served_name)
        prompt_tokens = sum([len(x.prompt_token_ids) for x in made])
        return EventWriter(body, request_id, first.served_name, prompt_tokens, len(first.resume))

    def _parsed(
        self, prompt: Prompt, request_id: str, max_tokens: int | None, logprobs: int | None
    ) -> ParsedRequest:
        if self.stream_options is not None and not self.stream:
            refuse("stream_options", "requires stream: true")
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            raise not_supported("stream_options.include_obfuscation")
        values = zip(_SAMPLING, _sampling_of(self), strict=True)
        given: dict[str, Any] = {name: value for name, value in values if value is not None}
        if self.stop is not None:
            given["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.stop_token_ids is not None:
            given["stop_token_ids"] = tuple(self.stop_token_ids)
        if logprobs is not None:
            given["logprobs"] = logprobs
        given["structured_output"] = _constraint(self.response_format, self.structured_outputs)
        parsed = self._request(prompt, request_id, max_tokens, given)
        parsed.resume = tuple(self.resume_token_ids or ())
        parsed.add_special_tokens = self.add_special_tokens
        return parsed


# Fields that are sampling parameters under the same name.
_SAMPLING = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "ignore_eos"),
    *("include_stop_str_in_output", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "logit_bias", "skip_special_tokens"),
)
_sampling_of = attrgetter(*_SAMPLING)


@knows(KNOWN | KNOWN_OF_COMPLETIONS)
class CompletionRequest(_TextBody, kw_only=True):
    """Body of POST /v1/completions."""

    id_prefix: ClassVar[str] = "cmpl-"
    prompt: Annotated[
        str | list[TokenId | str | list[TokenId]],
        Meta(description="Text, token ids, or a list of several prompts."),
    ]
    max_tokens: Annotated[
        Annotated[int, Meta(ge=0, le=1 << 30)] | None,
        Meta(description="0 only with echo: nothing is generated."),
    ] = None
    logprobs: _Logprobs | None = None
    echo: Annotated[
        bool | None, Meta(description="Repeat the prompt, with its logprobs if they are asked for.")
    ] = None

    def parse(self, request_id: str) -> list[ParsedRequest]:
        prompts = prompts_of(self.prompt, "prompt")
        if len(prompts) * (self.n or 1) > MAX_ANSWERS:
            refuse("prompt", f"holds {len(prompts)} prompts; {MAX_ANSWERS} answers are given")
        if self.max_tokens == 0 and not self.echo:
            refuse("max_tokens", "must be at least 1 without echo")
        max_tokens = DEFAULT_MAX_TOKENS if self.max_tokens is None else max(1, self.max_tokens)
        parsed = []
        for i, prompt in enumerate(prompts):
            is_only = len(prompts) == 1
            one_id = request_id if is_only else f"{request_id}-{i}"
            one = self._parsed(prompt, one_id, max_tokens, self.logprobs)
            one.prompt_field = "prompt" if is_only else f"prompt[{i}]"
            if self.echo:
                one.echo, one.only_prompt = True, self.max_tokens == 0
                one.sampling.prompt_logprobs = self.logprobs
            parsed.append(one)
        if self.resume_token_ids and len(parsed) > 1:
            refuse("resume_token_ids", "requires one prompt")
        return parsed


def prompts_of(given: Any, field: str) -> list[str | tuple[int, ...]]:
    """Return the prompts of a text, its token ids, or a list of them. Raises InvalidRequest."""
    if isinstance(given, str) or not given or isinstance(given[0], int):
        return [_one_prompt(given, field)]
    return [_one_prompt(x, f"{field}[{i}]") for i, x in enumerate(given)]


def _one_prompt(given: Any, field: str) -> str | tuple[int, ...]:
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        refuse(field, "must be text or token ids, as the first prompt")
    # One pass in C, since a prompt may have thousands of tokens.
    if set(map(type, given)) - {int}:
        wrong = next(i for i, x in enumerate(given) if not isinstance(x, int))
        refuse(f"{field}[{wrong}]", "expected a token id")
    return tuple(given)


class LoadAdapterRequest(Body):
    """Body of POST /v1/load_lora_adapter."""

    lora_name: Annotated[Text, Meta(description="Name that requests give as `model`.")]
    lora_path: Annotated[Text, Meta(description="Directory on the workers' machines.")]
    load_inplace: Annotated[
        bool, Meta(description="Replace the adapter that is served under this name.")
    ] = False
    model: Annotated[str, Meta(description="Its model, if the router serves several.")] = ""


class UnloadAdapterRequest(Body):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: Text


class TextPart(Strict, tag_field="type", tag="text"):
    text: str
    cache_control: Ignored = None
    annotations: Ignored = None


class CalledFunction(Strict):
    name: Text
    arguments: Annotated[str, Meta(description="JSON text of an object.")]


def read_object(text: str, field: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        refuse(field, f"is not the JSON text of an object: {error}")


class ToolCall(Strict):
    """A tool call of an earlier answer."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"
    index: Ignored = None

    def parse(self, field: str) -> dict[str, Any]:
        """Return the call with its arguments as an object, as chat templates want it."""
        text = self.function.arguments or "{}"
        arguments = read_object(text, f"{field}.function.arguments")
        called = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": called}


class Message(Strict, kw_only=True):
    """A message of a conversation. OpenAI's clients send answers back with empty lists or nulls."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | list[TextPart] | None,
        Meta(description="Text, or parts of text, which are joined by line breaks."),
    ] = None
    name: str | None = None
    refusal: _Empty | None = None
    audio: _Empty | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: _Empty | None = None
    annotations: Ignored = None
    cache_control: Ignored = None
    parsed: Ignored = None
    provider_specific_fields: Ignored = None
    reasoning: Annotated[
        str | None, Meta(description="Given to the chat template, with the name of the model's.")
    ] = None
    reasoning_content: Annotated[str | None, Meta(description="As reasoning.")] = None

    def parse(self, field: str) -> ChatMessage:
        content = self.content
        if not content and not isinstance(content, str):
            # Agents send their own turns back without text.
            if self.role != "assistant":
                refuse(f"{field}.content", "is required")
            content = ""
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        reasoning = self.reasoning_content if self.reasoning is None else self.reasoning
        calls = [x.parse(f"{field}.tool_calls[{i}]") for i, x in enumerate(self.tool_calls or ())]
        if calls and self.role != "assistant":
            refuse(f"{field}.tool_calls", "belongs to the role assistant")
        if self.tool_call_id is not None and self.role != "tool":
            refuse(f"{field}.tool_call_id", "belongs to the role tool")
        return ChatMessage(self.role, content, self.name, reasoning, calls, self.tool_call_id)


class Function(Strict):
    """A function that the model may call."""

    name: Annotated[str, Meta(pattern=r"^[\w.:/-]{1,256}$")]
    description: str | None = None
    parameters: Annotated[
        dict[str, Any] | None, Meta(description="JSON schema of the arguments.")
    ] = None
    strict: FollowsSchema = None


class Tool(Strict):
    function: Function
    type: Literal["function"]


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    function: NamedFunction
    type: Literal["function"]


def function_tool(
    name: str, description: str | None, parameters: dict[str, Any] | None, strict: bool | None
) -> Tool:
    function = Function(name=name, description=description, parameters=parameters, strict=strict)
    return Tool(function=function, type="function")


def named_tool(name: str) -> NamedTool:
    return NamedTool(function=NamedFunction(name=name), type="function")


MAX_TOOLS = 512
MAX_SCHEMA_DEPTH = 64  # more could overflow the stack of the grammar's compiler

Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None
ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool | None,
    Meta(description="auto by default. Forced calls follow the schema of their arguments."),
]
ParallelCalls = Annotated[bool | None, Meta(description="False: at most one call in an answer.")]


class ToolFields(Body):
    """The fields of tools alone."""

    tools: Tools = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: ParallelCalls = None


def read_tools(
    tools: Sequence[Tool] | None, choice: ToolChoice, parallel: bool | None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the tools for the chat template, none of them if none may be called, and the options
    of parsing. Raises InvalidRequest naming the field."""
    if not tools and choice not in (None, "none", "auto"):
        refuse("tool_choice", "requires tools")
    if not tools or choice == "none":
        return [], {}
    names = {tool.function.name for tool in tools}
    if len(names) < len(tools):
        refuse("tools", "has two functions of the same name")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        refuse("tool_choice.function.name", f"is {choice.function.name!r}, which is not in tools")
    for i, tool in enumerate(tools):
        if _is_deeper(tool.function.parameters, MAX_SCHEMA_DEPTH):
            at = f"tools[{i}].function.parameters"
            refuse(at, f"is nested deeper than {MAX_SCHEMA_DEPTH}")
    options = {"tool_choice": choice or "auto", "parallel_tool_calls": parallel}
    found: dict[str, Any] = msgspec.to_builtins(
        {name: value for name, value in options.items() if value is not None}
    )
    plain = []
    for tool in tools:
        function = msgspec.structs.asdict(tool.function)
        set_only = {name: value for name, value in function.items() if value is not None}
        plain.append({"type": "function", "function": set_only})
    return plain, found


def _is_deeper(value: object, depth: int) -> bool:
    if not isinstance(value, (dict, list)):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return not depth or any(_is_deeper(x, depth - 1) for x in inner)


# Variables of chat templates that have fields of their own.
_OWN_VARIABLES = ("messages", "tools", "add_generation_prompt", "continue_final_message")


Variables = Annotated[
    dict[str, Any] | None, Meta(description="Variables for the model's chat template.")
]
Effort = Annotated[
    Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None,
    Meta(
        description="Given to the chat template as reasoning_effort and, unless "
        "chat_template_kwargs has it, as enable_thinking, which is false for none."
    ),
]
Begins = Annotated[
    bool | None, Meta(description="The answer begins a new message, as it does by default.")
]
Continues = Annotated[bool | None, Meta(description="The answer continues the last message.")]


class _Chat(Protocol):
    @property
    def messages(self) -> Sequence[Message] | None: ...

    chat_template_kwargs: Variables
    reasoning_effort: Effort
    add_generation_prompt: Begins
    continue_final_message: Continues


def effort_variables(effort: Effort) -> dict[str, Any]:
    """Return the variables that tell a chat template how much to reason."""
    return (
        {} if effort is None else {"enable_thinking": effort != "none", "reasoning_effort": effort}
    )


def conversation(body: _Chat) -> Conversation:
    """Return what the model's chat template renders. Raises InvalidRequest naming the field."""
    variables = dict(body.chat_template_kwargs or {})
    for name in _OWN_VARIABLES:
        if name in variables:
            refuse(f"chat_template_kwargs.{name}", "is not a variable of its own")
    variables = effort_variables(body.reasoning_effort) | variables
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        refuse("add_generation_prompt", "must be false with continue_final_message")
    begins = body.add_generation_prompt is not False and not continues
    messages = [x.parse(f"messages[{i}]") for i, x in enumerate(body.messages or ())]
    return Conversation(messages, begins, continues, variables)


@knows(KNOWN | KNOWN_OF_CHAT)
class ChatRequest(_TextBody, kw_only=True):
    """Body of POST /v1/chat/completions."""

    id_prefix: ClassVar[str] = "chatcmpl-"
    messages: Annotated[list[Message], Meta(min_length=1)]
    chat_template_kwargs: Variables = None
    reasoning_effort: Effort = None
    add_generation_prompt: Begins = None
    continue_final_message: Continues = None
    tools: Tools = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: ParallelCalls = None
    include_reasoning: Annotated[
        bool | None, Meta(description="False: reasoning is left out of the answer.")
    ] = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: _Logprobs | None = None
    metadata: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    store: Annotated[bool | None, Meta(description="Without effect: answers are not stored.")] = (
        None
    )

    def parse(self, request_id: str) -> list[ParsedRequest]:
        if self.top_logprobs is not None and not self.logprobs:
            refuse("top_logprobs", "requires logprobs: true")
        new, old = self.max_completion_tokens, self.max_tokens
        if new is not None and old is not None and new != old:
            refuse("max_tokens", f"is {old}, but max_completion_tokens is {new}")
        parsed = self._parsed(
            conversation(self),
            request_id,
            old if new is None else new,
            (self.top_logprobs or 0) if self.logprobs else None,
        )
        tools, parsed.parsing_options = read_tools(
            self.tools, self.tool_choice, self.parallel_tool_calls
        )
        assert isinstance(parsed.prompt, Conversation)
        parsed.prompt.tools = tools
        if self.include_reasoning is False:
            parsed.parsing_options["include_reasoning"] = False
        parsed.prompt_field = "messages"
        parsed.max_tokens_field = "max_tokens" if new is None else "max_completion_tokens"
        return [parsed]

    @property
    def constraint_field(self) -> str:
        return "tools" if self.tools else super().constraint_field


def _constraint(
    form: TextFormat | JsonObjectFormat | JsonSchemaFormat | None, given: StructuredOutputs | None
) -> StructuredOutput | None:
    by_format = None
    if isinstance(form, JsonSchemaFormat):
        by_format = StructuredOutput(Constraint.JSON_SCHEMA, _schema_text(form.json_schema.schema))
    elif isinstance(form, JsonObjectFormat):
        by_format = StructuredOutput(Constraint.JSON_OBJECT)
    if given is None:
        return by_format
    if by_format is not None:
        refuse("structured_outputs", "cannot be combined with response_format")
    values = {name: getattr(given, name) for name in given.__struct_fields__}
    if sum(value is not None for value in values.values()) != 1:
        refuse("structured_outputs", f"needs one of {', '.join(values)}")
    if given.json is not None:
        return StructuredOutput(Constraint.JSON_SCHEMA, _schema_text(given.json))
    if given.json_object is not None:
        if not given.json_object:
            refuse("structured_outputs.json_object", "must be true")
        return StructuredOutput(Constraint.JSON_OBJECT)
    if given.choice is not None:
        return StructuredOutput(Constraint.CHOICE, choices=tuple(given.choice))
    if given.regex is not None:
        return StructuredOutput(Constraint.REGEX, given.regex)
    return StructuredOutput(Constraint.GRAMMAR, given.grammar or "")


def _schema_text(schema: dict[str, Any] | str) -> str:
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            refuse("structured_outputs.json", f"is not a JSON schema: {error}")
    return encode(schema).decode()


RequestBody = ChatRequest | CompletionRequest


# -- Writing


class PromptDetails(Struct):
    cached_tokens: int


class CompletionDetails(Struct):
    reasoning_tokens: int


class UsageBody(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | UnsetType = UNSET
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


class Extension(Struct):
    """What pdserve adds to OpenAI's responses."""

    receipt: Receipt


class FunctionBody(Struct):
    name: str | UnsetType
    arguments: str


class ToolCallBody(Struct):
    """A tool call of an answer; in a chunk, a piece of it with its `index`."""

    index: int | UnsetType
    id: str | UnsetType
    type: str | UnsetType
    function: FunctionBody


class TextMessage(Struct):
    """A message of an answer. Reasoning goes by two names: vLLM's, and that of most clients."""

    role: str | UnsetType
    content: str | UnsetType | None
    refusal: UnsetType | None = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallBody] | UnsetType = UNSET


class Choice(Struct, kw_only=True):
    """Has `text`, or `message`, or in a chunk of a chat `delta`."""

    index: int
    text: str | UnsetType = UNSET
    message: TextMessage | UnsetType = UNSET
    delta: TextMessage | UnsetType = UNSET
    logprobs: Any = None
    finish_reason: Annotated[
        str | None,
        Meta(description="stop, length or tool_calls; error and abort where it broke off."),
    ] = None
    token_ids: list[int] | UnsetType = UNSET
    stop_reason: str | int | UnsetType | None = UNSET


class Response(Struct, kw_only=True):
    """A whole answer, or a chunk of a streamed one."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: UsageBody | UnsetType | None = UNSET
    pdserve: Extension | UnsetType = UNSET


class ErrorDetails(Struct, omit_defaults=True):
    message: str
    type: str
    param: str | UnsetType | None
    code: str
    reason: str = ""


class ErrorBody(Struct):
    error: ErrorDetails


_ERROR_TYPES = {429: "rate_limit_error", 503: "service_unavailable_error"}


def error_body(error: PdserveError) -> ErrorBody:
    default = "invalid_request_error" if isinstance(error, ClientError) else "server_error"
    kind = _ERROR_TYPES.get(error.http_status, default)
    return ErrorBody(
        ErrorDetails(error.message, kind, error.field or None, error.code, error.reason)
    )


def _usage(usage: Usage) -> UsageBody:
    total = usage.prompt_tokens + usage.completion_tokens
    details = PromptDetails(usage.cached_tokens)
    reasoning = usage.reasoning_tokens
    completion = CompletionDetails(reasoning) if reasoning else UNSET
    return UsageBody(usage.prompt_tokens, usage.completion_tokens, total, details, completion)


DONE = b"data: [DONE]\n\n"
# Stands for the text in a chunk that is encoded once and cut in two.
_HOLE = "\ue000"


class _Writer:
    """What streamed and whole answers have in common."""

    def __init__(self, body: RequestBody, request_id: str, model: str) -> None:
        self._is_chat = isinstance(body, ChatRequest)
        self._head: dict[str, Any] = {"id": request_id, "created": int(time.time()), "model": model}
        self._token_ids = bool(body.return_token_ids)
        self._include_usage = body.include_usage
        # An answer that calls a tool because it was named ends as any other.
        self._is_named = isinstance(getattr(body, "tool_choice", None), NamedTool)
        self._calling: set[int] = set()  # choices with tool calls

    def _choice(self, delta: AnswerDelta, offset: int = 0) -> Choice:
        """Return the choice without its message. `offset` is the length of the text so far."""
        choice = Choice(index=delta.index, finish_reason=delta.finish_reason)
        if delta.finish_reason is not None:
            choice.stop_reason = delta.stop_reason
            if delta.index in self._calling and delta.finish_reason is FinishReason.STOP:
                choice.finish_reason = "tool_calls"
        if delta.logprobs:
            lists = _chat_logprobs if self._is_chat else _completion_logprobs
            choice.logprobs = lists(delta.logprobs, offset)
        if self._token_ids:
            choice.token_ids = list(delta.token_ids)
        if not self._is_chat:
            choice.text = delta.text
        return choice

    def _note_calls(self, delta: ParsedDelta) -> None:
        if delta.tool_calls and not self._is_named:
            self._calling.add(delta.index)


class EventWriter(_Writer):
    """Encodes deltas as server-sent events.

    The receipt is in the chunk with the finish reason, or in the usage chunk if one was asked for.
    `prompt_tokens` and `resumed_tokens` are for the usage in chunks.
    """

    def __init__(
        self,
        body: RequestBody,
        request_id: str,
        model: str,
        prompt_tokens: int = 0,
        resumed_tokens: int = 0,
    ) -> None:
        super().__init__(body, request_id, model)
        self._usage_in_chunks = body.usage_in_chunks
        self._prompt_tokens = prompt_tokens
        self._tokens = resumed_tokens  # of all choices
        # Each delta needs a chunk of its own, though it has no text.
        self._every_delta = self._token_ids or self._usage_in_chunks
        # By choice: its encoded chunk before and after the text, and the length of its text so far.
        self._around: dict[int, list[bytes]] = {}
        self._offsets: dict[int, int] = {}
        self._unfinished: set[int] = set()

    def write(self, delta: AnswerDelta) -> bytes:
        """Return the events of `delta`, empty if the client would see nothing new."""
        index = delta.index
        if index not in self._offsets:  # the first of its choice
            self._offsets[index] = 0
            self._unfinished.add(index)
            return self._full(delta, "assistant")
        if delta.finish_reason is not None or delta.logprobs or self._every_delta:
            return self._full(delta)
        if not delta.text:
            parsed = isinstance(delta, ParsedDelta) and (delta.reasoning or delta.tool_calls)
            return self._full(delta) if parsed else b""
        around = self._around.get(index)
        if around is None:
            chunk = self._full(AnswerDelta(text=_HOLE, index=index))
            around = self._around[index] = chunk.split(encode(_HOLE))
        return around[0] + encode(delta.text) + around[1]

    def end(self) -> bytes:
        """Raises InternalError if a choice has no finish reason."""
        if not self._offsets or self._unfinished:
            raise InternalError("the answer ended without a finish reason")
        return DONE

    def fail(self, error: PdserveError) -> bytes:
        return b"data: %b\n\n" % encode(error_body(error))

    def _full(self, delta: AnswerDelta, role: str | UnsetType = UNSET) -> bytes:
        offset = self._offsets[delta.index]
        self._offsets[delta.index] = offset + sum(len(x.sampled.text) for x in delta.logprobs)
        if isinstance(delta, ParsedDelta):
            self._note_calls(delta)
        choice = self._choice(delta, offset)
        if isinstance(delta, ParsedDelta):
            choice.delta = _parsed_message(delta, role)
        elif self._is_chat:
            choice.delta = TextMessage(role, delta.text)
        if delta.finish_reason is not None:
            self._unfinished.discard(delta.index)
        extension = UNSET if delta.receipt is None else Extension(delta.receipt)
        if not self._include_usage:
            return self._chunk(choice, pdserve=extension)
        so_far: dict[str, Any] = {}
        if self._usage_in_chunks:
            self._tokens += len(delta.token_ids)
            prompt, tokens = self._prompt_tokens, self._tokens
            so_far["usage"] = UsageBody(prompt, tokens, prompt + tokens)
        if delta.usage is None:
            return self._chunk(choice, **so_far)
        return self._chunk(choice, **so_far) + self._chunk(
            usage=_usage(delta.usage), pdserve=extension
        )

    def _chunk(self, *choices: Choice, **fields: Any) -> bytes:
        if self._include_usage:
            fields.setdefault("usage", None)
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        chunk = Response(object=kind, choices=list(choices), **self._head, **fields)
        return b"data: %b\n\n" % encode(chunk)


class WholeAnswer(_Writer):
    """Collects the deltas of an answer that is not streamed."""

    def __init__(self, body: RequestBody, request_id: str, model: str) -> None:
        super().__init__(body, request_id, model)
        self._deltas: dict[int, list[AnswerDelta]] = {}
        self._fields: dict[str, Any] = {}

    def write(self, delta: AnswerDelta) -> bytes:
        self._deltas.setdefault(delta.index, []).append(delta)
        if isinstance(delta, ParsedDelta):
            self._note_calls(delta)
        if delta.usage is not None:
            self._fields["usage"] = _usage(delta.usage)
        if delta.receipt is not None:
            self._fields["pdserve"] = Extension(delta.receipt)
        return b""

    def fail(self, error: PdserveError) -> bytes:
        raise error

    def end(self) -> bytes:
        """Raises InternalError if a choice has no finish reason."""
        choices = [self._whole(deltas) for _, deltas in sorted(self._deltas.items())]
        if not choices:
            raise InternalError("the answer is empty")
        kind = "chat.completion" if self._is_chat else "text_completion"
        return encode(Response(object=kind, choices=choices, **self._head, **self._fields))

    def _whole(self, deltas: list[AnswerDelta]) -> Choice:
        whole = msgspec.structs.replace(
            deltas[-1],
            text="".join(x.text for x in deltas),
            token_ids=tuple(chain.from_iterable(x.token_ids for x in deltas)),
            logprobs=tuple(chain.from_iterable(x.logprobs for x in deltas)),
        )
        if whole.finish_reason is None:
            raise InternalError("the answer ended without a finish reason")
        choice = self._choice(whole)
        parsed = [x for x in deltas if isinstance(x, ParsedDelta)]
        if parsed:
            choice.message = _whole_message(parsed)
        elif self._is_chat:
            choice.message = TextMessage("assistant", whole.text, None)
        return choice


def _parsed_message(delta: ParsedDelta, role: str | UnsetType) -> TextMessage:
    """Return what a chunk shows of a parsed answer."""
    message = TextMessage(role, delta.text or (UNSET if role is UNSET else ""))
    if delta.reasoning:
        message.reasoning = message.reasoning_content = delta.reasoning
    if delta.tool_calls:
        message.tool_calls = [
            ToolCallBody(
                call.index,
                call.id or UNSET,
                "function" if call.name else UNSET,
                FunctionBody(call.name or UNSET, call.arguments),
            )
            for call in delta.tool_calls
        ]
    return message


def _whole_message(deltas: Sequence[ParsedDelta]) -> TextMessage:
    content = "".join(x.text for x in deltas)
    calls = whole_calls(chain.from_iterable(x.tool_calls for x in deltas))
    message = TextMessage("assistant", content if content.strip() else None, None)
    if content and not calls:
        message.content = content
    if reasoning := "".join(x.reasoning for x in deltas):
        message.reasoning = message.reasoning_content = reasoning
    if calls:
        message.tool_calls = [
            ToolCallBody(UNSET, x.id, "function", FunctionBody(x.name, x.arguments)) for x in calls
        ]
    return message


def whole_calls(pieces: Iterable[ToolCallDelta]) -> list[ToolCallDelta]:
    """Return each tool call in one piece."""
    found: dict[int, list[ToolCallDelta]] = {}
    for piece in pieces:
        found.setdefault(piece.index, []).append(piece)
    texts = attrgetter("id", "name", "arguments")
    return [
        ToolCallDelta(index, *map("".join, zip(*map(texts, call), strict=True)))
        for index, call in sorted(found.items())
    ]


def chat_logprobs(positions: Sequence[PositionLogprobs]) -> list[dict[str, object]]:
    return [
        {**_token(x.sampled), "top_logprobs": [_token(top) for top in x.top]} for x in positions
    ]


def _chat_logprobs(positions: Sequence[PositionLogprobs], _: int) -> dict[str, object]:
    return {"content": chat_logprobs(positions), "refusal": None}


def _completion_logprobs(positions: Sequence[PositionLogprobs], offset: int) -> dict[str, object]:
    offsets: list[int] = []
    for position in positions:
        offsets.append(offset)
        offset += len(position.sampled.text)
    return {
        "tokens": [x.sampled.text for x in positions],
        "token_logprobs": [_finite(x.sampled) if x.sampled.rank else None for x in positions],
        # The sampled token is always listed, likely or not.
        "top_logprobs": [
            {top.text: _finite(top) for top in reversed((*x.top, x.sampled))}
            if x.sampled.rank
            else None
            for x in positions
        ],
        "text_offset": offsets,
    }


def _token(token: TokenLogprob) -> dict[str, object]:
    as_bytes = list(token.text.encode("utf-8", "replace"))
    return {"token": token.text, "logprob": _finite(token), "bytes": as_bytes}


def _finite(token: TokenLogprob) -> float:
    # In this order NaN becomes MIN_LOGPROB too.
    return max(MIN_LOGPROB, token.logprob)
