"""Bodies of OpenAI's chat and completions."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from pdserve.model.tokenizer import Conversation
from pdserve.types import (
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_STOP_STRINGS,
    Constraint,
    StructuredOutput,
)
from router.api.dialects.conversation import (
    Begins,
    Continues,
    Effort,
    Message,
    NamedTool,
    ParallelCalls,
    ToolChoice,
    Tools,
    Variables,
    conversation,
    read_tools,
)
from router.api.dialects.fields import (
    MAX_MESSAGES,
    Count,
    GenerateBody,
    Ignored,
    JsonObjectFormat,
    Known,
    OpenAiBody,
    SessionId,
    Share,
    Strict,
    Text,
    TextFormat,
    TokenId,
    TokenIds,
    encode,
    knows,
    not_supported,
    prompts_of,
    refuse,
)
from router.api.dialects.openai_writer import AnswerForm, EventWriter, WholeAnswer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.types import GenerateRequest
    from router.api.dialects.fields import Writer
    from router.api.preprocess import ParsedRequest, Prompt

# Limit of answers to one request: prompts times n.
MAX_ANSWERS = 128
# OpenAI's default length of a completion.
DEFAULT_MAX_TOKENS = 16

_Logprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Bias = Annotated[float, Meta(ge=-100, le=100)]

_OFF = Known((False,))
_EMPTY = Known(({}, []))
_NULL = Known()
_TEXT_ONLY = "only text is generated"
# Fields of OpenAI, vLLM 0.32 and SGLang for chat and completions.
KNOWN: dict[str, Known] = {
    "allowed_token_ids": _NULL,
    "bad_words": _EMPTY,
    "best_of": Known((1,), "use n to get several answers"),
    "bootstrap_host": _NULL,
    "bootstrap_port": _NULL,
    "bootstrap_room": _NULL,
    "custom_logit_processor": _NULL,
    "custom_params": _EMPTY,
    "data_parallel_rank": _NULL,
    "ebnf": Known((), "use structured_outputs.grammar"),
    "ec_transfer_params": _NULL,
    "extra_key": Known((), "use cache_salt"),
    "input_ids": Known((), "use prompt"),
    "kv_transfer_params": _NULL,
    "length_penalty": Known((1,)),
    "logprob_token_ids": _EMPTY,
    "lora_path": Known((), "name the adapter as the model"),
    "mm_payload": Known(("tensors", "none")),
    "no_stop_trim": Known((False,), "use include_stop_str_in_output"),
    "prompt_embeds": _NULL,
    "prompt_logprobs": Known((), "use echo and logprobs of /v1/completions"),
    "regex": Known((), "use structured_outputs.regex"),
    "repetition_detection": _NULL,
    "return_cached_tokens_details": _OFF,
    "return_hidden_states": _OFF,
    "return_mm_kwargs": _OFF,
    "return_prompt_text": _OFF,
    "return_routed_experts": _OFF,
    "return_token_offsets": _OFF,
    "return_tokens_as_token_ids": _OFF,
    "rid": Known((), "use request_id"),
    "routed_dp_rank": _NULL,
    "routed_experts_prompt_start": Known((0,)),
    "session_params": _EMPTY,
    "spaces_between_special_tokens": Known((True,)),
    "stop_regex": Known(([], "")),
    "stream_interval": Known((1,)),
    "thinking_token_budget": _NULL,
    "truncate_prompt_tokens": _NULL,
    "truncation_side": Known(("left", "right")),
    "use_beam_search": _OFF,
    "vllm_xargs": _EMPTY,
    "watermarking": _OFF,
}
KNOWN_OF_COMPLETIONS: dict[str, Known] = {"suffix": Known(("",))}
KNOWN_OF_CHAT: dict[str, Known] = {
    "audio": Known((), _TEXT_ONLY),
    "chat_template": Known((), "the model's own is used"),
    "documents": _EMPTY,
    "echo": Known((False,), "the prompt is not repeated"),
    "function_call": Known(("none",)),
    "functions": _NULL,
    "max_dynamic_patch": _NULL,
    "media_io_kwargs": _EMPTY,
    "min_dynamic_patch": _NULL,
    "mm_processor_kwargs": _EMPTY,
    "modalities": Known((["text"],), _TEXT_ONLY),
    "moderation": _NULL,
    "prediction": _NULL,
    "prompt_cache_options": _NULL,
    "prompt_cache_retention": Known(("in_memory", "in-memory")),
    "use_audio_in_video": _OFF,
    "verbosity": Known(("medium",)),
    "web_search_options": _NULL,
}


class StreamOptions(Strict):
    include_usage: Annotated[
        bool | None, Meta(description="End the stream with a chunk that has the usage.")
    ] = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: Annotated[
        bool | None,
        Meta(description="With include_usage: every chunk has the usage so far."),
    ] = None


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
    """vLLM's constraints on the answer. Exactly one must be set. Limits, which also apply to a
    `json_schema` and to the `parameters` of a tool: 64 KiB, 8,192 values, 64 levels, 1,024
    alternatives or choices, patterns of 4,096 characters, 64 nested parentheses.
    """

    json: Annotated[
        dict[str, Any] | str | None, Meta(description="A JSON schema, or its JSON text.")
    ] = None
    json_object: bool | None = None
    regex: Text | None = None
    choice: Annotated[list[Text], Meta(min_length=1)] | None = None
    grammar: Annotated[Text, Meta(description="A grammar in EBNF.")] | None = None


class _TextBody(OpenAiBody, kw_only=True):
    """Fields shared by chat and completions."""

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
        str | None, Meta(description="Same as the header X-Request-Id, which takes precedence.")
    ] = None
    session_id: SessionId = None
    prompt_cache_key: SessionId = None
    add_special_tokens: Annotated[
        bool | None,
        Meta(description="Add special tokens, such as BOS. Default: only to text."),
    ] = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def usage_in_chunks(self) -> bool:
        options = self.stream_options
        return options is not None and self.include_usage and bool(options.continuous_usage_stats)

    def named_id(self) -> str | None:
        return self.request_id

    def writer(self, request_id: str, made: Sequence[GenerateRequest]) -> Writer:
        first = made[0]
        form = AnswerForm(
            request_id,
            first.served_name,
            is_chat=isinstance(self, ChatRequest),
            token_ids=bool(self.return_token_ids),
            names_function=isinstance(getattr(self, "tool_choice", None), NamedTool),
        )
        if not self.stream:
            return WholeAnswer(form)
        return EventWriter(
            form,
            include_usage=self.include_usage,
            usage_in_chunks=self.usage_in_chunks,
            prompt_tokens=sum([len(x.prompt_token_ids) for x in made]),
            resumed_tokens=len(first.resume),
        )

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
        parsed.session = self.session_id or self.prompt_cache_key or ""
        if self.structured_outputs is None:
            parsed.constraint_field = "response_format"
        else:
            parsed.constraint_field = "structured_outputs"
        return parsed


# Fields that have the same name as a sampling parameter.
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
        bool | None, Meta(description="Repeat the prompt, with its logprobs if requested.")
    ] = None

    def parse(self, request_id: str) -> list[ParsedRequest]:
        n = self.n or 1
        prompts = prompts_of(self.prompt, "prompt", MAX_ANSWERS // n)
        if self.max_tokens == 0 and not self.echo:
            refuse("max_tokens", "must be at least 1 without echo")
        max_tokens = DEFAULT_MAX_TOKENS if self.max_tokens is None else max(1, self.max_tokens)
        parsed = []
        for i, prompt in enumerate(prompts):
            is_only = len(prompts) == 1
            one_id = request_id if is_only else f"{request_id}-{i}"
            one = self._parsed(prompt, one_id, max_tokens, self.logprobs)
            one.prompt_field = "prompt" if is_only else f"prompt[{i}]"
            one.prompts = len(prompts)
            if self.echo:
                one.echo, one.only_prompt = True, self.max_tokens == 0
                one.sampling.prompt_logprobs = self.logprobs
            parsed.append(one)
        if self.resume_token_ids and len(parsed) > 1:
            refuse("resume_token_ids", "requires one prompt")
        return parsed

    def without_prompt(self) -> GenerateBody:
        if self.echo:
            return self
        only = isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)
        return msgspec.structs.replace(self, prompt="-" if only else ["-"] * len(self.prompt))


@knows(KNOWN | KNOWN_OF_CHAT)
class ChatRequest(_TextBody, kw_only=True):
    """Body of POST /v1/chat/completions."""

    id_prefix: ClassVar[str] = "chatcmpl-"
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
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

    def without_prompt(self) -> GenerateBody:
        return msgspec.structs.replace(self, messages=[Message(role="user", content="-")])


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
