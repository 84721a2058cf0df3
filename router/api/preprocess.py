"""Turn what a client asked for, over HTTP or gRPC, into a checked and tokenised GenerateRequest."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from pdserve.errors import (
    ConfigError,
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotFound,
    Unavailable,
    UnsupportedField,
)
from pdserve.tokenizer import Conversation, TextPair
from pdserve.types import Constraint, GenerateRequest, Parsing, SamplingParams, ServiceClass

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence

    from pdserve.tokenizer import Tokenizer
    from pdserve.types import Adapter, ModelInfo, StructuredOutput
    from router.on_demand import OnDemandModels

logger = logging.getLogger(__name__)

# Longer texts are tokenised in a thread, so that they do not delay the tokens of other streams.
INLINE_CHARS = 2048
# Logprobs of one prompt, alternatives included: more would delay the tokens of other streams.
MAX_PROMPT_LOGPROBS = 1 << 15
# Stands for "what the context leaves" until the prompt's length is known.
OPEN_ENDED = 1 << 30
# Values of router.tool_call_parser and router.reasoning_parser that are no names of parsers.
AUTO, NONE = "auto", "none"
CHAT_ROLES = ("system", "developer", "user", "assistant", "tool")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


# Text, token ids, or a conversation that the model's chat template renders.
Prompt = str | tuple[int, ...] | Conversation


@dataclass(slots=True)
class ParsedRequest:
    """A request whose fields were checked one by one, without knowledge of the model.

    `given` names the sampling parameters that the client set. `sampling.max_tokens` is OPEN_ENDED
    if the client gave no length. `prompt_field` and `max_tokens_field` are the API's names, for
    errors.
    """

    model: str
    prompt: Prompt
    sampling: SamplingParams
    request_id: str
    timeout_s: float | None = None
    prompt_field: str = "prompt"
    max_tokens_field: str = "max_tokens"
    priority: int = 0
    service_class: ServiceClass = ServiceClass.INTERACTIVE
    resume: tuple[int, ...] = ()
    given: Collection[str] = ()
    add_special_tokens: bool | None = None  # by default to text, not to conversations
    cache_salt: str = ""
    echo: bool = False
    only_prompt: bool = False  # repeat the prompt and generate nothing
    # Fields of vLLM's chat request that say how the answer is parsed: tool_choice, ...
    parsing_options: Mapping[str, Any] = field(default_factory=dict)


class Origin(NamedTuple):
    """Who asks for embeddings, and until when, if not for as long as the router allows."""

    request_id: str
    tenant: str
    service_class: ServiceClass = ServiceClass.INTERACTIVE
    timeout_s: float | None = None


class Truncation(NamedTuple):
    """How many tokens of an input are used at most; of all its tokens the first (right) or the last
    ones (left), or as the tokenizer cuts texts."""

    most: int
    side: str | None

    def __call__(self, tokens: tuple[int, ...], second_at: int) -> tuple[tuple[int, ...], int]:
        """Cut all tokens of an input; `second_at` is where those of its second text begin."""
        gone = max(0, len(tokens) - self.most)
        if self.side == "left":
            return tokens[gone:], max(0, second_at - gone)
        return tokens[: self.most], min(second_at, self.most)


def new_request_id(prefix: str) -> str:
    return f"{prefix}{os.urandom(16).hex()}"


def check_request_id(request_id: str, *, field: str) -> str:
    """Return the client's id. Raises InvalidRequest if it is not safe in logs and headers."""
    if not _REQUEST_ID.fullmatch(request_id):
        raise InvalidRequest(
            f"'{field}' must be 1 to 128 letters, digits or ._:/+=- characters", field=field
        )
    return request_id


class Preprocessor:
    """Prepares requests for the models that `models` returns, and their LoRA adapters.

    `timeout_s` is the deadline of requests that give none, and the latest that one may give.
    `tool_parser` and `reasoning_parser` are keys of the router's configuration. The tokenizer of a
    model is made once, by `load`, when the first request needs it. Raises ConfigError for a parser
    that needs vLLM where there is none.
    """

    def __init__(
        self,
        models: Callable[[], Mapping[str, ModelInfo]],
        adapters: Callable[[], Mapping[str, Adapter]] = dict,
        on_demand: OnDemandModels | None = None,
        *,
        timeout_s: float,
        tool_parser: str = AUTO,
        reasoning_parser: str = AUTO,
        load: Callable[[ModelInfo], Coroutine[Any, Any, Tokenizer]],
    ) -> None:
        self._models = models
        self._adapters = adapters
        self._on_demand = on_demand
        self._timeout_s = timeout_s
        self._now = asyncio.get_running_loop().time
        self._tool_parser = tool_parser
        self._reasoning_parser = reasoning_parser
        self._has_vllm = find_spec("vllm") is not None
        for key, name in (
            ("tool_call_parser", tool_parser),
            ("reasoning_parser", reasoning_parser),
        ):
            if name not in (AUTO, NONE) and not self._has_vllm:
                text = f"router.{key}: {name} needs vLLM, which is not installed here"
                raise ConfigError(text, field=f"router.{key}")
        self._load = load
        self._tokenizers: dict[str, asyncio.Task[Tokenizer]] = {}  # by digest

    async def prepare(
        self, parsed: ParsedRequest, *, tenant: str = "", traceparent: str = ""
    ) -> GenerateRequest:
        """Raises ClientError naming the field, or Unavailable if no worker has registered."""
        timeout_s = self._timeout_s
        if parsed.timeout_s is not None:
            timeout_s = min(timeout_s, parsed.timeout_s)
        until = self._now() + timeout_s
        if self._on_demand is not None:
            await self._on_demand.wait_for(parsed.model, timeout_s)
        model, _ = self.find(parsed.model)
        sampling = _with_defaults(parsed, model.sampling_defaults)
        _check_ids(sampling.stop_token_ids, model, field="stop_token_ids")
        _check_ids(tuple(sampling.logit_bias), model, field="logit_bias")
        prompt = await self.tokenise(
            parsed.prompt, model, parsed.add_special_tokens, field=parsed.prompt_field
        )
        _check_ids(prompt, model, field=parsed.prompt_field)
        _check_scores(parsed, sampling, len(prompt))
        sampling = _fit(parsed, sampling, len(prompt), model)
        _check_resume(parsed.resume, sampling, model)
        parsing = None
        if isinstance(parsed.prompt, Conversation):
            parsing = await self._parsing(parsed, parsed.prompt, model)
            if parsing is not None and sampling.skip_special_tokens:
                # Markup may consist of special tokens.
                sampling = replace(sampling, skip_special_tokens=False)
        # It may have been unloaded or replaced while the prompt was tokenised.
        model, adapter = self.find(parsed.model)
        return GenerateRequest(
            request_id=parsed.request_id,
            model=model.name,
            prompt_token_ids=prompt,
            sampling=sampling,
            resume=parsed.resume,
            deadline=until,
            priority=parsed.priority,
            service_class=parsed.service_class,
            tenant=tenant,
            traceparent=traceparent,
            adapter=adapter,
            cache_salt=parsed.cache_salt,
            parsing=parsing,
        )

    async def _parsing(
        self, parsed: ParsedRequest, chat: Conversation, model: ModelInfo
    ) -> Parsing | None:
        """Return how the answer is parsed, or None if it has neither tool calls nor reasoning."""
        tokenizer = await self.tokenizer(model)
        fitting = tokenizer.parsers
        tools = fitting.tool_calls if self._tool_parser == AUTO else self._tool_parser
        reasoning = self._reasoning_parser
        if reasoning == AUTO:
            may_think = self._has_vllm and fitting.is_thinking(chat.variables)
            reasoning = fitting.reasoning if may_think else NONE
        tools = NONE if not chat.tools else tools
        if not (chat.tools or reasoning not in ("", NONE)):
            return None
        if chat.tools and tools in ("", NONE):
            text = f"'tools': no parser of tool calls is known for model {model.name}"
            if tools == NONE:
                text = "'tools': router.tool_call_parser is none"
            raise UnsupportedField(text, field="tools")
        if not self._has_vllm:
            text = "'tools': the router parses tool calls with vLLM, which is not installed there"
            raise UnsupportedField(text, field="tools")
        options = dict(parsed.parsing_options)
        if chat.variables:
            options["chat_template_kwargs"] = chat.variables
        if (constraint := parsed.sampling.structured_output) is not None:
            options |= _constraint_fields(constraint)
        if chat.tools:
            options["tools"] = chat.tools
        return Parsing(
            model.tokenizer,
            tokenizer.files,
            "" if tools == NONE else tools,
            "" if reasoning == NONE else reasoning,
            json.dumps(options),
            json.dumps({"chat_template_kwargs": chat.variables}),
        )

    async def embedding_request(
        self,
        prompt: str | tuple[int, ...] | TextPair,
        model: ModelInfo,
        origin: Origin,
        index: int,
        truncation: Truncation | None,
        *,
        field: str,
    ) -> GenerateRequest:
        """Return a request for the embedding of a prompt, or the score of a pair. Raises
        InvalidRequest, naming `field`, and ContextLengthExceeded with both lengths."""
        second_text_at = 0
        is_text = isinstance(prompt, (str, TextPair))
        if is_text and truncation is not None and truncation.side is None:
            encode = (await self.tokenizer(model)).encode_within
            texts = prompt if isinstance(prompt, TextPair) else [str(prompt)]
            tokens, second_text_at = await asyncio.to_thread(encode, texts, truncation.most)
        elif isinstance(prompt, TextPair):
            encode_pair = (await self.tokenizer(model)).encode_pair
            tokens, second_text_at = await asyncio.to_thread(encode_pair, prompt)
        else:
            tokens = await self.tokenise(prompt, model, None, field=field)
        if truncation is not None:
            tokens, second_text_at = truncation(tokens, second_text_at)
        _check_ids(tokens, model, field=field)
        if len(tokens) >= model.max_model_len:
            raise ContextLengthExceeded(
                f"an input has {len(tokens)} tokens, and the model takes {model.max_model_len - 1}",
                field=field,
            )
        return GenerateRequest(
            request_id=f"{origin.request_id}-{index}",
            model=model.name,
            prompt_token_ids=tokens,
            sampling=SamplingParams(max_tokens=1),
            deadline=self._now() + (origin.timeout_s or self._timeout_s),
            service_class=origin.service_class,
            tenant=origin.tenant,
            second_text_at=second_text_at,
        )

    def find(self, name: str) -> tuple[ModelInfo, Adapter | None]:
        """Return the model of this name, or the adapter with its model. Raises ModelNotFound."""
        models = self._models()
        if not models:
            raise Unavailable("no worker is registered", retry_after_s=1.0)
        if (found := find_model(models, name)) is not None:
            return found, None
        adapters = self._adapters()
        if (adapter := adapters.get(name)) is not None and adapter.model in models:
            return models[adapter.model], adapter
        if not name and len(models) == 1:
            return next(iter(models.values())), None
        names = [x for model in models.values() for x in model.names]
        served = ", ".join(sorted((*names, *adapters)))
        if not name:
            raise InvalidRequest(f"'model' is required; served: {served}", field="model")
        raise ModelNotFound(f"model {name!r} is not served; served: {served}", field="model")

    async def tokenise(
        self, prompt: Prompt, model: ModelInfo, add_special_tokens: bool | None, *, field: str
    ) -> tuple[int, ...]:
        """Return the prompt's token ids. `field` is its name, for errors."""
        if isinstance(prompt, tuple):
            return prompt
        tokenizer = await self.tokenizer(model)
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        if isinstance(prompt, str):
            chars, encode = len(prompt), partial(tokenizer.encode, prompt, **options)
        else:
            # Tools are long.
            chars = len(prompt.tools) * INLINE_CHARS
            chars += sum([len(message.content) for message in prompt.messages])
            encode = partial(tokenizer.encode_chat, prompt, **options)
        try:
            return encode() if chars <= INLINE_CHARS else await asyncio.to_thread(encode)
        except UnsupportedField:  # it has the name of its own field
            raise
        except InvalidRequest as error:
            error.field = field
            raise

    async def text(self, token_ids: Sequence[int], model: ModelInfo, *, field: str = "") -> str:
        """Return the text of token ids. `field` is their name, for errors."""
        _check_ids(token_ids, model, field=field)
        tokenizer = await self.tokenizer(model)
        decode = partial(tokenizer.decode, token_ids)
        is_short = len(token_ids) <= INLINE_CHARS
        return decode() if is_short else await asyncio.to_thread(decode)

    async def tokenizer(self, model: ModelInfo) -> Tokenizer:
        """Raises Unavailable if the model's tokenizer cannot be had; the next request tries
        again."""
        task = self._tokenizers.get(model.tokenizer)
        if task is None:
            served = {each.tokenizer for each in self._models().values()}
            self._tokenizers = {x: kept for x, kept in self._tokenizers.items() if x in served}
            task = self._tokenizers[model.tokenizer] = asyncio.create_task(self._load(model))
        try:
            # A client that leaves must not cancel the loading that other requests wait for.
            return task.result() if task.done() else await asyncio.shield(task)
        except (ConfigError, Unavailable) as error:
            self._tokenizers.pop(model.tokenizer, None)
            logger.error("tokenizer of model %s: %s", model.name, error)
            text = f"the router has no tokenizer of model {model.name}; send token ids"
            raise Unavailable(text) from error


def _constraint_fields(constraint: StructuredOutput) -> dict[str, Any]:
    """Return the fields of vLLM's chat request for a constraint."""
    match constraint.kind:
        case Constraint.JSON_SCHEMA:
            schema = {"name": "answer", "schema": json.loads(constraint.value)}
            return {"response_format": {"type": "json_schema", "json_schema": schema}}
        case Constraint.JSON_OBJECT:
            return {"response_format": {"type": "json_object"}}
        case Constraint.CHOICE:
            return {"structured_outputs": {"choice": constraint.choices}}
        case kind:
            return {"structured_outputs": {kind.value: constraint.value}}


def find_model(models: Mapping[str, ModelInfo], name: str) -> ModelInfo | None:
    """Return the model that has this name or alias. `models` are by their first name."""
    if name in models:
        return models[name]
    return next((model for model in models.values() if name in model.aliases), None)


def _with_defaults(parsed: ParsedRequest, defaults: Mapping[str, float]) -> SamplingParams:
    """Return the sampling parameters with the model's defaults for those that were not given."""
    missing: dict[str, Any] = {
        name: int(value) if name == "top_k" else value
        for name, value in defaults.items()
        if name not in parsed.given and name != "max_tokens"  # that is for `_fit`
    }
    return replace(parsed.sampling, **missing) if missing else parsed.sampling


def _check_ids(token_ids: Sequence[int], model: ModelInfo, *, field: str) -> None:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < model.vocab_size:
        wrong = next(x for x in token_ids if not 0 <= x < model.vocab_size)
        raise InvalidRequest(
            f"'{field}' has token id {wrong}; the model's ids are 0 to {model.vocab_size - 1}",
            field=field,
        )


def _check_scores(parsed: ParsedRequest, sampling: SamplingParams, prompt_tokens: int) -> None:
    if sampling.prompt_logprobs is None:
        return
    if parsed.resume:
        raise InvalidRequest(
            "'resume_token_ids' cannot be combined with logprobs of the prompt",
            field="resume_token_ids",
        )
    most = MAX_PROMPT_LOGPROBS // (sampling.prompt_logprobs + 1)
    if prompt_tokens > most:
        field = parsed.prompt_field
        raise InvalidRequest(
            f"'{field}' has {prompt_tokens} tokens; with logprobs of it and "
            f"{sampling.prompt_logprobs} alternatives it may have {most}",
            field=field,
        )


def _check_resume(resume: tuple[int, ...], sampling: SamplingParams, model: ModelInfo) -> None:
    field = "resume_token_ids"
    _check_ids(resume, model, field=field)
    if resume and sampling.n > 1:
        raise InvalidRequest(f"'{field}' requires n to be 1, not {sampling.n}", field=field)
    if len(resume) > sampling.max_tokens:
        raise InvalidRequest(
            f"'{field}' has {len(resume)} tokens; the answer may have {sampling.max_tokens}",
            field=field,
        )


def _fit(
    parsed: ParsedRequest, sampling: SamplingParams, prompt_tokens: int, model: ModelInfo
) -> SamplingParams:
    """Return the sampling parameters with a `max_tokens` that fits the context."""
    field, max_model_len = parsed.prompt_field, model.max_model_len
    if not prompt_tokens:
        raise InvalidRequest(f"'{field}' is empty", field=field)
    left = max_model_len - prompt_tokens
    if left < 1:
        raise ContextLengthExceeded(
            f"'{field}' has {prompt_tokens} tokens; the model's context is {max_model_len} tokens",
            field=field,
        )
    if sampling.max_tokens == OPEN_ENDED:
        most = int(model.sampling_defaults.get("max_tokens", left))
        return replace(sampling, max_tokens=min(left, most))
    if sampling.max_tokens > left:
        field = parsed.max_tokens_field
        raise ContextLengthExceeded(
            f"'{parsed.prompt_field}' has {prompt_tokens} tokens and '{field}' is "
            f"{sampling.max_tokens}; the model's context is {max_model_len} tokens",
            field=field,
        )
    return sampling
