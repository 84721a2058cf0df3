"""Bodies of OpenAI's chat and completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from pdserve.types import (
    MAX_LOGPROBS,
    Constraint,
    StructuredOutput,
)
from router.dialects.conversation import (
    Begins,
    Continues,
    Effort,
    IncludesReasoning,
    Message,
    NamedTool,
    ParallelCalls,
    ToolChoice,
    Tools,
    Variables,
    conversation,
    read_tools,
)
from router.dialects.fields import (
    KNOWN_OF_VLLM,
    MAX_MESSAGES,
    Count,
    GenerateBody,
    Ignored,
    JsonObjectFormat,
    Known,
    OpenAiBody,
    Strict,
    TextFormat,
    TokenId,
    TokenIds,
    json_schema,
    knows,
    not_supported,
    prompts_of,
    refuse,
)
from router.dialects.openai_writer import AnswerForm, EventWriter, WholeAnswer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.types import GenerateRequest
    from router.dialects.fields import Writer
    from router.dialects.parsed_request import ParsedRequest, Prompt

# Limit of answers to one request: prompts times n.
MAX_ANSWERS = 128
# OpenAI's default length of a completion.
DEFAULT_MAX_TOKENS = 16

_Logprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]

_OFF = Known((False,))
_EMPTY = Known(({}, []))
_NULL = Known()
_TEXT_ONLY = "only text is generated"
# Fields of OpenAI, vLLM 0.32 and SGLang for chat and completions.
KNOWN: dict[str, Known] = KNOWN_OF_VLLM | {
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
    "extra_key": Known((), "use cache_salt"),
    "input_ids": Known((), "use prompt"),
    "length_penalty": Known((1,)),
    "logprob_token_ids": _EMPTY,
    "lora_path": Known((), "name the adapter as the model"),
    "no_stop_trim": Known((False,), "use include_stop_str_in_output"),
    "prompt_embeds": _NULL,
    "prompt_logprobs": Known((), "use echo and logprobs of /v1/completions"),
    "regex": Known((), "use structured_outputs.regex"),
    "repetition_detection": _NULL,
    "return_cached_tokens_details": _OFF,
    "return_hidden_states": _OFF,
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
}
KNOWN_OF_COMPLETIONS: dict[str, Known] = {"suffix": Known(("",))}
KNOWN_OF_CHAT: dict[str, Known] = {
    "audio": Known((), _TEXT_ONLY),
    "documents": _EMPTY,
    "echo": Known((False,), "the prompt is not repeated"),
    "function_call": Known(("none",)),
    "functions": _NULL,
    "max_dynamic_patch": _NULL,
    "min_dynamic_patch": _NULL,
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


class _TextBody(OpenAiBody, kw_only=True):
    """Fields shared by chat and completions."""

    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=128, description="Number of answers.")] | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    return_token_ids: Annotated[
        bool | None,
        Meta(description="Return `token_ids` of the answer, and `prompt_token_ids`."),
    ] = None
    resume_token_ids: Annotated[
        TokenIds | None, Meta(description="Tokens of this answer that the client already has.")
    ] = None
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

    def writer(self, request_id: str, made: Sequence[GenerateRequest]) -> Writer:
        first = made[0]
        form = AnswerForm(
            request_id,
            first.served_name,
            is_chat=isinstance(self, ChatRequest),
            # They would tell the reasoning.
            token_ids=bool(self.return_token_ids)
            and getattr(self, "include_reasoning", None) is not False,
            names_function=isinstance(getattr(self, "tool_choice", None), NamedTool),
            prompts=[x.prompt_token_ids for x in made] if self.return_token_ids else (),
            n=self.n or 1,
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
        self,
        prompt: Prompt,
        max_tokens: int | None,
        given: dict[str, Any],
        own: dict[str, Any],
    ) -> ParsedRequest:
        if self.stream_options is not None and not self.stream:
            refuse("stream_options", "requires stream: true")
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            raise not_supported("stream_options.include_obfuscation")
        form, by_format = self.response_format, None
        if isinstance(form, JsonSchemaFormat):
            by_format = json_schema(form.json_schema.schema)
        elif isinstance(form, JsonObjectFormat):
            by_format = StructuredOutput(Constraint.JSON_OBJECT)
        if self.n is not None:
            given["n"] = self.n
        own["resume"] = tuple(self.resume_token_ids or ())
        own["add_special_tokens"] = self.add_special_tokens
        return self._request(prompt, max_tokens, (by_format, "response_format"), given, own)


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

    def parse(self) -> list[ParsedRequest]:
        n = self.n or 1
        prompts = prompts_of(self.prompt, "prompt", MAX_ANSWERS // n)
        if self.max_tokens == 0 and not self.echo:
            refuse("max_tokens", "must be at least 1 without echo")
        if self.resume_token_ids and len(prompts) > 1:
            refuse("resume_token_ids", "requires one prompt")
        max_tokens = None if self.max_tokens is None else max(1, self.max_tokens)
        scores = self.given("logprobs")
        if self.echo:
            scores["prompt_logprobs"] = self.logprobs
        parsed = []
        for i, prompt in enumerate(prompts):
            own = {
                "prompt_field": "prompt" if len(prompts) == 1 else f"prompt[{i}]",
                "prompts": len(prompts),
                "default_tokens": DEFAULT_MAX_TOKENS,
                "echo": bool(self.echo),
                "only_prompt": self.max_tokens == 0,
            }
            parsed.append(self._parsed(prompt, max_tokens, scores.copy(), own))
        return parsed

    def without_prompt(self) -> GenerateBody:
        if self.echo:
            return self
        prompt = self.prompt
        if isinstance(prompt, str) or not prompt:
            return msgspec.structs.replace(self, prompt="-")
        if isinstance(prompt[0], int):
            return msgspec.structs.replace(self, prompt=[0])
        kept: list[Any] = ["-" if isinstance(x, str) else [0] for x in prompt]
        return msgspec.structs.replace(self, prompt=kept)


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
    include_reasoning: IncludesReasoning = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: _Logprobs | None = None
    metadata: Ignored = None
    safety_identifier: Ignored = None
    store: Annotated[bool | None, Meta(description="Without effect: answers are not stored.")] = (
        None
    )

    def parse(self) -> list[ParsedRequest]:
        if self.top_logprobs is not None and not self.logprobs:
            refuse("top_logprobs", "requires logprobs: true")
        new, old = self.max_completion_tokens, self.max_tokens
        if new is not None and old is not None and new != old:
            refuse("max_tokens", f"is {old}, but max_completion_tokens is {new}")
        tools, options = read_tools(self.tools, self.tool_choice, self.parallel_tool_calls)
        options["stream"] = bool(self.stream)
        if self.include_reasoning is False:
            options["include_reasoning"] = False
        own = {
            "prompt_field": "messages",
            "max_tokens_field": "max_tokens" if new is None else "max_completion_tokens",
            "parsing_options": options,
        }
        scores = {"logprobs": self.top_logprobs or 0} if self.logprobs else {}
        most = old if new is None else new
        return [self._parsed(conversation(self, tools), most, scores, own)]

    def without_prompt(self) -> GenerateBody:
        return msgspec.structs.replace(self, messages=[Message(role="user", content="-")])
